"""The fold of the log: what counts, what is void, and that everybody folds alike."""

import random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from penstock.errors import InternalError
from penstock.persist.encoding import decode_entry, decode_rollup, encode_entry, encode_rollup
from penstock.persist.state import (
    END,
    TOKENS_KEPT,
    Allow,
    Alter,
    Batch,
    CloseStaging,
    Create,
    Destroy,
    Discard,
    Entry,
    ExpireHold,
    Forget,
    ForgetHold,
    Inline,
    Intend,
    Link,
    Merge,
    OpenStaging,
    Release,
    RolledUp,
    SchemaVersion,
    Seal,
    Settle,
    State,
    Stored,
    TakeEpoch,
    Writer,
    apply,
    void_reason,
)

COLUMNS = pa.schema([("k", pa.string())]).serialize().to_pybytes()
SCHEMA = SchemaVersion(0, 0, COLUMNS)


def entry(epoch, *operations, token="t", location="l1"):
    return Entry(location=location, epoch=epoch, token=token, at_ms=0, operations=operations)


def stored(staging="1-0", name="a", lower=0, upper=1):
    part = Stored(f"batch/{staging}/{name}.parquet", 9, 7, footer=8, footer_checksum=5)
    return Batch(0, lower, upper, 1, 9, (part,))


def inline(lower=0, upper=1):
    return Batch(0, lower, upper, 1, 4, (Inline(b"rows"),))


def folded(*entries):
    state = State()
    for each in entries:
        state = apply(state, each)
    return state


TAKEN = entry(1, TakeEpoch(Writer("w"), "l1"), OpenStaging("1-0"))
MADE = entry(1, Create("c", SCHEMA))


def voided(state, given):
    """Applying it took its number and changed nothing else."""
    after = apply(state, given)
    return after == structs.replace(state, seqno=state.seqno + 1)


def test_an_entry_of_an_epoch_that_is_over_changes_nothing():
    state = folded(TAKEN, MADE, entry(2, TakeEpoch(Writer("w"), "l2")))
    late = entry(1, Seal(1, 5))
    assert "epoch 1 is over" in void_reason(state, late)
    assert voided(state, late)
    assert state.location == "l1"


def test_an_entry_that_strayed_from_another_location_changes_nothing():
    state = folded(TAKEN, MADE)
    assert 'written for location "l2"' in void_reason(state, entry(1, Seal(1, 5), location="l2"))
    assert voided(state, entry(1, Seal(1, 5), location="l2"))
    assert voided(state, entry(2, TakeEpoch(Writer("w"), "l2"), location="l2"))


def test_a_second_taker_of_the_same_epoch_is_void():
    state = folded(TAKEN)
    assert voided(state, entry(1, TakeEpoch(Writer("v"), "l2")))
    assert voided(state, entry(3, TakeEpoch(Writer("v"), "l2")))


def test_an_epoch_nobody_began_is_a_broken_log():
    with pytest.raises(InternalError, match="no entry before it began"):
        apply(folded(TAKEN), entry(2, Seal(1, 5)))


def test_after_release_the_epoch_writes_nothing_more():
    state = folded(TAKEN, MADE, entry(1, Release()))
    assert "was released" in void_reason(state, entry(1, Seal(1, 5)))
    assert voided(state, entry(1, Seal(1, 5)))


@pytest.mark.parametrize("how", ["closed", "taken over", "never opened"])
def test_what_lies_under_a_closed_staging_id_cannot_be_linked(how):
    state = folded(TAKEN, MADE)
    epoch, staging = 1, "1-0"
    if how == "closed":
        state = apply(state, entry(1, CloseStaging("1-0")))
    elif how == "taken over":
        state, epoch = apply(state, entry(2, TakeEpoch(Writer("w"), ""))), 2
    else:
        staging = "1-7"
    # All of the entry is void, its innocent half too.
    both = entry(epoch, Seal(1, 3), Link(1, (stored(staging),)))
    assert "is closed" in void_reason(state, both)
    assert voided(state, both)
    linked = folded(TAKEN, MADE, entry(1, Link(1, (inline(),))))
    merge = entry(1, Merge(1, (2,), stored("1-7")))
    assert voided(linked, merge)


def test_a_takeover_ends_intentions_that_nobody_can_settle_now():
    state = folded(TAKEN, MADE, entry(1, Intend({1: 4}, 2)))
    assert state.collections[1].intended == 4
    state = apply(state, entry(2, TakeEpoch(Writer("w"), "")))
    assert (state.collections[1].intended, state.collecting) == (None, None)


def test_discarding_keeps_what_is_sealed_of_a_batch():
    state = folded(
        TAKEN,
        MADE,
        entry(1, Link(1, (inline(0, 9), stored(lower=5, upper=7), inline(1, 3))), Seal(1, 4)),
        entry(1, Discard(1)),
    )
    assert [(b.lower, b.upper, b.until) for b in state.collections[1].batches] == [
        (0, 4, 4),
        (1, 3, END),
    ]
    assert list(state.garbage) == ["batch/1-0/a.parquet"]


def test_a_merge_stands_where_its_first_input_stood_and_unlinks_them():
    state = folded(
        TAKEN,
        MADE,
        entry(1, Link(1, (inline(), stored(), inline(), inline())), Seal(1, 4)),
        entry(1, Merge(1, (3, 4), inline(2, 3))),
    )
    assert [b.id for b in state.collections[1].batches] == [2, 6, 5]
    assert state.garbage["batch/1-0/a.parquet"] == 3
    with pytest.raises(InternalError, match="lacks"):
        apply(state, entry(1, Merge(1, (3,), None)))


def test_since_never_goes_back_and_ids_are_never_used_again():
    state = folded(TAKEN, MADE, entry(1, Settle({1: 5}, 0)), entry(1, Settle({1: 3}, 0)))
    assert state.collections[1].since == 5
    state = folded(TAKEN, MADE, entry(1, Destroy(1)), MADE)
    assert list(state.collections) == [2]


def test_the_last_token_of_each_recent_epoch_is_remembered():
    state = State()
    for epoch in range(1, TOKENS_KEPT + 10):
        state = apply(state, entry(epoch, TakeEpoch(Writer("w"), ""), token=f"t{epoch}"))
        state = apply(state, entry(epoch, Create(f"c{epoch}", SCHEMA), token=f"last{epoch}"))
    assert len(state.tokens) == TOKENS_KEPT
    assert state.tokens[state.epoch] == f"last{state.epoch}"


def some_log(chance: random.Random, length: int) -> list[Entry]:
    """Entries as a writer, or two in turn, might have left them; some void."""
    state, entries = State(), []
    for number in range(length):
        epoch = state.epoch
        ids = [*state.collections]
        batches = {c.id: [b.id for b in c.batches] for c in state.collections.values()}
        id = chance.choice(ids) if ids else 0
        some = (
            chance.sample(batches[id], chance.randint(1, len(batches[id])))
            if ids and batches[id]
            else []
        )
        choices = [(Create(f"c{number}", SCHEMA),)]
        if ids:
            time = chance.randrange(9)
            choices += [
                (Link(id, (inline(time, time + 1), stored(f"{epoch}-0", f"f{number}"))),),
                (Link(id, (inline(0, time + 2),)), Seal(id, state.collections[id].upper + 1)),
                (Seal(id, state.collections[id].upper + 2), Allow(id, time)),
                (Discard(id),),
                (Intend({id: time}, number),),
                (Settle({id: time}, number),),
                (Alter(id, SchemaVersion(1, 3, COLUMNS, defaults=b"d")),),
                (ExpireHold(f"r{number % 3}"), RolledUp(number)),
                (OpenStaging(f"{epoch}-{number}"),),
                (Forget(tuple(state.garbage)[:2]),),
                (Destroy(id),),
                *([(Merge(id, tuple(some), chance.choice([None, inline()])),)] if some else []),
                *([(ForgetHold(min(state.expired)),)] if state.expired else []),
            ]
        made = entry(epoch, *chance.choice(choices), token=f"{number}")
        if epoch == 0 or chance.randrange(8) == 0:
            take = TakeEpoch(Writer("w", address=":1"), "l1"), OpenStaging(f"{epoch + 1}-0")
            made = entry(epoch + 1, *take, token=f"{number}")
        elif chance.randrange(9) == 0:
            made = entry(epoch - 1, *made.operations, token=f"{number}")
        entries.append(made)
        state = apply(state, made)
    return entries


@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_everybody_who_folds_the_same_entries_holds_the_same_state(chance, length):
    entries = some_log(chance, length)
    again = [decode_entry(encode_entry(each), key="k", where="w") for each in entries]
    assert again == entries
    assert folded(*entries) == folded(*again)
    assert encode_rollup(folded(*entries)) == encode_rollup(folded(*again))


@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_a_rollup_stands_for_all_the_entries_below_it(chance, length):
    entries = some_log(chance, length)
    at = chance.randrange(length + 1)
    state = folded(*entries[:at])
    rolled = decode_rollup(encode_rollup(state), key="k", where="w")
    assert rolled == state
    for each in entries[at:]:
        state, rolled = apply(state, each), apply(rolled, each)
        assert rolled == state
