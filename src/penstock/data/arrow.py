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
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InternalError

__all__ = [
    "DIFF",
    "PROGRESSED",
    "TIME",
    "advance",
    "consolidate",
    "from_ipc",
    "sort_rows",
    "to_ipc",
]

TIME: Final = "mz_timestamp"
DIFF: Final = "mz_diff"
PROGRESSED: Final = "mz_progressed"
"""Never at rest; in what `tail` prints."""

_ROW: Final = "__row"
_BYTES_OF: Final = "__bytes_of_"


def advance(updates: pa.Table, since: int) -> pa.Table:
    """Bring every time below `since` up to it."""
    at = updates.schema.get_field_index(TIME)
    times = pc.max_element_wise(updates.column(at), pa.scalar(since, pa.int64()))
    return updates.set_column(at, updates.schema.field(at), times)


def consolidate(updates: pa.Table) -> pa.Table:
    """Add up the diffs of equal rows at equal times and drop what adds up to nothing.

    Among equal rows the first stays, so the order of first appearance is kept.
    """
    if updates.num_rows == 0:
        return updates
    keyed, names = _groupable(updates)
    rows = (
        pa.array(range(updates.num_rows), pa.int64()) if updates.num_rows < 64 else _iota(updates)
    )
    grouped = (
        keyed.append_column(_ROW, rows)
        .group_by([*names, TIME], use_threads=False)
        .aggregate([(DIFF, "sum"), (_ROW, "min")])
    )
    sums = grouped.column(f"{DIFF}_sum")
    kept = grouped.filter(pc.not_equal(sums, 0))
    if kept.num_rows == updates.num_rows:
        return updates
    order = pc.sort_indices(kept.column(f"{_ROW}_min"))
    kept = kept.take(order)
    at = updates.schema.get_field_index(DIFF)
    rows_kept = updates.take(kept.column(f"{_ROW}_min"))
    return rows_kept.set_column(at, updates.schema.field(at), kept.column(f"{DIFF}_sum"))


def sort_rows(updates: pa.Table, key: tuple[str, ...]) -> pa.Table:
    """In order of key, then time; without a key, of all columns that have an order."""
    by = [
        name for name in key or updates.schema.names if _sortable(updates.schema.field(name).type)
    ]
    order = [(name, "ascending") for name in dict.fromkeys([*by, TIME, DIFF])]
    return updates.take(pc.sort_indices(updates, sort_keys=order))


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


def _groupable(updates: pa.Table) -> tuple[pa.Table, list[str]]:
    """The table with each nested column replaced by bytes that tell its values apart."""
    names: list[str] = []
    for field in list(updates.schema):
        if field.name in (TIME, DIFF):
            continue
        if pa.types.is_nested(field.type):
            column = updates.column(field.name).cast(_numbered(field.type))
            told = [None if value is None else _told(value) for value in column.to_pylist()]
            updates = updates.append_column(_BYTES_OF + field.name, pa.array(told, pa.string()))
            names.append(_BYTES_OF + field.name)
        else:
            names.append(field.name)
    return updates, names


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


def _numbered(kind: pa.DataType) -> pa.DataType:
    """`kind` with times as the integers they are stored as: Python's have no nanoseconds."""
    if pa.types.is_temporal(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if pa.types.is_struct(kind):
        return pa.struct([(inner.name, _numbered(inner.type)) for inner in kind.fields])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_numbered(kind.value_type), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_numbered(kind.value_type))
    if pa.types.is_list(kind):
        return pa.list_(_numbered(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_numbered(kind.key_type), _numbered(kind.item_type))
    return kind


def _iota(updates: pa.Table) -> pa.Array:
    ones = pa.repeat(pa.scalar(1, pa.int64()), updates.num_rows)
    return pc.subtract(pc.cumulative_sum(ones), 1)


def _sortable(kind: pa.DataType) -> bool:
    return not (
        pa.types.is_nested(kind)
        or pa.types.is_float16(kind)
        or pa.types.is_null(kind)
        or kind in (pa.string_view(), pa.binary_view())
    )
