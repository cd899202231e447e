"""Pieces of a first copy, when what they rest on is gone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pyarrow as pa
import pytest
from psycopg import conninfo

from penstock.demo.process import await_claim
from penstock.errors import DefiniteError, TransientError
from penstock.sources.postgres.snapshot import SnapshotSplit
from penstock.testing.postgres import Database

SCHEMA = pa.schema([("i", pa.int32())])


def split(database: Database, snapshot: str, rows: str = "missing") -> SnapshotSplit:
    told = conninfo.conninfo_to_dict(database.url())
    parameters = {name: str(value) for name, value in told.items()}
    copy = f"COPY {rows} TO STDOUT (FORMAT binary)"
    return SnapshotSplit(parameters, snapshot, "public.missing", 1, copy, SCHEMA, ())


@pytest.mark.parametrize("which", ["database", "database18"])
def test_a_snapshot_that_is_gone_says_nothing_of_the_table(
    which: str, request: pytest.FixtureRequest
) -> None:
    database: Database = request.getfixturevalue(which)
    [(gone,)] = database.sql("SELECT pg_export_snapshot()")
    with pytest.raises(TransientError, match=r'copy of table "public\.missing" is gone'):
        list(split(database, gone).read())


def test_what_is_wrong_with_the_table_itself_stays_definite(database: Database) -> None:
    with psycopg.connect(database.url()) as exporter:
        [(snapshot,)] = exporter.execute("SELECT pg_export_snapshot()").fetchall()
        with pytest.raises(DefiniteError, match="does not exist"):
            list(split(database, snapshot).read())


def test_copy_that_waits_for_the_server_ends_when_the_process_stops(database: Database) -> None:
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
        await_claim(is_sleeping, "the server to copy")
        stop.set()
        with pytest.raises(TransientError, match="stopped while waiting for"):
            copy.result()
