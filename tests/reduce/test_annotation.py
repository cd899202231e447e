"""Validation against a schema, keyword by keyword, and the explanation of a mismatch."""

from decimal import Decimal
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.reduce.annotation import Schema
from penstock.reduce.assertion import ASSERTIONS
from penstock.reduce.keywords import _LISTED, _NAMED, _ONE

KEYWORDS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "type": ({"type": ["integer", "null"]}, [1, Decimal("1.0"), 2.0, None], [1.5, "1", True, {}]),
    "const": ({"const": {"a": [1]}}, [{"a": [Decimal("1.0")]}], [{"a": [True]}, {"a": []}]),
    "enum": ({"enum": [1, 0.1, None]}, [1, Decimal("0.10"), 0.1, None], [True, "1", 0]),
    "minimum": ({"minimum": 2**64}, [2**64, "no number"], [2**64 - 1, Decimal("0.1")]),
    "maximum": ({"maximum": 0.1}, [Decimal("0.1"), 0], [Decimal("0.10000000000000000001")]),
    "exclusiveMinimum": ({"exclusiveMinimum": 0}, [Decimal("1E-30")], [0, Decimal("-0.0")]),
    "exclusiveMaximum": ({"exclusiveMaximum": 0}, [-1], [0]),
    "multipleOf": ({"multipleOf": 0.1}, [Decimal("0.3"), 7, 10**40, "x"], [Decimal("0.35")]),
    "minLength": ({"minLength": 2}, ["äö", 1], ["ä"]),
    "maxLength": ({"maxLength": 1}, ["💧", [1, 2]], ["ab"]),
    "pattern": ({"pattern": "^a+$"}, ["aa", 1], ["aa\n", "ba"]),
    "minItems": ({"minItems": 1}, [[1], {}], [[]]),
    "maxItems": ({"maxItems": 1}, [[1], "ab"], [[1, 2]]),
    "uniqueItems": ({"uniqueItems": True}, [[1, True, "1"], "aa"], [[1, Decimal("1.0")]]),
    "minProperties": ({"minProperties": 1}, [{"a": 1}, []], [{}]),
    "maxProperties": ({"maxProperties": 1}, [{"a": 1}], [{"a": 1, "b": 1}]),
    "required": ({"required": ["a"]}, [{"a": None}, []], [{"b": 1}]),
    "dependentRequired": (
        {"dependentRequired": {"a": ["b"]}},
        [{"a": 1, "b": 1}, {"c": 1}],
        [{"a": 1}],
    ),
    "allOf": ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, [1, 2], [0, 3]),
    "anyOf": ({"anyOf": [{"maximum": 1}, {"minimum": 3}]}, [1, 3], [2]),
    "oneOf": ({"oneOf": [{"maximum": 2}, {"minimum": 2}]}, [1, 3], [2]),
    "not": ({"not": {"type": "string"}}, [1], ["a"]),
    "if": ({"if": {"minimum": 5}}, [1, 9], []),
    "then": ({"if": {"minimum": 5}, "then": {"maximum": 6}}, [1, 5], [7]),
    "else": ({"if": {"minimum": 5}, "else": {"maximum": 3}}, [3, 9], [4]),
    "dependentSchemas": (
        {"dependentSchemas": {"a": {"required": ["b"]}}},
        [{"a": 1, "b": 1}, {}, "a"],
        [{"a": 1}],
    ),
    "properties": ({"properties": {"a": {"type": "null"}}}, [{"a": None, "b": 1}], [{"a": 1}]),
    "patternProperties": (
        {"patternProperties": {"^a": {"type": "null"}, "b$": {"type": "null"}}},
        [{"a": None, "c": 1}],
        [{"ax": 1}, {"xb": 1}],
    ),
    "additionalProperties": (
        {
            "properties": {"a": True},
            "patternProperties": {"^b": True},
            "additionalProperties": False,
        },
        [{"a": 1, "b": 1}, []],
        [{"c": 1}],
    ),
    "propertyNames": ({"propertyNames": {"maxLength": 1}}, [{"a": 1}, "ab"], [{"ab": 1}]),
    "prefixItems": ({"prefixItems": [{"type": "null"}]}, [[], [None, 1], {}], [[1]]),
    "items": ({"prefixItems": [True], "items": {"type": "null"}}, [[1], [1, None]], [[1, 1]]),
    "additionalItems": (
        {"items": [True], "additionalItems": {"type": "null"}},
        [[1], [1, None]],
        [[1, 1]],
    ),
    "contains": (
        {"contains": {"minimum": 5}, "minContains": 2, "maxContains": 3},
        [[5, 6, 1], [5, 6, 7], {}],
        [[5, 1], [5, 6, 7, 8]],
    ),
    "$defs": ({"$defs": {"a": {"type": "null"}}, "$ref": "#/$defs/a"}, [None], [1]),
    "definitions": (
        {"definitions": {"a/b": {"type": "null"}}, "$ref": "#/definitions/a~1b"},
        [None],
        [1],
    ),
}


def test_every_supported_keyword_has_a_case():
    assert KEYWORDS.keys() == {*ASSERTIONS, *_ONE, *_LISTED, *_NAMED}


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_keyword_accepts_matching_values_only(keyword: str):
    schema, matching, others = KEYWORDS[keyword]
    compiled = Schema(schema)
    assert [value for value in matching if compiled.visit(value) is None] == []
    assert [value for value in others if compiled.visit(value) is not None] == []
    for value in others:
        failure = compiled.explain(value)
        assert failure.keyword.startswith("#/")
        assert compiled.explain(value) == failure


def test_boolean_schema_accepts_or_rejects_everything():
    assert Schema(True).visit(1) is not None
    assert Schema(False).visit(1) is None
    assert Schema(False).explain(1).keyword == "#"


TREE = {
    "$id": "https://example.com/tree",
    "type": "object",
    "properties": {"value": {"type": "integer"}, "nodes": {"items": {"$ref": "tree"}}},
    "required": ["value"],
}


def test_recursive_schema_reports_nested_location():
    tree = Schema(TREE)
    good = {"value": 1, "nodes": [{"value": 2, "nodes": [{"value": 3}]}]}
    assert tree.visit(good) is not None
    bad = {"value": 1, "nodes": [{"value": 2, "nodes": [{"value": 3}, {"value": "x"}]}]}
    assert tree.visit(bad) is None
    failure = tree.explain(bad)
    assert failure.location == "/nodes/0/nodes/1/value"
    assert failure.keyword == "#/properties/value/type"
    assert failure.found == "a string"


def test_explain_ignores_failures_of_branches_not_taken():
    schema = Schema(
        {
            "anyOf": [{"properties": {"a": {"type": "string"}}}, True],
            "not": {"required": ["z"]},
            "if": {"properties": {"a": {"type": "string"}}},
            "properties": {"~/": {"items": {"minimum": 1}}},
        }
    )
    failure = schema.explain({"a": 1, "~/": [1, 0]})
    assert failure.location == "/~0~1/1"
    assert failure.keyword == "#/properties/~//items/minimum"


def test_embedded_resource_resolves_its_own_pointers():
    schema = Schema(
        {
            "$id": "https://example.com/root",
            "$defs": {
                "inner": {
                    "$id": "inner",
                    "$defs": {"text": {"$anchor": "text", "type": "string"}},
                    "$ref": "#/$defs/text",
                }
            },
            "properties": {"a": {"$ref": "inner"}, "b": {"$ref": "inner#text"}},
        }
    )
    assert schema.visit({"a": "x", "b": "x"}) is not None
    assert schema.visit({"a": 1}) is None
    assert schema.visit({"b": 1}) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"required": "a"},
        {"enum": 1},
        {"minimum": "1"},
        {"multipleOf": 0},
        {"uniqueItems": 1},
        {"dependentRequired": ["a"]},
        {"pattern": 1},
        {"properties": []},
        {"allOf": {}},
        {"prefixItems": {}},
        {"contains": True, "minContains": "x"},
        {"$ref": 1},
        {"items": 1},
        [],
    ],
    ids=str,
)
def test_invalid_schema_raises_usage_error(schema: Any):
    with pytest.raises(UsageError):
        Schema(schema)
