"""Minting: how far a source has come, bound to a time of ours.

Only one thing is asked of bindings: a later time never has less. From it follows
that every event of the source belongs to exactly one time, the first whose
binding covers it. So a frontier that went back, because a topic was made again
or a server restored, mints nothing; it is reported, and whoever knows the source
decides what it means.

What is bound is what was *probed*, not what has been read, and the clock is read
before the probe: whatever was acknowledged upstream before the time is then below
the binding. All of one upstream transaction has one offset (in Postgres, the
position of its commit), so that a binding never cuts through one.

Time, updates and the new upper, one above the time, are for the caller to commit
together with the data.
"""

from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import UsageError
from penstock.progress import MAX_TIME, check_time
from penstock.reclock.remap import Move, Offsets, PartitionKey, Shape, encoded

__all__ = ["Closing", "Minted", "Regressed", "Unmoved", "close", "mint"]


@dataclass(frozen=True, slots=True)
class Minted:
    """The source has come further."""

    updates: pa.Table
    """Of remap, as they are stored."""

    frontier: Offsets
    """How far it has come now."""


@dataclass(frozen=True, slots=True)
class Unmoved:
    """The source stands where it stood: the upper goes on, and there are no rows."""


@dataclass(frozen=True, slots=True)
class Regressed:
    """The source went back. Nothing is minted, for any partition."""

    partition: PartitionKey
    """The first that did."""

    was: int
    now: int | None
    """None, if the partition is gone."""

    others: int = 0
    """How many more did."""


@dataclass(frozen=True, slots=True)
class Closing:
    """Nothing more will come, ever: remap and data are sealed to the end of time."""

    updates: pa.Table
    """Take back every row of remap: from here on no frontier is open."""


def mint(
    shape: Shape, current: Offsets, probed: Offsets, *, at: int
) -> Minted | Unmoved | Regressed:
    """Bind `probed` to the time `at`, when `current` is what is bound so far, by `accumulated`.

    A partition that is new begins at 0. One that is gone from `probed` keeps its
    row if sources of this shape lose partitions in the course of things; in any
    other it has gone back.

    Raises:
        UsageError: a partition, an offset or the time is not one.
    """
    _check_binding_time(at)
    shape.check(probed)
    # A source may have a million objects, of which few are probed.
    asked = probed if shape.partitions_end else {**current, **probed}
    back = sorted(
        (partition, current[partition], probed.get(partition))
        for partition in asked
        if current.get(partition, 0) > probed.get(partition, 0)
    )
    if back:
        return Regressed(*back[0], others=len(back) - 1)
    moves = [
        Move(partition, current.get(partition, 0), now)
        for partition, now in sorted(probed.items())
        if now > current.get(partition, 0)
    ]
    if not moves:
        return Unmoved()
    frontier = {**current, **{move.partition: move.now for move in moves}}
    return Minted(encoded(shape, moves, at=at), frontier)


def close(shape: Shape, current: Offsets, *, at: int) -> Closing:
    """End the source at `at`, when all that it will ever have is bound.

    Raises:
        UsageError: a partition, an offset or the time is not one.
    """
    _check_binding_time(at)
    shape.check(current)
    ended = [Move(partition, was, 0) for partition, was in sorted(current.items()) if was]
    return Closing(encoded(shape, ended, at=at))


def _check_binding_time(at: int) -> None:
    if check_time(at) == MAX_TIME:
        raise UsageError(f"time {at} is past the last one at which anything can be bound")
