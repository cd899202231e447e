"""Secrets in texts of a foreign connector: errors, actions and reasons of constraints."""

import base64
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import grpc
import pytest

from penstock.materialize import ConnectorConnection, connect
from penstock.materialize.errors import ConnectorError
from penstock.protocol._generated import materialize_pb2 as pb
from penstock.protocol.key_range import WHOLE
from penstock.protocol.messages import Apply, Open, Validate, ValidateBinding
from tests.sdk.toy import spec

SECRET = 'b/r"ö sam\\ple?value'
CONFIG = {"path": "toy", "entrance": {"phrase": SECRET}}
"""Config with a secret whose key does not look like the name of a secret."""

SCHEMA = {
    "properties": {"path": {"type": "string"}, "entrance": {"$ref": "#/$defs/entrance"}},
    "$defs": {"entrance": {"properties": {"phrase": {"type": "string", "secret": True}}}},
}
ENCODINGS: dict[str, Callable[[str], str]] = {
    "text": str,
    "url": lambda text: quote(text, ""),
    "url-path": quote,
    "form": lambda text: quote(text, " ").replace(" ", "+"),
    "json": json.dumps,
    "json-unicode": lambda text: json.dumps(text, ensure_ascii=False),
    "json-slashes": lambda text: json.dumps(text).replace("/", "\\/"),
    "python": repr,
    "hex": lambda text: text.encode().hex(),
    "base64": lambda text: base64.b64encode(f"user:{text}".encode()).decode(),
    "base64-in-url": lambda text: quote(base64.b64encode(text.encode()).decode(), ""),
}


class Foreign(grpc.GenericRpcHandler):
    """A connector whose responses contain its configuration."""

    def __init__(self) -> None:
        self.text = ""
        self.fails = False
        self.has_spec = True

    def service(self, call: Any) -> Any:
        name = call.method.removeprefix("/materialize.Driver/")
        if name == "Transactions":
            return grpc.stream_stream_rpc_method_handler(self._transactions)
        if name == "Spec" and not self.has_spec:
            return None
        return grpc.unary_unary_rpc_method_handler(
            lambda _data, context: self._answer(name, context).SerializeToString()
        )

    def _answer(self, name: str, context: Any) -> Any:
        if name == "Spec":
            return pb.SpecResponse(
                endpoint_spec_schema_json=json.dumps(SCHEMA), resource_spec_schema_json="{}"
            )
        if self.fails:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.text)
        if name != "Validate":
            return pb.ApplyResponse(action_description=self.text)
        answer = pb.ValidateResponse()
        binding = answer.bindings.add(resource_path=["toy"])
        binding.constraints["id"].reason = self.text
        return answer

    def _transactions(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        next(requests)
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.text)
        yield b""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Foreign, str]]:
    foreign, server = Foreign(), grpc.server(ThreadPoolExecutor(4))
    address = f"unix:{tmp_path_factory.mktemp('foreign') / 'socket'}"
    server.add_generic_rpc_handlers((foreign,))
    server.add_insecure_port(address)
    server.start()
    yield foreign, address
    server.stop(None).wait()


@pytest.fixture
def connection(served: tuple[Foreign, str]) -> Iterator[ConnectorConnection]:
    foreign, address = served
    foreign.fails, foreign.has_spec = False, True
    with connect(address) as found:
        yield found


SPEC = replace(spec(), endpoint_spec_json=json.dumps(CONFIG))
CALLS: dict[str, Callable[[ConnectorConnection], str]] = {
    "validate": lambda it: (
        next(iter(it.validate(_validate()).bindings[0].constraints.values())).reason
    ),
    "apply": lambda it: it.apply(Apply(SPEC, "v1")).action_description,
    "delete": lambda it: it.delete(Apply(SPEC, "v1")).action_description,
}


def _validate() -> Validate:
    bindings = [ValidateBinding(each.resource_spec_json, each.collection) for each in SPEC.bindings]
    return Validate(SPEC.materialization, SPEC.endpoint_spec_json, tuple(bindings))


def text_of_error(
    connection: ConnectorConnection, call: Callable[[ConnectorConnection], Any]
) -> str:
    with pytest.raises(ConnectorError) as raised:
        call(connection)
    error = raised.value
    return f"{error} {error.detail} {error.hint} {error.__cause__!r}"


def opened(connection: ConnectorConnection) -> None:
    stream = connection.transactions()
    stream.send(Open(SPEC, "v1", WHOLE))
    stream.receive()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_secret_marked_in_schema_is_redacted_in_every_encoding(
    served: tuple[Foreign, str], connection: ConnectorConnection, encoding: str
) -> None:
    written = ENCODINGS[encoding](SECRET)
    served[0].text = f"table toy: access with {written} is denied"
    for call in CALLS.values():
        assert_redacted(call(connection), written)
    served[0].fails = True
    for call in (*CALLS.values(), opened):
        assert_redacted(text_of_error(connection, call), written)


def assert_redacted(text: str, written: str) -> None:
    assert "table toy: access with" in text
    assert "***" in text
    assert written not in text
    assert "sam" not in text


def test_every_config_string_is_redacted_if_schema_is_unavailable(
    served: tuple[Foreign, str], connection: ConnectorConnection
) -> None:
    foreign = served[0]
    foreign.has_spec, foreign.fails = False, True
    foreign.text = f"access with {SECRET} is denied"
    for call in (*CALLS.values(), opened):
        text = text_of_error(connection, call)
        assert "access with *** is denied" in text
        assert "sam" not in text
