"""Reader of the updates that a transaction applies to a resource.

The updates are tables in key order. A table of rows contains all updates of each of its keys, so
one table determines the last row of a key. Documents are in the order of their reduction.

A small interval is read in this process, as one table. Spark reads and sorts a large interval,
and returns a stream of batches. There is one exception: if a merge has left the contents of a
table sorted, this process reads them part by part, at any size:

    base      part ─► part ─► part …         one table for each part
    deltas    cut at the start of the next part, and added to their part
"""

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME, advance, consolidate, negate
from penstock.data.packed import pack
from penstock.errors import DefiniteError
from penstock.materialize.binding_kind import COUNT, ROW, BindingPlan, DocumentsKind, RowsKind
from penstock.materialize.document_fields import pack_fields
from penstock.materialize.intervals import (
    ChangesInterval,
    ContentsInterval,
    Interval,
    RewriteInterval,
)
from penstock.materialize.last_row_per_key import select_last_rows
from penstock.materialize.row_encoder import encode_documents, encode_fields
from penstock.persist.errors import CollectionErrored
from penstock.persist.merge.ranges import bounds, cut
from penstock.persist.scan.plan import SnapshotScan, scan_changes, scan_snapshot
from penstock.persist.scan.task import read_parts
from penstock.persist.state import CollectionState, stored_columns_of
from penstock.reduce import COMBINED

__all__ = [
    "can_stream",
    "check_no_deletes",
    "estimate_bytes",
    "read_locally",
    "sort_columns",
    "split_at_keys",
    "updates_to_documents",
]

ORDER: Final = "order"


def estimate_bytes(collection: CollectionState, interval: Interval) -> int:
    """Return an estimate of the most bytes that an interval takes as Arrow."""
    match interval:
        case ChangesInterval(lower, upper):
            return sum(
                batch.memory
                for batch in collection.batches
                if batch.lower < upper and batch.upper > lower
            )
        case ContentsInterval(as_of) | RewriteInterval(_, as_of):
            return sum(batch.memory for batch in collection.batches if batch.lower <= as_of)


def can_stream(plan: BindingPlan, interval: Interval, most_bytes: int) -> bool:
    """Return whether this process can read an interval part by part.

    In addition to one part, less than `most_bytes` must be in memory.
    """
    scan = _sorted_contents(plan, interval)
    if scan is None or scan.delta_memory >= most_bytes:
        return False
    if isinstance(interval, RewriteInterval) and interval.before is not None:
        return estimate_bytes(plan.collection, _since(interval)) < most_bytes
    return True


def read_locally(plan: BindingPlan, interval: Interval) -> Iterable[pa.Table]:
    """Return all updates or all documents of an interval, in order, read in this process."""
    scan = _sorted_contents(plan, interval)
    if scan is not None:
        return _parts(plan, interval, scan)
    return [_read_at_once(plan, interval)]


def _sorted_contents(plan: BindingPlan, interval: Interval) -> SnapshotScan | None:
    """Return a scan of contents whose base is in key order; None if they cannot be streamed."""
    if isinstance(interval, ChangesInterval) or not isinstance(plan.kind, RowsKind):
        return None
    scan = scan_snapshot(plan.collection, interval.as_of)
    if isinstance(interval, RewriteInterval) and interval.before is not None:
        try:
            since = _since(interval)
            scan_changes(plan.collection, since.lower, since.upper)
        except CollectionErrored:
            return None
    names = stored_columns_of(scan.schema)
    plain = not any(pa.types.is_nested(names.field(column).type) for column in plan.kind.key)
    return scan if scan.base and plan.kind.key == scan.schema.key and plain else None


def _since(interval: RewriteInterval) -> ChangesInterval:
    """Return the interval of the changes since the resource was written."""
    assert interval.before is not None
    return ChangesInterval(interval.before + 1, interval.as_of + 1)


def _parts(plan: BindingPlan, interval: Interval, scan: SnapshotScan) -> Iterator[pa.Table]:
    collection, key = plan.collection, scan.key
    read = partial(read_parts, plan.url, collection, schema=scan.schema)
    deltas = pa.concat_tables([stored_columns_of(scan.schema).empty_table(), *read(scan.deltas)])
    part: pa.Table | None = None
    for following in read(scan.base):
        if not following.num_rows:
            continue
        if part is not None:
            mine, deltas = cut(deltas, bounds(following.slice(0, 1), key), key)
            yield advance(pa.concat_tables([part, mine]), scan.as_of)
        part = following
    last = [deltas] if part is None else [part, deltas]
    yield advance(pa.concat_tables(last), scan.as_of)
    if isinstance(interval, RewriteInterval) and interval.before is not None:
        # Only the changes contain the keys that were deleted since the resource was written.
        since = _since(interval)
        changes = _changes(plan.url, collection, since.lower, since.upper)
        changed = select_last_rows(changes, key, collection=collection.name)
        deleted = changed.rows.filter(changed.deletes)
        ones = pa.array(np.full(len(deleted), -1))
        times = pa.array(np.full(len(deleted), scan.as_of))
        yield deleted.append_column(TIME, times).append_column(DIFF, ones)


def _read_at_once(plan: BindingPlan, interval: Interval) -> pa.Table:
    updates = _updates(plan, interval)
    match plan.kind:
        case RowsKind():
            return updates
        case DocumentsKind() as kind:
            if kind.counted and updates.num_rows:
                updates = consolidate(advance(updates, pc.max(updates.column(TIME)).as_py()))
            documents = updates_to_documents(updates, kind, collection=plan.bound.name)
            by = [(name, "ascending", "at_start") for name in sort_columns(kind)]
            documents = documents.take(pc.sort_indices(documents, by))
            return documents.select(COMBINED.names)


def updates_to_documents(updates: pa.Table, kind: DocumentsKind, *, collection: str) -> pa.Table:
    """Return updates as documents: the columns of `COMBINED`, then the order columns.

    Counted rows carry their diff as `COUNT`.

    Raises:
        DefiniteError: a row has no document, or a document was deleted.
    """
    diffs = updates.column(DIFF).to_numpy()
    rows = updates.drop_columns([TIME, DIFF])
    if kind.counted:
        rows = _counted(rows, diffs)
        keys, texts = pack(encode_fields(rows, [ROW])), encode_documents(rows)
    else:
        check_no_deletes(diffs, collection=collection)
        rows = rows.take(pa.array(np.repeat(np.arange(len(diffs)), diffs)))
        texts = _texts(rows, kind, collection)
        if kind.document is None:
            columns = [pointer[1:].replace("~1", "/").replace("~0", "~") for pointer in kind.key]
            keys = pack(encode_fields(rows, columns))
        else:
            what = f'document of collection "{collection}"'
            keys = pack_fields(texts, kind.key, defaults=kind.defaults, what=what)
    documents = pa.table([keys, texts], names=COMBINED.names)
    for number, name in enumerate(kind.order):
        documents = documents.append_column(f"{ORDER}{number}", rows.column(name))
    return documents


def check_no_deletes(
    diffs: "np.ndarray[tuple[int], np.dtype[np.int64]]", *, collection: str
) -> None:
    """Raise DefiniteError if a reduced collection has a deleted row."""
    if (diffs < 0).any():
        raise DefiniteError(
            f'collection "{collection}" is reduced, and has deleted rows',
            detail="A document that was reduced into another cannot be removed from it.",
            hint="Remove its schema under collections: to materialize the rows of a table.",
        )


def sort_columns(kind: DocumentsKind) -> list[str]:
    """Return the sort columns of documents: key, order columns, then the text of the document."""
    return ["key", *(f"{ORDER}{number}" for number in range(len(kind.order))), "document"]


def split_at_keys(tables: Iterable[pa.Table], key: tuple[str, ...]) -> Iterator[pa.Table]:
    """Yield sorted updates as tables that contain all updates of each of their keys."""
    pending: pa.Table | None = None
    for sorted_table in tables:
        table = sorted_table if pending is None else pa.concat_tables([pending, sorted_table])
        if not table.num_rows:
            continue
        packed = pack(encode_fields(table, key))
        differs = pc.not_equal(packed[1:], packed[:-1]).to_numpy(zero_copy_only=False)
        starts = np.flatnonzero(differs)
        last = int(starts[-1]) + 1 if len(starts) else 0
        if last:
            yield table.slice(0, last)
        pending = table.slice(last)
    if pending is not None:
        yield pending


def _updates(plan: BindingPlan, interval: Interval) -> pa.Table:
    url, collection = plan.url, plan.collection
    match interval:
        case ChangesInterval(lower, upper):
            return _changes(url, collection, lower, upper)
        case ContentsInterval(as_of) | RewriteInterval(None, as_of):
            return _contents(url, collection, as_of)
        case RewriteInterval(before, as_of):
            now = consolidate(_contents(url, collection, as_of))
            if not isinstance(plan.kind, RowsKind) or before is None:
                # Reduced documents are never deleted, and counted rows are truncated first.
                return now
            # Only the previous contents contain the keys that were deleted since.
            was = consolidate(_contents(url, collection, before))
            keys = [_keys(rows, plan.kind.key) for rows in (was, now)]
            deleted = was.filter(pc.invert(pc.is_in(keys[0], keys[1])))
            return pa.concat_tables([now, negate(_like(advance(deleted, as_of), now.schema))])


def _keys(rows: pa.Table, key: tuple[str, ...]) -> pa.Array:
    return pack(encode_fields(rows, key)) if rows.num_rows else pa.array([], pa.binary())


def _like(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows of an older schema in `schema`; columns that they do not have are null."""
    columns = [
        rows.column(field.name).cast(field.type)
        if field.name in rows.column_names
        else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _texts(rows: pa.Table, kind: DocumentsKind, collection: str) -> pa.Array:
    if kind.document is None:
        return encode_documents(rows)
    texts = rows.column(kind.document).combine_chunks()
    if texts.null_count:
        raise DefiniteError(
            f'column "{kind.document}" of collection "{collection}" is null in some rows',
            hint="Correct the rows at their source: a delete is a document too.",
        )
    return texts.cast(pa.large_binary())


def _counted(rows: pa.Table, diffs: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> pa.Table:
    """Return rows with the key column `ROW` and with their diffs as `COUNT`."""
    packed = pack(encode_fields(rows, rows.column_names)) if rows.num_rows else []
    names = [
        hashlib.blake2b(packed_row.as_py(), digest_size=16).hexdigest() for packed_row in packed
    ]
    row = pa.field(ROW, pa.string(), nullable=False)
    return rows.add_column(0, row, pa.array(names, pa.string())).append_column(
        pa.field(COUNT, pa.int64(), nullable=False), pa.array(diffs)
    )


def _changes(url: str, collection: CollectionState, lower: int, upper: int) -> pa.Table:
    scan = scan_changes(collection, lower, upper)
    tables = read_parts(url, collection, scan.part_scans, scan.schema)
    return pa.concat_tables([stored_columns_of(scan.schema).empty_table(), *tables])


def _contents(url: str, collection: CollectionState, as_of: int) -> pa.Table:
    scan = scan_snapshot(collection, as_of)
    tables = read_parts(url, collection, (*scan.base, *scan.deltas), scan.schema)
    rows = pa.concat_tables([stored_columns_of(scan.schema).empty_table(), *tables])
    return advance(rows, as_of)
