"""Kafka as a source: a topic, each of whose partitions is a log of its own.

    probe   which topic is it, which partitions, and the last stable offset of each
    draw    one Spark job over exactly the offsets from what is bound to what was probed

What was probed is bound, never what was read: offsets of control records and of aborted
transactions are below a bound as well, and have no row. The first binding covers all that
was there, and so does every one of a compacted topic, whose older states cannot be told any
more; of other topics a backlog is drawn in bites.
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
from penstock.sources.kafka.config import KafkaConfig
from penstock.sources.kafka.errors import BadRecord, NoRecords, OffsetsGone, TopicChanged
from penstock.sources.kafka.group import Group
from penstock.sources.kafka.kept_apart import KeptApart
from penstock.sources.kafka.layout import DATA, ERRORS, Layout
from penstock.sources.kafka.resent import Marks, marks_in, note_of, raised
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
"""Under which the topic is remembered: its name and id, and where each partition began."""

MARKS: Final = "marks"
SAMPLE: Final = 1_000
"""From so many records columns are inferred."""

LOOK_MS: Final = 5_000
"""So often it is asked how many records are above what is stable."""

GROUP: Final = "kafka.group.id"
"""The option by which Spark finds the consumers of the ticks before; no group is joined."""

RECORD_BYTES: Final = 512
"""About how much a record takes, to decide on the number of tasks."""

READ_DEADLINES: Final = 3
"""Answer deadlines that one request of a read may take: by default 30 s, as Kafka has it."""


def group_of(source: str) -> str:
    """As what its consumers are known within Spark's processes; each time another.

    SUBTLE: by the name and the partition alone consumers are found again, so that one which reads
    from other brokers, under the same names, must not have it.
    """
    return f"penstock {source} {os.getpid()}-{next(_numbers)}"


_numbers: Final = itertools.count()


class KafkaSource:
    """One topic of a cluster."""

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
        """One `among` others of a source has notes with them, and its bad records are theirs."""
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
        """By partition, the first offset that is read, if that is not 0."""

        self.bound: Frontier | None = None
        self._reached: Frontier = {}
        self.compacted = False
        self.layout: Layout
        self._marks: Marks = {}
        """The latest of Debezium's events, by which those are known that are sent again."""

        self._bad = 0
        self._again = 0
        self._looked_ms: int | None = None
        self._above: dict[int, int] = {}
        """By partition, how many records are above the last stable offset."""

    # What the loop asks.

    def open(self, memory: StateStore, loader: SnapshotLoader, bound: Frontier | None) -> None:
        """Find the topic, and be ready to go on from `bound`."""
        self._upstream.open()
        known = memory.get(NOTE + self._suffix)
        if known is not None and bound is not None:
            self._must_name(known["topic"])
        self._topic = self._upstream.topic(known=known is not None)
        self.compacted = self._upstream.compacted()
        self.bound = bound
        if known is None or bound is None:
            # Nothing is bound yet, so that all is decided anew.
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
        # Of a topic that begins anew nothing was drawn before, whatever was once.
        self._marks = {} if bound is None else marks_in(memory.get(MARKS + self._suffix))
        with self._naming_itself():
            self._decide(known["value"], known["key"])
        self._make(loader)
        self._apart.open(memory, loader)

    def use_stop(self, stop: threading.Event) -> None:
        """Give up waiting for brokers when `stop` is set."""
        self._upstream.stop = stop

    def probe(self) -> Probe:
        """How far the topic has come, by now at least."""
        topic = self._upstream.topic(known=True)
        self._must_be(self._topic.id, topic)
        self._topic = topic
        # Before the others, so that records that come meanwhile are not taken for held back.
        ends = self._look_up(topic.partitions)
        reached = self._upstream.stable_ends(topic.partitions)
        self._check_ahead(reached)
        self._reached = reached
        if ends is not None:
            self._above = {each: max(0, end - reached[each]) for each, end in ends.items()}
        bite = self._bite(reached)
        return Probe(bite, self._clock.now_ms(), reached if bite != reached else None)

    def read_into(self, tick: TickTransaction, up_to: Frontier) -> Frontier | None:
        """Bring the records below `upto` into `tick`."""
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
        """What reads the records below `upto`, if there are any.

        Raises:
            OffsetsGone: some were removed.
        """
        ranges = self._ranges(up_to)
        if not ranges:
            return None
        self._check_kept(ranges)
        return self._scan(ranges)

    def check_same(self) -> None:
        """That what was read is of the topic that was probed.

        Whoever reads asks for a topic by its name, so that it is seen only afterwards whether
        one was made again meanwhile.

        Raises:
            TopicChanged: it is another.
            TopicMissing: it is gone.
        """
        found = self._upstream.topic(known=True)
        if found.id != self._topic.id and self.bound is None:
            raise self._begins_anew("it was made again")
        self._must_be(self._topic.id, found)

    def learn(self, tick: TickTransaction, told: Sequence[Told]) -> None:
        """What tasks told of the records that they read.

        Raises:
            BadRecord: one cannot be taken, and the file says to stop.
        """
        self._judge(told)
        self._raise_marks(tick, told)

    def collections(self) -> Sequence[str]:
        """The topic's, and that of its errors."""
        return [self.name, *self._apart.names()]

    def committed(self, frontier: Frontier | None) -> None:
        """What was drawn is durable."""
        self.bound = frontier
        if frontier and self._group is not None:
            self._group.tell(frontier)

    def resync(self, parts: Sequence[str]) -> None:
        """Refused: a topic is what it was."""
        raise UsageError(
            f'source "{self.name}" is a topic, which cannot be compared',
            detail="A record that was removed from it cannot be told from one that was not read.",
            hint=f"To read it anew, drop it and let it begin again: penstock drop {self.name}",
        )

    def status(self) -> Mapping[str, Any]:
        """For people."""
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
            # Before the first probe nobody knows.
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
        """The cluster keeps nothing for us, and need not hear of it."""

    def is_loaded(self) -> bool:
        """Whether the first binding is made."""
        return self.bound is not None

    def waits_for(self) -> str:
        """Which partitions are held back by transactions that have not ended."""
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
        """A topic has no parts that the file could leave out."""

    def drop(self, memory: StateStore) -> None:
        """Nothing was made upstream."""

    def close(self) -> None:
        """Let go of the cluster."""
        if self._group is not None:
            self._group.close()
        self._upstream.close()

    # Which topic, and which offsets.

    def _decide(self, value: Any, key: Any) -> None:
        """What records become, with what was decided about their formats."""
        self.layout = self.config.layout(value, key)

    @contextmanager
    def _naming_itself(self) -> Iterator[None]:
        """What is wrong with the file is said of this source."""
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
            # Of a start before, with another file or another sample, of which nothing was seen.
            loader.drop_collection(self.name)
            loader.create(self.name, schema, key)

    def _first_offsets(self) -> dict[int, int]:
        """Where each partition begins that is there now."""
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
        """What must stay as it is now: the columns of records, wherever they are taken from."""
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
        """Nothing is bound yet, so that whoever tries again decides anew where to begin."""
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
        """Where each ends, of open transactions too; not at every tick."""
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
        # Asked again, since somebody may have let it be compacted while it was followed.
        self.compacted = self._upstream.compacted()
        if self.compacted and not self.config.bites_of_compacted:
            return reached
        # Of each partition its share, so that all come to their end together.
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
        """Records that we need must not have been removed."""
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
            # A range has an end, so that nothing is gained by waiting for more.
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
        """What to do about records that could not be taken."""
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

    Kafka and Spark would wait for minutes, the driver in a call that nobody can cancel.
    """
    request_ms = str(int(READ_DEADLINES * answer_timeout_s() * 1_000))
    return {
        "kafka.request.timeout.ms": request_ms,
        "kafka.default.api.timeout.ms": request_ms,
        "kafkaConsumer.pollTimeoutMs": str(int(2 * READ_DEADLINES * answer_timeout_s() * 1_000)),
        # The tick is repeated.
        "fetchOffset.numRetries": "1",
    }
