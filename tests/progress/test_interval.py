"""Laws of intervals and of what a batch says about one."""

from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.progress import MAX_TIME, Description, Interval

# Enough to find a planted bug; nobody reads the example, so it need not be the smallest.
planted = settings(
    max_examples=1_000, derandomize=True, database=None, phases=[Phase.generate], deadline=None
)

times = st.integers(0, 12)
intervals = st.tuples(times, times).map(sorted).map(lambda ends: Interval(*ends))
descriptions = st.builds(Description, intervals, times)


def check_bounds(contains: Callable[[Interval, int], bool], trial: settings) -> None:
    @trial
    @given(interval=intervals, time=times)
    def law(interval: Interval, time: int) -> None:
        inside = time in range(interval.lower, interval.upper)
        assert contains(interval, time) == inside

    law()


def test_an_interval_contains_its_lower_and_not_its_upper() -> None:
    check_bounds(Interval.contains, settings())


def test_an_inclusive_upper_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_bounds(lambda interval, time: interval.lower <= time <= interval.upper, planted)


@given(interval=intervals)
def test_an_interval_is_empty_if_it_contains_nothing(interval: Interval) -> None:
    assert interval.empty == (not any(interval.contains(time) for time in range(13)))


def check_intersection(
    intersect: Callable[[Interval, Interval], Interval], trial: settings
) -> None:
    @trial
    @given(a=intervals, b=intervals, c=intervals, time=times)
    def law(a: Interval, b: Interval, c: Interval, time: int) -> None:
        assert intersect(a, b).contains(time) == (a.contains(time) and b.contains(time))
        assert intersect(a, b) == intersect(b, a)
        assert intersect(intersect(a, b), c) == intersect(a, intersect(b, c))
        assert intersect(a, a) == a

    law()


def test_an_intersection_contains_what_both_do() -> None:
    check_intersection(Interval.intersect, settings())


def test_an_empty_intersection_in_the_wrong_place_is_caught() -> None:
    def at_our_lower(a: Interval, b: Interval) -> Interval:
        lower, upper = max(a.lower, b.lower), min(a.upper, b.upper)
        return Interval(lower, upper) if lower < upper else Interval(a.lower, a.lower)

    with pytest.raises(AssertionError):
        check_intersection(at_our_lower, planted)


@given(interval=intervals, data=st.data())
def test_an_interval_split_and_rejoined_is_itself(interval: Interval, data: st.DataObject) -> None:
    at = data.draw(st.integers(interval.lower, interval.upper))
    before, after = interval.split(at)
    assert before.adjoins(after)
    assert before.union(after) == after.union(before) == interval
    assert before.intersect(after).empty
    for time in range(13):
        assert before.contains(time) == (interval.contains(time) and time < at)
        assert after.contains(time) == (interval.contains(time) and time >= at)


@given(a=intervals, b=intervals)
def test_a_union_contains_each_time_of_both_once(a: Interval, b: Interval) -> None:
    if not a.adjoins(b):
        with pytest.raises(UsageError, match="do not adjoin"):
            a.union(b)
        return
    union = a.union(b)
    for time in range(13):
        assert int(union.contains(time)) == a.contains(time) + b.contains(time)


@given(interval=intervals, at=times)
def test_a_split_outside_is_refused(interval: Interval, at: int) -> None:
    if not interval.lower <= at <= interval.upper:
        with pytest.raises(UsageError, match="ends before it begins"):
            interval.split(at)


def test_an_interval_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(UsageError, match=r"interval \[5, 3\) ends before it begins"):
        Interval(5, 3)


@pytest.mark.parametrize(("lower", "upper"), [(-1, 3), (0, MAX_TIME + 1), (True, 3)])
def test_ends_must_be_times(lower: int, upper: int) -> None:
    with pytest.raises(UsageError, match="time"):
        Interval(lower, upper)


@given(description=descriptions, time=times, since=times)
def test_a_batch_may_hold_any_time_that_advancing_can_give(
    description: Description, time: int, since: int
) -> None:
    if description.interval.contains(time):
        assert description.admits(max(time, min(since, description.since)))


@given(description=descriptions, time=times)
def test_a_batch_holds_no_time_that_advancing_cannot_give(
    description: Description, time: int
) -> None:
    interval, since = description.interval, description.since
    reachable = {
        max(each, to) for each in range(interval.lower, interval.upper) for to in range(since + 1)
    }
    assert description.admits(time) == (time in reachable)


@given(description=descriptions, data=st.data())
def test_merged_batches_are_readable_where_both_were(
    description: Description, data: st.DataObject
) -> None:
    at = data.draw(st.integers(description.interval.lower, description.interval.upper))
    before, after = description.interval.split(at)
    merged = Description(before, description.since).merged(Description(after, 6))
    assert merged == Description(description.interval, max(description.since, 6))
