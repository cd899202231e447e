"""Connector state: combination of updates is associative."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.protocol.connector_state import EMPTY, combine_state, is_unchanged
from penstock.protocol.messages import StateUpdate
from tests.protocol.vectors import cases, name


def update(case):
    return StateUpdate(case["json"].encode(), case["merge_patch"])


@pytest.mark.parametrize("case", cases("driver_checkpoint_reduce"), ids=name)
def test_combine_state_equals_flow(case):
    combined = combine_state(update(case["input"]["lhs"]), update(case["input"]["update"]))
    expected = case["expect"]
    assert combined.patch is expected["merge_patch"]
    assert (json.loads(combined.json) if combined.json else "") == (
        json.loads(expected["json"]) if expected["json"] else ""
    )


@pytest.mark.parametrize("case", cases("state_unchanged"), ids=name)
def test_is_unchanged_equals_flow(case):
    given = case["input"]
    result = is_unchanged(
        StateUpdate(given["prior"].encode()),
        StateUpdate(given["update"].encode(), given["merge_patch"]),
    )
    assert result is case["expect"]["unchanged"]


values = st.recursive(
    st.none() | st.integers(0, 3) | st.text("ab", max_size=1),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.sampled_from("abc"), values, max_size=3)
updates = st.builds(
    lambda value, patch: StateUpdate(json.dumps(value).encode(), patch), objects, st.booleans()
)


def puts_object_in_place_of_removed_value(first, second):
    return any(
        isinstance(value, dict)
        and name in first
        and (
            not isinstance(first[name], dict)
            or puts_object_in_place_of_removed_value(first[name], value)
        )
        for name, value in second.items()
    )


@given(updates, updates, updates)
def test_combine_state_is_associative(first, second, third):
    def value(state):
        return json.loads(state.json), state.patch

    for earlier, later in ((first, second), (second, third), (combine_state(first, second), third)):
        both = earlier.patch and later.patch
        contents = json.loads(earlier.json), json.loads(later.json)
        assume(not (both and puts_object_in_place_of_removed_value(*contents)))
    start = StateUpdate(b"{}")
    one_by_one = combine_state(combine_state(combine_state(start, first), second), third)
    assert value(one_by_one) == value(
        combine_state(combine_state(start, first), combine_state(second, third))
    )
    assert value(one_by_one) == value(
        combine_state(start, combine_state(combine_state(first, second), third))
    )


def test_combine_state_in_order_replaces_removed_object():
    state = StateUpdate(b'{"b":{"old":1}}')
    for patch in (b'{"b":null}', b'{"b":{"new":2}}'):
        state = combine_state(state, StateUpdate(patch, patch=True))
    assert state == StateUpdate(b'{"b":{"new":2}}')


def test_combine_state_without_json_object_raises_usage_error():
    for wrong in (b"[]", b"{", b"1"):
        with pytest.raises(UsageError, match="connector state is not"):
            combine_state(EMPTY, StateUpdate(wrong, patch=True))
