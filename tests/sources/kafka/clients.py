"""Kafka clients for tests: each call does one thing and waits until it is done."""

from collections.abc import Iterable
from dataclasses import dataclass

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

from penstock.servers.kafka import KafkaBroker
from penstock.servers.process import wait_until

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Record:
    """Record as a consumer received it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


def transactional(broker: KafkaBroker, name: str, **settings: object) -> Producer:
    """Return a producer that is ready to begin a transaction."""
    producer = Producer(broker.client(transactional__id=name, **settings))
    producer.init_transactions(PATIENCE_S)
    return producer


def produce(
    producer: Producer, topic: str, values: Iterable[str], *, partition: int = 0, key: str = "k"
) -> None:
    """Send each value and wait for the broker's acknowledgement; fail on an error."""
    failed: list[object] = []
    for value in values:
        producer.produce(
            topic,
            key=key,
            value=value,
            partition=partition,
            on_delivery=lambda error, _: failed.append(error) if error else None,
        )
    assert producer.flush(PATIENCE_S) == 0
    assert failed == []


def consume(broker: KafkaBroker, topic: str, *, committed: bool = True) -> list[Record]:
    """Return all records, partition by partition, as a new consumer reads them."""
    partitions = [each.id for each in broker.describe_topic(topic).partitions]
    level = "read_committed" if committed else "read_uncommitted"
    found: list[Record] = []
    consumer = Consumer(
        broker.client(
            group__id="nobody",
            isolation__level=level,
            enable__auto__commit=False,
            auto__offset__reset="error",
        )
    )
    try:
        for partition in partitions:
            where = TopicPartition(topic, partition)
            ends = consumer.get_watermark_offsets(where, timeout=PATIENCE_S)
            assert ends is not None
            low, end = ends
            consumer.assign([TopicPartition(topic, partition, low)])
            while consumer.position([where])[0].offset < end and low < end:
                message = consumer.poll(0.1)
                if message is not None:
                    assert message.error() is None, message.error()
                    found.append(
                        Record(partition, message.offset() or 0, message.key(), message.value())
                    )
    finally:
        consumer.close()
    return sorted(found, key=lambda each: (each.partition, each.offset))


def ends(admin: AdminClient, topic: str, partition: int = 0) -> tuple[int, int, int]:
    """Return the low watermark, the last stable offset and the high watermark."""

    def request(spec: OffsetSpec, level: IsolationLevel) -> int:
        specs = {TopicPartition(topic, partition): spec}
        (answer,) = admin.list_offsets(
            specs, isolation_level=level, request_timeout=PATIENCE_S
        ).values()
        offset = int(answer.result(PATIENCE_S).offset)
        # This client reports no error if a leader did not answer in time.
        assert offset >= 0, f"no answer about partition {partition} of {topic}"
        return offset

    return (
        request(OffsetSpec.earliest(), IsolationLevel.READ_COMMITTED),
        request(OffsetSpec.latest(), IsolationLevel.READ_COMMITTED),
        request(OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED),
    )


def group_offsets(broker: KafkaBroker, group: str) -> dict[tuple[str, int], int]:
    """Return the committed offsets of a consumer group, by topic and partition."""
    found: list[TopicPartition] = []

    def is_loaded() -> bool:
        asked = broker.admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
        try:
            found.extend(asked[group].result(PATIENCE_S).topic_partitions)
        except KafkaException as error:
            # The first request about groups makes a new broker load its coordinator.
            if error.args[0].code() != KafkaError.COORDINATOR_LOAD_IN_PROGRESS:
                raise
            return False
        return True

    wait_until(is_loaded, f'offsets of group "{group}"')
    return {(place.topic, place.partition): place.offset for place in found}


def move_group(broker: KafkaBroker, group: str, topic: str, offsets: dict[int, int]) -> None:
    """Set the committed offsets of a consumer group."""
    places = [TopicPartition(topic, each, offset) for each, offset in offsets.items()]
    commits = [ConsumerGroupTopicPartitions(group, places)]
    broker.admin.alter_consumer_group_offsets(commits)[group].result(PATIENCE_S)
