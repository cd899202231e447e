"""A real Kafka and a real schema registry, one of each a session, and names for each test.

A broker is up in about five seconds, a topic in a tenth of one. A test that kills or
restarts a broker makes its own. A registry keeps its schemas and its port, so that a test
may kill it and start it again.
"""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

# Imported where it is used: every run loads this file, few need Kafka.
if TYPE_CHECKING:
    from penstock.testing.kafka import KafkaBroker
    from penstock.testing.registry import SchemaRegistry

_numbers = itertools.count()


def make_broker(**options: object) -> "KafkaBroker":
    """A broker that is not started yet; if there can be none, the test is left out.

    Its jars, and those with which Spark reads from it, may have to be fetched first.
    """
    from penstock.engine.jars import kafka_jars
    from penstock.errors import UsageError
    from penstock.testing.kafka import KafkaBroker

    try:
        kafka_jars()
        return KafkaBroker(**options)  # type: ignore[arg-type]
    except UsageError as missing:
        pytest.skip(f"{missing}: {missing.detail} {missing.hint}")


@pytest.fixture(scope="session")
def kafka() -> "Iterator[KafkaBroker]":
    """The broker, which answers."""
    with make_broker() as broker:
        yield broker


@pytest.fixture(scope="session")
def schema_registry() -> "Iterator[SchemaRegistry]":
    """The registry, which answers; its archive may have to be fetched first."""
    from penstock.errors import UsageError
    from penstock.testing.registry import SchemaRegistry

    try:
        registry = SchemaRegistry()
    except UsageError as missing:
        pytest.skip(f"{missing}: {missing.detail} {missing.hint}")
    with registry:
        yield registry


@pytest.fixture
def topic_prefix() -> str:
    """With it begin the names of topics that no other test uses."""
    return f"test{next(_numbers)}-"
