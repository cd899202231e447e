"""Minting: the binding of a source frontier to a time.

Bindings never decrease: a later time never has a lower offset. Each event therefore belongs to
exactly one time, the first whose binding covers it. A frontier that moved backwards, because a
topic was recreated or a server was restored, mints nothing and is returned as `Regressed`.

A tick reads the clock, then probes the source, and binds the probed frontier, not the position
read so far. Everything acknowledged upstream before the time is then below the binding. All
changes of one upstream transaction have one offset (in Postgres, its commit LSN), so a binding
never splits a transaction.

The caller commits the updates of remap, the data and the new uppers (time + 1) in one entry.
"""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.data.remap_form import RemapForm
from penstock.errors import UsageError
from penstock.progress import MAX_TIME, Frontier, Partition, check_time
from penstock.reclock.remap import Move, encode_moves

__all__ = ["Minted", "Regressed", "Unmoved", "mint"]


@dataclass(frozen=True, slots=True)
class Minted:
    """A new binding: at least one partition advanced."""

    updates: pa.Table
    """Updates of remap, in its stored schema."""

    frontier: Frontier[Any]
    """The frontier after this binding."""


@dataclass(frozen=True, slots=True)
class Unmoved:
    """No partition advanced. The upper of remap advances without rows."""


@dataclass(frozen=True, slots=True)
class Regressed:
    """A partition moved backwards. Nothing is minted, for any partition."""

    partition: Partition
    """The first partition that moved backwards."""

    was: int
    now: int | None
    """The probed offset; None, if the partition is missing from the probe."""

    others: int = 0
    """Number of further partitions that moved backwards."""


def mint(
    form: RemapForm, current: Frontier[Any], probed: Frontier[Any], *, time: int
) -> Minted | Unmoved | Regressed:
    """Bind the frontier `probed` to `time`, after the bound frontier `current`.

    A new partition begins at 0. A partition missing from `probed` keeps its row if
    `form.partitions_end`; otherwise it has moved backwards.

    Raises:
        UsageError: a partition, an offset or the time is invalid.
    """
    if check_time(time) == MAX_TIME:
        raise UsageError(
            f"time {time} cannot have a binding",
            detail=f"The last time with a binding is {MAX_TIME - 1}.",
        )
    form.check(probed)
    # A source may have a million objects; a probe of it returns only a few.
    partitions = probed if form.partitions_end else current | probed
    regressed = sorted(
        (partition, current[partition], probed.get(partition))
        for partition in partitions
        if current[partition] > probed[partition]
    )
    if regressed:
        return Regressed(*regressed[0], others=len(regressed) - 1)
    moves = [
        Move(partition, current[partition], offset)
        for partition, offset in sorted(probed.items())
        if offset > current[partition]
    ]
    if not moves:
        return Unmoved()
    frontier = Frontier({move.partition: move.now for move in moves})
    return Minted(encode_moves(form, moves, time=time), current | frontier)
