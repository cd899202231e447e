"""Columns as CSV for COPY."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from penstock.connectors.postgres.dialect import PostgresDialect
from penstock.sdk.bindings import Binding
from penstock.sdk.errors import Refused

__all__ = ["check_exact", "csv_of"]

_OPTIONS = csv.WriteOptions(include_header=False, quoting_style="all_valid")
"""Quotes around every value. An empty value without quotes is null."""


def csv_of(columns: Sequence[pa.Array]) -> pa.Buffer:
    """Return one line for each row."""
    written = [_hex(column) if pa.types.is_binary(column.type) else column for column in columns]
    table = pa.table(written, names=[str(index) for index in range(len(written))])
    sink = pa.BufferOutputStream()
    csv.write_csv(table, sink, _OPTIONS)
    return sink.getvalue()


def check_exact(
    dialect: PostgresDialect, binding: Binding[Any], columns: Sequence[pa.Array]
) -> None:
    """Reject numbers that a double cannot hold, if documents are assembled from columns.

    Otherwise the stored document has the exact number, and the column the nearest double.
    """
    if binding.document is not None:
        return
    for field, column in zip(binding.fields, columns, strict=True):
        if dialect.column_type(field) != "DOUBLE PRECISION" or not pa.types.is_string(column.type):
            continue
        for text in column.drop_null().to_pylist():
            # The column is text only if a number did not fit.
            if text.lstrip("-").isdigit() and int(float(text)) != int(text):
                raise Refused(
                    f'number {text} of "{field.name}" in table "{binding}" does not fit a double',
                    hint="Store the complete document, or set "
                    '"x-postgres-type": "numeric" for the field in the schema of the collection.',
                )


def _hex(column: pa.Array) -> pa.Array:
    """Return bytes in the hexadecimal format of Postgres."""
    column = pa.concat_arrays([column])
    validity, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int32, len(column) + 1).astype(np.int64)
    lengths = 2 * np.diff(ends) + 2
    starts = np.concatenate([[0], np.cumsum(lengths)])
    text = np.empty(starts[-1], np.uint8)
    digits = np.frombuffer((memoryview(data)[: ends[-1]] if data else b"").hex().encode(), np.uint8)
    # Each value is moved by the length of the prefixes up to it.
    moved = np.repeat(2 * np.arange(1, len(column) + 1), 2 * np.diff(ends))
    text[np.arange(len(digits)) + moved] = digits
    text[starts[:-1]], text[starts[:-1] + 1] = ord("\\"), ord("x")
    return pa.Array.from_buffers(
        pa.large_string(),
        len(column),
        [validity, pa.py_buffer(starts.astype(np.int64)), pa.py_buffer(text)],
        column.null_count,
    )
