"""The order of messages: one table, walked from both ends."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import LocalProtocolError, RemoteProtocolError
from penstock.protocol.messages import Kind
from penstock.protocol.transaction import REQUESTS, RULES, Role, Transaction
from tests.protocol.vectors import cases

RESPONSES = set(Kind) - REQUESTS


def walked(*kinds: Kind, role: Role = Role.RUNTIME) -> Transaction:
    where = Transaction(role)
    for kind in kinds:
        ours = (kind in REQUESTS) is (role is Role.RUNTIME)
        where = where.sends(kind) if ours else where.receives(kind)
    return where


OPENED = (Kind.OPEN, Kind.OPENED)
READY = (*OPENED, Kind.ACKNOWLEDGE, Kind.ACKNOWLEDGED)
COMMITTED = (*READY, Kind.FLUSH, Kind.FLUSHED, Kind.START_COMMIT, Kind.STARTED_COMMIT)


@pytest.mark.parametrize("role", Role)
def test_a_whole_transaction_of_flows_own_tests(role):
    [case] = [each for each in cases("lifecycle") if "requests" in each["input"]]
    requests = [Kind(each) for each in case["input"]["requests"]]
    responses = [Kind(each) for each in case["input"]["responses"]]
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
    order += [responses.pop(0), responses.pop(0), requests.pop(0)]  # Acknowledged comes early
    assert not requests + responses
    assert walked(*order, role=role).idle


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
def test_what_a_runtime_may_not_send(before, kind, says):
    with pytest.raises(LocalProtocolError, match=f"{kind} may not be sent {says}"):
        walked(*before).sends(kind)
    if kind in REQUESTS:
        with pytest.raises(RemoteProtocolError, match=f"{kind} came {says}"):
            walked(*before, role=Role.CONNECTOR).receives(kind)


@pytest.mark.parametrize(
    ("before", "kind", "says"),
    [
        ((), Kind.OPENED, "while nothing was the last"),
        ((Kind.OPEN,), Kind.ACKNOWLEDGED, "after nothing"),
        ((*OPENED, Kind.ACKNOWLEDGE, Kind.LOAD), Kind.LOADED, "after Opened"),
        (READY, Kind.LOADED, "while Acknowledge was the last"),
        ((*READY, Kind.FLUSH), Kind.LOADED, "though no Load asked for it"),
        ((*READY, Kind.LOAD), Kind.FLUSHED, "while Load was the last"),
        ((*READY, Kind.FLUSH, Kind.FLUSHED), Kind.LOADED, "after Flushed"),
        ((*READY, Kind.FLUSH, Kind.FLUSHED), Kind.STARTED_COMMIT, "while Flush was the last"),
        ((*READY, Kind.FLUSH, Kind.FLUSHED), Kind.ACKNOWLEDGED, "after Flushed"),
        (READY, Kind.ACKNOWLEDGED, "after Acknowledged"),
    ],
    ids=lambda it: str(it) if isinstance(it, Kind) else None,
)
def test_what_a_connector_may_not_send(before, kind, says):
    with pytest.raises(RemoteProtocolError, match=f"{kind} came {says}"):
        walked(*before).receives(kind)
    with pytest.raises(LocalProtocolError, match=f"{kind} may not be sent {says}"):
        walked(*before, role=Role.CONNECTOR).sends(kind)


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
def test_where_a_stream_may_end(before, clean):
    where = walked(*before, role=Role.CONNECTOR)
    if clean:
        where.ends()
    else:
        with pytest.raises(RemoteProtocolError, match="unexpected EOF"):
            where.ends()


def may(where: Transaction, kind: Kind) -> Transaction | None:
    ours = (kind in REQUESTS) is (where.role is Role.RUNTIME)
    try:
        return where.sends(kind) if ours else where.receives(kind)
    except (LocalProtocolError, RemoteProtocolError):
        return None


@given(seed=st.integers(0, 2**32))
def test_both_ends_agree_however_slow_the_line_is(seed):
    """What one end may send, the other may receive, whatever is under way meanwhile."""
    chance = random.Random(seed)
    runtime, connector = Transaction(Role.RUNTIME), Transaction(Role.CONNECTOR)
    to_connector: list[Kind] = []
    to_runtime: list[Kind] = []
    for _ in range(200):
        deed = chance.randrange(4)
        if deed == 0:
            allowed = [each for each in REQUESTS if may(runtime, each)]
            if allowed:
                kind = chance.choice(sorted(allowed, key=lambda it: it.value))
                runtime = runtime.sends(kind)
                to_connector.append(kind)
        elif deed == 1:
            allowed = [each for each in RESPONSES if may(connector, each)]
            if allowed:
                kind = chance.choice(sorted(allowed, key=lambda it: it.value))
                connector = connector.sends(kind)
                to_runtime.append(kind)
        elif deed == 2 and to_connector:
            connector = connector.receives(to_connector.pop(0))
        elif deed == 3 and to_runtime:
            runtime = runtime.receives(to_runtime.pop(0))


@given(seed=st.integers(0, 2**32))
def test_a_flush_never_goes_before_its_own_acknowledgement(seed):
    """Of each transaction: an Acknowledged between the StartedCommit before and the Flush."""
    chance = random.Random(seed)
    where, order = Transaction(Role.RUNTIME), []
    for _ in range(120):
        allowed = [(each, found) for each in Kind if (found := may(where, each))]
        assert allowed, order
        kind, where = chance.choice(allowed)
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
