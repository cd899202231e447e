"""Spark session shared by the Kafka tests of this process, and a topic for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.jars import kafka_jars
from penstock.engine.kept.spark import KeptSession
from penstock.testing.kafka import KafkaBroker
from tests.sources.kafka.lake import Topic


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptSession]:
    session = KeptSession("local[2]", jars=kafka_jars)
    yield session
    session.get().stop()


@pytest.fixture
def followed(kafka: KafkaBroker, topic_prefix: str, tmp_path: Path, kept: KeptSession) -> Topic:
    kafka.create_topic(f"{topic_prefix}clicks", partitions=2)
    return Topic(kafka, f"{topic_prefix}clicks", tmp_path, kept)
