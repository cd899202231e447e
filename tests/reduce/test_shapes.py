"""The union of two schemas accepts the values of both."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.reduce.annotation import Schema
from penstock.reduce.document import rank
from penstock.reduce.shapes import MOST_PROPERTIES, Unmergeable, union
from tests.reduce.documents import VALUES


def inferred(value: Any) -> dict[str, Any]:
    """Return a schema of plain shape that accepts `value` and little else."""
    match value:
        case None:
            return {"type": "null"}
        case bool():
            return {"type": "boolean"}
        case str():
            return {"type": "string", "minLength": len(value), "maxLength": len(value)}
        case list():
            size = {"minItems": len(value), "maxItems": len(value)}
            items = [inferred(item) for item in value]
            return {"type": "array", **size, "items": items, "additionalItems": False}
        case dict():
            return {
                "type": "object",
                "properties": {name: inferred(inner) for name, inner in value.items()},
                "required": sorted(value),
                "additionalProperties": False,
            }
        case _:
            return {"type": "number", "minimum": value, "maximum": value}


SHAPES = st.one_of(
    VALUES.map(inferred),
    st.just({}),
    st.sampled_from([{"enum": [1, 2]}, {"const": 2}, {"type": "string", "format": "date"}]),
    st.sampled_from([{"type": "object", "properties": {"a": True}}, {"items": {"type": "null"}}]),
)


@given(VALUES, VALUES, SHAPES)
def test_union_accepts_values_of_both_schemas(one: Any, other: Any, shape: dict[str, Any]):
    both = union(union(inferred(one), inferred(other)), shape)
    assert Schema(both).visit(one) is not None
    assert Schema(both).visit(other) is not None


@given(SHAPES, SHAPES, SHAPES)
def test_union_is_associative(a: Any, b: Any, c: Any):
    assert rank(union(union(a, b), c)) == rank(union(a, union(b, c)))


@given(SHAPES, SHAPES)
def test_union_is_idempotent(a: Any, b: Any):
    made = union(a, b)
    assert rank(union(made, made)) == rank(made)
    assert rank(union(made, a)) == rank(made)


def test_union_with_too_many_properties_is_a_map():
    many = inferred({f"id-{i}": i for i in range(MOST_PROPERTIES)})
    assert len(union(many, many)["properties"]) == MOST_PROPERTIES
    made = union(many, inferred({"one more": MOST_PROPERTIES}))
    assert "properties" not in made
    assert made["additionalProperties"]["type"] == "number"
    assert made["additionalProperties"]["maximum"] == MOST_PROPERTIES


@pytest.mark.parametrize(
    "schema",
    [{"anyOf": []}, {"properties": {"a": {"$ref": "#"}}}, {"items": [1]}, {"required": 1}],
    ids=str,
)
def test_union_of_unsupported_schema_raises(schema: dict[str, Any]):
    with pytest.raises(Unmergeable):
        union({}, schema)
