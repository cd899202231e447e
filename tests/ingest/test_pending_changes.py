"""Pending changes of tables during their snapshot, spooled to files above a size."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import persist
from penstock.errors import InternalError, UsageError
from penstock.servers.postgres import Database
from penstock.sources.postgres.snapshot import SnapshotSplit
from tests.ingest.checker import check
from tests.ingest.pump import Pump, until
from tests.ingest.workload import SCHEMA, TABLES, Carrier, check_coins


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Yield an event; snapshots are not read before it is set."""
    free = threading.Event()
    read = SnapshotSplit.read

    def held(split: SnapshotSplit, stop: Any = None) -> Iterator[pa.RecordBatch]:
        free.wait()
        yield from read(split, stop)

    monkeypatch.setattr(SnapshotSplit, "read", held)
    yield free
    free.set()


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the collections of all staged files, with a spool limit of a few rows."""
    monkeypatch.setattr("penstock.ingest.tick_transaction.SPOOL_BYTES", 500)
    stage, written = persist.Client.stage, []

    def watched(client: persist.Client, collection: persist.Collection, *given, **named):
        written.append(collection.name)
        return stage(client, collection, *given, **named)

    monkeypatch.setattr(persist.Client, "stage", watched)
    return written


def test_large_pending_changes_are_spooled_to_files_and_read_in_order(
    database: Database, tmp_path: Path, free: threading.Event, files: list[str]
) -> None:
    database.sql(SCHEMA)
    with Pump(database, tmp_path) as pump, Carrier(database.url(), pause_ms=1) as carrier:
        until(lambda: sum("/pending/" in name for name in files) > 20, "files of pending changes")
        free.set()
        pump.settle()
        carrier.stop()
        pump.settle()
        check(pump, database, TABLES, check_coins)
        with persist.open(pump.storage, hold=False) as client:
            left = client.collections(hidden=True)
        assert not [name for name in left if "/pending/" in name]


def test_pending_changes_out_of_order_raise_internal_error(
    database: Database,
    tmp_path: Path,
    free: threading.Event,
    files: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = persist.Collection.parts
    monkeypatch.setattr(persist.Collection, "parts", lambda *given: reversed(list(parts(*given))))
    database.sql(SCHEMA)
    pump = Pump(database, tmp_path)
    pump.start()
    with Carrier(database.url(), pause_ms=1):
        until(lambda: sum("/pending/" in name for name in files) > 20, "files of pending changes")
        free.set()
        until(lambda: pump.error is not None, "the pump to end")
    with pytest.raises(InternalError, match="out of order"):
        pump.stop()


def test_pending_changes_of_errored_table_are_deleted(
    database: Database, tmp_path: Path, free: threading.Event
) -> None:
    database.sql(
        "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE other (id int PRIMARY KEY); "
        "CREATE PUBLICATION penstock FOR TABLE t, other"
    )
    with Pump(database, tmp_path) as pump:

        def pending_collections() -> list[str]:
            with persist.open(pump.storage, hold=False) as client:
                return [name for name in client.collections(hidden=True) if "/pending/" in name]

        def insert_and_list() -> list[str]:
            database.sql("INSERT INTO t SELECT count(*) FROM t")
            with contextlib.suppress(UsageError):  # The source may not have written yet.
                return pending_collections()
            return []

        until(insert_and_list, "pending changes")
        database.sql("ALTER TABLE t RENAME TO u")
        until(
            lambda: any(table["error"] for table in pump.state()["status"]["tables"]),
            "the table to fail",
        )
        free.set()
        until(lambda: "shop.public.other" in pump.collections(), "the other to be seen")
        pump.settle()
        assert pending_collections() == []
