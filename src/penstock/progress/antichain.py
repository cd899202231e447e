"""Frontiers: how far a stream has come, when times are only partly ordered.

A frontier is an antichain, a set of times none of which is at or before
another. It reads as a promise: no further update will arrive at a time that
is not at or beyond some element. The empty antichain promises that nothing
more will arrive at all, so it is the *last* frontier, not the first.

    {0} ────► {5} ────► {9} ────► {}
    start                         closed

Nothing here knows about wall clocks, offsets or log positions; a source
brings its own time type and says how two of its times compare.

A source with partitions has one more need: every partition, seen or not, must
stand in its frontier exactly once. `PartitionedFrontier` is the frontier that
cannot be otherwise. It lays the known partitions in a row, with an interval of
unseen ones before, between and after them:

    unseen[0]   0   unseen[1]   1   unseen[2]         (,0)@0  0@42  (0,1)@0  1@40  (1,)@0
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import le
from typing import Generic, Self, TypeVar, cast

from penstock.errors import UsageError
from penstock.progress.order import (
    Between,
    Exactly,
    JoinableTime,
    Partition,
    PartitionedTime,
    Partitions,
    Time,
)

__all__ = ["Antichain", "PartitionedFrontier", "Regression"]

T = TypeVar("T", bound=Time)
J = TypeVar("J", bound=JoinableTime)
P = TypeVar("P", bound=Partition)

# For static methods: pyright infers nothing for a class's variable through the class.
T_ = TypeVar("T_", bound=Time)
P_ = TypeVar("P_", bound=Partition)


@dataclass(frozen=True, slots=True, repr=False)
class Antichain(Generic[T]):
    """A frontier: the earliest times at which something may still arrive.

    Of the times it is made from it keeps the minimal ones, in no order.

    >>> at = PartitionedTime.exactly
    >>> Antichain.of(at(0, offset=5), at(1, offset=2), at(0, offset=9))
    Antichain(0@5, 1@2)
    """

    elements: frozenset[T]

    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", _minimal(self.elements))

    @staticmethod
    def of(*times: T_) -> "Antichain[T_]":
        """The frontier at which any of `times`, and all that follows them, may still arrive."""
        return Antichain(frozenset(times))

    @staticmethod
    def of_minimal(times: Iterable[T_]) -> "Antichain[T_]":
        """The same, of times none of which is at or before another; the caller vouches for it."""
        # To find the minimal ones, each is compared with each, which for a
        # thousand partitions takes seconds.
        antichain = Antichain[T_].empty()
        object.__setattr__(antichain, "elements", frozenset(times))
        return antichain

    @classmethod
    def empty(cls) -> Self:
        """The last frontier: nothing more will arrive."""
        return cls(frozenset())

    def open_at(self, time: T) -> bool:
        """Whether an update at `time` may still arrive."""
        return any(element.at_or_before(time) for element in self.elements)

    def at_or_before(self, other: Self, /) -> bool:
        """Whether all that may arrive from `other` on may also arrive from `self` on.

        >>> at = PartitionedTime.exactly
        >>> Antichain.of(at(0, offset=5)).at_or_before(Antichain.empty())
        True
        """
        return all(self.open_at(element) for element in other.elements)

    def meet(self, other: Self) -> Self:
        """The last frontier at or before both: open wherever either is."""
        return type(self)(self.elements | other.elements)

    def join(self: "Antichain[J]", other: "Antichain[J]") -> "Antichain[J]":
        """The first frontier at or after both: open only where both are."""
        joins = (left.join(right) for left in self.elements for right in other.elements)
        return Antichain(frozenset(time for time in joins if time is not None))

    def __repr__(self) -> str:
        return f"Antichain({', '.join(sorted(map(str, self.elements)))})"


@dataclass(frozen=True, slots=True)
class Regression(Generic[P]):
    """Partitions that would go back, from one offset to a lesser one."""

    partitions: Partitions[P]
    offset: int
    to: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PartitionedFrontier(Generic[P]):
    """How far a source has come in every partition, known or not yet seen.

    It is a function from partitions to offsets, and two frontiers are compared
    as functions, partition by partition. To know a partition is no promise: a
    frontier equals the same one with an interval split at a partition that has
    not moved. It must, for a partition known at offset 0 leaves no increment in
    the remap collection, and what was bound has to equal what is read back.

    >>> frontier = PartitionedFrontier.of({0: 42, 1: 40})
    >>> frontier
    PartitionedFrontier((,0)@0, 0@42, (0,1)@0, 1@40, (1,)@0)
    >>> frontier.offset_of(1), frontier.offset_of(7)
    (40, 0)
    >>> frontier.with_partition(7) == frontier
    True
    >>> frontier.at_or_before(frontier.advanced(7, to=3))
    True
    """

    partitions: tuple[P, ...]
    """The known ones, in order."""

    offsets: tuple[int, ...]
    """Of each known partition, exclusive: one record at offset 0 makes it 1."""

    unseen: tuple[int, ...]
    """The offset of each interval of unseen ones: before, between and after the known."""

    def __post_init__(self) -> None:
        if not len(self.partitions) == len(self.offsets) == len(self.unseen) - 1:
            raise UsageError(
                f"partitioned frontier with {len(self.partitions)} known partitions has "
                f"{len(self.offsets)} offsets for them and {len(self.unseen)} around them"
            )
        for before, after in pairwise(self.partitions):
            if not before < after:
                raise UsageError(f"partitions {before!r} and {after!r} are out of order")
        for offset in chain(self.offsets, self.unseen):
            if offset < 0:
                raise UsageError(f"offset {offset} of a partitioned frontier is negative")

    @classmethod
    def initial(cls) -> Self:
        """The first frontier: no partition is known, and each is at its beginning."""
        return cls((), (), (0,))

    @staticmethod
    def of(offsets: Mapping[P_, int]) -> "PartitionedFrontier[P_]":
        """The frontier that has come so far, with every other partition at its beginning."""
        return PartitionedFrontier[P_].initial().advanced_to(offsets)

    @staticmethod
    def from_antichain(antichain: Antichain[PartitionedTime[P_]]) -> "PartitionedFrontier[P_]":
        """The frontier made of these elements.

        Raises:
            UsageError: they do not have each partition exactly once.
        """
        offsets = {element.partitions: element.offset for element in antichain.elements}
        known = sorted(each.partition for each in offsets if isinstance(each, Exactly))
        around = list(_around(known))
        lacking = next((each for each in around if each not in offsets), None)
        overlapping = offsets.keys() - {*around, *map(Exactly, known)}
        if lacking is not None or overlapping:
            raise UsageError(
                "antichain does not have each partition exactly once",
                detail=f"Element {min(map(str, overlapping))} overlaps another."
                if overlapping
                else f"No element is about {lacking}.",
            )
        return PartitionedFrontier(
            tuple(known),
            tuple(offsets[Exactly(partition)] for partition in known),
            tuple(offsets[interval] for interval in around),
        )

    def antichain(self) -> Antichain[PartitionedTime[P]]:
        """One element for each known partition, and one for each interval of unseen ones."""
        return Antichain.of_minimal(self._elements())

    def known(self) -> dict[P, int]:
        """The offset of each known partition, in their order."""
        return dict(zip(self.partitions, self.offsets, strict=True))

    def knows(self, partition: P) -> bool:
        """Whether `partition` stands by itself, and not in an interval of unseen ones."""
        place = bisect_left(self.partitions, partition)
        return place < len(self.partitions) and self.partitions[place] == partition

    def offset_of(self, partition: P) -> int:
        """How far `partition` has come, known or not."""
        place = bisect_left(self.partitions, partition)
        known = place < len(self.partitions) and self.partitions[place] == partition
        return self.offsets[place] if known else self.unseen[place]

    def open_at(self, partition: P, offset: int) -> bool:
        """Whether an event at `offset` of `partition` may still arrive."""
        return self.offset_of(partition) <= offset

    def with_partition(self, partition: P) -> Self:
        """The same promise, with `partition` known."""
        return self._split_at((partition,))

    def advanced(self, partition: P, *, to: int) -> Self:
        """The frontier with `partition` known, and at the offset `to`.

        Raises:
            UsageError: it would go back.
        """
        return self.advanced_to({partition: to})

    def advanced_to(self, offsets: Mapping[P, int]) -> Self:
        """The frontier with each partition of `offsets` known, and at its new offset.

        Raises:
            UsageError: one would go back.
        """
        split = self._split_at(offsets)
        before = zip(split.partitions, split.offsets, strict=True)
        after = tuple(_forward(partition, offset, offsets) for partition, offset in before)
        return type(self)(split.partitions, after, split.unseen)

    def at_or_before(self, other: Self, /) -> bool:
        """Whether no partition is further here than in `other`.

        SUBTLE: the antichains say less. Split one interval, and the order of
        antichains has the parts after the whole, and not before it.
        """
        ours, theirs = self._aligned(other)
        return all(map(le, ours.offsets, theirs.offsets)) and all(
            map(le, ours.unseen, theirs.unseen)
        )

    def regressions(self, to: Self) -> tuple[Regression[P], ...]:
        """Which partitions would go back if the frontier became `to`; none if it may.

        >>> before = PartitionedFrontier.of({0: 42, 1: 40})
        >>> before.regressions(to=PartitionedFrontier.of({0: 43}))
        (Regression(partitions=Exactly(partition=1), offset=40, to=0),)
        """
        ours, theirs = self._aligned(to)
        return tuple(
            Regression(now.partitions, now.offset, then.offset)
            for now, then in zip(ours._elements(), theirs._elements(), strict=True)
            if then.offset < now.offset
        )

    def meet(self, other: Self) -> Self:
        """The lesser offset of each partition: the last frontier at or before both."""
        ours, theirs = self._aligned(other)
        return type(self)(
            ours.partitions,
            tuple(map(min, ours.offsets, theirs.offsets)),
            tuple(map(min, ours.unseen, theirs.unseen)),
        )

    def join(self, other: Self) -> Self:
        """The greater offset of each partition: the first frontier at or after both."""
        ours, theirs = self._aligned(other)
        return type(self)(
            ours.partitions,
            tuple(map(max, ours.offsets, theirs.offsets)),
            tuple(map(max, ours.unseen, theirs.unseen)),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PartitionedFrontier):
            return NotImplemented
        return self._moved() == cast("PartitionedFrontier[P]", other)._moved()

    def __hash__(self) -> int:
        return hash(self._moved())

    def __repr__(self) -> str:
        return f"PartitionedFrontier({', '.join(map(str, self._elements()))})"

    def _elements(self) -> Iterator[PartitionedTime[P]]:
        """From the first interval to the last, in order."""
        *intervals, last = zip(_around(self.partitions), self.unseen, strict=True)
        known = zip(self.partitions, self.offsets, strict=True)
        for (interval, unseen), (partition, offset) in zip(intervals, known, strict=True):
            yield PartitionedTime(interval, unseen)
            yield PartitionedTime(Exactly(partition), offset)
        yield PartitionedTime(*last)

    def _aligned(self, other: Self) -> tuple[Self, Self]:
        """The same two promises, both knowing every partition that either knows."""
        return self._split_at(other.partitions), other._split_at(self.partitions)

    def _split_at(self, partitions: Iterable[P]) -> Self:
        """The same promise, with `partitions` known as well."""
        offsets = self.known()
        known = sorted(offsets.keys() | set(partitions))
        if len(known) == len(offsets):
            return self
        intervals = iter(self.unseen)
        interval = next(intervals)
        split_offsets, split_unseen = list[int](), [interval]
        for partition in known:
            if partition in offsets:
                split_offsets.append(offsets[partition])
                interval = next(intervals)
            else:
                split_offsets.append(interval)
            split_unseen.append(interval)
        return type(self)(tuple(known), tuple(split_offsets), tuple(split_unseen))

    def _moved(self) -> tuple[tuple[tuple[P, int], ...], tuple[int, ...]]:
        """The promise without the partitions that stand where their surroundings do."""
        around = pairwise(self.unseen)
        moved = [
            (partition, offset, after)
            for partition, offset, (before, after) in zip(
                self.partitions, self.offsets, around, strict=True
            )
            if not before == offset == after
        ]
        known = tuple((partition, offset) for partition, offset, _ in moved)
        return known, (self.unseen[0], *(after for _, _, after in moved))


def _minimal(times: frozenset[T]) -> frozenset[T]:
    return frozenset(
        time
        for time in times
        if not any(other != time and other.at_or_before(time) for other in times)
    )


def _around(known: Iterable[P]) -> Iterator[Between[P]]:
    """The intervals before, between and after some partitions in order."""
    above: P | None = None
    for partition in known:
        yield Between(above, partition)
        above = partition
    yield Between(above, None)


def _forward(partition: P, offset: int, to: Mapping[P, int]) -> int:
    target = to.get(partition, offset)
    if target < offset:
        raise UsageError(f"partition {partition!r} cannot go back from offset {offset} to {target}")
    return target
