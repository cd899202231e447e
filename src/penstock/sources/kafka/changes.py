"""Rows by key: of many records the last, and of rows that go and come what changes.

An update of Debezium's may lack a value: what is stored out of line and did not change is not
in the database's log, and a word stands in its place. Then the value is what it was before:
that of an earlier event, or of the row that is stored.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME, consolidate
from penstock.errors import DefiniteError

__all__ = ["changes_of", "completed", "last_of"]

_WORD: Final = "__debezium_unavailable_value"


def last_of(rows: pa.Table, key: list[str], by: Sequence[str], *, gone: str = "") -> pa.Table:
    """Of each key, the last record; one that lacks values has those of the ones before it.

    `gone` is the column that says of a record that its row is gone, if records may lack values.
    """
    ordered = rows.sort_by([(name, "ascending") for name in by])
    names = [f"c{number}" for number in range(len(key))]
    numbers = pa.array(np.arange(ordered.num_rows))
    lacking = _lacking(ordered) if gone else {}
    # By column, the number of a record that has a value there, or has none to be had.
    had = {
        f"has {name}": pc.if_else(pc.and_not(mask, ordered.column(gone)), None, numbers)
        for name, mask in lacking.items()
    }
    columns = [ordered.column(name) for name in key]
    numbered = pa.table([*columns, numbers, *had.values()], names=[*names, "row", *had])
    lasts = numbered.group_by(names, use_threads=False).aggregate(
        [(each, "max") for each in ("row", *had)]
    )
    found = ordered.take(lasts.column("row_max"))
    for name in lacking:
        at = lasts.column(f"has {name}_max")
        alive = pc.invert(ordered.column(gone).take(at))
        taken = pc.if_else(alive, ordered.column(name).take(at), None)
        value = pc.if_else(_is_word(found.column(name)), taken, found.column(name))
        kept = pc.if_else(pc.fill_null(alive, fill_value=False), value, found.column(name))
        found = found.set_column(found.schema.get_field_index(name), name, kept)
    return found


def completed(come: pa.Table, stored: pa.Table, key: list[str], *, topic: str) -> pa.Table:
    """Rows that come, with values that they still lack from those that are stored.

    Raises:
        DefiniteError: there is no such row.
    """
    lacking = _lacking(come)
    if not lacking:
        return come
    at = {tuple(row.values()): number for number, row in enumerate(stored.select(key).to_pylist())}
    for name, mask in lacking.items():
        column = come.column(name).to_pylist()
        before = stored.column(name)
        for number in np.flatnonzero(mask.to_numpy(zero_copy_only=False)).tolist():
            of = come.select(key).slice(number, 1).to_pylist()[0]
            if tuple(of.values()) not in at:
                raise _unknown(topic, name, of)
            column[number] = before[at[tuple(of.values())]].as_py()
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
    """Rows that go and come, with diffs, without those that do both."""
    changes = [_with_diff(come, 1), _with_diff(gone, -1)]
    return consolidate(pa.concat_tables(changes)).drop_columns([TIME])


def _with_diff(rows: pa.Table, diff: int) -> pa.Table:
    """Rows with a diff, all at one time, which whoever writes them replaces."""
    ones = pa.array(np.full(rows.num_rows, diff), pa.int64())
    zeros = pa.array(np.zeros(rows.num_rows, np.int64))
    return rows.append_column(TIME, zeros).append_column(DIFF, ones)


def _lacking(rows: pa.Table) -> dict[str, pa.ChunkedArray]:
    """By column in which some values are lacking, where."""
    found = {}
    for field in rows.schema:
        if pa.types.is_string(field.type) or pa.types.is_binary(field.type):
            mask = _is_word(rows.column(field.name))
            if pc.any(mask).as_py():
                found[field.name] = mask
    return found


def _is_word(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Where it stands; in a column of JSON it is a string."""
    words = [_WORD, f'"{_WORD}"']
    if pa.types.is_binary(column.type):
        words = [word.encode() for word in words]  # type: ignore[misc]
    return pc.is_in(column, value_set=pa.array(words, column.type))
