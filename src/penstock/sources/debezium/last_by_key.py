"""Row changes by key: the last record of each key, and the differences from the stored rows.

A Debezium update may omit a value. A value that is stored out of line (in Postgres, TOAST) and did
not change is not in the database's log, and Debezium sends a placeholder instead. The value is then
unchanged: it is taken from an earlier event of the key, or from the stored row.

The transaction buffer uses these functions too, so they are in this package and not in a source.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME, consolidate
from penstock.errors import DefiniteError

__all__ = ["UnavailableValues", "diff_rows", "fill_from_stored", "is_unavailable", "last_by_key"]

_PLACEHOLDER: Final = "__debezium_unavailable_value"


class UnavailableValues(NamedTuple):
    """Marker that records may omit values, with the names needed to fill and report them."""

    deleted: str
    """Boolean column that is true in a record that deletes its row."""

    topic: str


def last_by_key(
    rows: pa.Table,
    key: list[str],
    order: Sequence[str],
    *,
    unavailable: UnavailableValues | None = None,
) -> pa.Table:
    """Return the last record of each key, in the order of the columns `order`.

    A record that omits values takes them from earlier records of its key.

    Raises:
        DefiniteError: a value is missing, and the record before it deletes the row.
    """
    ordered = rows.sort_by([(name, "ascending") for name in order])
    key_names = [f"c{number}" for number in range(len(key))]
    row_numbers = pa.array(np.arange(ordered.num_rows))
    deleted, topic = unavailable or ("", "")
    masks = _unavailable_masks(ordered) if unavailable else {}
    # By column, the row number of a record that has a value, or that deletes its row and so ends
    # the search.
    available = {
        f"has {name}": pc.if_else(pc.and_not(mask, ordered.column(deleted)), None, row_numbers)
        for name, mask in masks.items()
    }
    columns = [ordered.column(name) for name in key]
    numbered = pa.table(
        [*columns, row_numbers, *available.values()], names=[*key_names, "row", *available]
    )
    last_rows = numbered.group_by(key_names, use_threads=False).aggregate(
        [(name, "max") for name in ("row", *available)]
    )
    last = ordered.take(last_rows.column("row_max"))
    for name in masks:
        source_rows = last_rows.column(f"has {name}_max")
        column, was_deleted = last.column(name), ordered.column(deleted).take(source_rows)
        is_missing = pc.and_not(is_unavailable(column), last.column(deleted))
        is_lost = pc.and_(is_missing, pc.fill_null(was_deleted, fill_value=False))
        if pc.any(is_lost).as_py():
            key_values = last.filter(is_lost).select(key).slice(0, 1).to_pylist()[0]
            raise _value_lost(topic, name, key_values)
        # A value that no record of this batch has is in the stored row.
        earlier = pc.coalesce(ordered.column(name).take(source_rows), column)
        filled = pc.if_else(pc.and_(is_missing, pc.is_valid(source_rows)), earlier, column)
        last = last.set_column(last.schema.get_field_index(name), name, filled)
    return last


def fill_from_stored(
    inserts: pa.Table, stored: pa.Table, key: list[str], *, topic: str
) -> pa.Table:
    """Return the inserts, with still missing values taken from the stored rows.

    Raises:
        DefiniteError: no row with the key of an incomplete insert is stored.
    """
    masks = _unavailable_masks(inserts)
    if not masks:
        return inserts
    keys = [tuple(row.values()) for row in inserts.select(key).to_pylist()]
    stored_rows = {
        tuple(row.values()): number for number, row in enumerate(stored.select(key).to_pylist())
    }
    for name, mask in masks.items():
        values = inserts.column(name).to_pylist()
        stored_values = stored.column(name)
        for row in np.flatnonzero(mask.to_numpy(zero_copy_only=False)).tolist():
            if keys[row] not in stored_rows:
                raise _value_lost(topic, name, dict(zip(key, keys[row], strict=True)))
            values[row] = stored_values[stored_rows[keys[row]]].as_py()
        index = inserts.schema.get_field_index(name)
        column = pa.array(values, stored_values.type)
        inserts = inserts.set_column(index, inserts.schema.field(index), column)
    return inserts


def _value_lost(topic: str, column: str, key: Mapping[str, object]) -> DefiniteError:
    key_text = ", ".join(f"{name} {value}" for name, value in key.items())
    return DefiniteError(
        f'topic "{topic}" has an update without the value of column "{column}", of a row that is '
        f"not known: {key_text}",
        detail="The database's log has no unchanged values that are stored out of line.",
        hint="Start at a record that has the row: start: earliest. Or make the connector send "
        "complete rows with REPLICA IDENTITY FULL of the table, and start the source again.",
    )


def diff_rows(deletes: pa.Table, inserts: pa.Table) -> pa.Table:
    """Return deletes and inserts as one table with diffs, without rows that are in both."""
    changes = [_with_diff(inserts, 1), _with_diff(deletes, -1)]
    return consolidate(pa.concat_tables(changes)).drop_columns([TIME])


def _with_diff(rows: pa.Table, diff: int) -> pa.Table:
    """Return the rows with a diff and a placeholder time, which the writer replaces."""
    diffs = pa.array(np.full(rows.num_rows, diff), pa.int64())
    times = pa.array(np.zeros(rows.num_rows, np.int64))
    return rows.append_column(TIME, times).append_column(DIFF, diffs)


def _unavailable_masks(rows: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Return a mask of the missing values for each column that has any."""
    masks = {}
    for field in rows.schema:
        if pa.types.is_string(field.type) or pa.types.is_binary(field.type):
            mask = is_unavailable(rows.column(field.name))
            if pc.any(mask).as_py():
                masks[field.name] = mask
    return masks


def is_unavailable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return where the column holds Debezium's placeholder, which JSON columns quote."""
    placeholders = [_PLACEHOLDER, f'"{_PLACEHOLDER}"']
    if pa.types.is_binary(column.type):
        placeholders = [text.encode() for text in placeholders]  # type: ignore[misc]
    return pc.is_in(column, value_set=pa.array(placeholders, column.type))
