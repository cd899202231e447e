"""Rows as JSON lines.

Integers of any size are numbers; decimals, times and whatever else has no
exact JSON form are text; bytes are base64.
"""

import base64
import math
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME
from penstock.data.arrow import numbered, with_leaves
from penstock.data.codec import BUILT_IN
from penstock.persist.state import CollectionState

__all__ = ["encode_line", "rows_of"]


def rows_of(
    table: pa.Table, collection: CollectionState
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Time, diff and columns of each update, the columns ready for JSON."""
    times, diffs = table.column(TIME).to_pylist(), table.column(DIFF).to_pylist()
    table = _texts(table.drop_columns([TIME, DIFF]))
    names = table.column_names
    codecs = [BUILT_IN.get(name) for name, _ in collection.schemas[-1].codecs]
    columns = [
        column.to_pylist()
        if at >= len(codecs) or (codec := codecs[at]) is None
        else [None if value is None else codec.decode(value, 1) for value in column.to_pylist()]
        for at, column in enumerate(table.columns)
    ]
    for at, (moment, diff) in enumerate(zip(times, diffs, strict=True)):
        yield moment, diff, {n: _plain(c[at]) for n, c in zip(names, columns, strict=True)}


def encode_line(row: dict[str, Any]) -> str:
    """One JSON object."""
    return msgspec.json.encode(row).decode()


def _texts(table: pa.Table) -> pa.Table:
    """Columns with what Arrow knows the exact text of, nested or not, as text."""
    for at, field in enumerate(table.schema):
        column = table.column(at)
        try:
            column = pc.cast(column, with_leaves(field.type, _text))
        except pa.ArrowException:
            # A zone nobody knows, or a time past the calendar.
            column = pc.cast(column, numbered(field.type))
        table = table.set_column(at, field.name, column)
    return table


def _text(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_duration(kind):
        return pa.int64()
    return pa.string() if pa.types.is_decimal(kind) or pa.types.is_temporal(kind) else kind


def _plain(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return {"inf": "Infinity", "-inf": "-Infinity"}.get(str(value), "NaN")
        case int() if value.bit_length() > 2000:
            # Python refuses to write out an integer of very many digits.
            return msgspec.Raw(str(Decimal(value)).encode())
        case bytes():
            return base64.b64encode(value).decode()
        case Decimal() | datetime() | date() | time() | timedelta():
            return str(value)
        case dict():
            return {str(name): _plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case _:
            return value
