"""Codecs bring back what they were given, and refuse the rest at the door."""

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
def test_what_goes_in_comes_out(codec, values):
    @given(values)
    def check(value):
        assert through_a_column(codec, value) == value

    check()


@given(json)
def test_equal_documents_are_stored_alike(value):
    # Retractions meet what they retract by its stored form.
    assert JSON.encode(JSON.decode(JSON.encode(value), 1)) == JSON.encode(value)


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
        (UNIT, 0),
        (UserCodec("bad", 1, lambda _: "text", lambda b, _: b), 1),
    ],
    ids=repr,
)
def test_what_a_codec_cannot_hold_is_refused(codec, value):
    with pytest.raises(UsageError):
        codec.encode(value)
