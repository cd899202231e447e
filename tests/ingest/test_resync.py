"""Compare a table with its collection as of one moment, and mend only what differs."""

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from penstock import persist
from penstock.cli.main import app
from penstock.clock import SYSTEM_CLOCK
from penstock.data import DIFF, TIME
from penstock.errors import UsageError
from penstock.persist import CollectionErrored
from penstock.persist.requests import send_request
from penstock.persist.store import open_store
from penstock.servers.postgres import Database
from penstock.sources.postgres.snapshot import SnapshotSplit
from tests.ingest.checker import broken, check, differing, histories
from tests.ingest.pump import SOURCE, Pump, until
from tests.ingest.scripted_ingest import ScriptedIngest
from tests.ingest.workload import SCHEMA, TABLES, Carrier, check_coins

TWO = """
CREATE TABLE keyed (id int PRIMARY KEY, v text, big text);
ALTER TABLE keyed ALTER big SET STORAGE EXTERNAL;
CREATE TABLE whole (id int, v text);
ALTER TABLE whole REPLICA IDENTITY FULL;
INSERT INTO keyed SELECT g, 'v', repeat('x', 3000) FROM generate_series(1, 500) g;
INSERT INTO whole SELECT g / 2, 'v' FROM generate_series(1, 500) g;
CREATE PUBLICATION penstock FOR TABLE keyed, whole;
"""


@pytest.fixture(autouse=True)
def heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.supervisor.request_queue.POLL_MS", 20)


@pytest.fixture
def pump(database: Database, tmp_path: Path) -> Iterator[Pump]:
    database.sql(TWO)
    with Pump(database, tmp_path) as pump:
        pump.settle()
        yield pump


def resync(pump: Pump, *tables: str) -> int:
    """Return the number of rows corrected."""
    blob = open_store(pump.storage, persist.Settings())
    said = send_request(
        blob, "resync", tables, clock=SYSTEM_CLOCK, rng=random.Random(), patience_ms=120_000
    )
    blob.close()
    assert said["done"], said
    return int(said["mended"])


def updates_after(pump: Pump, table: str, time: int) -> pa.Table:
    with pump.reader() as client:
        collection = client.collection(f"{SOURCE}.{table}")
        upper, splits = collection.upper, []
        with collection.listen(time) as listener:
            while listener.frontier < upper:
                found = listener.next_changes(timeout_ms=0)
                assert found is not None
                splits.append(found.arrow())
    return pa.concat_tables(splits)


def test_only_rows_that_differ_are_written(pump: Pump, database: Database) -> None:
    before = pump.settle()
    for table in ("keyed", "whole"):
        # Nothing of this is sent, and all of it within a tick, or the table is in error first.
        database.sql(
            f"""
            BEGIN;
            ALTER PUBLICATION penstock DROP TABLE {table};
            INSERT INTO {table} VALUES (1000, 'new');
            UPDATE {table} SET v = 'other' WHERE id = 7;
            DELETE FROM {table} WHERE id = 9;
            ALTER PUBLICATION penstock ADD TABLE {table};
            COMMIT;
            """
        )
    pump.settle()
    check(pump, database, ["public.keyed", "public.whole"])
    for table, (come, gone) in {"keyed": (2, 2), "whole": (3, 4)}.items():
        found = updates_after(pump, f"public.{table}", before)
        diffs = found.column(DIFF).to_pylist()
        assert sum(diff for diff in diffs if diff > 0) == come
        assert -sum(diff for diff in diffs if diff < 0) == gone
        assert len(set(found.column(TIME).to_pylist())) == 1


def test_what_is_equal_is_left_alone(pump: Pump, database: Database) -> None:
    database.sql("UPDATE keyed SET v = 'x' WHERE id < 10; DELETE FROM whole WHERE id < 10")
    before = pump.settle()
    resync(pump)
    resync(pump, "public.keyed")
    pump.settle()
    for table in ("public.keyed", "public.whole"):
        assert updates_after(pump, table, before).num_rows == 0
    check(pump, database, ["public.keyed", "public.whole"])


def test_an_error_ends_where_the_table_was_compared(pump: Pump, database: Database) -> None:
    before = pump.settle()
    database.sql("ALTER PUBLICATION penstock DROP TABLE keyed")
    failed = pump.settle()
    database.sql("DELETE FROM keyed WHERE id > 400; UPDATE keyed SET v = 'x' WHERE id < 10")
    database.sql("INSERT INTO whole VALUES (7, 'others go on')")
    database.sql("ALTER PUBLICATION penstock ADD TABLE keyed")
    still = pump.settle()
    assert resync(pump, "public.keyed") == 100 + 2 * 9
    after = pump.settle()
    with pump.reader() as client:
        collection = client.collection("shop.public.keyed")
        (span,) = collection.state.errors
        assert before < span.lower <= failed <= still < span.upper <= after
        assert len(collection.snapshot(span.lower - 1).arrow()) == 500
        for as_of in (span.lower, failed, still, span.upper - 1):
            with pytest.raises(CollectionErrored) as caught:
                collection.snapshot(as_of)
            assert caught.value.since == span.lower
        for as_of in (span.upper, after):
            assert len(collection.snapshot(as_of).arrow()) == 400
    check(pump, database, ["public.whole"])


def test_the_command(pump: Pump, database: Database) -> None:
    run = CliRunner().invoke
    told = run(app, ["resync", pump.location, "shop", "public.keyed", "--json"])
    assert (told.exit_code, told.output) == (
        0,
        '{"source":"shop","tables":["public.keyed"],"done":true,"left":{},"mended":0}\n',
    )
    told = run(app, ["resync", pump.location, "shop"])
    assert (told.exit_code, told.output) == (0, "shop: compared, 0 rows corrected\n")
    told = run(app, ["resync", pump.location, "shop", "public.other"])
    assert told.exit_code != 0
    assert 'source "shop" does not follow a table "public.other"' in str(told.exception)
    told = run(app, ["resync", pump.location, "market"])
    assert told.exit_code != 0
    assert 'has no source or materialization "market"' in str(told.exception)


def test_under_load_on_touched_keys(database: Database, tmp_path: Path) -> None:
    """Invariant 15."""
    database.sql(SCHEMA)
    with Pump(database, tmp_path) as pump, Carrier(database.url(), pause_ms=1) as carrier:
        pump.settle()
        for tables in ((), ("public.moved",), ("public.purse", "public.chest"), (), ()):
            resync(pump, *tables)
        carrier.stop()
        pump.settle()
        assert carrier.committed > 10
    check(pump, database, TABLES, check_coins)


def test_a_comparison_with_what_was_before_the_cut_is_caught(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug that invariant 15 is about, planted: rows of the tick itself are not counted."""
    database.sql(SCHEMA)
    ingest = ScriptedIngest(database, tmp_path, monkeypatch)
    try:
        ingest.start()
        assert ingest.pump is not None
        compared = persist.Client.difference
        monkeypatch.setattr(
            persist.Client,
            "difference",
            lambda *given, **named: compared(*given, **{**named, "staged": ()}),
        )
        with ingest.between_ticks():
            database.sql("INSERT INTO moved VALUES (5)")
            asking = threading.Thread(target=resync, args=(ingest.pump,))
            asking.start()
            SYSTEM_CLOCK.wait(threading.Event(), 300)  # The request is there when the tick comes.
        asking.join()
        ingest.pump.settle()
        assert differing(ingest.pump, database, TABLES) or broken(
            histories(ingest.pump, TABLES), check_coins
        )
    finally:
        ingest.close()


@pytest.mark.parametrize("rewrite", ["TRUNCATE", "ALTER TYPE"])
def test_a_table_that_is_rewritten_before_it_is_read(
    pump: Pump, database: Database, monkeypatch: pytest.MonkeyPatch, rewrite: str
) -> None:
    """To the snapshot it would be empty, which it never was."""
    statement = {
        "TRUNCATE": "TRUNCATE keyed; INSERT INTO keyed VALUES (1, 'v', 'only')",
        "ALTER TYPE": "ALTER TABLE keyed ALTER v TYPE text USING v || '!'",
    }[rewrite]
    read, left = SnapshotSplit.read, [statement]

    def late(split: SnapshotSplit, stop: Any = None) -> Iterator[pa.RecordBatch]:
        if left:
            database.sql(f"BEGIN; {left.pop()}; COMMIT")
        return read(split, stop)

    monkeypatch.setattr(SnapshotSplit, "read", late)
    resync(pump, "public.keyed")
    pump.settle()
    assert not left
    check(
        pump,
        database,
        ["public.keyed"],
        lambda state: None if state["public.keyed"] else "it is empty",
    )


def test_tables_that_stay_in_error_are_told(pump: Pump, database: Database) -> None:
    database.sql("ALTER TABLE keyed RENAME TO other")
    pump.settle()
    told = CliRunner().invoke(app, ["resync", pump.location, "shop"])
    assert told.output == "shop: compared, 0 rows corrected\n"
    assert str(told.exception) == 'tables of source "shop" were not compared: public.keyed'
    database.sql("ALTER TABLE other RENAME TO keyed")
    told = CliRunner().invoke(app, ["resync", pump.location, "shop", "--json"])
    assert told.exit_code == 0, told.exception
    said = {"source": "shop", "tables": [], "done": True, "left": {}, "mended": 0}
    assert json.loads(told.output) == said
    now = pump.settle()
    with pump.reader() as client:
        # Not its history: that leads through the error.
        rows = client.collection("shop.public.keyed").snapshot(now).arrow()
    held = Counter(zip(*(rows.column(name).to_pylist() for name in ("id", "v")), strict=True))
    assert held == Counter(database.sql("SELECT id, v FROM keyed"))
    check(pump, database, ["public.whole"])


def test_a_table_that_is_being_copied_is_told(
    pump: Pump, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, begun, go = SnapshotSplit.read, threading.Event(), threading.Event()

    def slow(split: SnapshotSplit, stop: Any = None) -> Iterator[pa.RecordBatch]:
        if split.table == "public.other":
            begun.set()
            assert go.wait(30)
        yield from read(split, stop)

    monkeypatch.setattr(SnapshotSplit, "read", slow)
    database.sql("CREATE TABLE other (id int PRIMARY KEY)")
    database.sql("ALTER PUBLICATION penstock ADD TABLE other")
    try:
        assert begun.wait(30)
        told = CliRunner().invoke(app, ["resync", pump.location, "shop", "public.other"])
        assert str(told.exception) == 'tables of source "shop" were not compared: public.other'
        assert "its initial snapshot is in progress" in told.exception.detail
    finally:
        go.set()
    until(lambda: "shop.public.other" in pump.collections(), "the copy")
    told = CliRunner().invoke(app, ["resync", pump.location, "shop", "public.other"])
    assert told.exit_code == 0, told.exception


def test_a_table_that_joins_holds_up_no_other(pump: Pump, database: Database) -> None:
    """Its slot waits for every transaction that was running; the others' ticks do not."""
    database.sql("CREATE TABLE elsewhere (i int)")
    with psycopg.connect(database.url()) as holding:
        holding.execute("INSERT INTO elsewhere VALUES (1)")
        database.sql("CREATE TABLE late (id int PRIMARY KEY); INSERT INTO late VALUES (1)")
        database.sql("ALTER PUBLICATION penstock ADD TABLE late")
        until(lambda: "server process" in pump.state()["status"]["waits_for"], "the slot to wait")
        database.sql("INSERT INTO keyed VALUES (501); INSERT INTO late VALUES (2)")
        time = pump.settle()
        with pump.reader() as client:
            keyed = client.collection(f"{SOURCE}.public.keyed").snapshot(time).arrow()
        assert 501 in keyed["id"].to_pylist()
        assert f"{SOURCE}.public.late" not in pump.collections()
    database.sql("INSERT INTO late VALUES (3); DELETE FROM late WHERE id = 1")
    until(lambda: f"{SOURCE}.public.late" in pump.collections(), "the copy")
    time = pump.settle()
    with pump.reader() as client:
        late = client.collection(f"{SOURCE}.public.late").snapshot(time).arrow()
    assert sorted(late["id"].to_pylist()) == [2, 3]


def test_once_ends_though_the_publication_is_gone(pump: Pump, database: Database) -> None:
    """And the server keeps no log for tables that nobody can follow."""
    pump.stop()
    database.sql("DROP PUBLICATION penstock; INSERT INTO keyed VALUES (501)")
    [(reached,)] = database.sql("SELECT pg_current_wal_insert_lsn()")
    process = pump.spawn("--once")
    assert process.wait(60) == 1, pump.output()
    assert 'source "shop" has tables in error: public.keyed, public.whole' in pump.output()
    phases = {each["phase"] for each in pump.state()["status"]["tables"]}
    assert phases == {"errored"}
    confirmed = f"SELECT bool_and(confirmed_flush_lsn >= '{reached}') FROM pg_replication_slots"
    assert database.sql(confirmed) == [(True,)]


def test_tables_of_a_dropped_publication_are_errored_until_they_are_resynced(
    pump: Pump, database: Database
) -> None:
    pump.stop()
    database.sql("DROP PUBLICATION penstock; INSERT INTO keyed VALUES (501)")
    pump.start()

    def errors() -> list[str]:
        return [each["error"] or "" for each in pump.state()["status"]["tables"]]

    until(lambda: len(errors()) == 2 and all(errors()), "errored tables")
    assert len(errors()) == 2
    assert all('publication "penstock"' in error for error in errors())
    assert pump.state()["fingerprint"]["publication"] is None
    pump.stop()
    database.sql("CREATE PUBLICATION penstock FOR TABLE keyed, whole")
    pump.start()
    pump.settle()
    assert all(errors()), "changes without a publication are not in the stream"
    assert resync(pump) == 1
    time = pump.settle()
    with pump.reader() as client:
        keyed = client.collection(f"{SOURCE}.public.keyed").snapshot(time).arrow()
    assert sorted(keyed["id"].to_pylist()) == [*range(1, 502)]
    until(lambda: not any(errors()), "no errored table")


def test_a_stop_does_not_wait_for_a_slot(
    pump: Pump, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was asked for is done after the next start."""
    monkeypatch.setattr("penstock.ingest.loop.VERIFY_MS", 200)
    database.sql("CREATE TABLE elsewhere (i int)")
    with psycopg.connect(database.url()) as holding:
        holding.execute("INSERT INTO elsewhere VALUES (1)")
        asking = threading.Thread(target=resync, args=(pump, "public.keyed"))
        asking.start()
        until(lambda: "server process" in pump.state()["status"]["waits_for"], "the slot to wait")
        stopping = threading.Thread(target=pump.stop)
        stopping.start()
        stopping.join(15)
        waited = stopping.is_alive()
    stopping.join()
    assert not waited
    assert pump.error is None
    assert pump.state()["status"]["waits_for"] == ""
    assert asking.is_alive()
    pump.start()
    asking.join()
    pump.settle()


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (
            [{"name": "public.keyed", "exclude": ["v"]}],
            "is tracked with exclude: [big], but the file has exclude: [v]",
        ),
        (
            [{"name": "public.keyed", "exclude": ["big"], "text": ["v"]}],
            "is tracked with text: [], but the file has text: [v]",
        ),
        (
            ["public.whole"],
            "is tracked, but missing in the file",
        ),
        ([{"name": "public.keyed", "exclude": ["big"]}, "public.whole"], ""),
    ],
)
def test_what_the_file_says_of_a_table_that_is_followed(
    database: Database, tmp_path: Path, tables: list[object], says: str
) -> None:
    database.sql(TWO)
    with Pump(database, tmp_path, tables=[{"name": "public.keyed", "exclude": ["big"]}]) as pump:
        pump.settle()
    pump = Pump(database, tmp_path, tables=tables)
    pump.start()
    if says:
        until(lambda: pump.error is not None, "the pump to end")
        with pytest.raises(UsageError) as raised:
            pump.stop()
        assert str(raised.value) == f'table "public.keyed" of source "shop" {says}'
    else:
        pump.settle()
        pump.stop()


def test_a_table_that_may_not_be_read_is_in_error_alone(database: Database, tmp_path: Path) -> None:
    database.sql(TWO)
    role = f"reader_{database.name}"
    database.sql(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'secret'")
    database.sql(f"GRANT SELECT ON keyed, whole TO {role}")
    url = database.url(user=role, password="secret", host="tcp")
    try:
        with Pump(database, tmp_path, url=url) as pump:
            pump.settle()
            database.sql(f"REVOKE SELECT ON keyed FROM {role}")
            told = CliRunner().invoke(app, ["resync", pump.location, "shop"])
            assert told.exit_code != 0
            assert isinstance(told.exception, UsageError)
            assert 'table "public.keyed" cannot be read' in told.exception.detail
            with pump.reader() as client:
                [failed] = client.collection("shop.public.keyed").state.errors
                assert f"GRANT SELECT ON public.keyed TO {role}" in failed.error.hint
            database.sql("INSERT INTO whole VALUES (7, 'the other one goes on')")
            pump.settle()
            check(pump, database, ["public.whole"])
            database.sql(f"GRANT SELECT ON keyed TO {role}; DELETE FROM keyed WHERE id < 100")
            resync(pump, "public.keyed")
            after = pump.settle()
            with pump.reader() as client:
                found = client.collection("shop.public.keyed").snapshot(after)
                assert sorted(each.data["id"] for each in found) == list(range(100, 501))
    finally:
        database.sql(f"DROP OWNED BY {role}; DROP ROLE {role}")
