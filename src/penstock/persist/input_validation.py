"""Validation of updates from callers, and their conversion to stored form.

Invalid input is rejected before anything is queued: an update of the wrong shape, a time
out of range, a row that does not match the schema. The result is a `CollectionAppend` for
the commit queue. Only the queue can check that its times lie at or past upper.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME, Codec, exact_array, stored_schema
from penstock.data.codec import BUILT_IN
from penstock.data.lossless import contains_forbidden_nulls
from penstock.errors import UsageError
from penstock.persist.state import END, Batch
from penstock.persist.write import CollectionAppend, Loose
from penstock.progress.time import parse_time

__all__ = [
    "Staged",
    "Updates",
    "check_as_of",
    "check_frontier",
    "put_pairs",
    "put_rows",
    "put_staged",
    "put_table",
    "render_columns",
    "split_updates",
    "table_of",
]

LOOSE_ROWS: Final = 64
"""Up to this number of updates of one call share a batch with updates of other calls."""

LOOSE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Staged:
    """Updates that other processes wrote as files under a staging id; see `Client.staging`."""

    batch: Batch | None
    """Unlinked batch of the files; None without any row."""


Updates: TypeAlias = pa.Table | pa.RecordBatch | Iterable[Any] | Staged


def split_updates(updates: Updates) -> list[Updates]:
    """Return the tables and files of a list one by one; any other updates as one element."""
    if isinstance(updates, list | tuple) and updates:
        kinds = pa.Table | pa.RecordBatch | Staged
        if all(isinstance(each, kinds) for each in updates):
            return list(updates)
    return [updates]


def put_pairs(
    append: CollectionAppend,
    updates: Iterable[Any],
    codecs: tuple[Codec, Codec],
    columns: pa.Schema,
    *,
    collection: str,
) -> None:
    """Encode keys and values with their codecs, and store them in `append`.

    Raises:
        UsageError: an update has the wrong shape, or an encoded value does not fit its column.
    """
    encode_key, encode_value = codecs[0].encode, codecs[1].encode
    keys: list[Any] = []
    values: list[Any] = []
    times: list[int] = []
    diffs: list[int] = []
    for update in updates:
        try:
            (key, value), time, diff = update
        except (TypeError, ValueError) as error:
            raise _misshapen(update, "((key, value), time, diff)", collection) from error
        keys.append(encode_key(key))
        values.append(encode_value(value))
        times.append(time)
        diffs.append(diff)
    for codec, column, field in zip(codecs, (keys, values), columns, strict=True):
        if codec is not BUILT_IN.get(codec.name):
            exact_array(column, field, what=f'what codec "{codec.name}" made of a {field.name}')
    _put_loose(append, [keys, values], times, diffs, columns, collection=collection)


def put_rows(
    append: CollectionAppend, updates: Iterable[Any], columns: pa.Schema, *, collection: str
) -> None:
    """Convert rows given as dicts, and store them in `append`.

    Raises:
        UsageError: an update has the wrong shape, or a value does not fit its column.
    """
    rows: list[Any] = []
    times: list[int] = []
    diffs: list[int] = []
    for update in updates:
        try:
            row, time, diff = update
            named = dict(row)
        except (TypeError, ValueError) as error:
            raise _misshapen(
                update, "(row, time, diff) with the row as a dict", collection
            ) from error
        unknown = set(named) - set(columns.names)
        if unknown:
            raise UsageError(
                f'collection "{collection}" has no column "{min(map(str, unknown))}"',
                hint=f"Its columns are {', '.join(columns.names)}.",
            )
        rows.append(named)
        times.append(time)
        diffs.append(diff)
    if not rows:
        return
    _check_times(times, diffs, collection=collection)
    arrays = [
        exact_array(
            [row.get(field.name) for row in rows],
            field,
            what=f'column "{field.name}" of a row for collection "{collection}"',
        )
        for field in columns
    ]
    arrays += [pa.array(times, pa.int64()), pa.array(diffs, pa.int64())]
    put_table(append, pa.Table.from_arrays(arrays, schema=stored_schema(columns)))


def put_table(append: CollectionAppend, rows: pa.Table) -> None:
    """Store rows in stored form in `append`, with their time bounds and size."""
    if rows.num_rows == 0:
        return
    bounds = pc.min_max(rows.column(TIME))
    append.updates = rows
    append.lower, append.beyond = bounds["min"].as_py(), bounds["max"].as_py() + 1
    append.size = rows.nbytes


def put_staged(append: CollectionAppend, batch: Batch | None) -> None:
    """Store an unlinked batch of files in `append`."""
    if batch is None:
        return
    append.stored = Future()
    append.stored.set_result(batch)
    append.lower, append.beyond = batch.lower, batch.upper
    append.schema = batch.schema


def table_of(
    updates: "pa.Table | pa.RecordBatch", columns: pa.Schema, *, time: int | None, collection: str
) -> pa.Table:
    """Return an Arrow table in stored form: the collection's columns, then time and diff.

    Raises:
        UsageError: columns, types, nulls or times do not fit the collection.
    """
    table = pa.Table.from_batches([updates]) if isinstance(updates, pa.RecordBatch) else updates
    if TIME not in table.column_names:
        if time is None:
            raise UsageError(
                f'rows for collection "{collection}" have no column "{TIME}"',
                hint="Give them one, or say time=… for all of them.",
            )
        _check_times([time], [1], collection=collection)
        table = table.append_column(TIME, pa.repeat(pa.scalar(time, pa.int64()), table.num_rows))
    if DIFF not in table.column_names:
        table = table.append_column(DIFF, pa.repeat(pa.scalar(1, pa.int64()), table.num_rows))
    expected = stored_schema(columns)
    if set(table.column_names) != set(expected.names) or len(table.column_names) != len(expected):
        raise UsageError(
            f'rows do not have the columns of collection "{collection}"',
            detail=f"The rows have {', '.join(table.column_names)}; the collection has "
            f"{', '.join(expected.names)}.",
            hint="Give exactly these columns, or first evolve the collection with alter.",
        )
    table = table.select(expected.names)
    for field, column in zip(expected, table.columns, strict=True):
        if column.type != field.type:
            raise UsageError(
                f'column "{field.name}" for collection "{collection}" is {column.type}, '
                f"not {field.type}",
                hint="Cast it first.",
            )
        if contains_forbidden_nulls(column, field):
            raise UsageError(
                f'column "{field.name}" for collection "{collection}" holds nulls',
                hint="It was declared not null.",
            )
    if table.num_rows:
        bounds = pc.min_max(table.column(TIME))
        _check_times([bounds["min"].as_py(), bounds["max"].as_py()], [1], collection=collection)
    return table.cast(expected)


def check_frontier(upper: int) -> int:
    """Return `upper` if it is a valid frontier, END included."""
    if type(upper) is not int or not 0 <= upper <= END:
        raise UsageError(f"{upper!r} is not a frontier", hint=f"Give an int from 0 to {END}.")
    return upper


def check_as_of(as_of: int | datetime) -> int:
    """Return a valid read time, given as an int or as an aware datetime."""
    if isinstance(as_of, datetime):
        as_of = parse_time(as_of, 0)
    if type(as_of) is not int or not 0 <= as_of < END:
        raise UsageError(f"{as_of!r} is not a time", hint=f"Give an int from 0 to {END - 1}.")
    return as_of


def render_columns(columns: pa.Schema) -> str:
    """Return the columns of a schema as text for messages."""
    return ", ".join(f"{field.name} {field.type}" for field in columns)


def _put_loose(
    append: CollectionAppend,
    columns: list[list[Any]],
    times: list[int],
    diffs: list[int],
    schema: pa.Schema,
    *,
    collection: str,
) -> None:
    if not times:
        return
    _check_times(times, diffs, collection=collection)
    if len(times) <= LOOSE_ROWS:
        size = sum(
            len(value) if isinstance(value, str | bytes) else 8 for c in columns for value in c
        )
        if size <= LOOSE_BYTES:
            append.updates = Loose(columns, times, diffs)
            append.lower, append.beyond = min(times), max(times) + 1
            append.size = size + 16 * len(times)
            return
    arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
    arrays += [pa.array(times, pa.int64()), pa.array(diffs, pa.int64())]
    put_table(append, pa.Table.from_arrays(arrays, schema=stored_schema(schema)))


def _check_times(times: list[int], diffs: list[int], *, collection: str) -> None:
    for time in times:
        if type(time) is not int or not 0 <= time < END:
            raise UsageError(
                f'update of collection "{collection}" has the time {time!r}',
                hint=f"A time is an int of milliseconds from 0 up to {END - 1}.",
            )
    for diff in diffs:
        if type(diff) is not int or not -(2**63) <= diff < 2**63:
            raise UsageError(
                f'update of collection "{collection}" has the diff {diff!r}',
                hint="A diff is an int of 64 bits.",
            )


def _misshapen(update: object, expected: str, collection: str) -> UsageError:
    return UsageError(
        f'an update for collection "{collection}" has the wrong shape',
        detail=f"It is a {type(update).__name__}.",
        hint=f"Give {expected}.",
    )
