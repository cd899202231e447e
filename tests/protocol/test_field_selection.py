"""Field selection, with the cases of Flow of our protocol version."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.protocol.field_selection import FieldPreferences, select_fields
from penstock.protocol.specs import (
    CollectionSpec,
    Constraint,
    ConstraintType,
    Inference,
    Projection,
)
from tests.protocol.vectors import cases, name


def collection(fields: dict[str, str], *explicit: str) -> CollectionSpec:
    projections = [Projection(ptr, field, field in explicit) for field, ptr in fields.items()]
    return CollectionSpec("a/b", ("/k",), tuple(projections))


ERRORS = {
    "selector includes field, but driver forbids it": "is included, but the connector forbids it",
    "selector excludes field, but driver requires it": "is excluded, but the connector requires it",
    "driver sent constraint for unknown field": "which the collection does not have",
    "LocationUnsatisfiable": "is required, but none of its fields is selected",
}


@pytest.mark.parametrize("case", cases("field_selection"), ids=name)
def test_select_fields_equals_flow(case):
    if case["era"].startswith("2025"):
        pytest.skip("a later protocol version with other rules")
    given_case = case["input"]
    if "rule" in given_case:
        pytest.skip("covered by test_select_fields_orders_keys_and_values")
    constraints = {
        field: Constraint(ConstraintType[kind], "why")
        for field, kind in given_case.get("constraints", {}).items()
    }
    fields = {
        field: "" if field == "doc" else f"/{field}" for field in constraints if field != "ghost"
    }
    explicit = []
    if "projections" in given_case:
        fields = {entry["field"]: entry["ptr"] for entry in given_case["projections"]}
        explicit = [entry["field"] for entry in given_case["projections"] if entry["explicit"]]
    preferences = FieldPreferences(
        given_case.get("include", ()),
        given_case.get("exclude", ()),
        given_case.get("recommended", True),
    )
    if "error" in case["expect"]:
        with pytest.raises(UsageError) as caught:
            select_fields(collection(fields, *explicit), constraints, preferences)
        assert ERRORS[case["expect"]["error"]] in caught.value.detail
    else:
        selection = select_fields(collection(fields, *explicit), constraints, preferences)
        assert sorted(selection.fields) == sorted(case["expect"]["selected"])


def test_select_fields_orders_keys_and_values():
    """Keys are in key order, values by name. A second root projection is a value."""
    spec = CollectionSpec(
        "a/b",
        ("/y", "/x"),
        (
            Projection("", "doc"),
            Projection("", "also", explicit=True),
            Projection("/x", "x"),
            Projection("/y", "y"),
            Projection("/z", "z"),
            Projection("/w", "w"),
        ),
    )
    required = Constraint(ConstraintType.FIELD_REQUIRED)
    selection = select_fields(
        spec, {projection.field: required for projection in spec.projections}, FieldPreferences()
    )
    assert selection.keys == ("y", "x")
    assert selection.document == "also"
    assert selection.values == ("doc", "w", "z")


kinds = st.sampled_from(ConstraintType)


@given(
    constraints=st.dictionaries(st.sampled_from("abcdef"), kinds),
    include=st.sets(st.sampled_from("abcdef"), max_size=2),
    exclude=st.sets(st.sampled_from("abcdef"), max_size=2),
    recommended=st.booleans(),
)
def test_select_fields_satisfies_constraints_and_preferences(
    constraints, include, exclude, recommended
):
    """Three locations have two fields each, and some fields are explicit."""
    fields = {field: f"/{'kxy'[index // 2]}" for index, field in enumerate("abcdef")}
    spec = collection(fields, "b", "e")
    proposed = {field: Constraint(kind) for field, kind in constraints.items()}
    try:
        selection = select_fields(spec, proposed, FieldPreferences(include, exclude, recommended))
    except UsageError:
        return
    taken = set(selection.fields)
    assert include <= taken
    assert not taken & exclude
    forbidden = ConstraintType.FIELD_FORBIDDEN
    for field in taken:
        assert constraints.get(field, forbidden) is not forbidden
    locations = [fields[field] for field in taken]
    for field, kind in constraints.items():
        assert kind is not ConstraintType.UNSATISFIABLE
        if kind is ConstraintType.FIELD_REQUIRED:
            assert field in taken
        if kind is ConstraintType.LOCATION_REQUIRED:
            assert fields[field] in locations
        if kind is ConstraintType.FIELD_OPTIONAL:
            assert (field in taken) is (field in include)
        if kind is ConstraintType.LOCATION_RECOMMENDED and not recommended:
            assert (field in taken) is (field in include)


@pytest.mark.parametrize("case", cases("single_scalar_type"), ids=name)
def test_single_scalar_equals_flow(case):
    selection = Inference(tuple(case["input"]["types"])).single_scalar
    assert selection is case["expect"]["single_scalar"]
