"""Following bindings: from a source's offsets to our times, and back.

Let R(t) be the source's frontier as of t, read from remap. What is in the source's
collection as of t is what lies below R(t). As R only rises, each event comes in at
exactly one time, the first whose binding covers it:

    time_of(e)  =  the least t with e below R(t)

Everything else here is that function, turned around:

- once the source has been read to a frontier F, the collection is complete below
  the least time of what F leaves open;
- a collection that is complete below u holds what is below R(u - 1), so that is
  where reading resumes: nothing is skipped and nothing comes twice;
- so remap must be readable as of u - 1, and compacting it that far changes nothing.

Compaction brings times below since up to since, here as in every collection, and
commutes with all of this: following a compacted remap gives the times that
compacting the followed data would give.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Self

import pyarrow as pa

from penstock.errors import InternalError, UsageError
from penstock.progress import MAX_TIME, Antichain, PartitionedTime, check_time
from penstock.reclock.remap import Offsets, PartitionKey, Shape, keys_of, offsets_of, steps

__all__ = ["Bindings", "compaction_bound"]


@dataclass(frozen=True, slots=True)
class _Track:
    """One partition: how far it had come at each time at which it moved."""

    times: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bindings:
    """A remap collection, read from `since` to `upper`."""

    since: int
    upper: int
    """`MAX_TIME`, if the source is closed."""

    tracks: Mapping[PartitionKey, _Track]
    closed_at: int | None
    """From when on nothing is open any more; None, as long as something may come."""

    source: str
    """Its name, for those who must act."""

    @classmethod
    def read(cls, shape: Shape, updates: pa.Table, *, since: int, upper: int, source: str) -> Self:
        """The bindings that `updates`, all that remap holds, say."""
        check_time(since)
        check_time(upper)
        read = steps(shape, updates)
        rows = zip(
            keys_of(shape, read.partitions),
            (max(time, since) for time in read.times.to_pylist()),
            offsets_of(read.offsets),
            strict=True,
        )
        tracks: dict[PartitionKey, _Track] = {}
        ends: set[int | None] = set()
        for partition, group in groupby(rows, key=itemgetter(0)):
            bound = [(time, offset) for _, time, offset in group]
            ends.add(bound[-1][0] if bound[-1][1] is None else None)
            # Of several at since, each covers what the next one adds to.
            tracks[partition] = _Track(
                tuple(time for time, offset in bound if offset is not None),
                tuple(offset for _, offset in bound if offset is not None),
            )
        if len(ends) > 1:
            raise InternalError(f'remap of source "{source}" is closed for some partitions only')
        closed_at = ends.pop() if ends else (since if upper == MAX_TIME else None)
        return cls(since, upper, tracks, closed_at, source)

    def time_of(self, partition: PartitionKey, offset: int) -> int | None:
        """The one time at which an event comes in; None, while no binding covers it."""
        track = self.tracks.get(partition)
        if track is not None:
            place = bisect_right(track.offsets, offset)
            if place < len(track.offsets):
                return track.times[place]
        return self.closed_at

    def frontier_as_of(self, time: int) -> Offsets | None:
        """R(time): how far the source had come; None, if it was closed.

        Raises:
            UsageError: remap cannot be read as of that time.
        """
        if not self.since <= time < self.upper:
            raise UsageError(
                f'remap of source "{self.source}" cannot be read as of {time}',
                detail=f"It is readable from {self.since} and complete below {self.upper}.",
            )
        if self.closed_at is not None and self.closed_at <= time:
            return None
        places = (
            (partition, track, bisect_right(track.times, time))
            for partition, track in self.tracks.items()
        )
        return {partition: track.offsets[at - 1] for partition, track, at in places if at}

    def upper_at(self, read: Offsets | Antichain[PartitionedTime[Any]]) -> int:
        """How far the collection is complete once the source has been read to a frontier.

        A frontier of offsets leaves partitions that it does not have open from 0 on;
        an antichain leaves open what it says, and the empty one nothing.
        """
        opened = _opened_by(read)
        first = self.upper
        for partition in self.tracks:
            offset = opened(partition)
            time = None if offset is None else self.time_of(partition, offset)
            if time is not None:
                first = min(first, time)
        return first

    def resume_from(self, data_upper: int) -> Offsets | None:
        """Where to go on reading for a collection that is complete below `data_upper`.

        That is the frontier bound just below it. None, if there is nothing to go on with.

        Raises:
            UsageError: remap no longer knows, or does not know yet.
        """
        if check_time(data_upper) == 0:
            return {}
        if data_upper - 1 < self.since:
            raise UsageError(
                f'source "{self.source}" cannot resume at {data_upper}',
                detail=f"Its remap was compacted to {self.since}, past what resuming needs.",
                hint="The data must be copied again.",
            )
        return self.frontier_as_of(data_upper - 1)


def compaction_bound(data_uppers: Iterable[int]) -> int:
    """How far the since of remap may go, with collections complete below `data_uppers`.

    Further, and the binding that the least of them resumes from is lost.
    """
    return max(0, min(data_uppers, default=0) - 1)


def _opened_by(
    read: Offsets | Antichain[PartitionedTime[Any]],
) -> Callable[[PartitionKey], int | None]:
    """The first offset of a partition at which something may still be read, if any may."""
    if not isinstance(read, Antichain):
        return lambda partition: read.get(partition, 0)
    elements = read.elements

    def first(partition: PartitionKey) -> int | None:
        # An element is about the partition if it is at or before some event in it.
        return min(
            (
                element.offset
                for element in elements
                if element.at_or_before(PartitionedTime.exactly(partition, offset=element.offset))
            ),
            default=None,
        )

    return first
