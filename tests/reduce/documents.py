"""Schemas that use every strategy, and documents that match them."""

from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.decimals(allow_nan=False, allow_infinity=False, places=3),
    st.text(max_size=3),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 10**40, Decimal("0.10"), Decimal("-2.5"), Decimal("1E+50"), "7", "0.3"]),
)
SMALL = st.integers(0, 4)


def rows(*fields: str) -> st.SearchStrategy[list[Any]]:
    """Return arrays of objects with unique, sorted `k` and any of `fields`."""
    row = st.fixed_dictionaries({"k": SMALL}, optional=dict.fromkeys(fields, NUMBERS))
    return st.lists(row, max_size=4, unique_by=lambda items: items["k"]).map(
        lambda items: sorted(items, key=lambda it: it["k"])
    )


def changes(members: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return changes to a set of `members`."""
    other = st.sampled_from(["intersect", "remove"])
    return st.one_of(
        st.fixed_dictionaries({}, optional={"add": members}),
        st.tuples(other, members, members).map(lambda it: {it[0]: it[1], "add": it[2]}),
        st.tuples(other, members).map(lambda it: {it[0]: it[1]}),
    )


MEMBERS = st.lists(SMALL, max_size=4, unique=True).map(sorted)
NAMED = st.dictionaries(st.sampled_from("abc"), NUMBERS, max_size=3)

SUM = {"reduce": {"strategy": "sum"}}
EVERYTHING: dict[str, Any] = {
    "type": "object",
    "reduce": {"strategy": "merge"},
    "properties": {
        "last": {},
        "first": {"reduce": {"strategy": "firstWriteWins"}},
        "sum": SUM,
        "least": {"reduce": {"strategy": "minimize"}},
        "most": {"reduce": {"strategy": "maximize"}},
        "log": {"type": "array", "reduce": {"strategy": "append"}},
        "counts": {
            "type": "object",
            "additionalProperties": SUM,
            "reduce": {"strategy": "merge"},
        },
        "rows": {
            "items": {
                "properties": {"n": SUM, "m": {"reduce": {"strategy": "maximize"}}},
                "reduce": {"strategy": "merge"},
            },
            "reduce": {"strategy": "merge", "key": ["/k"]},
        },
        "places": {"items": SUM, "reduce": {"strategy": "merge"}},
        "lowest": {"properties": {"n": SUM}, "reduce": {"strategy": "minimize", "key": ["/k"]}},
        "highest": {"properties": {"n": SUM}, "reduce": {"strategy": "maximize", "key": ["/k"]}},
        "members": {"reduce": {"strategy": "set", "key": [""]}},
        "named": {
            "properties": {"add": {"additionalProperties": SUM}},
            "reduce": {"strategy": "set"},
        },
    },
}
"""Every strategy at one location each, independent of the document."""

PICKED = st.fixed_dictionaries({"k": SMALL}, optional={"n": NUMBERS, "x": SCALARS})
WITH_EVERYTHING = st.fixed_dictionaries(
    {},
    optional={
        "last": VALUES,
        "first": VALUES,
        "sum": NUMBERS,
        "least": VALUES,
        "most": VALUES,
        "log": st.lists(SCALARS, max_size=2),
        "counts": NAMED,
        "rows": rows("n", "m", "x"),
        "places": st.lists(NUMBERS, max_size=3),
        "lowest": PICKED,
        "highest": PICKED,
        "members": changes(MEMBERS),
        "named": changes(NAMED),
    },
)

PATCH: dict[str, Any] = {
    "$id": "https://example.com/patch",
    "oneOf": [
        {
            "type": "object",
            "reduce": {"strategy": "merge"},
            "additionalProperties": {"$ref": "https://example.com/patch"},
        },
        {"type": "null", "reduce": {"strategy": "lastWriteWins", "delete": True}},
        {"type": ["array", "boolean", "number", "string"]},
    ],
}
"""RFC 7396: objects are merged, null deletes, any other value replaces."""

PATCHES = st.recursive(
    st.sampled_from([None, 1, "a", [], [None]]),
    lambda inner: st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)

LIFE: dict[str, Any] = {
    "type": "object",
    "required": ["op"],
    "properties": {
        "n": SUM,
        "rows": {
            "items": {
                "properties": {"n": SUM},
                "if": {"required": ["gone"]},
                "then": {"reduce": {"strategy": "merge", "delete": True}},
                "else": {"reduce": {"strategy": "merge"}},
            },
            "reduce": {"strategy": "merge", "key": ["/k"]},
        },
    },
    "if": {"properties": {"op": {"const": "d"}}},
    "then": {"reduce": {"strategy": "merge", "delete": True}},
    "else": {
        "if": {"properties": {"op": {"const": "r"}}},
        "then": {"reduce": {"strategy": "lastWriteWins"}},
        "else": {"reduce": {"strategy": "merge"}},
    },
}
"""Documents that are deleted, replaced or changed, with rows that can be deleted."""

LIVES = st.fixed_dictionaries(
    {"op": st.sampled_from("crdd")},
    optional={"n": NUMBERS, "rows": rows("n", "gone"), "x": SCALARS},
)

CONDITIONAL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "reduce": {"strategy": "sum"}},
        "inner": {"$ref": "#"},
        "rows": {
            "items": {
                "properties": {"n": {"reduce": {"strategy": "sum"}}},
                "anyOf": [
                    {"properties": {"n": {"const": 0}}, "reduce": {"strategy": "lastWriteWins"}},
                    {"properties": {"n": {"not": {"const": 0}}}, "reduce": {"strategy": "merge"}},
                ],
            },
            "reduce": {"strategy": "merge", "key": ["/k"]},
        },
        "bag": {
            "properties": {
                "add": {
                    "additionalProperties": {
                        "if": {"minimum": 2},
                        "then": {"reduce": {"strategy": "maximize"}},
                        "else": {"reduce": {"strategy": "sum"}},
                    }
                }
            },
            "reduce": {"strategy": "set"},
        },
    },
    "if": {"properties": {"n": {"const": 0}}, "required": ["n"]},
    "then": {"reduce": {"strategy": "merge", "delete": True}},
    "else": {
        "if": {"maxProperties": 2},
        "then": {"reduce": {"strategy": "merge"}},
        "else": {"reduce": {"strategy": "lastWriteWins"}},
    },
}
"""Conditions that can hold for a combined document and for neither part: of a sum, of a size."""

UNITS = st.integers(-1, 2)
UNIT_ROWS = st.lists(
    st.fixed_dictionaries({"k": st.integers(0, 1)}, optional={"n": UNITS}),
    max_size=2,
    unique_by=lambda row: row["k"],
).map(lambda rows: sorted(rows, key=lambda row: row["k"]))


def conditional_documents(inner: st.SearchStrategy[Any] | None) -> st.SearchStrategy[Any]:
    fields: dict[str, st.SearchStrategy[Any]] = {
        "n": UNITS,
        "rows": UNIT_ROWS,
        "bag": changes(st.dictionaries(st.sampled_from("ab"), UNITS, max_size=2)),
        "x": UNITS,
    }
    return st.fixed_dictionaries(
        {}, optional=fields if inner is None else {**fields, "inner": inner}
    )


CONDITIONAL_DOCUMENTS = conditional_documents(conditional_documents(None))
