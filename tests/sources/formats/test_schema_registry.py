"""Schema registry client: requests, responses and secrets."""

import json
import pickle
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from penstock.errors import DefiniteError, TransientError, UsageError
from penstock.sources.formats import NoSuchSchema, Registry
from tests.certificates import authority, certificate
from tests.sources.formats.registry_server import Answers, serving


@pytest.fixture
def server() -> Iterator[Answers]:
    with serving() as answers:
        yield answers


def test_registry_test_server_is_compatible_with_confluent_client(server: Answers):
    reference: dict[str, Any] = {"name": "a.B", "subject": "b", "version": 2}
    server.schemas[7] = {"schema": '"string"', "references": [reference]}
    server.subjects["shop%20orders", "latest"] = {
        "subject": "shop orders", "version": 3, "id": 9, "schema": "{}", "schemaType": "PROTOBUF",
    }  # fmt: skip
    with SchemaRegistryClient({"url": server.url}) as client:
        found = client.get_schema(7)
        assert (found.schema_str, found.schema_type) == ('"string"', "AVRO")
        assert found.references == [SchemaReference(**reference)]
        latest = client.get_latest_version("shop orders")
        assert (latest.schema_id, latest.version, latest.schema.schema_type) == (9, 3, "PROTOBUF")
        with pytest.raises(SchemaRegistryError) as no_schema:
            client.get_schema(8)
        with pytest.raises(SchemaRegistryError) as no_subject:
            client.get_version("b", 2)
    assert (no_schema.value.http_status_code, no_schema.value.error_code) == (404, 40403)
    assert (no_subject.value.http_status_code, no_subject.value.error_code) == (404, 40401)


def test_registry_fetches_schema_by_id_once(server: Answers):
    server.schemas[7] = {"schema": '"string"'}
    registry = Registry(server.url)
    for asking in (registry, registry, pickle.loads(pickle.dumps(registry))):
        found = asking.by_id(7)
        assert (found.id, found.schema, found.kind) == (7, '"string"', "AVRO")
    assert server.asked == ["/schemas/ids/7"]


def test_registry_requests_latest_version_each_time(server: Answers):
    server.subjects["shop orders%2Fvalue".replace(" ", "%20"), "latest"] = {
        "subject": "shop orders/value", "version": 3, "id": 9, "schema": "{}",
        "schemaType": "PROTOBUF",
    }  # fmt: skip
    registry = Registry(server.url + "/")
    for _ in range(2):
        found = registry.latest("shop orders/value")
        assert (found.id, found.schema, found.kind) == (9, "{}", "PROTOBUF")
    assert len(server.asked) == 2


def test_registry_schema_includes_nested_references(server: Answers):
    server.schemas[7] = {
        "schema": "1", "references": [{"name": "a.B", "subject": "b", "version": 2}],
    }  # fmt: skip
    server.subjects["b", "2"] = {
        "id": 3, "schema": "2", "references": [{"name": "a.C", "subject": "c", "version": 1}],
    }  # fmt: skip
    server.subjects["c", "1"] = {"id": 2, "schema": "3"}
    ((name, found),) = Registry(server.url).by_id(7).references
    assert (name, found.schema) == ("a.B", "2")
    assert [(name, inner.schema) for name, inner in found.references] == [("a.C", "3")]


def test_registry_sends_credentials_and_does_not_reveal_them(server: Answers):
    server.schemas[1] = {"schema": "1"}
    registry = Registry(server.url, user="us@er", password="se:cret")
    registry.by_id(1)
    assert server.credentials == ["Basic dXNAZXI6c2U6Y3JldA=="]
    server.instead = (401, b'{"error_code": 40101, "message": "se:cret"}')
    with pytest.raises(DefiniteError, match="was denied") as caught:
        registry.by_id(2)
    told = repr(registry) + str(caught.value) + repr(caught.value) + caught.value.detail
    assert "se:cret" not in told + caught.value.hint
    assert caught.value.__cause__ is None


STATUSES = [(400, DefiniteError), (401, DefiniteError), (403, DefiniteError), (404, DefiniteError),
            (422, DefiniteError), (408, TransientError), (429, TransientError),
            (500, TransientError), (502, TransientError), (503, TransientError)]  # fmt: skip


@pytest.mark.parametrize(("status", "kind"), STATUSES)
def test_registry_http_status_raises_transient_or_definite_error(
    server: Answers, status: int, kind: type[Exception]
):
    server.instead = (status, b"<html>oh</html>")
    registry = Registry(server.url)
    with pytest.raises(kind) as caught:
        registry.by_id(1)
    assert not isinstance(caught.value, NoSuchSchema)
    # The registry client does not cache failures.
    server.instead = None
    server.schemas[1] = {"schema": "1"}
    assert registry.by_id(1).schema == "1"


def test_registry_missing_schema_id_raises_no_such_schema(server: Answers):
    with pytest.raises(NoSuchSchema, match="schema id 5 does not exist"):
        Registry(server.url).by_id(5)
    with pytest.raises(DefiniteError, match='subject "x" does not exist') as caught:
        Registry(server.url).latest("x")
    assert not isinstance(caught.value, NoSuchSchema)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"schema": 1}',
                                  b'{"schema":"1","references":[1]}'])  # fmt: skip
def test_registry_with_response_of_another_service_raises_definite_error(
    server: Answers, body: bytes
):
    server.instead = (200, body)
    with pytest.raises(DefiniteError, match="is not a schema registry"):
        Registry(server.url).by_id(1)


def test_registry_client_does_not_follow_redirects(server: Answers):
    with serving() as elsewhere:
        server.redirect = elsewhere.url + "/schemas/ids/1"
        with pytest.raises(DefiniteError, match="did not return schema id 1"):
            Registry(server.url, "user", "secret").by_id(1)
        assert elsewhere.asked == []


def test_registry_connection_refused_raises_transient_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        registry = Registry(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(TransientError, match="could not be reached"):
            registry.by_id(1)


def test_registry_request_timeout_raises_transient_error():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        registry = Registry(f"http://127.0.0.1:{mute.getsockname()[1]}", timeout_ms=50)
        with pytest.raises(TransientError, match="could not be reached"):
            registry.by_id(1)


def test_registry_with_untrusted_certificate_raises_definite_error(tmp_path: Path):
    ours = authority(tmp_path, "ours")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate(tmp_path, "localhost", by=ours))
    with serving(context) as server:
        server.schemas[1] = {"schema": "1"}
        assert Registry(server.url, ca=ours.read_text()).by_id(1).schema == "1"
        with pytest.raises(DefiniteError, match="certificate that is not trusted"):
            Registry(server.url).by_id(1)


BAD: list[dict[str, Any]] = [
    {"url": "registry:8081"}, {"url": "ftp://registry"}, {"url": "http://"},
    {"url": "http://me:secret@registry"}, {"url": "http://registry?secret=1"},
]  # fmt: skip


@pytest.mark.parametrize("given", BAD, ids=json.dumps)
def test_registry_with_invalid_url_raises_usage_error_without_secret(given: dict[str, Any]):
    with pytest.raises(UsageError) as caught:
        Registry(**given)
    assert "secret" not in str(caught.value) + caught.value.hint


def test_registry_with_invalid_ca_raises_usage_error():
    with pytest.raises(UsageError, match="contains no certificates"):
        Registry("https://localhost:1", ca="x").by_id(1)
