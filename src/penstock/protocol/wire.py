"""Our values to the bytes of the wire, and back.

What is asked once goes by protobuf's own library, field by field, because our
values bear the names of the wire. Load, Store and Loaded go by `arena.py`, which
is why a stream is read and written as bytes.

A message that parses may still say nothing that could be done: a Load of no key,
an Open without a version. That is told here, by name, for both ends: of what
comes, and of what is about to be sent.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from penstock.errors import UsageError
from penstock.protocol._generated import flow_pb2, materialize_pb2
from penstock.protocol.arena import varint_bytes, walk, write
from penstock.protocol.errors import LocalProtocolError, MalformedMessage, RemoteProtocolError
from penstock.protocol.key_range import KeyRange
from penstock.protocol.message_rules import broken_rule
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
    SpecAnswer,
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
"""How the methods' paths begin."""

_MESSAGES: Final[Mapping[type, type[Message]]] = {
    Spec: materialize_pb2.SpecRequest,
    SpecAnswer: materialize_pb2.SpecResponse,
    Validate: materialize_pb2.ValidateRequest,
    Validated: materialize_pb2.ValidateResponse,
    Apply: materialize_pb2.ApplyRequest,
    Applied: materialize_pb2.ApplyResponse,
    MaterializationSpec: flow_pb2.MaterializationSpec,
}

_T = TypeVar("_T")


def encode(value: Any) -> bytes:
    """A question or an answer, as bytes."""
    message = _MESSAGES[type(value)]()
    to_message(value, message)
    return message.SerializeToString(deterministic=True)


def decode(kind: type[_T], data: bytes) -> _T:
    """The question or the answer of this kind that is in `data`.

    Raises:
        MalformedMessage: it is none.
        RemoteProtocolError: it says nothing that could be done.
    """
    value = from_message(kind, _parsed(_MESSAGES[kind], data))
    if rule := broken_rule(value):
        raise RemoteProtocolError(f"{kind.__name__} {rule}")
    return value


def encode_request(request: Request) -> bytes:
    """A message of the stream from the runtime.

    Raises:
        LocalProtocolError: it says nothing that could be done.
    """
    if rule := broken_rule(request):
        raise LocalProtocolError(f"{request.kind} {rule}")
    message = materialize_pb2.TransactionRequest()
    match request:
        case Load():
            return write(2, request.binding, [request.packed_keys])
        case Store(empties=True):
            message.store.binding = request.binding
            message.store.empties = True
        case Store():
            columns = [request.packed_keys, request.packed_values, request.docs_json]
            return write(4, request.binding, columns, [request.exists, request.deletes])
        case Open():
            to_message(request.materialization, message.open.materialization)
            message.open.version = request.version
            message.open.key_begin = request.key_range.begin
            message.open.key_end = request.key_range.end
            message.open.driver_checkpoint_json = request.state_json
        case Flush(checkpoint):
            message.flush.SetInParent()
            if checkpoint:
                # SUBTLE: field 1 of what an older generation calls Prepare, which we do
                # not have in our text; the message is put together by hand.
                body = _field_of_bytes(1, checkpoint)
                return _field_of_bytes(3, body)
        case StartCommit(checkpoint):
            message.start_commit.SetInParent()
            message.start_commit.runtime_checkpoint = checkpoint
        case Acknowledge():
            message.acknowledge.SetInParent()
    return message.SerializeToString(deterministic=True)


def encode_commit() -> bytes:
    """Return the Commit of the older generation, which names no checkpoint: Prepare did."""
    return _field_of_bytes(5, b"")


def encode_response(response: Response) -> bytes:
    """A message of the stream from the connector.

    Raises:
        LocalProtocolError: it says nothing that could be done.
    """
    if rule := broken_rule(response):
        raise LocalProtocolError(f"{response.kind} {rule}")
    if isinstance(response, Loaded):
        return write(2, response.binding, [response.docs_json])
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
    """The message of the stream that is in `data`.

    Raises:
        MalformedMessage: it is none.
        RemoteProtocolError: it says nothing that could be done.
    """
    number, begin, end = _only_field(data, "TransactionRequest", 6)
    request: Request
    if number == 2:
        walked = walk(data, begin, end, "Load")
        request = Load(walked.binding, walked.slices[0])
    elif number == 4:
        walked = walk(data, begin, end, "Store")
        keys, values, docs = walked.slices
        exists, deletes = walked.bools
        flags = deletes if len(deletes) else None
        request = Store(walked.binding, keys, values, docs, exists, flags, walked.empties)
    else:
        request = _small_request(_parsed(materialize_pb2.TransactionRequest, data))
    if rule := broken_rule(request):
        raise RemoteProtocolError(f"{request.kind} {rule}")
    return request


def _small_request(message: materialize_pb2.TransactionRequest) -> Request:
    if message.HasField("open"):
        opening = message.open
        try:
            key_range = KeyRange(opening.key_begin, opening.key_end)
        except UsageError as error:
            raise RemoteProtocolError(f"Open: {error}", detail=error.detail) from error
        return Open(
            from_message(MaterializationSpec, opening.materialization),
            opening.version,
            key_range,
            opening.driver_checkpoint_json,
        )
    if message.HasField("flush"):
        return Flush()
    if message.HasField("start_commit"):
        return StartCommit(message.start_commit.runtime_checkpoint)
    return Acknowledge()


def decode_response(data: bytes) -> Response:
    """The message of the stream that is in `data`.

    Raises:
        MalformedMessage: it is none.
        RemoteProtocolError: it says nothing that could be done.
    """
    number, begin, end = _only_field(data, "TransactionResponse", 5)
    response: Response
    if number == 2:
        walked = walk(data, begin, end, "Loaded")
        response = Loaded(walked.binding, walked.slices[0])
    else:
        response = _small_response(_parsed(materialize_pb2.TransactionResponse, data), data)
    if rule := broken_rule(response):
        raise RemoteProtocolError(f"{response.kind} {rule}")
    return response


def _small_response(message: materialize_pb2.TransactionResponse, data: bytes) -> Response:
    if message.HasField("opened"):
        return Opened(message.opened.runtime_checkpoint)
    if message.HasField("flushed"):
        # What an older generation calls Prepared is a connector's state.
        _, begin, end = _only_field(data, "TransactionResponse", 5)
        return Flushed(_state(_parsed(flow_pb2.DriverCheckpoint, data[begin:end])))
    if message.HasField("started_commit"):
        return StartedCommit(_state(message.started_commit.driver_checkpoint))
    return Acknowledged()


def _state(found: flow_pb2.DriverCheckpoint) -> StateUpdate | None:
    if not found.driver_checkpoint_json and not found.rfc7396_merge_patch:
        return None
    return StateUpdate(found.driver_checkpoint_json, found.rfc7396_merge_patch)


# The outer message: one field of several.


def _only_field(data: bytes, what: str, highest: int) -> tuple[int, int, int]:
    """Number and bounds of the one field that is set, of those up to `highest`."""
    found: list[tuple[int, int, int]] = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at, what)
        number, wire = tag >> 3, tag & 7
        size = 0
        if wire == 2:
            size, at = _varint(data, at, what)
        elif wire == 0:
            _, at = _varint(data, at, what)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        if wire not in (0, 1, 2, 5) or number == 0 or size > len(data) - at:
            raise MalformedMessage(f"{what} is not a protobuf message")
        if 1 <= number <= highest and wire == 2:
            found.append((number, at, at + size))
        at += size
    if len(found) != 1:
        raise MalformedMessage(
            f"{what} has {len(found)} of its fields set",
            detail=f"It must have exactly one of the fields 1 to {highest}.",
        )
    return found[0]


def _varint(data: bytes, at: int, what: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        octet = data[at]
        at += 1
        value |= (octet & 127) << shift
        if octet < 128:
            return value, at
    raise MalformedMessage(f"{what} is not a protobuf message")


def _field_of_bytes(number: int, content: bytes) -> bytes:
    """A field of bytes, alone."""
    return varint_bytes(number << 3 | 2) + varint_bytes(len(content)) + content


_M = TypeVar("_M", bound=Message)


def _parsed(kind: type[_M], data: bytes) -> _M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MalformedMessage(f"{kind.__name__} is not a protobuf message") from error
    return message
