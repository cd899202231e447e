"""Drops of sources and materializations: slot, publication, collections, tables, holds, names."""

import contextlib
import sqlite3
from pathlib import Path

import pytest

import penstock.ingest
import penstock.materialize
from penstock import persist
from penstock.catalog.objects import RequestedObject, known_objects, remove_object, update_catalog
from penstock.clock import SYSTEM_CLOCK
from penstock.engine.teardown import drop_object, drop_removed_tables
from penstock.errors import IndeterminateError, UsageError
from penstock.failpoints import Action, Failpoint, armed
from penstock.ingest.tasks import tasks_of
from penstock.materialize import LocalRunner
from penstock.persist.holds import list_holds
from penstock.persist.store import open_store
from penstock.pipeline import load, load_unresolved
from penstock.servers.postgres import Database

WRITER = "w"


class Shop:
    """Lake with a table that is materialized in SQLite."""

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
        penstock.materialize.run(self.file, jobs=LocalRunner(), once=True)
        written = load_unresolved(self.file)
        wanted = [RequestedObject("shop", "source", written["sources"]["shop"])]
        wanted += [RequestedObject("desk", "materialization", written["materializations"]["desk"])]
        wanted += [RequestedObject("shop_progress", "source_progress", owner="shop")]
        update_catalog(self.lake, lambda _: wanted)

    def drop(self, name: str, *, keep_target: bool = False) -> None:
        [known] = [each for each in known_objects(self.lake) if each.name == name]
        drop_object(known, self.lake, writer=WRITER, keep_target=keep_target)
        remove_object(known, self.lake)

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

    def batches(self) -> list[str]:
        """Return the keys of batches of the source and the materialization."""
        found = self.folder.glob("lake/*/batch/*/*")
        return [str(each) for each in found if "/catalog/" not in str(each)]

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
    assert made.batches()
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
def test_interrupted_drop_completes_when_repeated(shop: Shop, cut_short: bool) -> None:
    for name, points in PASSED.items():
        for point in points if cut_short else ():
            with armed(point, Action.ERROR), pytest.raises(IndeterminateError):
                shop.drop(name)
        shop.drop(name)
    assert shop.tables() == set()
    assert shop.holds() == []
    assert shop.slots() == []
    assert shop.publications() == []
    assert shop.collections() == []
    assert shop.batches() == []
    assert known_objects(shop.lake) == []


def test_drop_with_keep_target_keeps_tables_and_drops_holds(shop: Shop) -> None:
    shop.drop("desk", keep_target=True)
    assert shop.tables() == {"a"}
    assert shop.holds() == []
    assert [each.name for each in known_objects(shop.lake)] == ["shop", "shop_progress"]


def test_dropped_objects_can_be_created_again(shop: Shop) -> None:
    ids = {each.id for each in known_objects(shop.lake)}
    shop.drop("desk")
    shop.drop("shop")
    shop.bring()
    assert shop.tables() == {"a"}
    assert ids.isdisjoint(each.id for each in known_objects(shop.lake))


def test_drop_keeps_a_foreign_publication(shop: Shop) -> None:
    shop.database.sql("COMMENT ON PUBLICATION penstock IS 'of the analysts'")
    shop.drop("shop")
    assert shop.slots() == []
    assert shop.publications() == ["penstock"]


def follow_with_another(shop: Shop, name: str = "store") -> Path:
    """Ingest the same tables into another lake with the same publication; return its file."""
    other = shop.folder / "other"
    other.mkdir()
    file = other / "other.yaml"
    text = shop.file.read_text().replace("shop:", f"{name}:")
    text = text.replace(shop.lake, f"file:{other}/lake")
    file.write_text(text.partition("materializations:")[0])
    penstock.ingest.run(file, once=True)
    return file


def test_publication_is_dropped_with_its_last_source(shop: Shop) -> None:
    file = follow_with_another(shop)
    shop.drop("shop")
    assert shop.publications() == ["penstock"]
    assert len(shop.slots()) == 1
    [task] = tasks_of(load(file), jobs=None)
    with persist.open(task.url, writer=WRITER) as client:
        task.drop(client, False)
    assert shop.slots() == []
    assert shop.publications() == []


@pytest.mark.parametrize("name", ["store", "shop"], ids=["of another name", "of the same name"])
def test_table_of_another_source_stays_published(shop: Shop, name: str) -> None:
    follow_with_another(shop, name)
    shop.write("[public.a]")
    drop_removed_tables("shop", load(shop.file), clock=SYSTEM_CLOCK)
    assert "shop.public.b" not in shop.collections()
    assert shop.published() == {"a", "b"}


def test_drop_keeps_publication_of_same_source_name_in_another_lake(shop: Shop) -> None:
    file = follow_with_another(shop, "shop")
    for slot in shop.slots():
        shop.database.sql("SELECT pg_drop_replication_slot(%s)", [slot])
    file.write_text(file.read_text().replace(", public.b]", "]"))
    drop_removed_tables("shop", load(file), clock=SYSTEM_CLOCK)
    assert shop.published() == {"a", "b"}


def test_table_can_be_removed_with_publication_for_all_tables(shop: Shop) -> None:
    [(comment,)] = shop.database.sql(
        "SELECT obj_description(oid, 'pg_publication') FROM pg_publication"
    )
    shop.database.sql(
        "DROP PUBLICATION penstock; CREATE PUBLICATION penstock FOR ALL TABLES;"
        f"COMMENT ON PUBLICATION penstock IS '{comment}'"
    )
    shop.write("[public.a]")
    drop_removed_tables("shop", load(shop.file), clock=SYSTEM_CLOCK)
    assert "shop.public.b" not in shop.collections()


def test_removed_table_is_unpublished_and_added_table_is_published(shop: Shop) -> None:
    shop.database.sql("CREATE TABLE c (id int PRIMARY KEY); INSERT INTO c VALUES (7)")
    shop.write("[public.a, public.c]")
    with pytest.raises(UsageError, match="is tracked, but missing in the file"):
        penstock.ingest.run(shop.file, once=True)
    drop_removed_tables("shop", load(shop.file), clock=SYSTEM_CLOCK)
    drop_removed_tables("shop", load(shop.file), clock=SYSTEM_CLOCK)
    assert "shop.public.b" not in shop.collections()
    penstock.ingest.run(shop.file, once=True)
    assert shop.published() == {"a", "c"}
    with persist.open(f"{shop.lake}/shop", hold=False) as client:
        found = client.collection("shop.public.c")
        assert found.snapshot(found.upper - 1).arrow().column("id").to_pylist() == [7]


def test_kafka_source_is_dropped_without_its_secrets_and_files(tmp_path: Path) -> None:
    """Nothing was created upstream, and the folder of the pipeline file is unknown."""
    lake = f"file:{tmp_path}/lake"
    section = {
        "brokers": "127.0.0.1:1",
        "topic": "clicks",
        "format": {"avro": {"schema": "not-there.avsc"}},
        "sasl": {"mechanism": "PLAIN", "username": "u", "password": "kept nowhere"},
    }
    update_catalog(lake, lambda _: [RequestedObject("clicks", "source", {"kafka": section})])
    with persist.open(f"{lake}/clicks", writer=WRITER) as client:
        client.create_or_load("clicks", key=persist.TEXT, value=persist.UNIT, owner="clicks")
    [known] = known_objects(lake)
    drop_object(known, lake, writer=WRITER)
    with persist.open(f"{lake}/clicks", hold=False) as client:
        assert client.collections(hidden=True) == []


def test_drop_with_missing_secret_raises_usage_error(shop: Shop) -> None:
    said = {"postgres": {"url": "postgresql://u:(not kept)@h/d"}}
    [known] = update_catalog(shop.lake, lambda _: [RequestedObject("old", "source", said)])
    with pytest.raises(UsageError, match="cannot be dropped") as refused:
        drop_object(known, shop.lake, writer=WRITER)
    assert "does not store secrets" in refused.value.detail


def test_drop_with_unset_variable_names_it(shop: Shop) -> None:
    said = {"postgres": {"url": "postgresql://u:${NOT_THERE}@h/d"}}
    [known] = update_catalog(shop.lake, lambda _: [RequestedObject("old", "source", said)])
    with pytest.raises(UsageError) as refused:
        drop_object(known, shop.lake, writer=WRITER, environment={})
    assert "${NOT_THERE}" in refused.value.detail
