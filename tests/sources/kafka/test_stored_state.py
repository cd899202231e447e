"""Stored names of a Kafka source in both forms: state keys, collections and partitions.

Lakes of earlier versions contain these names, so a change of one is a change of the format.
"""

import json
from typing import Any

import pytest

from penstock.progress import Frontier
from penstock.sources.kafka.config import KafkaConfig
from penstock.sources.kafka.format_spec import FormatSpec
from penstock.sources.kafka.source import KafkaSource
from penstock.testing.clocks import ManualClock
from tests.sources.kafka.connector import TOPICS, TX, Connector, MemoryCluster, MemoryClusterClient
from tests.sources.kafka.test_topics import MemoryState

A, B = TOPICS


class RecordedTick:
    """Tick that records its effects and reads no records."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.state: dict[str, Any] = {}
        self.scans: list[Any] = []

    def begin(self, collection: str) -> None:
        self.begun.append(collection)

    def put_state(self, name: str, value: Any) -> None:
        self.state[name] = value

    def scan(self, scan: Any) -> list[Any]:
        self.scans.append(scan)
        return []

    def side_rows(self, _name: str) -> list[Any]:
        return []

    def retain_side_rows(self, _names: set[str]) -> None: ...

    def create(self, *_: Any) -> None: ...


def topic_state(topic: str, partitions: int) -> dict[str, Any]:
    begins = {str(partition): 0 for partition in range(partitions)}
    return {"topic": topic, "id": f"1 of {topic}", "begins": begins, "value": None, "key": None}


ONE_STATE = {"topic": topic_state(A, 2)}
ONE_TICK: dict[str, Any] = {"errors": True}
SEVERAL_STATE = {
    f"topic {A}": topic_state(A, 2),
    f"topic {B}": topic_state(B, 2),
    f"topic {TX}": topic_state(TX, 1),
}
SEVERAL_TICK = {
    "errors": True,
    "topics": [A, B, TX],
    "transactions": TX,
    "aside": {"upto": -1},
}
FORMS: dict[str, tuple[Any, ...]] = {
    "one topic": (
        {"topic": A},
        "kafka",
        ONE_STATE,
        ONE_TICK,
        ["cdc", "cdc_errors"],
        {0: 0, 1: 1},
    ),
    "several topics": (
        {"topic": "", "topics": {A: None, B: None}, "transactions": TX},
        "kafka-topics",
        SEVERAL_STATE,
        SEVERAL_TICK,
        [f"cdc.{A}", f"cdc.{B}", "cdc_errors"],
        {f"{A}-0": 0, f"{A}-1": 1, f"{B}-0": 0, f"{B}-1": 0, f"{TX}-0": 0},
    ),
}


@pytest.fixture
def cluster() -> MemoryCluster:
    connector = Connector(MemoryCluster())
    connector.read(A, 1, 10)
    return connector.cluster


def build_source(cluster: MemoryCluster, options: dict[str, Any]) -> KafkaSource:
    config = KafkaConfig(
        "nowhere:9092",
        value=FormatSpec("json", columns={"id": "bigint", "n": "bigint"}),
        envelope="debezium",
        key=("id",),
        on_bad_record="set_aside",
        **options,
    )
    return KafkaSource(
        "cdc",
        config,
        clock=ManualClock(),
        cluster=lambda topic_config: MemoryClusterClient(cluster, topic_config),  # type: ignore[arg-type,return-value]
    )


@pytest.mark.parametrize("form", FORMS)
def test_kafka_source_stores_the_names_of_its_form(form: str, cluster: MemoryCluster) -> None:
    options, kind, stored, tick_state, collections, partitions = FORMS[form]
    source, state, tick = build_source(cluster, options), MemoryState(), RecordedTick()
    source.open(state, tick, None)  # type: ignore[arg-type]
    assert state.values == stored
    up_to = source.probe().frontier
    assert dict(up_to.items()) == partitions
    bound = source.read_into(tick, up_to)  # type: ignore[arg-type]
    assert bound == up_to
    assert (source.kind, tick.begun, tick.state) == (kind, collections, tick_state)
    assert source.collections() == collections


@pytest.mark.parametrize("form", FORMS)
def test_kafka_source_resumes_from_the_stored_names_of_its_form(
    form: str, cluster: MemoryCluster
) -> None:
    options, _, stored, tick_state, _, partitions = FORMS[form]
    source, state, tick = build_source(cluster, options), MemoryState(), RecordedTick()
    state.put({**stored, **tick_state})
    before = dict(state.values)
    source.open(state, tick, Frontier(partitions))  # type: ignore[arg-type]
    assert state.values == before
    cluster.send(A, 1, {"op": "r", "after": {"id": 3, "n": 30}})
    source.read_into(tick, source.probe().frontier)  # type: ignore[arg-type]
    assert tick.begun == []
    (scan,) = tick.scans
    assert json.loads(scan.options["startingOffsets"]) == {A: {"1": 1}}
    assert json.loads(scan.options["endingOffsets"]) == {A: {"1": 2}}
