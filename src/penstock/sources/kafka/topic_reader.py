"""Reader of one topic of a Kafka source; each partition is a log of its own.

    probe       topic id, partitions, and the last stable offset of each partition
    scan        exactly the offsets from the bound frontier to the probed one

The bound frontier is the probed one, never the position of the last record. Offsets of control
records and of aborted transactions are below the bound and have no row. The first binding covers
all existing records. So does every binding of a compacted topic, because its earlier states are no
longer available. The backlog of any other topic is read in chunks.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import pyarrow as pa

from penstock.clock import Clock
from penstock.errors import DefiniteError, TransientError, UsageError
from penstock.progress import Frontier
from penstock.sources.context import SnapshotLoader, StateStore, TickTransaction
from penstock.sources.debezium.dedup import Marks, marks_from_json, marks_to_json, raise_marks
from penstock.sources.formats import Format
from penstock.sources.kafka.cluster import Cluster, Topic
from penstock.sources.kafka.config import KafkaConfig
from penstock.sources.kafka.consumer_group import ConsumerGroup
from penstock.sources.kafka.dead_letter import DeadLetterCollection
from penstock.sources.kafka.errors import BadRecord, NoRecords, OffsetsRemoved, TopicRecreated
from penstock.sources.kafka.output_schema import OutputSchema
from penstock.sources.kafka.topic_scan import TopicReport, TopicScan
from penstock.sources.source import CollectionOutline
from penstock.telemetry import fields, logger

__all__ = ["MarkerReader", "TopicProbe", "TopicReader"]

log = logger("sources.kafka")

TOPIC_STATE: Final = "topic"
"""State key of the topic: its name and id, the first offset of each partition, and its columns."""

MARKS_STATE: Final = "marks"
"""State key of the progress of each Debezium log."""

SAMPLE_RECORDS: Final = 1_000
"""Number of records in a sample for the inference of columns."""

LOG_END_INTERVAL_MS: Final = 5_000
"""Interval between requests for the log end offsets, in milliseconds."""


class TopicProbe(NamedTuple):
    """Offsets to read up to next, and the last stable offsets."""

    up_to: Frontier[int]
    end: Frontier[int]


class TopicReader:
    """One topic of a source: its identity, its offsets, and the schema of its collection."""

    def __init__(
        self,
        source: str,
        collection: str,
        config: KafkaConfig,
        *,
        clock: Clock,
        cluster: Cluster,
        dead_letter: DeadLetterCollection,
        state_suffix: str,
    ) -> None:
        """Create a reader; `config` is the configuration of this topic.

        `state_suffix` distinguishes the state keys of the topics of one source.
        """
        self.collection = collection
        self.config = config
        self.bound: Frontier[int] | None = None
        """Offsets below which all records are durable; None before the first binding."""

        self.output: OutputSchema
        self.is_compacted = False
        self.bad_records = 0
        self.duplicates = 0
        self.cluster = cluster
        self._source = source
        self._clock = clock
        self._dead_letter = dead_letter
        self._topic_state = TOPIC_STATE + state_suffix
        self._marks_state = MARKS_STATE + state_suffix
        group = config.group
        self._group = None if group is None else ConsumerGroup(group, cluster, clock)
        self._topic = Topic("", ())
        self._start_offsets: dict[int, int] = {}
        """By partition, the first offset to read; a partition that is not listed starts at 0."""

        self._end: Frontier[int] = Frontier()
        self._marks: Marks = {}
        """Progress of each Debezium log, for the detection of duplicates."""

        self._log_ends_ms: int | None = None
        self._above_stable: dict[int, int] = {}
        """By partition, the number of records above the last stable offset."""

    @property
    def topic_id(self) -> str:
        """Return the id that the cluster gave the topic."""
        return self._topic.id

    # Life cycle.

    def open(self, state: StateStore, loader: SnapshotLoader, bound: Frontier[int] | None) -> None:
        """Find the topic, and prepare to resume from `bound`."""
        self.cluster.open()
        stored = state.get(self._topic_state)
        if stored is not None and bound is not None:
            self._check_name(stored["topic"])
        self._topic = self.cluster.topic(known=stored is not None)
        self.is_compacted = self.cluster.is_compacted()
        self.bound = bound
        if stored is None or bound is None:
            # Nothing is bound yet, so all decisions are made again.
            self._start_offsets = self._choose_start_offsets()
            begins = {str(partition): offset for partition, offset in self._start_offsets.items()}
            identity = {"topic": self.config.topic, "id": self._topic.id}
            with self._named_errors():
                stored = {**identity, "begins": begins, **self._resolve_formats()}
            state.put({self._topic_state: stored})
        else:
            self._check_id(stored["id"], self._topic.id)
            self._start_offsets = {
                int(partition): offset for partition, offset in stored["begins"].items()
            }
        # Marks of an earlier start do not apply to a topic that starts again from the beginning.
        self._marks = {} if bound is None else marks_from_json(state.get(self._marks_state))
        with self._named_errors():
            self._use_formats(stored["value"], stored["key"])
        self._create_collection(loader)

    def check(self, *, started: bool) -> Sequence[CollectionOutline]:
        """Check that the topic exists and can be read, and determine its columns."""
        self.cluster.open()
        try:
            self._topic = self.cluster.topic(known=started)
            self.cluster.stable_ends(self._topic.partitions)
            return () if started else self._outline()
        finally:
            self.cluster.close()

    def committed(self, bound: Frontier[int] | None) -> None:
        """Record that the data below `bound` is durable, and report progress to the group."""
        self.bound = bound
        if bound is not None and self._group is not None:
            self._group.report(dict(bound.items()))

    def close(self) -> None:
        """Send the last progress to the group and disconnect."""
        if self._group is not None:
            self._group.close()
        self.cluster.close()

    # Ticks.

    def probe(self) -> TopicProbe:
        """Return the offsets to read next, and the end of the topic at or after this call."""
        topic = self.cluster.topic(known=True)
        self._check_id(self._topic.id, topic.id)
        self._topic = topic
        # Requested before the stable offsets. Otherwise records that arrive between the two
        # requests would count as held back by a transaction.
        log_ends = self._request_log_ends(topic.partitions)
        end = Frontier(self.cluster.stable_ends(topic.partitions))
        self._check_not_behind(end)
        self._end = end
        if log_ends is not None:
            self._above_stable = {
                partition: max(0, log_end - end[partition])
                for partition, log_end in log_ends.items()
            }
        return TopicProbe(self._next_chunk(end), end)

    def ranges(self, up_to: Frontier[int]) -> dict[int, tuple[int, int]]:
        """Return the first offset and the upper of each partition with records below `up_to`.

        Raises:
            OffsetsRemoved: some of the records were removed.
        """
        bound = self.bound or Frontier()
        candidates = {
            partition: (max(bound[partition], self._start_offsets.get(partition, 0)), upper)
            for partition, upper in up_to.items()
        }
        ranges = {
            partition: (first, upper)
            for partition, (first, upper) in candidates.items()
            if first < upper
        }
        if ranges:
            self._check_retained(ranges)
        return ranges

    def scan(self) -> TopicScan:
        """Return the rules to decode and to write the records of the next ranges."""
        return TopicScan(
            self.output,
            is_first=self.bound is None,
            dead_letter=self._dead_letter.enabled,
            marks=self._marks,
        )

    def check_unchanged(self) -> None:
        """Check that the records were read from the topic that was probed.

        Spark requests a topic by name. A topic that was deleted and created again during the read
        is detected only after it.

        Raises:
            TopicRecreated: the topic has another id.
            TopicMissing: the topic was deleted.
        """
        topic = self.cluster.topic(known=True)
        if topic.id != self._topic.id and self.bound is None:
            raise self._changed_at_start("the topic was recreated")
        self._check_id(self._topic.id, topic.id)

    def process_reports(self, tick: TickTransaction, reports: Sequence[TopicReport]) -> None:
        """Process the reports of the tasks.

        Raises:
            BadRecord: a record is bad, and dead-lettering is not enabled.
        """
        self._count_bad_records(reports)
        self.duplicates += sum(report.duplicates for report in reports)
        marks = raise_marks(self._marks, (report.marks for report in reports))
        if marks != self._marks:
            self._marks = marks
            tick.put_state(self._marks_state, marks_to_json(marks))

    # Status.

    def partition_status(self) -> list[dict[str, Any]]:
        """Return the bound and the end of each partition; empty before the first probe."""
        bound = self.bound or Frontier()
        return [
            {"partition": partition, "offset": bound[partition], "end": end}
            for partition, end in sorted(self._end.items())
        ]

    def waits_for(self) -> str:
        """Return the partitions that open transactions hold back, as text; empty if none."""
        counts = ", ".join(
            f"{count} of partition {partition}"
            for partition, count in sorted(self._above_stable.items())
            if count
        )
        if not counts:
            return ""
        return f"open transactions of the topic, which hold back records: {counts}"

    # Formats and the collection.

    def _outline(self) -> Sequence[CollectionOutline]:
        with self._named_errors():
            try:
                formats = self._resolve_formats()
            except NoRecords:
                return ()
            self._use_formats(formats["value"], formats["key"])
        return [CollectionOutline(self.collection, self.output.schema, self.output.key_columns)]

    def _use_formats(self, value: Any, key: Any) -> None:
        """Set the output schema, given the stored decisions about the formats."""
        self.output = self.config.output_schema(value, key)

    def _resolve_formats(self) -> dict[str, Any]:
        """Return the decisions to store: the columns, from a sample or a registry if necessary."""
        topic, config = self.config.topic, self.config
        sample = functools.cache(
            lambda: self.cluster.sample(self._topic.partitions, SAMPLE_RECORDS)
        )

        def sample_of(part: str) -> pa.ChunkedArray:
            values = sample().column(part)
            if values.null_count == len(values):
                raise NoRecords(
                    f'topic "{topic}" has no {part}s yet from which columns could be inferred',
                    hint="Send a record, or name the columns.",
                )
            return values

        value = config.value.resolve(lambda: sample_of("value"), f"{topic}-value")
        key = None
        if config.key_format is not None:
            key = config.key_format.resolve(lambda: sample_of("key"), f"{topic}-key")
        return {"value": value, "key": key}

    def _create_collection(self, loader: SnapshotLoader) -> None:
        schema, key = self.output.schema, self.output.key_columns
        try:
            loader.create(self.collection, schema, key)
        except UsageError as error:
            if self.bound is not None:
                raise UsageError(
                    f'collection "{self.collection}" has other columns than the file configures',
                    detail=error.detail,
                    hint="Restore format, key_format, envelope, key and include. To change them, "
                    "drop the source and start it again.",
                ) from None
            # The collection is left from an earlier start with another file or another sample. It
            # was never published.
            loader.drop_collection(self.collection)
            loader.create(self.collection, schema, key)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Add the name of the source to configuration errors."""
        try:
            yield
        except UsageError as error:
            raise UsageError(
                f'configuration of source "{self._source}" is invalid: {error}',
                detail=error.detail,
                hint=error.hint,
            ) from None

    # Topic identity and offsets.

    def _choose_start_offsets(self) -> dict[int, int]:
        """Return the first offset to read of each existing partition."""
        partitions, start = self._topic.partitions, self.config.start
        beginnings = self.cluster.beginnings(partitions)
        if start == "earliest":
            removed = {partition: first for partition, first in beginnings.items() if first}
            if removed:
                log.warning(
                    "oldest records were removed before the first start",
                    extra=fields(source=self._source, offsets=json.dumps(removed)),
                )
            return beginnings
        if start == "latest":
            return self.cluster.stable_ends(partitions)
        if isinstance(start, int):
            return self.cluster.offsets_at(partitions, start)
        if missing := sorted(set(start) - set(partitions)):
            raise UsageError(
                f'start of source "{self._source}" names partition {missing[0]}, which does not '
                "exist",
                detail=f"{self.config.where} has partitions 0 to {len(partitions) - 1}.",
                hint="Remove the partition from start. A partition that is added later is read "
                "from offset 0.",
            )
        return {
            partition: max(start.get(partition, 0), beginnings[partition])
            for partition in partitions
        }

    def _check_name(self, stored: str) -> None:
        if stored != (configured := self.config.topic):
            raise DefiniteError(
                f'source "{self._source}" replicates topic "{stored}", and the file names '
                f'"{configured}"',
                detail=f'The collection has the records of "{stored}".',
                hint=f'Restore the name of the topic. For "{configured}" add another source, or '
                "drop this one and start it again.",
            )

    def _check_id(self, known: str, current: str) -> None:
        if current != known:
            raise TopicRecreated(
                self.config.topic, detail=f"The topic id was {known}, and is {current} now."
            )

    def _changed_at_start(self, change: str) -> TransientError:
        """Return a transient error: nothing is bound yet, so a retry can choose another start."""
        return TransientError(
            f'topic "{self.config.topic}" changed before its first records were read: {change}'
        )

    def _check_not_behind(self, end: Frontier[int]) -> None:
        for partition, bound in (self.bound or Frontier()).items():
            current = end.get(partition)
            if current is None or current < bound:
                state = "does not exist" if current is None else f"ends at offset {current}"
                raise TopicRecreated(
                    self.config.topic,
                    detail=f"Partition {partition} {state}, and was read to offset {bound}.",
                )

    def _check_retained(self, ranges: Mapping[int, tuple[int, int]]) -> None:
        """Raise an error if records of the ranges were removed."""
        beginnings = self.cluster.beginnings([*ranges])
        removed = {
            partition: (first, min(beginnings[partition], upper))
            for partition, (first, upper) in ranges.items()
            if beginnings[partition] > first
        }
        if removed and self.bound is None:
            raise self._changed_at_start("the first records were removed")
        if removed:
            raise OffsetsRemoved(self.config.topic, removed)

    def _request_log_ends(self, partitions: Sequence[int]) -> dict[int, int] | None:
        """Return the log end offsets, open transactions included; None between two intervals."""
        now_ms = self._clock.boot_ms()
        if self._log_ends_ms is not None and now_ms - self._log_ends_ms < LOG_END_INTERVAL_MS:
            return None
        self._log_ends_ms = now_ms
        return self.cluster.ends(partitions)

    def _next_chunk(self, end: Frontier[int]) -> Frontier[int]:
        bound = self.bound
        if bound is None:
            return end
        backlog = {partition: end[partition] - bound[partition] for partition in end}
        total, limit = sum(backlog.values()), self.config.chunk_records
        if total <= limit:
            return end
        # Requested again, because the cleanup policy may change while the source runs.
        self.is_compacted = self.cluster.is_compacted()
        if self.is_compacted and not self.config.chunk_compacted:
            return end
        # Each partition gets its share, so all partitions catch up at the same time.
        return Frontier(
            {
                partition: bound[partition] + max(min(behind, 1), behind * limit // total)
                for partition, behind in backlog.items()
            }
        )

    def _count_bad_records(self, reports: Sequence[TopicReport]) -> None:
        """Raise on bad records, or count them if dead-lettering is enabled."""
        bad_count = sum(report.bad for report in reports)
        if not bad_count:
            return
        first = min(report.first_bad for report in reports if report.first_bad is not None)
        topic, partition, offset, reason = first
        if not self._dead_letter.enabled:
            raise BadRecord(topic, partition, offset, reason, others=bad_count - 1)
        self.bad_records += bad_count
        log.warning(
            "records dead-lettered",
            extra=fields(
                source=self._source,
                records=bad_count,
                collection=self._dead_letter.name,
                reason=reason,
            ),
        )


class MarkerReader(TopicReader):
    """Reader of the transaction metadata topic, which has no collection."""

    format: Format

    def probe(self) -> TopicProbe:
        """Return the offsets to read next, and the end of the topic at or after this call.

        Raises:
            DefiniteError: the topic has several partitions.
        """
        probe = super().probe()
        if (count := len(self._topic.partitions)) != 1:
            raise DefiniteError(
                f'transaction metadata topic "{self.config.topic}" has {count} partitions',
                detail="Several partitions give no order of transactions.",
                hint="Create the topic with one partition, and start the source again.",
            )
        return probe

    def _use_formats(self, value: Any, key: Any) -> None:
        super()._use_formats(value, key)
        self.format = self.config.value.build_markers(value)

    def _create_collection(self, loader: SnapshotLoader) -> None:
        """Do nothing: the topic has no collection."""

    def _outline(self) -> Sequence[CollectionOutline]:
        return ()
