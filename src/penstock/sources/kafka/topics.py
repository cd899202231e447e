"""Kafka source of several topics, with atomic transactions if Debezium writes their metadata.

    probe       the probe of every topic
    read_into   one Spark job over all topics, each into a collection `SOURCE.TOPIC`

With a transaction metadata topic, events of a transaction are first written to side state. They
move to their collections once the transaction is complete; `transactions.py` defines that. Side
state is committed in the log entry of the tick. An event below the bound frontier is therefore
either in a collection or in side state. The upper advances while events wait, and the status names
the transaction that they wait for.
"""

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from penstock.clock import Clock
from penstock.errors import DefiniteError
from penstock.sources.formats import Format
from penstock.sources.kafka.config import KafkaConfig
from penstock.sources.kafka.errors import TopicChanged
from penstock.sources.kafka.kept_apart import KeptApart
from penstock.sources.kafka.layout import ASIDE, DATA, ERRORS
from penstock.sources.kafka.scan import KafkaScan, Told
from penstock.sources.kafka.source import GROUP, KafkaSource, group_of
from penstock.sources.kafka.topics_scan import Markers, ToldOfTopics, TopicsScan, output_of
from penstock.sources.kafka.transactions import MARKERS, Transactions
from penstock.sources.kafka.upstream import Upstream
from penstock.sources.kafka.waiting import NUMBERS, Waiting
from penstock.sources.source import (
    CollectionOutline,
    Frontier,
    Probe,
    SnapshotLoader,
    StateStore,
    TickTransaction,
)

__all__ = ["TopicsSource", "kafka_source"]

FOLLOWED: Final = "topics"
"""State key of the topics with published collections, including the transaction metadata topic."""

TOLD_BY: Final = "transactions"
"""State key of the transaction metadata topic, if there is one."""

WAITS: Final = "waits"
"""State key of the transaction that others wait for, and since when."""

_RANGES: Final = ("assign", "startingOffsets", "endingOffsets")
"""Spark options that list topics."""


class _Topic(KafkaSource):
    """One topic of several."""

    def check_whole(self) -> None:
        """Raise DefiniteError if compaction could remove events of a transaction."""
        if self.compacted:
            raise DefiniteError(
                f'topic "{self.config.topic}" is compacted, and transactions would lack events',
                hint="Set its cleanup.policy to delete, or leave transactions out.",
            )


class _MarkersTopic(_Topic):
    """Transaction metadata topic, which has no collection."""

    format: Format

    def _decide(self, value: Any, key: Any) -> None:
        super()._decide(value, key)
        self.format = self.config.value.made_markers(value)

    def _make(self, loader: SnapshotLoader) -> None:
        """Do nothing: the topic has no collection."""

    def _outline(self) -> Sequence[CollectionOutline]:
        return ()

    def probe(self) -> Probe:
        found = super().probe()
        if (count := len(found.frontier)) != 1:
            raise DefiniteError(
                f'topic "{self.config.topic}" of transactions has {count} partitions',
                detail="Over several, there is no order of transactions.",
                hint="Let it have one, and begin again.",
            )
        return found


class TopicsSource:
    """Source of several topics of a cluster."""

    kind = "kafka-topics"

    def __init__(
        self,
        name: str,
        config: KafkaConfig,
        *,
        clock: Clock,
        upstream: Callable[[KafkaConfig], Upstream] = Upstream,
    ) -> None:
        self.name = name
        self._config = config
        self._clock = clock
        self._consumers = group_of(name)
        self._bound: Frontier | None = None
        self._waiting: Waiting | None = None
        self._recalled = False
        """True once the contents of side state are known; they are read in the first tick."""

        self._since: tuple[str, int] | None = None
        """Transaction that others wait for, and the start of the wait in milliseconds."""

        self._told = ""
        wanted = config.on_bad_record == "set_aside"
        self._apart = KeptApart(f"{name}_errors", wanted=wanted)
        self._seen: list[str] = []
        """Topics with published collections, also if the file no longer names them."""

        def member(kind: type[_Topic], topic: str) -> Any:
            own = config.of(topic)
            return kind(
                self._collection(topic),
                own,
                clock=clock,
                upstream=upstream(own),
                among=self._apart,
            )

        self._topics: dict[str, _Topic] = {each: member(_Topic, each) for each in config.topics}
        told = config.transactions
        self._markers: _MarkersTopic | None = None if told is None else member(_MarkersTopic, told)

    @property
    def _all(self) -> dict[str, _Topic]:
        """All topics that are read, including the transaction metadata topic."""
        markers = self._markers
        return {**self._topics, **({} if markers is None else {markers.config.topic: markers})}

    def _collection(self, topic: str) -> str:
        return f"{self.name}.{topic}"

    # Source protocol.

    def open(self, memory: StateStore, loader: SnapshotLoader, bound: Frontier | None) -> None:
        """Find all topics, and prepare to resume from `bound`."""
        self._bound = bound
        followed = self._seen = self._followed(memory) if bound is not None else []
        by_topic = _by_topic(bound or {})
        for topic, each in self._all.items():
            known = topic in followed
            each.open(memory, loader, by_topic.get(topic, {}) if known else None)
        self._waiting = None
        since = memory.get(WAITS)
        self._since = None if since is None else (since["for"], since["since"])
        if self._markers is None:
            return
        for each in self._topics.values():
            each.check_whole()
        self._waiting = Waiting(
            self._config.topics,
            {topic: each.layout for topic, each in self._topics.items()},
            {topic: self._collection(topic) for topic in self._topics},
            memory.get(NUMBERS) or {},
        )
        self._recalled = False

    def _followed(self, memory: StateStore) -> list[str]:
        followed: list[str] = memory.get(FOLLOWED) or []
        told, tells = memory.get(TOLD_BY), self._config.transactions
        if told != tells:
            raise DefiniteError(
                f'source "{self.name}" '
                + (f'has transactions "{told}"' if told else "has no transactions")
                + (f', and the file says "{tells}"' if tells else ", and the file says none"),
                detail="What is in its collections was applied in that way, and what waits for "
                "its transaction would be lost.",
                hint=f"{f'Say transactions: {told}' if told else 'Take transactions out'}. For "
                "what the file says, drop the source and let it begin again.",
            )
        if self._markers is not None and set(followed) != set(self._all):
            raise DefiniteError(
                f'source "{self.name}" has other topics than it had',
                detail=f"They were {', '.join(followed)}. What transactions that were applied "
                "did in another topic is not known.",
                hint="Name these again. To follow others, drop the source and let it begin again.",
            )
        return followed

    def use_stop(self, stop: threading.Event) -> None:
        """Cancel waits for brokers when `stop` is set."""
        for each in self._all.values():
            each.use_stop(stop)

    def probe(self) -> Probe:
        """Return the frontier to read next, and the end of all topics at or after this call."""
        found = {topic: each.probe() for topic, each in self._all.items()}
        bite = _of_all({topic: each.frontier for topic, each in found.items()})
        reached = _of_all({topic: each.end for topic, each in found.items()})
        self._check_ahead(reached)
        if self._markers is not None:
            for each in self._topics.values():
                each.check_whole()
        return Probe(bite, self._clock.now_ms(), reached if bite != reached else None)

    def _check_ahead(self, reached: Frontier) -> None:
        """Raise TopicChanged if a topic that was removed and is named again has fewer records."""
        for partition, bound in (self._bound or {}).items():
            if (now := reached.get(partition, bound)) < bound:
                topic, _, number = partition.rpartition("-")
                raise TopicChanged(
                    topic,
                    detail=f"Partition {number} ends at offset {now}, and was read to offset "
                    f"{bound} before it was left out of the file.",
                )

    def read_into(self, tick: TickTransaction, up_to: Frontier) -> Frontier | None:
        """Read the records below `up_to` into `tick`."""
        self._begin(tick)
        self._apart.begin(tick)
        waiting = self._waiting
        if waiting is not None and not self._recalled:
            waiting.recall(tick)
            self._recalled = True
        scans = {
            topic: scan
            for topic, some in _by_topic(up_to).items()
            if (scan := self._all[topic].scan_of(some)) is not None
        }
        told: list[ToldOfTopics] = list(tick.scan(self._scan(scans))) if scans else []
        for topic in scans:
            self._all[topic].check_same()
        by_topic: dict[str, list[Told]] = {
            topic: [each.topics[topic] for each in told if topic in each.topics]
            for topic in self._topics
        }
        for topic, each in self._topics.items():
            each.learn(tick, by_topic[topic])
        if waiting is not None:
            markers = pa.concat_tables([MARKERS.empty_table(), *(each.markers for each in told)])
            waiting.take(tick, by_topic, markers.sort_by("offset"))
            self._note_since(tick, waiting.transactions)
        return {**(self._bound or {}), **up_to}

    def collections(self) -> Sequence[str]:
        """Return the collection of each topic and the dead-letter collection."""
        return [*map(self._collection, self._topics), *self._apart.names()]

    def committed(self, frontier: Frontier | None) -> None:
        """Record that the data below `frontier` is durable."""
        self._bound = frontier
        by_topic = _by_topic(frontier or {})
        for topic, each in self._all.items():
            each.committed(by_topic.get(topic, {}))

    def resync(self, parts: Sequence[str]) -> None:
        """Reject the request: removed records cannot be distinguished from unread ones."""
        for each in self._topics.values():
            each.resync(parts)

    def status(self) -> Mapping[str, Any]:
        """Return the status of the source, for the status page and `penstock status`."""
        each = {topic: one.status() for topic, one in self._all.items()}
        partitions = [
            {**row, "partition": _partition(topic, row["partition"])}
            for topic, one in each.items()
            for row in one["partitions"]
        ]
        waiting = self._waiting
        return {
            "kind": self.kind,
            "server": self._config.where,
            "phase": "copying" if self._bound is None else "following",
            "position": ", ".join(f"{row['partition']}:{row['offset']}" for row in partitions),
            "lag_records": None
            if None in (lags := [one["lag_records"] for one in each.values()])
            else sum(lags),
            "bad_records": sum(one["bad_records"] for one in each.values()),
            "sent_again": sum(one["sent_again"] for one in each.values()),
            "waiting_events": 0 if waiting is None else waiting.transactions.waiting(),
            "waits_for": self.waits_for(),
            "partitions": partitions,
            "tables": [],
        }

    def ownership_verified(self) -> None:
        """Do nothing: the cluster stores nothing on behalf of the source."""

    def is_loaded(self) -> bool:
        """Return whether the first binding exists."""
        return self._bound is not None

    def waits_for(self) -> str:
        """Return the incomplete transaction, its missing events, and partitions held back."""
        found = [told for each in self._all.values() if (told := each.waits_for())]
        return "; ".join([*found, *([self._told] if self._told else [])])

    def check(self, *, started: bool) -> Sequence[CollectionOutline]:
        """Check that all topics exist and can be read, and determine their columns."""
        return [outline for topic in self._all.values() for outline in topic.check(started=started)]

    def drop_removed(self, memory: StateStore, destroy: Callable[[Sequence[str]], None]) -> None:
        """Drop the collections of topics that the file no longer names."""
        if self._markers is not None or memory.get(TOLD_BY) is not None:
            return  # `open` rejects a change of the topics of such a source.
        followed: list[str] = memory.get(FOLLOWED) or []
        gone = [topic for topic in followed if topic not in self._topics]
        if gone:
            destroy([self._collection(topic) for topic in gone])
            memory.put({FOLLOWED: [each for each in followed if each not in gone]})

    def drop(self, memory: StateStore) -> None:
        """Do nothing: nothing was created in the cluster."""

    def close(self) -> None:
        """Disconnect from the cluster."""
        for each in self._all.values():
            each.close()

    # Reads and waiting events.

    def _begin(self, tick: TickTransaction) -> None:
        new = [topic for topic, each in self._topics.items() if each.bound is None]
        if not new:
            return
        for topic in new:
            tick.begin(self._collection(topic))
        tick.put_state(FOLLOWED, [*dict.fromkeys([*self._seen, *self._all])])
        tick.put_state(TOLD_BY, self._config.transactions)

    def _scan(self, scans: Mapping[str, KafkaScan]) -> TopicsScan:
        some = next(iter(scans.values()))
        merged = {name: _merged(name, scans.values()) for name in _RANGES}
        members, aside = dict(scans), {}
        markers = self._markers
        if markers is not None:
            members.pop(markers.config.topic, None)
        if self._waiting is not None:
            held, asides = self._waiting.held, self._waiting.asides()
            members = {
                topic: replace(scan, held=dict(held[topic])) for topic, scan in members.items()
            }
            aside = {output_of(ASIDE, topic): asides[topic] for topic in members}
        # All collections are listed: a scan needs an output, and a scan of markers alone writes to
        # none.
        into = {output_of(DATA, topic): self._collection(topic) for topic in self._topics}
        if self._apart.wanted:
            into[ERRORS] = self._apart.name
        return TopicsScan(
            options={**some.options, **merged, GROUP: self._consumers},
            secrets=some.secrets,
            size=sum(scan.size for scan in scans.values()),
            into=into,
            side_rows=aside,
            topics=members,
            markers=None if markers is None else Markers(markers.config.topic, markers.format),
        )

    def _note_since(self, tick: TickTransaction, transactions: Transactions) -> None:
        """Store the start of the wait for a transaction, which a restart does not change."""
        first = transactions.first()
        if first is None:
            if self._since is not None:
                tick.put_state(WAITS, None)
            self._since, self._told = None, ""
            return
        if self._since is None or self._since[0] != first:
            self._since = (first, self._clock.now_ms())
            tick.put_state(WAITS, {"for": first, "since": self._since[1]})
        when = datetime.fromtimestamp(self._since[1] / 1_000, UTC).isoformat(timespec="seconds")
        # Another thread may read the status, and gets the state of the last tick.
        self._told = f"{transactions.lacks(first)}, since {when}; {transactions.waiting()} wait"


def kafka_source(name: str, config: KafkaConfig, *, clock: Clock) -> KafkaSource | TopicsSource:
    """Return the source of a configuration section with one topic or several."""
    kind = TopicsSource if config.topics else KafkaSource
    return kind(name, config, clock=clock)


def _partition(topic: str, number: int) -> str:
    """Return the name of a partition in Kafka's notation."""
    return f"{topic}-{number}"


def _of_all(frontiers: Mapping[str, Frontier]) -> dict[str, int]:
    return {
        _partition(topic, number): offset
        for topic, frontier in frontiers.items()
        for number, offset in frontier.items()
    }


def _by_topic(frontier: Frontier) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for partition, offset in frontier.items():
        topic, _, number = partition.rpartition("-")
        found.setdefault(topic, {})[int(number)] = offset
    return found


def _merged(name: str, scans: Iterable[KafkaScan]) -> str:
    """Return the union of an option over scans of different topics."""
    found: dict[str, Any] = {}
    for scan in scans:
        found |= json.loads(scan.options[name])
    return json.dumps(found)
