"""Rows by key: of many records the last, and of rows that go and come what changes."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from penstock.data import DIFF, TIME, consolidate

__all__ = ["changes_of", "last_of"]


def last_of(rows: pa.Table, key: list[str], by: Sequence[str]) -> pa.Table:
    """Of each key, the last record."""
    ordered = rows.sort_by([(name, "ascending") for name in by])
    names = [f"c{number}" for number in range(len(key))]
    numbered = pa.table(
        [*(ordered.column(name) for name in key), np.arange(ordered.num_rows)],
        names=[*names, "row"],
    )
    lasts = numbered.group_by(names, use_threads=False).aggregate([("row", "max")])
    return ordered.take(lasts.column("row_max"))


def changes_of(gone: pa.Table, come: pa.Table) -> pa.Table:
    """Rows that go and come, with diffs, without those that do both."""
    changes = [_with_diff(come, 1), _with_diff(gone, -1)]
    return consolidate(pa.concat_tables(changes)).drop_columns([TIME])


def _with_diff(rows: pa.Table, diff: int) -> pa.Table:
    """Rows with a diff, all at one time, which whoever writes them replaces."""
    ones = pa.array(np.full(rows.num_rows, diff), pa.int64())
    zeros = pa.array(np.zeros(rows.num_rows, np.int64))
    return rows.append_column(TIME, zeros).append_column(DIFF, ones)
