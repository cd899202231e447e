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
from penstock.demo.process import await_claim
from penstock.errors import DefiniteError, PenstockError, TransientError, UsageError
from penstock.ingest.progress_views import source_states
from penstock.ingest.snapshot_loader import SnapshotLoader
from penstock.retry import pauses_ms
from penstock.sources.kafka.chosen import Chosen
from penstock.sources.kafka.config import KafkaConfig
from penstock.sources.kafka.source import KafkaSource
from penstock.sources.kafka.upstream import Upstream
from penstock.testing.clocks import ManualClock
from penstock.testing.kafka import KafkaBroker
from tests.sources.kafka.clients import (
    PATIENCE_S,
    group_offsets,
    move_group,
    produce,
    transactional,
)
from tests.sources.kafka.lake import Topic as Lake

T = TypeVar("T")


class Notes:
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


def patiently(ask: Callable[[], T]) -> T:
    """Retry as the loop does: the leader of a new topic may not know it yet."""
    pauses = pauses_ms(random.Random(1), first_ms=50)
    for _ in range(20):
        try:
            return ask()
        except TransientError:
            SYSTEM_CLOCK.wait(threading.Event(), next(pauses))
    return ask()


class Followed:
    """Topic and its source, with state that survives a restart."""

    def __init__(self, broker: KafkaBroker, topic: str, **options: Any) -> None:
        self.broker, self.topic = broker, topic
        self.config = KafkaConfig(broker.bootstrap, topic, Chosen("text"), **options)
        self.notes, self.clock = Notes(), ManualClock()
        self.bound: Mapping[int, int] | None = None
        self.begin()

    def begin(self) -> None:
        """Start or restart the source."""
        self.source = KafkaSource("clicks", self.config, clock=self.clock)
        patiently(lambda: self.source.open(self.notes, Ranges(), self.bound))  # type: ignore[arg-type]

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


def told(error: pytest.ExceptionInfo[PenstockError]) -> str:
    return f"{error.value} {error.value.detail} {error.value.hint}"


def test_kafka_source_reads_every_offset_once_across_restart(
    kafka: KafkaBroker, topic: str
) -> None:
    followed = Followed(kafka, topic)
    followed.send(3)
    assert followed.tick() == {0: (0, 3)}
    assert followed.tick() == {}
    followed.send(2)
    followed.send(1, partition=1)
    followed.begin()
    assert followed.tick() == {0: (3, 5), 1: (0, 1)}


def test_a_partition_that_is_added_is_seen_by_the_next_probe(
    kafka: KafkaBroker, topic: str
) -> None:
    followed = Followed(kafka, topic)
    followed.tick()
    kafka.add_partitions(topic, 4)
    followed.send(2, partition=3)
    assert followed.tick() == {3: (0, 2)}


def test_an_open_transaction_holds_back_what_comes_after_it_and_is_told(
    kafka: KafkaBroker, topic: str
) -> None:
    followed = Followed(kafka, topic)
    followed.send(1)
    hanging = transactional(kafka, f"{topic}-hanging")
    hanging.begin_transaction()
    produce(hanging, topic, ["perhaps"])
    followed.send(4)
    assert followed.tick() == {0: (0, 1)}
    assert "hold back records: 5 of partition 0" in followed.source.status()["waits_for"]
    hanging.abort_transaction()
    followed.clock.move_ms(10_000)
    # Kafka writes the end marker to the partition some time later.
    await_claim(lambda: followed.source.probe().frontier == {0: 7, 1: 0}, "the end to be marked")
    followed.clock.move_ms(10_000)
    assert followed.tick() == {0: (1, 7)}
    assert followed.source.status()["waits_for"] == ""


def test_records_appended_during_probe_are_not_reported_as_held_back(
    kafka: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(kafka, topic)
    asked = Upstream.stable_ends

    def asked_while_some_come(self: Upstream, partitions: Sequence[int]) -> dict[int, int]:
        followed.send(1, partition=0)
        found = asked(self, partitions)
        followed.send(1, partition=1)
        return found

    monkeypatch.setattr(Upstream, "stable_ends", asked_while_some_come)
    followed.tick()
    assert followed.source.status()["waits_for"] == ""


def test_planted_bug_of_binding_high_watermark_is_found(
    kafka: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Upstream, "stable_ends", Upstream.ends)
    with pytest.raises(AssertionError):
        test_an_open_transaction_holds_back_what_comes_after_it_and_is_told(kafka, topic)


def test_planted_bug_of_cached_topic_metadata_is_found(
    kafka: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Upstream.topic
    known: dict[str, Any] = {}
    monkeypatch.setattr(
        Upstream,
        "topic",
        lambda self, **how: (
            known.setdefault("topic", None)
            or known.update(topic=asked(self, **how))
            or known["topic"]
        ),
    )
    with pytest.raises(AssertionError):
        test_a_partition_that_is_added_is_seen_by_the_next_probe(kafka, topic)


def test_records_removed_before_read_raise_definite_error_with_offsets(
    kafka: KafkaBroker, topic: str
) -> None:
    followed = Followed(kafka, topic)
    followed.send(2)
    followed.tick()
    followed.send(5)
    followed.remove(4)
    with pytest.raises(DefiniteError) as error:
        followed.tick()
    assert "offsets 2 to 3 of partition 0" in told(error)


def test_records_removed_before_first_binding_move_start_of_source(
    kafka: KafkaBroker, topic: str
) -> None:
    followed = Followed(kafka, topic)
    followed.send(5)
    followed.remove(2)
    with pytest.raises(TransientError, match="it begins later than it did"):
        followed.tick()
    followed.begin()
    assert followed.tick() == {0: (2, 5)}


def test_new_kafka_source_starts_at_low_watermark(
    kafka: KafkaBroker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Vector R30."""
    produce(Producer(kafka.client()), topic, ["x"] * 30)
    for answer in kafka.admin.delete_records([TopicPartition(topic, 0, 25)]).values():
        answer.result(PATIENCE_S)
    followed = Followed(kafka, topic)
    assert followed.tick() == {0: (25, 30)}
    assert "older ones were removed" in caplog.text


def test_recreated_topic_raises_definite_error_at_tick_and_restart(
    kafka: KafkaBroker, topic: str
) -> None:
    """Vector R28: the record count may equal the old one, thus offsets do not show it."""
    followed = Followed(kafka, topic)
    followed.send(2)
    followed.tick()
    kafka.delete_topic(topic)
    with pytest.raises(DefiniteError, match="topic was deleted"):
        followed.tick()
    kafka.create_topic(topic, partitions=2)
    followed.send(3)
    with pytest.raises(DefiniteError, match="topic was recreated"):
        followed.tick()
    with pytest.raises(DefiniteError, match="topic was recreated"):
        followed.begin()


def test_topic_recreated_during_read_raises_definite_error_and_binds_nothing(
    kafka: KafkaBroker, topic: str
) -> None:
    followed = Followed(kafka, topic)
    followed.send(2)
    followed.tick()
    followed.send(1)

    def make_again() -> None:
        kafka.delete_topic(topic)
        kafka.create_topic(topic, partitions=2)
        followed.send(3)

    with pytest.raises(DefiniteError, match="topic was recreated"):
        followed.tick(make_again)
    assert followed.bound == {0: 2, 1: 0}


def test_partition_with_lower_end_offset_raises_definite_error(
    kafka: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vector R25: an elected leader misses records."""
    followed = Followed(kafka, topic)
    followed.send(2)
    followed.tick()
    monkeypatch.setattr(
        Upstream, "stable_ends", lambda _self, partitions: dict.fromkeys(partitions, 1)
    )
    with pytest.raises(DefiniteError, match="topic was recreated") as error:
        followed.tick()
    assert "Partition 0 ends at offset 1, and was read to offset 2" in told(error)


def test_missing_topic_raises_definite_error(kafka: KafkaBroker, topic: str) -> None:
    with pytest.raises(DefiniteError, match="does not exist"):
        Followed(kafka, f"{topic}-not")


def test_other_topic_name_in_config_of_existing_source_raises_definite_error(
    kafka: KafkaBroker, topic: str
) -> None:
    kafka.create_topic(f"{topic}-other")
    followed = Followed(kafka, topic)
    followed.tick()
    followed.config = replace(followed.config, topic=f"{topic}-other")
    with pytest.raises(DefiniteError, match=f'follows topic "{topic}", and the file names'):
        followed.begin()


def test_columns_are_inferred_when_topic_has_records(kafka: KafkaBroker, topic: str) -> None:
    config = KafkaConfig(kafka.bootstrap, topic, Chosen("json", columns="infer"))
    source = KafkaSource("clicks", config, clock=ManualClock())
    notes: Any = Notes()
    loader: Any = Ranges()
    with pytest.raises(TransientError, match="has no values yet"):
        source.open(notes, loader, None)
    produce(Producer(kafka.client()), topic, ["[]"])
    with pytest.raises(UsageError, match='source "clicks" cannot be as the file says: the sample'):
        source.open(notes, loader, None)
    produce(Producer(kafka.client()), topic, ['{"n": 1}'])
    source.open(notes, loader, None)
    assert source.layout.schema.names == ["n", "_partition", "_offset"]


def test_other_columns_after_first_binding_raise_usage_error_with_hint(
    kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    with persist.open(f"file:{tmp_path}/lake", writer="test") as client:
        loader: Any = SnapshotLoader(client, "clicks", jobs=None)
        notes: Any = Notes()

        def opened(bound: Any, **options: Any) -> KafkaSource:
            config = KafkaConfig(kafka.bootstrap, topic, Chosen("text"), **options)
            source = KafkaSource("clicks", config, clock=ManualClock())
            source.open(notes, loader, bound)
            return source

        opened(None)
        # The collection has no binding yet, therefore its columns may still change.
        source = opened(None, include={"timestamp": "at"})
        assert source.layout.schema == client.collection("clicks").schema
        with pytest.raises(UsageError, match="has other columns than the file says") as error:
            opened({0: 0})
        assert "drop the source and let it begin again" in error.value.hint
        loader.close()


def test_invalid_start_partition_is_reported_in_source_status(
    kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    lake = Lake(kafka, topic, tmp_path, None, start={7: 1})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="to start in partition 7"):
        lake.once()
    with persist.open(lake.storage, hold=False) as client:
        status = source_states(client)["clicks"]["status"]
    assert status["phase"] == "stopped"
    assert "to start in partition 7" in status["error"]["message"]


def test_reader_disables_topic_creation_and_config_rejects_enabling_it(
    kafka: KafkaBroker, topic: str
) -> None:
    given = KafkaConfig(kafka.bootstrap, topic, Chosen("text"))
    assert given.reader()["kafka.allow.auto.create.topics"] == "false"
    with pytest.raises(UsageError, match="is not for the file"):
        KafkaConfig(
            kafka.bootstrap, topic, Chosen("text"), properties={"allow.auto.create.topics": "true"}
        )


def test_backlog_is_read_in_chunks_except_first_tick_and_compacted_topics(
    kafka: KafkaBroker, topic: str
) -> None:
    followed = Followed(kafka, topic, bite=4)
    followed.send(10)
    assert followed.tick() == {0: (0, 10)}
    followed.send(10)
    followed.send(2, partition=1)
    taken = [followed.tick() for _ in range(4)]
    assert all(sum(end - first for first, end in each.values()) <= 5 for each in taken)
    assert sum(end - first for each in taken for first, end in each.values()) == 12
    compacted = f"{topic}-compacted"
    kafka.create_topic(compacted, partitions=1, settings={"cleanup.policy": "compact"})
    whole = Followed(kafka, compacted, bite=4)
    whole.tick()
    whole.send(10)
    assert whole.tick() == {0: (0, 10)}
    bitten = Followed(kafka, compacted, bite=4, bites_of_compacted=True)
    bitten.tick()
    bitten.send(10)
    assert bitten.tick() == {0: (10, 14)}


def test_topic_that_becomes_compacted_is_read_without_chunks(
    kafka: KafkaBroker, topic: str
) -> None:
    followed = Followed(kafka, topic, bite=4)
    followed.tick()
    policy = ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[policy])
    kafka.admin.incremental_alter_configs([resource])[resource].result(PATIENCE_S)
    await_claim(followed.source._upstream.compacted, "the policy to be known")
    followed.send(10)
    assert followed.tick() == {0: (0, 10)}


@pytest.mark.parametrize(
    ("start", "read"),
    [("latest", {}), ("earliest", {0: (0, 3)}), ({0: 2}, {0: (2, 3)})],
    ids=["latest", "earliest", "offsets"],
)
def test_kafka_source_starts_at_configured_offsets(
    kafka: KafkaBroker, topic: str, start: Any, read: Any
) -> None:
    produce(Producer(kafka.client()), topic, ["x"] * 3)
    followed = Followed(kafka, topic, start=start)
    assert followed.tick() == read
    followed.send(1)
    assert followed.tick() == {0: (3, 4)}


def test_start_in_missing_partition_raises_usage_error(kafka: KafkaBroker, topic: str) -> None:
    with pytest.raises(UsageError, match="to start in partition 7, which is not there"):
        Followed(kafka, topic, start={7: 1})


def test_consumer_group_gets_durable_offsets_and_does_not_affect_reads(
    kafka: KafkaBroker, topic: str
) -> None:
    """Vector K06."""
    followed = Followed(kafka, topic, group=f"{topic}-watched")
    followed.send(3)
    tick = Ranges()
    up_to = patiently(followed.source.probe).frontier
    followed.bound = followed.source.read_into(tick, up_to)  # type: ignore[arg-type]
    followed.source.close()
    assert group_offsets(kafka, f"{topic}-watched") == {}
    followed.begin()
    followed.source.committed(followed.bound)
    followed.source.close()
    assert group_offsets(kafka, f"{topic}-watched") == {(topic, 0): 3, (topic, 1): 0}
    followed.send(2)
    move_group(kafka, f"{topic}-watched", topic, {0: 1})
    followed.begin()
    assert followed.tick() == {0: (3, 5)}
    followed.source.close()
    assert group_offsets(kafka, f"{topic}-watched") == {(topic, 0): 5, (topic, 1): 0}


def test_failed_group_commit_is_logged_and_made_after_restart(
    kafka: KafkaBroker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    followed = Followed(kafka, topic, group=f"{topic}-taken")
    member = Consumer(kafka.client(group__id=f"{topic}-taken"))
    member.subscribe([topic])
    await_claim(lambda: member.poll(0.1) is not None or member.assignment(), "a member to join")
    followed.send(1)
    assert followed.tick() == {0: (0, 1)}
    followed.source.close()
    assert "a consumer group cannot be told how far the source has come" in caplog.text
    member.close()
    followed.begin()
    followed.tick()
    followed.source.close()
    assert group_offsets(kafka, f"{topic}-taken") == {(topic, 0): 1, (topic, 1): 0}


def test_random_sends_and_restarts_read_each_offset_in_one_tick(
    kafka: KafkaBroker, topic: str
) -> None:
    chance = random.Random(7)
    followed = Followed(kafka, topic, bite=5)
    sent = {0: 0, 1: 0}
    seen: dict[int, int] = {}
    for _ in range(25):
        partition = chance.randrange(2)
        count = chance.randrange(6)
        followed.send(count, partition)
        sent[partition] += count
        if chance.random() < 0.3:
            followed.begin()
        for each, (first, end) in followed.tick().items():
            assert first == seen.get(each, 0)
            seen[each] = end
    while read := followed.tick():
        for each, (first, end) in read.items():
            assert first == seen.get(each, 0)
            seen[each] = end
    assert {each: seen.get(each, 0) for each in sent} == sent
