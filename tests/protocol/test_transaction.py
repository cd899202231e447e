"""Message order, checked from both sides of a stream."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import LocalProtocolError, RemoteProtocolError
from penstock.protocol.messages import Kind
from penstock.protocol.transaction import REQUESTS, RULES, Role, Transaction
from tests.protocol.vectors import cases

RESPONSES = set(Kind) - REQUESTS


def state_after(*kinds: Kind, role: Role = Role.RUNTIME) -> Transaction:
    state = Transaction(role)
    for kind in kinds:
        ours = (kind in REQUESTS) is (role is Role.RUNTIME)
        state = state.after_sending(kind) if ours else state.after_receiving(kind)
    return state


OPENED = (Kind.OPEN, Kind.OPENED)
READY = (*OPENED, Kind.ACKNOWLEDGE, Kind.ACKNOWLEDGED)
COMMITTED = (*READY, Kind.FLUSH, Kind.FLUSHED, Kind.START_COMMIT, Kind.STARTED_COMMIT)


@pytest.mark.parametrize("role", Role)
def test_transaction_of_flow_is_accepted(role):
    [case] = [entry for entry in cases("lifecycle") if "requests" in entry["input"]]
    requests = [Kind(value) for value in case["input"]["requests"]]
    responses = [Kind(value) for value in case["input"]["responses"]]
    order = [
        *(requests.pop(0), responses.pop(0)),  # Open, Opened
        *(requests.pop(0), requests.pop(0), responses.pop(0)),  # a Load before Acknowledged
    ]
    while requests[0] is not Kind.STORE:
        order.append(requests.pop(0))
    while responses[0] is not Kind.STARTED_COMMIT:
        order.append(responses.pop(0))
    while requests[0] is not Kind.ACKNOWLEDGE:
        order.append(requests.pop(0))
    order += [responses.pop(0), responses.pop(0), requests.pop(0)]  # Acknowledged arrives early
    assert not requests + responses
    assert state_after(*order, role=role).idle


@pytest.mark.parametrize(
    ("before", "kind", "says"),
    [
        ((), Kind.ACKNOWLEDGE, "after nothing"),
        (OPENED, Kind.OPEN, "after Open"),
        ((Kind.OPEN,), Kind.ACKNOWLEDGE, "before StartedCommit"),
        (OPENED, Kind.LOAD, "after Open"),
        ((*OPENED, Kind.ACKNOWLEDGE), Kind.FLUSH, "before Acknowledged"),
        ((*OPENED, Kind.ACKNOWLEDGE, Kind.LOAD), Kind.FLUSH, "before Acknowledged"),
        (READY, Kind.STORE, "after Acknowledge"),
        ((*READY, Kind.FLUSH), Kind.STORE, "before Flushed"),
        ((*READY, Kind.FLUSH), Kind.START_COMMIT, "before Flushed"),
        ((*READY, Kind.FLUSH), Kind.LOAD, "after Flush"),
        (COMMITTED, Kind.FLUSH, "after StartCommit"),
        ((*COMMITTED, Kind.ACKNOWLEDGE), Kind.FLUSH, "before Acknowledged"),
        ((*COMMITTED, Kind.ACKNOWLEDGE), Kind.ACKNOWLEDGE, "after Acknowledge"),
        ((), Kind.LOADED, "by the runtime"),
    ],
    ids=lambda it: str(it) if isinstance(it, Kind) else None,
)
def test_request_out_of_order_is_rejected(before, kind, says):
    with pytest.raises(LocalProtocolError, match=f"{kind} may not be sent {says}"):
        state_after(*before).after_sending(kind)
    if kind in REQUESTS:
        with pytest.raises(RemoteProtocolError, match=f"{kind} was sent {says}"):
            state_after(*before, role=Role.CONNECTOR).after_receiving(kind)


@pytest.mark.parametrize(
    ("before", "kind", "says"),
    [
        ((), Kind.OPENED, "when nothing was the last request"),
        ((Kind.OPEN,), Kind.ACKNOWLEDGED, "after nothing"),
        ((*OPENED, Kind.ACKNOWLEDGE, Kind.LOAD), Kind.LOADED, "after Opened"),
        (READY, Kind.LOADED, "when Acknowledge was the last request"),
        ((*READY, Kind.FLUSH), Kind.LOADED, "without a Load"),
        ((*READY, Kind.LOAD), Kind.FLUSHED, "when Load was the last request"),
        ((*READY, Kind.FLUSH, Kind.FLUSHED), Kind.LOADED, "after Flushed"),
        (
            (*READY, Kind.FLUSH, Kind.FLUSHED),
            Kind.STARTED_COMMIT,
            "when Flush was the last request",
        ),
        ((*READY, Kind.FLUSH, Kind.FLUSHED), Kind.ACKNOWLEDGED, "after Flushed"),
        (READY, Kind.ACKNOWLEDGED, "after Acknowledged"),
    ],
    ids=lambda it: str(it) if isinstance(it, Kind) else None,
)
def test_response_out_of_order_is_rejected(before, kind, says):
    with pytest.raises(RemoteProtocolError, match=f"{kind} was sent {says}"):
        state_after(*before).after_receiving(kind)
    with pytest.raises(LocalProtocolError, match=f"{kind} may not be sent {says}"):
        state_after(*before, role=Role.CONNECTOR).after_sending(kind)


@pytest.mark.parametrize(
    ("before", "clean"),
    [
        ((), True),
        (OPENED, True),
        (READY, True),
        ((*READY, Kind.LOAD), False),
        ((*READY, Kind.FLUSH, Kind.FLUSHED), False),
        ((*READY, Kind.FLUSH, Kind.FLUSHED, Kind.STORE), False),
        ((*COMMITTED, Kind.ACKNOWLEDGE, Kind.ACKNOWLEDGED), True),
    ],
)
def test_stream_end_within_transaction_is_rejected(before, clean):
    state = state_after(*before, role=Role.CONNECTOR)
    if clean:
        state.check_end()
    else:
        with pytest.raises(RemoteProtocolError, match="unexpected EOF"):
            state.check_end()


def try_message(state: Transaction, kind: Kind) -> Transaction | None:
    ours = (kind in REQUESTS) is (state.role is Role.RUNTIME)
    try:
        return state.after_sending(kind) if ours else state.after_receiving(kind)
    except (LocalProtocolError, RemoteProtocolError):
        return None


@given(seed=st.integers(0, 2**32))
def test_message_allowed_for_sender_is_allowed_for_receiver(seed):
    """Both sides agree with any number of messages in flight."""
    rng = random.Random(seed)
    runtime, connector = Transaction(Role.RUNTIME), Transaction(Role.CONNECTOR)
    to_connector: list[Kind] = []
    to_runtime: list[Kind] = []
    for _ in range(200):
        action = rng.randrange(4)
        if action == 0:
            allowed = [kind for kind in REQUESTS if try_message(runtime, kind)]
            if allowed:
                kind = rng.choice(sorted(allowed, key=lambda it: it.value))
                runtime = runtime.after_sending(kind)
                to_connector.append(kind)
        elif action == 1:
            allowed = [kind for kind in RESPONSES if try_message(connector, kind)]
            if allowed:
                kind = rng.choice(sorted(allowed, key=lambda it: it.value))
                connector = connector.after_sending(kind)
                to_runtime.append(kind)
        elif action == 2 and to_connector:
            connector = connector.after_receiving(to_connector.pop(0))
        elif action == 3 and to_runtime:
            runtime = runtime.after_receiving(to_runtime.pop(0))


@given(seed=st.integers(0, 2**32))
def test_flush_follows_acknowledged_of_previous_transaction(seed):
    """An Acknowledged is between each StartedCommit and the next Flush."""
    rng = random.Random(seed)
    state, order = Transaction(Role.RUNTIME), []
    for _ in range(120):
        allowed = [(kind, after) for kind in Kind if (after := try_message(state, kind))]
        assert allowed, order
        kind, state = rng.choice(allowed)
        order.append(kind)
    acknowledged = False
    for kind in order:
        if kind in (Kind.OPENED, Kind.STARTED_COMMIT):
            acknowledged = False
        elif kind is Kind.ACKNOWLEDGED:
            acknowledged = True
        elif kind in (Kind.FLUSH, Kind.LOADED, Kind.STORE):
            assert acknowledged, order


def test_every_kind_has_a_rule():
    assert set(RULES) == set(Kind)
