"""Stored forms of the remap: the columns that bind positions of a source to times.

A form is a property of a source kind. Remap stores one row for each partition; `penstock.reclock`
writes and reads it.
"""

from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from penstock.data.arrow import TIME
from penstock.errors import InternalError, UsageError
from penstock.progress import MAX_DIFF, SINGLE_PARTITION, Frontier

__all__ = [
    "KAFKA",
    "KAFKA_TOPICS",
    "KINESIS",
    "POSTGRES",
    "PUBNUB",
    "S3",
    "RemapForm",
    "make_form",
]


@dataclass(frozen=True, slots=True)
class RemapForm:
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

    def check(self, frontier: Frontier[Any]) -> None:
        """Check that remap can store each partition and offset.

        Raises:
            UsageError: a partition has another type, or an offset is out of range.
        """
        for partition, offset in frontier.items():
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


def make_form(
    name: str,
    remap: list[tuple[str, pa.DataType]],
    progress: list[tuple[str, pa.DataType]],
    *,
    partitions_end: bool,
) -> RemapForm:
    """Return a form, given the columns of remap and of the progress relation.

    The first column of remap identifies the partition. A single column stores offsets as
    increments; a second one stores each offset as text.
    """
    return RemapForm(
        name,
        pa.schema([pa.field(column, kind, kind == pa.null()) for column, kind in remap]),
        pa.schema(
            [pa.field(column, kind, False) for column, kind in ((TIME, pa.int64()), *progress)]
        ),
        partitions_end,
    )


KAFKA: Final = make_form(
    "kafka",
    [("partition", pa.int32())],
    [("partition", pa.int32()), ("offset", pa.int64())],
    partitions_end=False,
)
KAFKA_TOPICS: Final = make_form(
    "kafka-topics",
    # In Kafka's notation: topic, dash, partition number.
    [("partition", pa.string())],
    [("partition", pa.string()), ("offset", pa.int64())],
    partitions_end=False,
)
KINESIS: Final = make_form(
    "kinesis",
    [("shard", pa.string()), ("sequence_number", pa.string())],
    [("shard_id", pa.string()), ("sequence_number", pa.string())],
    partitions_end=True,
)
POSTGRES: Final = make_form(
    "postgres", [("ignored", pa.null())], [("lsn", pa.int64())], partitions_end=False
)
PUBNUB: Final = make_form(
    "pubnub",
    # Regions are unsigned integers, and Spark has no unsigned type.
    [("region", pa.int64())],
    [("region", pa.int64()), ("timetoken", pa.int64())],
    partitions_end=True,
)
S3: Final = make_form(
    "s3",
    [("object_key", pa.string())],
    [("key", pa.string()), ("byte_offset", pa.int64())],
    partitions_end=True,
)
