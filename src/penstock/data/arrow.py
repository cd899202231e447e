"""Updates as Arrow: user columns, then `mz_timestamp` and `mz_diff`.

A table of updates means the multiset that its diffs add up to, so two laws
hold for everything here: splitting a table and treating the pieces apart
gives the same sum, and `advance` to a since cannot be seen as of any time at
or after it.

Rows are equal when their columns are, bit by bit: NaN equals the same NaN,
-0.0 differs from 0.0, null equals null. A retraction cancels what was
written, not what compares equal to it.
"""

import struct
from collections.abc import Callable
from reprlib import repr as abbreviated
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InternalError, UsageError
from penstock.progress.update import MAX_DIFF, MIN_DIFF

__all__ = [
    "DIFF",
    "PROGRESSED",
    "TIME",
    "advance",
    "consolidate",
    "from_ipc",
    "negate",
    "replace_leaves",
    "sort_columns",
    "sort_rows",
    "to_ipc",
    "with_integer_times",
]

TIME: Final = "mz_timestamp"
DIFF: Final = "mz_diff"
PROGRESSED: Final = "mz_progressed"
"""Never at rest; in what `tail` prints."""


def advance(updates: pa.Table, since: int) -> pa.Table:
    """Bring every time below `since` up to it."""
    at = updates.schema.get_field_index(TIME)
    times = pc.max_element_wise(updates.column(at), pa.scalar(since, pa.int64()))
    return updates.set_column(at, updates.schema.field(at), times)


def negate(updates: pa.Table) -> pa.Table:
    """What takes `updates` back."""
    at = updates.schema.get_field_index(DIFF)
    return updates.set_column(at, updates.schema.field(at), pc.negate_checked(updates.column(at)))


def consolidate(updates: pa.Table) -> pa.Table:
    """Add up the diffs of equal rows at equal times and drop what adds up to nothing.

    Among equal rows the first stays, so the order of first appearance is kept.

    Raises:
        UsageError: a sum does not fit into 64 bits.
    """
    if updates.num_rows == 0:
        return updates
    at = updates.schema.get_field_index(DIFF)
    diffs = updates.column(at)
    bounds = pc.min_max(diffs)
    largest = max(-bounds["min"].as_py(), bounds["max"].as_py())
    exact = largest * updates.num_rows > MAX_DIFF
    keys = [_groupable(column) for i, column in enumerate(updates.columns) if i != at]
    by = [f"c{i}" for i in range(len(keys))]
    grouped = (
        pa.table(
            [*keys, diffs.cast(pa.decimal128(19, 0)) if exact else diffs, _iota(updates.num_rows)],
            names=[*by, "diff", "row"],
        )
        .group_by(by, use_threads=False)
        .aggregate([("diff", "sum"), ("row", "min")])
    )
    firsts, sums = grouped.column("row_min"), grouped.column("diff_sum")
    if exact:
        sums = _fitting(sums, firsts, updates)
    kept = pc.not_equal(sums, 0)
    firsts, sums = firsts.filter(kept), sums.filter(kept)
    if len(firsts) == updates.num_rows:
        return updates
    order = pc.sort_indices(firsts)
    rows = updates.take(firsts.take(order))
    return rows.set_column(at, updates.schema.field(at), sums.take(order))


def sort_rows(updates: pa.Table, key: tuple[str, ...]) -> pa.Table:
    """In order of key, then time; without a key, of all columns that have an order."""
    columns = [updates.column(name) for name in sort_columns(updates.schema, key)]
    names = [f"c{i}" for i in range(len(columns))]
    order = pc.sort_indices(
        pa.table(columns, names=names), sort_keys=[(name, "ascending") for name in names]
    )
    return updates.take(order)


def sort_columns(schema: pa.Schema, key: tuple[str, ...]) -> list[str]:
    """What `sort_rows` goes by, from the first column to the last."""
    by = [name for name in key or schema.names if _sortable(schema.field(name).type)]
    return list(dict.fromkeys([*by, TIME, DIFF]))


def to_ipc(updates: pa.Table) -> bytes:
    """One Arrow IPC record-batch message, without its schema."""
    batches = updates.combine_chunks().to_batches()
    if len(batches) != 1:
        raise InternalError(
            f"an inline batch of {updates.num_rows} rows made {len(batches)} messages"
        )
    encoded: bytes = batches[0].serialize().to_pybytes()
    return encoded


def from_ipc(data: bytes, schema: pa.Schema) -> pa.Table:
    """The rows of one record-batch message of `schema`."""
    return pa.Table.from_batches([pa.ipc.read_record_batch(pa.py_buffer(data), schema)])


def with_integer_times(kind: pa.DataType) -> pa.DataType:
    """`kind` with times as the integers they are stored as: Python's have no nanoseconds."""
    return replace_leaves(
        kind,
        lambda leaf: (
            (pa.int32() if leaf.bit_width == 32 else pa.int64())
            if pa.types.is_temporal(leaf)
            else leaf
        ),
    )


def replace_leaves(
    kind: pa.DataType, replaced: Callable[[pa.DataType], pa.DataType]
) -> pa.DataType:
    """`kind` with every type in it that is not nested replaced."""
    if pa.types.is_struct(kind):
        return pa.struct([(inner.name, replace_leaves(inner.type, replaced)) for inner in kind])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(replace_leaves(kind.value_type, replaced), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(replace_leaves(kind.value_type, replaced))
    if pa.types.is_list(kind):
        return pa.list_(replace_leaves(kind.value_type, replaced))
    if pa.types.is_map(kind):
        return pa.map_(
            replace_leaves(kind.key_type, replaced), replace_leaves(kind.item_type, replaced)
        )
    return replaced(kind)


# SUBTLE: where Arrow takes a column's name it may read it as a path, so that
# ".a" means the column "a". What it groups and sorts has names of ours.


def _groupable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column, or if it is nested, text that tells its values apart."""
    if not pa.types.is_nested(column.type):
        return column
    values = column.cast(with_integer_times(column.type)).to_pylist()
    told = [None if value is None else _told(value) for value in values]
    return pa.chunked_array([pa.array(told, pa.large_string())])


def _fitting(sums: pa.ChunkedArray, firsts: pa.ChunkedArray, updates: pa.Table) -> pa.ChunkedArray:
    """Exact sums as integers of 64 bits."""
    totals = [int(total) for total in sums.to_pylist()]
    for total, first in zip(totals, firsts.to_pylist(), strict=True):
        if not MIN_DIFF <= total <= MAX_DIFF:
            row = updates.slice(first, 1).drop_columns([TIME, DIFF])
            raise UsageError(
                f"sum of diffs {total} does not fit into 64 bits",
                detail=f"The data is {abbreviated([str(c[0]) for c in row.columns])}.",
            )
    return pa.chunked_array([pa.array(totals, pa.int64())])


def _told(value: Any) -> str:
    """Text that two nested values share exactly if they are the same, bit by bit."""
    match value:
        case float():
            return struct.pack(">d", value).hex()
        case dict():
            return f"{{{','.join(f'{name!r}:{_told(inner)}' for name, inner in value.items())}}}"
        case list() | tuple():
            return f"[{','.join(map(_told, value))}]"
        case _:
            return repr(value)


def _iota(rows: int) -> pa.Array:
    if rows < 64:
        return pa.array(range(rows), pa.int64())
    ones = pa.repeat(pa.scalar(1, pa.int64()), rows)
    return pc.subtract(pc.cumulative_sum(ones), 1)


def _sortable(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_float16(kind) or pa.types.is_null(kind))
