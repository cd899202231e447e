"""Cuts of updates into ranges, for a merge range by range. Pure Arrow.

A merge consolidates equal rows and sorts. Both can be done range by range,

    merge(A + B + …)  =  merge(range 0 of A, B, …), merge(range 1 of A, B, …), …

if the ranges follow the order of the result, and equal rows of all tables are in the same
range. Therefore ranges are cut by the leading columns of `sort_rows`: the key or, without a
key, all columns that have an order, and time. Diff is never used: an insert and its delete
must be in the same range.

A *range boundary* is a row of those columns at the start of a range. Rows and boundaries
are sorted together to find the range of each row. Null, NaN and -0.0 then have the same
position as in the result, because the sort is the same. All rows that compare equal to a
boundary follow it.
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
    """Return the updates of each range, in order; there is one more range than boundaries.

    `updates` may have any order.
    """
    count = range_boundaries.num_rows
    if count == 0:
        return [updates]
    # SUBTLE: the sort is stable, so boundaries precede the rows that equal them.
    order = _order(pa.concat_tables([range_boundaries, bounds(updates, key)]))
    stands = pc.indices_nonzero(pc.less(order, count)).to_pylist()
    rows = order.filter(pc.greater_equal(order, count))
    ordered = updates.take(pc.subtract(rows, pa.scalar(count, rows.type)))
    begins = [0, *(stand - before for before, stand in enumerate(stands)), ordered.num_rows]
    return [ordered.slice(begin, end - begin) for begin, end in pairwise(begins)]


def range_boundaries(
    samples: Sequence[pa.Table], weights: Sequence[float], ranges: int
) -> pa.Table:
    """Return boundaries of at most `ranges` ranges of about equal weight.

    The weight of each sample is spread evenly over its rows.
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
    """Return at most `rows` rows of the range columns, evenly spaced in their order."""
    found = bounds(updates, key)
    if found.num_rows <= rows:
        return found
    places = [(2 * i + 1) * found.num_rows // (2 * rows) for i in range(rows)]
    return found.take(_order(found).take(pa.array(places, pa.int64())))


def bounds(updates: pa.Table, key: tuple[str, ...]) -> pa.Table:
    """Return the range columns, under generated names."""
    by = [name for name in sort_columns(updates.schema, key) if name != DIFF]
    # If no key column has an order, the remaining order is time.
    chosen = [name for name in by if name in key] or [TIME] if key else by
    columns = [updates.column(name) for name in chosen]
    return pa.table(columns, names=[f"c{i}" for i in range(len(columns))])


def _order(rows: pa.Table) -> pa.Array:
    return pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in rows.schema.names])
