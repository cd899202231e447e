"""Updates as Arrow: user columns, then `mz_timestamp` and `mz_diff`.

A table of updates stands for a multiset, the sum of its diffs. Two laws hold:

    sum(consolidate(a + b)) = sum(consolidate(a) + consolidate(b))
    contents of advance(updates, since) as of t = contents of updates as of t, for t ≥ since

Two rows are equal if their columns are equal bit by bit: NaN equals the same NaN, -0.0 differs
from 0.0, null equals null. A retraction therefore cancels exactly the row that was written.
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
"""Column of the output of `penstock tail`; never stored."""


def advance(updates: pa.Table, since: int) -> pa.Table:
    """Return the updates with every time below `since` replaced by `since`."""
    at = updates.schema.get_field_index(TIME)
    times = pc.max_element_wise(updates.column(at), pa.scalar(since, pa.int64()))
    return updates.set_column(at, updates.schema.field(at), times)


def negate(updates: pa.Table) -> pa.Table:
    """Return the updates with negated diffs, which retract `updates`."""
    at = updates.schema.get_field_index(DIFF)
    return updates.set_column(at, updates.schema.field(at), pc.negate_checked(updates.column(at)))


def consolidate(updates: pa.Table) -> pa.Table:
    """Sum the diffs of equal rows at equal times, and drop rows with a sum of zero.

    The result is in order of first appearance.

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
    nonzero = pc.not_equal(sums, 0)
    firsts, sums = firsts.filter(nonzero), sums.filter(nonzero)
    if len(firsts) == updates.num_rows:
        return updates
    order = pc.sort_indices(firsts)
    rows = updates.take(firsts.take(order))
    return rows.set_column(at, updates.schema.field(at), sums.take(order))


def sort_rows(updates: pa.Table, key: tuple[str, ...]) -> pa.Table:
    """Sort by key, then time; without a key, by all columns that have an order."""
    columns = [updates.column(name) for name in sort_columns(updates.schema, key)]
    names = [f"c{i}" for i in range(len(columns))]
    order = pc.sort_indices(
        pa.table(columns, names=names), sort_keys=[(name, "ascending") for name in names]
    )
    return updates.take(order)


def sort_columns(schema: pa.Schema, key: tuple[str, ...]) -> list[str]:
    """Return the columns that `sort_rows` sorts by, most significant first."""
    by = [name for name in key or schema.names if _sortable(schema.field(name).type)]
    return list(dict.fromkeys([*by, TIME, DIFF]))


def to_ipc(updates: pa.Table) -> bytes:
    """Encode updates as one Arrow IPC record-batch message, without the schema."""
    batches = updates.combine_chunks().to_batches()
    if len(batches) != 1:
        raise InternalError(
            f"inline batch of {updates.num_rows} rows has {len(batches)} messages instead of 1"
        )
    encoded: bytes = batches[0].serialize().to_pybytes()
    return encoded


def from_ipc(data: bytes, schema: pa.Schema) -> pa.Table:
    """Decode one record-batch message with the given schema."""
    return pa.Table.from_batches([pa.ipc.read_record_batch(pa.py_buffer(data), schema)])


def with_integer_times(kind: pa.DataType) -> pa.DataType:
    """Return `kind` with stored integers for temporal types: Python's have no nanoseconds."""
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
    """Return `kind` with `replaced` applied to every type in it that is not nested."""
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


# SUBTLE: Arrow may parse a column name as a path: ".a" then means the column "a". Tables to
# group and sort therefore have generated column names.


def _groupable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the column; for a nested column, text that is equal if and only if its values are."""
    if not pa.types.is_nested(column.type):
        return column
    values = column.cast(with_integer_times(column.type)).to_pylist()
    texts = [None if value is None else _identity_text(value) for value in values]
    return pa.chunked_array([pa.array(texts, pa.large_string())])


def _fitting(sums: pa.ChunkedArray, firsts: pa.ChunkedArray, updates: pa.Table) -> pa.ChunkedArray:
    totals = [int(total) for total in sums.to_pylist()]
    for total, first in zip(totals, firsts.to_pylist(), strict=True):
        if not MIN_DIFF <= total <= MAX_DIFF:
            row = updates.slice(first, 1).drop_columns([TIME, DIFF])
            raise UsageError(
                f"sum of diffs {total} does not fit into 64 bits",
                detail=f"The data is {abbreviated([str(c[0]) for c in row.columns])}.",
            )
    return pa.chunked_array([pa.array(totals, pa.int64())])


def _identity_text(value: Any) -> str:
    """Return text that is equal for two nested values if and only if they are, bit by bit."""
    match value:
        case float():
            return struct.pack(">d", value).hex()
        case dict():
            fields = (f"{name!r}:{_identity_text(inner)}" for name, inner in value.items())
            return f"{{{','.join(fields)}}}"
        case list() | tuple():
            return f"[{','.join(map(_identity_text, value))}]"
        case _:
            return repr(value)


def _iota(rows: int) -> pa.Array:
    if rows < 64:
        return pa.array(range(rows), pa.int64())
    ones = pa.repeat(pa.scalar(1, pa.int64()), rows)
    return pc.subtract(pc.cumulative_sum(ones), 1)


def _sortable(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_float16(kind) or pa.types.is_null(kind))
