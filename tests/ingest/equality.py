"""A collection and its table, both as the server prints rows, and whether they are the same.

A collection keeps columns that its table has lost; there they must be null.
"""

from collections import Counter
from collections.abc import Iterable
from decimal import Decimal

import psycopg
import pyarrow as pa

from penstock.data import DIFF, TIME
from penstock.persist import Collection
from penstock.pgclient import SETTINGS, quote_identifier
from penstock.servers.postgres import Database
from penstock.sources.postgres.table_schema import LABEL
from penstock.sources.postgres.types import to_text

Row = tuple[str | None, ...]

_SENT = (
    "SELECT unnest(attnames) FROM pg_publication_tables WHERE schemaname = %s AND tablename = %s"
)
_SENT_BEFORE_LISTS = """
    SELECT attname FROM pg_publication_tables
    JOIN pg_attribute ON attrelid = format('%%I.%%I', schemaname, tablename)::regclass
    WHERE schemaname = %s AND tablename = %s AND attnum > 0 AND NOT attisdropped
"""


def difference(
    collection: Collection, as_of: int, database: Database, table: str, where: str = "true"
) -> str:
    """Return the difference of a collection as of a time from its table, or an empty string."""
    found = collection.snapshot(as_of).arrow().drop_columns([TIME])
    diffs = found.column(DIFF).to_pylist()
    found = found.drop_columns([DIFF])
    decimals = {field.name for field in found.schema if pa.types.is_decimal(field.type)}
    columns = [_texts(field, found.column(field.name)) for field in found.schema]
    stored: Counter[Row] = Counter()
    for diff, *row in zip(diffs, *columns, strict=True):
        stored[_plain(row, found.column_names, decimals)] += diff
    there = Counter(
        _plain(row, found.column_names, decimals)
        for row in rows_of(database, table, found.column_names, where)
    )
    if stored == there:
        return ""
    missing, extra = there - stored, stored - there
    negative = {row: count for row, count in stored.items() if count < 0}
    return f"missing {_few(missing)}, too many {_few(extra)}, less than none {_few(negative)}"


def rows_of(
    database: Database, table: str, columns: Iterable[str], where: str = "true"
) -> list[Row]:
    """The rows of a table, as the server prints them; columns that are not sent are null."""
    schema, name = table.split(".", 1)
    with psycopg.connect(database.url(), autocommit=True) as connection:
        connection.execute("; ".join(f"SET {k} = '{v}'" for k, v in SETTINGS.items()).encode())
        there = {
            row[0]
            for row in connection.execute(
                _SENT if connection.info.server_version >= 150000 else _SENT_BEFORE_LISTS,
                [schema, name],
            )
        }
        chosen = ", ".join(
            quote_identifier(column) if column in there else "NULL" for column in columns
        )
        named = f"{quote_identifier(schema)}.{quote_identifier(name)}"
        query = f"SELECT {chosen} FROM {named} WHERE {where}"
        result = connection.execute(query.encode()).pgresult
        assert result is not None
        return [
            tuple(
                None if (value := result.get_value(row, column)) is None else value.decode()
                for column in range(result.nfields)
            )
            for row in range(result.ntuples)
        ]


def _plain(row: Iterable[str | None], names: Iterable[str], decimals: set[str]) -> Row:
    # A decimal that was widened has more digits after the point than the table's.
    return tuple(
        str(Decimal(value).normalize()) if name in decimals and value is not None else value
        for name, value in zip(names, row, strict=True)
    )


def _texts(field: pa.Field, column: pa.ChunkedArray) -> list[str | None]:
    values = column.combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], field.type)
    label = (field.metadata or {})[LABEL].decode()
    return [
        each.decode() if isinstance(each, bytes) else each
        for each in to_text(label, values).to_pylist()
    ]


def _few(rows: Iterable[Row]) -> list[str]:
    return [str(row)[:200] for row in list(rows)[:3]]
