"""What is dropped is gone everywhere: slot, publication, collections, target, holds, names."""

import contextlib
import sqlite3
from pathlib import Path

import pytest

import penstock.ingest
import penstock.materialize
from penstock import persist
from penstock.catalog.objects import Wanted, catalogued, forget_object, known_objects
from penstock.clock import SYSTEM_CLOCK
from penstock.engine.dropping import drop_object, leave_tables
from penstock.errors import IndeterminateError, UsageError
from penstock.failpoints import Action, Failpoint, tripped
from penstock.materialize import TasksHere
from penstock.persist.holds import list_holds
from penstock.persist.lake import open_store
from penstock.pipeline import load, load_written
from penstock.testing.postgres import Database

WRITER = "w"


class Shop:
    """A lake that has followed a table into SQLite."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.database = database
        self.folder = folder
        self.lake = f"file:{folder}/lake"
        self.file = folder / "shop.yaml"
        database.sql(
            "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY);"
            "INSERT INTO a SELECT generate_series(1, 20); INSERT INTO b VALUES (1)"
        )
        self.write("[public.a, public.b]")

    def write(self, tables: str) -> None:
        self.file.write_text(f"""
location: {self.lake}
writer: {WRITER}
tick: 100ms
sources:
  shop:
    postgres: {{url: "{self.database.url()}", tables: {tables}}}
materializations:
  desk:
    connector: sqlite
    endpoint: {{path: {self.folder}/desk.db}}
    bindings:
      - {{collection: shop.public.a, resource: {{table: a}}}}
""")

    def bring(self) -> None:
        penstock.ingest.run(self.file, once=True)
        penstock.materialize.run(self.file, jobs=TasksHere(), once=True)
        written = load_written(self.file)
        wanted = [Wanted("shop", "source", written["sources"]["shop"])]
        wanted += [Wanted("desk", "materialization", written["materializations"]["desk"])]
        wanted += [Wanted("shop_progress", "source_progress", owner="shop")]
        catalogued(self.lake, lambda _: wanted)

    def drop(self, name: str, **options: bool) -> None:
        [known] = [each for each in known_objects(self.lake) if each.name == name]
        drop_object(known, self.lake, writer=WRITER, **options)
        forget_object(known, self.lake)

    def slots(self) -> list[str]:
        return [
            name
            for (name,) in self.database.sql(
                "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
            )
        ]

    def publications(self) -> list[str]:
        return [name for (name,) in self.database.sql("SELECT pubname FROM pg_publication")]

    def published(self) -> set[str]:
        return {
            name for (name,) in self.database.sql("SELECT tablename FROM pg_publication_tables")
        }

    def collections(self) -> list[str]:
        with persist.open(f"{self.lake}/shop", hold=False) as client:
            return client.collections(hidden=True)

    def holds(self) -> list[str]:
        blob = open_store(f"{self.lake}/shop", persist.Settings())
        try:
            return [hold.owner for _, hold in list_holds(blob).values()]
        finally:
            blob.close()

    def tables(self) -> set[str]:
        with contextlib.closing(sqlite3.connect(self.folder / "desk.db")) as there:
            rows = there.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
            return {name for (name,) in rows} & {"a", "b"}


@pytest.fixture
def shop(tmp_path: Path, database: Database) -> Shop:
    made = Shop(tmp_path, database)
    made.bring()
    assert made.slots()
    assert made.publications() == ["penstock"]
    assert made.holds() == ["materialize-desk"]
    assert made.tables() == {"a"}
    return made


PASSED = {
    "desk": [Failpoint.TARGET_DELETED, Failpoint.HOLD_DROPPED, Failpoint.DROP_DONE],
    "shop": [Failpoint.SLOT_DROPPED, Failpoint.DROP_DONE],
}


@pytest.mark.parametrize("cut_short", [False, True], ids=["at once", "cut short"])
def test_all_of_it_goes_however_often_it_is_cut_short(shop: Shop, cut_short: bool) -> None:
    for name, points in PASSED.items():
        for point in points if cut_short else ():
            with tripped(point, Action.ERROR), pytest.raises(IndeterminateError):
                shop.drop(name)
        shop.drop(name)
    assert shop.tables() == set()
    assert shop.holds() == []
    assert shop.slots() == []
    assert shop.publications() == []
    assert shop.collections() == []
    assert known_objects(shop.lake) == []


def test_a_target_is_kept_if_asked_and_history_is_let_go(shop: Shop) -> None:
    shop.drop("desk", keep_target=True)
    assert shop.tables() == {"a"}
    assert shop.holds() == []
    assert [each.name for each in known_objects(shop.lake)] == ["shop", "shop_progress"]


def test_what_was_dropped_can_be_made_anew(shop: Shop) -> None:
    ids = {each.id for each in known_objects(shop.lake)}
    shop.drop("desk")
    shop.drop("shop")
    shop.bring()
    assert shop.tables() == {"a"}
    assert ids.isdisjoint(each.id for each in known_objects(shop.lake))


def test_a_publication_of_somebody_else_stays(shop: Shop) -> None:
    shop.database.sql("COMMENT ON PUBLICATION penstock IS 'of the analysts'")
    shop.drop("shop")
    assert shop.slots() == []
    assert shop.publications() == ["penstock"]


def test_a_publication_that_another_source_may_need_stays(shop: Shop) -> None:
    other = shop.folder / "other"
    other.mkdir()
    file = other / "other.yaml"
    text = shop.file.read_text().replace("shop:", "store:").replace(shop.lake, f"file:{other}/lake")
    file.write_text(text.partition("materializations:")[0])
    penstock.ingest.run(file, once=True)
    shop.drop("shop")
    assert shop.publications() == ["penstock"]
    assert len(shop.slots()) == 1


def test_a_table_that_is_left_out_goes_and_one_that_joins_is_published(shop: Shop) -> None:
    shop.database.sql("CREATE TABLE c (id int PRIMARY KEY); INSERT INTO c VALUES (7)")
    shop.write("[public.a, public.c]")
    with pytest.raises(UsageError, match="does not name it any more"):
        penstock.ingest.run(shop.file, once=True)
    leave_tables("shop", load(shop.file), clock=SYSTEM_CLOCK)
    leave_tables("shop", load(shop.file), clock=SYSTEM_CLOCK)
    assert "shop.public.b" not in shop.collections()
    penstock.ingest.run(shop.file, once=True)
    assert shop.published() == {"a", "c"}
    with persist.open(f"{shop.lake}/shop", hold=False) as client:
        found = client.collection("shop.public.c")
        assert found.snapshot(found.upper - 1).arrow().column("id").to_pylist() == [7]


def test_a_secret_that_was_not_kept_is_asked_for(shop: Shop) -> None:
    said = {"postgres": {"url": "postgresql://u:(not kept)@h/d"}}
    [known] = catalogued(shop.lake, lambda _: [Wanted("old", "source", said)])
    with pytest.raises(UsageError, match="cannot be reached to be dropped") as refused:
        drop_object(known, shop.lake, writer=WRITER)
    assert "not kept" in refused.value.detail


def test_a_variable_that_is_not_set_is_named(shop: Shop) -> None:
    said = {"postgres": {"url": "postgresql://u:${NOT_THERE}@h/d"}}
    [known] = catalogued(shop.lake, lambda _: [Wanted("old", "source", said)])
    with pytest.raises(UsageError) as refused:
        drop_object(known, shop.lake, writer=WRITER, environment={})
    assert "${NOT_THERE}" in refused.value.detail
