"""The remap collection: source frontiers bound to times.

Each source counts in its own way: Kafka in offsets per partition, Postgres in LSNs. A tick binds
the frontier of the source to a time and stores the binding in *remap*, a collection in the same
storage location as the data. The contents of remap as of t are the source frontier as of t:

    data             one row for each partition
    time             the time of the binding
    diff             the increment of the partition's offset

The offset of a partition as of t is the multiplicity of its row as of t. Consolidation,
compaction and reads as of a time therefore need no special case for remap.

    (1, 1649686076392, +42)      as of …392    1 ↦ 42    offsets 0 … 41
    (1, 1649686079487,  +3)      as of …487    1 ↦ 45    and    42 … 44

**Offsets are exclusive uppers.** +42 covers the 42 offsets from 0 to 41, and one record at
offset 0 gives 1. A partition that is known and still at 0 has no row.

Two source types differ. A Postgres source has no partitions, and a collection has at least one
column, so its row has the column `ignored` of the Arrow type null. Kinesis sequence numbers have
56 digits and do not fit into a diff. There the row contains shard and sequence number in decimal;
a binding inserts the new row with +1 and deletes the previous row with -1. Shards are identified
by name, because Kinesis does not define the names to be numbers.

**A source without a position** has no remap and no progress relation. Its times are arrival
ticks: records received since the last tick are committed at the next one, in one entry, and are
definite from then on. Records that were received and not committed are lost when the process
stops, unless the sender repeats them.
"""

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME, consolidate, stored_schema
from penstock.data.remap_form import RemapForm
from penstock.errors import InternalError, UsageError
from penstock.progress import SINGLE_PARTITION, Frontier, Partition

__all__ = [
    "Move",
    "Steps",
    "accumulate",
    "decode_steps",
    "encode_moves",
    "keys_of",
    "partition_starts",
]


class Move(NamedTuple):
    """The advance of a partition from one offset to a greater one."""

    partition: Partition
    was: int
    now: int


class Steps(NamedTuple):
    """Decoded remap: the offset of each partition at each time when it advanced.

    Three columns of equal length, ordered by partition, then by time.
    """

    partitions: pa.Array
    times: pa.Array
    offsets: pa.Array


def encode_moves(form: RemapForm, moves: Iterable[Move], *, time: int) -> pa.Table:
    """Return the updates of remap that bind `moves` to `time`, in the stored schema."""
    if form.increments:
        rows = [(move.partition, move.now - move.was) for move in moves]
        partitions = _partition_array(form, [partition for partition, _ in rows])
        columns, diffs = [partitions], [diff for _, diff in rows]
    else:
        texts = [
            (move.partition, str(offset), diff)
            for move in moves
            for offset, diff in ((move.was, -1), (move.now, +1))
            if offset
        ]
        columns = [
            _partition_array(form, [partition for partition, _, _ in texts]),
            pa.array([offset for _, offset, _ in texts], pa.string()),
        ]
        diffs = [diff for _, _, diff in texts]
    times = pa.array([time] * len(diffs), pa.int64())
    return pa.table(
        [*columns, times, pa.array(diffs, pa.int64())], schema=stored_schema(form.remap)
    )


def accumulate(
    form: RemapForm, updates: pa.Table, *, before: Frontier[Any] | None = None
) -> Frontier[Any]:
    """Return the frontier after `updates` of remap, given the frontier `before` them.

    Partitions at 0 are omitted.
    """
    steps = decode_steps(form, updates, before=before)
    # An offset is an integer or decimal text.
    offsets = [int(offset) for offset in steps.offsets.to_pylist()]
    after = {
        **dict((before or Frontier()).items()),
        **dict(zip(keys_of(form, steps.partitions), offsets, strict=True)),
    }
    return Frontier({partition: offset for partition, offset in after.items() if offset})


def decode_steps(
    form: RemapForm, updates: pa.Table, *, before: Frontier[Any] | None = None
) -> Steps:
    """Decode updates of remap, which may be in any order and unconsolidated.

    `before` is the frontier before `updates`.

    Raises:
        InternalError: an offset decreases. `mint` never writes such updates.
    """
    schema = stored_schema(form.remap)
    if updates.schema.names != schema.names:
        raise UsageError(
            f"updates do not have the columns of the remap of a {form.name} source",
            detail=f"The updates have {', '.join(updates.schema.names)}. "
            f"The remap has {', '.join(schema.names)}.",
        )
    rows = consolidate(updates.cast(schema))
    keys = [name for name in (form.partition.name, TIME) if schema.field(name).type != pa.null()]
    # By diff last: a deleted row precedes the row that replaces it.
    order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in (*keys, DIFF)])
    rows = rows.take(order).combine_chunks()
    if form.increments:
        return _steps_from_increments(form, rows, before or Frontier())
    return _steps_from_replacements(form, rows, before or Frontier())


def _steps_from_increments(form: RemapForm, rows: pa.Table, before: Frontier[Any]) -> Steps:
    partitions, times = _array(rows, form.partition.name), _array(rows, TIME)
    diffs = _array(rows, DIFF).to_numpy()
    starts = partition_starts(partitions)
    start_rows = np.flatnonzero(starts)
    initial = [before[key] for key in keys_of(form, partitions.take(pa.array(start_rows)))]
    # Sums over all partitions may wrap around. The subtraction reverses that.
    sums = np.cumsum(diffs)
    base = sums[start_rows] - diffs[start_rows] - np.array(initial, np.int64)
    offsets = sums - base[np.cumsum(starts) - 1] if len(rows) else sums
    decreases = np.flatnonzero((diffs < 0) | (offsets < 0))
    if len(decreases):
        raise _decrease_error(form, partitions[int(decreases[0])], times[int(decreases[0])])
    return Steps(partitions, times, pa.array(offsets, pa.int64()))


def _steps_from_replacements(form: RemapForm, rows: pa.Table, before: Frontier[Any]) -> Steps:
    current: dict[Partition, int] = dict(before.items())
    steps: list[tuple[Partition, int, int]] = []
    columns = [column.to_pylist() for column in rows.columns]
    for (partition, time), group in groupby(zip(*columns, strict=True), key=itemgetter(0, 2)):
        changes = [(diff, int(text)) for _, text, _, diff in group]
        was, now = current.get(partition, 0), dict(changes).get(+1, 0)
        if now <= was or changes != [*([(-1, was)] if was else []), (+1, now)]:
            raise _decrease_error(form, partition, time)
        current[partition] = now
        steps.append((partition, time, now))
    return Steps(
        _partition_array(form, [partition for partition, _, _ in steps]),
        pa.array([time for _, time, _ in steps], pa.int64()),
        pa.array([str(offset) for _, _, offset in steps], pa.string()),
    )


def keys_of(form: RemapForm, partitions: pa.Array) -> list[Partition]:
    """Return the partition keys in a partition column."""
    if form.partition.type == pa.null():
        return [SINGLE_PARTITION] * len(partitions)
    keys: list[Partition] = partitions.to_pylist()
    return keys


def partition_starts(partitions: pa.Array) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Return a mask of the first row of each partition in a sorted column."""
    starts = np.zeros(len(partitions), np.bool_)
    starts[:1] = True
    if partitions.type != pa.null() and len(partitions) > 1:
        starts[1:] = pc.not_equal(partitions[1:], partitions[:-1]).to_numpy(zero_copy_only=False)
    return starts


def _partition_array(form: RemapForm, keys: list[Partition]) -> pa.Array:
    kind = form.partition.type
    return pa.nulls(len(keys)) if kind == pa.null() else pa.array(keys, kind)


def _array(rows: pa.Table, name: str) -> pa.Array:
    column = rows.column(name)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _decrease_error(form: RemapForm, partition: object, time: object) -> InternalError:
    return InternalError(
        f"remap of a {form.name} source moves backwards",
        detail=f"The offset of partition {partition} decreases at time {time}.",
        hint="Check the storage location with: penstock verify LOCATION",
    )
