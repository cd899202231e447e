"""Avro types, schema evolution and registered schemas."""

import io
import json
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.schema import check_row_schema
from penstock.errors import DefiniteError, TransientError, UsageError
from penstock.sources.formats import AvroFormat, Registry
from tests.sources.formats.given import column, decoded, reasons, values
from tests.sources.formats.registry_server import Answers, serving


def record(*fields: dict[str, Any], name: str = "shop.Order") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)}


def member(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


def written(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def reading(schema: Any, **more: Any) -> AvroFormat:
    return AvroFormat(json.dumps(schema), **more)


def marked(kind: str, logical: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": logical, **more}


ADDRESS = record(member("street", "string"), member("since", marked("int", "date")), name="Address")
TREE = record(
    member("leaf", "int"), member("more", {"type": "array", "items": "Tree"}), name="Tree"
)
MOMENT = datetime(2026, 1, 31, 12, 34, 56, 789000, tzinfo=UTC)
NAIVE = MOMENT.replace(tzinfo=None)
TYPES = [
    ("null", pa.null(), None, None),
    ("boolean", pa.bool_(), True, True),
    ("int", pa.int32(), -5, -5),
    ("long", pa.int64(), 2**62, 2**62),
    ("float", pa.float32(), 1.5, 1.5),
    ("double", pa.float64(), 0.1, 0.1),
    ("bytes", pa.binary(), b"\0\xff", b"\0\xff"),
    ("string", pa.string(), "é", "é"),
    ({"type": "string", "avro.java.string": "String"}, pa.string(), "é", "é"),
    ({"type": "fixed", "name": "F", "size": 2}, pa.binary(2), b"ab", b"ab"),
    ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, pa.string(), "B", "B"),
    ({"type": "array", "items": ["null", "int"]}, pa.list_(pa.int32()), [1, None], [1, None]),
    ({"type": "map", "values": "int"}, pa.map_(pa.string(), pa.int32()), {"b": 1, "a": 2},
     [("b", 1), ("a", 2)]),
    (ADDRESS, pa.struct([("street", pa.string()), ("since", pa.date32())]),
     {"street": "x", "since": date(2026, 1, 1)}, {"street": "x", "since": date(2026, 1, 1)}),
    (["null", "long"], pa.int64(), 5, 5),
    (["long", "null"], pa.int64(), None, None),
    (["null"], pa.string(), None, None),
    (["null", "int", "string"], pa.string(), "x", '"x"'),
    (["int", "bytes"], pa.string(), b"\xff", '"/w=="'),
    (["double", "string"], pa.string(), float("nan"), '"NaN"'),
    (TREE, pa.string(), {"more": [{"more": [], "leaf": 2}], "leaf": 1},
     '{"leaf":1,"more":[{"leaf":2,"more":[]}]}'),
    (record(name="Nothing"), pa.string(), {}, "{}"),
    (marked("int", "date"), pa.date32(), date(1969, 12, 31), date(1969, 12, 31)),
    (marked("int", "time-millis"), pa.time32("ms"), time(1, 2, 3, 4000), time(1, 2, 3, 4000)),
    (marked("long", "time-micros"), pa.time64("us"), time(1, 2, 3, 4), time(1, 2, 3, 4)),
    (marked("long", "timestamp-millis"), pa.timestamp("ms", "UTC"), MOMENT, MOMENT),
    (marked("long", "timestamp-micros"), pa.timestamp("us", "UTC"), MOMENT, MOMENT),
    (marked("long", "local-timestamp-millis"), pa.timestamp("ms"), NAIVE, NAIVE),
    (marked("long", "local-timestamp-micros"), pa.timestamp("us"), NAIVE, NAIVE),
    (marked("string", "uuid"), pa.string(), uuid.UUID(int=5), str(uuid.UUID(int=5))),
    (marked("bytes", "decimal", precision=5, scale=2), pa.decimal128(5, 2), Decimal("-1.50"),
     Decimal("-1.50")),
    (marked("bytes", "decimal", precision=50, scale=2), pa.decimal256(50, 2),
     Decimal("9" * 48 + ".99"), Decimal("9" * 48 + ".99")),
    (marked("fixed", "decimal", name="D", size=8, precision=10, scale=0), pa.decimal128(10, 0),
     Decimal(7), Decimal(7)),
    (marked("bytes", "unheard-of"), pa.binary(), b"x", b"x"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "arrow", "text", "becomes"), TYPES, ids=lambda each: str(each)[:40]
)
def test_avro_type_maps_to_arrow_type_and_value(
    kind: Any, arrow: pa.DataType, text: Any, becomes: Any
):
    schema = record(member("a", kind), member("z", "int"))
    a_format = reading(schema)
    assert a_format.schema.field("a").type == arrow
    check_row_schema(a_format.schema, (), collection="orders")
    found = decoded(a_format, written(schema, {"a": text, "z": 1}), None)
    assert found.bad == ()
    assert column(found, "a") == [becomes, None]
    assert column(found, "z") == [1, None]


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        ({"type": {"type": "string"}}, "string"),
        (marked("bytes", "decimal", precision=2, scale=5), "bytes"),
        (marked("bytes", "decimal"), "bytes"),
        (marked("string", "date"), "string"),
    ],
)
def test_avro_invalid_logical_type_is_ignored(kind: Any, plain: str):
    text = "x" if plain == "string" else b"x"
    body = written(record(member("a", plain)), {"a": text})
    assert column(decoded(reading(record(member("a", kind))), body), "a") == [text]


def test_avro_schema_that_is_no_record_decodes_into_one_column():
    assert column(decoded(reading("long"), written("long", 5)), "value") == [5]
    union = ["null", "string"]
    assert column(decoded(reading(union), written(union, "x"), written(union, None)), "value") == [
        "x", None,
    ]  # fmt: skip
    assert column(decoded(AvroFormat("string"), written("string", "x")), "value") == ["x"]


def test_avro_timestamp_outside_python_range_is_decoded():
    schema = record(member("a", marked("long", "timestamp-micros")))
    far = written(record(member("a", "long")), {"a": 2**62})
    found = decoded(reading(schema), far)
    assert found.rows.column("a").cast(pa.int64()).to_pylist() == [2**62]


EVOLUTIONS = [
    ("added with a default", [], member("a", "int", default=7), {}, 7),
    ("added null", [], member("a", ["null", "int"], default=None), {}, None),
    ("added bytes", [], member("a", "bytes", default="\u00ff"), {}, b"\xff"),
    ("added decimal", [],
     member("a", marked("bytes", "decimal", precision=4, scale=1), default="\u0001"), {},
     Decimal("0.1")),
    ("added record", [], member("a", record(member("x", "int", default=1), name="R"), default={}),
     {}, {"x": 1}),
    ("removed", [member("gone", "string"), member("a", "int")], member("a", "int"),
     {"gone": "x", "a": 5}, 5),
    ("int to long", [member("a", "int")], member("a", "long"), {"a": 5}, 5),
    ("int to double", [member("a", "int")], member("a", "double"), {"a": 5}, 5.0),
    ("long to float", [member("a", "long")], member("a", "float"), {"a": 5}, 5.0),
    ("string to bytes", [member("a", "string")], member("a", "bytes"), {"a": "é"}, b"\xc3\xa9"),
    ("bytes to string", [member("a", "bytes")], member("a", "string"), {"a": b"x"}, "x"),
    ("became nullable", [member("a", "int")], member("a", ["null", "int"]), {"a": 5}, 5),
    ("was nullable", [member("a", ["null", "int"])], member("a", "int"), {"a": 5}, 5),
    ("renamed", [member("old", "int")], member("a", "int", aliases=["old"]), {"old": 5}, 5),
    ("symbol added", [member("a", {"type": "enum", "name": "E", "symbols": ["A", "C"]})],
     member("a", {"type": "enum", "name": "E", "symbols": ["A", "B"], "default": "B"}),
     {"a": "C"}, "B"),
    ("logical type added", [member("a", "int")], member("a", marked("int", "date")), {"a": 1},
     date(1970, 1, 2)),
    ("precision grew", [member("a", marked("bytes", "decimal", precision=4, scale=1))],
     member("a", marked("bytes", "decimal", precision=9, scale=1)), {"a": Decimal("1.5")},
     Decimal("1.5")),
]  # fmt: skip
CANNOT = [
    ([], member("a", "int"), {}),
    ([member("a", "string")], member("a", "int"), {"a": "x"}),
    ([member("a", "long")], member("a", "int"), {"a": 5}),
    ([member("a", ["null", "int"])], member("a", "int"), {"a": None}),
    ([member("a", {"type": "enum", "name": "E", "symbols": ["A", "C"]})],
     member("a", {"type": "enum", "name": "E", "symbols": ["A"]}), {"a": "C"}),
]  # fmt: skip
OTHER_MEANINGS = [
    (marked("long", "timestamp-millis"), marked("long", "timestamp-micros")),
    (marked("long", "timestamp-micros"), marked("long", "local-timestamp-micros")),
    (marked("int", "date"), marked("int", "time-millis")),
    (marked("bytes", "decimal", precision=9, scale=1),
     marked("bytes", "decimal", precision=9, scale=2)),
    (["null", marked("int", "date")], ["null", marked("int", "time-millis")]),
    ({"type": "array", "items": marked("int", "date")},
     {"type": "array", "items": marked("int", "time-millis")}),
]  # fmt: skip


@pytest.fixture
def server() -> Iterator[Answers]:
    with serving() as answers:
        yield answers


def framed(id: int, value: bytes) -> bytes:
    return b"\0" + id.to_bytes(4, "big") + value


@pytest.mark.parametrize(
    ("writer", "reader", "text", "becomes"),
    [each[1:] for each in EVOLUTIONS],
    ids=[each[0] for each in EVOLUTIONS],
)
def test_avro_record_of_compatible_writer_schema_is_resolved_to_reader_schema(
    server: Answers, writer: list[Any], reader: Any, text: Any, becomes: Any
):
    theirs, ours = record(*writer), record(reader)
    body = written(theirs, text)
    given = decoded(reading(ours, writer=json.dumps(theirs)), body)
    server.schemas[3] = {"schema": json.dumps(theirs)}
    fetched = decoded(reading(ours, registry=Registry(server.url)), framed(3, body), None)
    for found in (given, fetched):
        assert found.bad == ()
        assert column(found, "a")[0] == becomes


@pytest.mark.parametrize(("writer", "reader", "text"), CANNOT)
def test_avro_record_of_incompatible_writer_schema_is_bad(
    server: Answers, writer: list[Any], reader: Any, text: Any
):
    theirs, ours = record(*writer), record(reader)
    server.schemas[3] = {"schema": json.dumps(theirs)}
    found = decoded(reading(ours, registry=Registry(server.url)), framed(3, written(theirs, text)))
    assert reasons(found) == ["schema id 3, which wrote it, cannot be read as ours"]


@pytest.mark.parametrize(("theirs", "ours"), OTHER_MEANINGS)
def test_avro_writer_with_other_logical_type_is_rejected(server: Answers, theirs: Any, ours: Any):
    writer, reader = record(member("a", theirs)), record(member("a", ours))
    with pytest.raises(UsageError, match=r"cannot be read as the reader's: .* is not"):
        reading(reader, writer=json.dumps(writer))
    server.schemas[3] = {"schema": json.dumps(writer)}
    found = reading(reader, registry=Registry(server.url)).decode(values(framed(3, b"\2")))
    assert "cannot be read as ours" in found.bad[0].reason
    assert " is not " in found.bad[0].reason


def test_avro_records_of_several_schema_ids_are_read_with_their_writer_schemas(server: Answers):
    first, second = record(member("a", "int")), record(member("b", "int"), member("a", "long"))
    server.schemas |= {1: {"schema": json.dumps(first)}, 2: {"schema": json.dumps(second)}}
    a_format = reading(record(member("a", "long")), registry=Registry(server.url))
    one, two = framed(1, written(first, {"a": 1})), framed(2, written(second, {"b": 9, "a": 2}))
    found = decoded(a_format, one, two, one, two, None)
    assert column(found, "a") == [1, 2, 1, 2, None]
    assert sorted(server.asked) == ["/schemas/ids/1", "/schemas/ids/2"]


def test_avro_schema_with_references_is_resolved_by_registry(server: Answers):
    schema = record(member("a", "shop.Address"), member("b", ["null", "Address"]))
    address = record(member("street", "string"), name="shop.Address")
    referring = {
        "schema": json.dumps(schema), "id": 4,
        "references": [{"name": "shop.Address", "subject": "address", "version": 1}],
    }  # fmt: skip
    server.schemas[4] = referring
    server.subjects["orders-value", "latest"] = referring
    server.subjects["address", "1"] = {"schema": json.dumps(address), "id": 3}
    registry = Registry(server.url)
    a_format = AvroFormat.of(registry.latest("orders-value"), registry)
    whole = record(member("a", address), member("b", ["null", "shop.Address"]))
    body = written(whole, {"a": {"street": "x"}, "b": None})
    found = decoded(a_format, framed(4, body))
    assert found.rows.to_pylist() == [{"a": {"street": "x"}, "b": None}]


def test_avro_unregistered_schema_id_is_bad_and_registry_failure_raises(server: Answers):
    ours = record(member("a", "int"))
    server.schemas |= {2: {"schema": "x", "schemaType": "PROTOBUF"}, 3: {"schema": "nonsense"}}
    a_format = reading(ours, registry=Registry(server.url))
    body = written(ours, {"a": 1})
    found = decoded(a_format, framed(1, body), framed(2, body), framed(3, body), body, b"", b"\0")
    assert reasons(found) == [
        "schema id 1 does not exist in the registry",
        "schema id 2, which wrote it, cannot be read as ours: it is PROTOBUF, and not Avro",
        "schema id 3, which wrote it, cannot be read as ours: it is not JSON",
        *["it does not begin with a zero byte and the id of a schema"] * 3,
    ]
    for status, kind in ((503, TransientError), (403, DefiniteError), (404, DefiniteError)):
        server.instead = (status, b"")
        with pytest.raises(kind):
            a_format.decode(values(framed(9, body)))
    server.instead = None
    server.schemas[9] = {"schema": json.dumps(ours)}
    assert column(decoded(a_format, framed(9, body)), "a") == [1]


def test_avro_record_that_does_not_match_its_schema_is_bad():
    schema = record(member("a", "string"), member("b", marked("bytes", "decimal", precision=2)))
    fine = written(schema, {"a": "xy", "b": Decimal(7)})
    too_large = written(schema, {"a": "xy", "b": Decimal(7)})[:-2] + b"\4\1\0"
    found = decoded(
        reading(schema), fine, fine + b"z", fine[:-1], b"", b"\1", b"\2\xff\2\7", too_large
    )
    assert [bad.row for bad in found.bad] == [1, 2, 3, 4, 5, 6]
    assert found.bad[0].reason == "it is not Avro of its schema: 1 bytes follow"
    assert found.bad[5].reason == 'column "b" is decimal128(2, 0), which its value does not fit'


@pytest.mark.parametrize("schema", ["", "{", "nonsense", '{"type": "record"}', '{"type": "what"}',
                                    '{"type":"record","name":"A","fields":[{"name":"a"}]}',
                                    '{"type":"array","items":"B"}', "5", "[5]"])  # fmt: skip
def test_avro_format_with_invalid_schema_raises_usage_error(schema: str):
    with pytest.raises(UsageError, match="schema of avro format cannot be understood"):
        AvroFormat(schema)


def test_avro_format_with_reserved_column_or_writer_and_registry_raises_usage_error():
    with pytest.raises(UsageError):
        reading(record(member("mz_diff", "int")))
    with pytest.raises(UsageError, match="a registry"):
        reading("int", writer='"int"', registry=Registry("http://localhost:1"))


KINDS = {
    "boolean": st.booleans(),
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(allow_nan=False),
    "bytes": st.binary(),
    "string": st.text(st.characters(codec="utf-8")),
}


@st.composite
def schemas_and_rows(sample: st.DrawFn) -> tuple[Any, list[Any]]:
    count = sample(st.integers(1, 5))
    fields, rows = [], {}
    for at in range(count):
        kind = sample(st.sampled_from(sorted(KINDS)))
        values_of = KINDS[kind]
        match sample(st.sampled_from(["plain", "null", "list", "map"])):
            case "plain":
                made: Any = kind
            case "null":
                made, values_of = ["null", kind], st.none() | values_of
            case "list":
                made, values_of = {"type": "array", "items": kind}, st.lists(values_of)
            case _:
                made = {"type": "map", "values": kind}
                values_of = st.dictionaries(KINDS["string"], values_of)
        fields.append(member(f"f{at}", made))
        rows[f"f{at}"] = values_of
    return record(*fields), sample(st.lists(st.fixed_dictionaries(rows), max_size=4))


@given(schemas_and_rows())
def test_avro_records_written_by_fastavro_round_trip(case: tuple[Any, list[Any]]):
    schema, rows = case
    found = decoded(reading(schema), *(written(schema, row) for row in rows))
    assert found.bad == ()
    for each in schema["fields"]:
        name = each["name"]
        expected = [list(v.items()) if isinstance(v := row[name], dict) else v for row in rows]
        assert list(column(found, name)) == expected


@given(st.lists(st.none() | st.binary(max_size=30)))
def test_avro_decode_of_arbitrary_bytes_yields_row_or_bad_record(records: list[bytes | None]):
    schema = record(
        member("a", ["null", "string"]),
        member("b", {"type": "array", "items": "int"}),
        member("c", {"type": "enum", "name": "E", "symbols": ["A"]}),
        member("d", marked("bytes", "decimal", precision=3)),
        member("e", ["int", "string"]),
    )
    decoded(reading(schema), *records)
