"""Encoding of messages, compared with Flow and with the protobuf library."""

import dataclasses
import filecmp
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol._generated import consumer_pb2, flow_pb2, materialize_pb2
from penstock.protocol.errors import LocalProtocolError, MalformedMessage, RemoteProtocolError
from penstock.protocol.key_range import WHOLE, KeyRange
from penstock.protocol.messages import (
    START_FROM_ZERO,
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
    Spec,
    SpecResponse,
    StartCommit,
    StartedCommit,
    StateUpdate,
    Store,
    Validate,
    ValidateBinding,
    Validated,
    ValidatedBinding,
)
from penstock.protocol.specs import (
    CollectionSpec,
    Constraint,
    ConstraintType,
    EndpointType,
    Exists,
    FieldSelection,
    Inference,
    MaterializationBinding,
    MaterializationSpec,
    Projection,
    StringInference,
)
from penstock.protocol.wire import (
    decode,
    decode_request,
    decode_response,
    encode,
    encode_request,
    encode_response,
)
from tests.protocol.vectors import cases, name

ORDERS = CollectionSpec(
    "shop/orders",
    ("/id",),
    (
        Projection("", "flow_document", inference=Inference(("object",), exists=Exists.MUST)),
        Projection(
            "/id", "id", is_primary_key=True, inference=Inference(("integer",), exists=Exists.MUST)
        ),
        Projection(
            "/note",
            "note",
            inference=Inference(
                ("string", "null"), StringInference(format="date"), exists=Exists.MAY
            ),
        ),
    ),
    read_schema_json='{"type":"object"}',
    partition_template=b"\n\x05shop/",
)
SPEC = MaterializationSpec(
    "shop/local",
    '{"path":"x"}',
    (
        MaterializationBinding(
            '{"table":"orders"}',
            ("orders",),
            ORDERS,
            FieldSelection(("id",), ("note",), "flow_document", {"note": "{}"}),
        ),
    ),
)


def column(*values: bytes) -> pa.BinaryArray:
    return pa.array(values, pa.binary())


def in_era(case):
    return case["era"].startswith(("2021", "2022", "2023-01"))


def test_encoded_messages_equal_flow():
    seen = []
    for case in cases("wire_proto"):
        if not in_era(case):
            continue
        expected = case["expect"]
        match case["input"]:
            case {"flush": _}:
                data, back = encode_request(Flush()), decode_request
            case {"opened": {"runtime_checkpoint_utf8": text}}:
                data, back = encode_response(Opened(text.encode())), decode_response
            case {"open": opening}:
                spec = MaterializationSpec(
                    opening["materialization"]["materialization"],
                    "",
                    endpoint_type=EndpointType.INVALID,
                )
                key_range = KeyRange(opening["key_begin"], opening["key_end"])
                state = opening["driver_checkpoint_json"].encode()
                data = encode_request(Open(spec, opening["version"], key_range, state))
                back = decode_request
            case {"hex": sentinel}:
                assert START_FROM_ZERO.hex() == sentinel
                parsed = consumer_pb2.Checkpoint.FromString(START_FROM_ZERO)
                assert not parsed.sources
                assert not parsed.ack_intents
                seen.append(name(case))
                continue
            case _:
                raise AssertionError(case["id"])
        assert data.hex() == expected["hex"], case["id"]
        assert (encode_request if back is decode_request else encode_response)(back(data)) == data
        seen.append(name(case))
    assert seen


REQUESTS = [
    Open(SPEC, "v1", KeyRange(3, 9), b'{"a":1}'),
    Load(0, column(b"k1", b"", b"k3")),
    Flush(),
    Store(7, column(b"k"), column(b""), column(b"{}"), pa.array([True])),
    Store(
        0,
        column(b"a", b"b"),
        column(b"x", b"y"),
        column(b"", b""),
        pa.array([True, False]),
        pa.array([False, True]),
    ),
    Store.truncate(3),
    StartCommit(b"checkpoint"),
    Acknowledge(),
]
RESPONSES = [
    Opened(),
    Opened(START_FROM_ZERO),
    Loaded(1, column(b"{}", b'{"a":1}')),
    Flushed(),
    StartedCommit(),
    StartedCommit(StateUpdate(b'{"a":1}', patch=True)),
    Acknowledged(),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda it: str(it.kind))
def test_request_round_trips_and_parses_as_protobuf(request_):
    data = encode_request(request_)
    assert decode_request(data) == request_
    parsed = materialize_pb2.TransactionRequest.FromString(data)
    assert [entry.name for entry, _ in parsed.ListFields()] == [request_.kind.value]
    assert parsed.SerializeToString(deterministic=True) == data


@pytest.mark.parametrize("response", RESPONSES, ids=lambda it: str(it.kind))
def test_response_round_trips_and_parses_as_protobuf(response):
    data = encode_response(response)
    assert decode_response(data) == response
    parsed = materialize_pb2.TransactionResponse.FromString(data)
    assert [entry.name for entry, _ in parsed.ListFields()] == [response.kind.value]


@pytest.mark.parametrize(
    "value",
    [
        Spec(),
        SpecResponse("{}", '{"a":1}', "docs", b"\n\x01p"),
        Validate("m", "{}", (ValidateBinding("{}", ORDERS, {"note": '{"x":1}'}),)),
        Validated(
            (
                ValidatedBinding(
                    {"id": Constraint(ConstraintType.FIELD_REQUIRED, "why")},
                    ("a", "b"),
                    delta_updates=True,
                    accepts_delete=True,
                    accepts_empty=True,
                ),
            )
        ),
        Apply(SPEC, "v", dry_run=True),
        Applied("CREATE TABLE"),
        SPEC,
    ],
    ids=lambda it: type(it).__name__,
)
def test_unary_message_round_trips(value):
    assert decode(type(value), encode(value)) == value


def test_extension_fields_have_numbers_from_100():
    binding = materialize_pb2.ValidateResponse.Binding.DESCRIPTOR.fields_by_name
    store = materialize_pb2.TransactionRequest.Store.DESCRIPTOR.fields_by_name
    assert [binding["accepts_delete"].number, binding["accepts_empty"].number] == [100, 101]
    assert [store["deletes"].number, store["empties"].number] == [100, 101]


def test_truncating_store_with_documents_is_rejected():
    one = column(b"k")
    store = encode_request(Store(0, one, one, one, pa.array([True])))
    message = materialize_pb2.TransactionRequest.FromString(store)
    message.store.empties = True
    with pytest.raises(RemoteProtocolError, match="Store has both empties and packed_keys"):
        decode_request(message.SerializeToString())
    with pytest.raises(LocalProtocolError, match="0 packed_keys, but 1 deletes"):
        encode_request(dataclasses.replace(Store.truncate(0), deletes=pa.array([True])))


# Arenas: we decode everything that the protobuf library encodes, and the reverse.

chunks = st.lists(st.binary(max_size=12), min_size=1, max_size=30)


@given(keys=chunks, data=st.data())
def test_load_with_slices_anywhere_in_arena_is_decoded(keys, data):
    """Slices are in any order, with gaps, or overlap."""
    arena, slices = b"", {}
    for index in data.draw(st.permutations(range(len(keys)))):
        arena += data.draw(st.binary(max_size=3))
        at = arena.find(keys[index])
        if at < 0 or data.draw(st.booleans()):
            at = len(arena)
            arena += keys[index]
        slices[index] = (at, at + len(keys[index]))
    message = materialize_pb2.TransactionRequest()
    message.load.binding = 5
    message.load.arena = arena
    for index in range(len(keys)):
        message.load.packed_keys.add(begin=slices[index][0], end=slices[index][1])
    assert decode_request(message.SerializeToString()) == Load(5, column(*keys))


@given(
    rows=st.lists(
        st.tuples(
            st.binary(max_size=9), st.binary(max_size=9), st.binary(max_size=300), st.booleans()
        ),
        min_size=1,
        max_size=40,
    ),
    deletes=st.booleans(),
    skipped=st.integers(0, 3),
)
def test_encoded_store_parses_as_protobuf(rows, deletes, skipped):
    keys, values, docs, exists = zip(*rows, strict=True)
    skipped = min(skipped, len(rows) - 1)
    flags = pa.array(exists)
    store = Store(
        2,
        column(*keys).slice(skipped),
        column(*values).slice(skipped),
        column(*docs).slice(skipped),
        flags.slice(skipped),
        flags.slice(skipped) if deletes else None,
    )
    data = encode_request(store)
    parsed = materialize_pb2.TransactionRequest.FromString(data).store
    for name_, expected in (
        ("packed_keys", keys),
        ("packed_values", values),
        ("docs_json", docs),
    ):
        decoded = [parsed.arena[entry.begin : entry.end] for entry in getattr(parsed, name_)]
        assert decoded == list(expected[skipped:])
    assert list(parsed.exists) == list(exists[skipped:])
    assert list(parsed.deletes) == (list(exists[skipped:]) if deletes else [])
    assert decode_request(data) == store


def test_unpacked_booleans_and_unknown_fields_are_decoded():
    store = materialize_pb2.TransactionRequest.Store(binding=1, arena=b"kv{}")
    for name_, begin, end in (("packed_keys", 0, 1), ("packed_values", 1, 2), ("docs_json", 2, 4)):
        getattr(store, name_).add(begin=begin, end=end)
    loose = bytes([6 << 3, 1])  # `exists` as a field of its own.
    others = bytes([9 << 3 | 2, 2, 1, 2, 10 << 3 | 1]) + bytes(8) + bytes([11 << 3 | 5]) + bytes(4)
    body = store.SerializeToString() + loose + others
    decoded = decode_request(bytes([4 << 3 | 2, len(body)]) + body)
    assert decoded == Store(1, column(b"k"), column(b"v"), column(b"{}"), pa.array([True]))


@given(st.binary(max_size=60))
def test_decode_of_any_bytes_agrees_with_protobuf(data):
    for read, kind in (
        (decode_request, materialize_pb2.TransactionRequest),
        (decode_response, materialize_pb2.TransactionResponse),
    ):
        try:
            read(data)
        except RemoteProtocolError:
            continue
        kind.FromString(data)  # The protobuf library accepts all that we accept.


@given(body=st.binary(max_size=60), number=st.sampled_from([2, 4]))
def test_decode_of_any_arena_agrees_with_protobuf(body, number):
    data = bytes([number << 3 | 2, len(body)]) + body
    try:
        decoded = decode_request(data)
    except RemoteProtocolError:
        return
    parsed = materialize_pb2.TransactionRequest.FromString(data)
    part = parsed.load if number == 2 else parsed.store
    keys = [part.arena[entry.begin : entry.end] for entry in part.packed_keys]
    assert decoded.packed_keys.to_pylist() == keys


# Validity of messages.


def test_encode_of_invalid_message_is_rejected():
    one, none = column(b"k"), column()
    broken = {
        "Load with zero packed_keys": Load(0, none),
        "Store with zero packed_keys": Store(0, none, none, none, pa.array([], pa.bool_())),
        "Store with len(packed_keys) != len(packed_values)": Store(
            0, one, none, one, pa.array([True])
        ),
        "Store with len(packed_keys) != len(docs_json)": Store(0, one, one, none, pa.array([True])),
        "Store with len(packed_keys) != len(exists)": Store(
            0, one, one, one, pa.array([True, False])
        ),
        "Open with empty version": Open(SPEC, "", WHOLE),
        "Open with empty materialization": Open(MaterializationSpec("", "{}"), "v", WHOLE),
    }
    fine = {
        "Open with key_begin == key_end": Open(SPEC, "v", KeyRange(7, 7)),
    }
    # Flow permits it. Here the endpoint would lose its checkpoint.
    stricter = {"StartCommit with empty checkpoint": StartCommit(b"")}
    for case in cases("message_validation"):
        what = case["input"]["message"]
        if what in broken or what in fine:
            assert case["expect"]["valid"] is (what in fine), case["id"]
        elif what not in stricter:
            raise AssertionError(f"{case['id']} is not covered: {what}")
    for message in (*broken.values(), *stricter.values()):
        with pytest.raises(LocalProtocolError, match=str(message.kind)):
            encode_request(message)
    for message in fine.values():
        assert decode_request(encode_request(message)) == message
    with pytest.raises(LocalProtocolError, match="no docs_json"):
        encode_response(Loaded(0, none))


def test_decode_start_commit_without_checkpoint_is_rejected():
    message = materialize_pb2.TransactionRequest()
    message.start_commit.SetInParent()
    with pytest.raises(RemoteProtocolError, match="StartCommit has no runtime_checkpoint"):
        decode_request(message.SerializeToString())


def test_decode_open_with_invalid_key_range_is_rejected():
    message = materialize_pb2.TransactionRequest()
    message.open.version = "v"
    message.open.key_begin, message.open.key_end = 2, 1
    with pytest.raises(RemoteProtocolError, match=r"key range .* is invalid"):
        decode_request(message.SerializeToString())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "has 0 of its fields set"),
        (encode_request(Flush()) + encode_request(Acknowledge()), "has 2 of its fields set"),
        (b"\x12\xff", "is not a protobuf message"),
        (b"\xff" * 12, "is not a protobuf message"),
    ],
)
def test_decode_without_exactly_one_field_is_rejected(data, says):
    with pytest.raises(MalformedMessage, match=says):
        decode_request(data)


def test_decode_slice_outside_arena_is_rejected():
    message = materialize_pb2.TransactionRequest()
    message.load.arena = b"abc"
    for begin, end in ((0, 3), (2, 4), (3, 2), (0, 2**32 - 1)):
        del message.load.packed_keys[:]
        message.load.packed_keys.add(begin=begin, end=end)
        data = message.SerializeToString()
        if (begin, end) == (0, 3):
            assert decode_request(data) == Load(0, column(b"abc"))
        else:
            with pytest.raises(MalformedMessage, match="slice 0 is"):
                decode_request(data)


# The older protocol.


def test_prepare_carries_checkpoint_and_prepared_carries_state():
    data = encode_request(Flush(b"checkpoint"))
    assert data == bytes([3 << 3 | 2, 12, 1 << 3 | 2, 10]) + b"checkpoint"
    state = flow_pb2.DriverCheckpoint(driver_checkpoint_json=b'{"a":1}').SerializeToString()
    prepared = bytes([3 << 3 | 2, len(state)]) + state
    assert decode_response(prepared) == Flushed(StateUpdate(b'{"a":1}'))


def test_generated_code_is_up_to_date(tmp_path):
    root = Path(__file__).parent.parent.parent
    subprocess.run([root / "scripts/generate-protocol", sys.executable, tmp_path], check=True)
    stored = root / "src/penstock/protocol/_generated"
    generated = sorted(entry.name for entry in tmp_path.iterdir())
    assert generated == sorted(entry.name for entry in stored.glob("*_pb2.py*"))
    _, differ, missing = filecmp.cmpfiles(tmp_path, stored, generated, shallow=False)
    assert not differ + missing, "run `make protocol`"
