"""Stretches of our time: `[lower, upper)`, and what a batch says about one.

Every interval includes its lower end and not its upper one, so that two which
meet share no time and leave none out, and `[5, 5)` is a place with nothing in it.

    [0, 5) + [5, 5) + [5, 9) = [0, 9)
"""

from dataclasses import dataclass
from typing import Self

from penstock.errors import UsageError
from penstock.progress.order import check_time

__all__ = ["Description", "Interval"]


@dataclass(frozen=True, slots=True)
class Interval:
    """The times from `lower` up to but not including `upper`.

    >>> Interval(3, 5).contains(3), Interval(3, 5).contains(5)
    (True, False)
    >>> print(Interval(3, 5).union(Interval(5, 9)))
    [3, 9)
    """

    lower: int
    upper: int

    def __post_init__(self) -> None:
        check_time(self.lower)
        check_time(self.upper)
        if self.upper < self.lower:
            raise UsageError(
                f"interval {self} ends before it begins",
                hint="The upper of an interval is at or beyond its lower.",
            )

    @property
    def empty(self) -> bool:
        """Whether it contains no time."""
        return self.lower == self.upper

    def contains(self, time: int) -> bool:
        """Whether `time` lies in it."""
        return self.lower <= time < self.upper

    def intersect(self, other: Self) -> Self:
        """The times in both.

        If there are none, the result is empty and lies at the later of the two
        lowers, which makes `intersect` commutative and associative as it stands.
        """
        lower = max(self.lower, other.lower)
        return type(self)(lower, max(lower, min(self.upper, other.upper)))

    def adjoins(self, other: Self) -> bool:
        """Whether one ends where the other begins."""
        return self.upper == other.lower or other.upper == self.lower

    def union(self, other: Self) -> Self:
        """The two as one.

        Raises:
            UsageError: they do not adjoin. Overlapping is refused as well: what
                lies in both would be counted twice.
        """
        if not self.adjoins(other):
            raise UsageError(f"intervals {self} and {other} do not adjoin")
        return type(self)(min(self.lower, other.lower), max(self.upper, other.upper))

    def split(self, at: int) -> tuple[Self, Self]:
        """What lies before `at`, and what lies at or after it.

        Raises:
            UsageError: `at` is outside, so that a part would end before it begins.
        """
        return type(self)(self.lower, at), type(self)(at, self.upper)

    def __str__(self) -> str:
        return f"[{self.lower}, {self.upper})"


@dataclass(frozen=True, slots=True)
class Description:
    """What a batch of updates stands for: every change in `interval`, as seen from `since` on.

    Let `history` be all that happened in the interval, and `batch` what is left
    of it after times were advanced to at most `since` and updates consolidated:

        accumulate_as_of(batch, t) = accumulate_as_of(history, t)   for all t ≥ since

    Below `since` the batch says nothing.

    >>> early = Description(Interval(0, 5), since=0)
    >>> late = Description(Interval(5, 9), since=7)
    >>> print(early.merged(late))
    [0, 9) since 7
    """

    interval: Interval
    since: int

    def __post_init__(self) -> None:
        check_time(self.since)

    def admits(self, time: int) -> bool:
        """Whether an update of the batch may carry `time`.

        SUBTLE: an interval that ends before `since` holds updates beyond its own
        upper, because advancing moved them there.
        """
        last = max(self.interval.upper - 1, self.since)
        return not self.interval.empty and self.interval.lower <= time <= last

    def merged(self, other: Self) -> Self:
        """The description of two adjoining batches put together."""
        return type(self)(self.interval.union(other.interval), max(self.since, other.since))

    def __str__(self) -> str:
        return f"{self.interval} since {self.since}"
