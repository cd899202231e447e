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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME, consolidate, stored_schema
from penstock.errors import InternalError, UsageError
from penstock.progress import MAX_DIFF

__all__ = [
    "KAFKA",
    "KAFKA_TOPICS",
    "KINESIS",
    "POSTGRES",
    "PUBNUB",
    "S3",
    "SHAPES",
    "SINGLE_PARTITION",
    "Move",
    "Offsets",
    "PartitionKey",
    "Shape",
    "Steps",
    "accumulate",
    "decode_steps",
    "encode_moves",
    "keys_of",
    "offsets_of",
    "partition_starts",
    "shape_of",
]

PartitionKey: TypeAlias = int | str | tuple[()]
"""Identifier of a partition: a number, a name, or `SINGLE_PARTITION`."""

Offsets: TypeAlias = Mapping[Any, int]
"""A source frontier: an exclusive offset for each partition. Missing partitions are at 0."""

SINGLE_PARTITION: Final[PartitionKey] = ()
"""The only partition of a source without partitions."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Columns of remap and of the progress relation for one source type."""

    name: str
    """The source type: kafka, kinesis, …"""

    remap: pa.Schema
    """Columns of the remap collection, without time and diff."""

    progress: pa.Schema
    """Columns of the progress relation."""

    partitions_end: bool
    """True if a partition may end regularly: it is missing from a probe and keeps its row."""

    def __post_init__(self) -> None:
        if len(self.progress) != 1 + (self.partition.type != pa.null()) + 1:
            raise InternalError(
                f"columns of progress and remap of a {self.name} source do not correspond"
            )

    @property
    def increments(self) -> bool:
        """Return whether diffs are offset increments; otherwise rows contain the offset as text."""
        return len(self.remap) == 1

    @property
    def partition(self) -> pa.Field:
        """Return the column that identifies the partition."""
        return self.remap.field(0)

    def check(self, offsets: Offsets) -> None:
        """Check that remap can store each partition and offset.

        Raises:
            UsageError: a partition has another type, or an offset is out of range.
        """
        for partition, offset in offsets.items():
            if not self._is_partition(partition):
                raise UsageError(
                    f"partition {partition!r} of a {self.name} source is not of type "
                    f"{self.partition.type}",
                    detail=f"Column {self.partition.name} of remap stores partitions.",
                )
            if type(offset) is not int or offset < 0 or (self.increments and offset > MAX_DIFF):
                raise UsageError(
                    f"offset {offset!r} of partition {partition!r} of a {self.name} source is "
                    "out of range",
                    detail="Offsets are exclusive uppers: integers from 0"
                    + (f" to {MAX_DIFF}." if self.increments else "."),
                )

    def _is_partition(self, partition: object) -> bool:
        kind = self.partition.type
        if kind == pa.null():
            return partition == SINGLE_PARTITION
        if kind == pa.string():
            return isinstance(partition, str)
        max_partition = 2 ** (kind.bit_width - 1) - 1
        return type(partition) is int and 0 <= partition <= max_partition


class Move(NamedTuple):
    """The advance of a partition from one offset to a greater one."""

    partition: PartitionKey
    was: int
    now: int


class Steps(NamedTuple):
    """Decoded remap: the offset of each partition at each time when it advanced.

    Three columns of equal length, ordered by partition, then by time.
    """

    partitions: pa.Array
    times: pa.Array
    offsets: pa.Array


def shape_of(source_type: str) -> Shape:
    """Return the shape of a source type.

    Raises:
        UsageError: the source type has no remap.
    """
    if source_type in SHAPES:
        return SHAPES[source_type]
    raise UsageError(
        f'source type "{source_type}" has no remap',
        detail=f"Source types with a remap are {', '.join(SHAPES)}.",
    )


def encode_moves(shape: Shape, moves: Iterable[Move], *, time: int) -> pa.Table:
    """Return the updates of remap that bind `moves` to `time`, in the stored schema."""
    if shape.increments:
        rows = [(move.partition, move.now - move.was) for move in moves]
        partitions = _partition_array(shape, [partition for partition, _ in rows])
        columns, diffs = [partitions], [diff for _, diff in rows]
    else:
        texts = [
            (move.partition, str(offset), diff)
            for move in moves
            for offset, diff in ((move.was, -1), (move.now, +1))
            if offset
        ]
        columns = [
            _partition_array(shape, [partition for partition, _, _ in texts]),
            pa.array([offset for _, offset, _ in texts], pa.string()),
        ]
        diffs = [diff for _, _, diff in texts]
    times = pa.array([time] * len(diffs), pa.int64())
    return pa.table(
        [*columns, times, pa.array(diffs, pa.int64())], schema=stored_schema(shape.remap)
    )


def accumulate(shape: Shape, updates: pa.Table, *, before: Offsets | None = None) -> Offsets:
    """Return the frontier after `updates` of remap, given the frontier `before` them.

    Partitions at 0 are omitted.
    """
    steps = decode_steps(shape, updates, before=before)
    keys, offsets = keys_of(shape, steps.partitions), offsets_of(steps.offsets)
    after = {**(before or {}), **dict(zip(keys, offsets, strict=True))}
    return {partition: offset for partition, offset in after.items() if offset}


def decode_steps(shape: Shape, updates: pa.Table, *, before: Offsets | None = None) -> Steps:
    """Decode updates of remap, which may be in any order and unconsolidated.

    `before` is the frontier before `updates`.

    Raises:
        InternalError: an offset decreases. `mint` never writes such updates.
    """
    schema = stored_schema(shape.remap)
    if updates.schema.names != schema.names:
        raise UsageError(
            f"updates do not have the columns of the remap of a {shape.name} source",
            detail=f"The updates have {', '.join(updates.schema.names)}. "
            f"The remap has {', '.join(schema.names)}.",
        )
    rows = consolidate(updates.cast(schema))
    keys = [name for name in (shape.partition.name, TIME) if schema.field(name).type != pa.null()]
    # By diff last: a deleted row precedes the row that replaces it.
    order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in (*keys, DIFF)])
    rows = rows.take(order).combine_chunks()
    if shape.increments:
        return _steps_from_increments(shape, rows, before or {})
    return _steps_from_replacements(shape, rows, before or {})


def _steps_from_increments(shape: Shape, rows: pa.Table, before: Offsets) -> Steps:
    partitions, times = _array(rows, shape.partition.name), _array(rows, TIME)
    diffs = _array(rows, DIFF).to_numpy()
    starts = partition_starts(partitions)
    start_rows = np.flatnonzero(starts)
    initial = [before.get(key, 0) for key in keys_of(shape, partitions.take(pa.array(start_rows)))]
    # Sums over all partitions may wrap around. The subtraction reverses that.
    sums = np.cumsum(diffs)
    base = sums[start_rows] - diffs[start_rows] - np.array(initial, np.int64)
    offsets = sums - base[np.cumsum(starts) - 1] if len(rows) else sums
    decreases = np.flatnonzero((diffs < 0) | (offsets < 0))
    if len(decreases):
        raise _decrease_error(shape, partitions[int(decreases[0])], times[int(decreases[0])])
    return Steps(partitions, times, pa.array(offsets, pa.int64()))


def _steps_from_replacements(shape: Shape, rows: pa.Table, before: Offsets) -> Steps:
    current: dict[PartitionKey, int] = dict(before)
    steps: list[tuple[PartitionKey, int, int]] = []
    columns = [column.to_pylist() for column in rows.columns]
    for (partition, time), group in groupby(zip(*columns, strict=True), key=itemgetter(0, 2)):
        changes = [(diff, int(text)) for _, text, _, diff in group]
        was, now = current.get(partition, 0), dict(changes).get(+1, 0)
        if now <= was or changes != [*([(-1, was)] if was else []), (+1, now)]:
            raise _decrease_error(shape, partition, time)
        current[partition] = now
        steps.append((partition, time, now))
    return Steps(
        _partition_array(shape, [partition for partition, _, _ in steps]),
        pa.array([time for _, time, _ in steps], pa.int64()),
        pa.array([str(offset) for _, _, offset in steps], pa.string()),
    )


def keys_of(shape: Shape, partitions: pa.Array) -> list[PartitionKey]:
    """Return the partition keys in a partition column."""
    if shape.partition.type == pa.null():
        return [SINGLE_PARTITION] * len(partitions)
    keys: list[PartitionKey] = partitions.to_pylist()
    return keys


def offsets_of(offsets: pa.Array) -> list[int]:
    """Return the offsets in an offset column, which contains integers or decimal text."""
    return [int(offset) for offset in offsets.to_pylist()]


def partition_starts(partitions: pa.Array) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Return a mask of the first row of each partition in a sorted column."""
    starts = np.zeros(len(partitions), np.bool_)
    starts[:1] = True
    if partitions.type != pa.null() and len(partitions) > 1:
        starts[1:] = pc.not_equal(partitions[1:], partitions[:-1]).to_numpy(zero_copy_only=False)
    return starts


def _partition_array(shape: Shape, keys: list[PartitionKey]) -> pa.Array:
    kind = shape.partition.type
    return pa.nulls(len(keys)) if kind == pa.null() else pa.array(keys, kind)


def _array(rows: pa.Table, name: str) -> pa.Array:
    column = rows.column(name)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _decrease_error(shape: Shape, partition: object, time: object) -> InternalError:
    return InternalError(
        f"remap of a {shape.name} source moves backwards",
        detail=f"The offset of partition {partition} decreases at time {time}.",
        hint="Check the storage location with: penstock verify LOCATION",
    )


def _shape(
    name: str,
    remap: list[tuple[str, pa.DataType]],
    progress: list[tuple[str, pa.DataType]],
    *,
    partitions_end: bool,
) -> Shape:
    return Shape(
        name,
        pa.schema([pa.field(column, kind, kind == pa.null()) for column, kind in remap]),
        pa.schema(
            [pa.field(column, kind, False) for column, kind in ((TIME, pa.int64()), *progress)]
        ),
        partitions_end,
    )


KAFKA: Final = _shape(
    "kafka",
    [("partition", pa.int32())],
    [("partition", pa.int32()), ("offset", pa.int64())],
    partitions_end=False,
)
KAFKA_TOPICS: Final = _shape(
    "kafka-topics",
    # In Kafka's notation: topic, dash, partition number.
    [("partition", pa.string())],
    [("partition", pa.string()), ("offset", pa.int64())],
    partitions_end=False,
)
KINESIS: Final = _shape(
    "kinesis",
    [("shard", pa.string()), ("sequence_number", pa.string())],
    [("shard_id", pa.string()), ("sequence_number", pa.string())],
    partitions_end=True,
)
POSTGRES: Final = _shape(
    "postgres", [("ignored", pa.null())], [("lsn", pa.int64())], partitions_end=False
)
PUBNUB: Final = _shape(
    "pubnub",
    # Regions are unsigned integers, and Spark has no unsigned type.
    [("region", pa.int64())],
    [("region", pa.int64()), ("timetoken", pa.int64())],
    partitions_end=True,
)
S3: Final = _shape(
    "s3",
    [("object_key", pa.string())],
    [("key", pa.string()), ("byte_offset", pa.int64())],
    partitions_end=True,
)

SHAPES: Final[Mapping[str, Shape]] = {
    shape.name: shape for shape in (KAFKA, KAFKA_TOPICS, KINESIS, POSTGRES, PUBNUB, S3)
}
"""All shapes, by source type."""
