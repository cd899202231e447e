"""Combination and reduction of documents of many keys, over Arrow.

Input rows are in source order, or have columns to sort by. Output rows are sorted by key.
Combining is associative: combined rows are valid input again, before the rows that follow
them. A caller bounds its memory by writing combined rows to disk, or with `Combiner.compact`.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import UsageError
from penstock.reduce.document import ABSENT, decode, encode
from penstock.reduce.reducer import Reducer

__all__ = ["COMBINED", "REDUCED", "Combiner", "combine_rows", "reduce_rows"]

COMBINED: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("document", pa.large_binary(), nullable=False),
    ]
)
"""A packed key and a JSON document; a key has several rows if they cannot be combined."""

REDUCED: Final = COMBINED.append(pa.field("exists", pa.bool_(), nullable=False)).append(
    pa.field("deleted", pa.bool_(), nullable=False)
)
"""One row per key. `exists` is true if a document was loaded for the key."""

_STEP_ROWS: Final = 4096
_STEP_BYTES: Final = 8 << 20

_Row = tuple[Any, ...]


def combine_rows(
    reducer: Reducer, rows: pa.Table, *, order: Sequence[str] = ()
) -> Iterator[pa.RecordBatch]:
    """Combine the rows of each key into as few rows as possible; yield batches of `COMBINED`.

    Args:
        reducer: Reducer of the collection.
        rows: `key`, `document` and the columns of `order`.
        order: Columns that define the source order of a key; if empty, the row order does.
    """
    return _batches(_combined(reducer, _sorted(rows, None, order)), COMBINED)


def reduce_rows(
    reducer: Reducer,
    rows: pa.Table,
    *,
    loaded: pa.Table | None = None,
    order: Sequence[str] = (),
    keep_deleted: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Reduce the rows of each key into its loaded document; yield batches of `REDUCED`.

    Omits loaded keys without rows, and deletions of keys that were not loaded.

    Args:
        reducer: Reducer of the collection.
        rows: `key`, `document` and the columns of `order`.
        loaded: `key` and `document` of the stored documents.
        order: Columns that define the source order of a key; if empty, the row order does.
        keep_deleted: See `Reducer.reduce`.
    """
    return _batches(
        _reduced(reducer, _sorted(rows, loaded, order), keep_deleted=keep_deleted), REDUCED
    )


class Combiner:
    """Buffer of rows that can be compacted between additions."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._held: list[pa.Table] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffered rows."""
        return sum(table.nbytes for table in self._held)

    def add(self, rows: pa.Table) -> None:
        """Append rows of `COMBINED`, which follow all previous rows in source order."""
        self._held.append(_conform(rows))

    def compact(self) -> pa.Table:
        """Replace the buffered rows by their combination, and return it."""
        rows = pa.Table.from_batches(combine_rows(self._reducer, self._rows()), COMBINED)
        self._held = [rows]
        return rows

    def combined(self) -> Iterator[pa.RecordBatch]:
        """Return the combination of the buffered rows."""
        return combine_rows(self._reducer, self._rows())

    def reduced(
        self, loaded: pa.Table | None = None, *, keep_deleted: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Reduce the buffered rows into the loaded documents."""
        return reduce_rows(self._reducer, self._rows(), loaded=loaded, keep_deleted=keep_deleted)

    def _rows(self) -> pa.Table:
        return pa.concat_tables([COMBINED.empty_table(), *self._held])


def _combined(reducer: Reducer, rows: Iterator[_Row]) -> Iterator[_Row]:
    what = reducer.what
    for key, group in groupby(rows, key=itemgetter(0)):
        texts = [text for _, _, text in group]
        documents = [decode(text, what=what) for text in texts]
        # Reuse the input text of documents that were not combined.
        text_of = {id(document): text for document, text in zip(documents, texts, strict=True)}
        for document in reducer.combine(documents):
            yield key, text_of.get(id(document)) or encode(document)


def _reduced(reducer: Reducer, rows: Iterator[_Row], *, keep_deleted: bool) -> Iterator[_Row]:
    what = reducer.what
    for key, group in groupby(rows, key=itemgetter(0)):
        first, *others = ((front, decode(text, what=what)) for _, front, text in group)
        exists = first[0] == _LOADED
        if others and others[0][0] == _LOADED:
            raise UsageError(
                f"{what} has two stored documents for one key",
                hint="Load every key once.",
            )
        documents = [document for _, document in (others if exists else [first, *others])]
        if documents:
            left = first[1] if exists else ABSENT
            reduced = reducer.reduce(documents, left=left, keep_deleted=keep_deleted)
            if exists or not reduced.deleted:
                yield key, encode(reduced.document), exists, reduced.deleted


_LOADED: Final = 0
_ADDED: Final = 1


def _sorted(rows: pa.Table, loaded: pa.Table | None, order: Sequence[str]) -> Iterator[_Row]:
    """Yield key, front and document of each row, by key, with the loaded document first."""
    parts = [_conform(rows).append_column("front", _all(_ADDED, rows))]
    for i, name in enumerate(order):
        parts[0] = parts[0].append_column(f"order{i}", rows.column(name))
    if loaded is not None:
        stored = _conform(loaded).append_column("front", _all(_LOADED, loaded))
        parts.insert(0, stored)
    table = pa.concat_tables(parts, promote_options="default")
    by = [(name, "ascending") for name in table.column_names if name != "document"]
    indices = pc.sort_indices(table.drop_columns("document"), sort_keys=by)
    table = table.select(["key", "front", "document"]).take(indices)
    for batch in table.to_batches(max_chunksize=_STEP_ROWS):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _all(value: int, rows: pa.Table) -> pa.Array:
    return pa.repeat(pa.scalar(value, pa.int8()), rows.num_rows)


def _conform(rows: pa.Table) -> pa.Table:
    columns = [rows.column(field.name).cast(field.type) for field in COMBINED]
    if any(column.null_count for column in columns):
        raise UsageError(
            "rows to be combined have a null for a key or a document",
            hint="To delete a key, write a document that the schema marks with delete.",
        )
    return pa.table(columns, schema=COMBINED)


def _batches(rows: Iterator[_Row], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    held: list[_Row] = []
    size = 0
    for row in rows:
        held.append(row)
        size += len(row[0]) + len(row[1])
        if len(held) >= _STEP_ROWS or size >= _STEP_BYTES:
            yield _batch(held, schema)
            held, size = [], 0
    if held:
        yield _batch(held, schema)


def _batch(rows: list[_Row], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.record_batch(arrays, schema=schema)
