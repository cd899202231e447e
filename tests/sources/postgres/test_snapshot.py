"""Splits of an initial snapshot: missing snapshots, missing tables and stops."""

import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pyarrow as pa
import pytest
from psycopg import conninfo

from penstock.errors import DefiniteError, TransientError
from penstock.servers.postgres import Database
from penstock.servers.process import wait_until
from penstock.sources.postgres.snapshot import SnapshotSplit

SCHEMA = pa.schema([("i", pa.int32())])


def split(database: Database, snapshot: str, rows: str = "missing") -> SnapshotSplit:
    told = conninfo.conninfo_to_dict(database.url())
    parameters = {name: str(value) for name, value in told.items()}
    copy = f"COPY {rows} TO STDOUT (FORMAT binary)"
    return SnapshotSplit(parameters, snapshot, "public.missing", 1, copy, SCHEMA, ())


@pytest.mark.parametrize("which", ["database", "database18"])
def test_split_of_missing_snapshot_raises_transient_error(
    which: str, request: pytest.FixtureRequest
) -> None:
    database: Database = request.getfixturevalue(which)
    [(snapshot,)] = database.sql("SELECT pg_export_snapshot()")
    with pytest.raises(TransientError, match=r'copy of table "public\.missing" does not exist'):
        list(split(database, snapshot).read())


def test_split_of_missing_table_raises_definite_error(database: Database) -> None:
    with psycopg.connect(database.url()) as exporter:
        [(snapshot,)] = exporter.execute("SELECT pg_export_snapshot()").fetchall()
        with pytest.raises(DefiniteError, match="does not exist"):
            list(split(database, snapshot).read())


def test_split_that_waits_for_the_server_ends_when_stopped(database: Database) -> None:
    stop = threading.Event()

    def is_sleeping() -> bool:
        return bool(
            database.sql(
                "SELECT FROM pg_stat_activity WHERE application_name = 'penstock copy 1' "
                "AND wait_event = 'PgSleep' AND datname = current_database()"
            )
        )

    with psycopg.connect(database.url()) as exporter, ThreadPoolExecutor(1) as pool:
        [(snapshot,)] = exporter.execute("SELECT pg_export_snapshot()").fetchall()
        sleeping = split(database, snapshot, "(SELECT pg_sleep(600))")
        copy = pool.submit(lambda: list(sleeping.read(stop)))
        wait_until(is_sleeping, "the server to copy")
        stop.set()
        with pytest.raises(TransientError, match="stopped while waiting for"):
            copy.result()
