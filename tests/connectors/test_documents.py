"""Assembly of documents from columns returns the stored document."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.specs import FieldSelection, MaterializationBinding, Projection
from penstock.sdk.bindings import Binding, bind
from penstock.sdk.sql.document_columns import Assembly
from tests.connectors.connector_client import collection, projection

ID = projection("id", "integer", must=True)


def bound(*values: Projection, keys: tuple[Projection, ...] = (ID,)) -> Binding[Any]:
    """A binding without the whole document; its fields are in the order given."""
    spec = collection(*keys, *values, key=[each.ptr for each in keys])
    names = tuple(each.field for each in values)
    selection = FieldSelection(tuple(each.field for each in keys), names)
    return bind(0, MaterializationBinding("{}", ("t",), spec, selection), None)


def assembled(binding: Binding[Any], *rows: tuple[Any, ...]) -> list[Any]:
    docs = Assembly(binding).documents([*zip(*rows, strict=True)])
    return [json.loads(doc) for doc in docs.to_pylist()]


FIELDS = {
    "s": (projection("s", "string"), st.text() | st.just('{,"\\')),
    "t": (projection("t", "string", must=True, ptr="/in/t"), st.text()),
    "u": (projection("u", "string", ptr="/in/u"), st.text() | st.just("{,")),
    "v": (projection("v", "integer", ptr="/deep/er/v"), st.integers(-(2**70), 2**70)),
    "w": (projection("w", "integer", ptr="/deep/w"), st.integers(-9, 9)),
    "o": (projection("o", "boolean", ptr="/od~1d~0"), st.sampled_from([0, 1])),
}


@given(st.lists(st.fixed_dictionaries({}, optional={n: v for n, (_, v) in FIELDS.items()})))
def test_assembled_document_omits_null_fields(rows):
    binding = bound(*(each for each, _ in FIELDS.values()))
    found = [(at, *(row.get(name) for name in FIELDS)) for at, row in enumerate(rows)]
    if not found:
        return
    for at, (row, doc) in enumerate(zip(rows, assembled(binding, *found), strict=True)):
        expected: dict[str, Any] = {"id": at}
        for name, value in row.items():
            *parents, last = FIELDS[name][0].ptr.replace("od~1d~0", "o").split("/")[1:]
            node = expected
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
        if "o" in expected:
            expected["od/d~"] = bool(expected.pop("o"))
        assert json.dumps(doc, sort_keys=True) == json.dumps(expected, sort_keys=True)


A = projection("a", "object")
B = projection("b", "integer", ptr="/a/b", must=True)


@pytest.mark.parametrize("values", [(A, B), (B, A)], ids=["outer first", "inner first"])
def test_assembled_document_takes_nested_field_from_outer_object(values):
    whole = {"a": '{"b":1,"c":[2]}', "b": 1}
    rows = [(1, *(whole[each.field] for each in values))]
    assert assembled(bound(*values), *rows) == [{"id": 1, "a": {"b": 1, "c": [2]}}]


def test_assembled_document_has_nested_key_with_or_without_object_value():
    binding = bound(A, keys=(B,))
    # The second row was stored before the object was selected.
    rows = [(1, '{"b":1,"c":2}'), (3, None)]
    assert assembled(binding, *rows) == [{"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}]


def test_assembled_document_keeps_fraction_in_integer_field():
    binding = bound(projection("i", "integer"))
    assert assembled(binding, (1, 5.5), (2, 7)) == [{"id": 1, "i": 5.5}, {"id": 2, "i": 7}]
    assert assembled(binding, (1, 5.5), (2, 7), (3, None), (4, str(2**64))) == [
        {"id": 1, "i": 5.5},
        {"id": 2, "i": 7},
        {"id": 3},
        {"id": 4, "i": 2**64},
    ]


def test_assembled_document_keeps_null_in_nullable_fields():
    binding = bound(projection("s", "string", "null"), projection("i", "integer", "null", ptr="/a"))
    assert assembled(binding, (1, None, 5), (2, "x", None)) == [
        {"id": 1, "s": None, "a": 5},
        {"id": 2, "s": "x", "a": None},
    ]


def test_assembled_document_equals_root_document_field():
    binding = bound(projection("whole", "object", ptr=""), projection("s", "string"))
    rows = [(1, '{"id":1,"s":"a","more":[2]}', "a"), (2, None, "b")]
    assert assembled(binding, *rows) == [{"id": 1, "s": "a", "more": [2]}, {"id": 2, "s": "b"}]
