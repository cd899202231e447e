"""Events in the life of a topic, its broker and its cluster while Spark ingests it."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition

import penstock.ingest
from penstock import persist
from penstock.engine.shared_session.spark import SharedSession
from penstock.errors import DefiniteError, UsageError
from penstock.ingest.progress_views import source_states
from penstock.servers.kafka import KafkaBroker, Tls
from penstock.servers.process import wait_until
from penstock.sources.kafka.source import KafkaSource
from tests.certificates import authority, certificate
from tests.fix_kafka import make_broker
from tests.ingest.pump import until
from tests.sources.kafka.clients import (
    PATIENCE_S,
    consume,
    ends,
    group_offsets,
    produce,
    transactional,
)
from tests.sources.kafka.lake import Topic

pytestmark = pytest.mark.spark

PATIENCE_MS = 120_000
SECRET = "n0t-to-be-seen"


@contextmanager
def following(topic: Topic, **options: Any) -> Iterator[Callable[[], None]]:
    """Ingest the topic in this process; yield a function that fails if the run has ended."""
    stop, file = threading.Event(), topic.write_file(**options)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(penstock.ingest.run, file, stop=stop, jobs=topic.session)

        def check_running() -> None:
            assert not running.done(), running.exception()

        try:
            yield check_running
        finally:
            stop.set()
            running.result(PATIENCE_S)


def await_all(topic: Topic, check_running: Callable[[], None]) -> None:
    """Wait until the lake has all records of a read_committed consumer."""

    def is_complete() -> bool:
        check_running()
        try:
            return topic.seen() == topic.committed()
        except (persist.CollectionMissing, persist.NotYetComplete, UsageError):
            return False

    until(is_complete, "all records to be in the lake", PATIENCE_MS)


def status(topic: Topic) -> dict[str, Any]:
    with persist.open(topic.storage, hold=False) as client:
        return source_states(client)["clicks"]["status"]


def test_ingest_reads_added_partition(ingested: Topic) -> None:
    sender = Producer(ingested.broker.client(topic__metadata__refresh__interval__ms=500))
    produce(sender, ingested.name, ["before"])
    ingested.once()
    ingested.broker.add_partitions(ingested.name, 3)
    produce(Producer(ingested.broker.client()), ingested.name, ["in the new one"], partition=2)
    ingested.once()
    assert ingested.seen() == ingested.committed()
    assert len(ingested.seen()) == 2


def test_ingest_waits_for_hanging_transaction_and_reports_held_back_records(
    ingested: Topic,
) -> None:
    produce(Producer(ingested.broker.client()), ingested.name, ["before"])
    hanging = transactional(ingested.broker, f"{ingested.name}-hanging")
    hanging.begin_transaction()
    produce(hanging, ingested.name, ["open"])
    produce(Producer(ingested.broker.client()), ingested.name, ["after"])
    ingested.once()
    assert [text for _, _, text in ingested.seen()] == ["before"]
    assert "hold back records: 2 of partition 0" in status(ingested)["waits_for"]
    hanging.abort_transaction()
    wait_until(
        lambda: ends(ingested.broker.admin, ingested.name)[1] == 4, "the transaction to have ended"
    )
    ingested.once()
    assert [text for _, _, text in ingested.seen()] == ["before", "after"]
    assert status(ingested)["waits_for"] == ""


def test_upsert_from_compacted_topic_has_last_value_of_each_key(
    kafka: KafkaBroker, topic_prefix: str, tmp_path: Path, session: SharedSession
) -> None:
    topic = Topic(
        kafka,
        f"{topic_prefix}state",
        tmp_path,
        session,
        format={"json": {"columns": {"n": "bigint"}}},
        envelope="upsert",
    )
    settings = {"cleanup.policy": "compact", "segment.ms": 100, "max.compaction.lag.ms": 100}
    kafka.create_topic(topic.name, settings=settings)
    sender = Producer(kafka.client())
    produce(sender, topic.name, ['{"n": 0}'], key="never again")
    for key in ("a", "b"):
        produce(sender, topic.name, [json.dumps({"n": n}) for n in range(5)], key=key)

    def compacted() -> bool:
        # Kafka never compacts the active segment; a later record rolls it.
        produce(sender, topic.name, ['{"n": 9}'], key="a")
        return len(consume(kafka, topic.name)) < 6

    wait_until(compacted, "old values to be removed")
    topic.once()
    found = {row["key"]: row["n"] for row in topic.rows()}
    assert found == {"never again": 0, "a": 9, "b": 4}


def test_records_removed_by_retention_before_read_raise_definite_error(ingested: Topic) -> None:
    sender = Producer(ingested.broker.client())
    produce(sender, ingested.name, ["read"] * 2)
    ingested.once(group=f"{ingested.name}-group")
    produce(sender, ingested.name, ["gone"] * 3)
    place = TopicPartition(ingested.name, 0, 4)
    for answer in ingested.broker.admin.delete_records([place]).values():
        answer.result(PATIENCE_S)
    with pytest.raises(DefiniteError) as told:
        ingested.once(group=f"{ingested.name}-group")
    assert "offsets 2 to 3 of partition 0" in f"{told.value} {told.value.detail}"
    assert "offsets 2 to 3 of partition 0" in str(status(ingested)["error"])
    # Earlier rows stay, and the consumer group has no higher offset.
    assert [text for _, _, text in ingested.seen()] == ["read"] * 2
    assert group_offsets(ingested.broker, f"{ingested.name}-group")[ingested.name, 0] == 2


def test_deleted_and_recreated_topic_raises_definite_error_and_keeps_rows(ingested: Topic) -> None:
    """Vector R27, except that bindings stay: the past remains readable."""
    produce(Producer(ingested.broker.client()), ingested.name, ["of the first"])
    ingested.once()
    ingested.broker.delete_topic(ingested.name)
    with pytest.raises(DefiniteError, match="topic was deleted"):
        ingested.once()
    ingested.broker.create_topic(ingested.name, partitions=2)
    produce(Producer(ingested.broker.client()), ingested.name, ["of the second"] * 3)
    with pytest.raises(DefiniteError, match="topic was recreated"):
        ingested.once()
    assert [text for _, _, text in ingested.seen()] == ["of the first"]


def test_scan_of_deleted_topic_does_not_recreate_it(
    tmp_path: Path, session: SharedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_scan = KafkaSource._scan
    with make_broker(settings={"auto.create.topics.enable": "true"}) as broker:

        def delete_then_scan(self: KafkaSource, ranges: Any) -> Any:
            scan = build_scan(self, ranges)
            if "gone" in broker.topics():
                broker.delete_topic("gone")
                self.topics["gone"].cluster._refresh_brokers()
            return scan

        broker.create_topic("gone", partitions=2)
        produce(Producer(broker.client()), "gone", ["x"] * 3)
        topic = Topic(broker, "gone", tmp_path, session)
        topic.once()
        produce(Producer(broker.client()), "gone", ["y"] * 3)
        monkeypatch.setattr(KafkaSource, "_scan", delete_then_scan)
        with pytest.raises(DefiniteError, match="topic was deleted"):
            topic.once()
        assert "gone" not in broker.topics()


def test_ingest_resumes_after_broker_is_killed_and_restarted(
    tmp_path: Path, session: SharedSession
) -> None:
    with make_broker() as broker:
        broker.create_topic("clicks", partitions=2)
        topic = Topic(broker, "clicks", tmp_path, session)
        produce(Producer(broker.client()), "clicks", ["before"] * 3)
        with following(topic) as check_running:
            await_all(topic, check_running)
            broker.kill()
            until(lambda: status(topic)["phase"] == "retrying", "it to be told", PATIENCE_MS)
            assert "cannot be reached" in status(topic)["waits_for"]
            broker.start()
            produce(Producer(broker.client()), "clicks", ["after"] * 3, partition=1)
            await_all(topic, check_running)
            assert status(topic)["phase"] == "following"
            broker.restart()
            produce(Producer(broker.client()), "clicks", ["at last"])
            await_all(topic, check_running)
        assert len(topic.seen()) == 7


@pytest.mark.long
def test_ingest_continues_when_another_node_becomes_leader(
    tmp_path: Path, session: SharedSession
) -> None:
    with make_broker(nodes=3) as broker:
        broker.create_topic("clicks", partitions=2)
        topic = Topic(broker, "clicks", tmp_path, session)
        sender = Producer(broker.client(acks="all"))
        produce(sender, "clicks", ["before"] * 3)
        with following(topic) as check_running:
            await_all(topic, check_running)
            for number in range(3):
                leader = broker.describe_topic("clicks").partitions[0].leader
                assert leader is not None
                broker.kill(leader.id)
                produce(sender, "clicks", [f"without {leader.id}"] * 3)
                produce(sender, "clicks", [f"without {leader.id}"] * 3, partition=1)
                await_all(topic, check_running)
                assert len(topic.seen()) == 3 + 6 * (number + 1)
                broker.start()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KafkaBroker, Path]]:
    """Yield a broker with TLS, client certificates and one user, and the CA that signs for it."""
    folder = tmp_path_factory.mktemp("tls")
    signer = authority(folder, "authority")
    tls = Tls(*certificate(folder, "localhost", signer), signer, clients="required")
    with make_broker(tls=tls, users={"penstock": SECRET}) as broker:
        broker.create_topic("clicks")
        produce(Producer(broker.client()), "clicks", ["seen"])
        yield broker, signer


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_ingest_with_sasl_ssl_reads_topic_and_reveals_no_secret(
    guarded: tuple[KafkaBroker, Path],
    mechanism: str,
    tmp_path: Path,
    session: SharedSession,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker, signer = guarded
    topic = Topic(
        broker,
        "clicks",
        tmp_path,
        session,
        brokers=broker.bootstrap_for("SASL_SSL"),
        tls={"ca": str(signer)},
        sasl={"mechanism": mechanism, "username": "penstock", "password": SECRET},
    )
    topic.once()
    assert topic.seen() == topic.committed()
    assert SECRET not in caplog.text
    assert SECRET not in json.dumps(status(topic))


def test_ingest_with_client_certificate_reads_topic(
    guarded: tuple[KafkaBroker, Path], tmp_path: Path, session: SharedSession
) -> None:
    broker, signer = guarded
    ours, key = certificate(tmp_path, "penstock", signer)
    topic = Topic(
        broker,
        "clicks",
        tmp_path,
        session,
        brokers=broker.bootstrap_for("SSL"),
        tls={"ca": str(signer), "certificate": str(ours), "key": str(key)},
    )
    topic.once()
    assert topic.seen() == topic.committed()
