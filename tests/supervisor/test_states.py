"""The state table of a supervised task, and the events of errors."""

import pytest

from penstock.errors import (
    Corruption,
    DefiniteError,
    DeterminateError,
    DurabilityLost,
    Fenced,
    IndeterminateError,
    InternalError,
    PenstockError,
    SourceError,
    StoreError,
    StoreRefused,
    TransientError,
    UsageError,
)
from penstock.materialize.errors import ConnectorFailed, ConnectorRefused, ConnectorUnreachable
from penstock.persist.errors import LockHeld
from penstock.retry import Policy, policy_of
from penstock.supervisor.states import TRANSITIONS, Event, State, event_of, next_state

IMPOSSIBLE = {
    (State.PAUSED, Event.RUN),
    (State.STOPPED, Event.RUN),
    (State.ENDED, Event.RUN),
    (State.ENDED, Event.PAUSE),
    (State.ENDED, Event.RESUME),
    (State.ENDED, Event.DROP),
}

POLICIES = {
    PenstockError: Policy.STOP,
    UsageError: Policy.STOP,
    LockHeld: Policy.STOP,
    StoreError: Policy.RESTART,
    DeterminateError: Policy.REPEAT,
    StoreRefused: Policy.RESTART,
    IndeterminateError: Policy.REPEAT,
    DurabilityLost: Policy.RESTART,
    Corruption: Policy.STOP,
    SourceError: Policy.STOP,
    DefiniteError: Policy.STOP,
    TransientError: Policy.RESUME,
    ConnectorFailed: Policy.RESUME,
    ConnectorUnreachable: Policy.RESUME,
    ConnectorRefused: Policy.STOP,
    Fenced: Policy.EXIT,
    InternalError: Policy.STOP,
    RuntimeError: Policy.REPORT,
    OSError: Policy.REPORT,
    KeyboardInterrupt: Policy.REPORT,
}

EVENTS = {
    Policy.REPEAT: (Event.RETRY, Event.FAIL),
    Policy.RESUME: (Event.RETRY, Event.FAIL),
    Policy.RESTART: (Event.RETRY, Event.FAIL),
    Policy.STOP: (Event.FAIL, Event.FAIL),
    Policy.REPORT: (Event.RETRY, Event.EXIT),
    Policy.EXIT: (Event.EXIT, Event.EXIT),
}
"""For each policy, the event with and without restarts."""


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", State)
def test_table_has_each_possible_pair_and_next_state_rejects_the_others(state, event):
    if (state, event) in IMPOSSIBLE:
        assert (state, event) not in TRANSITIONS
        with pytest.raises(InternalError, match=f"task that is {state} cannot"):
            next_state(state, event)
    else:
        assert next_state(state, event) == TRANSITIONS[state, event]


def test_every_state_is_reachable_from_starting():
    reached, frontier = {State.STARTING}, [State.STARTING]
    while frontier:
        state = frontier.pop()
        following = {TRANSITIONS[pair] for pair in TRANSITIONS if pair[0] == state}
        frontier += following - reached
        reached |= following
    assert reached == set(State)


@pytest.mark.parametrize("event", [Event.RETRY, Event.FAIL])
@pytest.mark.parametrize("state", [State.STOPPED, State.ENDED])
def test_further_error_keeps_state_of_task_that_is_over(state, event):
    assert next_state(state, event) == state


@pytest.mark.parametrize("state", State)
def test_newer_owner_stops_task_in_every_state(state):
    assert next_state(state, Event.EXIT) == State.STOPPED


@pytest.mark.parametrize(("kind", "policy"), POLICIES.items())
def test_policy_of_error(kind, policy):
    error = kind.__new__(kind)
    assert policy_of(error) is policy


def test_policies_of_all_classes_of_the_error_tree_are_listed():
    def classes(kind):
        yield kind
        for child in kind.__subclasses__():
            if child.__module__ == "penstock.errors":
                yield from classes(child)

    assert set(classes(PenstockError)) <= set(POLICIES)


@pytest.mark.parametrize("policy", Policy)
def test_event_of_policy(policy):
    assert (event_of(policy, restarts=True), event_of(policy, restarts=False)) == EVENTS[policy]
