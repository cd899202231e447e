"""Documents of many keys, folded over Arrow.

Rows come in source order, or with columns to be ordered by, and leave in the order of
their keys. Because combining is associative, memory is bounded by whoever calls: rows
that were combined are rows again, and can be put aside and added back before those that
came after them. `Combiner.compact` does so in place.
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
"""A packed key, and a document as JSON. A key has several rows if they must stay apart."""

REDUCED: Final = COMBINED.append(pa.field("exists", pa.bool_(), nullable=False)).append(
    pa.field("deleted", pa.bool_(), nullable=False)
)
"""Each key once; `exists` if a document was loaded for it."""

_STEP_ROWS: Final = 4096
_STEP_BYTES: Final = 8 << 20

_Row = tuple[Any, ...]


def combine_rows(
    reducer: Reducer, rows: pa.Table, *, order: Sequence[str] = ()
) -> Iterator[pa.RecordBatch]:
    """`rows` combined: batches of `COMBINED`.

    Args:
        reducer: of their collection.
        rows: `key`, `document`, and the columns of `order`.
        order: what to sort the rows of a key by; without, they are in source order.
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
    """`rows` reduced into what was `loaded`: batches of `REDUCED`.

    A key that was loaded and has no rows is left out; so is one that was not, and is deleted.

    Args:
        reducer: of their collection.
        rows: `key`, `document`, and the columns of `order`.
        loaded: `key` and `document` of those that are stored.
        order: what to sort the rows of a key by; without, they are in source order.
        keep_deleted: see `Reducer.reduce`.
    """
    return _batches(
        _reduced(reducer, _sorted(rows, loaded, order), keep_deleted=keep_deleted), REDUCED
    )


class Combiner:
    """Rows that are still coming, folded into fewer from time to time."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._held: list[pa.Table] = []

    @property
    def held_bytes(self) -> int:
        """How much it holds; `compact` may make it less."""
        return sum(table.nbytes for table in self._held)

    def add(self, rows: pa.Table) -> None:
        """Take rows of `COMBINED`, in source order and after those before."""
        self._held.append(_plain(rows))

    def compact(self) -> pa.Table:
        """Combine what it holds; it goes on with that, which is returned."""
        rows = pa.Table.from_batches(combine_rows(self._reducer, self._rows()), COMBINED)
        self._held = [rows]
        return rows

    def combined(self) -> Iterator[pa.RecordBatch]:
        """What it holds, combined."""
        return combine_rows(self._reducer, self._rows())

    def reduced(
        self, loaded: pa.Table | None = None, *, keep_deleted: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """What it holds, reduced into what was loaded."""
        return reduce_rows(self._reducer, self._rows(), loaded=loaded, keep_deleted=keep_deleted)

    def _rows(self) -> pa.Table:
        return pa.concat_tables([COMBINED.empty_table(), *self._held])


def _combined(reducer: Reducer, rows: Iterator[_Row]) -> Iterator[_Row]:
    what = reducer.what
    for key, group in groupby(rows, key=itemgetter(0)):
        texts = [text for _, _, text in group]
        documents = [decode(text, what=what) for text in texts]
        # What came as it is leaves as it is.
        came = {id(document): text for document, text in zip(documents, texts, strict=True)}
        for document in reducer.combine(documents):
            yield key, came.get(id(document)) or encode(document)


def _reduced(reducer: Reducer, rows: Iterator[_Row], *, keep_deleted: bool) -> Iterator[_Row]:
    what = reducer.what
    for key, group in groupby(rows, key=itemgetter(0)):
        first, *rest = ((front, decode(text, what=what)) for _, front, text in group)
        exists = first[0] == _LOADED
        if rest and rest[0][0] == _LOADED:
            raise UsageError(
                f"{what} has two stored documents for one key",
                hint="Load every key once.",
            )
        documents = [document for _, document in (rest if exists else [first, *rest])]
        if documents:
            left = first[1] if exists else ABSENT
            done = reducer.reduce(documents, left=left, keep_deleted=keep_deleted)
            if exists or not done.deleted:
                yield key, encode(done.document), exists, done.deleted


_LOADED: Final = 0
_ADDED: Final = 1


def _sorted(rows: pa.Table, loaded: pa.Table | None, order: Sequence[str]) -> Iterator[_Row]:
    """Key, front and document of each row, those of a key together, what was loaded first."""
    parts = [_plain(rows).append_column("front", _all(_ADDED, rows))]
    for i, name in enumerate(order):
        parts[0] = parts[0].append_column(f"order{i}", rows.column(name))
    if loaded is not None:
        stored = _plain(loaded).append_column("front", _all(_LOADED, loaded))
        parts.insert(0, stored)
    table = pa.concat_tables(parts, promote_options="default")
    by = [(name, "ascending") for name in table.column_names if name != "document"]
    indices = pc.sort_indices(table.drop_columns("document"), sort_keys=by)
    table = table.select(["key", "front", "document"]).take(indices)
    for batch in table.to_batches(max_chunksize=_STEP_ROWS):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _all(value: int, rows: pa.Table) -> pa.Array:
    return pa.repeat(pa.scalar(value, pa.int8()), rows.num_rows)


def _plain(rows: pa.Table) -> pa.Table:
    columns = [rows.column(field.name).cast(field.type) for field in COMBINED]
    if any(column.null_count for column in columns):
        raise UsageError(
            "rows to be combined have a null for a key or a document",
            hint="A deletion is a document too: one that the schema marks with delete.",
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
