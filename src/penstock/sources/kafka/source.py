"""Kafka source of one or several topics, with atomic transactions of Debezium.

    probe       the probe of every topic
    read_into   one Spark job over all topics

The two forms of the configuration differ in the names of collections and partitions:

    topic: NAME      collection SOURCE, partitions 0, 1, …
    topics: [NAME]   collection SOURCE.NAME for each topic, partitions NAME-0, NAME-1, …

With a transaction metadata topic, events of a transaction are first written to side state. They
move to their collections once the transaction is complete; `debezium/transactions.py` defines that.
Side state is committed in the log entry of the tick. An event below the bound frontier is therefore
either in a collection or in side state. The upper advances while events wait, and the status names
the transaction that they wait for.
"""

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from penstock.clock import Clock
from penstock.deadlines import answer_timeout_s
from penstock.errors import DefiniteError
from penstock.progress import Frontier
from penstock.sources.context import SnapshotLoader, StateStore, TickTransaction
from penstock.sources.debezium.buffer import NUMBERS, BufferedTopic, TransactionBuffer
from penstock.sources.debezium.transactions import MARKERS, Transactions
from penstock.sources.kafka.cluster import Cluster
from penstock.sources.kafka.config import KafkaConfig
from penstock.sources.kafka.dead_letter import DeadLetterCollection
from penstock.sources.kafka.errors import TopicRecreated
from penstock.sources.kafka.output_schema import DATA, ERRORS, SIDE_STATE
from penstock.sources.kafka.scan import KafkaScan, MarkerScan, ScanReport, output_name
from penstock.sources.kafka.topic_reader import MarkerReader, TopicReader
from penstock.sources.kafka.topic_scan import TopicScan
from penstock.sources.source import CollectionOutline, Probe

__all__ = ["KafkaSource"]

TOPICS_STATE: Final = "topics"
"""State key of the topics with published collections, including the transaction metadata topic."""

TRANSACTIONS_STATE: Final = "transactions"
"""State key of the transaction metadata topic, if there is one."""

WAITS_STATE: Final = "waits"
"""State key of the transaction that others wait for, and the start of the wait."""

RECORD_BYTES: Final = 512
"""Estimated size of a record in bytes, used to choose the number of Spark tasks."""

READ_DEADLINES: Final = 3
"""Answer deadlines that one request of a read may take: by default 30 s, as Kafka has it."""

Ranges = Mapping[int, tuple[int, int]]
"""First offset and upper by partition of one topic."""


class KafkaSource:
    """Source of one or several topics of a cluster."""

    def __init__(
        self,
        name: str,
        config: KafkaConfig,
        *,
        clock: Clock,
        cluster: Callable[[KafkaConfig], Cluster] = Cluster,
    ) -> None:
        """Create the source; `cluster` creates the client of one topic."""
        self.name = name
        self.kind = "kafka-topics" if config.topics else "kafka"
        self.bound: Frontier[Any] | None = None
        self._config = config
        self._has_one_topic = not config.topics
        self._clock = clock
        self._group_id = _unique_group_id(name)
        self._dead_letter = DeadLetterCollection(
            f"{name}_errors", enabled=config.on_bad_record == "set_aside"
        )
        self._buffer: TransactionBuffer | None = None
        self._buffer_is_loaded = False
        """True once the contents of side state are known; the first tick reads them."""

        self._waiting_since: tuple[str, int] | None = None
        """Transaction that others wait for, and the start of the wait in milliseconds."""

        self._transaction_wait = ""
        self._published: list[str] = []
        """Topics with published collections, also if the file no longer names them."""

        def reader(kind: type[TopicReader], topic: str) -> Any:
            topic_config = config if self._has_one_topic else config.for_topic(topic)
            return kind(
                name,
                self._collection(topic),
                topic_config,
                clock=clock,
                cluster=cluster(topic_config),
                dead_letter=self._dead_letter,
                state_suffix="" if self._has_one_topic else f" {topic}",
            )

        self._topics: dict[str, TopicReader] = {
            topic: reader(TopicReader, topic) for topic in config.topics or (config.topic,)
        }
        markers = config.transactions
        self._markers: MarkerReader | None = (
            None if markers is None else reader(MarkerReader, markers)
        )

    @property
    def topics(self) -> dict[str, TopicReader]:
        """Return the readers of all topics, including the transaction metadata topic."""
        markers = self._markers
        return {**self._topics, **({} if markers is None else {markers.config.topic: markers})}

    # Names of the two forms.

    def _collection(self, topic: str) -> str:
        return self.name if self._has_one_topic else f"{self.name}.{topic}"

    def _partition(self, topic: str, number: int) -> Any:
        return number if self._has_one_topic else f"{topic}-{number}"

    def _frontier(self, frontiers: Mapping[str, Frontier[int]]) -> Frontier[Any]:
        return Frontier(
            {
                self._partition(topic, number): offset
                for topic, frontier in frontiers.items()
                for number, offset in frontier.items()
            }
        )

    def _by_topic(self, frontier: Frontier[Any]) -> dict[str, Frontier[int]]:
        if self._has_one_topic:
            return {self._config.topic: frontier}
        by_topic: dict[str, dict[int, int]] = {}
        for partition, offset in frontier.items():
            topic, _, number = partition.rpartition("-")
            by_topic.setdefault(topic, {})[int(number)] = offset
        return {topic: Frontier(offsets) for topic, offsets in by_topic.items()}

    # Source protocol.

    def open(self, state: StateStore, loader: SnapshotLoader, bound: Frontier[Any] | None) -> None:
        """Find all topics, and prepare to resume from `bound`."""
        self.bound = bound
        self._published = [] if bound is None else self._published_topics(state)
        by_topic = self._by_topic(bound or Frontier())
        for topic, reader in self.topics.items():
            is_published = topic in self._published
            reader.open(state, loader, by_topic.get(topic, Frontier()) if is_published else None)
        self._dead_letter.open(state, loader)
        self._buffer = None
        waits = state.get(WAITS_STATE)
        self._waiting_since = None if waits is None else (waits["for"], waits["since"])
        if self._markers is None:
            return
        self._check_not_compacted()
        self._buffer = TransactionBuffer(
            {
                topic: BufferedTopic(
                    self._config.topics[topic],
                    reader.collection,
                    reader.output.schema,
                    reader.output.key_columns,
                )
                for topic, reader in self._topics.items()
            },
            state.get(NUMBERS) or {},
        )
        self._buffer_is_loaded = False

    def _published_topics(self, state: StateStore) -> list[str]:
        """Return the topics with published collections.

        Raises:
            DefiniteError: the file changes the topics of a source with transactions.
        """
        if self._has_one_topic:
            return [self._config.topic]
        published: list[str] = state.get(TOPICS_STATE) or []
        stored, configured = state.get(TRANSACTIONS_STATE), self._config.transactions
        if stored != configured:
            raise DefiniteError(
                f'source "{self.name}" '
                + (f'has transactions "{stored}"' if stored else "has no transactions")
                + (f', and the file names "{configured}"' if configured else ", and the file none"),
                detail="The collections were written in that way. Events that wait for their "
                "transaction would be lost.",
                hint=(f"Add transactions: {stored}. " if stored else "Remove transactions. ")
                + "To change it, drop the source and start it again.",
            )
        if self._markers is not None and set(published) != set(self.topics):
            raise DefiniteError(
                f'source "{self.name}" with transactions has other topics than before',
                detail=f"The topics were {', '.join(published)}. The events of applied "
                "transactions in other topics are unknown.",
                hint="Restore the topics. To change them, drop the source and start it again.",
            )
        return published

    def use_stop(self, stop: threading.Event) -> None:
        """Cancel waits for brokers when `stop` is set."""
        for reader in self.topics.values():
            reader.cluster.stop = stop

    def probe(self) -> Probe:
        """Return the frontier to read next, and the end of all topics at or after this call."""
        probes = {topic: reader.probe() for topic, reader in self.topics.items()}
        up_to = self._frontier({topic: probe.up_to for topic, probe in probes.items()})
        end = self._frontier({topic: probe.end for topic, probe in probes.items()})
        self._check_not_behind(end)
        if self._markers is not None:
            self._check_not_compacted()
        return Probe(up_to, self._clock.now_ms(), end if up_to != end else None)

    def _check_not_behind(self, end: Frontier[Any]) -> None:
        """Raise TopicRecreated if a topic that is named again has fewer records than before."""
        for topic, offsets in self._by_topic(self.bound or Frontier()).items():
            for number, bound in offsets.items():
                current = end.get(self._partition(topic, number))
                if current is not None and current < bound:
                    raise TopicRecreated(
                        topic,
                        detail=f"Partition {number} ends at offset {current}, and was read to "
                        f"offset {bound} before the topic was removed from the file.",
                    )

    def _check_not_compacted(self) -> None:
        """Raise DefiniteError if compaction could remove events of a transaction."""
        for topic, reader in self._topics.items():
            if reader.is_compacted:
                raise DefiniteError(
                    f'topic "{topic}" of a source with transactions is compacted',
                    detail="Compaction removes events of transactions.",
                    hint="Set its cleanup.policy to delete, or remove transactions.",
                )

    def read_into(self, tick: TickTransaction, up_to: Frontier[Any]) -> Frontier[Any] | None:
        """Read the records below `up_to` into `tick`."""
        self._publish(tick)
        self._dead_letter.begin(tick)
        buffer = self._buffer
        if buffer is not None and not self._buffer_is_loaded:
            buffer.load(tick)
            self._buffer_is_loaded = True
        ranges = self._ranges(up_to)
        reports: list[ScanReport] = []
        if ranges:
            reports = list(tick.scan(self._scan(ranges)))
            for topic in ranges:
                self.topics[topic].check_unchanged()
        topic_reports = {
            topic: [report.topics[topic] for report in reports if topic in report.topics]
            for topic in self._topics
        }
        for topic, reader in self._topics.items():
            reader.process_reports(tick, topic_reports[topic])
        if buffer is not None:
            tables = [MARKERS.empty_table(), *(report.markers for report in reports)]
            events = {
                topic: [report.events for report in of_topic]
                for topic, of_topic in topic_reports.items()
            }
            buffer.process(tick, events, pa.concat_tables(tables).sort_by("offset"))
            self._update_wait(tick, buffer.transactions)
        return (self.bound or Frontier()) | up_to

    def _ranges(self, up_to: Frontier[Any]) -> dict[str, Ranges]:
        """Return the offsets to read by topic, for topics with records below `up_to`.

        Raises:
            OffsetsRemoved: some of the records were removed.
        """
        return {
            topic: ranges
            for topic, offsets in self._by_topic(up_to).items()
            if (ranges := self.topics[topic].ranges(offsets))
        }

    def _scan(self, ranges: Mapping[str, Ranges]) -> KafkaScan:
        topics = {topic: reader.scan() for topic, reader in self._topics.items() if topic in ranges}
        # All collections are listed: a scan needs an output, and a scan of markers alone writes to
        # none.
        into = {
            output_name(DATA, topic): reader.collection for topic, reader in self._topics.items()
        }
        if self._dead_letter.enabled:
            into[ERRORS] = self._dead_letter.name
        markers = self._markers
        scan = KafkaScan(
            options=self._reader_options(ranges),
            secrets=self._config.secrets,
            size=RECORD_BYTES * sum(upper - first for first, upper in _all_ranges(ranges)),
            into=into,
            topics=topics,
            markers=None if markers is None else MarkerScan(markers.config.topic, markers.format),
        )
        return scan if self._buffer is None else _with_side_state(scan, self._buffer)

    def _reader_options(self, ranges: Mapping[str, Ranges]) -> dict[str, str]:
        """Return the options of Spark's Kafka reader for these ranges."""
        config = self._config
        starting = {
            topic: {str(partition): first for partition, (first, _) in sorted(some.items())}
            for topic, some in ranges.items()
        }
        ending = {
            topic: {str(partition): upper for partition, (_, upper) in sorted(some.items())}
            for topic, some in ranges.items()
        }
        return {
            **_deadline_options(),
            **config.reader(),
            "assign": json.dumps({topic: sorted(some) for topic, some in ranges.items()}),
            "startingOffsets": json.dumps(starting),
            "endingOffsets": json.dumps(ending),
            "failOnDataLoss": "true",
            # The range has an end, so a longer wait for more records has no benefit.
            "kafka.fetch.max.wait.ms": "10",
            # Identifies cached consumers of earlier ticks; no group is joined.
            "kafka.group.id": self._group_id,
            "includeHeaders": str("headers" in config.include).lower(),
        }

    def collections(self) -> Sequence[str]:
        """Return the collection of each topic and the dead-letter collection."""
        return [*map(self._collection, self._topics), *self._dead_letter.names()]

    def committed(self, frontier: Frontier[Any] | None) -> None:
        """Record that the data below `frontier` is durable."""
        self.bound = frontier
        by_topic = self._by_topic(frontier or Frontier())
        for topic, reader in self.topics.items():
            reader.committed(None if frontier is None else by_topic.get(topic, Frontier()))

    def status(self) -> Mapping[str, Any]:
        """Return the status of the source, for the status page and `penstock status`."""
        rows = {topic: reader.partition_status() for topic, reader in self.topics.items()}
        partitions = [
            {**row, "partition": self._partition(topic, row["partition"])}
            for topic, topic_rows in rows.items()
            for row in topic_rows
        ]
        status: dict[str, Any] = {
            "kind": self.kind,
            "server": self._config.where,
            "phase": "copying" if self.bound is None else "following",
            "position": ", ".join(f"{row['partition']}:{row['offset']}" for row in partitions),
            # Unknown before the first probe.
            "lag_records": sum(max(0, row["end"] - row["offset"]) for row in partitions)
            if all(rows.values())
            else None,
            "bad_records": sum(reader.bad_records for reader in self._topics.values()),
            "sent_again": sum(reader.duplicates for reader in self._topics.values()),
            "waits_for": self.waits_for(),
            "partitions": partitions,
            "tables": [],
        }
        if self._has_one_topic:
            status["topic_id"] = self._topics[self._config.topic].topic_id
        else:
            buffer = self._buffer
            waiting = 0 if buffer is None else buffer.transactions.waiting_events()
            status["waiting_events"] = waiting
        return status

    def is_loaded(self) -> bool:
        """Return whether the first binding exists."""
        return self.bound is not None

    def waits_for(self) -> str:
        """Return the incomplete transaction, its missing events, and partitions held back."""
        waits = [reader.waits_for() for reader in self.topics.values()]
        return "; ".join(filter(None, [*waits, self._transaction_wait]))

    def check(self, *, started: bool) -> Sequence[CollectionOutline]:
        """Check that all topics exist and can be read, and determine their columns."""
        return [
            outline for reader in self.topics.values() for outline in reader.check(started=started)
        ]

    def drop_removed(self, state: StateStore, destroy: Callable[[Sequence[str]], None]) -> None:
        """Drop the collections of topics that the file no longer names."""
        if self._markers is not None or state.get(TRANSACTIONS_STATE) is not None:
            return  # `open` rejects a change of the topics of such a source.
        published: list[str] = state.get(TOPICS_STATE) or []
        removed = [topic for topic in published if topic not in self._topics]
        if removed:
            destroy([self._collection(topic) for topic in removed])
            state.put({TOPICS_STATE: [topic for topic in published if topic not in removed]})

    def close(self) -> None:
        """Send the last progress to consumer groups and disconnect."""
        for reader in self.topics.values():
            reader.close()

    # State of a tick.

    def _publish(self, tick: TickTransaction) -> None:
        """Publish the collections of topics that have none yet."""
        new = [reader for reader in self._topics.values() if reader.bound is None]
        for reader in new:
            tick.begin(reader.collection)
        if new and not self._has_one_topic:
            tick.put_state(TOPICS_STATE, [*dict.fromkeys([*self._published, *self.topics])])
            tick.put_state(TRANSACTIONS_STATE, self._config.transactions)

    def _update_wait(self, tick: TickTransaction, transactions: Transactions) -> None:
        """Store the start of the wait for a transaction, which a restart does not change."""
        blocking = transactions.blocking_transaction()
        if blocking is None:
            if self._waiting_since is not None:
                tick.put_state(WAITS_STATE, None)
            self._waiting_since, self._transaction_wait = None, ""
            return
        if self._waiting_since is None or self._waiting_since[0] != blocking:
            self._waiting_since = (blocking, self._clock.now_ms())
            tick.put_state(WAITS_STATE, {"for": blocking, "since": self._waiting_since[1]})
        since = datetime.fromtimestamp(self._waiting_since[1] / 1_000, UTC)
        # Another thread may read the status, and gets the state of the last tick.
        self._transaction_wait = (
            f"{transactions.describe_missing(blocking)}, since "
            f"{since.isoformat(timespec='seconds')}; {transactions.waiting_events()} wait"
        )


def _with_side_state(scan: KafkaScan, buffer: TransactionBuffer) -> KafkaScan:
    """Return the scan, with events of transactions written to side state."""
    side_rows = buffer.side_rows()
    topics: dict[str, TopicScan] = {
        topic: replace(topic_scan, last_waiting=dict(buffer.last_waiting[topic]))
        for topic, topic_scan in scan.topics.items()
    }
    outputs = {output_name(SIDE_STATE, topic): side_rows[topic] for topic in topics}
    return replace(scan, topics=topics, side_rows=outputs)


def _all_ranges(ranges: Mapping[str, Ranges]) -> Iterable[tuple[int, int]]:
    return itertools.chain.from_iterable(some.values() for some in ranges.values())


def _deadline_options() -> dict[str, str]:
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


_numbers: Final = itertools.count()


def _unique_group_id(source: str) -> str:
    """Return a unique consumer group id: Spark caches consumers by group.

    SUBTLE: Spark finds a cached consumer by group id and partition alone. A source that reads the
    same topic name from other brokers must therefore never use the same id.
    """
    return f"penstock {source} {os.getpid()}-{next(_numbers)}"
