"""Batches as columns and as rows: exact values, and errors with row numbers."""

import base64
import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.packed import Float32, pack_row
from penstock.protocol.errors import RemoteProtocolError
from penstock.protocol.specs import (
    CollectionSpec,
    FieldSelection,
    Inference,
    MaterializationBinding,
    Projection,
    StringInference,
)
from penstock.sdk import Documents, Keys, batches
from penstock.sdk.bindings import bind

TYPES = {
    "boolean": Inference(("boolean",)),
    "bytes": Inference(("string",), StringInference(is_base64=True)),
    "integer": Inference(("integer",)),
    "json": Inference(("object", "string", "number")),
    "number": Inference(("number",)),
    "string": Inference(("string",)),
}


def documents(*rows, values=tuple(TYPES), docs=None) -> Documents:
    """Return documents with `rows` as values. The key is the row number."""
    projections = [Projection("/id", "id", inference=TYPES["integer"]), Projection("", "doc")]
    projections += [Projection(f"/{name}", name, inference=TYPES[name]) for name in TYPES]
    collection = CollectionSpec("c", ("/id",), tuple(projections))
    selection = FieldSelection(("id",), tuple(values), "doc")
    return Documents(
        bind(0, MaterializationBinding("{}", ("things",), collection, selection), None),
        pa.array([pack_row((number,)) for number in range(len(rows))], pa.binary()),
        pa.array([row if isinstance(row, bytes) else pack_row(row) for row in rows], pa.binary()),
        pa.array(docs or [b"{}"] * len(rows), pa.binary()),
        pa.array([False] * len(rows)),
        None,
    )


def column(batch: Documents, name: str) -> list:
    names = [field.name for field in batch.binding.fields]
    return batch.columns()[names.index(name)].to_pylist()


# Numbers outside the range of the column type.

integers = st.integers(-(2**70), 2**70)
numbers = st.one_of(st.floats(), integers, st.sampled_from([2**53 + 1, 10**400, -(10**400)]))


@given(st.lists(st.none() | numbers, min_size=1, max_size=12), st.integers(1, 3))
def test_columns_of_numbers_are_exact(values, slow_rows):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batches, "SLOW_ROWS", slow_rows)
        found = column(documents(*((each,) for each in values), values=["number"]), "number")
    assert [comparable(each) for each in found] == [comparable(each) for each in values]


def comparable(number) -> str | None:
    """Return a value that is equal for equal numbers, as number or text, and exact for doubles."""
    if isinstance(number, str):
        number = int(number) if number.lstrip("-").isdigit() else float(number)
    if number is None or (isinstance(number, float) and not math.isfinite(number)):
        return repr(number)
    if isinstance(number, float) and number == 0:
        return "0" if math.copysign(1, number) > 0 else "-0"
    return str(int(number)) if int(number) == number else repr(number)


@given(st.lists(st.none() | integers, min_size=1, max_size=12))
def test_columns_of_integers_are_exact(values):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batches, "SLOW_ROWS", 2)
        found = column(documents(*((each,) for each in values), values=["integer"]), "integer")
    assert [None if each is None else int(each) for each in found] == values


@given(
    st.lists(
        st.none() | integers | st.floats(-1e30, 1e30).map(lambda each: float(round(each))),
        min_size=1,
        max_size=12,
    )
)
def test_integral_double_in_integer_field_is_accepted(values):
    batch = documents(*((each,) for each in values), values=["integer"])
    found = batch.columns()[1]
    assert [None if each is None else int(each) for each in found.to_pylist()] == values
    fit = all(each is None or -(2**63) <= each < 2**63 for each in values)
    assert found.type == (pa.int64() if fit else pa.string())


def test_only_rows_near_exceptional_value_are_unpacked_singly(monkeypatch):
    slow: list[int] = []

    def counted(packed, *rest, real=batches._slow_columns):
        slow.append(len(packed))
        return real(packed, *rest)

    monkeypatch.setattr(batches, "_slow_columns", counted)
    values = [(n / 2, f"text {n}") for n in range(20_000)]
    values[12_345] = (2**53 + 1, "text 12345")
    batch = documents(*values, values=["number", "string"])
    assert sum(slow) == 0
    found = column(batch, "number")
    assert 0 < sum(slow) <= batches.SLOW_ROWS
    assert found[12_345] == str(2**53 + 1)
    assert [float(each) for each in found[:12_345]] == [n / 2 for n in range(12_345)]
    assert column(batch, "string") == [text for _, text in values]


# Invalid values.


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("number", Float32(1.5), '"number" is a 32-bit float'),
        ("number", True, '"number" is a bool'),
        ("number", "1", '"number" is text'),
        ("integer", b"1", '"integer" is bytes'),
        ("integer", 1.5, '"integer" is a 64-bit float'),
        ("integer", math.inf, '"integer" is a 64-bit float'),
        ("integer", math.nan, '"integer" is a 64-bit float'),
        ("integer", (1, 2), '"integer" is a nested tuple'),
        ("json", Float32(1.5), '"json" is a 32-bit float'),
        ("json", b"\xff", '"json" is not UTF-8'),
        ("boolean", 1, '"boolean" is an integer'),
        ("string", 1.5, '"string" is a 64-bit float'),
        ("bytes", 7, '"bytes" is an integer'),
        ("bytes", "ü", '"bytes" is not base64'),
        ("bytes", "abc", '"bytes" is not base64'),
    ],
)
def test_value_of_wrong_kind_is_reported_with_row(name, value, says):
    good = {"number": 1.5, "integer": 1, "json": b"{}", "boolean": True, "string": "a"}
    good["bytes"] = base64.b64encode(b"abc").decode()
    rows = [(good[name],)] * 700
    batch = documents(*rows, (value,), values=[name])
    with pytest.raises(RemoteProtocolError) as caught:
        batch.columns()
    assert str(caught.value).startswith(f"values of things, row 700: {says}")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ((1,), "1 elements, not 2"),
        ((1, 2, 3), "3 elements, not 2"),
        (b"", "0 elements, not 2"),
        (b"\x15\x01\x21\0", "element 1 of the packed tuple is malformed"),
        (b"\xfe", "element 0 of the packed tuple is malformed"),
    ],
    ids=["fewer", "more", "none", "cut off", "no type"],
)
def test_invalid_tuple_is_reported_with_row(row, says):
    batch = documents((1, 1.5), row, values=["integer", "number"])
    for unpacked in (batch.columns, batch.rows):
        with pytest.raises(RemoteProtocolError) as caught:
            unpacked()
        assert str(caught.value) == f"values of things, row 1: {says}"
    keys = Keys(batch.binding, batch.packed_values)
    for unpacked in (keys.columns, keys.rows):
        with pytest.raises(RemoteProtocolError, match="keys of things, row"):
            unpacked()


def test_values_without_fields_are_rejected():
    with pytest.raises(RemoteProtocolError, match="values of things, row 0: 1 elements, not 0"):
        documents((1,), values=[]).columns()
    assert documents((), values=[]).rows() == [(0, {})]


@pytest.mark.parametrize("text", [b"{", b"[" * 100_000, b"\xff"], ids=["cut off", "deep", "bytes"])
def test_invalid_document_is_reported_with_row(text):
    batch = documents((), (), values=[], docs=[b"{}", text])
    with pytest.raises(
        RemoteProtocolError, match="documents of things, row 1: document is not JSON"
    ):
        batch.rows()
