"""Scan of several topics in one Spark job; each topic has its own rules to prepare and finish.

Records of the transaction metadata topic produce no rows. Tasks return them in their report.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.sources.formats import Format
from penstock.sources.kafka.errors import BadRecord
from penstock.sources.kafka.layout import ERRORS
from penstock.sources.kafka.prepared import TOPIC
from penstock.sources.kafka.scan import Finishing, KafkaScan, Told
from penstock.sources.kafka.transactions import MARKERS
from penstock.sources.source import ScanOutput, SideRows

__all__ = ["Markers", "ToldOfTopics", "TopicsScan", "output_of"]


def output_of(output: str, topic: str) -> str:
    """Return the name of a topic's output in a scan of several topics."""
    return output if output == ERRORS else f"{output} of {topic}"


@dataclass(frozen=True, slots=True)
class Markers:
    """Decoding of the transaction metadata topic."""

    topic: str
    format: Format

    def prepare(self, read: pa.Table) -> pa.Table:
        """Return the decoded markers, with a reason for each record that is not a marker."""
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
        """Return the markers.

        Raises:
            BadRecord: a record is not a marker, and the order of transactions after it is unknown.
        """
        bad = table.filter(pc.is_valid(table.column("reason")))
        if bad.num_rows:
            offset, reason = (bad.column(name)[0].as_py() for name in ("offset", "reason"))
            raise BadRecord(self.topic, 0, offset, reason, others=bad.num_rows - 1)
        return pa.table(table.select(MARKERS.names).columns, schema=MARKERS)


class ToldOfTopics(NamedTuple):
    """Report of a task on several topics."""

    topics: Mapping[str, Told]
    markers: pa.Table


@dataclass(frozen=True, slots=True)
class TopicsScan:
    """Scan of an offset range of each partition of several topics."""

    options: Mapping[str, str] = field(repr=False)
    secrets: Collection[str] = field(repr=False)
    size: int
    into: Mapping[str, str]
    side_rows: Mapping[str, SideRows]
    topics: Mapping[str, KafkaScan]
    """Scan by topic."""

    markers: Markers | None = None
    format: str = "kafka"

    @property
    def by_key(self) -> bool:
        """Return whether all records of a key must be finished by one task."""
        return any(each.by_key for each in self.topics.values())

    def prepare(self, rows: Iterable[pa.RecordBatch]) -> Iterable[pa.Table]:
        """Yield decoded records; each table holds records of one topic."""
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
        """Return, for each record, the number of the task that finishes its key."""
        scan = self.topics.get(_topic_of(rows))
        if scan is None:
            return pa.array(np.zeros(rows.num_rows, np.int32))
        return scan.places(rows, count)

    def finish(self, rows: Iterable[pa.Table], out: ScanOutput) -> ToldOfTopics:
        """Write the rows that records produce, and return a report."""
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
    """Outputs under the names that a scan of one topic uses."""

    out: ScanOutput
    topic: str

    def put(self, output: str, rows: pa.Table) -> None:
        self.out.put(output_of(output, self.topic), rows)

    def stored(self, output: str, keys: pa.Table) -> pa.Table:
        return self.out.stored(output_of(output, self.topic), keys)


def _topic_of(rows: pa.Table) -> str:
    found: str = rows.column(TOPIC)[0].as_py()
    return found
