"""Laws of times: ours are checked numbers, those with partitions a partial order."""

from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.progress import MAX_TIME, MIN_TIME, Between, Exactly, PartitionedTime, check_time

Point = PartitionedTime[float]
Relation = Callable[[Point, Point], bool]

# Whole numbers are partitions and halves are the room between them, so these
# points tell apart any two sets of partitions that the strategies can name.
GRID = [half / 2 for half in range(-2, 15)]

# Enough to find a planted bug; nobody reads the example, so it need not be the smallest.
planted = settings(
    max_examples=1_000, derandomize=True, database=None, phases=[Phase.generate], deadline=None
)


@st.composite
def partitioned_times(draw: st.DrawFn) -> Point:
    offset = draw(st.integers(0, 3))
    if draw(st.booleans()):
        return PartitionedTime.exactly(draw(partitions), offset=offset)
    above, below = sorted(draw(st.sets(partitions, min_size=2, max_size=2)))
    return PartitionedTime.between(
        draw(st.sampled_from([None, above])), draw(st.sampled_from([None, below])), offset=offset
    )


partitions = st.integers(0, 6).map(float)
times = partitioned_times()


def points_of(time: Point) -> set[float]:
    """Which points of the grid a time is about, without asking the order."""
    match time.partitions:
        case Exactly(partition=partition):
            return {partition}
        case Between(above=above, below=below):
            return {
                point
                for point in GRID
                if (above is None or point > above) and (below is None or point < below)
            }


# The order is partial.


def check_partial_order(at_or_before: Relation, trial: settings) -> None:
    @trial
    @given(a=times, b=times, c=times)
    def law(a: Point, b: Point, c: Point) -> None:
        assert at_or_before(a, a), "reflexive"
        if at_or_before(a, b) and at_or_before(b, a):
            assert a == b, "antisymmetric"
        if at_or_before(a, b) and at_or_before(b, c):
            assert at_or_before(a, c), "transitive"

    law()


def test_partitioned_times_are_partially_ordered() -> None:
    check_partial_order(Point.at_or_before, settings())


def strictly_before(a: Point, b: Point) -> bool:
    return a.offset < b.offset and points_of(a) >= points_of(b)


def offsets_alone(a: Point, b: Point) -> bool:
    return a.offset <= b.offset


def overlapping(a: Point, b: Point) -> bool:
    return a.offset <= b.offset and not points_of(a).isdisjoint(points_of(b))


@pytest.mark.parametrize("wrong", [strictly_before, offsets_alone, overlapping])
def test_a_wrong_order_is_caught(wrong: Relation) -> None:
    with pytest.raises(AssertionError):
        check_partial_order(wrong, planted)


# And it is the one that the docstring says.


def check_meaning(at_or_before: Relation, trial: settings) -> None:
    @trial
    @given(a=times, b=times)
    def law(a: Point, b: Point) -> None:
        about_as_many = points_of(a) >= points_of(b)
        assert at_or_before(a, b) == (about_as_many and a.offset <= b.offset)

    law()


def test_a_time_is_before_another_about_fewer_partitions_at_an_offset_no_less() -> None:
    check_meaning(Point.at_or_before, settings())


def reversed_containment(a: Point, b: Point) -> bool:
    return a.offset <= b.offset and points_of(a) <= points_of(b)


@pytest.mark.parametrize("wrong", [reversed_containment, overlapping])
def test_another_order_is_caught_even_if_it_is_partial(wrong: Relation) -> None:
    with pytest.raises(AssertionError):
        check_meaning(wrong, planted)


@given(time=times, partition=partitions, offset=st.integers(0, 3))
def test_a_time_is_before_the_events_of_its_partitions(
    time: Point, partition: float, offset: int
) -> None:
    event = PartitionedTime.exactly(partition, offset=offset)
    promised = partition in points_of(time) and time.offset <= offset
    assert time.at_or_before(event) == promised


# Join.


@given(a=times, b=times, c=times)
def test_join_is_the_first_time_after_both(a: Point, b: Point, c: Point) -> None:
    join = a.join(b)
    after_both = a.at_or_before(c) and b.at_or_before(c)
    assert after_both == (join is not None and join.at_or_before(c))


@given(a=times, b=times)
def test_join_is_commutative_and_exists_where_partitions_are_common(a: Point, b: Point) -> None:
    join = a.join(b)
    assert join == b.join(a)
    assert (points_of(join) if join else set[float]()) == points_of(a) & points_of(b)


@given(a=times, b=times)
def test_being_before_is_joining_to_the_other(a: Point, b: Point) -> None:
    assert a.at_or_before(b) == (a.join(b) == b)


# Partitions may be called by anything that sorts.


@given(above=st.text(), name=st.text(), below=st.text())
def test_names_of_partitions_compare_as_strings(above: str, name: str, below: str) -> None:
    above, below = sorted((above, below))
    event = PartitionedTime.exactly(name, offset=1)
    if above < below:
        unseen = PartitionedTime.between(above, below, offset=0)
        assert unseen.at_or_before(event) == (above < name < below)


@pytest.mark.parametrize(("above", "below"), [(3, 3), (7, 3)])
def test_an_interval_without_partitions_is_refused(above: int, below: int) -> None:
    with pytest.raises(UsageError, match=f"no partitions between {above} and {below}"):
        Between(above, below)


def test_a_negative_offset_is_refused() -> None:
    with pytest.raises(UsageError, match="offset -1 of partition 3 is negative"):
        PartitionedTime.exactly(3, offset=-1)


def test_times_print_as_partitions_and_offset() -> None:
    assert str(PartitionedTime.exactly("orders/7", offset=12)) == "orders/7@12"
    assert str(PartitionedTime.between(3, 7, offset=0)) == "(3,7)@0"
    everything: PartitionedTime[int] = PartitionedTime.between(None, None, offset=0)
    assert str(everything) == "(,)@0"


# Our own time.


@given(value=st.integers(MIN_TIME, MAX_TIME))
def test_a_time_in_range_is_passed_on(value: int) -> None:
    assert check_time(value) == value


@pytest.mark.parametrize("value", [-1, MAX_TIME + 1, True, False, 1.0, "1", None])
def test_what_is_not_a_time_is_refused_by_name(value: object) -> None:
    with pytest.raises(UsageError) as refused:
        check_time(value)
    assert f"time {value!r} " in str(refused.value)


def test_the_ends_of_time_are_times() -> None:
    assert (check_time(MIN_TIME), check_time(MAX_TIME)) == (0, 2**63 - 1)
