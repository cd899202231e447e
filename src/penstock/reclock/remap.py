"""The remap collection: which of a source's offsets belong to which of our times.

A source counts in its own way: a topic in offsets for each partition, Postgres in
log positions. At a tick we bind how far it had come to a time of ours, and keep
that in a collection beside the source's data, its *remap*. The contents of remap
as of t are the source's frontier as of t:

    data             one row for each partition
    time             when it was bound
    diff             by how much the partition's offset rose

so the offset of a partition as of t is nothing but the count of its row as of t,
and consolidation, compaction and reading as of need not know that this collection
is about offsets.

    (1, 1649686076392, +42)      as of …392    1 ↦ 42    offsets 0 … 41
    (1, 1649686079487,  +3)      as of …487    1 ↦ 45    and    42 … 44

**Offsets are exclusive uppers.** +42 covers the 42 offsets from 0 to 41, and one
record at offset 0 makes 1. A partition that is known and still at 0 has no row.

Two shapes need a word. A Postgres source has no partitions, so its row has no
columns; a collection has at least one, so it has `ignored`, of the type with one
value, null. Kinesis sequence numbers have 56 digits and fit no diff: there the
frontier itself is stored, as a row (shard, sequence number in decimal) that comes
with +1 and goes with -1 when the next one comes. Shards go by their names, which
is what Kinesis calls them; no rule makes the names numbers.

**A source without a gauge** cannot say how far it has come, so there is nothing to
bind and no shape for it. It has one collection, its data, and no progress relation.
Its times are arrival ticks: whatever arrived since the last tick is committed at
the next one, in one entry, and is definite from then on. What arrived and was not
committed when the process stopped is gone, unless the sender repeats it.
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
    "WHOLE",
    "Move",
    "Offsets",
    "PartitionKey",
    "Shape",
    "Steps",
    "accumulated",
    "begins",
    "encoded",
    "keys_of",
    "offsets_of",
    "shape_of",
    "steps",
]

PartitionKey: TypeAlias = int | str | tuple[()]
"""What a source calls a partition: a number, a name, or `WHOLE`."""

Offsets: TypeAlias = Mapping[Any, int]
"""A source's frontier: an exclusive offset for each partition, 0 for those it does not have."""

WHOLE: Final[PartitionKey] = ()
"""The one partition of a source that has none."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What remap and progress look like for one type of source."""

    name: str
    """The type of source: kafka, kinesis, …"""

    remap: pa.Schema
    """The columns of the remap collection, without time and diff."""

    progress: pa.Schema
    """The columns of the progress relation, which are seen by users."""

    partitions_end: bool
    """Whether a partition may be gone from a probe and nothing is wrong: it keeps its row."""

    def __post_init__(self) -> None:
        if len(self.progress) != 1 + (self.partition.type != pa.null()) + 1:
            raise InternalError(f"progress of {self.name} does not show what remap holds")

    @property
    def increments(self) -> bool:
        """Whether diffs are increments of the offset, and not +1 and -1 of a row that holds it."""
        return len(self.remap) == 1

    @property
    def partition(self) -> pa.Field:
        """The column that tells partitions apart."""
        return self.remap.field(0)

    def check(self, offsets: Offsets) -> None:
        """Check that each partition and offset can be kept.

        Raises:
            UsageError: one cannot.
        """
        for partition, offset in offsets.items():
            if not self._holds(partition):
                raise UsageError(
                    f"partition {partition!r} of a {self.name} source is not of the type "
                    f"{self.partition.type}",
                    hint=f"Name partitions as the column {self.partition.name} of remap does.",
                )
            if type(offset) is not int or offset < 0 or (self.increments and offset > MAX_DIFF):
                raise UsageError(
                    f"offset {offset!r} of partition {partition!r} of a {self.name} source is "
                    "out of range",
                    detail="Offsets are exclusive uppers: whole numbers from 0"
                    + (f" to {MAX_DIFF}." if self.increments else "."),
                )

    def _holds(self, partition: object) -> bool:
        kind = self.partition.type
        if kind == pa.null():
            return partition == WHOLE
        if kind == pa.string():
            return isinstance(partition, str)
        most = 2 ** (kind.bit_width - 1) - 1
        return type(partition) is int and 0 <= partition <= most


class Move(NamedTuple):
    """A partition went on, from one offset to a greater one; to 0 if its source is closed."""

    partition: PartitionKey
    was: int
    now: int


class Steps(NamedTuple):
    """Remap, read: how far each partition had come at each time at which it moved.

    Three columns of equal length, ordered by partition, then by time. An offset is
    null from the time on at which the source was closed.
    """

    partitions: pa.Array
    times: pa.Array
    offsets: pa.Array


def shape_of(source_type: str) -> Shape:
    """The shape for a type of source.

    Raises:
        UsageError: there is no such type.
    """
    if source_type in SHAPES:
        return SHAPES[source_type]
    raise UsageError(
        f'source type "{source_type}" has no gauge of progress',
        hint=f"Types with one are {', '.join(SHAPES)}.",
    )


def encoded(shape: Shape, moves: Iterable[Move], *, at: int) -> pa.Table:
    """The updates that bind `moves` to a time, as they are stored."""
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
    times = pa.array([at] * len(diffs), pa.int64())
    return pa.table(
        [*columns, times, pa.array(diffs, pa.int64())], schema=stored_schema(shape.remap)
    )


def accumulated(shape: Shape, updates: pa.Table, *, before: Offsets | None = None) -> Offsets:
    """How far each partition has come after `updates`, having come to `before` without them."""
    read = steps(shape, updates, before=before)
    keys, offsets = keys_of(shape, read.partitions), offsets_of(read.offsets)
    after = {**(before or {}), **dict(zip(keys, offsets, strict=True))}
    return {partition: offset for partition, offset in after.items() if offset}


def steps(shape: Shape, updates: pa.Table, *, before: Offsets | None = None) -> Steps:
    """What `updates` of remap say, in any order and not necessarily consolidated.

    `before` is how far each partition had come without them.

    Raises:
        InternalError: an offset would go back, which no minter writes.
    """
    wanted = stored_schema(shape.remap)
    if updates.schema.names != wanted.names:
        raise UsageError(
            f"updates have the columns {', '.join(updates.schema.names)}, which is not the remap "
            f"of a {shape.name} source",
            hint=f"It has {', '.join(wanted.names)}.",
        )
    rows = consolidate(updates.cast(wanted))
    by = [name for name in (shape.partition.name, TIME) if wanted.field(name).type != pa.null()]
    # A row that goes stands before the one that comes in its place.
    order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in (*by, DIFF)])
    rows = rows.take(order).combine_chunks()
    if shape.increments:
        return _summed(shape, rows, before or {})
    return _replaced(shape, rows, before or {})


def _summed(shape: Shape, rows: pa.Table, before: Offsets) -> Steps:
    """Offsets are running sums of the diffs of each partition."""
    partitions, times = _array(rows, shape.partition.name), _array(rows, TIME)
    diffs = _array(rows, DIFF).to_numpy()
    first = begins(partitions)
    at_begin = np.flatnonzero(first)
    known = [before.get(key, 0) for key in keys_of(shape, partitions.take(pa.array(at_begin)))]
    # Sums that wrap around in one partition are wrapped back by the difference.
    sums = np.cumsum(diffs)
    base = sums[at_begin] - diffs[at_begin] - np.array(known, np.int64)
    offsets = sums - base[np.cumsum(first) - 1] if len(rows) else sums
    closed = (offsets == 0) & np.append(first[1:], True)[: len(rows)]
    wrong = np.flatnonzero(((diffs < 0) & ~closed) | (offsets < 0))
    if len(wrong):
        raise _went_back(shape, partitions[int(wrong[0])], times[int(wrong[0])])
    return Steps(partitions, times, pa.array(offsets, pa.int64(), mask=closed))


def _replaced(shape: Shape, rows: pa.Table, before: Offsets) -> Steps:
    """Offsets are in rows, each of which goes when the next one comes."""
    at: dict[PartitionKey, int | None] = dict(before)
    read: list[tuple[PartitionKey, int, int | None]] = []
    columns = [column.to_pylist() for column in rows.columns]
    for (partition, time), group in groupby(zip(*columns, strict=True), key=itemgetter(0, 2)):
        changes = [(diff, int(text)) for _, text, _, diff in group]
        was, now = at.get(partition, 0), dict(changes).get(+1, 0)
        replaced = [(-1, was)] if was else []
        if was is None or changes != [*replaced, *([(+1, now)] if now > was else [])]:
            raise _went_back(shape, partition, time)
        at[partition] = now or None
        read.append((partition, time, at[partition]))
    return Steps(
        _partition_array(shape, [partition for partition, _, _ in read]),
        pa.array([time for _, time, _ in read], pa.int64()),
        pa.array([None if now is None else str(now) for _, _, now in read], pa.string()),
    )


def keys_of(shape: Shape, partitions: pa.Array) -> list[PartitionKey]:
    """Partitions as a source names them."""
    if shape.partition.type == pa.null():
        return [WHOLE] * len(partitions)
    keys: list[PartitionKey] = partitions.to_pylist()
    return keys


def offsets_of(offsets: pa.Array) -> list[int | None]:
    """Offsets as numbers; none from where the source was closed."""
    return [None if offset is None else int(offset) for offset in offsets.to_pylist()]


def begins(partitions: pa.Array) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Where, in their order, another partition begins."""
    first = np.zeros(len(partitions), np.bool_)
    first[:1] = True
    if partitions.type != pa.null() and len(partitions) > 1:
        first[1:] = pc.not_equal(partitions[1:], partitions[:-1]).to_numpy(zero_copy_only=False)
    return first


def _partition_array(shape: Shape, keys: list[PartitionKey]) -> pa.Array:
    kind = shape.partition.type
    return pa.nulls(len(keys)) if kind == pa.null() else pa.array(keys, kind)


def _array(rows: pa.Table, name: str) -> pa.Array:
    column = rows.column(name)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _went_back(shape: Shape, partition: object, time: object) -> InternalError:
    return InternalError(
        f"remap of a {shape.name} source goes back",
        detail=f"Partition {partition} has less at {time} than before.",
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
    # As Kafka writes them: the topic, and after a dash the number.
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
    # A region is a number without a sign, which Spark has no type for.
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
"""By type of source."""
