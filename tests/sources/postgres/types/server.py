"""Types and values of a real server, over connections with the settings of a source."""

import struct
from collections.abc import Sequence

import pyarrow as pa
from psycopg import pq

from penstock.pgclient import Connection
from penstock.sources.postgres.catalog import PgColumn, read_types
from penstock.sources.postgres.types import ColumnType, column_type

__all__ = ["column_of", "copied", "printed", "types_in"]


def types_in(connection: Connection, relation: str) -> dict[str, PgColumn]:
    """The columns of a table."""
    found = connection.query(
        "SELECT attname, attnum, atttypid, atttypmod, attndims FROM pg_attribute "
        "WHERE attrelid = $1::regclass AND attnum > 0 AND NOT attisdropped",
        [relation],
    )
    rows = [[value or "" for value in row] for row in found]  # No column is nullable.
    types = read_types(connection, {int(row[2]) for row in rows})
    return {
        name: PgColumn(name, int(number), types[int(oid)], int(typmod), int(dimensions))
        for name, number, oid, typmod, dimensions in rows
    }


def column_of(connection: Connection, declared: str, *, text: bool = False) -> ColumnType:
    """Return the storage type of a column of this SQL type."""
    connection.execute(f"CREATE TEMPORARY TABLE one_column (c {declared})")
    try:
        return column_type(types_in(connection, "pg_temp.one_column")["c"], text=text)
    finally:
        connection.execute("DROP TABLE pg_temp.one_column")


def printed(connection: Connection, query: str) -> list[pa.Array]:
    """The columns of a query as the output functions of their types print them."""
    result = connection.pgconn.exec_(query.encode())
    assert result.status == pq.ExecStatus.TUPLES_OK, result.error_message
    return [
        pa.array([result.get_value(row, at) for row in range(result.ntuples)], pa.binary())
        for at in range(result.nfields)
    ]


def copied(connection: Connection, query: str, columns: int) -> list[pa.Array]:
    """The columns of a query as binary COPY sends them."""
    pgconn = connection.pgconn
    result = pgconn.exec_(f"COPY ({query}) TO STDOUT (FORMAT binary)".encode())
    assert result.status == pq.ExecStatus.COPY_OUT, result.error_message
    data = bytearray()
    while (got := pgconn.get_copy_data(0))[0] > 0:
        data += got[1]
    while (end := pgconn.get_result()) is not None:
        assert end.status == pq.ExecStatus.COMMAND_OK, end.error_message
    return _fields(bytes(data), columns)


def _fields(data: bytes, columns: int) -> list[pa.Array]:
    assert data.startswith(b"PGCOPY\n\xff\r\n\0")
    at = 19 + struct.unpack_from("!i", data, 15)[0]
    found: Sequence[list[bytes | None]] = [[] for _ in range(columns)]
    while (count := struct.unpack_from("!h", data, at)[0]) >= 0:
        at += 2
        assert count == columns
        for column in found:
            (size,) = struct.unpack_from("!i", data, at)
            at += 4
            column.append(None if size < 0 else data[at : at + size])
            at += max(size, 0)
    return [pa.array(column, pa.binary()) for column in found]
