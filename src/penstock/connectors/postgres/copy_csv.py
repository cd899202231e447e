"""Columns as the CSV that COPY reads."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from penstock.connectors.postgres.dialect import PostgresDialect
from penstock.sdk.bindings import Binding
from penstock.sdk.errors import Refused

__all__ = ["csv_of", "refuse_inexact"]

_OPTIONS = csv.WriteOptions(include_header=False, quoting_style="all_valid")
"""Every value in quotes, so that what is empty without them is null."""


def csv_of(columns: Sequence[pa.Array]) -> pa.Buffer:
    """A line for each row."""
    written = [_hex(each) if pa.types.is_binary(each.type) else each for each in columns]
    table = pa.table(written, names=[str(index) for index in range(len(written))])
    sink = pa.BufferOutputStream()
    csv.write_csv(table, sink, _OPTIONS)
    return sink.getvalue()


def refuse_inexact(
    dialect: PostgresDialect, binding: Binding[Any], columns: Sequence[pa.Array]
) -> None:
    """Refuse numbers that a double cannot hold, where a document is made of its columns.

    Where the document is kept, it has the number, and its column the double next to it.
    """
    if binding.document is not None:
        return
    for field, column in zip(binding.fields, columns, strict=True):
        if dialect.column_type(field) != "DOUBLE PRECISION" or not pa.types.is_string(column.type):
            continue
        for text in column.drop_null().to_pylist():
            # Text only where something did not fit, which is rare.
            if text.lstrip("-").isdigit() and int(float(text)) != int(text):
                raise Refused(
                    f'number {text} of "{field.name}" of table "{binding}" is beyond a double',
                    hint="Keep the whole document, or let the schema of the collection say of it "
                    '"x-postgres-type": "numeric".',
                )


def _hex(column: pa.Array) -> pa.Array:
    """Bytes in Postgres' own hexadecimal."""
    column = pa.concat_arrays([column])
    validity, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int32, len(column) + 1).astype(np.int64)
    lengths = 2 * np.diff(ends) + 2
    starts = np.concatenate([[0], np.cumsum(lengths)])
    text = np.empty(starts[-1], np.uint8)
    digits = np.frombuffer((memoryview(data)[: ends[-1]] if data else b"").hex().encode(), np.uint8)
    # The digits stand where they would without their prefixes, moved by two for each of those.
    moved = np.repeat(2 * np.arange(1, len(column) + 1), 2 * np.diff(ends))
    text[np.arange(len(digits)) + moved] = digits
    text[starts[:-1]], text[starts[:-1] + 1] = ord("\\"), ord("x")
    return pa.Array.from_buffers(
        pa.large_string(),
        len(column),
        [validity, pa.py_buffer(starts.astype(np.int64)), pa.py_buffer(text)],
        column.null_count,
    )
