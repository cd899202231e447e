"""Which fields are taken: the cases of Flow's, of the generation that is ours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.protocol.field_selection import Wish, select_fields
from penstock.protocol.specs import (
    CollectionSpec,
    Constraint,
    ConstraintType,
    Inference,
    Projection,
)
from tests.protocol.vectors import cases, name


def collection(fields: dict[str, str], *explicit: str) -> CollectionSpec:
    projections = [Projection(ptr, each, each in explicit) for each, ptr in fields.items()]
    return CollectionSpec("a/b", ("/k",), tuple(projections))


ERRORS = {
    "selector includes field, but driver forbids it": "is included, but the connector forbids it",
    "selector excludes field, but driver requires it": "is excluded, but the connector requires it",
    "driver sent constraint for unknown field": "which the collection does not have",
    "LocationUnsatisfiable": "is required, and none of its fields is left",
}


@pytest.mark.parametrize("case", cases("field_selection"), ids=name)
def test_cases_of_flow(case):
    if case["era"].startswith("2025"):
        pytest.skip("of a later generation, whose selection is another")
    said = case["input"]
    if "rule" in said:
        pytest.skip("a rule, which test_how_fields_are_arranged tests")
    constraints = {
        field: Constraint(ConstraintType[kind], "why")
        for field, kind in said.get("constraints", {}).items()
    }
    fields = {each: "" if each == "doc" else f"/{each}" for each in constraints if each != "ghost"}
    explicit = []
    if "projections" in said:
        fields = {each["field"]: each["ptr"] for each in said["projections"]}
        explicit = [each["field"] for each in said["projections"] if each["explicit"]]
    wish = Wish(said.get("include", ()), said.get("exclude", ()), said.get("recommended", True))
    if "error" in case["expect"]:
        with pytest.raises(UsageError) as caught:
            select_fields(collection(fields, *explicit), constraints, wish)
        assert ERRORS[case["expect"]["error"]] in caught.value.detail
    else:
        found = select_fields(collection(fields, *explicit), constraints, wish)
        assert sorted(found.fields) == sorted(case["expect"]["selected"])


def test_how_fields_are_arranged():
    """Keys in the order of the key, values by name, one document; another root is a value."""
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
    found = select_fields(spec, {each.field: required for each in spec.projections}, Wish())
    assert found.keys == ("y", "x")
    assert found.document == "also"
    assert found.values == ("doc", "w", "z")


kinds = st.sampled_from(ConstraintType)


@given(
    constraints=st.dictionaries(st.sampled_from("abcdef"), kinds),
    include=st.sets(st.sampled_from("abcdef"), max_size=2),
    exclude=st.sets(st.sampled_from("abcdef"), max_size=2),
    recommended=st.booleans(),
)
def test_what_is_selected_is_what_was_asked(constraints, include, exclude, recommended):
    """Two fields each of three locations, some of them named by a person."""
    fields = {each: f"/{'kxy'[index // 2]}" for index, each in enumerate("abcdef")}
    spec = collection(fields, "b", "e")
    asked = {each: Constraint(kind) for each, kind in constraints.items()}
    try:
        found = select_fields(spec, asked, Wish(include, exclude, recommended))
    except UsageError:
        return
    taken = set(found.fields)
    assert include <= taken
    assert not taken & exclude
    forbidden = ConstraintType.FIELD_FORBIDDEN
    for each in taken:
        assert constraints.get(each, forbidden) is not forbidden
    locations = [fields[each] for each in taken]
    for each, kind in constraints.items():
        assert kind is not ConstraintType.UNSATISFIABLE
        if kind is ConstraintType.FIELD_REQUIRED:
            assert each in taken
        if kind is ConstraintType.LOCATION_REQUIRED:
            assert fields[each] in locations
        if kind is ConstraintType.FIELD_OPTIONAL:
            assert (each in taken) is (each in include)
        if kind is ConstraintType.LOCATION_RECOMMENDED and not recommended:
            assert (each in taken) is (each in include)


@pytest.mark.parametrize("case", cases("single_scalar_type"), ids=name)
def test_whether_a_type_is_a_single_scalar(case):
    found = Inference(tuple(case["input"]["types"])).single_scalar
    assert found is case["expect"]["single_scalar"]
