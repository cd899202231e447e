"""Laws of reductions for all documents: batch boundaries do not affect the result."""

import pickle
import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DefiniteError
from penstock.reduce import ABSENT, Reduced, Reducer, decode, encode
from penstock.reduce.document import rank
from penstock.reduce.strategy import _KNOWN
from tests.reduce.documents import (
    CONDITIONAL,
    CONDITIONAL_DOCUMENTS,
    EVERYTHING,
    LIFE,
    LIVES,
    NUMBERS,
    PATCH,
    PATCHES,
    VALUES,
    WITH_EVERYTHING,
    changes,
)

FAMILIES = {
    "everything": (Reducer(EVERYTHING, "c"), WITH_EVERYTHING),
    "patch": (Reducer(PATCH, "c"), PATCHES),
    "life": (Reducer(LIFE, "c"), LIVES),
    "odd": (Reducer(CONDITIONAL, "c"), CONDITIONAL_DOCUMENTS),
}

family = pytest.mark.parametrize("name", FAMILIES)


def several(name: str, least: int = 1) -> st.SearchStrategy[list[Any]]:
    return st.lists(FAMILIES[name][1], min_size=least, max_size=4)


def text(document: Any) -> bytes | None:
    return None if document is ABSENT else encode(document)


@family
@settings(max_examples=40)
@given(st.data())
def test_reduce_of_combined_documents_equals_reduce_of_documents(name: str, data):
    reducer, _ = FAMILIES[name]
    stored, documents = data.draw(several(name, 0)), data.draw(several(name))
    left = reducer.reduce(stored)
    before = ABSENT if left.deleted else left.document
    expected = reducer.reduce(documents, left=before)
    actual = reducer.reduce(reducer.combine(documents), left=before)
    assert actual.deleted == expected.deleted
    if not actual.deleted:
        assert text(actual.document) == text(expected.document)


@family
@settings(max_examples=40)
@given(st.data())
def test_combine_does_not_depend_on_grouping(name: str, data):
    reducer, _ = FAMILIES[name]
    documents = data.draw(several(name))
    whole = reducer.reduce(documents)
    for cut in range(len(documents)):
        first, second = reducer.combine(documents[:cut]), reducer.combine(documents[cut:])
        parts = reducer.reduce(reducer.combine([*first, *second]))
        assert parts.deleted == whole.deleted
        if not whole.deleted:
            assert text(parts.document) == text(whole.document)


@settings(max_examples=40)
@given(WITH_EVERYTHING, WITH_EVERYTHING, WITH_EVERYTHING)
def test_combine_is_associative(a: Any, b: Any, c: Any):
    reducer, _ = FAMILIES["everything"]
    (ab,), (bc,) = reducer.combine([a, b]), reducer.combine([b, c])
    assert list(map(text, reducer.combine([ab, c]))) == list(map(text, reducer.combine([a, bc])))


@family
@settings(max_examples=40)
@given(st.data())
def test_reduce_continues_from_stored_document(name: str, data):
    reducer, _ = FAMILIES[name]
    documents = data.draw(several(name))
    whole = reducer.reduce(documents)
    for cut in range(len(documents)):
        half = reducer.reduce(documents[:cut])
        remainder = reducer.reduce(documents[cut:], left=ABSENT if half.deleted else half.document)
        assert (remainder.deleted, text(remainder.document)) == (
            whole.deleted,
            text(whole.document),
        )


@pytest.mark.parametrize("name", ["everything", "life"])
def test_reduce_of_many_documents_equals_one_by_one(name: str):
    reducer, _ = FAMILIES[name]
    chance = random.Random(1)
    documents = [
        {"op": chance.choice("cccd"), "n": n, "log": [n], "x": chance.random() < 0.5, "first": n}
        for n in range(300)
    ]
    one_by_one = Reduced(ABSENT)
    for document in documents:
        left = ABSENT if one_by_one.deleted else one_by_one.document
        one_by_one = reducer.reduce([document], left=left)
    at_once = reducer.reduce(documents)
    assert (at_once.deleted, text(at_once.document)) == (
        one_by_one.deleted,
        text(one_by_one.document),
    )
    assert len(reducer.combine(documents)) < (150 if name == "life" else 2)


@family
@settings(max_examples=40)
@given(st.data())
def test_reduce_does_not_mutate_its_arguments(name: str, data):
    reducer, _ = FAMILIES[name]
    documents = data.draw(several(name))
    before = list(map(encode, documents))
    reducer.combine(documents)
    reducer.reduce(documents[1:], left=documents[0])
    assert list(map(encode, documents)) == before


@family
def test_reducer_pickle_round_trip(name: str):
    reducer, _ = FAMILIES[name]
    document = {"op": "c", "n": 1, "x": 1}
    assert pickle.loads(pickle.dumps(reducer)).combine([document]) == [document]


def test_too_deep_document_raises_definite_error():
    reducer, _ = FAMILIES["patch"]
    deep: Any = {}
    for _ in range(2000):
        deep = {"a": deep}
    with pytest.raises(DefiniteError, match='collection "c" is nested too deeply'):
        reducer.check(deep)


@given(PATCHES, st.lists(PATCHES, max_size=4))
def test_merge_patch_equals_rfc_7396(stored: Any, patches: list[Any]):
    def patched(target: Any, patch: Any) -> Any:
        if not isinstance(patch, dict):
            return patch
        made = dict(target) if isinstance(target, dict) else {}
        for name, value in patch.items():
            if value is None:
                made.pop(name, None)
            else:
                made[name] = patched(made.get(name), value)
        return made

    expected = stored
    for patch in patches:
        expected = patched(expected, patch)
    done = FAMILIES["patch"][0].reduce(patches, left=stored, keep_deleted=True)
    assert done.document == expected


@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_sum_is_exact(numbers: list[Any]):
    reducer = Reducer({"reduce": {"strategy": "sum"}}, "c")
    (total,) = reducer.combine(numbers)
    assert Fraction(total) == sum(map(Fraction, numbers))
    assert isinstance(total, str) == any(isinstance(number, str) for number in numbers)


@given(st.data())
def test_set_change_is_idempotent(data):
    members = st.lists(VALUES, max_size=3, unique_by=rank).map(lambda it: sorted(it, key=rank))
    change = data.draw(changes(members))
    reducer = Reducer({"reduce": {"strategy": "set", "key": [""]}}, "c")
    assert list(map(encode, reducer.combine([change, change]))) == [encode(change)]


@given(st.data())
def test_set_strategy_equals_python_set(data):
    members = st.sets(st.integers(0, 6), max_size=5).map(sorted)
    steps = data.draw(st.lists(changes(members), max_size=5))
    base = data.draw(members)
    expected = set(base)
    for step in steps:
        if "intersect" in step:
            expected &= set(step["intersect"])
        expected -= set(step.get("remove", ()))
        expected |= set(step.get("add", ()))
    reducer = Reducer({"reduce": {"strategy": "set", "key": [""]}}, "c")
    for fold in (steps, reducer.combine(steps)):
        done = reducer.reduce(fold, left={"add": base})
        assert done.document.get("add", []) == sorted(expected)


@given(VALUES, VALUES, VALUES)
def test_rank_is_a_total_order(a: Any, b: Any, c: Any):
    x, y, z = map(rank, (a, b, c))
    assert (x < y) + (y < x) + (x == y) == 1
    assert not (x < y and y < z) or x < z


@given(VALUES)
def test_encode_is_lossless(document: Any):
    again = decode(encode(document), what="document")
    assert again == document
    assert encode(again) == encode(document)


def test_laws_cover_every_strategy():
    strategies: set[str] = set()

    def collect(schema: Any) -> None:
        if isinstance(schema, dict):
            if "strategy" in schema:
                strategies.add(schema["strategy"])
            collect(list(schema.values()))
        elif isinstance(schema, list):
            for inner in schema:
                collect(inner)

    collect([EVERYTHING, PATCH, LIFE])
    assert strategies == _KNOWN.keys() - {"jsonSchemaMerge"}, "jsonSchemaMerge has its own tests"
