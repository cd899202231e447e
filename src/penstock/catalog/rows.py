"""Rows as JSON.

Integers of any size are numbers; decimals, times and whatever else has no
exact JSON form are text; bytes are base64. Where a column tells what its
source calls its type, the text is what the source prints.
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
from penstock.data.arrow import replace_leaves, with_integer_times
from penstock.data.codec import BUILT_IN
from penstock.data.schema import label_of
from penstock.persist.state import CollectionState

__all__ = ["encode_line", "rows_of"]


def rows_of(
    table: pa.Table, collection: CollectionState
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Time, diff and columns of each update, the columns ready for JSON."""
    times, diffs = table.column(TIME).to_pylist(), table.column(DIFF).to_pylist()
    table = table.drop_columns([TIME, DIFF])
    labels = [label_of(field) for field in table.schema]
    table = _texts(table, labels)
    names = table.column_names
    codecs = [BUILT_IN.get(name) for name, _ in collection.schemas[-1].codecs]
    columns = [
        _as_its_source_prints(label, column.combine_chunks())
        if (label := labels[at]) is not None
        else column.to_pylist()
        if at >= len(codecs) or (codec := codecs[at]) is None
        else [None if value is None else codec.decode(value, 1) for value in column.to_pylist()]
        for at, column in enumerate(table.columns)
    ]
    for at, (moment, diff) in enumerate(zip(times, diffs, strict=True)):
        yield moment, diff, {n: _plain(c[at]) for n, c in zip(names, columns, strict=True)}


def encode_line(row: dict[str, Any]) -> str:
    """One JSON object."""
    return msgspec.json.encode(row).decode()


def _as_its_source_prints(label: str, values: pa.Array) -> list[Any]:
    """The column's values: numbers and truth as they are, all others as the source's text.

    An array is a list of its elements if it has one dimension that begins at 1.
    """
    # Here, since it brings compiled code along, which most commands do without.
    from penstock.sources.postgres.types import to_text

    kind = values.type
    if pa.types.is_struct(kind):
        shapes = values.field("shape")
        if shapes.null_count < len(shapes):
            printed = to_text(label, values).to_pylist()
        else:
            printed = [None] * len(values)
        listed = values.field("elements")
        elements = _as_its_source_prints(label.removesuffix("[]"), listed.values)
        bounds = listed.offsets.to_pylist()
        return [
            None if not there else text if shape else elements[bounds[row] : bounds[row + 1]]
            for row, (there, shape, text) in enumerate(
                zip(values.is_valid().to_pylist(), shapes.to_pylist(), printed, strict=True)
            )
        ]
    if pa.types.is_float32(kind):
        # As a double it would show digits that the source does not have.
        return [
            text if text is None or text.endswith(("NaN", "y")) else msgspec.Raw(text.encode())
            for text in to_text(label, values).to_pylist()
        ]
    if pa.types.is_decimal(kind) or pa.types.is_temporal(kind):
        values = to_text(label, values)
    told: list[Any] = values.to_pylist()
    return told


def _texts(table: pa.Table, labels: list[str | None]) -> pa.Table:
    """Columns with what Arrow knows the exact text of, nested or not, as text."""
    for at, field in enumerate(table.schema):
        if labels[at] is not None:
            continue
        column = table.column(at)
        try:
            column = pc.cast(column, replace_leaves(field.type, _text))
        except pa.ArrowException:
            # A zone nobody knows, or a time past the calendar.
            column = pc.cast(column, with_integer_times(field.type))
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
