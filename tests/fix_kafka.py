"""A real Kafka broker and a real schema registry for the session, and unique topic names.

A broker starts in about five seconds, a topic in 0.1 s. A test that kills or restarts a
broker starts its own. The registry keeps its schemas and its port across restarts.
"""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.services import report_missing

# Imported lazily: every run loads this file, few need Kafka.
if TYPE_CHECKING:
    from penstock.servers.kafka import KafkaBroker
    from penstock.servers.registry import SchemaRegistry

_numbers = itertools.count()


def make_broker(**options: object) -> "KafkaBroker":
    """Return a broker that is not started yet.

    The jars of the broker and of Spark's reader are downloaded if necessary. Without them the
    test is skipped, or fails in CI.
    """
    from penstock.engine.jars import kafka_jars
    from penstock.errors import UsageError
    from penstock.servers.kafka import KafkaBroker

    try:
        kafka_jars()
        return KafkaBroker(**options)  # type: ignore[arg-type]
    except UsageError as missing:
        report_missing(f"{missing}: {missing.detail} {missing.hint}")


@pytest.fixture(scope="session")
def kafka() -> "Iterator[KafkaBroker]":
    """Yield a running broker."""
    with make_broker() as broker:
        yield broker


@pytest.fixture(scope="session")
def schema_registry() -> "Iterator[SchemaRegistry]":
    """Yield a running registry; its archive is downloaded if necessary."""
    from penstock.errors import UsageError
    from penstock.servers.registry import SchemaRegistry

    try:
        registry = SchemaRegistry()
    except UsageError as missing:
        report_missing(f"{missing}: {missing.detail} {missing.hint}")
    with registry:
        yield registry


@pytest.fixture
def topic_prefix() -> str:
    """Return a prefix of topic names that no other test uses."""
    return f"test{next(_numbers)}-"
