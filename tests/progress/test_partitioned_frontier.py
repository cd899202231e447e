"""Laws of partitioned frontiers: functions from partitions to offsets, never with a hole."""

from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.progress import (
    Antichain,
    Between,
    Exactly,
    PartitionedFrontier,
    PartitionedTime,
    Partitions,
    Regression,
)

Frontier = PartitionedFrontier[float]
Element = PartitionedTime[float]

# Whole numbers are partitions and halves are the room between them, so these
# points see everything that a frontier over 0 to 6 can say.
GRID = [half / 2 for half in range(-2, 15)]

# Enough to find a planted bug; nobody reads the example, so it need not be the smallest.
planted = settings(
    max_examples=1_000, derandomize=True, database=None, phases=[Phase.generate], deadline=None
)

partitions = st.integers(0, 6).map(float)
offsets = st.integers(0, 3)


@st.composite
def any_frontier(draw: st.DrawFn) -> Frontier:
    """Not only those that begin at 0: intervals of unseen partitions stand anywhere."""
    known = sorted(draw(st.sets(partitions, max_size=5)))
    count = len(known)
    return PartitionedFrontier(
        tuple(known),
        tuple(draw(st.lists(offsets, min_size=count, max_size=count))),
        tuple(draw(st.lists(offsets, min_size=count + 1, max_size=count + 1))),
    )


frontiers = any_frontier()


def contains(where: Partitions[float], point: float) -> bool:
    match where:
        case Exactly(partition=partition):
            return point == partition
        case Between(above=above, below=below):
            return (above is None or above < point) and (below is None or point < below)


def promise(frontier: Frontier) -> list[int]:
    """The offset at every point of the grid, by way of the one element that is about it."""
    elements = frontier.antichain().elements
    promised: list[int] = []
    for point in GRID:
        [offset] = [each.offset for each in elements if contains(each.partitions, point)]
        promised.append(offset)
    return promised


# It covers every partition exactly once, whatever is done to it.

Operation = Callable[[Frontier], Frontier]


@st.composite
def operations(draw: st.DrawFn) -> tuple[Operation, Callable[[list[int]], list[int]]]:
    """Something to do to a frontier, and the same done to its promise."""
    match draw(st.sampled_from(["advance", "advance many", "know", "meet", "join"])):
        case "advance":
            return advance_by({draw(partitions): draw(offsets)}, at_once=False)
        case "advance many":
            return advance_by(draw(st.dictionaries(partitions, offsets)), at_once=True)
        case "know":
            partition = draw(partitions)
            return (lambda frontier: frontier.with_partition(partition)), (lambda before: before)
        case "meet":
            other = draw(frontiers)
            return (lambda frontier: frontier.meet(other)), (
                lambda before: list(map(min, before, promise(other)))
            )
        case _:
            other = draw(frontiers)
            return (lambda frontier: frontier.join(other)), (
                lambda before: list(map(max, before, promise(other)))
            )


def advance_by(
    steps: dict[float, int], *, at_once: bool
) -> tuple[Operation, Callable[[list[int]], list[int]]]:
    def on_frontier(frontier: Frontier) -> Frontier:
        to = {partition: frontier.offset_of(partition) + step for partition, step in steps.items()}
        if at_once:
            return frontier.advanced_to(to)
        for partition, offset in to.items():
            frontier = frontier.advanced(partition, to=offset)
        return frontier

    def on_promise(before: list[int]) -> list[int]:
        return [offset + steps.get(point, 0) for point, offset in zip(GRID, before, strict=True)]

    return on_frontier, on_promise


@given(frontier=frontiers, steps=st.lists(operations(), max_size=6))
def test_every_partition_is_covered_exactly_once_after_any_operations(
    frontier: Frontier, steps: list[tuple[Operation, Callable[[list[int]], list[int]]]]
) -> None:
    expected = promise(frontier)
    for on_frontier, on_promise in steps:
        frontier, expected = on_frontier(frontier), on_promise(expected)
        assert promise(frontier) == expected
        assert [frontier.offset_of(point) for point in GRID] == expected


def test_it_begins_with_nothing_known_and_everything_at_zero() -> None:
    initial = Frontier.initial()
    assert initial.partitions == ()
    assert promise(initial) == [0] * len(GRID)


@given(frontier=frontiers)
def test_the_first_frontier_is_before_all_others(frontier: Frontier) -> None:
    assert Frontier.initial().at_or_before(frontier)


@given(given_offsets=st.dictionaries(partitions, offsets))
def test_a_frontier_of_offsets_has_them_and_zero_elsewhere(given_offsets: dict[float, int]) -> None:
    frontier = PartitionedFrontier.of(given_offsets)
    assert frontier.partitions == tuple(sorted(given_offsets))
    assert frontier.known() == given_offsets
    assert [point for point in GRID if frontier.knows(point)] == sorted(given_offsets)
    assert promise(frontier) == [given_offsets.get(point, 0) for point in GRID]


# Splitting.


def check_splitting(split: Callable[[Frontier, float], Frontier], trial: settings) -> None:
    @trial
    @given(frontier=frontiers, partition=partitions)
    def law(frontier: Frontier, partition: float) -> None:
        after = split(frontier, partition)
        assert after.knows(partition)
        assert set(after.partitions) == {*frontier.partitions, partition}
        assert promise(after) == promise(frontier)
        assert after == frontier
        assert hash(after) == hash(frontier)

    law()


def test_splitting_an_interval_changes_no_promise() -> None:
    check_splitting(Frontier.with_partition, settings())


def beginning_at_zero(frontier: Frontier, partition: float) -> Frontier:
    """A new partition starts at 0, though its interval has come further."""
    if frontier.knows(partition):
        return frontier
    split = frontier.with_partition(partition)
    at_zero = [
        0 if each == partition else offset
        for each, offset in zip(split.partitions, split.offsets, strict=True)
    ]
    return PartitionedFrontier(split.partitions, tuple(at_zero), split.unseen)


def beginning_again_after_it(frontier: Frontier, partition: float) -> Frontier:
    """The second half of the interval starts at 0."""
    split = frontier.with_partition(partition)
    place = split.partitions.index(partition)
    unseen = [0 if i == place + 1 else offset for i, offset in enumerate(split.unseen)]
    return PartitionedFrontier(split.partitions, split.offsets, tuple(unseen))


def not_splitting(frontier: Frontier, _partition: float) -> Frontier:
    return frontier


@pytest.mark.parametrize("wrong", [beginning_at_zero, beginning_again_after_it, not_splitting])
def test_a_wrong_split_is_caught(wrong: Callable[[Frontier, float], Frontier]) -> None:
    with pytest.raises(AssertionError):
        check_splitting(wrong, planted)


# Comparing.


def check_order(at_or_before: Callable[[Frontier, Frontier], bool], trial: settings) -> None:
    @trial
    @given(a=frontiers, b=frontiers)
    def law(a: Frontier, b: Frontier) -> None:
        each = zip(promise(a), promise(b), strict=True)
        assert at_or_before(a, b) == all(ours <= theirs for ours, theirs in each)

    law()


def test_frontiers_compare_partition_by_partition() -> None:
    check_order(Frontier.at_or_before, settings())


def by_known_partitions(a: Frontier, b: Frontier) -> bool:
    return all(a.offset_of(each) <= b.offset_of(each) for each in a.partitions)


def by_antichain(a: Frontier, b: Frontier) -> bool:
    return a.antichain().at_or_before(b.antichain())


@pytest.mark.parametrize("wrong", [by_known_partitions, by_antichain])
def test_a_wrong_comparison_is_caught(wrong: Callable[[Frontier, Frontier], bool]) -> None:
    with pytest.raises(AssertionError):
        check_order(wrong, planted)


@given(a=frontiers, b=frontiers)
def test_frontiers_are_equal_if_they_promise_the_same(a: Frontier, b: Frontier) -> None:
    same = promise(a) == promise(b)
    assert (a == b) == same
    assert (a.at_or_before(b) and b.at_or_before(a)) == same
    if same:
        assert hash(a) == hash(b)


@given(a=frontiers, place=st.integers(0, 10), step=st.integers(1, 3))
def test_frontiers_that_differ_in_one_place_are_not_equal(
    a: Frontier, place: int, step: int
) -> None:
    stands = [*a.offsets, *a.unseen]
    stands[place % len(stands)] += step
    known = len(a.partitions)
    b = PartitionedFrontier(a.partitions, tuple(stands[:known]), tuple(stands[known:]))
    assert a != b
    assert a.at_or_before(b)
    assert not b.at_or_before(a)


@given(a=frontiers, more=st.sets(partitions))
def test_frontiers_that_know_more_are_the_same(a: Frontier, more: set[float]) -> None:
    b = a
    for partition in more:
        b = b.with_partition(partition)
    assert a == b
    assert hash(a) == hash(b)
    assert a.at_or_before(b)
    assert b.at_or_before(a)


@given(a=frontiers, b=frontiers)
def test_antichains_compare_alike_once_both_know_the_same_partitions(
    a: Frontier, b: Frontier
) -> None:
    if by_antichain(a, b):
        assert a.at_or_before(b)
    for partition in a.partitions:
        b = b.with_partition(partition)
    assert by_antichain(a, b) == a.at_or_before(b)


@given(a=frontiers, b=frontiers, c=frontiers)
def test_meet_and_join_are_the_last_before_and_the_first_after(
    a: Frontier, b: Frontier, c: Frontier
) -> None:
    assert c.at_or_before(a.meet(b)) == (c.at_or_before(a) and c.at_or_before(b))
    assert a.join(b).at_or_before(c) == (a.at_or_before(c) and b.at_or_before(c))


@given(frontier=frontiers)
def test_a_frontier_is_not_equal_to_something_else(frontier: Frontier) -> None:
    assert frontier != frontier.antichain()


# Going back.


@given(a=frontiers, b=frontiers)
def test_regressions_name_exactly_what_would_go_back(a: Frontier, b: Frontier) -> None:
    regressions = a.regressions(to=b)
    for point, now, then in zip(GRID, promise(a), promise(b), strict=True):
        named = [each for each in regressions if contains(each.partitions, point)]
        assert [(each.offset, each.to) for each in named] == ([(now, then)] if then < now else [])


def test_a_partition_that_vanished_went_back_to_where_it_began() -> None:
    before = PartitionedFrontier.of({0: 42, 1: 40, 2: 0})
    assert before.regressions(to=PartitionedFrontier.of({0: 43})) == (
        Regression(Exactly(1), offset=40, to=0),
    )


@given(frontier=frontiers, partition=partitions, to=st.integers(-1, 3))
def test_no_partition_is_advanced_backwards(frontier: Frontier, partition: float, to: int) -> None:
    if to < (offset := frontier.offset_of(partition)):
        with pytest.raises(UsageError, match=f"cannot go back from offset {offset} to {to}"):
            frontier.advanced(partition, to=to)
    else:
        advanced = frontier.advanced(partition, to=to)
        assert frontier.at_or_before(advanced)
        assert advanced.offset_of(partition) == to


# Antichains.


def check_round_trip(back: Callable[[Antichain[Element]], Frontier], trial: settings) -> None:
    @trial
    @given(frontier=frontiers)
    def law(frontier: Frontier) -> None:
        returned = back(frontier.antichain())
        assert returned == frontier
        assert returned.partitions == frontier.partitions

    law()


def test_a_frontier_returns_from_its_antichain() -> None:
    check_round_trip(PartitionedFrontier[float].from_antichain, settings())


def test_a_round_trip_that_forgets_the_unseen_is_caught() -> None:
    def known_only(antichain: Antichain[Element]) -> Frontier:
        return PartitionedFrontier.of(
            {
                each.partitions.partition: each.offset
                for each in antichain.elements
                if isinstance(each.partitions, Exactly)
            }
        )

    with pytest.raises(AssertionError):
        check_round_trip(known_only, planted)


@given(frontier=frontiers)
def test_its_antichain_is_minimal_without_looking(frontier: Frontier) -> None:
    antichain = frontier.antichain()
    assert Antichain.of(*antichain.elements) == antichain


@given(frontier=frontiers, partition=partitions, offset=offsets)
def test_it_is_open_where_its_antichain_is(
    frontier: Frontier, partition: float, offset: int
) -> None:
    event = PartitionedTime.exactly(partition, offset=offset)
    assert frontier.open_at(partition, offset) == frontier.antichain().open_at(event)


@st.composite
def elements(draw: st.DrawFn) -> Element:
    offset = draw(offsets)
    if draw(st.booleans()):
        return PartitionedTime.exactly(draw(partitions), offset=offset)
    above, below = sorted(draw(st.sets(partitions, min_size=2, max_size=2)))
    return PartitionedTime.between(
        draw(st.sampled_from([None, above])), draw(st.sampled_from([None, below])), offset=offset
    )


@given(frontier=frontiers, extra=st.lists(elements(), max_size=2), data=st.data())
def test_an_antichain_with_a_hole_or_an_overlap_is_refused(
    frontier: Frontier, extra: list[Element], data: st.DataObject
) -> None:
    whole = sorted(frontier.antichain().elements, key=str)
    kept = data.draw(st.lists(st.sampled_from(whole), unique=True, min_size=len(whole) - 1))
    antichain = Antichain.of(*kept, *extra)
    coverage = [
        sum(contains(each.partitions, point) for each in antichain.elements) for point in GRID
    ]
    if coverage == [1] * len(GRID):
        assert PartitionedFrontier.from_antichain(antichain).antichain() == antichain
    else:
        with pytest.raises(UsageError, match="does not have each partition exactly once"):
            PartitionedFrontier.from_antichain(antichain)


def test_the_closed_frontier_has_no_partitions_and_is_refused() -> None:
    with pytest.raises(UsageError) as refused:
        PartitionedFrontier.from_antichain(Antichain[PartitionedTime[int]].empty())
    assert refused.value.detail == "No element is about (,)."


# Other names for partitions, and frontiers made by hand.


@given(given_offsets=st.dictionaries(st.text(max_size=3), st.integers(0, 10**56)))
def test_partitions_may_have_names_and_offsets_any_size(given_offsets: dict[str, int]) -> None:
    frontier = PartitionedFrontier.of(given_offsets)
    assert {name: frontier.offset_of(name) for name in given_offsets} == given_offsets
    assert PartitionedFrontier.from_antichain(frontier.antichain()) == frontier


def test_partitions_may_be_pairs() -> None:
    frontier = PartitionedFrontier.of({("clicks", 0): 7, ("views", 0): 3})
    assert frontier.advanced(("clicks", 1), to=2).offset_of(("clicks", 1)) == 2


@pytest.mark.parametrize(
    ("known", "known_offsets", "unseen", "complaint"),
    [
        ((1, 0), (5, 5), (0, 0, 0), "partitions 1 and 0 are out of order"),
        ((1, 1), (5, 5), (0, 0, 0), "partitions 1 and 1 are out of order"),
        ((1,), (5,), (0,), "1 known partitions has 1 offsets for them and 1 around"),
        ((1,), (), (0, 0), "1 known partitions has 0 offsets for them and 2 around"),
        ((1,), (-5,), (0, 0), "offset -5 of a partitioned frontier is negative"),
        ((), (), (-1,), "offset -1 of a partitioned frontier is negative"),
    ],
)
def test_a_frontier_that_is_none_is_refused(
    known: tuple[int, ...],
    known_offsets: tuple[int, ...],
    unseen: tuple[int, ...],
    complaint: str,
) -> None:
    with pytest.raises(UsageError, match=complaint):
        PartitionedFrontier(known, known_offsets, unseen)
