"""The cases of tests/vectors/flow.json that are about reductions.

`ABOUT` states for each whether it holds unchanged, or in which other form. Reductions follow
the semantics of 2023-11 and later; an older case has a successor.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import DefiniteError
from penstock.reduce import ABSENT, Reducer, decode, encode, single_scalar
from penstock.reduce.document import find, parse_pointer, rank

KINDS = {"field_extraction", "json_compare", "reduce_sequence", "single_scalar_type"}

ABOUT = {
    "reduce-01": "as is",
    "reduce-02": "as is",
    "reduce-03": "as is",
    "reduce-05": "as is",
    "reduce-07": "before 2023-11: reduce-23",
    "reduce-10": "before 2023-11: reduce-21",
    "reduce-11": "as is",
    "reduce-14": "as is",
    "reduce-15": "as is",
    "reduce-16": "as is",
    "reduce-17": "as is",
    "reduce-20": "as is",
    "reduce-21": "as is",
    "reduce-23": "as is",
    "reduce-doc1": "as is",
    "extract-01": "in part: pointers; packing and the times of UUIDs belong to other packages",
    **{f"cmp-{n:02}": "as is" for n in (1, 3, 6, 7, 8, 10, 11, 13, 17, 18, 20)},
    **{f"scalar-{n:02}": "as is" for n in (2, 4, 6, 7, 8)},
    "seed-01": "as is",
    "integ-02": "as is",
}

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "vectors" / "flow.json").read_text())[
        "cases"
    ]
    if case["kind"] in KINDS or case["id"] in ("seed-01", "integ-02")
}

STRATEGY = {
    "AppendWrongType": "append",
    "JsonSchemaMergeWrongType": "jsonSchemaMerge",
    "MergeWrongType": "merge",
}

SEQUENCES = sorted(
    id for id, case in CASES.items() if "steps" in case["expect"] and ABOUT[id] == "as is"
)


def read(value: Any) -> Any:
    """Decode a vector value as a document, with exact numbers."""
    return decode(json.dumps(value), what="vector")


def test_every_vector_is_classified():
    assert ABOUT.keys() == CASES.keys()


@pytest.mark.parametrize("id", SEQUENCES)
def test_reduction_sequence_equals_flow(id: str):
    case = CASES[id]
    reducer = Reducer(case["input"]["schema"], id)
    left: Any = ABSENT
    for step in case["expect"]["steps"]:
        right = read(step["rhs"])
        reducer.check(right)
        if left is ABSENT:
            assert encode(right) == encode(read(step["expect"]))
            left = right
            continue
        error = step.get("error")
        if error == "NotAssociative":
            assert reducer.combine([left, right]) == [left, right]
            continue
        if error is not None:
            with pytest.raises(DefiniteError, match=f'^{STRATEGY[error]} at "" of'):
                reducer.combine([left, right])
            continue
        if step["mode"] == "full":
            done = reducer.reduce([right], left=left)
            assert not done.deleted
            left = done.document
        else:
            (left,) = reducer.combine([left, right])
        assert encode(left) == encode(read(step["expect"]))


def test_sum_of_number_and_numeric_string_is_a_string():
    case = CASES["reduce-doc1"]
    reducer = Reducer(case["input"]["schema"]["properties"]["value"], "c")
    assert reducer.combine(read(case["input"]["docs"])) == [case["expect"]["result"]]


@pytest.mark.parametrize("id", sorted(id for id in CASES if id.startswith("cmp-")))
def test_document_order_equals_flow(id: str):
    case = CASES[id]
    left, right = (rank(read(case["input"][side])) for side in ("lhs", "rhs"))
    assert case["expect"]["ordering"] == "less"
    assert left < right


@pytest.mark.parametrize("id", sorted(id for id in CASES if id.startswith("scalar-")))
def test_single_scalar_equals_flow(id: str):
    case = CASES[id]
    assert (single_scalar(case["input"]["types"]) is not None) is case["expect"]["single_scalar"]


def test_pointer_lookup_equals_flow():
    case = CASES["extract-01"]
    for pointer, expected in zip(
        case["input"]["extractors"], case["expect"]["elements"], strict=True
    ):
        if " " in pointer:
            continue
        value = find(read(case["input"]["doc"]), parse_pointer(pointer, what="pointer"))
        if isinstance(expected, dict):
            assert encode(value).decode() == expected["bytes_utf8"]
        else:
            assert (None if value is ABSENT else value) == read(expected)


def test_counter_with_standard_and_delta_updates():
    case = CASES["seed-01"]
    reducer = Reducer({"reduce": {"strategy": case["input"]["reduction"]}}, "counters")
    first, second = case["input"]["txn1"], case["input"]["txn2"]
    stored = [reducer.reduce(first)]
    stored.append(reducer.reduce(reducer.combine(second), left=stored[0].document))
    assert [document.document for document in stored] == case["expect"]["stored"]
    assert [reducer.combine(first), reducer.combine(second)] == [[4], [-2]]


def test_delta_updates_start_from_nothing_in_each_transaction():
    case = CASES["integ-02"]
    reducer = Reducer(case["input"]["schema"], "duplicated")
    rows = []
    for transaction in case["input"]["transactions"]:
        for id in sorted({document["id"] for document in transaction}):
            combined = reducer.combine(document for document in transaction if document["id"] == id)
            rows += [[document["id"], document["int"], document["str"]] for document in combined]
    assert rows == case["expect"]["rows_id_int_str"]
