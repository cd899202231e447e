"""Encoding of messages on the wire.

The protobuf library encodes unary messages, field by field, because our values have the field
names of the wire. `arena.py` encodes Load, Store and Loaded; a stream is therefore read and
written as bytes.

A message that parses may still be invalid, such as a Load without keys or an Open without a
version. Both directions are checked here (`message_rules.py`).
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from penstock.errors import UsageError
from penstock.protocol._generated import flow_pb2, materialize_pb2
from penstock.protocol.arena import decode_arena, encode_arena, varint_bytes
from penstock.protocol.errors import LocalProtocolError, MalformedMessage, RemoteProtocolError
from penstock.protocol.key_range import KeyRange
from penstock.protocol.message_rules import find_violation
from penstock.protocol.messages import (
    Acknowledge,
    Acknowledged,
    Applied,
    Apply,
    Flush,
    Flushed,
    Load,
    Loaded,
    Open,
    Opened,
    Request,
    Response,
    Spec,
    SpecResponse,
    StartCommit,
    StartedCommit,
    StateUpdate,
    Store,
    Validate,
    Validated,
)
from penstock.protocol.protobuf import from_message, to_message
from penstock.protocol.specs import MaterializationSpec

__all__ = [
    "METHODS",
    "decode",
    "decode_request",
    "decode_response",
    "encode",
    "encode_request",
    "encode_response",
]

METHODS: Final = "/materialize.Driver/"
"""Prefix of the paths of the gRPC methods."""

_MESSAGES: Final[Mapping[type, type[Message]]] = {
    Spec: materialize_pb2.SpecRequest,
    SpecResponse: materialize_pb2.SpecResponse,
    Validate: materialize_pb2.ValidateRequest,
    Validated: materialize_pb2.ValidateResponse,
    Apply: materialize_pb2.ApplyRequest,
    Applied: materialize_pb2.ApplyResponse,
    MaterializationSpec: flow_pb2.MaterializationSpec,
}

_T = TypeVar("_T")


def encode(value: Any) -> bytes:
    """Encode a unary request or response."""
    message = _MESSAGES[type(value)]()
    to_message(value, message)
    return message.SerializeToString(deterministic=True)


def decode(kind: type[_T], data: bytes) -> _T:
    """Decode a unary request or response.

    Raises:
        MalformedMessage: the bytes are not a message.
        RemoteProtocolError: the message is invalid.
    """
    value = from_message(kind, _parse(_MESSAGES[kind], data))
    if violation := find_violation(value):
        raise RemoteProtocolError(f"{kind.__name__} {violation}")
    return value


def encode_request(request: Request) -> bytes:
    """Encode a request of a Transactions stream.

    Raises:
        LocalProtocolError: the message is invalid.
    """
    if violation := find_violation(request):
        raise LocalProtocolError(f"{request.kind} {violation}")
    message = materialize_pb2.TransactionRequest()
    match request:
        case Load():
            return encode_arena(2, request.binding, [request.packed_keys])
        case Store(empties=True):
            message.store.binding = request.binding
            message.store.empties = True
        case Store():
            columns = [request.packed_keys, request.packed_values, request.docs_json]
            return encode_arena(4, request.binding, columns, [request.exists, request.deletes])
        case Open():
            to_message(request.materialization, message.open.materialization)
            message.open.version = request.version
            message.open.key_begin = request.key_range.begin
            message.open.key_end = request.key_range.end
            message.open.driver_checkpoint_json = request.state_json
        case Flush(checkpoint):
            message.flush.SetInParent()
            if checkpoint:
                # SUBTLE: this is field 1 of Prepare in the older protocol. Our .proto files do
                # not have Prepare, so the message is built by hand.
                body = _bytes_field(1, checkpoint)
                return _bytes_field(3, body)
        case StartCommit(checkpoint):
            message.start_commit.SetInParent()
            message.start_commit.runtime_checkpoint = checkpoint
        case Acknowledge():
            message.acknowledge.SetInParent()
    return message.SerializeToString(deterministic=True)


def encode_commit() -> bytes:
    """Encode Commit of the older protocol. Prepare carries the checkpoint there."""
    return _bytes_field(5, b"")


def encode_response(response: Response) -> bytes:
    """Encode a response of a Transactions stream.

    Raises:
        LocalProtocolError: the message is invalid.
    """
    if violation := find_violation(response):
        raise LocalProtocolError(f"{response.kind} {violation}")
    if isinstance(response, Loaded):
        return encode_arena(2, response.binding, [response.docs_json])
    message = materialize_pb2.TransactionResponse()
    match response:
        case Opened(checkpoint):
            message.opened.SetInParent()
            message.opened.runtime_checkpoint = checkpoint
        case Flushed():
            message.flushed.SetInParent()
        case StartedCommit(state):
            message.started_commit.SetInParent()
            if state is not None:
                message.started_commit.driver_checkpoint.driver_checkpoint_json = state.json
                message.started_commit.driver_checkpoint.rfc7396_merge_patch = state.patch
        case Acknowledged():
            message.acknowledged.SetInParent()
    return message.SerializeToString(deterministic=True)


def decode_request(data: bytes) -> Request:
    """Decode a request of a Transactions stream.

    Raises:
        MalformedMessage: the bytes are not a message.
        RemoteProtocolError: the message is invalid.
    """
    number, begin, end = _only_field(data, "TransactionRequest", 6)
    request: Request
    if number == 2:
        arena = decode_arena(data, begin, end, "Load")
        request = Load(arena.binding, arena.slices[0])
    elif number == 4:
        arena = decode_arena(data, begin, end, "Store")
        keys, values, docs = arena.slices
        exists, deletes = arena.bools
        flags = deletes if len(deletes) else None
        request = Store(arena.binding, keys, values, docs, exists, flags, arena.empties)
    else:
        request = _decode_small_request(_parse(materialize_pb2.TransactionRequest, data))
    if violation := find_violation(request):
        raise RemoteProtocolError(f"{request.kind} {violation}")
    return request


def _decode_small_request(message: materialize_pb2.TransactionRequest) -> Request:
    if message.HasField("open"):
        body = message.open
        try:
            key_range = KeyRange(body.key_begin, body.key_end)
        except UsageError as error:
            raise RemoteProtocolError(f"Open: {error}", detail=error.detail) from error
        return Open(
            from_message(MaterializationSpec, body.materialization),
            body.version,
            key_range,
            body.driver_checkpoint_json,
        )
    if message.HasField("flush"):
        return Flush()
    if message.HasField("start_commit"):
        return StartCommit(message.start_commit.runtime_checkpoint)
    return Acknowledge()


def decode_response(data: bytes) -> Response:
    """Decode a response of a Transactions stream.

    Raises:
        MalformedMessage: the bytes are not a message.
        RemoteProtocolError: the message is invalid.
    """
    number, begin, end = _only_field(data, "TransactionResponse", 5)
    response: Response
    if number == 2:
        arena = decode_arena(data, begin, end, "Loaded")
        response = Loaded(arena.binding, arena.slices[0])
    else:
        response = _decode_small_response(_parse(materialize_pb2.TransactionResponse, data), data)
    if violation := find_violation(response):
        raise RemoteProtocolError(f"{response.kind} {violation}")
    return response


def _decode_small_response(message: materialize_pb2.TransactionResponse, data: bytes) -> Response:
    if message.HasField("opened"):
        return Opened(message.opened.runtime_checkpoint)
    if message.HasField("flushed"):
        # In the older protocol, this is Prepared, which carries connector state.
        _, begin, end = _only_field(data, "TransactionResponse", 5)
        return Flushed(_state(_parse(flow_pb2.DriverCheckpoint, data[begin:end])))
    if message.HasField("started_commit"):
        return StartedCommit(_state(message.started_commit.driver_checkpoint))
    return Acknowledged()


def _state(checkpoint: flow_pb2.DriverCheckpoint) -> StateUpdate | None:
    if not checkpoint.driver_checkpoint_json and not checkpoint.rfc7396_merge_patch:
        return None
    return StateUpdate(checkpoint.driver_checkpoint_json, checkpoint.rfc7396_merge_patch)


# The outer message, which has exactly one field.


def _only_field(data: bytes, name: str, highest: int) -> tuple[int, int, int]:
    """Return number, begin and end of the only field with a number up to `highest`."""
    fields: list[tuple[int, int, int]] = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at, name)
        number, wire = tag >> 3, tag & 7
        size = 0
        if wire == 2:
            size, at = _varint(data, at, name)
        elif wire == 0:
            _, at = _varint(data, at, name)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        if wire not in (0, 1, 2, 5) or number == 0 or size > len(data) - at:
            raise MalformedMessage(f"{name} is not a protobuf message")
        if 1 <= number <= highest and wire == 2:
            fields.append((number, at, at + size))
        at += size
    if len(fields) != 1:
        raise MalformedMessage(
            f"{name} has {len(fields)} of its fields set",
            detail=f"The message must have exactly one of the fields 1 to {highest}.",
        )
    return fields[0]


def _varint(data: bytes, at: int, name: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        octet = data[at]
        at += 1
        value |= (octet & 127) << shift
        if octet < 128:
            return value, at
    raise MalformedMessage(f"{name} is not a protobuf message")


def _bytes_field(number: int, content: bytes) -> bytes:
    """Encode one field of bytes."""
    return varint_bytes(number << 3 | 2) + varint_bytes(len(content)) + content


_M = TypeVar("_M", bound=Message)


def _parse(kind: type[_M], data: bytes) -> _M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MalformedMessage(f"{kind.__name__} is not a protobuf message") from error
    return message
