"""Nemesis of topics: a short run without Spark and a long run with it."""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from penstock.progress import Frontier
from penstock.servers.kafka import KafkaBroker
from penstock.servers.process import wait_until
from penstock.sources.kafka.cluster import Cluster
from penstock.sources.kafka.source import KafkaSource
from tests.nemesis_driver import Tally
from tests.sources.kafka.checker import Change, Place, Stored, wrong_in
from tests.sources.kafka.clients import PATIENCE_S, consume, ends, produce, transactional
from tests.sources.kafka.nemesis import play
from tests.sources.kafka.test_topics import Ranges, TopicRun, patiently

SEED = int(os.environ.get("PENSTOCK_TEST_SEED") or 2_026)


class Reading(Ranges):
    """Tick that reads its ranges as a read_committed consumer, up to the last stable offset."""

    def __init__(self, broker: KafkaBroker, topic: str, time: int) -> None:
        super().__init__()
        self.broker, self.topic, self.time = broker, topic, time
        self.changes: list[Change] = []

    def scan(self, scan: Any) -> list[Any]:
        super().scan(scan)
        consumer = Consumer(
            self.broker.client(
                group__id="nobody",
                isolation__level="read_committed",
                enable__auto__commit=False,
                enable__partition__eof=True,
                auto__offset__reset="error",
            )
        )
        try:
            for partition, (first, upper) in self.read.items():
                if first >= ends(self.broker.admin, self.topic, partition)[1]:
                    continue  # A read_committed consumer waits there and gets no end of partition.
                consumer.assign([TopicPartition(self.topic, partition, first)])
                while True:
                    message = consumer.poll(PATIENCE_S)
                    assert message is not None
                    if (error := message.error()) is not None:
                        assert error.code() == KafkaError._PARTITION_EOF, error
                        break
                    offset = message.offset()
                    assert offset is not None
                    if offset >= upper:
                        break
                    text = (message.value() or b"").decode()
                    self.changes.append(Change(partition, offset, text, self.time, 1))
        finally:
            consumer.close()
        return []


class RecordingRun(TopicRun):
    """Source that records the contents it would have stored."""

    def __init__(self, broker: KafkaBroker, topic: str, **options: Any) -> None:
        self.changes: list[Change] = []
        self.moves: dict[int, tuple[Place, ...]] = {}
        self.ticks = 0
        super().__init__(broker, topic, **options)

    def tick(self, meanwhile: Callable[[], object] = lambda: None) -> dict[int, tuple[int, int]]:
        self.ticks += 1
        tick = Reading(self.broker, self.topic, self.ticks)
        meanwhile()
        before = self.bound or Frontier()
        bound = self.source.read_into(tick, patiently(self.source.probe).frontier)  # type: ignore[arg-type]
        assert bound is not None
        self.bound = bound
        self.source.committed(bound)
        self.changes += tick.changes
        for partition, offset in bound.items():
            if offset != before[partition]:
                self.moves[partition] = (*self.moves.get(partition, ()), (self.ticks, offset))
        return tick.read

    @property
    def stored(self) -> Stored:
        return Stored(tuple(self.changes), self.moves)


def wrong_after(broker: KafkaBroker, topic: str, seed: int) -> list[str]:
    """Run random transactions, added partitions and restarts; return the violations."""
    rng, partitions = random.Random(seed), 2
    run = RecordingRun(broker, topic, chunk_records=rng.choice([7, 1_000]))
    idle = [transactional(broker, f"{topic}-{number}") for number in range(3)]
    plain = Producer(broker.client())
    open_ones: list[Producer] = []

    def begin() -> None:
        if idle:
            producer = idle.pop()
            producer.begin_transaction()
            open_ones.append(producer)
            send(producer)

    def send(producer: Producer = plain) -> None:
        values = [str(rng.getrandbits(32)) for _ in range(rng.randrange(1, 5))]
        produce(producer, topic, values, partition=rng.randrange(partitions))

    def end() -> None:
        if open_ones:
            producer = open_ones.pop(rng.randrange(len(open_ones)))
            ending = rng.choice([producer.commit_transaction, producer.abort_transaction])
            ending(PATIENCE_S)
            idle.append(producer)

    deeds: list[Callable[[], Any]] = [begin, begin, end, send, *3 * [run.tick]]
    for number in range(40):
        rng.choice(deeds)()
        if number == 20:
            broker.add_partitions(topic, partitions := 3)
            for producer in (plain, *idle, *open_ones):
                producer.list_topics(topic, PATIENCE_S)  # Otherwise they notice it later.
        if number % 13 == 0:
            run.begin()
    begin()
    run.tick()
    while open_ones:
        end()

    def over() -> bool:
        found = [ends(broker.admin, topic, each) for each in range(partitions)]
        return all(stable == end for _, stable, end in found)

    wait_until(over, "all transactions to have ended")
    while run.tick():
        pass
    reached = {each: ends(broker.admin, topic, each)[1] for each in range(partitions)}
    return wrong_in(run.stored, consume(broker, topic), reached)


@pytest.fixture
def topic(kafka: KafkaBroker, topic_prefix: str) -> str:
    kafka.create_topic(f"{topic_prefix}nemesis", partitions=2)
    return f"{topic_prefix}nemesis"


def test_nemesis_without_process_failures_finds_no_violation(
    kafka: KafkaBroker, topic: str
) -> None:
    assert wrong_after(kafka, topic, SEED) == []


def test_nemesis_finds_planted_bug_of_probing_high_watermark(
    kafka: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cluster, "stable_ends", Cluster.ends)
    wrong = wrong_after(kafka, topic, 2_026)
    assert any("records are missing" in each for each in wrong), wrong


def test_nemesis_finds_planted_bug_of_binding_last_read_offset(
    kafka: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_into = KafkaSource.read_into

    def read_and_bind_last_record(self: KafkaSource, tick: Any, up_to: Any) -> Any:
        known = self.bound or Frontier()
        read_into(self, tick, up_to)
        if not tick.changes:
            tick.read = {}  # Otherwise the source would request the same range without limit.
        ends = {each.partition: each.offset + 1 for each in tick.changes}
        return known | Frontier(ends)

    monkeypatch.setattr(KafkaSource, "read_into", read_and_bind_last_record)
    wrong = wrong_after(kafka, topic, 2_026)
    assert any("the topic had reached" in each for each in wrong), wrong


def states_that_never_were(broker: KafkaBroker, topic: str) -> list[dict[str, str]]:
    """Return the observed states of a compacted topic that the topic never had."""
    settings = {"cleanup.policy": "compact", "segment.ms": 100, "max.compaction.lag.ms": 100}
    broker.create_topic(topic, settings=settings)
    sender = Producer(broker.client())
    state: dict[str, str] = {}
    were: list[dict[str, str]] = [{}]
    run = RecordingRun(broker, topic, chunk_records=1)
    seen: list[dict[str, str]] = []

    def send(key: str, value: str) -> None:
        produce(sender, topic, [f"{key} {value}"], key=key)
        state[key] = value
        were.append(dict(state))

    def tick() -> bool:
        moved = run.tick()
        rows = sorted(run.changes, key=lambda each: each.offset)
        seen.append(dict(row.text.split(" ") for row in rows))
        return bool(moved)

    send("a", "1")
    send("b", "1")
    tick()
    for key, value in (("a", "2"), ("b", "2"), ("b", "3"), ("a", "3")):
        send(key, value)

    def compacted() -> bool:
        # Kafka never compacts the active segment; a later record rolls it.
        send("c", str(len(were)))
        return not any(each.value in (b"a 2", b"b 2") for each in consume(broker, topic))

    wait_until(compacted, "old values to be removed")
    while tick():
        pass
    assert seen[-1] == state
    return [each for each in seen if each not in were]


def test_compacted_topic_shows_only_states_that_existed(
    kafka: KafkaBroker, topic_prefix: str
) -> None:
    assert states_that_never_were(kafka, f"{topic_prefix}state") == []


def test_planted_bug_of_reading_compacted_topic_in_chunks_is_found(
    kafka: KafkaBroker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cluster, "is_compacted", lambda _: False)
    found = states_that_never_were(kafka, f"{topic_prefix}state")
    assert {"a": "1", "b": "3"} in found


@pytest.mark.long
@pytest.mark.spark
def test_kafka_nemesis_finds_no_violation() -> None:
    wrong = play(SEED, 30, Tally("kafka"))
    assert not wrong, "\n".join(wrong[:10])
