"""JSON documents, and the equivalence of the compiled and the plain decoder."""

import json
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.data.text_kernels.located_values import NOTHING
from penstock.sources.formats import Column, JsonFormat
from penstock.sources.formats.column_reader import read_column
from penstock.sources.formats.json_scanner import MAX_NESTING, locate_values
from tests.sources.formats.given import column, decoded, reasons, same, values

ALL = {
    "flag": "boolean",
    "tiny": "smallint",
    "small": "int",
    "big": "bigint",
    "real": "double",
    "price": "numeric(10,2)",
    "wide": "numeric(38,5)",
    "name": "text",
    "blob": "bytes",
    "day": "date",
    "plain": "timestamp",
    "moment": "timestamptz",
    "any": "json",
    "größe\n": "text",
}
FORMAT = JsonFormat.of(ALL)
WHOLE = JsonFormat.of()

VALUES = [
    ("boolean", "true", True),
    ("boolean", "false", False),
    ("smallint", "-32768", -32768),
    ("int", "2147483647", 2147483647),
    ("bigint", "0", 0),
    ("bigint", "-0", 0),
    ("bigint", "9223372036854775807", 2**63 - 1),
    ("bigint", "-9223372036854775808", -(2**63)),
    ("bigint", "1.0", 1),
    ("bigint", "1e3", 1000),
    ("bigint", "1200E-2", 12),
    ("bigint", "0.00000e99999999999999999999", 0),
    ("bigint", "922337203685477580.70e1", 2**63 - 1),
    ("double", "1", 1.0),
    ("double", "-0.0", -0.0),
    ("double", "1e-400", 0.0),
    ("double", "0.1", 0.1),
    ("double", "1.7976931348623157e308", 1.7976931348623157e308),
    ("double", "9007199254740993", 9007199254740992.0),
    ("double", "8.41e21", 8.41e21),
    ("double", "2.2250738585072011e-308", 2.2250738585072011e-308),
    ("numeric(10,2)", "12.3", Decimal("12.30")),
    ("numeric(10,2)", "-0.00", Decimal("0.00")),
    ("numeric(10,2)", "1e7", Decimal("10000000.00")),
    ("numeric(10,2)", "99999999.99", Decimal("99999999.99")),
    ("numeric(10,2)", "12.340", Decimal("12.34")),
    ("numeric(10,2)", '"12.34"', Decimal("12.34")),
    ("numeric(10,2)", '"\\u0031"', Decimal("1.00")),
    ("numeric(38,0)", "-" + "9" * 38, Decimal("-" + "9" * 38)),
    ("text", '""', ""),
    ("text", r'"a\"\\\/\b\f\n\r\t\u00e9\u0000\ud83d\ude00é😀"', 'a"\\/\b\f\n\r\té\0😀é😀'),
    ("bytes", '"AP8="', b"\0\xff"),
    ("bytes", '""', b""),
    ("date", '"2024-02-29"', "2024-02-29"),
    ("date", '"0001-01-01"', "0001-01-01"),
    ("timestamp", '"2026-01-31T12:34:56.789"', "2026-01-31 12:34:56.789000"),
    ("timestamp", '"2026-01-31 12:34:56"', "2026-01-31 12:34:56.000000"),
    ("timestamp", '"2026-01-31t12:34"', "2026-01-31 12:34:00.000000"),
    ("timestamptz", '"2026-01-31T12:34:56Z"', "2026-01-31 12:34:56.000000Z"),
    ("timestamptz", '"2026-01-31T00:30:00.1234560000+01:00"', "2026-01-30 23:30:00.123456Z"),
    ("timestamptz", '"2026-01-31T23:30:00-0130"', "2026-02-01 01:00:00.000000Z"),
    ("timestamptz", '"1969-12-31T23:59:59.999999+00"', "1969-12-31 23:59:59.999999Z"),
    ("json", '{"a": [1, 2.50, null],\n"a":1}', '{"a": [1, 2.50, null],\n"a":1}'),
    ("json", '"x"', '"x"'),
    ("json", "1e999", "1e999"),
    ("json", "false", "false"),
]


@pytest.mark.parametrize(("word", "written", "means"), VALUES)
def test_json_member_decodes_as_its_column_type(word: str, written: str, means: Any):
    a_format = JsonFormat.of({"a": word})
    record = f' {{"b":[{{}}], "a" : {written} }}\r\n'.encode()
    found = decoded(a_format, record, b'{"a":null}', b'{"A":1}', b"{}", None)
    assert reasons(found) == []
    rows = found.rows.column("a").combine_chunks()
    if pa.types.is_temporal(rows.type):
        rows = rows.cast(pa.string())
    assert rows.to_pylist() == [means, None, None, None, None]
    if word == "double":
        assert math.copysign(1, rows[0].as_py()) == math.copysign(1, means)


UNFIT = [
    ("boolean", "1", 'column "a" is boolean, but the record has a number there'),
    ("boolean", '"true"', 'column "a" is boolean, but the record has text there'),
    ("smallint", "32768", 'column "a" is smallint, not "32768": it is too large'),
    ("int", "-2147483649", 'column "a" is int, not "-2147483649": it is too large'),
    ("bigint", "9223372036854775808", "it is too large"),
    ("bigint", "1e99999999999999999999", "it is too large"),
    ("bigint", "1.5", 'column "a" is bigint, not "1.5": it has digits after the point'),
    ("bigint", "1e-99999999999999999999", "it has digits after the point"),
    ("bigint", '"1"', 'column "a" is bigint, but the record has text there'),
    ("bigint", "[]", 'column "a" is bigint, but the record has an array there'),
    ("double", "1e400", "it is too large"),
    ("double", '"NaN"', 'column "a" is double, but the record has text there'),
    ("numeric(3,1)", "100", 'column "a" is numeric(3,1), not "100": it is too large'),
    ("numeric(3,1)", "0.25", "it has more than 1 digits after the point"),
    ("numeric(3,1)", '"x"', 'column "a" is numeric(3,1), not "x"'),
    ("text", "1", 'column "a" is text, but the record has a number there'),
    ("text", "{}", 'column "a" is text, but the record has an object there'),
    ("bytes", '"A"', 'column "a" is bytes, but its text is not base64'),
    ("bytes", '"é"', 'column "a" is bytes, but its text is not base64'),
    ("date", '"2026-02-29"', 'column "a" is date, not "2026-02-29": the day does not exist'),
    ("date", '"0000-01-01"', "the day does not exist"),
    ("date", '"20260228"', 'column "a" is date, not "20260228"'),
    ("date", "1", 'column "a" is date, but the record has a number there'),
    ("timestamp", '"2026-01-31T12:34:56Z"', "it has a time zone, which needs timestamptz"),
    ("timestamptz", '"2026-01-31T12:34:56"', "it has no time zone"),
    ("timestamptz", '"2026-01-31T12:34:60Z"', "the time does not exist"),
    ("timestamptz", '"2026-01-31T24:00:00Z"', "the time does not exist"),
    ("timestamptz", '"2026-01-31T12:00:00+24:00"', "the time does not exist"),
    ("timestamp", '"2026-01-31T12:34:56.1234567"', "it is finer than a microsecond"),
    ("timestamp", '"now and then, and a good deal longer"', 'not "now and then, and a …"'),
]


@pytest.mark.parametrize(("word", "written", "reason"), UNFIT)
def test_json_member_that_does_not_fit_its_column_type_makes_record_bad(
    word: str, written: str, reason: str
):
    a_format = JsonFormat.of({"before": "int", "a": word})
    record = f'{{"before": 1, "a": {written}}}'.encode()
    found = decoded(a_format, b'{"before": 2}', record)
    assert [bad.row for bad in found.bad] == [1]
    assert reason in found.bad[0].reason
    assert column(found, "before") == [2, None]


NO_OBJECTS = [
    (b"", "it is empty"),
    (b" \n", "it is empty"),
    (b"[]", "it is an array, and not an object"),
    (b"1", "it is a number"),
    (b"null", "it is null"),
    (b'"x"', "it is text"),
]
NOT_JSON = [
    (b'{"a":1}{"a":2}', "the JSON document is followed by other text, at byte 7"),
    (b'{"a":1} x', "the JSON document is followed by other text, at byte 8"),
    (b"\xef\xbb\xbf{}", "it begins with a byte order mark"),
    (b'{"b":"\xff"}', "it is not UTF-8, from byte 6 on"),
    (b'{"b":"\xed\xa0\x80"}', "it is not UTF-8"),
    (b'{"b":"\\ud800"}', "text contains half of a surrogate pair"),
    (b'{"b":"\\udc00\\ud800"}', "text contains half of a surrogate pair"),
    (b'{"\\ud800":1}', "text contains half of a surrogate pair"),
    (b'{"b":NaN}', "it is not JSON"),
    (b'{"b":-Infinity}', "it is not JSON"),
    (b'{"b":01}', "it is not JSON"),
    (b'{"b":+1}', "it is not JSON"),
    (b'{"b":.5}', "it is not JSON"),
    (b'{"b":1.}', "it is not JSON"),
    (b'{"b":1e}', "it is not JSON"),
    (b'{"b":-}', "it is not JSON"),
    (b'{"b":tru}', "it is not JSON"),
    (b'{"b":nul', "it is not JSON"),
    (b'{"b":"\n"}', "it is not JSON"),
    (b'{"b":"\\x"}', "it is not JSON"),
    (b'{"b":"\\u12g4"}', "it is not JSON"),
    (b'{"b":"', "it is not JSON"),
    (b'{"b":"\\', "it is not JSON"),
    (b'{"b":[1,]}', "it is not JSON"),
    (b'{"b":[1 2]}', "it is not JSON"),
    (b'{"b":[}', "it is not JSON"),
    (b'{"b":{]}', "it is not JSON"),
    (b'{"b":1,}', "it is not JSON"),
    (b'{"b" 1}', "it is not JSON"),
    (b"{b:1}", "it is not JSON"),
    (b"{'b':1}", "it is not JSON"),
    (b'{"b":1', "it is not JSON"),
    (b"{", "it is not JSON"),
    (b'{"a":\x00}', "it is not JSON"),
    (b'{"a":1}\x0c', "followed by other text"),
    (b'{"a":1}\xc2\xa0', "followed by other text"),
]


@pytest.mark.parametrize(("record", "reason"), NO_OBJECTS + NOT_JSON)
def test_json_record_that_is_no_object_is_bad(record: bytes, reason: str):
    found = decoded(FORMAT, b'{"name":"x"}', record, b'{"name":"y"}')
    assert [bad.row for bad in found.bad] == [1]
    assert reason in found.bad[0].reason
    assert column(found, "name") == ["x", None, "y"]


@pytest.mark.parametrize(("record", "reason"), NOT_JSON)
def test_json_format_without_columns_rejects_invalid_json(record: bytes, reason: str):
    found = decoded(WHOLE, record)
    assert len(found.bad) == 1
    assert reason in found.bad[0].reason


def test_json_format_without_columns_keeps_document_text_unchanged():
    found = decoded(WHOLE, b' {"b": 1.0,\n"a":[]} ', b"null", b'"x"', b"1e5", None, b"")
    assert column(found, "data") == ['{"b": 1.0,\n"a":[]}', "null", '"x"', "1e5", None, None]
    assert reasons(found) == ["it is empty"]


def test_json_duplicate_key_uses_last_value():
    found = decoded(
        JsonFormat.of({"a": "bigint"}),
        b'{"a":1,"a":2}',
        b'{"a":"x","a":2}',
        b'{"a":1,"a":null}',
        b'{"a":1,"\\u0061":3}',
        b'{"a":2,"a":"x"}',
    )
    assert column(found, "a") == [2, 2, None, 3, None]
    assert [bad.row for bad in found.bad] == [4]


def test_json_keys_with_escapes_and_non_ascii_letters_match_columns():
    found = decoded(
        FORMAT, '{"gr\\u00f6ße\\n":"x","\\u006eame":"y"}'.encode(), '{"größe\\n":"z"}'.encode()
    )
    assert column(found, "größe\n") == ["x", "z"]
    assert column(found, "name") == ["y", None]


@pytest.mark.parametrize("way", ["walked", "plain"])
def test_json_document_nested_deeper_than_limit_is_bad(way: str):
    deep = [b'{"any":' * (n // 2) + b"[" * (n - n // 2) + b"]" * (n - n // 2) + b"}" * (n // 2)
            for n in (MAX_NESTING, MAX_NESTING + 1, 100_000)]  # fmt: skip
    for a_format in (FORMAT, WHOLE):
        if way == "walked":
            found = decoded(a_format, *deep)
        else:
            found = a_format.decode_in_python(values(*deep))
        assert [bad.row for bad in found.bad] == [1, 2]
        assert set(reasons(found)) == {"it nests arrays and objects more than 200 levels deep"}


def test_json_number_of_any_length_outside_columns_is_accepted():
    long = b'{"x":' + b"9" * 10_000 + b',"y":1e999999999999,"name":"n"}'
    found = decoded(FORMAT, long)
    assert column(found, "name") == ["n"]
    same(FORMAT.decode_in_python(values(long)), found)


def test_json_decode_of_no_values_yields_no_rows():
    assert decoded(FORMAT).rows.num_rows == 0
    assert FORMAT.decode(pa.chunked_array([], pa.binary())).rows.schema == FORMAT.schema
    assert decoded(FORMAT, None, None).bad == ()


json_numbers = st.one_of(
    st.integers().map(str),
    st.integers(-(2**63) - 2, 2**63 + 1).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.decimals(allow_nan=False, allow_infinity=False).map(str),
    st.from_regex(r"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,4})?", fullmatch=True),
    st.sampled_from(["NaN", "Infinity", "-Infinity", "01", "1.", "-", "1e", "+1", ".5", "0x1"]),
)
moments = st.one_of(
    st.datetimes().map(str),
    st.datetimes().map(lambda moment: moment.isoformat() + "Z"),
    st.dates().map(str),
    st.from_regex(
        r"[0-9]{4}-[01][0-9]-[0-3][0-9]([Tt ][0-2][0-9]:[0-6][0-9](:[0-6][0-9](\.[0-9]{1,9})?)?"
        r"([Zz]|[+-][0-2][0-9](:?[0-6][0-9])?)?)?",
        fullmatch=True,
    ),
)
texts = st.one_of(st.text(), moments, json_numbers, st.just("AP8="))
escapes = st.sampled_from(
    [r"\n", r"\"", r"\\", r"\/", r"\u0041", r"\u00E9", r"\ud83d\uDE00", r"\ud800", r"\udc00",
     r"\u", r"\x", "\\", "\n", "\x00", "é", "😀", "a", '"'],
)  # fmt: skip
strings = st.one_of(
    texts.map(json.dumps),
    texts.map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.lists(escapes).map(lambda parts: f'"{"".join(parts)}"'),
)
blanks = st.text(" \t\r\n", max_size=2)
leaves = st.one_of(st.sampled_from(["null", "true", "false", "nul", ""]), json_numbers, strings)


def arrays(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds(lambda gap, items: f"[{gap}{','.join(items)}]", blanks, st.lists(inner))


keys = st.one_of(st.sampled_from([*map(json.dumps, ALL), '"größe\\n"', r'"\u006eame"']), strings)


def objects(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    member = st.builds(
        lambda key, a, b, value, c: f"{a}{key}{b}:{c}{value}", keys, blanks, blanks, inner, blanks
    )
    return st.builds(
        lambda gap, members: f"{{{gap}{','.join(members)}}}", blanks, st.lists(member, max_size=6)
    )


documents = st.recursive(leaves, lambda inner: arrays(inner) | objects(inner), max_leaves=8)
records = st.one_of(
    st.none(),
    st.builds(
        lambda a, document, b: (a + document + b).encode("utf-8", "surrogatepass"),
        blanks,
        objects(documents) | documents,
        st.one_of(blanks, st.sampled_from(["{}", "x", "\ufeff", "\x0c"])),
    ),
    st.binary(max_size=20),
    st.builds(
        lambda document, at, junk: document.encode("utf-8", "replace")[:at] + junk,
        objects(documents),
        st.integers(0, 40),
        st.binary(max_size=3),
    ),
)


@given(st.lists(records, max_size=8))
@example([b'{"big":1}', None, b'{"big":1.0,"moment":"2026-01-01T00:00:00Z"}', b"\xef\xbb\xbf{}"])
@example([b'{"a":1\n', b"}"])
@example([b'{"name":"x"}{"name":"y"}', b" "])
@example([rb'{"gr\u00f6\u00dfe\n":[]}'])
def test_json_compiled_and_plain_decoders_agree_on_any_records(given_records: list[bytes | None]):
    for a_format in (FORMAT, WHOLE):
        found = decoded(a_format, *given_records)
        same(a_format.decode_in_python(values(*given_records)), found)


@given(st.lists(records, max_size=8))
def test_json_accepted_documents_are_valid_for_python_json(given_records: list[bytes | None]):
    found = decoded(WHOLE, *given_records)
    bad = {each.row for each in found.bad}
    for row, record in enumerate(given_records):
        if record is not None and row not in bad:
            json.loads(record.decode(), parse_constant=refuse, parse_int=str, parse_float=str)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


SAYABLE = {
    "flag": st.booleans(),
    "tiny": st.integers(-(2**15), 2**15 - 1),
    "small": st.integers(-(2**31), 2**31 - 1),
    "big": st.integers(-(2**63), 2**63 - 1),
    "real": st.floats(allow_nan=False, allow_infinity=False),
    "name": st.text(st.characters(codec="utf-8")),
    "größe\n": st.text(st.characters(codec="utf-8")),
}


@given(
    st.lists(st.fixed_dictionaries({}, optional={n: st.none() | s for n, s in SAYABLE.items()})),
    st.booleans(),
)
def test_json_records_written_by_python_json_round_trip(
    rows: list[dict[str, Any]], ascii_only: bool
):
    found = decoded(FORMAT, *(json.dumps(row, ensure_ascii=ascii_only).encode() for row in rows))
    assert found.bad == ()
    for name in SAYABLE:
        expected = [row.get(name) for row in rows]
        assert list(map(repr, column(found, name))) == list(map(repr, expected))


@given(
    st.sampled_from(["bigint", "int", "double", "numeric(18,3)", "numeric(38,10)"]),
    json_numbers,
)
def test_json_numbers_decode_exactly_or_are_bad(word: str, number: str):
    a_format = JsonFormat.of({"a": word})
    found = decoded(a_format, f'{{"a":{number}}}'.encode())
    if found.bad:
        return
    value = column(found, "a")[0]
    if word == "double":
        assert value == float(number)
    else:
        assert Decimal(value) == Decimal(number)


@given(
    st.lists(
        # Just above the integers that a double holds exactly: rounding twice shows there.
        st.tuples(st.integers(2**53 - 9, 9 * 10**16), st.integers(-24, 24)),
        min_size=40,
        max_size=40,
    )
)
def test_json_double_is_correctly_rounded(numbers: list[tuple[int, int]]):
    written = [f"{mantissa}e{exponent}" for mantissa, exponent in numbers]
    found = decoded(JsonFormat.of({"a": "double"}), *(f'{{"a":{n}}}'.encode() for n in written))
    assert column(found, "a") == [float(number) for number in written]


@given(moments, st.sampled_from(["date", "timestamp", "timestamptz"]))
def test_json_timestamps_decode_equally_in_compiled_code_and_python(text: str, word: str):
    column_of = Column.parse("a", word)
    cells, _ = locate_values(pa.array([f'{{"a":"{text}"}}'.encode()], pa.binary()), ["a"])
    fast, bad = read_column(cells, 0, column_of)
    # The compiled code leaves text with an escape to Python.
    escaped = "\\u003" + text[0] + text[1:]
    cells, _ = locate_values(pa.array([f'{{"a":"{escaped}"}}'.encode()], pa.binary()), ["a"])
    slow, also_bad = read_column(cells, 0, column_of)
    assert fast.equals(slow)
    assert bad == also_bad
    assert cells.kinds[0, 0] != NOTHING
