"""Row changes by key: the last record of each key, and the differences from the stored rows.

A Debezium update may omit a value. A value that is stored out of line (in Postgres, TOAST) and did
not change is not in the database's log, and Debezium sends a placeholder instead. The value is then
unchanged: it is taken from an earlier event of the key, or from the stored row.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME, consolidate
from penstock.errors import DefiniteError

__all__ = ["Lacking", "changes_of", "completed", "is_word", "last_of"]

_WORD: Final = "__debezium_unavailable_value"


class Lacking(NamedTuple):
    """Marker that records may omit values, with the names needed to complete and report them."""

    gone: str
    """Boolean column that is true in a record that deletes its row."""

    topic: str


def last_of(
    rows: pa.Table, key: list[str], by: Sequence[str], *, lacking: Lacking | None = None
) -> pa.Table:
    """Return the last record of each key, by the order of the columns `by`.

    A record that omits values takes them from earlier records of its key.

    Raises:
        DefiniteError: a value is missing, and the record before it deletes the row.
    """
    ordered = rows.sort_by([(name, "ascending") for name in by])
    names = [f"c{number}" for number in range(len(key))]
    numbers = pa.array(np.arange(ordered.num_rows))
    gone, topic = lacking or ("", "")
    lacked = _lacked(ordered) if lacking else {}
    # By column, the row number of a record that has a value, or that deletes its row and so ends
    # the search.
    had = {
        f"has {name}": pc.if_else(pc.and_not(mask, ordered.column(gone)), None, numbers)
        for name, mask in lacked.items()
    }
    columns = [ordered.column(name) for name in key]
    numbered = pa.table([*columns, numbers, *had.values()], names=[*names, "row", *had])
    lasts = numbered.group_by(names, use_threads=False).aggregate(
        [(each, "max") for each in ("row", *had)]
    )
    found = ordered.take(lasts.column("row_max"))
    for name in lacked:
        at = lasts.column(f"has {name}_max")
        column, was_gone = found.column(name), ordered.column(gone).take(at)
        lacks = pc.and_not(is_word(column), found.column(gone))
        lost = pc.and_(lacks, pc.fill_null(was_gone, fill_value=False))
        if pc.any(lost).as_py():
            raise _unknown(topic, name, found.filter(lost).select(key).slice(0, 1).to_pylist()[0])
        # A value that no record of this batch has is in the stored row.
        value = pc.coalesce(ordered.column(name).take(at), column)
        kept = pc.if_else(pc.and_(lacks, pc.is_valid(at)), value, column)
        found = found.set_column(found.schema.get_field_index(name), name, kept)
    return found


def completed(come: pa.Table, stored: pa.Table, key: list[str], *, topic: str) -> pa.Table:
    """Return the inserts, with still missing values taken from the stored rows.

    Raises:
        DefiniteError: no row with the key of an incomplete insert is stored.
    """
    lacked = _lacked(come)
    if not lacked:
        return come
    keys = [tuple(row.values()) for row in come.select(key).to_pylist()]
    at = {tuple(row.values()): number for number, row in enumerate(stored.select(key).to_pylist())}
    for name, mask in lacked.items():
        column = come.column(name).to_pylist()
        before = stored.column(name)
        for number in np.flatnonzero(mask.to_numpy(zero_copy_only=False)).tolist():
            if keys[number] not in at:
                raise _unknown(topic, name, dict(zip(key, keys[number], strict=True)))
            column[number] = before[at[keys[number]]].as_py()
        place = come.schema.get_field_index(name)
        come = come.set_column(place, come.schema.field(place), pa.array(column, before.type))
    return come


def _unknown(topic: str, column: str, of: Mapping[str, object]) -> DefiniteError:
    told = ", ".join(f"{name} {value}" for name, value in of.items())
    return DefiniteError(
        f'topic "{topic}" has an update without the value of column "{column}", of a row that is '
        f"not known: {told}",
        detail="What did not change and is stored out of line is not in the database's log.",
        hint="Begin where the topic has the row: start: earliest. Or let the connector send "
        "whole rows, by REPLICA IDENTITY FULL of the table, and begin again.",
    )


def changes_of(gone: pa.Table, come: pa.Table) -> pa.Table:
    """Return inserts and deletes as one table with diffs, without rows that are in both."""
    changes = [_with_diff(come, 1), _with_diff(gone, -1)]
    return consolidate(pa.concat_tables(changes)).drop_columns([TIME])


def _with_diff(rows: pa.Table, diff: int) -> pa.Table:
    """Return the rows with a diff and a placeholder time, which the writer replaces."""
    ones = pa.array(np.full(rows.num_rows, diff), pa.int64())
    zeros = pa.array(np.zeros(rows.num_rows, np.int64))
    return rows.append_column(TIME, zeros).append_column(DIFF, ones)


def _lacked(rows: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Return a mask of the missing values for each column that has any."""
    found = {}
    for field in rows.schema:
        if pa.types.is_string(field.type) or pa.types.is_binary(field.type):
            mask = is_word(rows.column(field.name))
            if pc.any(mask).as_py():
                found[field.name] = mask
    return found


def is_word(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return where the column holds Debezium's placeholder, which JSON columns quote."""
    words = [_WORD, f'"{_WORD}"']
    if pa.types.is_binary(column.type):
        words = [word.encode() for word in words]  # type: ignore[misc]
    return pc.is_in(column, value_set=pa.array(words, column.type))
