"""Inference from a schema holds for every document that matches it."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.protocol.specs import Exists, Inference, StringInference
from penstock.reduce.annotation import Schema
from penstock.reduce.document import ABSENT, find, parse_pointer, show_pointer
from penstock.reduce.inference import MOST_LOCATIONS, Outline

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "vectors" / "flow.json").read_text())[
        "cases"
    ]
    if case["kind"] == "schema_inference"
}

NAMES = st.sampled_from(["a", "b", "0"])
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
VALUES = st.sampled_from([None, True, 0, 1, 1.5, 2.0, "", "ab", {}, [], {"a": 1}, [0]])
LEAVES = st.one_of(
    st.booleans(),
    st.builds(lambda names: {"type": names}, st.lists(st.sampled_from(TYPES), min_size=1)),
    st.sampled_from(TYPES).map(lambda name: {"type": name}),
    st.builds(lambda value: {"const": value}, VALUES),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=3)),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=2)
    # Only below the root: a schema that refers to itself for the same value states nothing.
    by_name = st.dictionaries(NAMES, inner | st.just({"$ref": "#"}), max_size=2)
    counts = st.integers(0, 2)
    objects = st.fixed_dictionaries(
        {"properties": by_name},
        optional={
            "type": st.just("object"),
            "required": st.lists(NAMES, max_size=2),
            "patternProperties": st.dictionaries(st.sampled_from(["a|0", "^b"]), inner, max_size=1),
            "additionalProperties": inner,
        },
    )
    arrays = st.fixed_dictionaries(
        {"items": st.one_of(inner, some)},
        optional={
            "type": st.just("array"),
            "additionalItems": inner,
            "minItems": counts,
            "maxItems": counts,
        },
    )
    joined = st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array", ["object", "array", "null"]]),
            "allOf": some,
            "anyOf": some,
            "oneOf": some,
            "$ref": st.just("#/$defs/shared"),
            "required": st.lists(NAMES, max_size=2),
            "minItems": counts,
        },
    )
    conditions = st.fixed_dictionaries(
        {"if": inner},
        optional={
            "then": inner,
            "else": inner,
            "not": inner,
            "dependentSchemas": st.dictionaries(NAMES, inner, max_size=1),
        },
    )
    return st.one_of(objects, arrays, joined, conditions)


SCHEMAS = st.builds(
    lambda root, shared: {**root, "$defs": {"shared": shared}},
    containers(st.recursive(LEAVES, containers, max_leaves=6)),
    LEAVES,
)
DOCUMENTS = st.recursive(
    st.sampled_from([None, True, 0, 1, 1.5, 2.0, "", "ab"]),
    lambda inner: st.one_of(st.dictionaries(NAMES, inner, max_size=3), st.lists(inner, max_size=3)),
    max_leaves=8,
)
POINTERS = [
    show_pointer(tokens)
    for depth in range(4)
    for tokens in product(("a", "b", "0", "1", "-")[: 5 - depth], repeat=depth)
]


def types_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int() | float():
            return {"integer", "number"} if value == int(value) else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


@given(SCHEMAS, st.lists(DOCUMENTS, min_size=5, max_size=10))
def test_inference_holds_for_matching_documents(schema: Any, documents: list[Any]):
    matching = [document for document in documents if Schema(schema).visit(document) is not None]
    event("documents match" if matching else "none matches")
    outline = Outline(schema)
    for pointer in POINTERS if matching else ():
        inferred = outline.locate(pointer)
        event(inferred.exists.name)
        for document in matching:
            value = find(document, parse_pointer(pointer, what=pointer))
            if value is ABSENT:
                assert inferred.exists is not Exists.MUST, pointer
            else:
                assert inferred.exists is not Exists.CANNOT, pointer
                assert types_of(value) & {*inferred.types}, pointer


@given(SCHEMAS)
def test_locations_agree_with_locate(schema: Any):
    outline = Outline(schema)
    listed = outline.locations()
    assert len(dict(listed)) == len(listed)
    for pointer, inferred in listed:
        assert inferred == outline.locate(pointer)
        assert inferred.exists in (Exists.MUST, Exists.MAY)


@pytest.mark.parametrize("id", sorted(CASES))
def test_existence_equals_flow(id: str):
    case = CASES[id]
    inferred = Outline(case["input"]["schema"]).locate(case["input"]["ptr"])
    assert inferred.exists.name == case["expect"]["exists"]


def test_item_below_min_items_must_exist():
    schema = CASES["infer-14"]["input"]["schema"]
    outline = Outline(schema)
    assert [outline.locate(f"/{n}").exists.name for n in (0, 1, 2, 9)] == [
        *("MUST", "MUST", "MAY", "MAY")
    ]


def test_integer_or_number_is_inferred_as_number():
    assert Outline({"type": ["integer", "number"]}).locate("").types == ("number",)
    both = {"allOf": [{"type": "integer"}, {"type": ["number", "null"]}]}
    assert Outline(both).locate("").types == ("integer",)
    assert Outline({"enum": [1, 2.0]}).locate("").types == ("integer",)
    assert Outline({"enum": [1, 2.5]}).locate("").types == ("number",)


def test_annotations_of_several_schemas_are_merged():
    schema = {
        "allOf": [{"type": "object"}, {"required": ["a"]}],
        "properties": {"a": {"$ref": "#/$defs/day", "title": "Day"}},
        "$defs": {
            "day": {
                "title": "Any day",
                "description": "When",
                "default": "2020-01-01",
                "oneOf": [
                    {"type": "string", "format": "date", "maxLength": 10},
                    {"type": "string", "format": "date", "maxLength": 12},
                    {"type": "null"},
                ],
            }
        },
    }
    assert Outline(schema).locate("/a") == Inference(
        types=("null", "string"),
        string=StringInference(format="date", max_length=12),
        title="Day",
        description="When",
        default_json='"2020-01-01"',
        exists=Exists.MUST,
    )


def test_excluded_alternative_does_not_affect_nested_location():
    schema = {"oneOf": [{"type": "object", "required": ["a"]}, {"type": "string"}]}
    assert Outline(schema).locate("/a").exists is Exists.MAY
    assert Outline({**schema, "type": "object"}).locate("/a").exists is Exists.MUST


def test_location_required_by_one_alternative_may_exist():
    schema = {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    assert Outline(schema).locate("/a").exists is Exists.MAY


def test_declared_property_ignores_additional_properties():
    schema = {"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    assert Outline(schema).locate("/a").types == ("string",)
    assert Outline(schema).locate("/b").types == ("integer",)


def test_base64_encoding_is_inferred():
    string = Outline({"type": "string", "contentEncoding": "base64"}).locate("").string
    assert string == StringInference(is_base64=True, content_encoding="base64")


def test_locations_lists_named_locations():
    schema = {
        "type": "object",
        "required": ["id", "undeclared"],
        "properties": {
            "id": {"type": "integer"},
            "a/b": {"properties": {"in~side": True}},
            "list": {"type": "array", "items": {"properties": {"x": True}}},
            "never": False,
            "text": {"type": "string", "properties": {"nor this": True}},
        },
        "patternProperties": {"^p": {"type": "string"}},
        "additionalProperties": {"type": "number"},
        "anyOf": [{"properties": {"id": True, "extra": True}}, True],
    }
    assert [pointer for pointer, _ in Outline(schema).locations()] == [
        *("", "/id", "/a~1b", "/a~1b/in~0side", "/list", "/text", "/undeclared", "/extra")
    ]


def test_locations_of_recursive_schema_stop_at_recursion():
    tree = {"properties": {"value": {"type": "integer"}, "left": {"$ref": "#"}}}
    assert [pointer for pointer, _ in Outline(tree).locations()] == ["", "/value", "/left"]
    assert Outline(tree).locate("/left/left/value").types == ("integer",)


def test_locations_follow_shared_schema_at_each_use():
    schema = {
        "$ref": "#/$defs/stamped",
        "properties": {"line": {"$ref": "#/$defs/stamped"}},
        "$defs": {"stamped": {"properties": {"at": {"type": "string"}}}},
    }
    pointers = [pointer for pointer, _ in Outline(schema).locations()]
    assert pointers == ["", "/line", "/line/at", "/at"]


def test_locations_beyond_limit_raise_usage_error():
    schema = {"properties": {str(n): True for n in range(MOST_LOCATIONS)}}
    with pytest.raises(UsageError, match=r"^JSON schema has more than 10000 locations"):
        Outline(schema).locations()
