"""Pieces of a first copy, when what they rest on is gone."""

import psycopg
import pyarrow as pa
import pytest
from psycopg import conninfo

from penstock.errors import DefiniteError, TransientError
from penstock.sources.postgres.snapshot import SnapshotPiece
from penstock.testing.postgres import Database

SCHEMA = pa.schema([("i", pa.int32())])


def piece(database: Database, snapshot: str) -> SnapshotPiece:
    told = conninfo.conninfo_to_dict(database.url())
    parameters = {name: str(value) for name, value in told.items()}
    copy = "COPY missing TO STDOUT (FORMAT binary)"
    return SnapshotPiece(parameters, snapshot, "public.missing", 1, copy, SCHEMA, ())


@pytest.mark.parametrize("which", ["database", "database18"])
def test_a_snapshot_that_is_gone_says_nothing_of_the_table(
    which: str, request: pytest.FixtureRequest
) -> None:
    database: Database = request.getfixturevalue(which)
    [(gone,)] = database.sql("SELECT pg_export_snapshot()")
    with pytest.raises(TransientError, match=r'copy of table "public\.missing" is gone'):
        list(piece(database, gone).read())


def test_what_is_wrong_with_the_table_itself_stays_definite(database: Database) -> None:
    with psycopg.connect(database.url()) as exporter:
        [(snapshot,)] = exporter.execute("SELECT pg_export_snapshot()").fetchall()
        with pytest.raises(DefiniteError, match="does not exist"):
            list(piece(database, snapshot).read())
