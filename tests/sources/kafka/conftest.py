"""Spark session shared by the Kafka tests of this process, and a topic for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.jars import kafka_jars
from penstock.engine.shared_session.spark import SharedSession
from penstock.servers.kafka import KafkaBroker
from tests.sources.kafka.lake import Topic


@pytest.fixture(scope="module")
def session() -> Iterator[SharedSession]:
    shared = SharedSession("local[2]", jars=kafka_jars)
    yield shared
    shared.get().stop()


@pytest.fixture
def ingested(
    kafka: KafkaBroker, topic_prefix: str, tmp_path: Path, session: SharedSession
) -> Topic:
    kafka.create_topic(f"{topic_prefix}clicks", partitions=2)
    return Topic(kafka, f"{topic_prefix}clicks", tmp_path, session)
