"""Fold of the log: valid and void entries; every process folds to the same state."""

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
    BeginHistory,
    CloseStaging,
    CollectionState,
    Create,
    Destroy,
    Discard,
    Entry,
    ErrorSpan,
    ExpireHold,
    FailCollection,
    Forget,
    ForgetHold,
    Inline,
    Intend,
    Link,
    MergeBatches,
    OpenStaging,
    Operation,
    RecoverCollection,
    Release,
    ReplaceCollection,
    RolledUp,
    SchemaVersion,
    Seal,
    Settle,
    State,
    Stored,
    StoredError,
    TakeEpoch,
    Writer,
    apply,
    foreseen,
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


def reason(state: State, given: Entry) -> str:
    """Return the reason why an entry that must be void is void."""
    text = void_reason(state, given)
    assert text is not None
    return text


def test_an_entry_of_an_epoch_that_is_over_changes_nothing():
    state = folded(TAKEN, MADE, entry(2, TakeEpoch(Writer("w"), "l2")))
    late = entry(1, Seal(1, 5))
    assert "epoch 1 is over" in reason(state, late)
    assert voided(state, late)
    assert state.location == "l1"


def test_an_entry_that_strayed_from_another_location_changes_nothing():
    state = folded(TAKEN, MADE)
    assert 'written for location "l2"' in reason(state, entry(1, Seal(1, 5), location="l2"))
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
    assert "was released" in reason(state, entry(1, Seal(1, 5)))
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
    assert "is closed" in reason(state, both)
    assert voided(state, both)
    linked = folded(TAKEN, MADE, entry(1, Link(1, (inline(),))))
    merge = entry(1, MergeBatches(1, (2,), stored("1-7")))
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
        entry(1, MergeBatches(1, (3, 4), inline(2, 3))),
    )
    assert [b.id for b in state.collections[1].batches] == [2, 6, 5]
    assert state.garbage["batch/1-0/a.parquet"] == 3
    with pytest.raises(InternalError, match="lacks"):
        apply(state, entry(1, MergeBatches(1, (3,), None)))


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


FAILED = StoredError("DefiniteError", "it broke")


def changed(state, *operations, **changes):
    """One entry of these operations changes these fields of collection 1, and no other field."""
    after = apply(state, entry(1, *operations))
    expected = structs.replace(state.collections[1], **changes)
    return after == structs.replace(
        state,
        seqno=state.seqno + 1,
        collections=state.collections.set(1, expected),
    )


def test_taking_an_epoch_sets_writer_and_location_and_closes_staging_ids():
    state = folded(entry(1, TakeEpoch(Writer("w"), "l1"), OpenStaging("1-0"), token="first"))
    assert (state.seqno, state.epoch, state.writer) == (1, 1, Writer("w"))
    assert (state.location, dict(state.staging), dict(state.tokens)) == (
        "l1",
        {"1-0": 1},
        {1: "first"},
    )
    state = apply(state, entry(2, TakeEpoch(None, "l9"), token="second"))
    assert (state.seqno, state.epoch, state.writer, state.location) == (2, 2, None, "l1")
    assert (dict(state.staging), dict(state.tokens)) == ({}, {1: "first", 2: "second"})


def test_a_takeover_ends_the_intention_of_every_collection():
    state = folded(
        TAKEN,
        entry(1, Create("a", SCHEMA), Create("b", SCHEMA), Create("c", SCHEMA)),
        entry(1, Intend({1: 4, 3: 5}, 2)),
        entry(2, TakeEpoch(Writer("w"), "")),
    )
    assert [each.intended for each in state.collections.values()] == [None] * 3
    assert {each.name for each in state.collections.values()} == {"a", "b", "c"}


def test_release_gives_up_lock_and_staging_ids_only():
    state = folded(TAKEN, MADE)
    after = apply(state, entry(1, Release()))
    assert after.writer is None
    assert not after.staging
    assert after == structs.replace(
        state, seqno=3, writer=None, staging=after.staging, tokens=after.tokens
    )


def test_create_takes_the_next_id():
    state = folded(TAKEN, entry(1, Create("a", SCHEMA), Create("c", SCHEMA, owner="shop")))
    assert state.collections[2] == CollectionState(id=2, name="c", schemas=(SCHEMA,), owner="shop")
    assert (dict(state.names), state.next_id) == ({"a": 1, "c": 2}, 3)


def test_alter_appends_a_schema_version():
    state = folded(TAKEN, MADE)
    second = SchemaVersion(1, 3, COLUMNS)
    assert changed(state, Alter(1, second), schemas=(SCHEMA, second))


def test_link_gives_each_batch_an_id_and_keeps_earlier_batches():
    state = folded(TAKEN, MADE, entry(1, Link(1, (inline(),))))
    after = apply(state, entry(1, Link(1, (inline(1, 2), inline(2, 3)))))
    assert [(b.id, b.lower) for b in after.collections[1].batches] == [(2, 0), (3, 1), (4, 2)]
    assert after.next_id == 5


def test_seal_moves_upper_and_allow_raises_allowed():
    state = folded(TAKEN, MADE)
    assert changed(state, Seal(1, 7), upper=7)
    assert changed(state, Allow(1, 5), allowed=5)
    assert changed(state, Allow(1, 5), Allow(1, 3), allowed=5)


def test_begin_sets_the_first_time_and_never_lowers_what_is_allowed():
    state = folded(TAKEN, MADE)
    assert changed(state, BeginHistory(1, 6), begins=6, since=6, allowed=6)
    allowed = apply(state, entry(1, Allow(1, 9)))
    assert changed(allowed, BeginHistory(1, 6), begins=6, since=6, allowed=9)


def test_recover_ends_the_last_error_and_drops_one_that_never_was():
    first = ErrorSpan(3, FAILED, 5)
    state = folded(
        TAKEN, MADE, entry(1, FailCollection(1, 3, FAILED)), entry(1, RecoverCollection(1, 5))
    )
    assert state.collections[1].errors == (first,)
    assert changed(state, FailCollection(1, 7, FAILED), errors=(first, ErrorSpan(7, FAILED)))
    assert changed(state, FailCollection(1, 7, FAILED), RecoverCollection(1, 7), errors=(first,))
    lasting = (first, ErrorSpan(7, FAILED, 8))
    assert changed(state, FailCollection(1, 7, FAILED), RecoverCollection(1, 8), errors=lasting)


def test_settle_drops_error_spans_that_no_read_can_meet():
    state = folded(
        TAKEN,
        MADE,
        entry(
            1, FailCollection(1, 3, FAILED), RecoverCollection(1, 5), FailCollection(1, 7, FAILED)
        ),
        entry(1, Intend({1: 5}, 2)),
    )
    lasting = ErrorSpan(7, FAILED)
    before = apply(state, entry(1, Settle({1: 4}, 0))).collections[1]
    assert (before.since, before.errors) == (4, (ErrorSpan(3, FAILED, 5), lasting))
    after = apply(state, entry(1, Settle({1: 5}, 0))).collections[1]
    assert (after.since, after.intended, after.errors) == (5, None, (lasting,))


def test_intend_and_settle_skip_destroyed_collections_and_record_what_is_collected():
    state = folded(TAKEN, entry(1, Create("a", SCHEMA), Create("b", SCHEMA), Destroy(1)))
    state = apply(state, entry(1, Intend({1: 4, 2: 6}, 2)))
    assert (state.collections[2].intended, state.collecting, state.collected) == (6, 2, 0)
    state = apply(state, entry(1, Settle({1: 4, 2: 5}, 2)))
    settled = state.collections[2]
    assert (settled.since, settled.intended) == (5, None)
    assert (state.collecting, state.collected) == (None, 2)
    assert apply(state, entry(1, Settle({}, 1))).collected == 2
    assert [*state.collections] == [2]


def replaced():
    """Collection 2 has had the name "c" since time 7, collection 3 since time 9."""
    return folded(
        TAKEN,
        entry(1, Create("c", SCHEMA), Create("c/2", SCHEMA), Create("c/3", SCHEMA)),
        entry(1, Seal(1, 4), BeginHistory(2, 7), ReplaceCollection(1, 2, 7)),
        entry(1, Seal(2, 8), BeginHistory(3, 9), ReplaceCollection(2, 3, 9)),
    )


def test_replace_moves_the_name_and_links_the_generations():
    state = replaced()
    assert dict(state.names) == {"c": 3}
    rows = [
        (each.id, each.name, each.upper, each.predecessors, each.successor)
        for each in sorted(state.collections.values(), key=lambda each: each.id)
    ]
    assert rows == [(1, "c", 7, (), 2), (2, "c", 9, (1,), 3), (3, "c", 0, (1, 2), 0)]


def test_a_name_as_of_a_time_is_the_generation_that_had_it():
    state = replaced()
    assert [each.id for each in state.generations("c")] == [1, 2, 3]
    asked = {None: 3, 0: 1, 6: 1, 7: 2, 8: 2, 9: 3, 99: 3}
    assert {time: state.named("c", time).id for time in asked} == asked
    assert (state.named("d"), state.named("d", 3), state.generations("d")) == (None, None, [])


def test_destroy_of_an_older_generation_leaves_the_name():
    state = apply(replaced(), entry(1, Destroy(1)))
    assert dict(state.names) == {"c": 3}
    assert [each.id for each in state.generations("c")] == [2, 3]
    second = state.named("c", 3)
    assert second is not None
    assert second.id == 2


def test_destroy_removes_every_generation_and_unlinks_their_files():
    state = apply(replaced(), entry(1, Link(1, (stored(name="a"),)), Link(3, (stored(name="b"),))))
    number = state.seqno
    state = apply(state, entry(1, Destroy(3)))
    assert (dict(state.collections), dict(state.names)) == ({}, {})
    assert dict(state.garbage) == {
        "batch/1-0/a.parquet": number,
        "batch/1-0/b.parquet": number,
    }


def test_discard_keeps_batches_up_to_upper_and_cuts_the_one_that_crosses_it():
    state = folded(
        TAKEN,
        MADE,
        entry(1, Link(1, (inline(2, 4), inline(3, 5), inline(4, 5))), Seal(1, 4)),
        entry(1, Discard(1)),
    )
    found = [(b.id, b.lower, b.upper, b.until) for b in state.collections[1].batches]
    assert found == [(2, 2, 4, END), (3, 3, 4, 4)]


def test_merge_into_nothing_takes_no_id_and_keeps_the_order():
    state = folded(TAKEN, MADE, entry(1, Link(1, (inline(), inline(), inline(), inline()))))
    after = apply(state, entry(1, MergeBatches(1, (3, 4), None)))
    assert [b.id for b in after.collections[1].batches] == [2, 5]
    assert after.next_id == state.next_id
    after = apply(state, entry(1, MergeBatches(1, (2, 5), inline(7, 8))))
    assert [(b.id, b.lower) for b in after.collections[1].batches] == [(6, 7), (3, 0), (4, 0)]
    assert after.next_id == state.next_id + 1


def test_merge_output_needs_an_open_staging_id():
    state = folded(TAKEN, MADE, entry(1, Link(1, (inline(),))))
    after = apply(state, entry(1, MergeBatches(1, (2,), stored())))
    assert after.linked() == {"batch/1-0/a.parquet"}
    assert after.collections[1].batches[0].id == 3


def test_staging_ids_rollups_holds_and_garbage_are_recorded():
    state = folded(TAKEN, MADE, entry(1, Link(1, (stored(name="a"), stored(name="b")))))
    state = apply(state, entry(1, Destroy(1), OpenStaging("1-1"), CloseStaging("1-0")))
    assert dict(state.staging) == {"1-1": 1}
    state = apply(state, entry(1, Forget(("batch/1-0/a.parquet", "batch/1-0/z.parquet"))))
    assert dict(state.garbage) == {"batch/1-0/b.parquet": 3}
    for number in (1, 3, 4):
        state = apply(state, entry(1, RolledUp(number)))
    assert state.rollups == (3, 4)
    state = apply(state, entry(1, ExpireHold("r"), ExpireHold("s")))
    assert dict(state.expired) == {"r": 8, "s": 8}
    assert dict(apply(state, entry(1, ForgetHold("r"))).expired) == {"s": 8}


def test_an_operation_on_a_missing_collection_is_a_broken_log():
    with pytest.raises(InternalError, match="entry 1 names collection 4, which does not exist"):
        apply(folded(TAKEN), entry(1, Seal(4, 5)))


def test_foreseen_state_takes_no_number_and_stamps_the_next_one():
    state = folded(TAKEN, MADE, entry(1, Link(1, (stored(),))))
    ahead = foreseen(state, [Destroy(1), OpenStaging("1-5")])
    assert (ahead.seqno, dict(ahead.garbage)) == (3, {"batch/1-0/a.parquet": 3})
    assert dict(ahead.staging) == {"1-0": 1, "1-5": 1}
    assert ahead.tokens == state.tokens


def test_listed_names_are_sorted_and_hidden_ones_left_out():
    state = folded(TAKEN, entry(1, Create("b", SCHEMA), Create("a/x", SCHEMA), Create("a", SCHEMA)))
    assert state.listed() == ["a", "b"]
    assert state.listed(hidden=True) == ["a", "a/x", "b"]


def test_the_token_that_leaves_is_the_oldest():
    state = State()
    for epoch in range(1, TOKENS_KEPT + 2):
        state = apply(state, entry(epoch, TakeEpoch(Writer("w"), "")))
    assert min(state.tokens) == 2
    assert max(state.tokens) == TOKENS_KEPT + 1


def test_a_first_entry_may_name_any_location():
    assert void_reason(State(), entry(1, TakeEpoch(Writer("w"), "l7"), location="l7")) is None
    assert void_reason(folded(TAKEN), entry(1)) is None


def some_log(rng: random.Random, length: int) -> list[Entry]:
    """Entries as a writer, or two in turn, might have left them; some void."""
    state, entries = State(), []
    for number in range(length):
        epoch = state.epoch
        ids = [*state.collections]
        batches = {c.id: [b.id for b in c.batches] for c in state.collections.values()}
        id = rng.choice(ids) if ids else 0
        some = (
            rng.sample(batches[id], rng.randint(1, len(batches[id]))) if ids and batches[id] else []
        )
        choices: list[tuple[Operation, ...]] = [(Create(f"c{number}", SCHEMA),)]
        if ids:
            time = rng.randrange(9)
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
                *([(MergeBatches(id, tuple(some), rng.choice([None, inline()])),)] if some else []),
                *([(ForgetHold(min(state.expired)),)] if state.expired else []),
            ]
        made = entry(epoch, *rng.choice(choices), token=f"{number}")
        if epoch == 0 or rng.randrange(8) == 0:
            take = TakeEpoch(Writer("w", address=":1"), "l1"), OpenStaging(f"{epoch + 1}-0")
            made = entry(epoch + 1, *take, token=f"{number}")
        elif rng.randrange(9) == 0:
            made = entry(epoch - 1, *made.operations, token=f"{number}")
        entries.append(made)
        state = apply(state, made)
    return entries


@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_folds_of_the_same_entries_are_equal(rng, length):
    entries = some_log(rng, length)
    again = [decode_entry(encode_entry(each), key="k", where="w") for each in entries]
    assert again == entries
    assert folded(*entries) == folded(*again)
    assert encode_rollup(folded(*entries)) == encode_rollup(folded(*again))


@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_rollup_replaces_all_entries_below_it(rng, length):
    entries = some_log(rng, length)
    at = rng.randrange(length + 1)
    state = folded(*entries[:at])
    rolled = decode_rollup(encode_rollup(state), key="k", where="w")
    assert rolled == state
    for each in entries[at:]:
        state, rolled = apply(state, each), apply(rolled, each)
        assert rolled == state
