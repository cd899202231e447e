"""Connector state adds up, in any grouping."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.protocol.connector_state import EMPTY, add_up, unchanged
from penstock.protocol.messages import StateUpdate
from tests.protocol.vectors import cases, name


def update(case):
    return StateUpdate(case["json"].encode(), case["merge_patch"])


@pytest.mark.parametrize("case", cases("driver_checkpoint_reduce"), ids=name)
def test_cases_of_flow(case):
    found = add_up(update(case["input"]["lhs"]), update(case["input"]["update"]))
    expected = case["expect"]
    assert found.patch is expected["merge_patch"]
    assert (json.loads(found.json) if found.json else "") == (
        json.loads(expected["json"]) if expected["json"] else ""
    )


@pytest.mark.parametrize("case", cases("state_unchanged"), ids=name)
def test_whether_an_update_says_anything(case):
    said = case["input"]
    found = unchanged(
        StateUpdate(said["prior"].encode()),
        StateUpdate(said["update"].encode(), said["merge_patch"]),
    )
    assert found is case["expect"]["unchanged"]


values = st.recursive(
    st.none() | st.integers(0, 3) | st.text("ab", max_size=1),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.sampled_from("abc"), values, max_size=3)
updates = st.builds(
    lambda value, patch: StateUpdate(json.dumps(value).encode(), patch), objects, st.booleans()
)


def puts_an_object_where_another_is_removed(first, second):
    """Which no single patch can say."""
    return any(
        isinstance(value, dict)
        and name in first
        and (
            not isinstance(first[name], dict)
            or puts_an_object_where_another_is_removed(first[name], value)
        )
        for name, value in second.items()
    )


@given(updates, updates, updates)
def test_grouping_does_not_matter(first, second, third):
    def value(state):
        return json.loads(state.json), state.patch

    for earlier, later in ((first, second), (second, third), (add_up(first, second), third)):
        both = earlier.patch and later.patch
        said = json.loads(earlier.json), json.loads(later.json)
        assume(not (both and puts_an_object_where_another_is_removed(*said)))
    start = StateUpdate(b"{}")
    one_by_one = add_up(add_up(add_up(start, first), second), third)
    assert value(one_by_one) == value(add_up(add_up(start, first), add_up(second, third)))
    assert value(one_by_one) == value(add_up(start, add_up(add_up(first, second), third)))


def test_what_no_patch_can_say_is_right_one_by_one():
    state = StateUpdate(b'{"b":{"old":1}}')
    for patch in (b'{"b":null}', b'{"b":{"new":2}}'):
        state = add_up(state, StateUpdate(patch, patch=True))
    assert state == StateUpdate(b'{"b":{"new":2}}')


def test_state_that_is_no_object_is_refused():
    for wrong in (b"[]", b"{", b"1"):
        with pytest.raises(UsageError, match="connector state is not"):
            add_up(EMPTY, StateUpdate(wrong, patch=True))
