"""Packed values at JSON pointers of documents."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.packed import pack_row, unpack_row
from penstock.errors import DefiniteError
from penstock.materialize.document_fields import pack_fields
from penstock.reduce import ABSENT, decode, encode
from penstock.reduce.document import find, parse_pointer

(CASE,) = (
    case
    for case in json.loads((Path(__file__).parents[1] / "vectors" / "flow.json").read_text())[
        "cases"
    ]
    if case["kind"] == "field_extraction"
)
NAMES = st.sampled_from(["a", "b", "0", 'q"', "é", ""])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**64 - 1, 2**64, -(2**63), 10**38, -(10**60)]),
    st.decimals(allow_nan=False, allow_infinity=False, places=20, min_value=-9, max_value=9),
    st.sampled_from([Decimal("1E+2"), Decimal("-0.0"), Decimal("1.0"), Decimal("1E-400")]),
    st.text(max_size=3),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(NAMES, inner, max_size=2)),
    max_leaves=4,
)
# Columns of a single type are as frequent as columns of mixed types.
COLUMNS = st.sampled_from(
    [VALUES, st.integers(), st.text(max_size=3), st.integers() | st.just(Decimal("0.5"))]
)
DOCUMENTS = COLUMNS.flatmap(
    lambda values: st.lists(st.dictionaries(NAMES, values, max_size=4), max_size=4)
)
POINTERS = st.lists(
    st.lists(NAMES, max_size=2).map(
        lambda tokens: "".join("/" + token for token in tokens)  # No name needs an escape.
    ),
    max_size=4,
)


def element(value: Any) -> Any:
    if isinstance(value, dict | list):
        return encode(value)
    return float(value) if isinstance(value, Decimal) else value


def expected(text: bytes, pointers: list[str], defaults: dict[str, Any]) -> bytes:
    document = decode(text, what="document")
    row = []
    for pointer in pointers:
        found = find(document, parse_pointer(pointer, what=pointer))
        row.append(element(defaults.get(pointer) if found is ABSENT else found))
    return pack_row(row)


@given(
    DOCUMENTS, POINTERS, st.dictionaries(st.sampled_from(["/a", "/b/0", "/é"]), VALUES), st.data()
)
def test_packed_at_equals_exact_json_reader(
    documents: list[Any], pointers: list[str], defaults: dict[str, Any], data: st.DataObject
):
    texts = [encode(each) for each in documents]
    kind = data.draw(st.sampled_from([pa.binary(), pa.large_binary()]))
    packed = pack_fields(pa.array(texts, kind), pointers, defaults=defaults, what="document")
    assert packed.type == pa.binary()
    assert packed.to_pylist() == [expected(each, pointers, defaults) for each in texts]


@pytest.mark.parametrize(
    "text",
    [
        b'{"\\u0061": 1, "b": {"a": 2}}',
        b'{"a": 1, "a": 2, "b": 3, "b": {"a": 4}}',
        b' {\n "b" : { "a" : 1e2 } , "c": 1e999 }\t',
        b'{"a": ' + b"7" * 500 + b', "c": ' + b"1" * 5000 + b"}",
        b'["a"]',
        b"null",
    ],
    ids=["escaped", "twice", "spaced", "long", "array", "null"],
)
def test_packed_at_with_unusual_json_text_equals_exact_json_reader(text: bytes):
    pointers = ["/a", "/b/a", "/0"]
    texts = [b'{"a": 5}', text]
    packed = pack_fields(pa.array(texts), pointers, what="document")
    assert packed.to_pylist() == [expected(each, pointers, {}) for each in texts]


def test_packed_at_extracts_same_elements_as_flow():
    # Documents have no UUIDs, so their times are not extracted.
    extractors = {
        extractor: value
        for extractor, value in zip(
            CASE["input"]["extractors"], CASE["expect"]["elements"], strict=True
        )
        if " as " not in extractor
    }
    assert len(extractors) == 10
    pointers = [extractor.split(" ")[0] for extractor in extractors]
    text = json.dumps(CASE["input"]["doc"]).encode()
    packed = pack_fields(
        pa.array([text]), pointers, defaults={"/missing-default": "default"}, what="document"
    )
    assert unpack_row(packed[0].as_py()) == tuple(
        value["bytes_utf8"].encode() if isinstance(value, dict) else value
        for value in extractors.values()
    )


def test_packed_at_applies_default_to_absent_value_but_not_to_null():
    texts = pa.array([b'{"a": null}', b"{}", b'{"a": 2}'])
    packed = pack_fields(texts, ["/a"], defaults={"/a": 1}, what="document")
    assert [unpack_row(each) for each in packed.to_pylist()] == [(None,), (1,), (2,)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1', "document of c is not valid JSON"),
        (b'{"a": 1e999}', "document of c has a number that is too large for a double"),
        (b'{"a": ' + b"1" * 5000 + b"}", "document of c has a value that cannot be packed"),
    ],
    ids=["torn", "large", "long"],
)
def test_packed_at_with_invalid_document_raises_definite_error(text: bytes, message: str):
    with pytest.raises(DefiniteError, match=f"^{message}") as caught:
        pack_fields(pa.array([b'{"a": 1}', text]), ["/a"], what="document of c")
    assert caught.value.hint
