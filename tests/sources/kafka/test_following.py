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


def _seen(topic: Topic) -> list[tuple[int, int, str]]:
    return sorted((row["_partition"], row["_offset"], row["text"]) for row in topic.rows())


def _wanted(topic: Topic) -> list[tuple[int, int, str]]:
    return [
        (record.partition, record.offset, (record.value or b"").decode())
        for record in consume(topic.broker, topic.name)
    ]
