"""Pending changes: changes of tables whose initial snapshot is not complete, as rows.

The slot is read from the start. Otherwise a long snapshot would retain WAL until the slot is lost.
Changes of a table cannot be resolved during its snapshot, so its messages are stored, one row each.
A row includes the position of its message in the stream, because stored rows have no order.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.sources.postgres.old_rows import Changes

__all__ = [
    "TRUNCATE",
    "decode_changes",
    "encode_changes",
    "encode_truncate",
    "order_bounds",
    "pending_schema",
]

TRUNCATE: Final = ord("T")

_LSN, _ORDER, _KIND, _WHOLE, _LEFT_OUT = "commit_lsn", "order", "kind", "whole", "left_out"
_OLD, _NEW = "old", "new"


def pending_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of the pending changes of a table with `schema`."""
    row = pa.struct(list(schema.remove_metadata()))
    return pa.schema(
        [
            (_LSN, pa.int64()),
            (_ORDER, pa.int64()),
            (_KIND, pa.uint8()),
            (_WHOLE, pa.bool_()),
            (_LEFT_OUT, pa.list_(pa.int32())),
            (_OLD, row),
            (_NEW, row),
        ]
    )


def encode_changes(changes: Changes, commit_lsn: npt.NDArray[np.int64], *, order: int) -> pa.Table:
    """Return `changes` as pending rows; the first has position `order` in the stream."""
    schema = pending_schema(changes.new.schema)
    arrays = [
        pa.array(commit_lsn),
        pa.array(order + np.arange(len(changes))),
        pa.array(changes.kind),
        pa.array(changes.whole),
        _omitted_columns(changes),
        _structs(changes.old, changes.old_row, schema.field(_OLD).type),
        _structs(changes.new, changes.new_row, schema.field(_NEW).type),
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def encode_truncate(schema: pa.Schema, commit_lsn: int, *, order: int) -> pa.Table:
    """Return a TRUNCATE as a pending row."""
    values = {_LSN: commit_lsn, _ORDER: order, _KIND: TRUNCATE, _WHOLE: False, _LEFT_OUT: []}
    return pa.Table.from_pylist([values], schema=pending_schema(schema))


def order_bounds(rows: pa.Table) -> tuple[int, int]:
    """Return the first and the last position in the stream of pending rows."""
    bounds = pc.min_max(rows.column(_ORDER)).as_py()
    return bounds["min"], bounds["max"]


def decode_changes(
    rows: pa.Table, *, from_lsn: int, from_order: int = -1
) -> Iterator[Changes | None]:
    """Yield the pending changes of transactions that committed at or past `from_lsn`, in order.

    None stands for a TRUNCATE. `from_order` is the position of the last TRUNCATE: changes before it
    are skipped, because the snapshot may not contain their old rows.
    """
    # SUBTLE: a transaction whose commit record starts exactly at the consistent point of the
    # snapshot is not in the snapshot (hazard B1), so it is included here.
    rows = rows.filter(
        pc.and_(
            pc.greater_equal(rows.column(_LSN), from_lsn),
            pc.greater_equal(rows.column(_ORDER), from_order),
        )
    ).sort_by(_ORDER)
    kinds = rows.column(_KIND).to_numpy()
    start = 0
    for end in np.flatnonzero(kinds == TRUNCATE):
        if end > start:
            yield _changes(rows.slice(start, end - start))
        yield None
        start = int(end) + 1
    if start < len(kinds):
        yield _changes(rows.slice(start))


def _changes(rows: pa.Table) -> Changes:
    rows = rows.combine_chunks()
    old, old_row = _rows(rows.column(_OLD))
    new, new_row = _rows(rows.column(_NEW))
    lists = _combine(rows.column(_LEFT_OUT))
    owners = new_row[pc.list_parent_indices(lists).to_numpy()]
    numbers = lists.flatten().to_numpy(zero_copy_only=False)
    unchanged = {}
    for number in np.unique(numbers):
        mask = np.zeros(new.num_rows, np.bool_)
        mask[owners[numbers == number]] = True
        unchanged[new.column_names[number]] = mask
    return Changes(
        kind=rows.column(_KIND).to_numpy(),
        old=old,
        old_row=old_row,
        whole=rows.column(_WHOLE).to_numpy(),
        new=new,
        new_row=new_row,
        unchanged=unchanged,
    )


def _omitted_columns(changes: Changes) -> pa.Array:
    """Return, for each message, the numbers of the columns that it omits."""
    messages, numbers = [], []
    message_of = np.flatnonzero(changes.new_row >= 0)
    for name, mask in changes.unchanged.items():
        omitting = message_of[mask]
        messages.append(omitting)
        numbers.append(np.full(len(omitting), changes.new.column_names.index(name), np.int32))
    if not messages:
        return pa.array([[]] * len(changes), pa.list_(pa.int32()))
    of, number = np.concatenate(messages), np.concatenate(numbers)
    order = np.argsort(of, kind="stable")
    offsets = np.searchsorted(of[order], np.arange(len(changes) + 1))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(number[order]))


def _structs(rows: pa.Table, row_of: npt.NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    indices = pa.array(row_of, mask=row_of < 0)
    taken = rows.take(indices)
    arrays = [_combine(column) for column in taken.columns]
    return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=pa.array(row_of < 0))


def _rows(structs: pa.ChunkedArray) -> tuple[pa.Table, npt.NDArray[np.int64]]:
    one = _combine(structs)
    present = one.is_valid().to_numpy(zero_copy_only=False)
    only = one.filter(pa.array(present))
    arrays = [only.field(i) for i in range(only.type.num_fields)]
    rows = pa.Table.from_arrays(arrays, schema=pa.schema(list(only.type)))
    return rows, np.where(present, np.cumsum(present) - 1, -1).astype(np.int64)


def _combine(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        return pa.concat_arrays(combined.chunks)
    return combined
