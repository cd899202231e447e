"""`plan` and the checks of `up`: every problem is found, and nothing is created."""

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.catalog.diff import Change
from penstock.engine import apply
from penstock.engine.preflight import plan_file
from penstock.errors import UsageError
from penstock.materialize.binding_kind import RowsKind
from penstock.materialize.spec_builder import _check_deletes
from penstock.pipeline.file import MaterializationSection
from penstock.protocol.messages import ValidatedBinding
from penstock.protocol.specs import CollectionSpec
from penstock.servers.postgres import Database
from tests.engine.test_apply import NOBODY, Shop

KAFKA = """
  clicks:
    kafka: {brokers: "127.0.0.1:1", topic: clicks, format: json, envelope: none}
"""


@pytest.fixture
def shop(tmp_path: Path, database: Database) -> Shop:
    return Shop(tmp_path, database)


def pipeline(
    shop: Shop, endpoint: str, *, more: str = "", options: str = "", name: str = ""
) -> str:
    return f"""sources:
{shop.source("shop", options or "tables: [public.a]")}{more}
materializations:
  local:
    connector: {name or "sqlite"}
    endpoint: {endpoint}
    bindings:
      - {{collection: shop.public.a, resource: {{table: orders}}}}
"""


def problems(shop: Shop, rest: str) -> list[Change]:
    found = [each for each in plan_file(shop.write(rest)) if each.is_problem]
    assert shop.slots() == 0
    assert shop.database.sql("SELECT 1 FROM pg_publication") == []
    assert all(each.hint for each in found), found
    return found


def test_plan_with_missing_sqlite_folder_reports_the_folder(shop: Shop) -> None:
    path = shop.folder / "nowhere" / "shop.db"
    [problem] = problems(shop, pipeline(shop, f"{{path: {path}}}"))
    assert f'folder "{path.parent}" of SQLite database "shop.db" does not exist' in problem.what
    assert f"mkdir -p {path.parent}" in problem.hint
    assert not path.parent.exists()


def test_plan_with_a_file_that_is_no_database_reports_it(shop: Shop) -> None:
    path = shop.folder / "shop.db"
    path.write_text("this is a text file, and not a database " * 100)
    [problem] = problems(shop, pipeline(shop, f"{{path: {path}}}"))
    assert "file is not a database" in problem.what


@contextmanager
def unprivileged() -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_sqlite_session_without_create_rejects_a_read_only_file(tmp_path: Path) -> None:
    from penstock.connectors.sqlite.session import SqliteSession
    from penstock.sdk.errors import Refused

    folder = Path("/tmp") / f"penstock-test-{os.getpid()}-{tmp_path.name}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    path = folder / "shop.db"
    SqliteSession(path).close()
    path.chmod(0o444)
    try:
        with unprivileged(), pytest.raises(Refused, match="is not readable and writable"):
            SqliteSession(path, create=False)
        path.chmod(0o666)
        folder.chmod(0o555)
        with unprivileged(), pytest.raises(Refused, match="is not writable"):
            SqliteSession(path, create=False)
    finally:
        folder.chmod(0o777)
        for each in folder.iterdir():
            each.unlink()
        folder.rmdir()


def test_first_plan_reports_a_table_that_exists_with_other_columns(shop: Shop) -> None:
    shop.database.sql("CREATE SCHEMA target; CREATE TABLE target.orders (other text)")
    endpoint = json.dumps({"url": shop.database.url(), "schema": "target"})
    [problem] = problems(shop, pipeline(shop, endpoint, name="postgres"))
    assert 'table "target.orders" exists' in problem.what
    assert "adopt: true" in problem.hint


def test_plan_and_up_report_every_problem_and_up_creates_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Spark starts while the checks run, and would stay in the process of the tests.
    monkeypatch.setattr(apply, "_warm", lambda _: None)
    endpoint = json.dumps({"host": "localhost", "port": "abc", "user": "u", "databse": "d"})
    rest = pipeline(shop, endpoint, more=KAFKA, name="postgres")
    found = {(each.action, each.name): each for each in problems(shop, rest)}
    assert set(found) == {("unreachable", "clicks"), ("refuse", "local")}
    whats = [each.what for each in problems(shop, rest)]
    assert any('value of key "port" of endpoint' in what for what in whats)
    hints = [each.hint for each in problems(shop, rest)]
    assert any(hint.endswith("penstock connector spec postgres") for hint in hints), hints
    assert any('has a key "databse", which does not exist' in what for what in whats)
    with pytest.raises(UsageError, match="cannot be run: 3 problems") as refused:
        apply.run(shop.file, once=True)
    assert len(refused.value.problems) == 3
    assert 'Did you mean "database"?' in refused.value.detail
    assert "\n   hint: " in refused.value.detail
    assert shop.slots() == 0
    assert shop.names() == {}


def test_plan_with_an_unreachable_server_still_checks_the_endpoint(shop: Shop) -> None:
    rest = pipeline(shop, f"{{path: {shop.folder}/nowhere/shop.db}}")
    rest = rest.replace(shop.database.url(), NOBODY)
    found = [(each.action, each.name) for each in problems(shop, rest)]
    assert sorted(found) == [("refuse", "local"), ("unreachable", "shop")]


def test_plan_lists_the_columns_that_are_omitted_with_the_reason(shop: Shop) -> None:
    shop.database.sql(
        'CREATE TABLE wide (id int PRIMARY KEY, name text, "Name" text, photo bytea,'
        " twice int GENERATED ALWAYS AS (id * 2) STORED)"
    )
    rest = pipeline(
        shop,
        f"{{path: {shop.folder}/shop.db}}",
        options="tables: [{name: public.wide, exclude: [photo]}]",
    ).replace("shop.public.a,", "shop.public.wide,")
    notes = [each.what for each in plan_file(shop.write(rest)) if each.action == "note"]
    assert (
        "collection shop.public.wide omits column photo: it is excluded in the pipeline file"
        in notes
    )
    assert any("omits column twice: it is a generated column" in note for note in notes)
    assert any("resource orders omits column Name: column" in note for note in notes), notes
    assert not (shop.folder / "shop.db").exists()


def test_hard_deletes_of_a_connector_without_deletes_are_rejected() -> None:
    binding = {"collection": "shop.public.a", "resource": {"table": "t"}}
    described = [(CollectionSpec("shop.public.a"), RowsKind(("id",)))]
    answers = [ValidatedBinding({}, ("t",), False, accepts_delete=False)]

    def check(append_only: Collection[str] = (), **options: Any) -> None:
        said = {"connector": "mine", "bindings": [{**binding, **options}]}
        section = MaterializationSection.model_validate(said)
        _check_deletes("local", section, described, answers, append_only)

    with pytest.raises(UsageError, match='connector "mine" of materialization "local"') as refused:
        check()
    assert '"shop.public.a"' in str(refused.value)
    assert "delete: ignore" in refused.value.hint
    assert "delete: soft" in refused.value.hint
    check(delete="ignore")
    check(delete="soft")
    check(delta_updates=True)
    check(append_only=["shop.public.a"])
