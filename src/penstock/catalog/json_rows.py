"""Rows as JSON.

Integers of any size are numbers. Decimals, timestamps and other values without an exact JSON
form are text. Bytes are base64. If a column has the type name of its source, the text is in the
form that the source prints.
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
from penstock.sources.registry import to_text

__all__ = ["encode_line", "rows_of"]


def rows_of(
    table: pa.Table, collection: CollectionState
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield time, diff and columns of each update; the columns are JSON values."""
    times, diffs = table.column(TIME).to_pylist(), table.column(DIFF).to_pylist()
    table = table.drop_columns([TIME, DIFF])
    labels = [label_of(field) for field in table.schema]
    table = _texts(table, labels)
    names = table.column_names
    codecs = [BUILT_IN.get(name) for name, _ in collection.schemas[-1].codecs]
    columns = [
        _source_text(label, column.combine_chunks())
        if (label := labels[i]) is not None
        else column.to_pylist()
        if i >= len(codecs) or (codec := codecs[i]) is None
        else [None if value is None else codec.decode(value, 1) for value in column.to_pylist()]
        for i, column in enumerate(table.columns)
    ]
    for i, (timestamp, diff) in enumerate(zip(times, diffs, strict=True)):
        yield timestamp, diff, {n: _to_json(c[i]) for n, c in zip(names, columns, strict=True)}


def encode_line(row: dict[str, Any]) -> str:
    """Encode a row as one line of JSON."""
    return msgspec.json.encode(row).decode()


def _source_text(label: str, values: pa.Array) -> list[Any]:
    """Return the values of a column: numbers and booleans unchanged, others as source text.

    An array is a list if it has one dimension that starts at 1.
    """
    kind = values.type
    if pa.types.is_struct(kind):
        shapes = values.field("shape")
        if shapes.null_count < len(shapes):
            printed = to_text(label, values).to_pylist()
        else:
            printed = [None] * len(values)
        listed = values.field("elements")
        elements = _source_text(label.removesuffix("[]"), listed.values)
        bounds = listed.offsets.to_pylist()
        return [
            None if not is_valid else text if shape else elements[bounds[row] : bounds[row + 1]]
            for row, (is_valid, shape, text) in enumerate(
                zip(values.is_valid().to_pylist(), shapes.to_pylist(), printed, strict=True)
            )
        ]
    if pa.types.is_float32(kind):
        # A double would print digits that the source does not have.
        return [
            text if text is None or text.endswith(("NaN", "y")) else msgspec.Raw(text.encode())
            for text in to_text(label, values).to_pylist()
        ]
    if pa.types.is_decimal(kind) or pa.types.is_temporal(kind):
        values = to_text(label, values)
    texts: list[Any] = values.to_pylist()
    return texts


def _texts(table: pa.Table, labels: list[str | None]) -> pa.Table:
    """Cast values that Arrow can print exactly to text, also in nested columns."""
    for i, field in enumerate(table.schema):
        if labels[i] is not None:
            continue
        column = table.column(i)
        try:
            column = pc.cast(column, replace_leaves(field.type, _text))
        except pa.ArrowException:
            # An unsupported time zone, or a timestamp beyond the calendar.
            column = pc.cast(column, with_integer_times(field.type))
        table = table.set_column(i, field.name, column)
    return table


def _text(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_duration(kind):
        return pa.int64()
    return pa.string() if pa.types.is_decimal(kind) or pa.types.is_temporal(kind) else kind


def _to_json(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return {"inf": "Infinity", "-inf": "-Infinity"}.get(str(value), "NaN")
        case int() if value.bit_length() > 2000:
            # Python rejects the conversion of very long integers to text.
            return msgspec.Raw(str(Decimal(value)).encode())
        case bytes():
            return base64.b64encode(value).decode()
        case Decimal() | datetime() | date() | time() | timedelta():
            return str(value)
        case dict():
            return {str(name): _to_json(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_to_json(inner) for inner in value]
        case _:
            return value
