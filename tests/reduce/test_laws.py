"""What holds for all documents: where they were cut into batches does not show."""

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
    EVERYTHING,
    LIFE,
    LIVES,
    NUMBERS,
    ODD,
    ODDITIES,
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
    "odd": (Reducer(ODD, "c"), ODDITIES),
}

family = pytest.mark.parametrize("name", FAMILIES)


def several(name: str, least: int = 1) -> st.SearchStrategy[list[Any]]:
    return st.lists(FAMILIES[name][1], min_size=least, max_size=4)


def text(document: Any) -> bytes | None:
    return None if document is ABSENT else encode(document)


@family
@settings(max_examples=40)
@given(st.data())
def test_reducing_what_was_combined_is_reducing_what_it_was_combined_of(name: str, data):
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
def test_combining_parts_first_changes_nothing(name: str, data):
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
def test_combining_is_associative(a: Any, b: Any, c: Any):
    reducer, _ = FAMILIES["everything"]
    (ab,), (bc,) = reducer.combine([a, b]), reducer.combine([b, c])
    assert list(map(text, reducer.combine([ab, c]))) == list(map(text, reducer.combine([a, bc])))


@family
@settings(max_examples=40)
@given(st.data())
def test_reducing_goes_on_from_what_is_stored(name: str, data):
    reducer, _ = FAMILIES[name]
    documents = data.draw(several(name))
    whole = reducer.reduce(documents)
    for cut in range(len(documents)):
        half = reducer.reduce(documents[:cut])
        rest = reducer.reduce(documents[cut:], left=ABSENT if half.deleted else half.document)
        assert (rest.deleted, text(rest.document)) == (whole.deleted, text(whole.document))


@pytest.mark.parametrize("name", ["everything", "life"])
def test_many_documents_are_no_different(name: str):
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
def test_neither_side_is_changed(name: str, data):
    reducer, _ = FAMILIES[name]
    documents = data.draw(several(name))
    before = list(map(encode, documents))
    reducer.combine(documents)
    reducer.reduce(documents[1:], left=documents[0])
    assert list(map(encode, documents)) == before


@family
def test_a_reducer_travels(name: str):
    reducer, _ = FAMILIES[name]
    document = {"op": "c", "n": 1, "x": 1}
    assert pickle.loads(pickle.dumps(reducer)).combine([document]) == [document]


def test_a_document_that_is_too_deep_is_refused():
    reducer, _ = FAMILIES["patch"]
    deep: Any = {}
    for _ in range(2000):
        deep = {"a": deep}
    with pytest.raises(DefiniteError, match='collection "c" is nested too deeply'):
        reducer.check(deep)


@given(PATCHES, st.lists(PATCHES, max_size=4))
def test_merge_patches_are_those_of_rfc_7396(stored: Any, patches: list[Any]):
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
def test_a_sum_is_exact(numbers: list[Any]):
    reducer = Reducer({"reduce": {"strategy": "sum"}}, "c")
    (total,) = reducer.combine(numbers)
    assert Fraction(total) == sum(map(Fraction, numbers))
    assert isinstance(total, str) == any(isinstance(each, str) for each in numbers)


@given(st.data())
def test_a_change_to_a_set_made_twice_is_made_once(data):
    members = st.lists(VALUES, max_size=3, unique_by=rank).map(lambda it: sorted(it, key=rank))
    change = data.draw(changes(members))
    reducer = Reducer({"reduce": {"strategy": "set", "key": [""]}}, "c")
    assert list(map(encode, reducer.combine([change, change]))) == [encode(change)]


@given(st.data())
def test_a_set_holds_what_a_set_would(data):
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
def test_the_order_is_total(a: Any, b: Any, c: Any):
    x, y, z = map(rank, (a, b, c))
    assert (x < y) + (y < x) + (x == y) == 1
    assert not (x < y and y < z) or x < z


@given(VALUES)
def test_nothing_is_lost_in_writing(document: Any):
    again = decode(encode(document), what="document")
    assert again == document
    assert encode(again) == encode(document)


def test_every_strategy_is_among_the_laws():
    found: set[str] = set()

    def look(schema: Any) -> None:
        if isinstance(schema, dict):
            if "strategy" in schema:
                found.add(schema["strategy"])
            look(list(schema.values()))
        elif isinstance(schema, list):
            for inner in schema:
                look(inner)

    look([EVERYTHING, PATCH, LIFE])
    assert found == _KNOWN.keys() - {"jsonSchemaMerge"}, "which has its own"
