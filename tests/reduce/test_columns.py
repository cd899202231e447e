"""Aggregated columns equal the fields of reduced documents."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.reduce import ABSENT, Column, Reducer, columns_of
from penstock.reduce.document import find, parse_pointer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["id", "seen"],
    "reduce": {"strategy": "merge"},
    "properties": {
        "id": {"type": "integer"},
        "seen": {"type": ["string", "null"]},
        "last": {"type": "boolean"},
        "first": {"type": "string", "reduce": {"strategy": "firstWriteWins"}},
        "n": {"type": "integer", "reduce": {"strategy": "sum"}},
        "least": {"type": "string", "reduce": {"strategy": "minimize"}},
        "inner": {
            "type": "object",
            "reduce": {"strategy": "merge"},
            "properties": {"most": {"type": "number", "reduce": {"strategy": "maximize"}}},
        },
    },
}
FIELDS = {name: f"/{name}" for name in ("id", "seen", "last", "first", "n", "least", "inner/most")}
NUMBERS = st.one_of(st.integers(), st.decimals(allow_nan=False, allow_infinity=False))
DOCUMENTS = st.fixed_dictionaries(
    {"id": st.just(1), "seen": st.none() | st.text(max_size=2)},
    optional={
        "last": st.booleans(),
        "first": st.text(max_size=2),
        "n": st.integers(),
        "least": st.text(max_size=2),
        "inner": st.fixed_dictionaries({}, optional={"most": NUMBERS}),
    },
)


def aggregate(column: Column, values: list[Any]) -> Any:
    present = values if column.nullable else [value for value in values if value is not None]
    if not present:
        return None
    match column.strategy:
        case "lastWriteWins":
            return present[-1]
        case "firstWriteWins":
            return present[0]
        case "sum":
            return sum(present)
        case "minimize":
            return min(present)
        case "maximize":
            return max(present)
    raise AssertionError(column)


@given(st.lists(DOCUMENTS, min_size=1, max_size=5), st.booleans())
def test_aggregated_columns_equal_reduced_documents(documents: list[Any], merged: bool):
    schema = SCHEMA if merged else {**SCHEMA, "reduce": {"strategy": "lastWriteWins"}}
    reducer = Reducer(schema, "c")
    folded = reducer.reduce(documents).document
    for name, column in columns_of(schema, FIELDS).items():
        assert column is not None
        assert column.whole is not merged
        pointer = parse_pointer(FIELDS[name], what=name)
        values_at_pointer = [find(document, pointer) for document in [*documents, folded]]
        *values, expected = (None if value is ABSENT else value for value in values_at_pointer)
        assert aggregate(column, values) == expected
