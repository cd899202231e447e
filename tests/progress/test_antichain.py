"""Laws of frontiers, for two kinds of time: with partitions, and with two numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.progress import Antichain, PartitionedTime

# Enough to find a planted bug; nobody reads the example, so it need not be the smallest.
planted = settings(
    max_examples=1_000, derandomize=True, database=None, phases=[Phase.generate], deadline=None
)


@dataclass(frozen=True, slots=True)
class Square:
    """A time of two numbers, ordered when both are."""

    x: int
    y: int

    def at_or_before(self, other: Self, /) -> bool:
        return self.x <= other.x and self.y <= other.y

    def join(self, other: Self, /) -> Self:
        return type(self)(max(self.x, other.x), max(self.y, other.y))


# A law holds for times of either kind, but never mixes them.
Moment = Any
Frontier = Antichain[Any]


@st.composite
def partitioned_times(draw: st.DrawFn) -> Moment:
    offset = draw(st.integers(0, 3))
    if draw(st.booleans()):
        return PartitionedTime.exactly(draw(st.integers(0, 4)), offset=offset)
    above, below = sorted(draw(st.sets(st.integers(0, 4), min_size=2, max_size=2)))
    return PartitionedTime.between(
        draw(st.sampled_from([None, above])), draw(st.sampled_from([None, below])), offset=offset
    )


squares: st.SearchStrategy[Moment] = st.builds(Square, st.integers(0, 4), st.integers(0, 4))
kinds = st.sampled_from([squares, partitioned_times()])


def several(count: int) -> st.SearchStrategy[list[list[Moment]]]:
    """As many lists of times as asked for, all of one kind."""
    return kinds.flatmap(
        lambda times: st.lists(st.lists(times, max_size=5), min_size=count, max_size=count)
    )


def with_a_time(count: int) -> st.SearchStrategy[tuple[list[list[Moment]], Moment]]:
    """The same, and a time of that kind."""
    return kinds.flatmap(
        lambda times: st.tuples(
            st.lists(st.lists(times, max_size=5), min_size=count, max_size=count), times
        )
    )


# What an antichain is.


def check_making(made: Callable[[list[Moment]], Frontier], trial: settings) -> None:
    @trial
    @given(drawn=with_a_time(1), data=st.data())
    def law(drawn: tuple[list[list[Moment]], Moment], data: st.DataObject) -> None:
        [times], time = drawn
        frontier = made(times)
        for one in frontier.elements:
            for other in frontier.elements:
                assert one == other or not one.at_or_before(other), "minimal"
        opened = any(each.at_or_before(time) for each in times)
        assert frontier.open_at(time) == opened, "open where one of its times is"
        shuffled = made(data.draw(st.permutations(times)))
        assert shuffled == frontier, "whatever the order of insertion"
        assert hash(shuffled) == hash(frontier)
        assert repr(shuffled) == repr(frontier)

    law()


def test_an_antichain_keeps_the_minimal_times_and_their_promise() -> None:
    check_making(lambda times: Antichain.of(*times), settings())


def everything(times: list[Moment]) -> Frontier:
    return Antichain.of_minimal(times)


def the_first_of_two_that_compare(times: list[Moment]) -> Frontier:
    kept: list[Moment] = []
    for time in times:
        if not any(each.at_or_before(time) or time.at_or_before(each) for each in kept):
            kept.append(time)
    return Antichain.of_minimal(kept)


def the_maximal(times: list[Moment]) -> Frontier:
    return Antichain.of_minimal(
        time
        for time in times
        if not any(time != each and time.at_or_before(each) for each in times)
    )


@pytest.mark.parametrize("wrong", [everything, the_first_of_two_that_compare, the_maximal])
def test_a_wrong_antichain_is_caught(wrong: Callable[[list[Moment]], Frontier]) -> None:
    with pytest.raises(AssertionError):
        check_making(wrong, planted)


@given(drawn=several(1))
def test_making_one_of_its_elements_gives_the_same(drawn: list[list[Moment]]) -> None:
    frontier = Antichain.of(*drawn[0])
    assert Antichain.of(*frontier.elements) == frontier
    assert Antichain.of_minimal(frontier.elements) == frontier


# How frontiers compare.


def check_partial_order(
    at_or_before: Callable[[Frontier, Frontier], bool], trial: settings
) -> None:
    @trial
    @given(drawn=with_a_time(3))
    def law(drawn: tuple[list[list[Moment]], Moment]) -> None:
        three, time = drawn
        a, b, c = (Antichain.of(*times) for times in three)
        assert at_or_before(a, a), "reflexive"
        if at_or_before(a, b) and at_or_before(b, a):
            assert a == b, "antisymmetric"
        if at_or_before(a, b) and at_or_before(b, c):
            assert at_or_before(a, c), "transitive"
        if at_or_before(a, b) and b.open_at(time):
            assert a.open_at(time), "the earlier frontier is open wherever the later is"
        if at_or_before(a, Antichain.of(time)):
            assert a.open_at(time), "one element is as good as a time"
        assert at_or_before(a, Antichain[Any].empty()), "empty is last"

    law()


def test_frontiers_are_partially_ordered_and_empty_is_last() -> None:
    check_partial_order(lambda a, b: a.at_or_before(b), settings())


def some_element_suffices(a: Frontier, b: Frontier) -> bool:
    return any(a.open_at(element) for element in b.elements)


def each_of_ours_is_before_some_of_theirs(a: Frontier, b: Frontier) -> bool:
    return all(any(ours.at_or_before(theirs) for theirs in b.elements) for ours in a.elements)


@pytest.mark.parametrize("wrong", [some_element_suffices, each_of_ours_is_before_some_of_theirs])
def test_a_wrong_order_of_frontiers_is_caught(wrong: Callable[[Frontier, Frontier], bool]) -> None:
    with pytest.raises(AssertionError):
        check_partial_order(wrong, planted)


@given(drawn=with_a_time(1))
def test_a_frontier_is_at_or_before_a_time_where_it_is_open(
    drawn: tuple[list[list[Moment]], Moment],
) -> None:
    [times], time = drawn
    frontier = Antichain.of(*times)
    assert frontier.at_or_before(Antichain.of(time)) == frontier.open_at(time)


def test_the_empty_frontier_is_open_nowhere_and_after_all_others() -> None:
    closed = Antichain[Square].empty()
    assert not closed.open_at(Square(0, 0))
    assert not closed.at_or_before(Antichain.of(Square(4, 4)))
    assert Antichain.of(Square(4, 4)).at_or_before(closed)
    assert closed == Antichain[Square].of()


# Meet and join.


def check_lattice(
    meet: Callable[[Frontier, Frontier], Frontier],
    join: Callable[[Frontier, Frontier], Frontier],
    trial: settings,
) -> None:
    @trial
    @given(drawn=with_a_time(3))
    def law(drawn: tuple[list[list[Moment]], Moment]) -> None:
        three, time = drawn
        a, b, c = (Antichain.of(*times) for times in three)
        assert meet(a, b).open_at(time) == (a.open_at(time) or b.open_at(time))
        assert join(a, b).open_at(time) == (a.open_at(time) and b.open_at(time))
        before_both = c.at_or_before(a) and c.at_or_before(b)
        assert c.at_or_before(meet(a, b)) == before_both, "the last before both"
        after_both = a.at_or_before(c) and b.at_or_before(c)
        assert join(a, b).at_or_before(c) == after_both, "the first after both"
        for operation in (meet, join):
            assert operation(a, a) == a
            assert operation(a, b) == operation(b, a)
            assert operation(operation(a, b), c) == operation(a, operation(b, c))
        assert meet(a, join(a, b)) == a == join(a, meet(a, b)), "absorption"

    law()


def test_meet_and_join_are_those_of_a_lattice() -> None:
    check_lattice(lambda a, b: a.meet(b), lambda a, b: a.join(b), settings())


def intersection(a: Frontier, b: Frontier) -> Frontier:
    return Antichain(a.elements & b.elements)


def test_a_wrong_meet_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_lattice(intersection, lambda a, b: a.join(b), planted)


def test_a_wrong_join_is_caught() -> None:
    def elements_beyond_the_other(a: Frontier, b: Frontier) -> Frontier:
        return Antichain(
            frozenset(each for each in a.elements if b.open_at(each))
            | frozenset(each for each in b.elements if a.open_at(each))
        )

    with pytest.raises(AssertionError):
        check_lattice(lambda a, b: a.meet(b), elements_beyond_the_other, planted)


@given(drawn=several(1))
def test_empty_leaves_a_meet_alone_and_takes_a_join(drawn: list[list[Moment]]) -> None:
    frontier, closed = Antichain.of(*drawn[0]), Antichain[Any].empty()
    assert frontier.meet(closed) == frontier
    assert frontier.join(closed) == closed
