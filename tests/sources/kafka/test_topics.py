"""Topics of a real broker, and the responses of the Kafka source to their changes.

These tests do not use Spark: a tick only records the offsets that it has to read.
"""

import json
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import DefiniteError, PenstockError, TransientError, UsageError
from penstock.ingest.progress_views import source_states
from penstock.ingest.snapshot_loader import SnapshotLoader
from penstock.progress import Frontier
from penstock.retry import pauses_ms
from penstock.servers.kafka import KafkaBroker
from penstock.servers.process import wait_until
from penstock.sources.kafka.cluster import Cluster
from penstock.sources.kafka.config import KafkaConfig
from penstock.sources.kafka.format_spec import FormatSpec
from penstock.sources.kafka.source import KafkaSource
from penstock.testing.clocks import ManualClock
from tests.sources.kafka.clients import (
    PATIENCE_S,
    group_offsets,
    move_group,
    produce,
    transactional,
)
from tests.sources.kafka.lake import Topic as Lake

T = TypeVar("T")


class MemoryState:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def names(self) -> Sequence[str]:
        return sorted(self.values)

    def put(self, values: Mapping[str, Any]) -> None:
        # Encode values as the state store does: they return at the next start, or are rejected.
        for name, value in values.items():
            self.values[name] = persist.JSON.decode(
                persist.JSON.encode(value), persist.JSON.version
            )


class Ranges:
    """Ranges that a tick read; a loader without effect."""

    def __init__(self) -> None:
        self.read: dict[int, tuple[int, int]] = {}
        self.begun: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None
        """Called during the read."""

    def begin(self, collection: str) -> None:
        self.begun.append(collection)

    def put_state(self, *_: Any) -> None: ...

    def scan(self, scan: Any) -> list[Any]:
        self.meanwhile()
        (first,) = json.loads(scan.options["startingOffsets"]).values()
        (upper,) = json.loads(scan.options["endingOffsets"]).values()
        self.read = {int(each): (first[each], upper[each]) for each in first}
        return []

    def create(self, *_: Any) -> None: ...


def patiently(request: Callable[[], T]) -> T:
    """Retry as the loop does: the leader of a new topic may not know it yet."""
    pauses = pauses_ms(random.Random(1), first_ms=50)
    for _ in range(20):
        try:
            return request()
        except TransientError:
            SYSTEM_CLOCK.wait(threading.Event(), next(pauses))
    return request()


class TopicRun:
    """Topic and its source, with state that survives a restart."""

    def __init__(self, broker: KafkaBroker, topic: str, **options: Any) -> None:
        self.broker, self.topic = broker, topic
        self.config = KafkaConfig(broker.bootstrap, topic, FormatSpec("text"), **options)
        self.state, self.clock = MemoryState(), ManualClock()
        self.bound: Frontier[int] | None = None
        self.begin()

    def begin(self) -> None:
        """Start or restart the source."""
        self.source = KafkaSource("clicks", self.config, clock=self.clock)
        patiently(lambda: self.source.open(self.state, Ranges(), self.bound))  # type: ignore[arg-type]

    def tick(self, meanwhile: Callable[[], object] = lambda: None) -> dict[int, tuple[int, int]]:
        """Return the ranges that one tick reads; call `meanwhile` during the read."""
        tick = Ranges()
        tick.meanwhile = meanwhile
        up_to = patiently(self.source.probe).frontier
        self.bound = self.source.read_into(tick, up_to)  # type: ignore[arg-type]
        self.source.committed(self.bound)
        return tick.read

    def send(self, count: int, partition: int = 0) -> None:
        produce(Producer(self.broker.client()), self.topic, ["x"] * count, partition=partition)

    def remove(self, up_to: int, partition: int = 0) -> None:
        """Delete records as retention does."""
        place = TopicPartition(self.topic, partition, up_to)
        for answer in self.broker.admin.delete_records([place]).values():
            answer.result(PATIENCE_S)


@pytest.fixture
def topic(kafka: KafkaBroker, topic_prefix: str) -> str:
    kafka.create_topic(f"{topic_prefix}clicks", partitions=2)
    return f"{topic_prefix}clicks"


def full_text(error: pytest.ExceptionInfo[PenstockError]) -> str:
    return f"{error.value} {error.value.detail} {error.value.hint}"


def test_kafka_source_reads_every_offset_once_across_restart(
    kafka: KafkaBroker, topic: str
) -> None:
    run = TopicRun(kafka, topic)
    run.send(3)
    assert run.tick() == {0: (0, 3)}
    assert run.tick() == {}
    run.send(2)
    run.send(1, partition=1)
    run.begin()
    assert run.tick() == {0: (3, 5), 1: (0, 1)}


def test_a_partition_that_is_added_is_seen_by_the_next_probe(
    kafka: KafkaBroker, topic: str
) -> None:
    run = TopicRun(kafka, topic)
    run.tick()
    kafka.add_partitions(topic, 4)
    run.send(2, partition=3)
    assert run.tick() == {3: (0, 2)}


def test_an_open_transaction_holds_back_what_comes_after_it_and_is_told(
    kafka: KafkaBroker, topic: str
) -> None:
    run = TopicRun(kafka, topic)
    run.send(1)
    hanging = transactional(kafka, f"{topic}-hanging")
    hanging.begin_transaction()
    produce(hanging, topic, ["perhaps"])
    run.send(4)
    assert run.tick() == {0: (0, 1)}
    assert "hold back records: 5 of partition 0" in run.source.status()["waits_for"]
    hanging.abort_transaction()
    run.clock.move_ms(10_000)
    # Kafka writes the end marker to the partition some time later.
    wait_until(
        lambda: run.source.probe().frontier == Frontier({0: 7, 1: 0}), "the end to be marked"
    )
    run.clock.move_ms(10_000)
    assert run.tick() == {0: (1, 7)}
    assert run.source.status()["waits_for"] == ""


def test_records_appended_during_probe_are_not_reported_as_held_back(
    kafka: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TopicRun(kafka, topic)
    asked = Cluster.stable_ends

    def respond_while_records_arrive(self: Cluster, partitions: Sequence[int]) -> dict[int, int]:
        run.send(1, partition=0)
        found = asked(self, partitions)
        run.send(1, partition=1)
        return found

    monkeypatch.setattr(Cluster, "stable_ends", respond_while_records_arrive)
    run.tick()
    assert run.source.status()["waits_for"] == ""


def test_planted_bug_of_binding_high_watermark_is_found(
    kafka: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cluster, "stable_ends", Cluster.ends)
    with pytest.raises(AssertionError):
        test_an_open_transaction_holds_back_what_comes_after_it_and_is_told(kafka, topic)


def test_planted_bug_of_cached_topic_metadata_is_found(
    kafka: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Cluster.topic
    known: dict[str, Any] = {}

    def topic_as_first_seen(self: Cluster, **how: Any) -> Any:
        if "topic" not in known:
            known["topic"] = asked(self, **how)
        return known["topic"]

    monkeypatch.setattr(Cluster, "topic", topic_as_first_seen)
    with pytest.raises(AssertionError):
        test_a_partition_that_is_added_is_seen_by_the_next_probe(kafka, topic)


def test_records_removed_before_read_raise_definite_error_with_offsets(
    kafka: KafkaBroker, topic: str
) -> None:
    run = TopicRun(kafka, topic)
    run.send(2)
    run.tick()
    run.send(5)
    run.remove(4)
    with pytest.raises(DefiniteError) as error:
        run.tick()
    assert "offsets 2 to 3 of partition 0" in full_text(error)


def test_records_removed_before_first_binding_move_start_of_source(
    kafka: KafkaBroker, topic: str
) -> None:
    run = TopicRun(kafka, topic)
    run.send(5)
    run.remove(2)
    with pytest.raises(TransientError, match="the first records were removed"):
        run.tick()
    run.begin()
    assert run.tick() == {0: (2, 5)}


def test_new_kafka_source_starts_at_low_watermark(
    kafka: KafkaBroker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Vector R30."""
    produce(Producer(kafka.client()), topic, ["x"] * 30)
    for answer in kafka.admin.delete_records([TopicPartition(topic, 0, 25)]).values():
        answer.result(PATIENCE_S)
    run = TopicRun(kafka, topic)
    assert run.tick() == {0: (25, 30)}
    assert "oldest records were removed" in caplog.text


def test_recreated_topic_raises_definite_error_at_tick_and_restart(
    kafka: KafkaBroker, topic: str
) -> None:
    """Vector R28: the record count may equal the old one, thus offsets do not show it."""
    run = TopicRun(kafka, topic)
    run.send(2)
    run.tick()
    kafka.delete_topic(topic)
    with pytest.raises(DefiniteError, match="topic was deleted"):
        run.tick()
    kafka.create_topic(topic, partitions=2)
    run.send(3)
    with pytest.raises(DefiniteError, match="topic was recreated"):
        run.tick()
    with pytest.raises(DefiniteError, match="topic was recreated"):
        run.begin()


def test_topic_recreated_during_read_raises_definite_error_and_binds_nothing(
    kafka: KafkaBroker, topic: str
) -> None:
    run = TopicRun(kafka, topic)
    run.send(2)
    run.tick()
    run.send(1)

    def make_again() -> None:
        kafka.delete_topic(topic)
        kafka.create_topic(topic, partitions=2)
        run.send(3)

    with pytest.raises(DefiniteError, match="topic was recreated"):
        run.tick(make_again)
    assert run.bound == Frontier({0: 2, 1: 0})


def test_partition_with_lower_end_offset_raises_definite_error(
    kafka: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vector R25: an elected leader misses records."""
    run = TopicRun(kafka, topic)
    run.send(2)
    run.tick()
    monkeypatch.setattr(
        Cluster, "stable_ends", lambda _self, partitions: dict.fromkeys(partitions, 1)
    )
    with pytest.raises(DefiniteError, match="topic was recreated") as error:
        run.tick()
    assert "Partition 0 ends at offset 1, and was read to offset 2" in full_text(error)


def test_missing_topic_raises_definite_error(kafka: KafkaBroker, topic: str) -> None:
    with pytest.raises(DefiniteError, match="does not exist"):
        TopicRun(kafka, f"{topic}-not")


def test_other_topic_name_in_config_of_existing_source_raises_definite_error(
    kafka: KafkaBroker, topic: str
) -> None:
    kafka.create_topic(f"{topic}-other")
    run = TopicRun(kafka, topic)
    run.tick()
    run.config = replace(run.config, topic=f"{topic}-other")
    with pytest.raises(DefiniteError, match=f'replicates topic "{topic}", and the file names'):
        run.begin()


def test_columns_are_inferred_when_topic_has_records(kafka: KafkaBroker, topic: str) -> None:
    config = KafkaConfig(kafka.bootstrap, topic, FormatSpec("json", columns="infer"))
    source = KafkaSource("clicks", config, clock=ManualClock())
    state: Any = MemoryState()
    loader: Any = Ranges()
    with pytest.raises(TransientError, match="has no values yet"):
        source.open(state, loader, None)
    produce(Producer(kafka.client()), topic, ["[]"])
    with pytest.raises(UsageError, match='configuration of source "clicks" is invalid: the sample'):
        source.open(state, loader, None)
    produce(Producer(kafka.client()), topic, ['{"n": 1}'])
    source.open(state, loader, None)
    assert source.topics[topic].output.schema.names == ["n", "_partition", "_offset"]


def test_other_columns_after_first_binding_raise_usage_error_with_hint(
    kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    with persist.open(f"file:{tmp_path}/lake", writer="test") as client:
        loader: Any = SnapshotLoader(client, "clicks", jobs=None)
        state: Any = MemoryState()

        def opened(bound: Any, **options: Any) -> KafkaSource:
            config = KafkaConfig(kafka.bootstrap, topic, FormatSpec("text"), **options)
            source = KafkaSource("clicks", config, clock=ManualClock())
            source.open(state, loader, bound)
            return source

        opened(None)
        # The collection has no binding yet, therefore its columns may still change.
        source = opened(None, include={"timestamp": "at"})
        assert source.topics[topic].output.schema == client.collection("clicks").schema
        with pytest.raises(UsageError, match="has other columns than the file configures") as error:
            opened(Frontier({0: 0}))
        assert "drop the source and start it again" in error.value.hint
        loader.close()


def test_invalid_start_partition_is_reported_in_source_status(
    kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    lake = Lake(kafka, topic, tmp_path, None, start={7: 1})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="names partition 7"):
        lake.once()
    with persist.open(lake.storage, hold=False) as client:
        status = source_states(client)["clicks"]["status"]
    assert status["phase"] == "stopped"
    assert "names partition 7" in status["error"]["message"]


def test_reader_disables_topic_creation_and_config_rejects_enabling_it(
    kafka: KafkaBroker, topic: str
) -> None:
    given = KafkaConfig(kafka.bootstrap, topic, FormatSpec("text"))
    assert given.reader()["kafka.allow.auto.create.topics"] == "false"
    with pytest.raises(UsageError, match="cannot be set"):
        KafkaConfig(
            kafka.bootstrap,
            topic,
            FormatSpec("text"),
            properties={"allow.auto.create.topics": "true"},
        )


def test_backlog_is_read_in_chunks_except_first_tick_and_compacted_topics(
    kafka: KafkaBroker, topic: str
) -> None:
    run = TopicRun(kafka, topic, chunk_records=4)
    run.send(10)
    assert run.tick() == {0: (0, 10)}
    run.send(10)
    run.send(2, partition=1)
    taken = [run.tick() for _ in range(4)]
    assert all(sum(end - first for first, end in each.values()) <= 5 for each in taken)
    assert sum(end - first for each in taken for first, end in each.values()) == 12
    compacted = f"{topic}-compacted"
    kafka.create_topic(compacted, partitions=1, settings={"cleanup.policy": "compact"})
    whole = TopicRun(kafka, compacted, chunk_records=4)
    whole.tick()
    whole.send(10)
    assert whole.tick() == {0: (0, 10)}
    bitten = TopicRun(kafka, compacted, chunk_records=4, chunk_compacted=True)
    bitten.tick()
    bitten.send(10)
    assert bitten.tick() == {0: (10, 14)}


def test_topic_that_becomes_compacted_is_read_without_chunks(
    kafka: KafkaBroker, topic: str
) -> None:
    run = TopicRun(kafka, topic, chunk_records=4)
    run.tick()
    policy = ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[policy])
    kafka.admin.incremental_alter_configs([resource])[resource].result(PATIENCE_S)
    wait_until(run.source.topics[topic].cluster.is_compacted, "the policy to be known")
    run.send(10)
    assert run.tick() == {0: (0, 10)}


@pytest.mark.parametrize(
    ("start", "read"),
    [("latest", {}), ("earliest", {0: (0, 3)}), ({0: 2}, {0: (2, 3)})],
    ids=["latest", "earliest", "offsets"],
)
def test_kafka_source_starts_at_configured_offsets(
    kafka: KafkaBroker, topic: str, start: Any, read: Any
) -> None:
    produce(Producer(kafka.client()), topic, ["x"] * 3)
    run = TopicRun(kafka, topic, start=start)
    assert run.tick() == read
    run.send(1)
    assert run.tick() == {0: (3, 4)}


def test_start_in_missing_partition_raises_usage_error(kafka: KafkaBroker, topic: str) -> None:
    with pytest.raises(UsageError, match="names partition 7, which does not exist"):
        TopicRun(kafka, topic, start={7: 1})


def test_consumer_group_gets_durable_offsets_and_does_not_affect_reads(
    kafka: KafkaBroker, topic: str
) -> None:
    """Vector K06."""
    run = TopicRun(kafka, topic, group=f"{topic}-watched")
    run.send(3)
    tick = Ranges()
    up_to = patiently(run.source.probe).frontier
    run.bound = run.source.read_into(tick, up_to)  # type: ignore[arg-type]
    run.source.close()
    assert group_offsets(kafka, f"{topic}-watched") == {}
    run.begin()
    run.source.committed(run.bound)
    run.source.close()
    assert group_offsets(kafka, f"{topic}-watched") == {(topic, 0): 3, (topic, 1): 0}
    run.send(2)
    move_group(kafka, f"{topic}-watched", topic, {0: 1})
    run.begin()
    assert run.tick() == {0: (3, 5)}
    run.source.close()
    assert group_offsets(kafka, f"{topic}-watched") == {(topic, 0): 5, (topic, 1): 0}


def test_failed_group_commit_is_logged_and_made_after_restart(
    kafka: KafkaBroker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = TopicRun(kafka, topic, group=f"{topic}-taken")
    member = Consumer(kafka.client(group__id=f"{topic}-taken"))
    member.subscribe([topic])
    wait_until(
        lambda: member.poll(0.1) is not None or bool(member.assignment()), "a member to join"
    )
    run.send(1)
    assert run.tick() == {0: (0, 1)}
    run.source.close()
    assert "consumer group commit failed" in caplog.text
    member.close()
    run.begin()
    run.tick()
    run.source.close()
    assert group_offsets(kafka, f"{topic}-taken") == {(topic, 0): 1, (topic, 1): 0}


def test_random_sends_and_restarts_read_each_offset_in_one_tick(
    kafka: KafkaBroker, topic: str
) -> None:
    chance = random.Random(7)
    run = TopicRun(kafka, topic, chunk_records=5)
    sent = {0: 0, 1: 0}
    seen: dict[int, int] = {}
    for _ in range(25):
        partition = chance.randrange(2)
        count = chance.randrange(6)
        run.send(count, partition)
        sent[partition] += count
        if chance.random() < 0.3:
            run.begin()
        for each, (first, end) in run.tick().items():
            assert first == seen.get(each, 0)
            seen[each] = end
    while read := run.tick():
        for each, (first, end) in read.items():
            assert first == seen.get(each, 0)
            seen[each] = end
    assert {each: seen.get(each, 0) for each in sent} == sent
