"""Resources that are dropped while the recovery log has committed them (hazard C15)."""

import contextlib
import json
import shutil
import sqlite3
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.clock import SYSTEM_CLOCK
from penstock.connectors.sqlite.connector import SqliteConnector
from penstock.engine.preflight import plan_file
from penstock.errors import IndeterminateError, PenstockError
from penstock.failpoints import Action, Failpoint, armed
from penstock.materialize.backfill import LostResource
from penstock.materialize.errors import ConnectorRefused
from tests.chaos.defects import planted
from tests.materialize.lake import (
    KEYED,
    TU,
    Endpoint,
    Table,
    bring,
    materializing,
    once,
    row,
)
from tests.materialize.test_restored_lake import append_order, bring_orders, orders  # noqa: F401

LOST = 'resource "t" of materialization "local" does not exist any more'


def execute(folder: Path, statement: str) -> list[tuple[Any, ...]]:
    """Execute a statement in the SQLite endpoint."""
    with contextlib.closing(sqlite3.connect(folder / "t.db", timeout=60)) as database:
        rows = database.execute(statement).fetchall()
        database.commit()
        return rows


def tables(folder: Path) -> list[str]:
    return [name for (name,) in execute(folder, "SELECT name FROM sqlite_master") if name == "t"]


@pytest.mark.parametrize(
    "binding",
    [{}, {"delete": "soft"}, {"delta_updates": True, "delete": "ignore"}],
    ids=["hard", "soft", "delta"],
)
def test_start_with_dropped_table_is_rejected_until_backfill(
    lake: str, table: Table, tmp_path: Path, binding: Mapping[str, Any]
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    bring(lake, endpoint, tmp_path, **binding)
    execute(tmp_path, "DROP TABLE t")
    table.change()
    for _ in range(2):
        with pytest.raises(LostResource, match=LOST) as rejected:
            bring(lake, endpoint, tmp_path, **binding)
        assert "set the backfill of its binding to 1" in rejected.value.hint
        assert not tables(tmp_path)
    bring(lake, endpoint, tmp_path, **binding, backfill=1)
    if "delta_updates" not in binding:
        assert endpoint.rows() == table.contents()
    assert {each["id"] for each in endpoint.rows()} >= table.rows.keys()


def test_dropped_table_of_one_binding_raises_lost_resource_and_stores_nothing(
    lake: str, table: Table, tmp_path: Path
) -> None:
    other = table.client.create_or_load("shop.u", **KEYED)
    other.compare_and_append([(row(1), 0, 1)], 0, 20)
    endpoint = Endpoint("sqlite", tmp_path)
    bring(lake, endpoint, tmp_path, bindings=TU)
    before = endpoint.rows()
    execute(tmp_path, "DROP TABLE u")
    table.change()
    other.compare_and_append([(row(2), 20, 1)], 20, 40)
    with pytest.raises(LostResource, match='resource "u" of materialization "local"'):
        bring(lake, endpoint, tmp_path, bindings=TU)
    assert endpoint.rows() == before
    bring(lake, endpoint, tmp_path, bindings=[TU[0], {**TU[1], "backfill": 1}])
    assert endpoint.rows() == table.contents()
    assert [each["id"] for each in endpoint.rows("u")] == [1, 2]


def test_table_dropped_while_running_raises_lost_resource_at_restart(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with (
        materializing(lake, endpoint, tmp_path) as materialization,
        ThreadPoolExecutor(1) as pool,
    ):
        run = pool.submit(materialization.run, threading.Event(), once=False)
        while not materialization.status().transactions:
            SYSTEM_CLOCK.wait(threading.Event(), 5)
        execute(tmp_path, "DROP TABLE t")
        table.change()
        assert isinstance(run.exception(timeout=300), PenstockError)
    with pytest.raises(LostResource, match=LOST):
        bring(lake, endpoint, tmp_path)
    assert not tables(tmp_path)


def test_start_with_deleted_folder_is_rejected_until_backfill(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("plain-files", tmp_path)
    bring(lake, endpoint, tmp_path)
    shutil.rmtree(tmp_path / "files" / "t")
    table.change()
    with pytest.raises(LostResource, match=LOST):
        bring(lake, endpoint, tmp_path)
    bring(lake, endpoint, tmp_path, backfill=1)
    assert endpoint.rows() == table.contents()


CONTENTS = [("plain-files", "keys"), ("staged-files", "table.jsonl"), ("staged-files", "staged")]


def delete_contents(folder: Path, name: str) -> None:
    path = folder / "files" / "t" / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@pytest.mark.parametrize(("connector", "name"), CONTENTS)
def test_start_with_deleted_folder_contents_raises_lost_resource(
    lake: str, table: Table, tmp_path: Path, connector: str, name: str
) -> None:
    endpoint = Endpoint(connector, tmp_path)
    bring(lake, endpoint, tmp_path)
    delete_contents(tmp_path, name)
    table.change()
    for _ in range(2):
        with pytest.raises(LostResource, match=LOST) as lost:
            bring(lake, endpoint, tmp_path)
        # A backfill needs the staged files, because Acknowledge applies them first.
        assert ("set the backfill" in lost.value.hint) == (connector == "plain-files")
        assert ("name another resource" in lost.value.hint) == (connector == "staged-files")
    assert not (tmp_path / "files" / "t" / name).exists()
    if connector == "plain-files":
        bring(lake, endpoint, tmp_path, backfill=1)
        assert endpoint.rows() == table.contents()


@pytest.mark.parametrize(("connector", "name"), CONTENTS)
def test_folder_contents_deleted_while_running_stop_materialization(
    lake: str, table: Table, tmp_path: Path, connector: str, name: str
) -> None:
    endpoint = Endpoint(connector, tmp_path)
    with (
        materializing(lake, endpoint, tmp_path) as materialization,
        ThreadPoolExecutor(1) as pool,
    ):
        run = pool.submit(materialization.run, threading.Event(), once=False)
        while not materialization.status().transactions:
            SYSTEM_CLOCK.wait(threading.Event(), 5)
        delete_contents(tmp_path, name)
        table.change()
        assert isinstance(run.exception(timeout=300), PenstockError)
    assert not (tmp_path / "files" / "t" / name).exists()


def test_folder_of_older_version_without_contents_list_is_continued(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("staged-files", tmp_path)
    bring(lake, endpoint, tmp_path)
    resource = tmp_path / "files" / "t" / "resource.json"
    described = json.loads(resource.read_bytes())
    del described["contents"]
    resource.write_text(json.dumps(described))
    table.change()
    bring(lake, endpoint, tmp_path)
    assert endpoint.rows() == table.contents()


@pytest.mark.parametrize("step", [Failpoint.APPLY_DONE, Failpoint.PLAN_DONE])
def test_crash_before_first_commit_is_not_treated_as_lost_resource(
    lake: str, table: Table, tmp_path: Path, step: Failpoint
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with armed(step, Action.ERROR), pytest.raises(IndeterminateError):
        bring(lake, endpoint, tmp_path)
    bring(lake, endpoint, tmp_path)
    assert endpoint.rows() == table.contents()


@pytest.mark.parametrize("step", [Failpoint.APPLY_DONE, Failpoint.PLAN_DONE, Failpoint.STORE_DONE])
def test_table_dropped_after_crash_in_first_transaction_is_stored_completely(
    lake: str, table: Table, tmp_path: Path, step: Failpoint
) -> None:
    # After STORE_DONE the endpoint has committed, but the recovery log has no commit.
    endpoint = Endpoint("sqlite", tmp_path)
    with armed(step, Action.ERROR), pytest.raises(IndeterminateError):
        bring(lake, endpoint, tmp_path)
    execute(tmp_path, "DROP TABLE t")
    bring(lake, endpoint, tmp_path)
    assert endpoint.rows() == table.contents()


@pytest.mark.parametrize(
    "step",
    [
        Failpoint.APPLY_DONE,
        Failpoint.PLAN_DONE,
        Failpoint.STORE_DONE,
        Failpoint.RECOVERY_DONE,
        Failpoint.ACKNOWLEDGE_DONE,
    ],
)
def test_backfill_of_dropped_table_after_crash_at_each_step_equals_collection(
    lake: str, table: Table, tmp_path: Path, step: Failpoint
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    bring(lake, endpoint, tmp_path)
    execute(tmp_path, "DROP TABLE t")
    table.change()
    with armed(step, Action.ERROR), pytest.raises(IndeterminateError):
        bring(lake, endpoint, tmp_path, backfill=1)
    table.change()
    bring(lake, endpoint, tmp_path, backfill=1)
    assert endpoint.rows() == table.contents()


def test_backfill_reset_after_apply_created_table_loses_no_row(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    bring(lake, endpoint, tmp_path)
    execute(tmp_path, "DROP TABLE t")
    table.change()
    with armed(Failpoint.APPLY_DONE, Action.ERROR), pytest.raises(IndeterminateError):
        bring(lake, endpoint, tmp_path, backfill=1)
    assert execute(tmp_path, "SELECT count(*) FROM t") == [(0,)]
    bring(lake, endpoint, tmp_path)
    assert endpoint.rows() == table.contents()


def test_table_dropped_between_validate_and_apply_raises_connector_refused(
    lake: str, table: Table, tmp_path: Path
) -> None:
    class DropsTable(SqliteConnector):
        def apply(self, applying: Any) -> str:
            execute(tmp_path, "DROP TABLE t")
            return super().apply(applying)

    endpoint = Endpoint("sqlite", tmp_path)
    bring(lake, endpoint, tmp_path)
    table.change()
    with pytest.raises(ConnectorRefused, match='table "t" of materialization "local" does not'):
        bring(lake, endpoint, tmp_path, connector=DropsTable())
    assert not tables(tmp_path)
    with pytest.raises(LostResource, match=LOST):
        bring(lake, endpoint, tmp_path)


def test_dropped_table_with_several_shards_is_rejected_until_backfill_with_one_shard(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    bring(lake, endpoint, tmp_path, shards=2)
    execute(tmp_path, "DROP TABLE t")
    table.change()
    for backfill in (0, 1):
        with pytest.raises(LostResource, match=LOST) as rejected:
            bring(lake, endpoint, tmp_path, shards=2, backfill=backfill)
        assert "shards to 1" in rejected.value.hint
    bring(lake, endpoint, tmp_path, backfill=1)
    assert endpoint.rows() == table.contents()
    table.change()
    bring(lake, endpoint, tmp_path, shards=2, backfill=1)
    assert endpoint.rows() == table.contents()


def test_start_with_dropped_postgres_table_is_rejected_until_backfill(
    orders: Path,  # noqa: F811
    postgres_server: Any,
) -> None:
    database = postgres_server.create_database("lost")
    endpoint = {"url": database.url()}
    bring_orders(orders, endpoint=endpoint)
    database.sql("DROP TABLE a")
    append_order(orders, 3, 2_000, 3_000)
    with pytest.raises(LostResource, match=r'resource "public.a" of materialization "desk"'):
        bring_orders(orders, endpoint=endpoint)
    assert database.sql("SELECT to_regclass('public.a')") == [(None,)]
    bring_orders(orders, endpoint=endpoint, backfill=1)
    assert database.sql("SELECT id FROM a ORDER BY id") == [(1,), (2,), (3,)]
    database.drop()


def test_plan_reports_dropped_table(orders: Path) -> None:  # noqa: F811
    bring_orders(orders)
    with contextlib.closing(sqlite3.connect(orders / "desk.db")) as database:
        database.execute("DROP TABLE a")
        database.commit()
    [change] = [each for each in plan_file(orders / "f.yaml") if each.action == "refuse"]
    assert 'resource "a" of materialization "desk" does not exist any more' in str(change)
    assert "set the backfill of its binding to 1" in change.hint


def test_planted_bug_in_lost_resource_check_loses_rows(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path) as materialization:
        once(materialization)
    execute(tmp_path, "DROP TABLE t")
    table.change(1)
    with planted("lost_resource_created_again"):
        bring(lake, endpoint, tmp_path)
    assert len(endpoint.rows()) < len(table.contents())
