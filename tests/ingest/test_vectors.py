"""The vectors of family G that are about a whole source, ours where our rule is stronger."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
import yaml

import penstock.ingest
from penstock import persist
from penstock.data.remap_form import POSTGRES
from penstock.errors import DefiniteError
from penstock.reclock import accumulate
from penstock.servers.postgres import Database
from penstock.sources.postgres.errors import HistoryRewound, NotReady
from penstock.sources.postgres.identity import (
    Fork,
    ForkedAfter,
    ForkedBefore,
    Identity,
    compare_history,
)
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.pgoutput import Chunk
from penstock.sources.postgres.snapshot import page_ranges
from penstock.sources.postgres.stream_reader import Run, StreamReader
from tests.ingest.checker import check
from tests.ingest.pump import SOURCE, Pump
from tests.ingest.scripted_ingest import ScriptedIngest

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "materialize.json").read_text())


def vector(id: str) -> dict[str, Any]:
    (found,) = [each for each in VECTORS["cases"] if each["id"] == id]
    return found


@pytest.fixture
def ingest(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ScriptedIngest]:
    ingest = ScriptedIngest(database, tmp_path, monkeypatch)
    yield ingest
    ingest.close()


class Heard:
    """Counts the rows that a tail hands out."""

    def __init__(self) -> None:
        self.count = 0

    def rows(self, chunk: Chunk, run: Run) -> None:
        self.count += len(run.rows)

    def relation(self, relation: object) -> None:
        raise AssertionError

    def truncated(self, truncate: object, transaction: object) -> None:
        raise AssertionError


class OneTransaction:
    """A stream of one transaction."""

    def __init__(self, commit_lsn: int, end_lsn: int, rows: int) -> None:
        self._chunk: Chunk | None = Chunk(
            buffer=np.zeros(0, np.uint8),
            kind=np.full(rows, ord("I"), np.uint8),
            relation=np.full(rows, 1, np.uint32),
            old_kind=np.zeros(rows, np.uint8),
            old_at=np.full(rows, -1),
            new_at=np.zeros(rows, np.int64),
            transaction=np.zeros(rows, np.int32),
            commit_lsn=np.array([commit_lsn]),
            end_lsn=np.array([end_lsn]),
            xid=np.array([7], np.uint32),
            committed_us=np.array([0]),
            marks=[],
            mark_transaction=np.zeros(0, np.int32),
            wal_end=end_lsn,
            reply_requested=False,
        )

    def read(self, timeout_s: float) -> Chunk | None:
        chunk, self._chunk = self._chunk, None
        return chunk

    def confirm(self, flush: Lsn, *, reply: bool = False) -> None:
        pass


def test_g02_a_bound_holds_what_committed_below_it() -> None:
    given, expected = vector("G02")["given"], vector("G02")["expect"]
    stream = OneTransaction(given["commit_lsn"], given["end_lsn"], given["rows"])
    heard, tail = Heard(), StreamReader(stream, durable=0, last=None)
    tail.read_up_to(expected["row_time"], heard)
    assert heard.count == 0
    tail.read_up_to(expected["upper"], heard)
    assert heard.count == given["rows"]


def test_g25_another_timeline_is_taken_only_if_it_has_all_that_we_hold() -> None:
    given = vector("G25")["given"]
    expected, actual, durable = given["expected"], given["actual"], Lsn(900)
    stored = Identity(system_id=1, timeline=expected, xlogpos=Lsn(900))

    def found(fork: int) -> Identity:
        history = (Fork(expected, Lsn(fork)),)
        return Identity(system_id=1, timeline=actual, xlogpos=Lsn(2000), history=history)

    assert isinstance(compare_history(stored, found(fork=899), durable), ForkedBefore)
    assert issubclass(HistoryRewound, DefiniteError)
    assert isinstance(compare_history(stored, found(fork=900), durable), ForkedAfter)


def test_g27_ranges_of_pages() -> None:
    runs, expected = vector("G27")["given"]["runs"], vector("G27")["expect"]["ranges"]
    for run, ranges in zip(runs, expected, strict=True):
        # Ours leaves out workers that would be idle.
        wanted = [tuple(each) for each in ranges if isinstance(each, list)] or [(0, None)]
        assert page_ranges(run["blocks"], run["workers"]) == wanted


def test_g20_a_publication_that_does_not_send_everything_is_refused(
    database: Database, tmp_path: Path
) -> None:
    """No retraction of a row that never came can arise."""
    publish = vector("G20")["given"]["publish"]
    database.sql(
        "CREATE TABLE t (id int PRIMARY KEY);"
        f"CREATE PUBLICATION penstock FOR TABLE t WITH (publish = '{publish}')"
    )
    pump = Pump(database, tmp_path)
    pump.start()
    error = pump.await_error()
    assert isinstance(error, NotReady)
    assert "does not send every insert" in str(error)


def test_g17_g18_transactions(ingest: ScriptedIngest, database: Database) -> None:
    database.sql(
        """
        CREATE TABLE t1 (f int); ALTER TABLE t1 REPLICA IDENTITY FULL;
        CREATE TABLE t2 (id int PRIMARY KEY); CREATE TABLE t3 (id int PRIMARY KEY);
        CREATE PUBLICATION penstock FOR ALL TABLES; INSERT INTO t1 VALUES (3), (4);
        """
    )
    ingest.start()
    pump = ingest.pump
    assert pump is not None
    given, expected = vector("G17")["given"], vector("G17")["expect"]
    with psycopg.connect(database.url()) as connection:
        connection.execute("DELETE FROM t1")
        connection.execute("INSERT INTO t1 VALUES (5)")
        time = pump.settle()
        with pump.reader() as client:
            found = client.collection(f"{SOURCE}.public.t1").snapshot(time).arrow()
        assert sorted(map(str, found.column("f").to_pylist())) == given["before"]
        assert given["before"] == expected["visible_before_commit"]
    time = pump.settle()
    with pump.reader() as client:
        found = client.collection(f"{SOURCE}.public.t1").snapshot(time).arrow()
    assert list(map(str, found.column("f").to_pylist())) == expected["visible_after"]
    history = check(pump, database, ["public.t1"])["public.t1"]
    assert len(history.changes) == 2, "what was there from the start, and one change"

    rows = vector("G18")["given"]["txn"]
    database.sql(";".join(f"INSERT INTO {table} VALUES ({value})" for table, value in rows))
    found = check_after(pump, database, [f"public.{table}" for table, _ in rows])
    times = {max(history.changes) for history in found.values()}
    assert len(times) == vector("G18")["expect"]["distinct_timestamps"]


def check_after(pump: Pump, database: Database, tables: list[str]) -> dict[str, Any]:
    pump.settle()
    return check(pump, database, tables)


def test_g12_g08_nothing_is_seen_before_every_copy_is_passed(
    ingest: ScriptedIngest, database: Database
) -> None:
    database.sql(
        "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY);"
        "INSERT INTO a VALUES (1); CREATE PUBLICATION penstock FOR ALL TABLES"
    )
    ingest.hold()
    ingest.start()
    pump = ingest.pump
    assert pump is not None
    database.sql("INSERT INTO b VALUES (1)")
    assert not pump.collections()
    assert not pump.upper()
    ingest.release()
    pump.settle()
    check(pump, database, ["public.a", "public.b"])
    pump.stop()
    notes = pump.state()
    snapshots = [note["snapshot_lsn"] for name, note in notes.items() if name.startswith("table/")]
    with pump.reader() as client:
        remap = client.collection(f"{SOURCE}_remap")
        (begin,) = {client.collection(name).since for name in pump.collections()}
        first = remap.snapshot(begin).arrow()
        assert not len(remap.snapshot(begin - 1).arrow())
    assert max(snapshots) <= accumulate(POSTGRES, first)[()]
    # All outputs of ours move together, so there is one position to resume from, and the
    # server has not been told of more.
    (confirmed,) = database.sql(
        "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots"
        " WHERE database = current_database()"
    )[0]
    assert int(confirmed) <= notes["streamed"]["lsn"]


def test_g29_two_sources_on_one_publication(database: Database, tmp_path: Path) -> None:
    database.sql(
        "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1), (2);"
        "CREATE PUBLICATION penstock FOR TABLE t"
    )
    file = tmp_path / "two.yaml"
    sources = {name: {"postgres": {"url": database.url()}} for name in ("one", "two")}
    file.write_text(
        yaml.safe_dump({"location": f"file:{tmp_path}/lake", "tick": "50ms", "sources": sources})
    )
    penstock.ingest.run(file, once=True)
    database.sql("INSERT INTO t VALUES (3)")
    penstock.ingest.run(file, once=True)
    for name in sources:
        with persist.open(f"file:{tmp_path}/lake/{name}", hold=False) as client:
            collection = client.collection(f"{name}.public.t")
            found = collection.snapshot(collection.upper - 1).arrow()
        assert sorted(found.column("id").to_pylist()) == [1, 2, 3]
    slots = database.sql(
        "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
    )
    assert len(slots) == vector("G29")["given"]["sources"] == vector("G29")["expect"]["slots"]


def test_g30_a_slot_that_was_dropped_while_we_were_away(database: Database, tmp_path: Path) -> None:
    """Nothing is taken from a slot that begins too late; ours compares all tables as well."""
    database.sql(
        "CREATE TABLE t (id int PRIMARY KEY, v text);"
        "INSERT INTO t SELECT g, 'v' FROM generate_series(1, 9) g;"
        "CREATE PUBLICATION penstock FOR TABLE t"
    )
    pump = Pump(database, tmp_path)
    with pump:
        pump.settle()
    first = pump.state()["slot"]["name"]
    database.sql("SELECT pg_drop_replication_slot(%s)", [first])
    database.sql("UPDATE t SET v = 'away' WHERE id = 1; DELETE FROM t WHERE id = 2")
    with pump:
        pump.settle()
        database.sql("INSERT INTO t VALUES (10, 'back')")
        pump.settle()
    check(pump, database, ["public.t"])
    assert pump.state()["slot"]["name"] != first
