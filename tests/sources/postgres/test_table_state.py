"""State machine of a tracked table: exhaustive checks of its transitions."""

import pytest

from penstock.errors import DefiniteError, InternalError
from penstock.sources.postgres.table_state import (
    TRANSITIONS,
    Phase,
    StoredForm,
    TableEvent,
    TableState,
    next_state,
)
from penstock.sources.postgres.tracked_table import TrackedTable
from tests.sources.postgres.test_stream_reader import table

LOADING = {TableState.LOADING, TableState.LOADING_REJECTED}
LOADED = {TableState.LOADED, TableState.LOADED_REJECTED}
DURABLE = {*TableState} - {TableState.REMOVED}

POSSIBLE = {
    TableEvent.SNAPSHOT_STARTED: LOADING | LOADED,
    TableEvent.SNAPSHOT_LINKED: LOADING,
    TableEvent.COLLECTION_REJECTED: LOADING | LOADED,
    TableEvent.CHANGE_REJECTED: {TableState.LOADING, TableState.LOADED},
    TableEvent.TRUNCATED: LOADING | LOADED | {TableState.LIVE},
    TableEvent.MADE_VISIBLE: LOADED | {TableState.ERRORED_HIDDEN},
    TableEvent.FAILED: DURABLE - {TableState.UNTRACKABLE},
    TableEvent.RECOVERED: {TableState.ERRORED},
    TableEvent.REMOVED: DURABLE,
}

PAIRS = [(state, event) for state in TableState for event in TableEvent]


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda value: value.name)
def test_event_is_defined_exactly_in_its_possible_states(
    state: TableState, event: TableEvent
) -> None:
    if state in POSSIBLE[event]:
        assert next_state(state, event) in TableState
    else:
        with pytest.raises(InternalError, match=f"event {event.name} .* state {state.name}"):
            next_state(state, event)


def test_every_state_is_reachable_from_a_new_table() -> None:
    reached, ahead = {TableState.LOADING}, [TableState.LOADING]
    while ahead:
        state = ahead.pop()
        for targets in TRANSITIONS.values():
            following = targets.get(state)
            if following is not None and following not in reached:
                reached.add(following)
                ahead.append(following)
    assert reached == {*TableState}


def test_every_event_has_transitions() -> None:
    assert TRANSITIONS.keys() == {*TableEvent}


@pytest.mark.parametrize("state", sorted(DURABLE, key=str), ids=lambda state: state.name)
def test_stored_form_of_durable_state_identifies_it(state: TableState) -> None:
    assert TableState.from_stored(state.stored) is state


def test_form_that_no_state_has_raises_internal_error() -> None:
    with pytest.raises(InternalError):
        TableState.from_stored(StoredForm(Phase.LIVE, seen=False))
    with pytest.raises(InternalError):
        TableState.REMOVED.stored  # noqa: B018 - the property raises


def test_visible_collection_is_hidden_again_only_by_removal() -> None:
    for targets in TRANSITIONS.values():
        for before, after in targets.items():
            if before.is_visible and after is not TableState.REMOVED:
                assert after.is_visible, (before, after)


def test_only_recovery_ends_the_error_of_a_visible_collection() -> None:
    assert [
        event
        for event, targets in TRANSITIONS.items()
        if targets.get(TableState.ERRORED) is TableState.LIVE
    ] == [TableEvent.RECOVERED]


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda value: value.name)
def test_tracked_table_has_an_error_exactly_in_states_with_one(
    state: TableState, event: TableEvent
) -> None:
    if state not in POSSIBLE[event]:
        return
    first, second = DefiniteError("first"), DefiniteError("second")
    tracked = TrackedTable(table(), state, error=first if state.stored.has_error else None)
    tracked.apply(event, second)
    assert tracked.state is next_state(state, event)
    if tracked.state is TableState.REMOVED or not tracked.state.stored.has_error:
        assert tracked.error is None
    else:
        assert tracked.error is (first if state.is_errored else second)
