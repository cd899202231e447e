"""Laws of updates: sums stay the same, whatever is done to their terms."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.progress import (
    MAX_DIFF,
    MIN_DIFF,
    Interval,
    Update,
    accumulate_as_of,
    advance,
    changes_between,
    consolidate,
)

Updates = list[Update[str]]
Consolidate = Callable[[Iterable[Update[str]]], Updates]
Advance = Callable[[Iterable[Update[str]], int], Updates]

# Enough to find a planted bug; nobody reads the example, so it need not be the smallest.
planted = settings(
    max_examples=1_000, derandomize=True, database=None, phases=[Phase.generate], deadline=None
)

times = st.integers(0, 8)
batches = st.lists(
    st.builds(Update[str], st.sampled_from("abc"), times, st.integers(-2, 2)), max_size=12
)


def sums(updates: Iterable[Update[str]]) -> dict[tuple[str, int], int]:
    """What the updates come to, written the long way round."""
    places = {(update.data, update.time) for update in updates}
    totals = {
        place: sum(update.diff for update in updates if update[:2] == place) for place in places
    }
    return {place: total for place, total in totals.items() if total != 0}


# Consolidation.


def check_consolidation(consolidated: Consolidate, trial: settings) -> None:
    @trial
    @given(updates=batches, cut=st.integers(0, 12))
    def law(updates: Updates, cut: int) -> None:
        once = consolidated(updates)
        assert len({update[:2] for update in once}) == len(once), "one for each data and time"
        assert {update[:2]: update.diff for update in once} == sums(updates), "the same sum"
        assert consolidated(once) == once, "idempotent"
        parts = consolidated(updates[:cut]) + consolidated(updates[cut:])
        assert sorted(consolidated(parts)) == sorted(once), "any split gives the same sum"

    law()


def test_consolidation_keeps_the_sum_however_the_batch_is_split() -> None:
    check_consolidation(consolidate, settings())
    check_consolidation(lambda updates: consolidate(updates, key=str), settings())


def only_neighbours(updates: Iterable[Update[str]]) -> Updates:
    runs = groupby(updates, key=lambda update: update[:2])
    totals = [(place, sum(update.diff for update in run)) for place, run in runs]
    return [Update(data, time, total) for (data, time), total in totals if total]


def keeping_zeros(updates: Iterable[Update[str]]) -> Updates:
    totals = Counter[tuple[str, int]]()
    for update in updates:
        totals[update[:2]] += update.diff
    return [Update(data, time, total) for (data, time), total in totals.items()]


def forgetting_retractions(updates: Iterable[Update[str]]) -> Updates:
    return [update for update in consolidate(updates) if update.diff > 0]


def forgetting_times(updates: Iterable[Update[str]]) -> Updates:
    return consolidate([Update(update.data, 0, update.diff) for update in updates])


@pytest.mark.parametrize(
    "wrong", [only_neighbours, keeping_zeros, forgetting_retractions, forgetting_times]
)
def test_a_wrong_consolidation_is_caught(wrong: Consolidate) -> None:
    with pytest.raises(AssertionError):
        check_consolidation(wrong, planted)


@given(updates=batches, data=st.data())
def test_with_a_key_the_order_of_updates_leaves_no_trace(
    updates: Updates, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(updates))
    consolidated = consolidate(updates, key=str)
    assert consolidate(shuffled, key=str) == consolidated == sorted(consolidated)


@given(updates=batches)
def test_without_a_key_the_order_is_that_of_first_appearance(updates: Updates) -> None:
    appeared = list(dict.fromkeys(update[:2] for update in updates))
    places = [appeared.index(update[:2]) for update in consolidate(updates)]
    assert places == sorted(places)


def test_data_need_not_sort() -> None:
    updates = [Update(frozenset("b"), 1, +1), Update(frozenset("a"), 1, +1)]
    assert consolidate(updates) == updates


def test_updates_may_be_an_iterator() -> None:
    updates = [Update("a", 1, +1), Update("a", 2, +1)]
    assert consolidate(iter(updates)) == updates
    assert accumulate_as_of(iter(updates), 2) == {"a": 2}


# Compaction: advance, then consolidate.


def check_compaction(
    advanced: Advance, accumulated: Callable[[Updates, int], dict[str, int]], trial: settings
) -> None:
    @trial
    @given(updates=batches, since=times, later=times)
    def law(updates: Updates, since: int, later: int) -> None:
        compacted = consolidate(advanced(updates, since))
        assert all(update.time >= since for update in compacted)
        as_of = since + later
        assert accumulated(compacted, as_of) == contents(updates, as_of)

    law()


def contents(updates: Updates, as_of: int) -> dict[str, int]:
    """The contents as of a time, from the definition."""
    counts = {
        data: sum(update.diff for update in updates if update.data == data and update.time <= as_of)
        for data in "abc"
    }
    return {data: count for data, count in counts.items() if count != 0}


def test_compaction_is_invisible_from_since_on() -> None:
    check_compaction(advance, accumulate_as_of, settings())


def one_too_far(updates: Iterable[Update[str]], since: int) -> Updates:
    return advance(updates, since + 1)


def everything_at_since(updates: Iterable[Update[str]], since: int) -> Updates:
    return [Update(data, since, diff) for data, _, diff in updates]


def dropping_the_old(updates: Iterable[Update[str]], since: int) -> Updates:
    return [update for update in updates if update.time >= since]


def not_at_all(updates: Iterable[Update[str]], _since: int) -> Updates:
    return list(updates)


@pytest.mark.parametrize("wrong", [one_too_far, everything_at_since, dropping_the_old, not_at_all])
def test_a_wrong_advance_is_caught(wrong: Advance) -> None:
    with pytest.raises(AssertionError):
        check_compaction(wrong, accumulate_as_of, planted)


def test_contents_that_leave_out_their_own_time_are_caught() -> None:
    def exclusive(updates: Updates, as_of: int) -> dict[str, int]:
        return accumulate_as_of(updates, as_of - 1) if as_of else {}

    with pytest.raises(AssertionError):
        check_compaction(advance, exclusive, planted)


@given(updates=batches, since=times)
def test_consolidating_first_does_not_change_what_advancing_gives(
    updates: Updates, since: int
) -> None:
    directly = consolidate(advance(updates, since), key=str)
    assert consolidate(advance(consolidate(updates), since), key=str) == directly


@given(updates=batches, first=times, second=times)
def test_advancing_twice_is_advancing_to_the_later(
    updates: Updates, first: int, second: int
) -> None:
    assert advance(advance(updates, first), second) == advance(updates, max(first, second))


# Changes.


def check_changes(changes: Callable[[Updates, Interval], dict[str, int]], trial: settings) -> None:
    @trial
    @given(updates=batches, ends=st.tuples(times, times))
    def law(updates: Updates, ends: tuple[int, int]) -> None:
        interval = Interval(min(ends), max(ends))
        expected = Counter(contents(updates, interval.upper - 1))
        expected.subtract(contents(updates, interval.lower - 1))
        assert changes(updates, interval) == {each: n for each, n in expected.items() if n}

    law()


def test_changes_lead_from_the_contents_before_to_those_at_the_end() -> None:
    check_changes(changes_between, settings())


def test_changes_that_include_the_upper_are_caught() -> None:
    def inclusive(updates: Updates, interval: Interval) -> dict[str, int]:
        return changes_between(updates, Interval(interval.lower, interval.upper + 1))

    with pytest.raises(AssertionError):
        check_changes(inclusive, planted)


@given(updates=batches, as_of=times)
def test_contents_are_the_changes_since_the_beginning(updates: Updates, as_of: int) -> None:
    assert accumulate_as_of(updates, as_of) == changes_between(updates, Interval(0, as_of + 1))


def test_a_negative_count_is_shown() -> None:
    assert accumulate_as_of([Update("a", 1, -1)], 1) == {"a": -1}


# Sixty-four bits.


@pytest.mark.parametrize(("diff", "more"), [(MAX_DIFF, +1), (MIN_DIFF, -1)])
def test_a_sum_that_does_not_fit_is_refused_with_its_data(diff: int, more: int) -> None:
    updates = [Update("order 7", 1, diff), Update("order 7", 1, more)]
    sums_up: list[Callable[[], object]] = [
        lambda: consolidate(updates),
        lambda: accumulate_as_of(updates, 1),
        lambda: changes_between(updates, Interval(0, 2)),
    ]
    for summed in sums_up:
        with pytest.raises(UsageError, match=f"{diff + more} does not fit") as refused:
            summed()
        assert refused.value.detail == "The data is 'order 7'."


@pytest.mark.parametrize("diff", [MAX_DIFF, MIN_DIFF])
def test_a_sum_that_fits_in_the_end_is_exact_on_the_way(diff: int) -> None:
    updates = [Update("a", 1, diff), Update("a", 1, diff), Update("a", 1, -diff)]
    assert consolidate(updates) == [Update("a", 1, diff)]


def test_long_data_is_shortened_in_the_error() -> None:
    with pytest.raises(UsageError) as refused:
        consolidate([Update("x" * 10_000, 1, MAX_DIFF), Update("x" * 10_000, 1, 1)])
    assert len(refused.value.detail) < 100


@pytest.mark.parametrize("time", [-1, True, 2**63])
def test_what_is_not_a_time_is_refused(time: int) -> None:
    nothing: Updates = []
    with pytest.raises(UsageError, match="time"):
        advance(nothing, time)
    with pytest.raises(UsageError, match="time"):
        accumulate_as_of(nothing, time)
