"""Updates: what changed, when, and by how much.

A collection is a sum. An update `(data, time, diff)` says that from `time` on
there are `diff` more copies of `data`, or fewer; the contents as of `t` are the
sum of all diffs at or before `t`. Two rewritings leave the sums that matter alone:

    consolidate:  one update for each data and time, none of them zero
    advance:      every time at least `since`; as of any t ≥ since nothing changed

Diffs are 64 bits at rest. Sums are exact on the way, whatever their size, and a
sum that does not fit when it is done is refused: wrapping around would turn very
many into fewer than none.

SUBTLE: two data are the same here if Python says they are equal, and it says so
of `1`, `1.0` and `True`, and of `Decimal("1.0")` and `Decimal("1.00")`. It says of
two NaNs that they differ. Where such data occur, consolidate their encoded form.
"""

from collections.abc import Callable, Hashable, Iterable
from reprlib import repr as abbreviated
from typing import Final, Generic, NamedTuple, TypeVar

from penstock.errors import UsageError
from penstock.progress.interval import Interval
from penstock.progress.order import Sortable, check_time

__all__ = [
    "MAX_DIFF",
    "MIN_DIFF",
    "Update",
    "accumulate_as_of",
    "advance",
    "changes_between",
    "consolidate",
]

MIN_DIFF: Final = -(2**63)
MAX_DIFF: Final = 2**63 - 1

D = TypeVar("D", bound=Hashable)
K = TypeVar("K", bound=Sortable)


class Update(NamedTuple, Generic[D]):
    """From `time` on, `diff` more copies of `data`; fewer, if negative.

    A tuple, because there are very many of them. Nothing is checked here; times
    are checked where they enter.
    """

    data: D
    time: int
    diff: int


def advance(updates: Iterable[Update[D]], since: int) -> list[Update[D]]:
    """The same updates, with no time before `since`.

    >>> advance([Update("a", 3, +1), Update("a", 8, -1)], since=5)
    [Update(data='a', time=5, diff=1), Update(data='a', time=8, diff=-1)]
    """
    check_time(since)
    return [
        update if update.time >= since else Update(update.data, since, update.diff)
        for update in updates
    ]


def consolidate(
    updates: Iterable[Update[D]], *, key: Callable[[D], K] | None = None
) -> list[Update[D]]:
    """One update for each data and time, with the sum of their diffs; no zeros.

    With `key`, ordered by the key of the data, then by time; if no two data share
    a key, the order of `updates` then leaves no trace. Without it, in the order in
    which each data and time first appeared, be it in an update that cancels out.

    >>> consolidate([Update("b", 1, +1), Update("a", 1, +1), Update("b", 1, +2)])
    [Update(data='b', time=1, diff=3), Update(data='a', time=1, diff=1)]
    >>> consolidate([Update("a", 1, +1), Update("a", 1, -1)])
    []

    Raises:
        UsageError: a sum does not fit into 64 bits.
    """
    totals: dict[tuple[D, int], int] = {}
    for data, time, diff in updates:
        place = (data, time)
        totals[place] = totals.get(place, 0) + diff
    consolidated = [
        Update(data, time, _fitting(total, data)) for (data, time), total in totals.items() if total
    ]
    if key is not None:
        consolidated.sort(key=lambda update: (key(update.data), update.time))
    return consolidated


def accumulate_as_of(updates: Iterable[Update[D]], as_of: int) -> dict[D, int]:
    """How many copies of each data there are as of a time; never zero.

    A negative count is returned as it is. It means that track was lost, and
    whoever knows the collection's name must say so.

    Raises:
        UsageError: a count does not fit into 64 bits.
    """
    check_time(as_of)
    return _totals((data, diff) for data, time, diff in updates if time <= as_of)


def changes_between(updates: Iterable[Update[D]], interval: Interval) -> dict[D, int]:
    """What each data's count changed by in `interval`; never zero.

    Added to the contents before the interval, it gives the contents at its end:

        as of (upper - 1)  =  as of (lower - 1)  +  changes_between([lower, upper))

    Raises:
        UsageError: a change does not fit into 64 bits.
    """
    lower, upper = interval.lower, interval.upper
    return _totals((data, diff) for data, time, diff in updates if lower <= time < upper)


def _totals(diffs: Iterable[tuple[D, int]]) -> dict[D, int]:
    totals: dict[D, int] = {}
    for data, diff in diffs:
        totals[data] = totals.get(data, 0) + diff
    return {data: _fitting(total, data) for data, total in totals.items() if total}


def _fitting(total: int, data: Hashable) -> int:
    if MIN_DIFF <= total <= MAX_DIFF:
        return total
    raise UsageError(
        f"sum of diffs {total} does not fit into 64 bits",
        detail=f"The data is {abbreviated(data)}.",
    )
