"""What a real broker says and keeps, which all that reads Kafka relies on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from penstock.demo.process import await_claim
from penstock.testing.kafka import KafkaBroker, Protocol, Tls
from tests.certificates import authority, certificate
from tests.fix_kafka import make_broker
from tests.sources.kafka.clients import consume, ends, produce, transactional


def values(broker: KafkaBroker, topic: str, *, committed: bool = True) -> list[str]:
    return [(each.value or b"").decode() for each in consume(broker, topic, committed=committed)]


def test_committed_readers_see_no_aborted_record(kafka: KafkaBroker, topic_prefix: str) -> None:
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
    # Each end of a transaction has an offset too, which no reader ever sees.
    assert [each.offset for each in consume(kafka, topic)] == [3]
    assert ends(kafka.admin, topic) == (0, 5, 5)


def test_the_last_stable_offset_waits_for_an_open_transaction(
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
    await_claim(lambda: ends(kafka.admin, topic) == (0, 4, 4), "the end of the transaction")
    assert values(kafka, topic) == ["before", "open", "after"]


def test_a_transaction_that_hangs_is_aborted_after_its_own_timeout(
    kafka: KafkaBroker, topic_prefix: str
) -> None:
    topic = f"{topic_prefix}orders"
    kafka.create_topic(topic)
    producer = transactional(kafka, topic, transaction__timeout__ms=1_000)
    producer.begin_transaction()
    produce(producer, topic, ["hangs"])
    assert ends(kafka.admin, topic) == (0, 0, 1)
    await_claim(lambda: ends(kafka.admin, topic) == (0, 2, 2), "the broker to abort it")
    assert values(kafka, topic) == []


def test_what_was_acknowledged_survives_kill_9() -> None:
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


def test_a_topic_made_again_has_another_id(kafka: KafkaBroker, topic_prefix: str) -> None:
    topic = f"{topic_prefix}orders"
    kafka.create_topic(topic)
    # Of one client, so that an answer it had kept would show.
    before = str(kafka.describe_topic(topic).topic_id)
    assert str(kafka.describe_topic(topic).topic_id) == before
    produce(Producer(kafka.client()), topic, ["of the first"])
    kafka.delete_topic(topic)
    kafka.create_topic(topic)
    assert str(kafka.describe_topic(topic).topic_id) != before
    assert ends(kafka.admin, topic) == (0, 0, 0)


def test_a_partition_added_is_seen_by_who_asked_before(
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


def test_settings_of_a_topic_are_read_anew(kafka: KafkaBroker, topic_prefix: str) -> None:
    topic = f"{topic_prefix}orders"
    kafka.create_topic(topic, settings={"cleanup.policy": "compact"})
    resource = ConfigResource(ResourceType.TOPIC, topic)
    (asked,) = kafka.admin.describe_configs([resource]).values()
    assert asked.result(20)["cleanup.policy"].value == "compact"


def test_no_topic_is_made_by_asking_for_it(kafka: KafkaBroker, topic_prefix: str) -> None:
    with pytest.raises(KafkaException, match="UNKNOWN_TOPIC_OR_PART"):
        kafka.describe_topic(f"{topic_prefix}nothing")
    assert f"{topic_prefix}nothing" not in kafka.topics()


def test_compaction_comes_within_a_test(kafka: KafkaBroker, topic_prefix: str) -> None:
    topic = f"{topic_prefix}state"
    compacted = {"cleanup.policy": "compact", "segment.ms": 100, "max.compaction.lag.ms": 100}
    kafka.create_topic(topic, settings=compacted)
    producer = Producer(kafka.client())
    produce(producer, topic, ["old", "older"], key="a")
    produce(producer, topic, ["kept"], key="b")

    def gone() -> bool:
        # A segment that is written to is never compacted; a later record ends it.
        produce(producer, topic, ["newest"], key="a")
        return {"old", "older"}.isdisjoint(values(kafka, topic))

    await_claim(gone, "old values to be compacted")
    seen = consume(kafka, topic)
    assert {each.key for each in seen} == {b"a", b"b"}
    assert seen[0].value == b"kept"
    assert ends(kafka.admin, topic)[0] == 0


def test_retention_moves_the_low_watermark(kafka: KafkaBroker, topic_prefix: str) -> None:
    topic = f"{topic_prefix}log"
    kafka.create_topic(topic, settings={"retention.ms": 500, "segment.ms": 100})
    producer = Producer(kafka.client())
    produce(producer, topic, ["gone"])

    def overtaken() -> bool:
        produce(producer, topic, ["new"])
        return ends(kafka.admin, topic)[0] > 0

    await_claim(overtaken, "retention to remove the first record")
    assert "gone" not in values(kafka, topic)


def test_records_can_be_deleted_by_order(kafka: KafkaBroker, topic_prefix: str) -> None:
    topic = f"{topic_prefix}log"
    kafka.create_topic(topic)
    produce(Producer(kafka.client()), topic, ["a", "b", "c"])
    (asked,) = kafka.admin.delete_records([TopicPartition(topic, 0, 2)]).values()
    assert asked.result(20).low_watermark == 2
    assert ends(kafka.admin, topic) == (2, 3, 3)
    assert values(kafka, topic) == ["c"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KafkaBroker, Path]]:
    """A broker that also speaks TLS and knows a user, and who signed its certificate."""
    folder = tmp_path_factory.mktemp("tls")
    signer = authority(folder, "authority")
    tls = Tls(*certificate(folder, "localhost", signer), signer)
    with make_broker(tls=tls, users={"alice": "of wonder"}) as broker:
        yield broker, signer


@pytest.mark.parametrize("mechanism", [None, "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("encrypted", [False, True])
def test_clients_come_in_by_every_door(
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

        def told() -> bool:
            stranger.poll(0.1)
            return bool(refused)

        await_claim(told, "a wrong password to be refused")
        assert refused[0] == "_AUTHENTICATION"


@pytest.mark.long
def test_another_node_leads_when_one_is_killed() -> None:
    with make_broker(nodes=3) as broker:
        broker.create_topic("orders")
        producer = Producer(broker.client(acks="all"))
        produce(producer, "orders", ["before"])
        leader = broker.describe_topic("orders").partitions[0].leader
        assert leader is not None
        broker.kill(leader.id)

        def moved() -> bool:
            now = broker.describe_topic("orders").partitions[0].leader
            return now is not None and now.id != leader.id

        await_claim(moved, "another leader")
        produce(producer, "orders", ["after"])
        assert values(broker, "orders") == ["before", "after"]
        broker.start()
        assert set(broker.pids) == {1, 2, 3}
        assert values(broker, "orders") == ["before", "after"]
