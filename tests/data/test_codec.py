"""Round trips of codecs, and rejection of values that they cannot store."""

from datetime import datetime
from decimal import Decimal
from enum import IntEnum
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import BIGINT, BYTES, INT64, JSON, TEXT, UNIT, UserCodec
from penstock.errors import UsageError

json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def through_a_column(codec, value):
    column = pa.array([codec.encode(value)], codec.stored_as)
    return codec.decode(column.to_pylist()[0], codec.version)


@pytest.mark.parametrize(
    ("codec", "values"),
    [
        (TEXT, st.text()),
        (BYTES, st.binary()),
        (INT64, st.integers(-(2**63), 2**63 - 1)),
        (BIGINT, st.integers(-(10**80), 10**80)),
        (JSON, json),
        (UNIT, st.none()),
        (UserCodec("rot", 3, lambda b: b[::-1], lambda b, _: b[::-1]), st.binary()),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_codec_decode_reverses_encode(codec, values):
    @given(values)
    def check(value):
        assert through_a_column(codec, value) == value

    check()


@given(json)
def test_json_codec_stores_equal_documents_equally(value):
    # A retraction cancels the row with the same stored form.
    assert JSON.encode(JSON.decode(JSON.encode(value), 1)) == JSON.encode(value)


class Two(IntEnum):
    ONE = 1
    TWO = 2


def returning_text(_value: object) -> Any:
    """Break the contract of a codec, which returns bytes."""
    return "text"


@pytest.mark.parametrize(
    ("codec", "value"),
    [
        (TEXT, b"a"),
        (TEXT, None),
        (TEXT, "\ud800"),
        (BYTES, "a"),
        (INT64, 2**63),
        (INT64, True),
        (INT64, 1.0),
        (BIGINT, "7"),
        (BIGINT, False),
        (JSON, object()),
        (JSON, "\ud800"),
        (JSON, float("nan")),
        (JSON, [float("-inf")]),
        (JSON, b"a"),
        (JSON, {"a": {1}}),
        (JSON, (1, 2)),
        (JSON, {1: 2}),
        (JSON, {None: 2}),
        (JSON, datetime(2020, 1, 1)),  # noqa: DTZ001
        (JSON, Decimal("1.5")),
        (JSON, Two.TWO),
        (UNIT, 0),
        (UserCodec("bad", 1, returning_text, lambda b, _: b), 1),
    ],
    ids=lambda given: getattr(given, "name", type(given).__name__),
)
def test_codec_with_unsupported_value_raises_usage_error(codec, value):
    with pytest.raises(UsageError):
        codec.encode(value)


def test_json_codec_with_deep_document_raises_usage_error():
    deep: list[Any] = []
    for _ in range(150):
        deep = [deep]
    assert through_a_column(JSON, deep) == deep
    for _ in range(100):
        deep = [deep]
    with pytest.raises(UsageError, match="json"):
        JSON.encode(deep)
    deep.append(deep)
    with pytest.raises(UsageError, match="json"):
        JSON.encode(deep)


@pytest.mark.parametrize("value", [10**4299, -(7**20_000), 10**5000 - 1], ids=int.bit_length)
def test_bigint_codec_exceeds_digit_limit_of_python(value):
    assert through_a_column(BIGINT, value) == value


@pytest.mark.parametrize("name", ["text", "bytes", "int64", "bigint", "json", "unit"])
def test_user_codec_with_built_in_name_raises_usage_error(name):
    with pytest.raises(UsageError, match=f'"{name}" has the name of a built-in'):
        UserCodec(name, 1, bytes, lambda b, _: b)
