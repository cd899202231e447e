"""Resolution of row messages into complete deleted and inserted rows.

A collection update needs the complete old row and the complete new row. Postgres sends
less. With REPLICA IDENTITY FULL the message contains the old row. With a key it does
not, and neither tuple contains a large (TOAST) value that did not change:

    message       old            new                    missing
    insert        –              complete row           nothing
    update, FULL  complete row   large values omitted   nothing: they are in the old row
    update, key   old key, or    large values omitted   the old row, and from it the
                  nothing                               large values
    delete, FULL  complete row   –                      nothing
    delete, key   old key        –                      the old row

The old row of a key is the row that the latest earlier message left at that key. Before
the first such message, the old row is the stored row. Messages are therefore sorted by
key and order, each message finds its predecessor, and only the first message of each key
needs a lookup. The lookup uses the *old* key and covers stored rows and rows in flight,
in order (hazard B6). A row that is resolved by key, and inserted and deleted within one
call, appears in neither result.

All operations are columnar: no Python code runs once per row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DefiniteError

__all__ = [
    "Changes",
    "CollectionDiverged",
    "Resolved",
    "concat_changes",
    "resolve",
    "split_changes",
]

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

INSERT: Final = ord("I")
UPDATE: Final = ord("U")
DELETE: Final = ord("D")
NONE: Final = -1


class CollectionDiverged(DefiniteError):
    """A message deletes a row that does not exist, or inserts a row that already exists."""

    def __init__(self, *, table: str, key: str, what: str) -> None:
        super().__init__(
            f'change of table "{table}" contradicts its collection: {what}',
            detail=f"The key is {key}.",
            hint="Resync the table: its rows are compared with the collection, which is repaired.",
        )


@dataclass(frozen=True, slots=True)
class Changes:
    """Row messages of one table, in stream order."""

    kind: npt.NDArray[np.uint8]
    """`I`, `U` or `D`, per message."""

    old: pa.Table
    """Old tuples. If a tuple is only a key, its other columns are null."""

    old_row: Indices
    """Per message: its row number in `old`, or -1."""

    whole: Mask
    """Per message: true if the old tuple is the complete row."""

    new: pa.Table
    """New tuples."""

    new_row: Indices
    """Per message: its row number in `new`, or -1."""

    unchanged: Mapping[str, Mask] = field(default_factory=dict)
    """By column, per row of `new`: true if the server omitted the unchanged value."""

    def __len__(self) -> int:
        return len(self.kind)


def concat_changes(parts: Sequence[Changes]) -> Changes:
    """Return the concatenation of consecutive changes."""
    if len(parts) == 1:
        return parts[0]
    columns = {name for part in parts for name in part.unchanged}
    return Changes(
        kind=np.concatenate([part.kind for part in parts]),
        old=pa.concat_tables([part.old for part in parts]),
        old_row=_shift([part.old_row for part in parts], [part.old.num_rows for part in parts]),
        whole=np.concatenate([part.whole for part in parts]),
        new=pa.concat_tables([part.new for part in parts]),
        new_row=_shift([part.new_row for part in parts], [part.new.num_rows for part in parts]),
        unchanged={
            name: np.concatenate(
                [part.unchanged.get(name, np.zeros(part.new.num_rows, np.bool_)) for part in parts]
            )
            for name in columns
        },
    )


def _shift(parts: Sequence[Indices], sizes: Sequence[int]) -> Indices:
    """Return row numbers that refer to the concatenated tables."""
    starts = np.cumsum(sizes) - sizes
    return np.concatenate(
        [
            np.where(rows == NONE, NONE, rows + start)
            for rows, start in zip(parts, starts, strict=True)
        ]
    )


def split_changes(
    changes: Changes, key: Sequence[str], max_lookups: Callable[[], int]
) -> Iterator[Changes]:
    """Yield the changes in parts that each look up at max_lookups `max_lookups()` old rows.

    `max_lookups` is called before each part. Resolving the parts in order, each against the result
    of the previous parts, gives the same result as resolving all changes at once.
    """
    needs_lookup = (changes.kind != INSERT) & ~changes.whole
    if not key or np.count_nonzero(needs_lookup) <= max_lookups():
        yield changes
        return
    order = _lookup_order(changes, key)
    lookups = np.cumsum(needs_lookup[order])
    start = 0
    while start < len(order):
        before = int(lookups[start - 1]) if start else 0
        end = int(np.searchsorted(lookups, before + max(1, max_lookups()), "right"))
        yield _select_messages(changes, np.sort(order[start:end]))
        start = end


def _lookup_order(changes: Changes, key: Sequence[str]) -> Indices:
    """Return the order of messages for lookups: by key, then by stream order.

    Neighbouring keys are stored together, which makes their lookup cheap. The result is the
    stream order if a key column is nested, or if an update has an old tuple, because such an
    update may move a row to another key.
    """
    messages = np.arange(len(changes))
    named = changes.old_row != NONE
    nested = any(pa.types.is_nested(changes.new.schema.field(name).type) for name in key)
    if nested or bool((named & (changes.kind == UPDATE)).any()):
        return messages
    keys = pa.concat_tables([changes.old.select(key), changes.new.select(key)])
    keys = _take_rows(
        keys, np.where(named, changes.old_row, changes.old.num_rows + changes.new_row)
    )
    keys = pa.table([*keys.columns, messages], names=[str(at) for at in range(len(key) + 1)])
    order: Indices = pc.sort_indices(
        keys, sort_keys=[(name, "ascending") for name in keys.column_names]
    ).to_numpy()
    return order.astype(np.int64)


def _select_messages(changes: Changes, messages: Indices) -> Changes:
    old_row, new_row = changes.old_row[messages], changes.new_row[messages]
    has_old, has_new = old_row != NONE, new_row != NONE
    return Changes(
        kind=changes.kind[messages],
        old=_take_rows(changes.old, old_row[has_old]),
        old_row=np.where(has_old, np.cumsum(has_old) - 1, NONE),
        whole=changes.whole[messages],
        new=_take_rows(changes.new, new_row[has_new]),
        new_row=np.where(has_new, np.cumsum(has_new) - 1, NONE),
        unchanged={name: mask[new_row[has_new]] for name, mask in changes.unchanged.items()},
    )


@dataclass(frozen=True, slots=True)
class Resolved:
    """Rows to delete and rows to insert.

    If old rows were resolved by key, a row that would be in both is in neither.
    """

    deletes: pa.Table
    inserts: pa.Table


Lookup = Callable[[pa.Table], pa.Table]
"""Function from a table of distinct keys to the stored rows with these keys."""


def resolve(changes: Changes, key: Sequence[str], lookup: Lookup, *, table: str) -> Resolved:
    """Return the rows that `changes` delete and insert, given the stored rows.

    Raises:
        CollectionDiverged: a message contradicts the stored rows and the earlier messages.
    """
    needs_lookup = (changes.kind != INSERT) & ~changes.whole
    if not needs_lookup.any():
        return _resolve_from_messages(changes)
    if not key:
        raise DefiniteError(
            f'change of table "{table}" has no old row',
            detail="The table has neither a primary key nor REPLICA IDENTITY FULL.",
            hint=f"Run on the source: ALTER TABLE {table} REPLICA IDENTITY FULL; "
            "then resync the table.",
        )
    for name in key:
        if pa.types.is_nested(changes.new.schema.field(name).type):
            raise DefiniteError(
                f'change of table "{table}" identifies the old row by "{name}", which is an array',
                detail="A lookup by an array is not supported.",
                hint=f'List "{name}" under "text" of the table, in another source; or '
                f"run on the source: ALTER TABLE {table} REPLICA IDENTITY FULL; "
                "then resync the table.",
            )
    return _resolve_by_key(changes, key, lookup, table=table)


def _resolve_from_messages(changes: Changes) -> Resolved:
    """Resolve changes whose messages contain all old rows."""
    new = changes.new
    for name, omitted in changes.unchanged.items():
        new = _fill_from_old(changes, new, name, omitted)
    return Resolved(_take_rows(changes.old, changes.old_row[changes.old_row != NONE]), new)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Origin of the old row of each message that removes a row."""

    before: Indices
    """Per message: the message that inserted the row it removes, or -1."""

    stored: Indices
    """Per message: the number of the stored row it removes, or -1."""

    keys: pa.Table
    """Keys of the stored rows, in the order of their numbers."""


def _resolve_by_key(
    changes: Changes, key: Sequence[str], lookup: Lookup, *, table: str
) -> Resolved:
    changes = _fill_key_from_old(changes, key)
    chain = _chain(changes, key, table=table)
    stored = _stored_rows(chain.keys, key, lookup, changes.new.schema, table=table)
    deletes_row = changes.kind != INSERT
    inserted_by = chain.before[deletes_row & (chain.before != NONE)]
    new = _fill_omitted(changes, chain, stored)
    stays = np.ones(new.num_rows, np.bool_)
    stays[changes.new_row[inserted_by]] = False
    # Old rows that only their own message contains.
    from_message = changes.whole & (chain.before == NONE) & (chain.stored == NONE)
    deletes = pa.concat_tables([stored, _take_rows(changes.old, changes.old_row[from_message])])
    return Resolved(deletes, new.filter(pa.array(stays)))


def _fill_key_from_old(changes: Changes, key: Sequence[str]) -> Changes:
    """Fill omitted key values from the old tuple: an omitted value did not change."""
    new, unchanged = changes.new, dict(changes.unchanged)
    for name in key:
        omitted = unchanged.pop(name, None)
        if omitted is not None:
            new = _fill_from_old(changes, new, name, omitted)
    return Changes(
        changes.kind,
        changes.old,
        changes.old_row,
        changes.whole,
        new,
        changes.new_row,
        unchanged,
    )


def _fill_from_old(changes: Changes, new: pa.Table, name: str, omitted: Mask) -> pa.Table:
    """Return `new` with the omitted values of one column copied from the old tuples."""
    if not omitted.any():
        return new
    old_of_new = _scatter(changes.new_row, changes.old_row, new.num_rows)
    values = pa.concat_arrays([_combine(new.column(name)), _combine(changes.old.column(name))])
    rows = np.where(omitted, new.num_rows + old_of_new, np.arange(new.num_rows))
    return _replace_column(new, name, values.take(pa.array(rows)))


def _chain(changes: Changes, key: Sequence[str], *, table: str) -> _Chain:
    messages = np.arange(len(changes))
    deleting = messages[changes.kind != INSERT]
    inserting = messages[changes.kind != DELETE]
    named = changes.old_row[deleting] != NONE
    keys = pa.concat_tables(
        [
            _take_rows(changes.old.select(key), changes.old_row[deleting[named]]),
            _take_rows(changes.new.select(key), changes.new_row[deleting[~named]]),
            _take_rows(changes.new.select(key), changes.new_row[inserting]),
        ]
    )
    message = np.concatenate([deleting[named], deleting[~named], inserting])
    inserts = np.concatenate([np.zeros(len(deleting), np.bool_), np.ones(len(inserting), np.bool_)])
    group = _group_numbers(keys)
    # Sort by key, then by stream order. A message removes a row before it inserts one.
    order = np.lexsort((message * 2 + inserts, group))
    group, message, inserts = group[order], message[order], inserts[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = group[1:] != group[:-1]
    inserted_before = np.zeros(len(order), np.bool_)
    inserted_before[1:] = inserts[:-1]
    broken = ~first & (inserted_before == inserts)
    if broken.any():
        at = int(np.flatnonzero(broken)[0])
        raise CollectionDiverged(
            table=table,
            key=_format_key(keys, int(order[at])),
            what="row to insert exists" if inserts[at] else "row to delete does not exist",
        )
    before = np.full(len(changes), NONE, np.int64)
    follows = ~inserts & ~first
    before[message[follows]] = message[np.flatnonzero(follows) - 1]
    opens = ~inserts & first & ~changes.whole[message]
    stored = np.full(len(changes), NONE, np.int64)
    stored[message[opens]] = np.arange(int(opens.sum()))
    return _Chain(before, stored, _take_rows(keys, order[opens]))


def _stored_rows(
    keys: pa.Table, key: Sequence[str], lookup: Lookup, schema: pa.Schema, *, table: str
) -> pa.Table:
    """Return the stored rows of `keys`, in the same order."""
    if keys.num_rows == 0:
        return schema.empty_table()
    rows_found = lookup(keys).select(schema.names)
    group = _group_numbers(pa.concat_tables([keys, rows_found.select(key).cast(keys.schema)]))
    requested, returned = group[: keys.num_rows], group[keys.num_rows :]
    row_of = np.full(int(group.max()) + 1, NONE, np.int64)
    row_of[returned] = np.arange(rows_found.num_rows)
    rows = row_of[requested]
    if (rows == NONE).any():
        at = int(np.flatnonzero(rows == NONE)[0])
        raise CollectionDiverged(
            table=table, key=_format_key(keys, at), what="no stored row has this key"
        )
    if rows_found.num_rows != keys.num_rows:
        counts = np.bincount(returned)
        at = int(np.flatnonzero(counts[requested] != 1)[0])
        raise CollectionDiverged(
            table=table, key=_format_key(keys, at), what="several stored rows have this key"
        )
    return _take_rows(rows_found, rows).cast(schema)


def _fill_omitted(changes: Changes, chain: _Chain, stored: pa.Table) -> pa.Table:
    """Return the new rows, with omitted values filled from the rows they replace."""
    new, count = changes.new, changes.new.num_rows
    # Numbering of all candidate rows: new rows, then old tuples, then stored rows.
    old_at, stored_at = count, count + changes.old.num_rows
    replaced = np.full(len(changes), NONE, np.int64)
    chained, looked_up = chain.before != NONE, chain.stored != NONE
    replaced[chained] = changes.new_row[chain.before[chained]]
    replaced[looked_up] = stored_at + chain.stored[looked_up]
    replaced[changes.whole] = old_at + changes.old_row[changes.whole]
    replaced_by_new = _scatter(changes.new_row, replaced, count)
    for name, omitted in changes.unchanged.items():
        if not omitted.any():
            continue
        final = np.concatenate([~omitted, np.ones(stored_at - old_at + stored.num_rows, np.bool_)])
        source = np.where(omitted, replaced_by_new, np.arange(count))
        while not final[source].all():
            # Each iteration doubles the number of earlier messages that are followed.
            source = np.where(final[source], source, source[np.minimum(source, count - 1)])
        values = pa.concat_arrays(
            [
                _combine(new.column(name)),
                _combine(changes.old.column(name)),
                _combine(stored.column(name)),
            ]
        )
        new = _replace_column(new, name, values.take(pa.array(source)))
    return new


def _group_numbers(keys: pa.Table) -> Indices:
    """Return a number per row that is equal for equal keys. Null equals null."""
    numbers = np.zeros(keys.num_rows, np.int64)
    for column in keys.columns:
        codes = pc.dictionary_encode(_combine(column), null_encoding="encode")
        codes_of = codes.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        mixed = numbers * (len(codes.dictionary) + 1) + codes_of
        _, numbers = np.unique(mixed, return_inverse=True)
    return numbers.astype(np.int64)


def _scatter(at: Indices, values: Indices, size: int) -> Indices:
    """Return the `values` of messages, indexed by the row `at` of their new tuple."""
    rows = np.full(size, NONE, np.int64)
    present = at != NONE
    rows[at[present]] = values[present]
    return rows


def _take_rows(table: pa.Table, rows: Indices) -> pa.Table:
    return table.take(pa.array(rows, pa.int64()))


def _replace_column(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(at), column)


def _combine(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        return (
            pa.concat_arrays(combined.chunks) if combined.num_chunks else pa.array([], column.type)
        )
    return combined


def _format_key(keys: pa.Table, row: int) -> str:
    return ", ".join(
        f"{name} = {keys.column(name)[row].as_py()!r:.80}" for name in keys.column_names
    )
