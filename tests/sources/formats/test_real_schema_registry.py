"""Formats against Confluent's own serializers and a real schema registry."""

import hashlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from penstock.errors import DefiniteError, TransientError, UsageError
from penstock.servers import registry as local_registry
from penstock.servers.registry import SchemaRegistry
from penstock.sources.formats import (
    AvroFormat,
    JsonFormat,
    NoSuchSchema,
    ProtobufFormat,
    Registry,
)
from tests.sources.formats.given import column, decoded, reasons, values
from tests.sources.formats.test_avro_format import member, record
from tests.sources.formats.test_protobuf_format import SHOP, message


@pytest.fixture
def client(schema_registry: SchemaRegistry) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": schema_registry.url}) as client:
        yield client


@pytest.fixture
def registry(schema_registry: SchemaRegistry) -> Registry:
    return Registry(schema_registry.url)


def avro(
    client: SchemaRegistryClient,
    topic: str,
    schema: Any,
    *records: Any,
    part: MessageField = MessageField.VALUE,
) -> list[bytes]:
    """Serialize the records and register the schema as the newest of the topic."""
    if not isinstance(schema, Schema):
        schema = json.dumps(schema)
    write = AvroSerializer(client, schema)
    return [write(each, SerializationContext(topic, part)) for each in records]


def latest(registry: Registry, subject: str) -> AvroFormat:
    return AvroFormat.of(registry.latest(subject), registry)


FIRST = record(member("id", "int"), member("name", "string"), member("gone", "string"))
SECOND = record(
    member("id", "long"),
    member("title", "string", aliases=["name"]),
    member("added", ["null", "string"], default=None),
    member("state", "string", default="new"),
)


def test_avro_records_of_older_and_newer_schemas_are_read_with_the_chosen_schema(
    client: SchemaRegistryClient, registry: Registry, topic_prefix: str
):
    topic = f"{topic_prefix}orders"
    older = avro(client, topic, FIRST, {"id": 1, "name": "chair", "gone": "x"})
    chosen = latest(registry, f"{topic}-value")
    newer = avro(
        client, topic, SECOND, {"id": 2**40, "title": "desk", "added": "y", "state": "sold"}
    )

    found = decoded(latest(registry, f"{topic}-value"), *older, None, *newer)
    assert found.bad == ()
    assert found.rows.to_pylist() == [
        {"id": 1, "title": "chair", "added": None, "state": "new"},
        {"id": None, "title": None, "added": None, "state": None},
        {"id": 2**40, "title": "desk", "added": "y", "state": "sold"},
    ]
    # A reader that started before the schema change keeps the old columns; a long is not an int.
    found = decoded(chosen, *older, *newer)
    assert column(found, "gone") == ["x", None]
    assert [bad.row for bad in found.bad] == [1]
    assert "cannot be read as ours" in reasons(found)[0]


def test_registered_schema_with_nested_references_is_resolved(
    client: SchemaRegistryClient, registry: Registry, topic_prefix: str
):
    city, address = f"{topic_prefix}city", f"{topic_prefix}address"
    client.register_schema(
        city, Schema(json.dumps(record(member("zip", "int"), name="shop.City")), "AVRO")
    )
    to_city = SchemaReference("shop.City", city, 1)
    holder = record(member("street", "string"), member("city", "shop.City"), name="shop.Address")
    client.register_schema(address, Schema(json.dumps(holder), "AVRO", [to_city]))
    order = record(member("id", "int"), member("home", "shop.Address"))
    schema = Schema(json.dumps(order), "AVRO", [SchemaReference("shop.Address", address, 1)])

    text = {"id": 1, "home": {"street": "Main", "city": {"zip": 12345}}}
    (one,) = avro(client, f"{topic_prefix}orders", schema, text)
    a_format = latest(registry, f"{topic_prefix}orders-value")
    assert decoded(a_format, one).rows.to_pylist() == [text]
    # A reader with another schema resolves the writer's schema by its id alone.
    smaller = AvroFormat(json.dumps(record(member("id", "int"))), registry=registry)
    assert decoded(smaller, one).rows.to_pylist() == [{"id": 1}]


def test_keys_and_values_are_read_with_schemas_of_separate_subjects(
    client: SchemaRegistryClient, registry: Registry, topic_prefix: str
):
    topic = f"{topic_prefix}orders"
    (key,) = avro(client, topic, "string", "k1", part=MessageField.KEY)
    (value,) = avro(client, topic, FIRST, {"id": 1, "name": "chair", "gone": "x"})
    assert set(client.get_subjects(subject_prefix=topic)) >= {f"{topic}-key", f"{topic}-value"}
    assert column(decoded(latest(registry, f"{topic}-key"), key), "value") == ["k1"]
    assert column(decoded(latest(registry, f"{topic}-value"), value), "name") == ["chair"]
    # A key decoded as a value is bad, not a row with wrong contents.
    (reason,) = reasons(decoded(latest(registry, f"{topic}-value"), key))
    assert "cannot be read as ours" in reason


def test_registry_subject_with_special_characters_is_found(
    client: SchemaRegistryClient, registry: Registry, topic_prefix: str
):
    name = f"{topic_prefix}shop/orders é?#%+"
    client.register_schema(name, Schema('"string"', "AVRO"))
    assert registry.latest(name).schema == '"string"'


def test_registry_reports_missing_schema_and_subject_as_confluent_client_does(
    client: SchemaRegistryClient, registry: Registry, topic_prefix: str
):
    with pytest.raises(NoSuchSchema, match="schema id 999999 does not exist"):
        registry.by_id(999_999)
    with pytest.raises(SchemaRegistryError) as refused:
        client.get_schema(999_999)
    assert (refused.value.http_status_code, refused.value.error_code) == (404, 40403)
    with pytest.raises(DefiniteError, match="does not exist") as missing:
        registry.latest(f"{topic_prefix}nothing-value")
    assert not isinstance(missing.value, NoSuchSchema)

    (one,) = avro(client, f"{topic_prefix}orders", FIRST, {"id": 1, "name": "a", "gone": "b"})
    unknown = b"\0" + (999_999).to_bytes(4, "big") + one[5:]
    found = decoded(latest(registry, f"{topic_prefix}orders-value"), unknown, one)
    assert column(found, "id") == [None, 1]
    assert reasons(found) == ["schema id 999999 does not exist in the registry"]


def test_killed_registry_raises_transient_error_and_makes_no_record_bad(
    client: SchemaRegistryClient,
    registry: Registry,
    schema_registry: SchemaRegistry,
    topic_prefix: str,
):
    topic = f"{topic_prefix}orders"
    # A schema has one id in all subjects; this id must not be cached by an earlier test.
    own = {**FIRST, "namespace": topic.replace("-", "_"), "name": "Order"}
    older = avro(client, topic, own, {"id": 1, "name": "chair", "gone": "x"})
    newer = avro(client, topic, SECOND, {"id": 2, "title": "desk", "added": "y", "state": "sold"})
    a_format = latest(registry, f"{topic}-value")
    assert column(a_format.decode(values(*newer)), "id") == [2]
    schema_registry.kill()
    try:
        # Cached schemas need no request; others are requested again later.
        assert column(a_format.decode(values(*newer)), "id") == [2]
        for _ in range(2):
            with pytest.raises(TransientError, match="could not be reached"):
                a_format.decode(values(*older, *newer))
        with pytest.raises(TransientError, match="could not be reached"):
            registry.latest(f"{topic}-value")
    finally:
        schema_registry.start()
    found = decoded(a_format, *older, *newer)
    assert found.bad == ()
    assert column(found, "title") == ["chair", "desk"]


@pytest.mark.parametrize(
    ("name", "text", "becomes"),
    [
        ("shop.Order", {"a_int64": 5, "state": 1, "address": {"street": "s"}}, 5),
        ("shop.Order.Address", {"street": "s"}, "s"),
        ("old.Note", {"text": "x"}, "x"),
    ],
)
def test_protobuf_frames_of_confluent_serializer_are_decoded(
    client: SchemaRegistryClient, topic_prefix: str, name: str, text: Any, becomes: Any
):
    """Cover the first message of a file, a later one, and a nested one."""
    wanted = message(name, **text)
    write = ProtobufSerializer(type(wanted), client, {"use.deprecated.format": False})
    context = SerializationContext(f"{topic_prefix}orders", MessageField.VALUE)
    framed = write(wanted, context)
    found = decoded(ProtobufFormat(SHOP, name, framed=True), framed, None)
    assert found.bad == ()
    assert column(found, next(iter(text))) == [becomes, None]


def test_json_format_rejects_record_framed_by_confluent_serializer(
    client: SchemaRegistryClient, topic_prefix: str
):
    schema = {"title": "Order", "type": "object", "properties": {"id": {"type": "integer"}}}
    write = JSONSerializer(json.dumps(schema), client)
    context = SerializationContext(f"{topic_prefix}orders", MessageField.VALUE)
    found = decoded(JsonFormat.of({"id": "bigint"}), write({"id": 1}, context))
    assert reasons(found) == ["it is not JSON: expecting value, at byte 0"]


def test_registry_that_fails_to_start_reports_reason_and_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    archive = tmp_path / "app-1-all.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.addfile(tarfile.TarInfo("broken-runner.jar"))
    pins = tmp_path / "pins.txt"
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    pins.write_text(f"org.example:app:1:tar.gz:all {sha256}\n")
    monkeypatch.setattr(local_registry, "_PINS", pins)
    monkeypatch.setenv("PENSTOCK_JARS", str(tmp_path))
    broken = SchemaRegistry()
    with pytest.raises(UsageError, match="did not start") as refused, broken:
        pass
    assert "broken-runner.jar" in refused.value.detail
    assert broken.pid is None
    assert not broken.folder.exists()
