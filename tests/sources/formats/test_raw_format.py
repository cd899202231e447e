"""Text and bytes formats."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.sources.formats import BytesFormat, TextFormat
from tests.sources.formats.given import column, decoded, reasons


@given(st.lists(st.none() | st.text(st.characters(codec="utf-8")).map(str.encode)))
def test_text_format_keeps_utf8_values_unchanged(records: list[bytes | None]):
    found = decoded(TextFormat(), *records)
    assert found.bad == ()
    assert [t if t is None else t.encode() for t in column(found, "text")] == records


def test_text_format_with_invalid_utf8_is_bad():
    found = decoded(TextFormat("line"), b"a", b"b\xff", None, b"\xc3", b"")
    assert column(found, "line") == ["a", None, None, None, ""]
    assert reasons(found) == ["it is not UTF-8, from byte 1 on", "it is not UTF-8, from byte 0 on"]


@given(st.lists(st.none() | st.binary()))
def test_bytes_format_keeps_values_unchanged(records: list[bytes | None]):
    found = decoded(BytesFormat(), *records)
    assert found.bad == ()
    assert column(found, "data") == records


def test_raw_formats_with_reserved_column_name_raise_usage_error():
    for a_format in (TextFormat, BytesFormat):
        with pytest.raises(UsageError):
            a_format("mz_diff")


def test_text_format_with_values_that_are_not_binary_raises_usage_error():
    with pytest.raises(UsageError, match="int64 are no bytes"):
        TextFormat().decode(pa.chunked_array([[1]]))
    large = pa.chunked_array([pa.array([b"x"], pa.large_binary())])
    assert TextFormat().decode(large).rows.to_pylist() == [{"text": "x"}]
