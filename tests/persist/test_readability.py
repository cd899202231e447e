"""Limits of reads at errors of a collection, and their messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.persist.shop import SCHEMA, opened

from penstock.durable.memory import Shelf
from penstock.persist import AppendTo, CollectionErrored, Fail, Recover, StoredError
from penstock.persist.readability import check_changes, check_contents, reachable

LOST = StoredError("SlotLost", "slot is gone", "It was dropped.", "Run resync.")
UPPER = 30


def errored(first: int, again: int | None):
    """Return the state of a collection in error between two times, complete up to `UPPER`."""
    with opened(Shelf()) as client:
        shop = client.create_or_load("shop", schema=SCHEMA, key_columns=["k"])
        client.append_all([AppendTo(shop, [], 0, UPPER)], [Fail(shop, first, LOST)])
        if again is None:
            return shop.state
        client.append_all([AppendTo(shop, [], UPPER, again + 1)], [Recover(shop, again)])
        return shop.state


STATES = [errored(10, None), errored(10, 35), errored(1, 40)]


def readable(check, *times: int) -> bool:
    try:
        check(*times)
    except CollectionErrored:
        return False
    return True


@given(state=st.sampled_from(STATES), lower=st.integers(0, 41))
def test_reachable_upper_from_snapshot_is_the_last_readable_time(state, lower):
    if lower >= state.upper:
        return
    if not readable(check_contents, state, lower):
        with pytest.raises(CollectionErrored):
            reachable(state, lower, snapshot=True)
        return
    upper = reachable(state, lower, snapshot=True)
    assert upper > lower, "the snapshot itself can always be given"
    assert readable(check_changes, state, lower + 1, upper)
    assert upper == state.upper or not readable(check_contents, state, upper)


def test_reachable_stops_at_start_of_error():
    state = errored(10, None)
    assert reachable(state, 9, snapshot=True) == 10
    assert reachable(state, 9) == 10
    for snapshot in (False, True):
        with pytest.raises(CollectionErrored, match="as of 10"):
            reachable(state, 10, snapshot=snapshot)


def test_read_in_recovered_error_span_raises_with_its_end_and_hint():
    state = errored(10, 35)
    for call in (lambda: check_contents(state, 12), lambda: check_changes(state, 5, 36)):
        with pytest.raises(CollectionErrored, match="slot is gone") as met:
            call()
        assert met.value.detail == "It was in error from 10 on; that ended at 35. It was dropped."
        assert "resync" not in met.value.hint
        assert met.value.hint.startswith("Read as of 35 or later. A listener must start again")
        assert "As of 9 or earlier" in met.value.hint
        assert (met.value.since, met.value.until) == (10, 35)
    check_contents(state, 35)
    lasting = errored(10, None)
    with pytest.raises(CollectionErrored) as met:
        check_contents(lasting, 12)
    assert met.value.hint == "Read as of 9 or earlier. Run resync."
    assert met.value.until is None
