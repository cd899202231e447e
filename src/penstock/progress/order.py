"""Times: our own, and those of sources whose clocks are only partly ordered.

Our own time is a plain `int`, milliseconds since the epoch, 64 bits at rest;
two of them always compare, so a single number is a frontier and none of the
machinery of `antichain` is needed. A source brings its own time type and says,
with `at_or_before`, how two of its times compare.

Most sources are many logs side by side: the partitions of a topic, the shards
of a stream, the objects of a bucket. Their time is a partition and an offset
into it, and times in different partitions do not compare. Partitions also
appear while we read. So a time may name, instead of one partition, an open
interval of partitions not seen yet, and a new partition needs no special case:

    Between(3, 7) at offset 0         all partitions strictly between 3 and 7
    ├── Between(3, 5) at offset 0     … once 5 is seen
    ├── Exactly(5)    at offset 0
    └── Between(5, 7) at offset 0

Between two partitions there is always taken to be room for another, also
between 3 and 4. The order then needs no notion of "next partition", and an
interval that can hold no real one promises nothing about anything.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, Self, TypeAlias, TypeVar

from penstock.errors import UsageError

__all__ = [
    "MAX_TIME",
    "MIN_TIME",
    "Between",
    "Exactly",
    "JoinableTime",
    "Partition",
    "PartitionedTime",
    "Partitions",
    "Sortable",
    "Time",
    "check_time",
]

MIN_TIME: Final = 0
MAX_TIME: Final = 2**63 - 1
"""The last upper there can be, and therefore in no interval."""


def check_time(value: object) -> int:
    """`value`, if it is a time of ours.

    Raises:
        UsageError: it is not an integer, or does not fit.
    """
    # A bool is an int to Python, but nobody means the first millisecond of 1970 by True.
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(
            f"time {value!r} is a {type(value).__name__}, not an integer",
            hint="Write times as whole milliseconds since the epoch.",
        )
    if not MIN_TIME <= value <= MAX_TIME:
        raise UsageError(
            f"time {value} is out of range",
            detail=f"Times go from {MIN_TIME} to {MAX_TIME} milliseconds since the epoch.",
        )
    return value


class Time(Hashable, Protocol):
    """A point in some partially ordered time domain."""

    def at_or_before(self, other: Self, /) -> bool:
        """Whether everything at `self` has happened once `other` has."""
        ...


class JoinableTime(Time, Protocol):
    """A time domain in which two times with a common future have a first one."""

    def join(self, other: Self, /) -> Self | None:
        """The first time at or after both, or `None` if no time is after both."""
        ...


class Sortable(Protocol):
    """What can be put in order with others of its kind."""

    def __lt__(self, other: Self, /) -> bool:
        """Whether it comes first."""
        ...


class Partition(Sortable, Hashable, Protocol):
    """What a source calls its partitions: an `int`, a `str`, or a tuple of them."""


P = TypeVar("P", bound=Partition)

# For static methods: pyright infers nothing for a class's variable through the class.
P_ = TypeVar("P_", bound=Partition)


@dataclass(frozen=True, slots=True)
class Exactly(Generic[P]):
    """One partition."""

    partition: P

    def __str__(self) -> str:
        return f"{self.partition}"


@dataclass(frozen=True, slots=True)
class Between(Generic[P]):
    """The partitions strictly between two others; `None` leaves that side open.

    Both ends are outside, which is why they are not called lower and upper.
    """

    above: P | None = None
    below: P | None = None

    def __post_init__(self) -> None:
        if self.above is not None and self.below is not None and not self.above < self.below:
            raise UsageError(f"there are no partitions between {self.above!r} and {self.below!r}")

    def __str__(self) -> str:
        above = "" if self.above is None else self.above
        below = "" if self.below is None else self.below
        return f"({above},{below})"


Partitions: TypeAlias = Exactly[P] | Between[P]
"""The partitions a time is about."""


@dataclass(frozen=True, slots=True)
class PartitionedTime(Generic[P]):
    """An offset into one partition, or into each of an interval of them.

    One is at or before another if it is about at least the same partitions,
    at an offset no greater:

        a.at_or_before(b)  ⇔  a.partitions ⊇ b.partitions  and  a.offset ≤ b.offset

    As an element of a frontier, a time about many partitions is then the
    promise that each of them has reached the offset: it is at or before exactly
    those events that lie in one of its partitions, at or past its offset.

    >>> unseen, seen = PartitionedTime.between, PartitionedTime.exactly
    >>> unseen(3, 7, offset=0).at_or_before(seen(5, offset=2))
    True
    >>> unseen(3, 7, offset=0).at_or_before(seen(7, offset=2))
    False
    >>> seen(5, offset=0).at_or_before(unseen(3, 7, offset=0))
    False

    The order alone does not keep the elements of an antichain apart, since
    `(3,7)@5` and `5@2` are about a common partition and yet do not compare.
    `PartitionedFrontier` is the antichain that has each partition exactly once.
    """

    partitions: Partitions[P]
    offset: int

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise UsageError(f"offset {self.offset} of partition {self.partitions} is negative")

    @staticmethod
    def exactly(partition: P_, *, offset: int) -> "PartitionedTime[P_]":
        """A point in one partition."""
        return PartitionedTime(Exactly(partition), offset)

    @staticmethod
    def between(above: P_ | None, below: P_ | None, *, offset: int) -> "PartitionedTime[P_]":
        """The same offset in every partition strictly between two others."""
        return PartitionedTime(Between(above, below), offset)

    def at_or_before(self, other: Self, /) -> bool:
        """Whether it is about at least `other`'s partitions, at an offset no greater."""
        return self.offset <= other.offset and _contains(self.partitions, other.partitions)

    def join(self, other: Self, /) -> Self | None:
        """The greater offset in the partitions common to both, if there are any.

        >>> a = PartitionedTime.between(None, 7, offset=4)
        >>> b = PartitionedTime.between(3, None, offset=9)
        >>> print(a.join(b))
        (3,7)@9
        """
        common = _intersection(self.partitions, other.partitions)
        return None if common is None else type(self)(common, max(self.offset, other.offset))

    def __str__(self) -> str:
        return f"{self.partitions}@{self.offset}"


def _contains(outer: Partitions[P], inner: Partitions[P]) -> bool:
    match outer, inner:
        case Exactly(), _:
            return outer == inner
        case Between(above=above, below=below), Exactly(partition=partition):
            return (above is None or above < partition) and (below is None or partition < below)
        case Between(), Between():
            return _later(outer.above, inner.above) == inner.above and (
                _sooner(outer.below, inner.below) == inner.below
            )


def _intersection(left: Partitions[P], right: Partitions[P]) -> Partitions[P] | None:
    match left, right:
        case Exactly(), _:
            return left if _contains(right, left) else None
        case _, Exactly():
            return right if _contains(left, right) else None
        case Between(), Between():
            above = _later(left.above, right.above)
            below = _sooner(left.below, right.below)
            if above is not None and below is not None and not above < below:
                return None
            return Between(above, below)


def _later(left: P | None, right: P | None) -> P | None:
    """The tighter of two `above` ends."""
    if left is None or right is None:
        return right if left is None else left
    return max(left, right)


def _sooner(left: P | None, right: P | None) -> P | None:
    """The tighter of two `below` ends."""
    if left is None or right is None:
        return right if left is None else left
    return min(left, right)
