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

__all__ = ["Changes", "LostTrack", "Resolved", "in_parts", "joined", "resolve"]

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

INSERT: Final = ord("I")
UPDATE: Final = ord("U")
DELETE: Final = ord("D")
NONE: Final = -1


class LostTrack(DefiniteError):
    """A message deletes a row that does not exist, or inserts a row that already exists."""

    def __init__(self, *, table: str, key: str, what: str) -> None:
        super().__init__(
            f'change of table "{table}" does not meet what is stored: {what}',
            detail=f"The key is {key}.",
            hint="The collection no longer follows the table; to compare and mend it, resync it.",
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


def joined(parts: Sequence[Changes]) -> Changes:
    """Return the concatenation of consecutive changes."""
    if len(parts) == 1:
        return parts[0]
    columns = {name for part in parts for name in part.unchanged}
    return Changes(
        kind=np.concatenate([part.kind for part in parts]),
        old=pa.concat_tables([part.old for part in parts]),
        old_row=_shifted([part.old_row for part in parts], [part.old.num_rows for part in parts]),
        whole=np.concatenate([part.whole for part in parts]),
        new=pa.concat_tables([part.new for part in parts]),
        new_row=_shifted([part.new_row for part in parts], [part.new.num_rows for part in parts]),
        unchanged={
            name: np.concatenate(
                [part.unchanged.get(name, np.zeros(part.new.num_rows, np.bool_)) for part in parts]
            )
            for name in columns
        },
    )


def _shifted(parts: Sequence[Indices], sizes: Sequence[int]) -> Indices:
    """Return row numbers that refer to the concatenated tables."""
    starts = np.cumsum(sizes) - sizes
    return np.concatenate(
        [
            np.where(rows == NONE, NONE, rows + start)
            for rows, start in zip(parts, starts, strict=True)
        ]
    )


def in_parts(changes: Changes, key: Sequence[str], most: Callable[[], int]) -> Iterator[Changes]:
    """Yield the changes in parts that each look up at most `most()` old rows.

    `most` is called before each part. Resolving the parts in order, each against the result
    of the previous parts, gives the same result as resolving all changes at once.
    """
    in_want = (changes.kind != INSERT) & ~changes.whole
    if not key or np.count_nonzero(in_want) <= most():
        yield changes
        return
    order = _order_to_look_up(changes, key)
    wanted = np.cumsum(in_want[order])
    start = 0
    while start < len(order):
        before = int(wanted[start - 1]) if start else 0
        end = int(np.searchsorted(wanted, before + max(1, most()), "right"))
        yield _those(changes, np.sort(order[start:end]))
        start = end


def _order_to_look_up(changes: Changes, key: Sequence[str]) -> Indices:
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
    keys = _taken(keys, np.where(named, changes.old_row, changes.old.num_rows + changes.new_row))
    keys = pa.table([*keys.columns, messages], names=[str(at) for at in range(len(key) + 1)])
    order: Indices = pc.sort_indices(
        keys, sort_keys=[(name, "ascending") for name in keys.column_names]
    ).to_numpy()
    return order.astype(np.int64)


def _those(changes: Changes, messages: Indices) -> Changes:
    old_row, new_row = changes.old_row[messages], changes.new_row[messages]
    old_there, new_there = old_row != NONE, new_row != NONE
    return Changes(
        kind=changes.kind[messages],
        old=_taken(changes.old, old_row[old_there]),
        old_row=np.where(old_there, np.cumsum(old_there) - 1, NONE),
        whole=changes.whole[messages],
        new=_taken(changes.new, new_row[new_there]),
        new_row=np.where(new_there, np.cumsum(new_there) - 1, NONE),
        unchanged={name: mask[new_row[new_there]] for name, mask in changes.unchanged.items()},
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
        LostTrack: a message contradicts the stored rows and the earlier messages.
    """
    in_want = (changes.kind != INSERT) & ~changes.whole
    if not in_want.any():
        return _by_themselves(changes)
    if not key:
        raise DefiniteError(
            f'change of table "{table}" came without the old row',
            detail="The table has neither a primary key nor REPLICA IDENTITY FULL.",
            hint=f"Run on the source: ALTER TABLE {table} REPLICA IDENTITY FULL; then resync it.",
        )
    for name in key:
        if pa.types.is_nested(changes.new.schema.field(name).type):
            raise DefiniteError(
                f'change of table "{table}" names the old row by "{name}", which is an array',
                detail="Rows are not looked up by arrays.",
                hint=f'Name "{name}" among the columns to keep as text, under another source; or '
                f"run on the source: ALTER TABLE {table} REPLICA IDENTITY FULL; then resync it.",
            )
    return _by_key(changes, key, lookup, table=table)


def _by_themselves(changes: Changes) -> Resolved:
    """Resolve changes whose messages contain all old rows."""
    new = changes.new
    for name, left_out in changes.unchanged.items():
        if left_out.any():
            old_of_new = _scattered(changes.new_row, changes.old_row, new.num_rows)
            source = pa.concat_arrays([_plain(new.column(name)), _plain(changes.old.column(name))])
            chosen = np.where(left_out, new.num_rows + old_of_new, np.arange(new.num_rows))
            new = _replaced(new, name, source.take(pa.array(chosen)))
    return Resolved(_taken(changes.old, changes.old_row[changes.old_row != NONE]), new)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Origin of the old row of each message that removes a row."""

    before: Indices
    """Per message: the message that inserted the row it removes, or -1."""

    stored: Indices
    """Per message: the number of the stored row it removes, or -1."""

    wanted: pa.Table
    """Keys of the stored rows, in the order of their numbers."""


def _by_key(changes: Changes, key: Sequence[str], lookup: Lookup, *, table: str) -> Resolved:
    changes = _with_key_from_old(changes, key)
    chain = _chain(changes, key, table=table)
    stored = _stored_rows(chain.wanted, key, lookup, changes.new.schema, table=table)
    takes = changes.kind != INSERT
    brought_by = chain.before[takes & (chain.before != NONE)]
    new = _filled(changes, chain, stored)
    stays = np.ones(new.num_rows, np.bool_)
    stays[changes.new_row[brought_by]] = False
    # Old rows that only their own message contains.
    told = changes.whole & (chain.before == NONE) & (chain.stored == NONE)
    deletes = pa.concat_tables([stored, _taken(changes.old, changes.old_row[told])])
    return Resolved(deletes, new.filter(pa.array(stays)))


def _with_key_from_old(changes: Changes, key: Sequence[str]) -> Changes:
    """Fill omitted key values from the old tuple: an omitted value did not change."""
    new, unchanged = changes.new, dict(changes.unchanged)
    for name in key:
        left_out = unchanged.pop(name, None)
        if left_out is None or not left_out.any():
            continue
        old_of_new = _scattered(changes.new_row, changes.old_row, new.num_rows)
        source = pa.concat_arrays([_plain(new.column(name)), _plain(changes.old.column(name))])
        chosen = np.where(left_out, new.num_rows + old_of_new, np.arange(new.num_rows))
        new = _replaced(new, name, source.take(pa.array(chosen)))
    return Changes(
        changes.kind,
        changes.old,
        changes.old_row,
        changes.whole,
        new,
        changes.new_row,
        unchanged,
    )


def _chain(changes: Changes, key: Sequence[str], *, table: str) -> _Chain:
    messages = np.arange(len(changes))
    takers = messages[changes.kind != INSERT]
    givers = messages[changes.kind != DELETE]
    named = changes.old_row[takers] != NONE
    keys = pa.concat_tables(
        [
            _taken(changes.old.select(key), changes.old_row[takers[named]]),
            _taken(changes.new.select(key), changes.new_row[takers[~named]]),
            _taken(changes.new.select(key), changes.new_row[givers]),
        ]
    )
    message = np.concatenate([takers[named], takers[~named], givers])
    gives = np.concatenate([np.zeros(len(takers), np.bool_), np.ones(len(givers), np.bool_)])
    group = _groups(keys)
    # Sort by key, then by stream order. A message removes a row before it inserts one.
    order = np.lexsort((message * 2 + gives, group))
    group, message, gives = group[order], message[order], gives[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = group[1:] != group[:-1]
    gave_before = np.zeros(len(order), np.bool_)
    gave_before[1:] = gives[:-1]
    broken = ~first & (gave_before == gives)
    if broken.any():
        at = int(np.flatnonzero(broken)[0])
        raise LostTrack(
            table=table,
            key=_shown(keys, int(order[at])),
            what="it is there already" if gives[at] else "it is gone already",
        )
    before = np.full(len(changes), NONE, np.int64)
    follows = ~gives & ~first
    before[message[follows]] = message[np.flatnonzero(follows) - 1]
    opens = ~gives & first & ~changes.whole[message]
    stored = np.full(len(changes), NONE, np.int64)
    stored[message[opens]] = np.arange(int(opens.sum()))
    return _Chain(before, stored, _taken(keys, order[opens]))


def _stored_rows(
    wanted: pa.Table, key: Sequence[str], lookup: Lookup, schema: pa.Schema, *, table: str
) -> pa.Table:
    """Return the stored rows of the keys in `wanted`, in the same order."""
    if wanted.num_rows == 0:
        return schema.empty_table()
    found = lookup(wanted).select(schema.names)
    group = _groups(pa.concat_tables([wanted, found.select(key).cast(wanted.schema)]))
    asked, given = group[: wanted.num_rows], group[wanted.num_rows :]
    row_of = np.full(int(group.max()) + 1, NONE, np.int64)
    row_of[given] = np.arange(found.num_rows)
    rows = row_of[asked]
    if (rows == NONE).any():
        at = int(np.flatnonzero(rows == NONE)[0])
        raise LostTrack(table=table, key=_shown(wanted, at), what="no row of that key is stored")
    if found.num_rows != wanted.num_rows:
        counts = np.bincount(given)
        at = int(np.flatnonzero(counts[asked] != 1)[0])
        raise LostTrack(table=table, key=_shown(wanted, at), what="several such rows are stored")
    return _taken(found, rows).cast(schema)


def _filled(changes: Changes, chain: _Chain, stored: pa.Table) -> pa.Table:
    """Return the new rows, with omitted values filled from the rows they replace."""
    new, count = changes.new, changes.new.num_rows
    # Numbering of all candidate rows: new rows, then old tuples, then stored rows.
    told_at, stored_at = count, count + changes.old.num_rows
    replaced = np.full(len(changes), NONE, np.int64)
    chained, looked_up = chain.before != NONE, chain.stored != NONE
    replaced[chained] = changes.new_row[chain.before[chained]]
    replaced[looked_up] = stored_at + chain.stored[looked_up]
    replaced[changes.whole] = told_at + changes.old_row[changes.whole]
    replaced_by_new = _scattered(changes.new_row, replaced, count)
    for name, left_out in changes.unchanged.items():
        if not left_out.any():
            continue
        final = np.concatenate(
            [~left_out, np.ones(stored_at - told_at + stored.num_rows, np.bool_)]
        )
        source = np.where(left_out, replaced_by_new, np.arange(count))
        while not final[source].all():
            # Each iteration doubles the number of earlier messages that are followed.
            source = np.where(final[source], source, source[np.minimum(source, count - 1)])
        values = pa.concat_arrays(
            [
                _plain(new.column(name)),
                _plain(changes.old.column(name)),
                _plain(stored.column(name)),
            ]
        )
        new = _replaced(new, name, values.take(pa.array(source)))
    return new


def _groups(keys: pa.Table) -> Indices:
    """Return a number per row that is equal for equal keys. Null equals null."""
    numbers = np.zeros(keys.num_rows, np.int64)
    for column in keys.columns:
        codes = pc.dictionary_encode(_plain(column), null_encoding="encode")
        codes_of = codes.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        mixed = numbers * (len(codes.dictionary) + 1) + codes_of
        _, numbers = np.unique(mixed, return_inverse=True)
    return numbers.astype(np.int64)


def _scattered(at: Indices, values: Indices, size: int) -> Indices:
    """Return the `values` of messages, indexed by the row `at` of their new tuple."""
    rows = np.full(size, NONE, np.int64)
    there = at != NONE
    rows[at[there]] = values[there]
    return rows


def _taken(table: pa.Table, rows: Indices) -> pa.Table:
    return table.take(pa.array(rows, pa.int64()))


def _replaced(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(at), column)


def _plain(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        return (
            pa.concat_arrays(combined.chunks) if combined.num_chunks else pa.array([], column.type)
        )
    return combined


def _shown(keys: pa.Table, row: int) -> str:
    return ", ".join(
        f"{name} = {keys.column(name)[row].as_py()!r:.80}" for name in keys.column_names
    )
