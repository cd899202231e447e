"""Topics of a real broker, followed by Spark's own connector into collections."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Producer

import penstock.ingest
from penstock import persist
from penstock.engine.jars import kafka_jars
from penstock.engine.kept.spark import KeptSession
from penstock.errors import PenstockError
from penstock.ingest.spark import FEW_BYTES
from penstock.testing.kafka import KafkaBroker
from tests.sources.kafka.clients import consume, produce, transactional

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptSession]:
    session = KeptSession("local[2]", jars=kafka_jars)
    yield session
    session.get().stop()


class Topic:
    """A topic, and a lake that follows it."""

    def __init__(
        self, broker: KafkaBroker, name: str, folder: Path, kept: KeptSession, **options: Any
    ) -> None:
        self.broker, self.name, self.folder, self.kept = broker, name, folder, kept
        self.options: dict[str, Any] = {"format": "text", **options}

    @property
    def storage(self) -> str:
        return f"file:{self.folder}/lake/clicks"

    def once(self, **options: Any) -> None:
        """Bring all that is there now."""
        section = {
            "brokers": self.broker.bootstrap,
            "topic": self.name,
            **self.options,
            **options,
        }
        section = {name: value for name, value in section.items() if value is not None}
        file = self.folder / "pipeline.yaml"
        file.write_text(
            yaml.safe_dump(
                {
                    "location": f"file:{self.folder}/lake",
                    "tick": "50ms",
                    "sources": {"clicks": {"kafka": section}},
                }
            )
        )
        penstock.ingest.run(file, once=True, stop=threading.Event(), many=self.kept)

    def rows(self, collection: str = "clicks") -> list[dict[str, Any]]:
        with persist.open(self.storage, hold=False) as client:
            found = client.collection(collection)
            return found.snapshot(found.upper - 1).arrow().to_pylist()

    def changes(self, collection: str = "clicks") -> list[tuple[Any, ...]]:
        with persist.open(self.storage, hold=False) as client:
            found = client.collection(collection)
            rows = found.snapshot(found.upper - 1).arrow()
            return rows.to_pylist()


@pytest.fixture
def topic(kafka: KafkaBroker, topic_prefix: str, tmp_path: Path, kept: KeptSession) -> Topic:
    kafka.create_topic(f"{topic_prefix}clicks", partitions=2)
    return Topic(kafka, f"{topic_prefix}clicks", tmp_path, kept)


@pytest.mark.parametrize("few_bytes", [FEW_BYTES, 0], ids=["by-one-task", "by-many"])
def test_a_topic_is_what_a_committed_reader_sees(
    topic: Topic, few_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ingest.spark.FEW_BYTES", few_bytes)
    plain = Producer(topic.broker.client())
    produce(plain, topic.name, ["a", "b"], partition=0)
    given_up = transactional(topic.broker, f"{topic.name}-1")
    given_up.begin_transaction()
    produce(given_up, topic.name, ["never"], partition=0)
    given_up.abort_transaction()
    kept = transactional(topic.broker, f"{topic.name}-2")
    kept.begin_transaction()
    produce(kept, topic.name, ["c"], partition=1)
    kept.commit_transaction()
    topic.once()
    assert _seen(topic) == _wanted(topic)
    assert len(_seen(topic)) == 3
    produce(plain, topic.name, ["d"], partition=1)
    topic.once()
    assert _seen(topic) == _wanted(topic)
    assert len(_seen(topic)) == 4


def test_json_upsert_keeps_the_last_of_a_key(topic: Topic) -> None:
    plain = Producer(topic.broker.client())
    options = {"format": {"json": {"columns": {"n": "bigint"}}}, "envelope": "upsert"}
    for n in range(5):
        produce(plain, topic.name, [json.dumps({"n": n})], key="x")
    produce(plain, topic.name, [json.dumps({"n": 7})], key="y", partition=1)
    topic.once(**options)
    assert sorted((row["key"], row["n"]) for row in topic.rows()) == [("x", 4), ("y", 7)]
    plain.produce(topic.name, key="x", value=None, partition=0)
    plain.flush()
    produce(plain, topic.name, [json.dumps({"n": 8})], key="y", partition=1)
    topic.once(**options)
    assert [(row["key"], row["n"]) for row in topic.rows()] == [("y", 8)]


def test_a_record_that_cannot_be_decoded_stops_the_source_and_is_named(topic: Topic) -> None:
    plain = Producer(topic.broker.client())
    options = {"format": {"json": {"columns": {"n": "bigint"}}}}
    produce(plain, topic.name, ['{"n": 1}', "oops"])
    with pytest.raises(PenstockError) as told:
        topic.once(**options)
    assert f'offset 1 of partition 0 of topic "{topic.name}"' in str(told.value)
    topic.once(**options, on_bad_record="set_aside")
    assert [row["n"] for row in topic.rows()] == [1]
    (aside,) = topic.rows("clicks_errors")
    assert (aside["partition"], aside["offset"], aside["value"]) == (0, 1, b"oops")


def test_transactions_over_two_topics_are_seen_whole(
    kafka: KafkaBroker, topic_prefix: str, tmp_path: Path, kept: KeptSession
) -> None:
    orders, lines, transactions = (
        f"{topic_prefix}shop.public.{name}" for name in ("orders", "lines", "transaction")
    )
    for name, partitions in ((orders, 2), (lines, 2), (transactions, 1)):
        kafka.create_topic(name, partitions=partitions)
    plain = Producer(kafka.client())
    topic = Topic(kafka, "", tmp_path, kept)
    options = {
        "topic": None,
        "topics": [orders, lines],
        "transactions": transactions,
        "format": {"json": {"columns": {"id": "bigint", "n": "bigint"}}},
        "envelope": "debezium",
        "key": {orders: ["id"], lines: ["id"]},
    }

    def send(name: str, partition: int, at: tuple[str, int, int], row: dict[str, int]) -> None:
        transaction = dict(zip(("id", "total_order", "data_collection_order"), at, strict=True))
        event = {"op": "c", "before": None, "after": row, "transaction": transaction}
        produce(plain, name, [json.dumps(event)], partition=partition)

    def seen() -> dict[str, list[int]]:
        return {
            name: sorted(row["n"] for row in topic.rows(f"clicks.{name}"))
            for name in (orders, lines)
        }

    def mark(status: str, name: str, **counts: int) -> None:
        collections = [
            {"data_collection": f"public.{each}", "event_count": count}
            for each, count in counts.items()
        ]
        said = {"status": status, "id": name, "data_collections": collections or None}
        produce(plain, transactions, [json.dumps({"schema": {}, "payload": said})])

    mark("BEGIN", "1")
    send(orders, 0, ("1", 1, 1), {"id": 1, "n": 1})
    send(lines, 0, ("1", 2, 1), {"id": 1, "n": 1})
    send(lines, 1, ("1", 3, 2), {"id": 2, "n": 2})
    mark("END", "1", orders=1, lines=2)
    mark("BEGIN", "2")
    send(orders, 0, ("2", 1, 1), {"id": 1, "n": 10})
    topic.once(**options)
    assert seen() == {orders: [1], lines: [1, 2]}
    mark("END", "2", orders=1, lines=1)
    topic.once(**options)
    assert seen() == {orders: [1], lines: [1, 2]}
    send(lines, 1, ("2", 2, 1), {"id": 2, "n": 20})
    topic.once(**options)
    assert seen() == {orders: [10], lines: [1, 20]}
    with persist.open(topic.storage, hold=False) as client:
        moved = [client.collection(f"clicks.{name}") for name in (orders, lines)]
        times = [
            {row["mz_timestamp"] for row in _updates(each) if row["n"] in (10, 20)}
            for each in moved
        ]
    assert times[0] == times[1]
    assert len(times[0]) == 1


def _updates(collection: persist.Collection) -> list[dict[str, Any]]:
    return [row for part in collection.parts() for row in part.to_pylist() if row["mz_diff"] > 0]


def _seen(topic: Topic) -> list[tuple[int, int, str]]:
    return sorted((row["_partition"], row["_offset"], row["text"]) for row in topic.rows())


def _wanted(topic: Topic) -> list[tuple[int, int, str]]:
    return [
        (record.partition, record.offset, (record.value or b"").decode())
        for record in consume(topic.broker, topic.name)
    ]
