"""The progress relation: remap as users see it.

Remap holds increments, which is good for adding up and not for reading. Its
progress relation shows offsets, with the time at which each was bound, in the
columns that suit the type of the source:

    mz_timestamp    partition  offset            mz_timestamp    lsn
    1649686076392   1          42                1649686076392   24023040
    1649686079487   1          45

It is a view, made by whoever reads, and never stored: `mz_timestamp` is a column of
data here. As of t it has one row for each partition, with the newest binding at or
before t. Its changes are one row for each partition that moved, at each binding.

History below since is compacted, as in every collection, and a binding from below
it is shown at since.
"""

from collections.abc import Container
from itertools import count

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME
from penstock.errors import UsageError
from penstock.reclock.remap import Offsets, Shape, Steps, begins, steps

__all__ = ["progress_as_of", "progress_changes", "progress_name"]


def progress_as_of(shape: Shape, updates: pa.Table, as_of: int) -> pa.Table:
    """How far each partition had come, and since when, in the order of partitions.

    `updates` are those of remap, at least up to `as_of`.
    """
    seen = updates.filter(pc.less_equal(updates.column(TIME), as_of))
    read = steps(shape, seen)
    return _shown(shape, read).filter(_newest(read))


def progress_changes(shape: Shape, updates: pa.Table, *, before: Offsets | None = None) -> pa.Table:
    """Each binding in `updates` of remap, in the order of time, with a diff of +1.

    `before` is how far each partition had come before them, as `accumulated` tells it
    to whoever has followed remap so far.
    """
    shown = _shown(shape, steps(shape, updates, before=before))
    shown = shown.filter(pc.is_valid(shown.columns[-1]))
    order = pc.sort_indices(shown, sort_keys=[(name, "ascending") for name in shown.schema.names])
    ones = pa.array(np.ones(len(shown), np.int64))
    return shown.take(order).append_column(pa.field(DIFF, pa.int64(), nullable=False), ones)


def progress_name(source: str, taken: Container[str], *, given: str | None = None) -> str:
    """What the progress relation of `source` is called: as given, or the first name free.

    >>> progress_name("shop", {"shop", "shop_progress"})
    'shop_progress1'

    Raises:
        UsageError: the name given is taken.
    """
    if given is None:
        names = (f"{source}_progress{number or ''}" for number in count())
        return next(name for name in names if name not in taken)
    if given in taken:
        raise UsageError(
            f'progress of source "{source}" cannot be called "{given}": the name is taken',
            hint=f"Choose another name, or leave it out for {source}_progress.",
        )
    return given


def _shown(shape: Shape, read: Steps) -> pa.Table:
    partitions = [] if shape.partition.type == pa.null() else [read.partitions]
    return pa.table([read.times, *partitions, read.offsets], schema=shape.progress)


def _newest(read: Steps) -> pa.Array:
    """Which rows are the last of their partition, and not closed."""
    last = np.append(begins(read.partitions)[1:], True)[: len(read.times)]
    return pc.and_(pa.array(last), pc.is_valid(read.offsets))
