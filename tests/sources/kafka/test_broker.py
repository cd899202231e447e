"""Behaviour of a real broker that the Kafka source relies on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from penstock.servers.kafka import KafkaBroker, Protocol, Tls
from penstock.servers.process import wait_until
from tests.certificates import authority, certificate
from tests.fix_kafka import make_broker
from tests.sources.kafka.clients import consume, ends, produce, transactional


def values(broker: KafkaBroker, topic: str, *, committed: bool = True) -> list[str]:
    return [(each.value or b"").decode() for each in consume(broker, topic, committed=committed)]


def test_read_committed_consumer_does_not_see_aborted_records(
    kafka: KafkaBroker, topic_prefix: str
) -> None:
    topic = f"{topic_prefix}orders"
    kafka.create_topic(topic)
    producer = transactional(kafka, topic)
    producer.begin_transaction()
    produce(producer, topic, ["aborted 1", "aborted 2"])
    producer.abort_transaction()
    producer.begin_transaction()
    produce(producer, topic, ["kept"])
    producer.commit_transaction()
    assert values(kafka, topic) == ["kept"]
    assert values(kafka, topic, committed=False) == ["aborted 1", "aborted 2", "kept"]
    # The end of a transaction has an offset too; no consumer sees it.
    assert [each.offset for each in consume(kafka, topic)] == [3]
    assert ends(kafka.admin, topic) == (0, 5, 5)


def test_last_stable_offset_stays_below_open_transaction(
    kafka: KafkaBroker, topic_prefix: str
) -> None:
    topic = f"{topic_prefix}orders"
    kafka.create_topic(topic)
    produce(Producer(kafka.client()), topic, ["before"])
    producer = transactional(kafka, topic)
    producer.begin_transaction()
    produce(producer, topic, ["open"])
    produce(Producer(kafka.client()), topic, ["after"])
    assert ends(kafka.admin, topic) == (0, 1, 3)
    assert values(kafka, topic) == ["before"]
    producer.commit_transaction()
    wait_until(lambda: ends(kafka.admin, topic) == (0, 4, 4), "the end of the transaction")
    assert values(kafka, topic) == ["before", "open", "after"]


def test_hanging_transaction_is_aborted_after_its_timeout(
    kafka: KafkaBroker, topic_prefix: str
) -> None:
    topic = f"{topic_prefix}orders"
    kafka.create_topic(topic)
    producer = transactional(kafka, topic, transaction__timeout__ms=1_000)
    producer.begin_transaction()
    produce(producer, topic, ["hangs"])
    assert ends(kafka.admin, topic) == (0, 0, 1)
    wait_until(lambda: ends(kafka.admin, topic) == (0, 2, 2), "the broker to abort it")
    assert values(kafka, topic) == []


def test_acknowledged_records_survive_kill_of_broker() -> None:
    with make_broker() as broker:
        broker.create_topic("orders", partitions=2)
        identity = str(broker.describe_topic("orders").topic_id)
        written = {partition: [f"{partition} {n}" for n in range(100)] for partition in range(2)}
        for partition, each in written.items():
            produce(Producer(broker.client(acks="all")), "orders", each, partition=partition)
        where, pids = broker.bootstrap, broker.pids
        broker.kill()
        assert broker.pids == {}
        broker.start()
        assert broker.bootstrap == where
        assert broker.pids != pids
        assert values(broker, "orders") == [*written[0], *written[1]]
        assert str(broker.describe_topic("orders").topic_id) == identity
        broker.restart()
        assert len(values(broker, "orders")) == 200


def test_recreated_topic_has_another_topic_id(kafka: KafkaBroker, topic_prefix: str) -> None:
    topic = f"{topic_prefix}orders"
    kafka.create_topic(topic)
    # Use one client: a cached response would show.
    before = str(kafka.describe_topic(topic).topic_id)
    assert str(kafka.describe_topic(topic).topic_id) == before
    produce(Producer(kafka.client()), topic, ["of the first"])
    kafka.delete_topic(topic)
    kafka.create_topic(topic)
    assert str(kafka.describe_topic(topic).topic_id) != before
    assert ends(kafka.admin, topic) == (0, 0, 0)


def test_added_partition_is_visible_to_existing_client(
    kafka: KafkaBroker, topic_prefix: str
) -> None:
    topic = f"{topic_prefix}orders"
    kafka.create_topic(topic, partitions=1)
    assert [each.id for each in kafka.describe_topic(topic).partitions] == [0]
    other = AdminClient(kafka.client())
    kafka_admin, kafka._admin = kafka.admin, other
    try:
        kafka.add_partitions(topic, 3)
    finally:
        kafka._admin = kafka_admin
    assert [each.id for each in kafka.describe_topic(topic).partitions] == [0, 1, 2]
    produce(Producer(kafka.client()), topic, ["there"], partition=2)
    assert ends(kafka.admin, topic, 2) == (0, 1, 1)


def test_topic_settings_are_returned_by_broker(kafka: KafkaBroker, topic_prefix: str) -> None:
    topic = f"{topic_prefix}orders"
    kafka.create_topic(topic, settings={"cleanup.policy": "compact"})
    resource = ConfigResource(ResourceType.TOPIC, topic)
    (asked,) = kafka.admin.describe_configs([resource]).values()
    assert asked.result(20)["cleanup.policy"].value == "compact"


def test_describing_missing_topic_does_not_create_it(kafka: KafkaBroker, topic_prefix: str) -> None:
    with pytest.raises(KafkaException, match="UNKNOWN_TOPIC_OR_PART"):
        kafka.describe_topic(f"{topic_prefix}nothing")
    assert f"{topic_prefix}nothing" not in kafka.topics()


def test_topic_compaction_removes_old_values_within_test_time(
    kafka: KafkaBroker, topic_prefix: str
) -> None:
    topic = f"{topic_prefix}state"
    compacted = {"cleanup.policy": "compact", "segment.ms": 100, "max.compaction.lag.ms": 100}
    kafka.create_topic(topic, settings=compacted)
    producer = Producer(kafka.client())
    produce(producer, topic, ["old", "older"], key="a")
    produce(producer, topic, ["kept"], key="b")

    def is_compacted() -> bool:
        # Kafka never compacts the active segment; a later record rolls it.
        produce(producer, topic, ["newest"], key="a")
        return {"old", "older"}.isdisjoint(values(kafka, topic))

    wait_until(is_compacted, "old values to be compacted")
    seen = consume(kafka, topic)
    assert {each.key for each in seen} == {b"a", b"b"}
    assert seen[0].value == b"kept"
    assert ends(kafka.admin, topic)[0] == 0


def test_topic_retention_raises_low_watermark(kafka: KafkaBroker, topic_prefix: str) -> None:
    topic = f"{topic_prefix}log"
    kafka.create_topic(topic, settings={"retention.ms": 500, "segment.ms": 100})
    producer = Producer(kafka.client())
    produce(producer, topic, ["gone"])

    def overtaken() -> bool:
        produce(producer, topic, ["new"])
        return ends(kafka.admin, topic)[0] > 0

    wait_until(overtaken, "retention to remove the first record")
    assert "gone" not in values(kafka, topic)


def test_delete_records_raises_low_watermark(kafka: KafkaBroker, topic_prefix: str) -> None:
    topic = f"{topic_prefix}log"
    kafka.create_topic(topic)
    produce(Producer(kafka.client()), topic, ["a", "b", "c"])
    (asked,) = kafka.admin.delete_records([TopicPartition(topic, 0, 2)]).values()
    assert asked.result(20).low_watermark == 2
    assert ends(kafka.admin, topic) == (2, 3, 3)
    assert values(kafka, topic) == ["c"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KafkaBroker, Path]]:
    """Yield a broker with TLS and one user, and the CA of its certificate."""
    folder = tmp_path_factory.mktemp("tls")
    signer = authority(folder, "authority")
    tls = Tls(*certificate(folder, "localhost", signer), signer)
    with make_broker(tls=tls, users={"alice": "of wonder"}) as broker:
        yield broker, signer


@pytest.mark.parametrize("mechanism", [None, "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("encrypted", [False, True])
def test_client_connects_by_every_protocol_and_mechanism(
    guarded: tuple[KafkaBroker, Path], encrypted: bool, mechanism: str | None
) -> None:
    broker, signer = guarded
    doors: dict[tuple[bool, bool], Protocol] = {
        (False, False): "PLAINTEXT",
        (True, False): "SSL",
        (False, True): "SASL_PLAINTEXT",
        (True, True): "SASL_SSL",
    }
    protocol = doors[encrypted, mechanism is not None]
    settings: dict[str, object] = {
        "bootstrap__servers": broker.bootstrap_for(protocol),
        "security__protocol": protocol,
    }
    if encrypted:
        settings["ssl__ca__location"] = str(signer)
    if mechanism is not None:
        settings |= {
            "sasl__mechanism": mechanism,
            "sasl__username": "alice",
            "sasl__password": "of wonder",
        }
    admin = AdminClient(broker.client(**settings))
    assert len(admin.list_topics(timeout=20).brokers) == 1
    if mechanism is not None:
        refused: list[str] = []
        settings |= {"sasl__password": "of nothing", "error_cb": lambda e: refused.append(e.name())}
        stranger = AdminClient(broker.client(**settings))

        def is_rejected() -> bool:
            stranger.poll(0.1)
            return bool(refused)

        wait_until(is_rejected, "the rejection of a wrong password")
        assert refused[0] == "_AUTHENTICATION"


@pytest.mark.long
def test_killed_leader_is_replaced_by_another_node() -> None:
    with make_broker(nodes=3) as broker:
        broker.create_topic("orders")
        producer = Producer(broker.client(acks="all"))
        produce(producer, "orders", ["before"])
        leader = broker.describe_topic("orders").partitions[0].leader
        assert leader is not None
        broker.kill(leader.id)

        def moved() -> bool:
            now = broker.describe_topic("orders").partitions[0].leader
            return bool(now) and now.id != leader.id  # None while there is no leader.

        wait_until(moved, "another leader")
        produce(producer, "orders", ["after"])
        assert values(broker, "orders") == ["before", "after"]
        broker.start()
        assert set(broker.pids) == {1, 2, 3}
        assert values(broker, "orders") == ["before", "after"]
