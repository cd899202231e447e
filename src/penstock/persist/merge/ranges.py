"""Cutting updates into ranges, so that a merge can be done in pieces. Pure Arrow.

A merge adds up equal rows and sorts. Both can be done range by range,

    merge(A + B + …)  =  merge(range 0 of A, B, …), merge(range 1 of A, B, …), …

if the ranges follow the order of the result, and rows that must meet are in
one range whichever table they came in. So ranges are cut by the columns that
`sort_rows` goes by first: the key, or without a key all columns that have an
order, and time. Never by diff: an insertion and its deletion must meet.

Where a range begins is told by a *splitter*, a row of those columns. To know
on which side of it a row lies, rows and splitters are sorted together: null,
NaN and -0.0 then stand where the result has them, because it is the same sort.
Rows that compare equal to a splitter come after it, all of them.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME
from penstock.data.arrow import sort_columns

__all__ = ["bounds", "cut", "range_boundaries", "sample"]


def cut(updates: pa.Table, range_boundaries: pa.Table, key: tuple[str, ...]) -> list[pa.Table]:
    """The updates of each range, one more than there are splitters, in order of the range.

    `updates` may come in any order.
    """
    count = range_boundaries.num_rows
    if count == 0:
        return [updates]
    # SUBTLE: the sort is stable, so splitters stand before the rows that equal them.
    order = _order(pa.concat_tables([range_boundaries, bounds(updates, key)]))
    stands = pc.indices_nonzero(pc.less(order, count)).to_pylist()
    rows = order.filter(pc.greater_equal(order, count))
    ordered = updates.take(pc.subtract(rows, pa.scalar(count, rows.type)))
    begins = [0, *(stand - before for before, stand in enumerate(stands)), ordered.num_rows]
    return [ordered.slice(begin, end - begin) for begin, end in pairwise(begins)]


def range_boundaries(
    samples: Sequence[pa.Table], weights: Sequence[float], ranges: int
) -> pa.Table:
    """Splitters for at most so many ranges of about equal weight.

    Each sample counts with its weight, spread evenly over its rows.
    """
    rows = pa.concat_tables(samples)
    shares = [
        weight / sample.num_rows
        for sample, weight in zip(samples, weights, strict=True)
        for _ in range(sample.num_rows)
    ]
    if not shares:
        return rows
    order = _order(rows)
    summed: list[float] = pc.cumulative_sum(pa.array(shares, pa.float64()).take(order)).to_pylist()
    places = [bisect_right(summed, summed[-1] * i / ranges) for i in range(1, ranges)]
    return rows.take(order.take(pa.array(sorted(set(places)), pa.int64())))


def sample(updates: pa.Table, key: tuple[str, ...], rows: int) -> pa.Table:
    """At most so many rows of what ranges are cut by, at even distances in its order."""
    found = bounds(updates, key)
    if found.num_rows <= rows:
        return found
    places = [(2 * i + 1) * found.num_rows // (2 * rows) for i in range(rows)]
    return found.take(_order(found).take(pa.array(places, pa.int64())))


def bounds(updates: pa.Table, key: tuple[str, ...]) -> pa.Table:
    """The columns that ranges are cut by, under names of ours."""
    by = [name for name in sort_columns(updates.schema, key) if name != DIFF]
    # Where nothing in the key has an order, what is left is the order of time.
    chosen = [name for name in by if name in key] or [TIME] if key else by
    columns = [updates.column(name) for name in chosen]
    return pa.table(columns, names=[f"c{i}" for i in range(len(columns))])


def _order(rows: pa.Table) -> pa.Array:
    return pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in rows.schema.names])
