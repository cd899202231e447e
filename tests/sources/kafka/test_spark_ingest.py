"""Topics of a real broker, ingested into collections by Spark's Kafka connector."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Producer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

import penstock.ingest
import penstock.spark as ps
from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.engine.shared_session.spark import SharedSession
from penstock.errors import DefiniteError, PenstockError
from penstock.ingest.progress_views import source_states
from penstock.ingest.spark import FEW_BYTES
from penstock.servers.kafka import KafkaBroker
from penstock.servers.postgres import Database
from penstock.servers.registry import SchemaRegistry
from tests.sources.formats.registry_server import serving
from tests.sources.kafka.clients import PATIENCE_S, produce, transactional
from tests.sources.kafka.lake import Topic

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("few_bytes", [FEW_BYTES, 0], ids=["by-one-task", "by-many"])
def test_ingested_topic_equals_records_of_read_committed_consumer(
    ingested: Topic, few_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ingest.spark.FEW_BYTES", few_bytes)
    plain = Producer(ingested.broker.client())
    produce(plain, ingested.name, ["a", "b"], partition=0)
    given_up = transactional(ingested.broker, f"{ingested.name}-1")
    given_up.begin_transaction()
    produce(given_up, ingested.name, ["never"], partition=0)
    given_up.abort_transaction()
    kept = transactional(ingested.broker, f"{ingested.name}-2")
    kept.begin_transaction()
    produce(kept, ingested.name, ["c"], partition=1)
    kept.commit_transaction()
    ingested.once()
    assert ingested.seen() == ingested.committed()
    assert len(ingested.seen()) == 3
    produce(plain, ingested.name, ["d"], partition=1)
    ingested.once()
    assert ingested.seen() == ingested.committed()
    assert len(ingested.seen()) == 4


def test_included_metadata_columns_and_progress_match_the_topic(
    ingested: Topic,
) -> None:
    plain = Producer(ingested.broker.client())
    # Retention would remove older records at once.
    sent_ms = SYSTEM_CLOCK.now_ms() - 60_000
    for partition, value in ((0, "a"), (1, "b"), (1, "c")):
        plain.produce(
            ingested.name,
            key="k",
            value=value,
            partition=partition,
            timestamp=sent_ms,
            headers=[("one", b"1"), ("none", None)],
        )
    assert plain.flush(PATIENCE_S) == 0
    named = {"partition": "part", "offset": "at", "timestamp": "sent", "headers": "h", "key": "k"}
    ingested.once(include=named)
    rows = sorted(ingested.rows(), key=lambda row: (row["part"], row["at"]))
    assert [(row["part"], row["at"], row["text"]) for row in rows] == [
        (0, 0, "a"),
        (1, 0, "b"),
        (1, 1, "c"),
    ]
    assert {row["k"] for row in rows} == {b"k"}
    assert {round(row["sent"].timestamp() * 1_000) for row in rows} == {sent_ms}
    headers = [{"key": "one", "value": b"1"}, {"key": "none", "value": None}]
    assert all(row["h"] == headers for row in rows)
    progress = ps.read(ingested.session.get(), ingested.storage, "clicks_progress")
    assert sorted((row["partition"], row["offset"]) for row in progress.collect()) == [
        (0, 1),
        (1, 2),
    ]
    with persist.open(ingested.storage, hold=False) as client:
        assert source_states(client)["clicks"]["status"]["lag_records"] == 0


def test_topic_and_postgres_table_are_joined_at_one_time(
    ingested: Topic, database: Database
) -> None:
    database.sql("CREATE TABLE customers (id int PRIMARY KEY, city text)")
    database.sql("INSERT INTO customers VALUES (1, 'Bern'), (2, 'Delft')")
    produce(Producer(ingested.broker.client()), ingested.name, ['{"customer": 1}'] * 2)
    ingested.once(format={"json": {"columns": {"customer": "int"}}})
    lake = f"file:{ingested.folder}/lake"
    file = ingested.folder / "shop.yaml"
    section = {"url": database.url(), "tables": ["public.customers"]}
    file.write_text(yaml.safe_dump({"location": lake, "sources": {"shop": {"postgres": section}}}))
    penstock.ingest.run(file, once=True)
    ingested.once(format={"json": {"columns": {"customer": "int"}}})
    both = ps.read_all(ingested.session.get(), lake, ["shop.public.customers", "clicks"])
    clicks, customers = both["clicks"], both["shop.public.customers"]
    joined = clicks.join(customers, clicks.customer == customers.id).groupBy("city").count()
    assert [tuple(row) for row in joined.collect()] == [("Bern", 2)]


def test_json_upsert_keeps_last_value_of_each_key(ingested: Topic) -> None:
    plain = Producer(ingested.broker.client())
    options = {"format": {"json": {"columns": {"n": "bigint"}}}, "envelope": "upsert"}
    for n in range(5):
        produce(plain, ingested.name, [json.dumps({"n": n})], key="x")
    produce(plain, ingested.name, [json.dumps({"n": 7})], key="y", partition=1)
    ingested.once(**options)
    assert sorted((row["key"], row["n"]) for row in ingested.rows()) == [("x", 4), ("y", 7)]
    plain.produce(ingested.name, key="x", value=None, partition=0)
    plain.flush()
    produce(plain, ingested.name, [json.dumps({"n": 8})], key="y", partition=1)
    ingested.once(**options)
    assert [(row["key"], row["n"]) for row in ingested.rows()] == [("y", 8)]


def test_avro_upsert_with_registry_continues_after_schema_change(
    ingested: Topic, schema_registry: SchemaRegistry
) -> None:
    plain = Producer(ingested.broker.client())
    avro = {"avro": {"registry": {"url": schema_registry.url}}}
    options = {"format": avro, "key_format": avro, "envelope": "upsert"}

    def send(key: str, value: dict[str, Any] | None, *fields: dict[str, Any]) -> None:
        schema = {"type": "record", "name": "Order", "fields": [{"name": "n", "type": "int"}]}
        schema["fields"] += fields  # type: ignore[operator]
        with SchemaRegistryClient({"url": schema_registry.url}) as client:
            write_key = AvroSerializer(client, '"string"')
            write = AvroSerializer(client, json.dumps(schema))
            plain.produce(
                ingested.name,
                key=write_key(key, SerializationContext(ingested.name, MessageField.KEY)),
                value=write(value, SerializationContext(ingested.name, MessageField.VALUE)),
                partition=0,
            )
        assert plain.flush(PATIENCE_S) == 0

    send("x", {"n": 1})
    send("y", {"n": 2})
    ingested.once(**options)
    assert sorted((row["value"], row["n"]) for row in ingested.rows()) == [("x", 1), ("y", 2)]
    send("x", {"n": 3, "added": "z"}, {"name": "added", "type": "string", "default": ""})
    send("y", None)
    ingested.once(**options)
    # The columns are those of the first schema.
    assert [(row["value"], row["n"]) for row in ingested.rows()] == [("x", 3)]
    assert "added" not in ingested.rows()[0]


def test_undecodable_record_stops_source_and_error_names_its_offset(ingested: Topic) -> None:
    plain = Producer(ingested.broker.client())
    options = {"format": {"json": {"columns": {"n": "bigint"}}}}
    produce(plain, ingested.name, ['{"n": 1}', "oops"])
    with pytest.raises(PenstockError) as told:
        ingested.once(**options)
    assert f'offset 1 of partition 0 of topic "{ingested.name}"' in str(told.value)
    ingested.once(**options, on_bad_record="set_aside")
    assert [row["n"] for row in ingested.rows()] == [1]
    (aside,) = ingested.rows("clicks_errors")
    assert (aside["partition"], aside["offset"], aside["value"]) == (0, 1, b"oops")


def test_definite_error_in_spark_task_after_shuffle_stops_source(
    ingested: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "n", "type": "long"}]}
    told = {"subject": "s", "version": 1, "id": 1, "schema": json.dumps(schema)}
    produce(Producer(ingested.broker.client()), ingested.name, ["\0\0\0\0\1\2"] * 2)
    monkeypatch.setattr("penstock.ingest.spark.PLACE_BYTES", 1024 // 2)
    with serving() as registry:
        registry.subjects[f"{ingested.name}-value", "latest"] = told
        registry.refuses = "/schemas/"
        with pytest.raises(DefiniteError, match="was denied"):
            ingested.once(format={"avro": {"registry": {"url": registry.url}}}, envelope="upsert")


def test_transactions_over_two_topics_become_visible_atomically(
    kafka: KafkaBroker, topic_prefix: str, tmp_path: Path, session: SharedSession
) -> None:
    orders, lines, transactions = (
        f"{topic_prefix}shop.public.{name}" for name in ("orders", "lines", "transaction")
    )
    for name, partitions in ((orders, 2), (lines, 2), (transactions, 1)):
        kafka.create_topic(name, partitions=partitions)
    plain = Producer(kafka.client())
    ingested = Topic(kafka, "", tmp_path, session)
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
            name: sorted(row["n"] for row in ingested.rows(f"clicks.{name}"))
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
    ingested.once(**options)
    assert seen() == {orders: [1], lines: [1, 2]}
    mark("END", "2", orders=1, lines=1)
    ingested.once(**options)
    assert seen() == {orders: [1], lines: [1, 2]}
    send(lines, 1, ("2", 2, 1), {"id": 2, "n": 20})
    ingested.once(**options)
    assert seen() == {orders: [10], lines: [1, 20]}
    with persist.open(ingested.storage, hold=False) as client:
        moved = [client.collection(f"clicks.{name}") for name in (orders, lines)]
        times = [
            {row["mz_timestamp"] for row in _updates(each) if row["n"] in (10, 20)}
            for each in moved
        ]
    assert times[0] == times[1]
    assert len(times[0]) == 1


def _updates(collection: persist.Collection) -> list[dict[str, Any]]:
    return [row for part in collection.parts() for row in part.to_pylist() if row["mz_diff"] > 0]
