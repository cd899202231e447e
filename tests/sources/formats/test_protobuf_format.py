"""Protocol buffers: Arrow types and values of fields."""

from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, wrappers_pb2
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.sources.formats import ProtobufFormat
from tests.sources.formats.given import column, decoded, reasons

Field = descriptor_pb2.FieldDescriptorProto
SCALARS = {
    "double": pa.float64(), "float": pa.float32(), "int32": pa.int32(), "int64": pa.int64(),
    "uint32": pa.uint32(), "uint64": pa.uint64(), "sint32": pa.int32(), "sint64": pa.int64(),
    "fixed32": pa.uint32(), "fixed64": pa.uint64(), "sfixed32": pa.int32(),
    "sfixed64": pa.int64(), "bool": pa.bool_(), "string": pa.string(), "bytes": pa.binary(),
}  # fmt: skip


def add(message: Any, name: str, kind: str, *, repeated: bool = False, optional: bool = False):
    """Add a field. `kind` is a scalar type, `.name` of a message, or `:name` of an enum."""
    each = message.field.add(name=name, number=len(message.field) + 1)
    each.label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
    if kind.startswith("."):
        each.type, each.type_name = Field.TYPE_MESSAGE, kind
    elif kind.startswith(":"):
        each.type, each.type_name = Field.TYPE_ENUM, "." + kind[1:]
    else:
        each.type = Field.Type.Value(f"TYPE_{kind.upper()}")
    if optional:
        each.proto3_optional = True
        each.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def shop() -> bytes:
    own = descriptor_pb2.FileDescriptorProto(
        name="shop.proto", package="shop", syntax="proto3",
        dependency=["google/protobuf/wrappers.proto"],
    )  # fmt: skip
    state = own.enum_type.add(name="State")
    for number, name in enumerate(["NEW", "PAID"]):
        state.value.add(name=name, number=number)
    own.message_type.add(name="Empty")
    order = own.message_type.add(name="Order")
    for kind in SCALARS:
        add(order, f"a_{kind}", kind)
    add(order, "perhaps", "int32", optional=True)
    add(order, "state", ":shop.State")
    add(order, "tags", "string", repeated=True)
    add(order, "states", ":shop.State", repeated=True)
    add(order, "wrapped", ".google.protobuf.StringValue")
    add(order, "empty", ".shop.Empty")
    add(order, "next", ".shop.Order")
    add(order, "address", ".shop.Order.Address")
    add(order, "addresses", ".shop.Order.Address", repeated=True)
    entry = order.nested_type.add(name="AttributesEntry")
    entry.options.map_entry = True
    add(entry, "key", "string")
    add(entry, "value", ".shop.Order.Address")
    add(order, "attributes", ".shop.Order.AttributesEntry", repeated=True)
    address = order.nested_type.add(name="Address")
    add(address, "street", "string")
    add(address, "number", "int32", optional=True)
    old = descriptor_pb2.FileDescriptorProto(name="old.proto", package="old", syntax="proto2")
    note = old.message_type.add(name="Note")
    add(note, "text", "string")
    wrappers = descriptor_pb2.FileDescriptorProto()
    wrappers_pb2.DESCRIPTOR.CopyToProto(wrappers)
    # Files of a descriptor set may be in any order.
    return descriptor_pb2.FileDescriptorSet(file=[own, old, wrappers]).SerializeToString()


SHOP = shop()
FORMAT = ProtobufFormat(SHOP, "shop.Order")


def message(name: str = "shop.Order", **fields: Any) -> Any:
    pool = descriptor_pool.DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString(SHOP).file
    for each in reversed(files):
        pool.AddSerializedFile(each.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))(**fields)


def test_protobuf_field_types_map_to_arrow_types():
    kinds = {each.name: each.type for each in FORMAT.schema}
    address = pa.struct([("street", pa.string()), ("number", pa.int32())])
    assert kinds == {f"a_{kind}": arrow for kind, arrow in SCALARS.items()} | {
        "perhaps": pa.int32(),
        "state": pa.string(),
        "tags": pa.list_(pa.string()),
        "states": pa.list_(pa.string()),
        "wrapped": pa.string(),
        "empty": pa.string(),
        "next": pa.string(),
        "address": address,
        "addresses": pa.list_(address),
        "attributes": pa.map_(pa.string(), address),
    }


def test_protobuf_unset_field_is_null_only_with_field_presence():
    found = decoded(FORMAT, b"", message(perhaps=0).SerializeToString())
    assert column(found, "a_int64") == [0, 0]
    assert column(found, "a_string") == ["", ""]
    assert column(found, "state") == ["NEW", "NEW"]
    assert column(found, "tags") == [[], []]
    assert column(found, "perhaps") == [None, 0]
    assert column(found, "address") == [None, None]
    assert column(found, "wrapped") == [None, None]


def test_protobuf_messages_decode_as_structs_and_maps_with_sorted_keys():
    order = message(
        state=1, states=[0, 7], tags=["x", "y"], wrapped={"value": ""}, empty={},
        next={"a_int64": 5, "next": {"tags": ["z"]}}, address={"street": "s"},
        addresses=[{"number": 0}, {}],
        attributes={"b": {"street": "1"}, "a": {}, "c": {}},
    )  # fmt: skip
    found = decoded(FORMAT, order.SerializeToString())
    row = found.rows.to_pylist()[0]
    assert row["state"] == "PAID"
    assert row["states"] == ["NEW", "7"]
    assert row["tags"] == ["x", "y"]
    assert row["wrapped"] == ""
    assert row["empty"] == "{}"
    assert row["next"] == '{"a_int64":"5","next":{"tags":["z"]}}'
    assert row["address"] == {"street": "s", "number": None}
    assert row["addresses"] == [{"street": "", "number": 0}, {"street": "", "number": None}]
    assert [key for key, _ in row["attributes"]] == ["a", "b", "c"]


def test_protobuf_frame_with_other_message_index_is_bad():
    framed = ProtobufFormat(SHOP, "shop.Order", framed=True)
    body = message(a_int64=5).SerializeToString()
    head = b"\0\0\0\0\7"
    found = decoded(
        framed, head + b"\2\2" + body, head + b"\0" + body, head + b"\4\2\0" + body,
        body, b"", head, head + b"\2", head + b"\1" + body, head + b"\xff" * 9,
    )  # fmt: skip
    assert column(found, "a_int64") == [5, *[None] * 8]
    assert reasons(found)[:2] == [
        "it is message 0 of its schema, and not 1",
        "it is message 1.0 of its schema, and not 1",
    ]
    assert all("begin with a zero byte" in each for each in reasons(found)[2:5])
    assert all("malformed" in each for each in reasons(found)[5:])
    first = ProtobufFormat(SHOP, "old.Note", framed=True)
    found = decoded(first, head + b"\0\n\1x", head + b"\2\0\n\1y")
    assert column(found, "text") == ["x", "y"]
    nested = ProtobufFormat(SHOP, "shop.Order.Address", framed=True)
    assert column(decoded(nested, head + b"\4\2\2\n\1z"), "street") == ["z"]


def test_protobuf_malformed_message_is_bad():
    found = decoded(FORMAT, b"\xff", b"\x0a", message(a_int64=1).SerializeToString(), None)
    assert reasons(found) == ['it is not a message "shop.Order"'] * 2


def test_protobuf_proto2_string_that_is_not_utf8_is_bad():
    found = decoded(ProtobufFormat(SHOP, "old.Note"), b"\n\1x", b"\n\1\xff", b"")
    assert column(found, "text") == ["x", None, None]
    assert [bad.row for bad in found.bad] == [1]


def test_protobuf_format_with_unusable_descriptors_raises_usage_error():
    with pytest.raises(UsageError, match="not a FileDescriptorSet"):
        ProtobufFormat(b"\xff", "shop.Order")
    with pytest.raises(UsageError, match=r'have no message "shop\.Other"') as caught:
        ProtobufFormat(SHOP, "shop.Other")
    assert "shop.Order" in caught.value.hint
    alone = descriptor_pb2.FileDescriptorSet.FromString(SHOP)
    del alone.file[1:]
    with pytest.raises(UsageError, match="miss a file that another imports"):
        ProtobufFormat(alone.SerializeToString(), "shop.Order")
    with pytest.raises(UsageError, match="has no columns"):
        ProtobufFormat(SHOP, "shop.Empty")


RANGES = {
    "a_double": st.floats(allow_nan=False),
    "a_float": st.floats(width=32, allow_nan=False),
    "a_int32": st.integers(-(2**31), 2**31 - 1),
    "a_int64": st.integers(-(2**63), 2**63 - 1),
    "a_uint32": st.integers(0, 2**32 - 1),
    "a_uint64": st.integers(0, 2**64 - 1),
    "a_bool": st.booleans(),
    "a_string": st.text(st.characters(codec="utf-8")),
    "a_bytes": st.binary(),
    "perhaps": st.integers(-(2**31), 2**31 - 1),
    "tags": st.lists(st.text(st.characters(codec="utf-8"))),
}


@given(st.lists(st.fixed_dictionaries(RANGES), max_size=5))
def test_protobuf_records_written_by_library_round_trip(rows: list[dict[str, Any]]):
    found = decoded(FORMAT, *(message(**row).SerializeToString() for row in rows))
    assert found.bad == ()
    for name in RANGES:
        assert list(column(found, name)) == [row[name] for row in rows]


@given(st.lists(st.none() | st.binary(max_size=40)))
def test_protobuf_decode_of_arbitrary_bytes_yields_row_or_bad_record(records: list[bytes | None]):
    decoded(FORMAT, *records)
    decoded(ProtobufFormat(SHOP, "old.Note", framed=True), *records)
