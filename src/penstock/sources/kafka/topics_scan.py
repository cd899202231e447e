"""Ranges of several topics, read as one; each topic's records are prepared and finished by its own.

Records of the topic of transactions become no rows. Tasks hand them back as they are told.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.sources.kafka.errors import BadRecord
from penstock.sources.kafka.formats import Format
from penstock.sources.kafka.layout import ERRORS
from penstock.sources.kafka.prepared import TOPIC
from penstock.sources.kafka.scan import Finishing, KafkaScan, Told
from penstock.sources.kafka.transactions import MARKERS
from penstock.sources.source import ScanOutput, SideRows

__all__ = ["Markers", "ToldOfTopics", "TopicsScan", "output_of"]


def output_of(output: str, topic: str) -> str:
    """What an output of a topic's own is called among those of several."""
    return output if output == ERRORS else f"{output} of {topic}"


@dataclass(frozen=True, slots=True)
class Markers:
    """How the topic of transactions is read."""

    topic: str
    format: Format

    def prepare(self, read: pa.Table) -> pa.Table:
        """What its records say, and of each that says nothing we know, why."""
        decoded = self.format.decode(read.column("value"))
        rows = decoded.rows
        reasons: list[str | None] = [None] * rows.num_rows
        for bad in decoded.bad:
            reasons[bad.row] = bad.reason
        told = pa.array(reasons, pa.string())
        table = pa.table(
            {
                "transaction": rows.column("id"),
                "offset": read.column("offset"),
                "status": rows.column("status"),
                "counts": rows.column("counts"),
                TOPIC: read.column("topic"),
                "reason": told,
            }
        )
        return table.filter(pc.or_(pc.is_valid(rows.column("id")), pc.is_valid(told)))

    def finish(self, table: pa.Table) -> pa.Table:
        """What they said.

        Raises:
            BadRecord: one says nothing that we know, so that no order can be kept after it.
        """
        bad = table.filter(pc.is_valid(table.column("reason")))
        if bad.num_rows:
            offset, reason = (bad.column(name)[0].as_py() for name in ("offset", "reason"))
            raise BadRecord(self.topic, 0, offset, reason, others=bad.num_rows - 1)
        return pa.table(table.select(MARKERS.names).columns, schema=MARKERS)


class ToldOfTopics(NamedTuple):
    """What a task tells."""

    topics: Mapping[str, Told]
    markers: pa.Table


@dataclass(frozen=True, slots=True)
class TopicsScan:
    """Offsets of the partitions of several topics, each from one to another."""

    options: Mapping[str, str] = field(repr=False)
    secrets: Collection[str] = field(repr=False)
    size: int
    into: Mapping[str, str]
    side_rows: Mapping[str, SideRows]
    topics: Mapping[str, KafkaScan]
    """By topic, what its records come to."""

    markers: Markers | None = None
    format: str = "kafka"

    @property
    def by_key(self) -> bool:
        """Whether records with one key must be finished by one task."""
        return any(each.by_key for each in self.topics.values())

    def prepare(self, rows: Iterable[pa.RecordBatch]) -> Iterable[pa.Table]:
        """Records, decoded: each table of one topic."""
        preparing: dict[str, Callable[[pa.Table], pa.Table]] = {
            topic: scan.preparing() for topic, scan in self.topics.items()
        }
        if self.markers is not None:
            preparing[self.markers.topic] = self.markers.prepare
        for batch in rows:
            table = pa.Table.from_batches([batch])
            for topic in pc.unique(table.column("topic")).to_pylist():
                mine = table.filter(pc.equal(table.column("topic"), topic))
                prepared = preparing[topic](mine)
                if prepared.num_rows:
                    yield prepared

    def places(self, rows: pa.Table, count: int) -> pa.Array:
        """For each record, where it meets the others of its key."""
        scan = self.topics.get(_topic_of(rows))
        if scan is None:
            return pa.array(np.zeros(rows.num_rows, np.int32))
        return scan.places(rows, count)

    def finish(self, rows: Iterable[pa.Table], out: ScanOutput) -> ToldOfTopics:
        """Put what records come to."""
        markers = [MARKERS.empty_table()]
        finishing: dict[str, Finishing] = {}
        for table in rows:
            topic = _topic_of(table)
            if self.markers is not None and topic == self.markers.topic:
                markers.append(self.markers.finish(table))
                continue
            if topic not in finishing:
                finishing[topic] = Finishing(self.topics[topic], _OutOf(out, topic))
            finishing[topic].add(table)
        told = {topic: each.told() for topic, each in finishing.items()}
        return ToldOfTopics(told, pa.concat_tables(markers))


@dataclass(frozen=True, slots=True)
class _OutOf:
    """Outputs by the names that a topic alone has for them."""

    out: ScanOutput
    topic: str

    def put(self, output: str, rows: pa.Table) -> None:
        self.out.put(output_of(output, self.topic), rows)

    def stored(self, output: str, keys: pa.Table) -> pa.Table:
        return self.out.stored(output_of(output, self.topic), keys)


def _topic_of(rows: pa.Table) -> str:
    found: str = rows.column(TOPIC)[0].as_py()
    return found
