"""Bugs that somebody could write are planted, and the checker catches each.

A scenario runs twice: as the code is, and with the bug. It must pass the one
time and fail the other, or it proves nothing.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.errors import PenstockError
from penstock.failpoints import Action, Failpoint, armed
from penstock.ingest.snapshot_loader import SnapshotLoad
from penstock.ingest.tick_transaction import TickTransaction
from penstock.pgclient import connect
from penstock.pgclient import connection as pgclient_connection
from penstock.servers.postgres import Database
from penstock.sources.postgres import old_rows, tick_reader
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.pending_changes import decode_changes, encode_changes
from penstock.sources.postgres.replication_stream import ReplicationStream
from penstock.sources.postgres.server import SourceServer
from penstock.sources.postgres.slots import create_slot
from penstock.sources.postgres.source import PostgresSource
from penstock.sources.postgres.stream_reader import Run, StreamReader, decode
from penstock.sources.postgres.table_schema import build_table
from penstock.sources.postgres.tick_reader import TickReader
from penstock.sources.source import Probe
from tests.ingest.checker import check, histories
from tests.ingest.pump import Pump, until
from tests.ingest.workload import SCHEMA, TABLES, Carrier, check_coins

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture
def shop(database: Database) -> Database:
    database.sql(SCHEMA)
    return database


@contextmanager
def fails_if(planted: bool) -> Iterator[None]:
    """What is within must fail if there is a bug, and must not if there is none."""
    if not planted:
        yield
        return
    with pytest.raises((AssertionError, PenstockError)):
        yield


# Invariants 9 and 11: at every tick, over all tables.


def under_load(shop: Database, folder: Path) -> None:
    with Pump(shop, folder) as pump, Carrier(shop.url(), pause_ms=1) as carrier:
        for _ in range(3):
            pump.settle()
        carrier.stop()
        pump.settle()
    check(pump, shop, TABLES, check_coins)


def reveals_one_by_one(patch: pytest.MonkeyPatch) -> None:
    make_visible = TickReader.make_tables_visible

    def one_by_one(self: TickReader, bound: int) -> None:
        table_set = self._table_set
        tables = table_set.tables
        for oid, tracked in [*tables.items()]:
            table_set.tables = {oid: tracked}
            make_visible(self, bound)
        table_set.tables = tables

    patch.setattr(TickReader, "make_tables_visible", one_by_one)


def splits_a_transaction(patch: pytest.MonkeyPatch) -> None:
    flush, finish, ticks = TickReader.flush, TickReader.finish, [0]

    def late(self: TickReader, following: Any) -> None:
        if not following.table.name.endswith("chest") or ticks[0] % 2:
            flush(self, following)

    def next_tick(self: TickReader) -> None:
        finish(self)
        ticks[0] += 1

    patch.setattr(TickReader, "flush", late)
    patch.setattr(TickReader, "finish", next_tick)


def looks_up_only_what_is_committed(patch: pytest.MonkeyPatch) -> None:
    lookup = TickTransaction.lookup

    def committed(self: TickTransaction, collection: str, keys: Any) -> Any:
        loose, self._of(collection).loose = self._of(collection).loose, []
        try:
            return lookup(self, collection, keys)
        finally:
            self._of(collection).loose = loose

    patch.setattr(TickTransaction, "lookup", committed)


def finds_old_rows_by_new_keys(patch: pytest.MonkeyPatch) -> None:
    right = old_rows.resolve

    def wrong(changes: Any, *rest: Any, **named: Any) -> Any:
        updates = changes.kind == ord("U")
        old_row = changes.old_row.copy()
        old_row[updates & ~changes.whole] = -1
        return right(replace(changes, old_row=old_row), *rest, **named)

    patch.setattr(tick_reader, "resolve", wrong)


@pytest.mark.parametrize(
    "plant",
    [
        None,
        reveals_one_by_one,
        splits_a_transaction,
        looks_up_only_what_is_committed,
        finds_old_rows_by_new_keys,
    ],
)
def test_every_tick_is_a_state_that_was(
    shop: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant | None
) -> None:
    # Copies end at different ticks, and a tick resolves messages in many turns.
    done, asked = SnapshotLoad.done, dict[int, list[int]]()

    def later(self: SnapshotLoad) -> bool:
        turns = asked.setdefault(id(self), [0, 3 * (len(asked) % 3)])
        turns[0] += 1
        return done(self) and turns[0] > turns[1]

    monkeypatch.setattr(SnapshotLoad, "done", later)
    monkeypatch.setattr(tick_reader, "GATHER_BYTES", 1)
    if plant is not None:
        plant(monkeypatch)
    with fails_if(plant is not None):
        under_load(shop, tmp_path)


@pytest.mark.parametrize("planted", [False, True])
def test_values_are_printed_alike(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    database.sql(
        """
        CREATE TABLE item (id int PRIMARY KEY, span interval);
        ALTER TABLE item REPLICA IDENTITY FULL;
        INSERT INTO item VALUES (1, '1 day 2 hours'), (2, '-3 mons');
        CREATE PUBLICATION penstock FOR ALL TABLES;
        """
    )
    if planted:
        left = {
            key: value for key, value in pgclient_connection.SETTINGS.items() if "Style" not in key
        }
        monkeypatch.setattr(pgclient_connection, "SETTINGS", left)
    pump = Pump(database, tmp_path)
    with pump:
        pump.settle()
    database.sql(f"ALTER DATABASE {database.name} SET intervalstyle = 'iso_8601'")
    with fails_if(planted):
        with pump:
            database.sql("UPDATE item SET id = id + 10")
            pump.settle()
        check(pump, database, ["public.item"])


# Invariant 10: snapshot + stream = source.


def test_a_commit_at_the_consistent_point_is_in_the_stream(database: Database) -> None:
    database.sql(
        """
        CREATE TABLE item (who int, number int, PRIMARY KEY (who, number));
        CREATE PUBLICATION penstock FOR ALL TABLES;
        """
    )
    wrong = 0
    with writing(database, 3):
        for creation in range(200):
            if creation >= 40 and wrong:
                break
            here, at, past = created_under_load(database, f"penstock_t_{creation:04}")
            assert gaps(here, at) == 0
            wrong += gaps(here, past) > 0
    assert wrong, "with <= for < at the consistent point nothing was lost, so this proves nothing"


@contextmanager
def writing(database: Database, writers: int) -> Iterator[None]:
    """Several write numbers, each its own, one after the other without a gap."""
    connections = [psycopg.connect(database.url(), autocommit=True) for _ in range(writers)]

    def write(who: int) -> None:
        # In the server, so that there are commits all the time whatever Python does.
        with suppress(psycopg.errors.QueryCanceled):
            connections[who].execute(
                f"""
                DO $$ DECLARE number int := 0; BEGIN
                  SET synchronous_commit = off;
                  LOOP
                    number := number + 1; INSERT INTO item VALUES ({who}, number); COMMIT;
                  END LOOP;
                END $$
                """.encode()
            )

    threads = [threading.Thread(target=write, args=[who]) for who in range(writers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for connection, thread in zip(connections, threads, strict=True):
            connection.cancel_safe()
            thread.join()
            connection.close()


LATEST = """
SELECT who, (SELECT max(number) FROM public.item WHERE item.who = w.who)
FROM generate_series(0, 9) AS w (who)
"""

Rows = set[tuple[int, int]]
Last = dict[int, int]


def created_under_load(database: Database, name: str) -> tuple[Last, Rows, Rows]:
    """The rows of a new slot's snapshot; of its stream from its consistent point; past it."""
    with connect(database.url(), replication=True) as replication:
        slot = create_slot(replication, name, temporary=True)
        with connect(database.url()) as other:
            other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            other.execute(f"SET TRANSACTION SNAPSHOT '{slot.snapshot}'")
            here = {int(who or 0): int(last or 0) for who, last in other.query(LATEST)}
        point = slot.consistent_point
        table = build_table("t", *described(database))
        kept = []
        with ReplicationStream(
            replication, slot=name, start=point, publications=["penstock"]
        ) as stream:
            while sum(len(each) for each in kept) < 8:
                chunk = stream.read(1.0)
                if chunk is not None and len(chunk.kind):
                    run = Run(table.oid, (chunk.relation == table.oid).nonzero()[0])
                    changes = decode(chunk, run, table, len(table.wire))
                    kept.append(
                        encode_changes(changes, run.commit_lsns(chunk), order=len(kept) << 32)
                    )
        found = []
        for from_lsn in (point.position, point.position + 1):
            rows: Rows = set()
            for each in kept:
                for changes in decode_changes(each, from_lsn=from_lsn):
                    assert changes is not None
                    columns = changes.new.to_pydict()
                    rows |= set(zip(columns["who"], columns["number"], strict=True))
            found.append(rows)
        return here, found[0], found[1]


def described(database: Database) -> tuple[Any, Any]:
    from penstock.sources.postgres.catalog import published_tables
    from penstock.sources.postgres.config import TableSpec

    with connect(database.url()) as connection:
        [table] = published_tables(connection, "penstock")
    return table, TableSpec(table.table_name)


def gaps(here: Last, then: Rows) -> int:
    """How many numbers are missing, or come again, between what was here and what came then."""
    first: Last = {}
    for who, number in then:
        first[who] = min(number, first.get(who, number))
    return sum(abs(number - here.get(who, 0) - 1) for who, number in first.items())


# Invariant 12, and where a tick ends.


def confirms_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    read_up_to = StreamReader.read_up_to

    def hasty(self: StreamReader, bound: int, handler: Any) -> bool:
        is_complete = read_up_to(self, bound, handler)
        if is_complete:
            self._stream.confirm(Lsn(bound))
        return is_complete

    patch.setattr(StreamReader, "read_up_to", hasty)


@pytest.mark.parametrize("plant", [None, confirms_before_the_commit])
def test_nothing_is_confirmed_before_it_is_durable(
    shop: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant | None
) -> None:
    if plant is not None:
        plant(monkeypatch)
    pump = Pump(shop, tmp_path)
    with fails_if(plant is not None):
        for _ in range(3):
            with Carrier(shop.url()), armed(Failpoint.TICK_BEGIN, Action.ERROR, at_hit=8):
                pump.start()
                pump.await_error()
            until(lambda: not shop.sql(READERS), "the server to have heard it all")
            [(confirmed,)] = shop.sql(
                "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots"
                " WHERE database = current_database() AND NOT temporary"
            )
            assert confirmed <= pump.state()["streamed"]["lsn"]
        with pump:
            pump.settle()
        check(pump, shop, TABLES, check_coins)


READERS = """
SELECT FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'walsender'
"""


def takes_a_bound_as_inclusive(patch: pytest.MonkeyPatch) -> None:
    hand_out = StreamReader._dispatch

    def wrong(self: StreamReader, *rest: Any) -> None:
        self._read_to += 1
        try:
            hand_out(self, *rest)
        finally:
            self._read_to -= 1

    patch.setattr(StreamReader, "_dispatch", wrong)


@pytest.mark.parametrize("plant", [None, takes_a_bound_as_inclusive])
def test_a_commit_that_begins_where_a_tick_ended_is_in_the_next(
    shop: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant | None
) -> None:
    if plant is not None:
        plant(monkeypatch)
    with fails_if(plant is not None):
        with Pump(shop, tmp_path) as pump, psycopg.connect(shop.url()) as connection:
            pump.settle()
            for number in range(8):
                # What is left to write is the commit, right where the log ends.
                connection.execute("INSERT INTO moved VALUES (%s)", [number])
                pump.settle()
                pump.settle()
                connection.commit()
                pump.settle()
        check(pump, shop, TABLES)


# Invariant 15: a resync under load.


def compares_as_of_another_place(patch: pytest.MonkeyPatch) -> None:
    export = SourceServer.export

    def wrong(self: SourceServer) -> Any:
        before = self.probe(durable=0).insert_lsn.position
        found = export(self)
        found.consistent_point = min(before, found.consistent_point)
        return found

    patch.setattr(SourceServer, "export", wrong)


@pytest.mark.parametrize("plant", [None, compares_as_of_another_place])
def test_a_resync_under_load_ends_equal(
    shop: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant | None
) -> None:
    if plant is not None:
        plant(monkeypatch)
    with fails_if(plant is not None):
        with Pump(shop, tmp_path) as pump, Carrier(shop.url(), pause_ms=0) as carrier:
            for _ in range(4):
                pump.settle()
                # Out of the publication for a moment, so the rows are compared.
                shop.sql(
                    "BEGIN; ALTER PUBLICATION penstock DROP TABLE purse, moved;"
                    "ALTER PUBLICATION penstock ADD TABLE purse, moved; COMMIT"
                )
            pump.settle()
            carrier.stop()
            pump.settle()
        check(pump, shop, TABLES, check_coins)


# Invariant 16: what was acknowledged before a tick is in it.


def probes_what_is_flushed(patch: pytest.MonkeyPatch) -> None:
    probe = SourceServer.probe

    def flushed(self: SourceServer, **named: Any) -> Any:
        found = probe(self, **named)
        return replace(found, insert_lsn=found.flush_lsn)

    patch.setattr(SourceServer, "probe", flushed)


def reads_the_clock_after_the_probe(patch: pytest.MonkeyPatch) -> None:
    probe, last = PostgresSource.probe, []

    def earlier(self: PostgresSource) -> Probe:
        last.append(probe(self))
        return last[max(0, len(last) - 2)]

    patch.setattr(PostgresSource, "probe", earlier)


@pytest.mark.parametrize("plant", [None, probes_what_is_flushed, reads_the_clock_after_the_probe])
def test_what_was_acknowledged_before_a_tick_is_in_it(
    shop: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant | None
) -> None:
    if plant is not None:
        plant(monkeypatch)
    with (
        fails_if(plant is not None),
        Pump(shop, tmp_path) as pump,
        psycopg.connect(shop.url(), autocommit=True) as connection,
    ):
        connection.execute("SET synchronous_commit = off")
        pump.settle()
        for number in range(10, 22):
            connection.execute("INSERT INTO moved VALUES (%s)", [number])
            time = pump.settle()
            changes = histories(pump, ["public.moved"])["public.moved"].changes
            there = {row[0] for at, rows in changes.items() if at <= time for row in rows}
            assert str(number) in there, f"{number} is not in {time}"
