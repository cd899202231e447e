"""Scan of offset ranges of one or several topics by Spark's Kafka connector, in one job.

Each topic has its own rules to decode and to write its records, a `TopicScan`. Records of the
transaction metadata topic produce no rows. Tasks return them in their report.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.sources.context import ScanOutput, SideRows
from penstock.sources.debezium.transactions import MARKERS
from penstock.sources.formats import Format
from penstock.sources.kafka.decoded_columns import TOPIC
from penstock.sources.kafka.errors import BadRecord
from penstock.sources.kafka.output_schema import ERRORS
from penstock.sources.kafka.topic_scan import RecordWriter, TopicReport, TopicScan

__all__ = ["KafkaScan", "MarkerScan", "ScanReport", "output_name"]


def output_name(output: str, topic: str) -> str:
    """Return the name of a topic's output; all topics share the dead-letter output."""
    return output if output == ERRORS else f"{output} of {topic}"


class ScanReport(NamedTuple):
    """Report of a task on all topics."""

    topics: Mapping[str, TopicReport]
    markers: pa.Table


@dataclass(frozen=True, slots=True)
class MarkerScan:
    """Decoding of the transaction metadata topic."""

    topic: str
    format: Format

    def decode(self, records: pa.Table) -> pa.Table:
        """Return the decoded markers, with a reason for each record that is not a marker."""
        decoded = self.format.decode(records.column("value"))
        rows = decoded.rows
        reasons: list[str | None] = [None] * rows.num_rows
        for bad in decoded.bad:
            reasons[bad.row] = bad.reason
        table = pa.table(
            {
                "transaction": rows.column("id"),
                "offset": records.column("offset"),
                "status": rows.column("status"),
                "counts": rows.column("counts"),
                TOPIC: records.column("topic"),
                "reason": pa.array(reasons, pa.string()),
            }
        )
        is_marker = pc.is_valid(table.column("transaction"))
        return table.filter(pc.or_(is_marker, pc.is_valid(table.column("reason"))))

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


@dataclass(frozen=True, slots=True)
class KafkaScan:
    """Scan of an offset range of each partition of the topics."""

    options: Mapping[str, str] = field(repr=False)
    secrets: Collection[str] = field(repr=False)
    size: int
    into: Mapping[str, str]
    topics: Mapping[str, TopicScan]
    side_rows: Mapping[str, SideRows] = field(default_factory=dict)
    markers: MarkerScan | None = None
    format: str = "kafka"

    @property
    def by_key(self) -> bool:
        """Return whether all records of a key must be written by one task."""
        return any(topic.by_key for topic in self.topics.values())

    def prepare(self, rows: Iterable[pa.RecordBatch]) -> Iterable[pa.Table]:
        """Yield decoded records; each table holds records of one topic."""
        decoders: dict[str, Callable[[pa.Table], pa.Table]] = {
            topic: scan.decoder() for topic, scan in self.topics.items()
        }
        if self.markers is not None:
            decoders[self.markers.topic] = self.markers.decode
        for batch in rows:
            records = pa.Table.from_batches([batch])
            topics = pc.unique(records.column("topic")).to_pylist()
            for topic in topics:
                if len(topics) > 1:
                    of_topic = records.filter(pc.equal(records.column("topic"), topic))
                else:
                    of_topic = records
                decoded = decoders[topic](of_topic)
                if decoded.num_rows:
                    yield decoded

    def places(self, rows: pa.Table, count: int) -> pa.Array:
        """Return, for each record, the number of the task that writes its key."""
        scan = self.topics.get(_topic_of(rows))
        if scan is None:
            return pa.array(np.zeros(rows.num_rows, np.int32))
        return scan.places(rows, count)

    def finish(self, rows: Iterable[pa.Table], out: ScanOutput) -> ScanReport:
        """Write the rows that records produce, dead-letter bad records, and return a report."""
        markers = [MARKERS.empty_table()]
        writers: dict[str, RecordWriter] = {}
        for table in rows:
            if not table.num_rows:
                continue
            topic = _topic_of(table)
            if self.markers is not None and topic == self.markers.topic:
                markers.append(self.markers.finish(table))
                continue
            if topic not in writers:
                writers[topic] = RecordWriter(self.topics[topic], _TopicOutput(out, topic))
            writers[topic].add(table)
        reports = {topic: writer.finish() for topic, writer in writers.items()}
        return ScanReport(reports, pa.concat_tables(markers))


@dataclass(frozen=True, slots=True)
class _TopicOutput:
    """Outputs of one topic, under their names without the topic."""

    out: ScanOutput
    topic: str

    def put(self, output: str, rows: pa.Table) -> None:
        self.out.put(output_name(output, self.topic), rows)

    def stored(self, output: str, keys: pa.Table) -> pa.Table:
        return self.out.stored(output_name(output, self.topic), keys)


def _topic_of(rows: pa.Table) -> str:
    topic: str = rows.column(TOPIC)[0].as_py()
    return topic
