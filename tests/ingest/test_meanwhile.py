"""Changes of other tables while a resync waits or a snapshot runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.errors import UsageError
from penstock.servers.postgres import Database, PostgresServer
from penstock.sources.postgres.snapshot import SnapshotSplit
from tests.ingest.checker import check, differing
from tests.ingest.pump import Pump, until
from tests.ingest.test_resync import heard_at_once, resync
from tests.shared_postgres import QUICK

__all__ = ["heard_at_once"]

TWO = """
CREATE TABLE a (id int PRIMARY KEY, v int);
CREATE TABLE x (id int PRIMARY KEY, v int);
INSERT INTO a VALUES (1, 1);
INSERT INTO x VALUES (1, 1), (2, 2);
"""


@contextmanager
def waiting(database: Database, pump: Pump) -> Iterator[None]:
    """Keep a resync of `a` waiting for an open transaction in the block."""
    database.sql("CREATE TABLE elsewhere (i int)")
    with psycopg.connect(database.url()) as somebody:
        somebody.execute("INSERT INTO elsewhere VALUES (1)")
        asking = threading.Thread(target=resync, args=(pump, "public.a"))
        asking.start()
        waits = "SELECT 1 FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted"
        until(lambda: database.sql(waits), "the slot to be waited for")
        yield
    asking.join()


def test_columns_added_and_dropped_during_resync_of_other_table_end_equal(
    database: Database, tmp_path: Path
) -> None:
    database.sql(f"{TWO} CREATE PUBLICATION penstock FOR TABLE a, x")
    with Pump(database, tmp_path) as pump:
        pump.settle()
        with waiting(database, pump):
            database.sql("ALTER TABLE x ADD c int")
            database.sql("INSERT INTO x VALUES (3, 3, 3)")
            database.sql("ALTER TABLE x DROP c")
            database.sql("INSERT INTO x VALUES (4, 4)")
        pump.settle()
        check(pump, database, ["public.a", "public.x"])


def test_table_rewritten_during_resync_of_other_table_changes_atomically(
    database: Database, tmp_path: Path
) -> None:
    database.sql(f"{TWO} CREATE PUBLICATION penstock FOR TABLE a, x")
    with Pump(database, tmp_path) as pump:
        pump.settle()
        with waiting(database, pump):
            database.sql("ALTER TABLE x ALTER v TYPE int USING v * 100")
            database.sql("INSERT INTO x VALUES (3, 300)")
        pump.settle()

        def all_or_none(state: dict[str, list[tuple[int, int]]]) -> str | None:
            large = {int(v) >= 100 for _, v in state["public.x"]}
            return "it is half rewritten" if len(large) > 1 else None

        check(pump, database, ["public.a", "public.x"], all_or_none)


def slowly(monkeypatch: pytest.MonkeyPatch, table: str) -> tuple[threading.Event, threading.Event]:
    """Pause snapshots of a table; return the events that report a start and resume it."""
    read, begun, go = SnapshotSplit.read, threading.Event(), threading.Event()

    def slow(split: SnapshotSplit, stop: Any = None) -> Iterator[pa.RecordBatch]:
        held = list(read(split, stop))
        if split.table == table:
            begun.set()
            go.wait()
        yield from held

    monkeypatch.setattr(SnapshotSplit, "read", slow)
    return begun, go


def test_columns_added_and_dropped_during_snapshot_of_table_end_equal(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.sql(f"{TWO} CREATE PUBLICATION penstock FOR TABLE a")
    begun, go = slowly(monkeypatch, "public.x")
    with Pump(database, tmp_path) as pump:
        pump.settle()
        database.sql("ALTER PUBLICATION penstock ADD TABLE x")
        assert begun.wait(20)
        pump.settle()
        with waiting(database, pump):
            database.sql("ALTER TABLE x ADD c int")
            database.sql("INSERT INTO x VALUES (3, 3, 3)")
            database.sql("ALTER TABLE x DROP c")
            database.sql("INSERT INTO x VALUES (4, 4)")
        go.set()
        until(lambda: "shop.public.x" in pump.collections(), "x to be seen")
        pump.settle()
        assert not differing(pump, database, ["public.a", "public.x"])


def test_snapshot_of_added_table_releases_its_temporary_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = slowly(monkeypatch, "public.x")
    with PostgresServer(settings={**QUICK, "max_replication_slots": 2}) as server:
        database = server.create_database("few")
        database.sql(f"{TWO} CREATE PUBLICATION penstock FOR TABLE a")
        with Pump(database, tmp_path) as pump:
            pump.settle()
            database.sql("ALTER PUBLICATION penstock ADD TABLE x")
            assert begun.wait(20)
            until(
                lambda: len(database.sql("SELECT 1 FROM pg_replication_slots")) == 1,
                "the temporary slot to go",
            )
            # The resync of the other table needs the one free slot.
            database.sql("ALTER TABLE a ALTER v TYPE int USING v + 1")
            pump.settle()
            assert not differing(pump, database, ["public.a"])
            go.set()
            until(lambda: "shop.public.x" in pump.collections(), "x to be seen")
            assert not differing(pump, database, ["public.x"])


def test_resync_of_table_altered_during_each_attempt_fails_after_four(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.sql(f"{TWO} CREATE PUBLICATION penstock FOR TABLE a, x")
    with Pump(database, tmp_path) as pump:
        pump.settle()
        read = SnapshotSplit.read
        attempts: list[SnapshotSplit] = []

        def altered(split: SnapshotSplit, stop: Any = None) -> Iterator[pa.RecordBatch]:
            attempts.append(split)
            database.sql("TRUNCATE a; INSERT INTO a VALUES (1, 1)")
            return read(split, stop)

        with monkeypatch.context() as patch:
            patch.setattr(SnapshotSplit, "read", altered)
            run = CliRunner().invoke(app, ["resync", pump.location, "shop", "public.a"])
        assert run.exit_code != 0
        assert isinstance(run.exception, UsageError)
        assert "altered during each of 4 attempts" in run.exception.detail
        # Each attempt creates a slot and takes seconds: the request is not repeated.
        assert len(attempts) == 4
        database.sql("INSERT INTO x VALUES (3, 3)")
        pump.settle()
        assert not differing(pump, database, ["public.x"])
        with pump.reader() as client:
            error = client.collection("shop.public.a").state.errors[-1].error
        assert "ALTER TABLE or TRUNCATE ran while the table was read" in error.detail
        assert error.hint.endswith(f"penstock resync {pump.location} shop 'public.a'")
        resync(pump, "public.a")
        with pump.reader() as client:
            mended = client.collection("shop.public.a")
            assert [row.data for row in mended.snapshot(mended.upper - 1)] == [{"id": 1, "v": 1}]
