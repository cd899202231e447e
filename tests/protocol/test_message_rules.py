"""Validity of messages and of the collections in them."""

from dataclasses import replace

import pyarrow as pa
import pytest

from penstock.protocol.errors import LocalProtocolError, RemoteProtocolError
from penstock.protocol.message_rules import find_spec_violation
from penstock.protocol.messages import Load, Store, Validate, ValidateBinding
from penstock.protocol.specs import (
    CollectionSpec,
    FieldSelection,
    MaterializationBinding,
    MaterializationSpec,
    Projection,
)
from penstock.protocol.wire import decode, encode, encode_request

ID, NOTE, ROOT = Projection("/id", "id"), Projection("/note", "note"), Projection("", "doc")
THINGS = CollectionSpec("a/things", ("/id",), (ROOT, ID, NOTE), read_schema_json="{}")


@pytest.mark.parametrize(
    "fine",
    [
        {},
        {"read_schema_json": "true", "write_schema_json": '{"type":"object"}'},
        {"projections": (ROOT, ID, NOTE, Projection("/note", "the same again"))},
    ],
    ids=["plain", "schemas", "two fields of one location"],
)
def test_validate_with_valid_collection_round_trips(fine):
    validate = Validate("m", "{}", (ValidateBinding("{}", replace(THINGS, **fine), {"id": "{}"}),))
    assert decode(Validate, encode(validate)) == validate


@pytest.mark.parametrize(
    ("broken", "configs", "rule"),
    [
        ({"collection": ""}, {}, "the collection has no name"),
        ({"key_ptrs": ()}, {}, "the collection has no key"),
        ({"key_ptrs": ("/id", "/id")}, {}, "the key contains a location twice"),
        ({"key_ptrs": ("/other",)}, {}, "key location '/other' has no projection"),
        ({"key_ptrs": ("id",)}, {}, "'id' is not a JSON pointer"),
        ({"projections": (ID, ID)}, {}, "two projections have the same field"),
        ({"projections": (ID, Projection("x", "x"))}, {}, "'x' is not a JSON pointer"),
        ({"projections": (ID, Projection("/x", ""))}, {}, "a projection has no field"),
        ({"read_schema_json": "{"}, {}, "read_schema_json is not a JSON schema"),
        ({"write_schema_json": "[]"}, {}, "write_schema_json is not a JSON schema"),
        ({"read_schema_json": "[" * 100_000}, {}, "read_schema_json is not a JSON schema"),
        ({}, {"id": "{"}, 'the configuration of field "id" is not a JSON object'),
        ({}, {"id": "1"}, 'the configuration of field "id" is not a JSON object'),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_validate_with_invalid_collection_is_rejected(broken, configs, rule):
    collection = replace(THINGS, **broken)
    data = encode(Validate("m", "{}", (ValidateBinding("{}", collection, configs),)))
    with pytest.raises(RemoteProtocolError) as caught:
        decode(Validate, data)
    where = f"binding 0 ({collection.collection}): {rule}"
    assert str(caught.value) == f"Validate has an invalid {where}"
    selection = FieldSelection(("id",), ("note",), "doc", configs)
    bound = MaterializationBinding("{}", ("t",), collection, selection)
    assert find_spec_violation(MaterializationSpec("m", "{}", (bound,))) == where


BYTES, TRUE = pa.array([b"x"], pa.binary()), pa.array([True])


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        (Load(-1, BYTES), "Load has an invalid binding number: -1"),
        (Load(1 << 32, BYTES), "Load has an invalid binding number: 4294967296"),
        (
            Load(0, pa.array([b"x"], pa.large_binary())),
            "Load has packed_keys that are not a BinaryA",
        ),
        (
            Load(0, pa.array([b"x", None], pa.binary())),
            "Load has packed_keys that are not a BinaryA",
        ),
        (Load(0, [b"x"]), "Load has packed_keys that are not a BinaryArray without nulls"),
        (
            Store(0, BYTES, BYTES, pa.array(["{}"]), TRUE),
            "Store has docs_json that are not a BinaryA",
        ),
        (
            Store(0, BYTES, BYTES, BYTES, pa.array([1])),
            "Store has exists that are not a BooleanArray",
        ),
        (Store(0, BYTES, BYTES, BYTES, pa.array([None], pa.bool_())), "Store has exists that are"),
        (
            Store(0, BYTES, BYTES, BYTES, TRUE, pa.array([0])),
            "Store has deletes that are not a Bool",
        ),
    ],
    ids=[f"broken-{number}" for number in range(9)],
)
def test_encode_request_with_invalid_columns_is_rejected(message, rule):
    with pytest.raises(LocalProtocolError, match=rule):
        encode_request(message)
