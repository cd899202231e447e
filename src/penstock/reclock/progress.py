"""The progress relation: remap as users read it.

Remap contains increments. Its progress relation contains offsets and the times of their bindings,
in columns that depend on the source type:

    mz_timestamp    partition  offset            mz_timestamp    lsn
    1649686076392   1          42                1649686076392   24023040
    1649686079487   1          45

The relation is a view of remap, computed by its reader and never stored, so `mz_timestamp` is a
column of data. As of t it has one row for each partition, with the newest binding at or before t.
Its changes are one row for each partition that a binding advanced.

Compaction advances bindings below since to since, as in every collection.
"""

from collections.abc import Container
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME
from penstock.data.remap_form import RemapForm
from penstock.errors import UsageError
from penstock.progress import Frontier
from penstock.reclock.remap import Steps, decode_steps, partition_starts

__all__ = ["progress_as_of", "progress_changes", "progress_name"]


def progress_as_of(form: RemapForm, updates: pa.Table, as_of: int) -> pa.Table:
    """Return the newest binding of each partition as of a time, ordered by partition.

    `updates` are updates of remap, complete up to `as_of`.
    """
    steps = decode_steps(form, updates.filter(pc.less_equal(updates.column(TIME), as_of)))
    is_newest = np.append(partition_starts(steps.partitions)[1:], True)[: len(steps.times)]
    return _relation(form, steps).filter(pa.array(is_newest))


def progress_changes(
    form: RemapForm, updates: pa.Table, *, before: Frontier[Any] | None = None
) -> pa.Table:
    """Return each binding in `updates` of remap, ordered by time, with a diff of +1.

    `before` is the frontier before `updates`, as `accumulate` returns it.
    """
    relation = _relation(form, decode_steps(form, updates, before=before))
    order = pc.sort_indices(
        relation, sort_keys=[(name, "ascending") for name in relation.schema.names]
    )
    ones = pa.array(np.ones(len(relation), np.int64))
    return relation.take(order).append_column(pa.field(DIFF, pa.int64(), nullable=False), ones)


def progress_name(source: str, taken: Container[str], *, given: str | None = None) -> str:
    """Return the name of the progress relation: `given`, or the first free default name.

    >>> progress_name("shop", {"shop", "shop_progress"})
    'shop_progress1'

    Raises:
        UsageError: the given name is taken.
    """
    if given is None:
        names = (f"{source}_progress{number or ''}" for number in count())
        return next(name for name in names if name not in taken)
    if given in taken:
        raise UsageError(
            f'name "{given}" for the progress relation of source "{source}" is already taken',
            hint=f"Choose another name, or omit it for {source}_progress.",
        )
    return given


def _relation(form: RemapForm, steps: Steps) -> pa.Table:
    partitions = [] if form.partition.type == pa.null() else [steps.partitions]
    return pa.table([steps.times, *partitions, steps.offsets], schema=form.progress)
