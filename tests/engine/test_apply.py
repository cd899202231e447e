"""`up` with complete files: rejected changes have no effect, others are applied."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import persist
from penstock.catalog.diff import Change
from penstock.catalog.inspect import ListedCollection, list_collections
from penstock.catalog.objects import RequestedObject, known_objects, to_requested, update_catalog
from penstock.engine import apply
from penstock.engine.preflight import plan_file
from penstock.errors import DefiniteError, UsageError
from penstock.persist.errors import LockHeld
from penstock.pipeline import load
from penstock.servers.postgres import Database
from penstock.sources.postgres.source import PostgresSource
from penstock.sources.source import CollectionOutline

NOBODY = "postgresql://u@127.0.0.1:1/d"
"""URL without a server."""


class Lake:
    """Lake and its pipeline file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"file:{folder}/lake"
        self.file = folder / "shop.yaml"

    def write(self, rest: str = "", *, writer: str = "a") -> Path:
        self.file.write_text(f"location: {self.url}\nwriter: {writer}\ntick: 100ms\n{rest}")
        return self.file

    def names(self) -> dict[str, str]:
        return {each.name: each.id for each in known_objects(self.url)}


class Shop(Lake):
    """Two tables and their sources."""

    def __init__(self, folder: Path, database: Database) -> None:
        super().__init__(folder)
        self.database = database
        database.sql("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")

    def run(self, *sources: str, writer: str = "a", allow_drop: bool = False) -> bool:
        rest = "sources:\n" + "".join(sources) if sources else ""
        file = self.write(rest, writer=writer)
        return apply.run(file, types=("source",), once=True, allow_drop=allow_drop)

    def source(self, name: str, options: str = "tables: [public.a]") -> str:
        return f"  {name}:\n    postgres: {{url: '{self.database.url()}', {options}}}\n"

    def slots(self) -> int:
        return len(self.database.sql(SLOTS))


SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


@pytest.fixture
def shop(tmp_path: Path, database: Database) -> Shop:
    return Shop(tmp_path, database)


def test_up_records_all_objects_in_catalog(shop: Shop) -> None:
    assert shop.run(shop.source("shop"))
    assert set(shop.names()) == {"shop", "shop.public.a", "shop_progress", "shop_remap"}


def test_up_without_lock_records_nothing(shop: Shop) -> None:
    shop.run(shop.source("shop"))
    before = known_objects(shop.url)
    altered = shop.source("shop", "tables: [public.a], slot_warning: 777")
    with persist.open(f"{shop.url}/shop", writer="a"):
        with pytest.raises(LockHeld):
            shop.run(altered, writer="b")
        assert known_objects(shop.url) == before
    shop.run(altered, writer="b")
    assert "777" in str(known_objects(shop.url))


def test_up_without_lock_drops_nothing(shop: Shop) -> None:
    shop.run(shop.source("left"))
    shop.run(shop.source("left"), shop.source("shop"))
    with persist.open(f"{shop.url}/shop", writer="a"), pytest.raises(LockHeld):
        shop.run(shop.source("shop"), writer="b", allow_drop=True)
    assert "left.public.a" in shop.names()
    assert shop.slots() == 2
    shop.run(shop.source("shop"), allow_drop=True)
    assert "left.public.a" not in shop.names()
    assert shop.slots() == 1


def test_collection_listed_by_another_process_keeps_its_id(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[str] = []

    def listed(location: str) -> frozenset[ListedCollection]:
        found = list_collections(location)
        if not ids:  # Another process creates and records a collection at this point.
            with persist.open(f"{shop.url}/other", writer="x") as client:
                client.create_or_load("other.t", key=persist.TEXT, value=persist.TEXT)
            there = RequestedObject("other.t", "collection")
            made = update_catalog(shop.url, lambda known: [*to_requested(known), there])
            ids.extend(each.id for each in made if each.name == "other.t")
        return found

    monkeypatch.setattr(apply, "list_collections", listed)
    shop.run(shop.source("shop"))
    assert [shop.names()["other.t"]] == ids


def test_removed_tables_are_dropped_with_allow_drop(shop: Shop) -> None:
    shop.database.sql("CREATE PUBLICATION penstock FOR TABLE a, b")
    shop.run(shop.source("shop", "publication: penstock"))
    assert {"shop.public.a", "shop.public.b"} <= set(shop.names())
    with pytest.raises(UsageError, match=r"table public\.b is removed") as refused:
        shop.run(shop.source("shop"))
    assert "--allow-drop" in refused.value.hint
    assert shop.run(shop.source("shop"), allow_drop=True)
    assert "shop.public.b" not in shop.names()


def test_dropped_table_without_entry_in_file_is_removed_from_source(shop: Shop) -> None:
    both = shop.source("shop", "tables: [public.a, public.b]")
    assert shop.run(both)
    shop.database.sql("DROP TABLE b; INSERT INTO a VALUES (1)")
    with pytest.raises(DefiniteError, match=r"tables in error: public\.b") as errored:
        shop.run(both)
    assert 'table public.b of postgres source "shop" was dropped' in errored.value.detail
    assert "remove it from tables in the file" in errored.value.hint
    assert shop.run(shop.source("shop"), allow_drop=True)
    assert "shop.public.b" not in shop.names()
    with persist.open(f"{shop.url}/shop", hold=False) as client:
        rows = client.collection("shop.public.a")
        assert [row.data for row in rows.snapshot(rows.upper - 1)] == [{"id": 1}]


def test_existing_source_is_not_checked_again(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    check = PostgresSource.check

    def seen(self: PostgresSource, *, started: bool) -> Sequence[CollectionOutline]:
        asked.append(started)
        return check(self, started=started)

    monkeypatch.setattr(PostgresSource, "check", seen)
    shop.run(shop.source("shop"))
    shop.run(shop.source("shop", "tables: [public.a], slot_warning: 777"))
    assert asked == [False, True]


def test_file_without_tasks_drops_all_and_ends(shop: Shop) -> None:
    shop.run(shop.source("shop"))
    with pytest.raises(UsageError, match='the file would drop source "shop"'):
        shop.run()
    assert not shop.run(allow_drop=True)
    assert known_objects(shop.url) == []
    assert shop.slots() == 0
    with pytest.raises(UsageError, match="nothing to run"):
        shop.run(allow_drop=True)


def test_name_of_another_type_is_rejected(lake: Lake) -> None:
    said = {"connector": "sqlite", "bindings": []}
    update_catalog(lake.url, lambda _: [RequestedObject("shop", "materialization", said)])
    file = lake.write(f"sources: {{shop: {{postgres: {{url: '{NOBODY}'}}}}}}")
    with pytest.raises(UsageError, match="belong to a materialization"):
        apply.run(file, allow_drop=True)


def bound(collection: str, connector: str = "sqlite") -> str:
    return f"""
sources:
  shop:
    postgres: {{url: "{NOBODY}", tables: ['public."Odd Name"', '"sh""op".a']}}
materializations:
  desk:
    connector: {connector}
    endpoint: {{path: desk.db}}
    bindings:
      - {{collection: '{collection}', resource: {{table: t}}}}
"""


def planned_actions(lake: Lake, rest: str) -> list[Any]:
    found = plan_file(lake.write(rest))
    return [(each.action, each.what) for each in found if each.type == "materialization"]


def test_collection_with_quoted_name_can_be_bound(lake: Lake) -> None:
    for name in ("shop.public.Odd Name", 'shop."sh""op".a'):
        assert {action for action, _ in planned_actions(lake, bound(name))} == {"create", "note"}
    [wrong] = [each for each in plan_file(lake.write(bound("shop.public.odd"))) if refused(each)]
    assert 'source "shop" makes no collection "shop.public.odd"' in wrong.what
    assert "Did you mean shop.public.Odd Name?" in wrong.hint
    [wrong] = [each for each in plan_file(lake.write(bound("shp.public.a"))) if refused(each)]
    assert 'no source "shp" to make it' in wrong.what
    assert "Did you mean shop.public.a?" in wrong.hint


def refused(change: Change) -> bool:
    return (change.action, change.type) == ("refuse", "materialization")


def test_missing_connector_is_the_only_problem_of_its_materialization(
    lake: Lake,
) -> None:
    said = {"connector": "sqlite", "bindings": []}
    update_catalog(lake.url, lambda _: [RequestedObject("desk", "materialization", said)])
    rest = bound("shop.public.Odd Name", "sqllite")
    [wrong] = [each for each in plan_file(lake.write(rest)) if each.type == "materialization"]
    assert refused(wrong)
    assert wrong.what == 'connector "sqllite" does not exist'
    assert wrong.hint.startswith("The built-in connectors are ")
    starts: list[None] = []
    with pytest.raises(UsageError, match="cannot be run: 2 problems") as raised:
        apply.run(lake.file, spark_starts=lambda: starts.append(None), stop=threading.Event())
    first, second = raised.value.problems
    assert 'is refused: connector "sqllite" does not exist' in first.message
    assert 'source "shop" is unreachable' in second.message
    assert starts == []


@pytest.fixture
def owner(lake: Lake) -> Iterator["subprocess.Popen[str]"]:
    """Yield a process of this host that holds the lock of source "shop" as "a"."""
    script = f"import sys, penstock.persist as p; c = p.open('{lake.url}/shop', writer='a'); "
    script += "print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


SHOP = f"sources: {{shop: {{postgres: {{url: '{NOBODY}', tables: [public.a]}}}}}}"


def test_up_of_a_writer_that_runs_on_this_host_is_rejected_and_changes_nothing(
    lake: Lake, owner: "subprocess.Popen[str]"
) -> None:
    before = sorted(path for path in lake.folder.rglob("*") if path.is_file())
    with pytest.raises(LockHeld, match='is being written by another process of "a"') as refused:
        apply.run(lake.write(SHOP), stop=threading.Event())
    assert f"Process {owner.pid} of this host runs. It took the lock at 20" in refused.value.detail
    assert refused.value.hint == f"Stop it: kill {owner.pid}. Or replace it: --take-over."
    assert sorted(path for path in lake.folder.rglob("*") if path.is_file()) == [
        *before,
        lake.file,
    ]


def test_up_with_take_over_or_after_a_kill_may_take_the_lock(
    lake: Lake, owner: "subprocess.Popen[str]"
) -> None:
    pipeline = load(lake.write(SHOP))
    with pytest.raises(LockHeld):
        apply.check_not_running(pipeline, apply.BOTH, take_over=False)
    apply.check_not_running(pipeline, apply.BOTH, take_over=True)
    apply.check_not_running(pipeline, ("materialization",), take_over=False)
    owner.kill()
    owner.wait()
    apply.check_not_running(pipeline, apply.BOTH, take_over=False)


def test_open_without_take_over_keeps_running_process(
    lake: Lake, owner: "subprocess.Popen[str]"
) -> None:
    with pytest.raises(LockHeld, match='another process of "a"'):
        persist.open(f"{lake.url}/shop", writer="a", take_over=False)
    with persist.open(f"{lake.url}/shop", writer="a") as client:
        assert client.epoch == 2
