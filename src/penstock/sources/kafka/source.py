"""Kafka source of one topic; each partition is a log of its own.

    probe       topic id, partitions, and the last stable offset of each partition
    read_into   one Spark job over exactly the offsets from the bound frontier to the probed one

The bound frontier is the probed one, never the position of the last record. Offsets of control
records and of aborted transactions are below the bound and have no row. The first binding covers
all existing records. So does every binding of a compacted topic, because its earlier states are no
longer available. The backlog of any other topic is read in chunks.
"""

import functools
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa

from penstock.clock import Clock
from penstock.deadlines import answer_timeout_s
from penstock.errors import DefiniteError, TransientError, UsageError
from penstock.sources.debezium.dedup import Marks, marks_in, note_of, raised
from penstock.sources.kafka.config import KafkaConfig
from penstock.sources.kafka.errors import BadRecord, NoRecords, OffsetsGone, TopicChanged
from penstock.sources.kafka.group import Group
from penstock.sources.kafka.kept_apart import KeptApart
from penstock.sources.kafka.layout import DATA, ERRORS, Layout
from penstock.sources.kafka.scan import KafkaScan, Told
from penstock.sources.kafka.upstream import Topic, Upstream
from penstock.sources.source import (
    CollectionOutline,
    Frontier,
    Probe,
    SnapshotLoader,
    StateStore,
    TickTransaction,
)
from penstock.telemetry import fields, logger

__all__ = ["GROUP", "KafkaSource", "group_of"]

log = logger("sources.kafka")

NOTE: Final = "topic"
"""State key of the topic: its name and id, and the first offset of each partition."""

MARKS: Final = "marks"
SAMPLE: Final = 1_000
"""Number of records in a sample for the inference of columns."""

LOOK_MS: Final = 5_000
"""Interval between requests for the log end offsets, in milliseconds."""

GROUP: Final = "kafka.group.id"
"""Spark option that identifies cached consumers of earlier ticks; no group is joined."""

RECORD_BYTES: Final = 512
"""Estimated size of a record in bytes, used to choose the number of Spark tasks."""

READ_DEADLINES: Final = 3
"""Answer deadlines that one request of a read may take: by default 30 s, as Kafka has it."""


def group_of(source: str) -> str:
    """Return a unique consumer group id: Spark caches consumers by group.

    SUBTLE: Spark finds a cached consumer by group id and partition alone. A source that reads the
    same topic name from other brokers must therefore never use the same id.
    """
    return f"penstock {source} {os.getpid()}-{next(_numbers)}"


_numbers: Final = itertools.count()


class KafkaSource:
    """Source of one topic of a cluster."""

    kind = "kafka"

    def __init__(
        self,
        name: str,
        config: KafkaConfig,
        *,
        clock: Clock,
        upstream: Upstream | None = None,
        among: KeptApart | None = None,
    ) -> None:
        """Create the source; `among` is given if it is one topic of a source with several.

        Such a topic shares the state and the dead-letter collection of the source.
        """
        self.name = name
        wanted = config.on_bad_record == "set_aside"
        self._apart = among or KeptApart(f"{name}_errors", wanted=wanted)
        self.config = config
        self._clock = clock
        self._upstream = Upstream(config) if upstream is None else upstream
        self._consumers = group_of(name)
        group = config.group
        self._group = None if group is None else Group(group, self._upstream, clock)
        self._suffix = f" {config.topic}" if among is not None else ""
        self._topic = Topic("", ())
        self._begins: dict[int, int] = {}
        """By partition, the first offset to read; a partition that is not listed starts at 0."""

        self.bound: Frontier | None = None
        self._reached: Frontier = {}
        self.compacted = False
        self.layout: Layout
        self._marks: Marks = {}
        """Progress of each Debezium log, for the detection of duplicates."""

        self._bad = 0
        self._again = 0
        self._looked_ms: int | None = None
        self._above: dict[int, int] = {}
        """By partition, the number of records above the last stable offset."""

    # Source protocol.

    def open(self, memory: StateStore, loader: SnapshotLoader, bound: Frontier | None) -> None:
        """Find the topic, and prepare to resume from `bound`."""
        self._upstream.open()
        known = memory.get(NOTE + self._suffix)
        if known is not None and bound is not None:
            self._must_name(known["topic"])
        self._topic = self._upstream.topic(known=known is not None)
        self.compacted = self._upstream.compacted()
        self.bound = bound
        if known is None or bound is None:
            # Nothing is bound yet, so all decisions are made again.
            self._begins = self._first_offsets()
            begins = {str(each): offset for each, offset in self._begins.items()}
            with self._naming_itself():
                decided = self._decided()
            named = {"topic": self.config.topic, "id": self._topic.id}
            known = {**named, "begins": begins, **decided}
            memory.put({NOTE + self._suffix: known})
        else:
            self._must_be(known["id"])
            self._begins = {int(each): offset for each, offset in known["begins"].items()}
        # Marks of an earlier start do not apply to a topic that starts again from the beginning.
        self._marks = {} if bound is None else marks_in(memory.get(MARKS + self._suffix))
        with self._naming_itself():
            self._decide(known["value"], known["key"])
        self._make(loader)
        self._apart.open(memory, loader)

    def use_stop(self, stop: threading.Event) -> None:
        """Cancel waits for brokers when `stop` is set."""
        self._upstream.stop = stop

    def probe(self) -> Probe:
        """Return the frontier to read next, and the end of the topic at or after this call."""
        topic = self._upstream.topic(known=True)
        self._must_be(self._topic.id, topic)
        self._topic = topic
        # Requested before the stable offsets. Otherwise records that arrive between the two
        # requests would count as held back by a transaction.
        ends = self._look_up(topic.partitions)
        reached = self._upstream.stable_ends(topic.partitions)
        self._check_ahead(reached)
        self._reached = reached
        if ends is not None:
            self._above = {each: max(0, end - reached[each]) for each, end in ends.items()}
        bite = self._bite(reached)
        return Probe(bite, self._clock.now_ms(), reached if bite != reached else None)

    def read_into(self, tick: TickTransaction, up_to: Frontier) -> Frontier | None:
        """Read the records below `up_to` into `tick`."""
        if self.bound is None:
            tick.begin(self.name)
        self._apart.begin(tick)
        scan = self.scan_of(up_to)
        if scan is not None:
            told = tick.scan(scan)
            self.check_same()
            self.learn(tick, told)
        return {**(self.bound or {}), **up_to}

    def scan_of(self, up_to: Frontier) -> KafkaScan | None:
        """Return the scan of the records below `up_to`; None if there are none.

        Raises:
            OffsetsGone: some of the records were removed.
        """
        ranges = self._ranges(up_to)
        if not ranges:
            return None
        self._check_kept(ranges)
        return self._scan(ranges)

    def check_same(self) -> None:
        """Check that the records were read from the topic that was probed.

        Spark requests a topic by name. A topic that was deleted and created again during the read
        is detected only after it.

        Raises:
            TopicChanged: the topic has another id.
            TopicMissing: the topic was deleted.
        """
        found = self._upstream.topic(known=True)
        if found.id != self._topic.id and self.bound is None:
            raise self._begins_anew("it was made again")
        self._must_be(self._topic.id, found)

    def learn(self, tick: TickTransaction, told: Sequence[Told]) -> None:
        """Process the reports of the tasks.

        Raises:
            BadRecord: a record is bad, and dead-lettering is not enabled.
        """
        self._judge(told)
        self._raise_marks(tick, told)

    def collections(self) -> Sequence[str]:
        """Return the collection of the topic and its dead-letter collection."""
        return [self.name, *self._apart.names()]

    def committed(self, frontier: Frontier | None) -> None:
        """Record that the data below `frontier` is durable, and report progress to the group."""
        self.bound = frontier
        if frontier and self._group is not None:
            self._group.tell(frontier)

    def resync(self, parts: Sequence[str]) -> None:
        """Reject the request: removed records cannot be distinguished from unread ones."""
        raise UsageError(
            f'source "{self.name}" is a topic, which cannot be compared',
            detail="A record that was removed from it cannot be told from one that was not read.",
            hint=f"To read it anew, drop it and let it begin again: penstock drop {self.name}",
        )

    def status(self) -> Mapping[str, Any]:
        """Return the status of the source, for the status page and `penstock status`."""
        bound = self.bound or {}
        partitions = [
            {"partition": each, "offset": bound.get(each, 0), "end": end}
            for each, end in sorted(self._reached.items())
        ]
        return {
            "kind": self.kind,
            "server": self.config.where,
            "phase": "copying" if self.bound is None else "following",
            "topic_id": self._topic.id,
            "position": ", ".join(f"{each['partition']}:{each['offset']}" for each in partitions),
            # Unknown before the first probe.
            "lag_records": sum(max(0, each["end"] - each["offset"]) for each in partitions)
            if partitions
            else None,
            "bad_records": self._bad,
            "sent_again": self._again,
            "waits_for": self.waits_for(),
            "partitions": partitions,
            "tables": [],
        }

    def ownership_verified(self) -> None:
        """Do nothing: the cluster stores nothing on behalf of the source."""

    def is_loaded(self) -> bool:
        """Return whether the first binding exists."""
        return self.bound is not None

    def waits_for(self) -> str:
        """Return the partitions that open transactions hold back, as text; empty if none."""
        held = {each: above for each, above in self._above.items() if above}
        if not held:
            return ""
        told = ", ".join(f"{above} of partition {each}" for each, above in sorted(held.items()))
        return f"transactions of the topic that are not over; they hold back records: {told}"

    def check(self, *, started: bool) -> Sequence[CollectionOutline]:
        """Check that the topic exists and can be read, and determine its columns."""
        self._upstream.open()
        try:
            self._topic = self._upstream.topic(known=started)
            self._upstream.stable_ends(self._topic.partitions)
            return () if started else self._outline()
        finally:
            self._upstream.close()

    def _outline(self) -> Sequence[CollectionOutline]:
        with self._naming_itself():
            try:
                decided = self._decided()
            except NoRecords:
                return ()
            self._decide(decided["value"], decided["key"])
        return [CollectionOutline(self.name, self.layout.schema, (*self.layout.key_columns,))]

    def drop_removed(self, memory: StateStore, destroy: Callable[[Sequence[str]], None]) -> None:
        """Do nothing: a topic has no parts that the file could remove."""

    def drop(self, memory: StateStore) -> None:
        """Do nothing: nothing was created in the cluster."""

    def close(self) -> None:
        """Send the last progress to the group and disconnect."""
        if self._group is not None:
            self._group.close()
        self._upstream.close()

    # Topic identity and offsets.

    def _decide(self, value: Any, key: Any) -> None:
        """Set the layout, given the stored decisions about the formats."""
        self.layout = self.config.layout(value, key)

    @contextmanager
    def _naming_itself(self) -> Iterator[None]:
        """Add the name of the source to configuration errors."""
        try:
            yield
        except UsageError as error:
            raise UsageError(
                f'source "{self.name}" cannot be as the file says: {error}',
                detail=error.detail,
                hint=error.hint,
            ) from None

    def _make(self, loader: SnapshotLoader) -> None:
        schema, key = self.layout.schema, self.layout.key_columns
        try:
            loader.create(self.name, schema, key)
        except UsageError as error:
            if self.bound is not None:
                raise UsageError(
                    f'source "{self.name}" has other columns than the file says',
                    detail=error.detail,
                    hint="Let format, key_format, envelope, key and include be as they were. To "
                    "change them, drop the source and let it begin again.",
                ) from None
            # The collection is left from an earlier start with another file or another sample. It
            # was never published.
            loader.drop_collection(self.name)
            loader.create(self.name, schema, key)

    def _first_offsets(self) -> dict[int, int]:
        """Return the first offset to read of each existing partition."""
        partitions, start = self._topic.partitions, self.config.start
        kept = self._upstream.beginnings(partitions)
        if start == "earliest":
            removed = {each: first for each, first in kept.items() if first}
            if removed:
                log.warning(
                    "the topic begins later than its first record; older ones were removed",
                    extra=fields(source=self.name, offsets=json.dumps(removed)),
                )
            return kept
        if start == "latest":
            return self._upstream.stable_ends(partitions)
        if isinstance(start, int):
            return self._upstream.at_time(partitions, start)
        if unknown := sorted(set(start) - set(partitions)):
            raise UsageError(
                f'source "{self.name}" is to start in partition {unknown[0]}, which is not there',
                detail=f"{self.config.where} has partitions 0 to {len(partitions) - 1}.",
                hint="Leave it out of start; a partition that is added later is read from 0 on.",
            )
        return {each: max(start.get(each, 0), kept[each]) for each in partitions}

    def _decided(self) -> dict[str, Any]:
        """Return the decisions to store: the columns, from a sample or a registry if necessary."""
        topic, config = self.config.topic, self.config
        sample = functools.cache(lambda: self._upstream.sample(self._topic.partitions, SAMPLE))

        def some(part: str) -> pa.ChunkedArray:
            found = sample().column(part)
            if found.null_count == len(found):
                raise NoRecords(
                    f'topic "{topic}" has no {part}s yet from which columns could be inferred',
                    hint="Send a record, or name the columns.",
                )
            return found

        value = config.value.decided(lambda: some("value"), f"{topic}-value")
        key = None
        if config.key_format is not None:
            key = config.key_format.decided(lambda: some("key"), f"{topic}-key")
        return {"value": value, "key": key}

    def _must_name(self, known: str) -> None:
        if known != (now := self.config.topic):
            raise DefiniteError(
                f'source "{self.name}" follows topic "{known}", and the file names "{now}"',
                detail=f'What was read is of "{known}".',
                hint=f'Name that one again. For "{now}" make another source, or drop this one and '
                "let it begin again.",
            )

    def _must_be(self, known: str, topic: Topic | None = None) -> None:
        found = topic or self._topic
        if found.id != known:
            raise TopicChanged(
                self.config.topic, detail=f"Its id was {known}, and is {found.id} now."
            )

    def _begins_anew(self, why: str) -> TransientError:
        """Return a transient error: nothing is bound yet, so a retry can choose another start."""
        return TransientError(
            f'topic "{self.config.topic}" changed before its first records were read: {why}'
        )

    def _check_ahead(self, reached: Frontier) -> None:
        for partition, bound in (self.bound or {}).items():
            now = reached.get(partition)
            if now is None or now < bound:
                told = "is gone" if now is None else f"ends at offset {now}"
                raise TopicChanged(
                    self.config.topic,
                    detail=f"Partition {partition} {told}, and was read to offset {bound}.",
                )

    def _look_up(self, partitions: Sequence[int]) -> dict[int, int] | None:
        """Return the log end offsets, open transactions included; None between two intervals."""
        now = self._clock.boot_ms()
        if self._looked_ms is not None and now - self._looked_ms < LOOK_MS:
            return None
        self._looked_ms = now
        return self._upstream.ends(partitions)

    def _bite(self, reached: Frontier) -> Frontier:
        bound = self.bound
        if bound is None:
            return reached
        behind = {each: reached[each] - bound.get(each, 0) for each in reached}
        total, most = sum(behind.values()), self.config.bite
        if total <= most:
            return reached
        # Requested again, because the cleanup policy may change while the source runs.
        self.compacted = self._upstream.compacted()
        if self.compacted and not self.config.bites_of_compacted:
            return reached
        # Each partition gets its share, so all partitions catch up at the same time.
        return {
            each: bound.get(each, 0) + max(min(behind[each], 1), behind[each] * most // total)
            for each in reached
        }

    def _ranges(self, up_to: Frontier) -> dict[int, tuple[int, int]]:
        bound = self.bound or {}
        found = {
            each: (max(bound.get(each, 0), self._begins.get(each, 0)), end)
            for each, end in up_to.items()
        }
        return {each: (first, end) for each, (first, end) in found.items() if first < end}

    def _check_kept(self, ranges: Mapping[int, tuple[int, int]]) -> None:
        """Raise an error if records of the ranges were removed."""
        kept = self._upstream.beginnings([*ranges])
        gone = {
            each: (first, min(kept[each], end))
            for each, (first, end) in ranges.items()
            if kept[each] > first
        }
        if gone and self.bound is None:
            raise self._begins_anew("it begins later than it did")
        if gone:
            raise OffsetsGone(self.config.topic, gone)

    def _scan(self, ranges: Mapping[int, tuple[int, int]]) -> KafkaScan:
        topic, config = self.config.topic, self.config
        first = {str(each): first for each, (first, _) in sorted(ranges.items())}
        upper = {str(each): upper for each, (_, upper) in sorted(ranges.items())}
        options = {
            **_deadlines(),
            **config.reader(),
            "assign": json.dumps({topic: sorted(ranges)}),
            "startingOffsets": json.dumps({topic: first}),
            "endingOffsets": json.dumps({topic: upper}),
            "failOnDataLoss": "true",
            # The range has an end, so a longer wait for more records has no benefit.
            "kafka.fetch.max.wait.ms": "10",
            GROUP: self._consumers,
            "includeHeaders": str("headers" in config.include).lower(),
        }
        into = {DATA: self.name}
        if self._apart.wanted:
            into[ERRORS] = self._apart.name
        return KafkaScan(
            options=options,
            secrets=config.secrets,
            size=RECORD_BYTES * sum(upper - first for first, upper in ranges.values()),
            into=into,
            layout=self.layout,
            fresh=self.bound is None,
            marks=self._marks,
        )

    def _raise_marks(self, tick: TickTransaction, told: Sequence[Told]) -> None:
        self._again += sum(each.again for each in told)
        marks = raised(self._marks, (each.marks for each in told))
        if marks != self._marks:
            self._marks = marks
            tick.put_state(MARKS + self._suffix, note_of(marks))

    def _judge(self, told: Sequence[Told]) -> None:
        """Raise on bad records, or count them if dead-lettering is enabled."""
        bad = sum(each.bad for each in told)
        if not bad:
            return
        first = min(each.first_bad for each in told if each.first_bad is not None)
        if not self._apart.wanted:
            topic, partition, offset, reason = first
            raise BadRecord(topic, partition, offset, reason, others=bad - 1)
        self._bad += bad
        log.warning(
            "records cannot be taken, and are kept apart",
            extra=fields(
                source=self.name, records=bad, collection=self._apart.name, reason=first[3]
            ),
        )


def _deadlines() -> dict[str, str]:
    """Return options that end a read by Spark from brokers that hang.

    Without them, Kafka and Spark wait for minutes, the driver in a call that cannot be cancelled.
    """
    request_ms = str(int(READ_DEADLINES * answer_timeout_s() * 1_000))
    return {
        "kafka.request.timeout.ms": request_ms,
        "kafka.default.api.timeout.ms": request_ms,
        "kafkaConsumer.pollTimeoutMs": str(int(2 * READ_DEADLINES * answer_timeout_s() * 1_000)),
        # The tick is retried.
        "fetchOffset.numRetries": "1",
    }
