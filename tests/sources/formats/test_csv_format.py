"""CSV lines, fields, quotes and the number of fields."""

import csv
import io
from decimal import Decimal
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.sources.formats import CsvFormat
from tests.sources.formats.given import column, decoded, reasons

TEXTS = CsvFormat.of(["a", "b"])

LINES = [
    (b"x,y", ["x", "y"]),
    (b"x,y\n", ["x", "y"]),
    (b"x,y\r\n", ["x", "y"]),
    (b",", [None, None]),
    (b'"",""', ["", ""]),
    (b'"a,b","c\nd"', ["a,b", "c\nd"]),
    (b'"a""b",""""', ['a"b', '"']),
    (b" x , y ", [" x ", " y "]),
    ("é,😀".encode(), ["é", "😀"]),
    (b"x,\n", ["x", None]),
]
BAD_LINES = [
    (b"", "it has 1 fields and not 2"),
    (b"\n", "it has 1 fields and not 2"),
    (b"x", "it has 1 fields and not 2"),
    (b"x,y,z", "it has 3 fields and not 2"),
    (b"x,y\nz,w", "it has more than one line"),
    (b"x,y\n\n", "it has more than one line"),
    (b'x,"y', "a quoted field has no end"),
    (b'x,"', "a quoted field has no end"),
    (b'x,"y"z', "the closing quote of a field is followed by other text"),
    (b'x,y"z', "a field without quotes contains a quote"),
    (b"x,\xff", "it is not UTF-8, from byte 2 on"),
]


@pytest.mark.parametrize(("line", "fields"), LINES)
def test_csv_line_decodes_into_fields(line: bytes, fields: list[str | None]):
    found = decoded(TEXTS, None, line)
    assert found.bad == ()
    assert [column(found, "a")[1], column(found, "b")[1]] == fields


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_csv_malformed_line_is_bad(line: bytes, reason: str):
    found = decoded(TEXTS, b"x,y", line)
    assert reasons(found) == [reason]


def test_csv_fields_decode_as_their_column_types():
    words = {"i": "bigint", "d": "double", "n": "numeric(6,2)", "f": "boolean", "m": "timestamp",
             "b": "bytes", "j": "json"}  # fmt: skip
    found = decoded(
        CsvFormat.of(words, delimiter="|"),
        b'007|1e3|"1.5"|t|2026-01-31 12:00:00|AP8=|"{""a"":1}"',
        b'-0|NaN|+1.5|"FALSE"||""|"{""a"": ""|""}"',
        b"||||||",
        b"1.5||||||",
        b"|1,5|||||",
        b"||||||{",
        b'|||"yes"|||',
        b'"a""b"||||||',
    )
    assert column(found, "i") == [7, 0, *[None] * 6]
    assert column(found, "d")[0] == 1000.0
    assert column(found, "n")[:2] == [Decimal("1.50"), Decimal("1.50")]
    assert column(found, "f")[:2] == [True, False]
    assert str(column(found, "m")[0]) == "2026-01-31 12:00:00"
    assert column(found, "b")[:2] == [b"\0\xff", b""]
    assert column(found, "j")[:2] == ['{"a":1}', '{"a": "|"}']
    assert [bad.row for bad in found.bad] == [3, 4, 5, 6, 7]
    assert found.bad[0].reason.endswith("it has digits after the point")
    assert found.bad[1].reason == 'column "d" is double, not "1,5"'
    assert found.bad[2].reason.startswith('column "j" is json: it is not JSON')
    assert found.bad[3].reason == 'column "f" is boolean, not "yes"'
    assert found.bad[4].reason == 'column "i" is bigint, not "a"b"'


@pytest.mark.parametrize("delimiter", ["", ",,", '"', "\n", "\r", "é"])
def test_csv_format_with_invalid_delimiter_raises_usage_error(delimiter: str):
    with pytest.raises(UsageError, match="delimiter of csv format"):
        CsvFormat.of(["a"], delimiter=delimiter)


def test_csv_format_with_duplicate_column_names_raises_usage_error():
    with pytest.raises(UsageError, match='names column "a" twice'):
        CsvFormat.of(["a", "b", "a"])


fields = st.text(st.characters(codec="utf-8"))


@given(
    st.lists(st.tuples(fields, fields)),
    st.sampled_from([",", ";", "\t", "|", "x"]),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC]),
)
def test_csv_records_written_by_python_csv_round_trip(
    rows: list[tuple[str, str]], delimiter: str, quoting: Literal[0, 1, 2]
):
    records = []
    for row in rows:
        out = io.StringIO(newline="")
        csv.writer(out, delimiter=delimiter, quoting=quoting).writerow(row)
        records.append(out.getvalue().encode())
    found = decoded(CsvFormat.of(["a", "b"], delimiter=delimiter), *records)
    assert found.bad == ()
    # Python's writer writes nothing for an empty string unless it quotes all fields.
    nothing = "" if quoting != csv.QUOTE_MINIMAL else None
    assert column(found, "a") == [a or nothing for a, _ in rows]
    assert column(found, "b") == [b or nothing for _, b in rows]


@given(st.lists(st.none() | st.binary(max_size=30)))
def test_csv_decode_of_arbitrary_bytes_yields_row_or_bad_record(records: list[bytes | None]):
    decoded(CsvFormat.of({"a": "int", "b": "text", "c": "json"}), *records)
