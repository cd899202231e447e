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
from penstock.materialize.binding import COUNT, ROW, BindingPlan, Documents, Rows
from penstock.materialize.extracting import packed_at
from penstock.materialize.intervals import Changes, Contents, Interval, Rewrite
from penstock.materialize.netting import net
from penstock.materialize.rows import documents, field_columns
from penstock.persist.errors import CollectionErrored
from penstock.persist.merge.ranges import bounds, cut
from penstock.persist.scan.plan import SnapshotScan, scan_changes, scan_snapshot
from penstock.persist.scan.task import read_parts
from penstock.persist.state import CollectionState, stored_columns_of
from penstock.reduce import COMBINED

__all__ = [
    "as_documents",
    "check_only_added",
    "memory_of",
    "ordered_by",
    "read_here",
    "streams",
    "whole_keys",
]

ORDER: Final = "order"


def memory_of(collection: CollectionState, interval: Interval) -> int:
    """Return an estimate of the most bytes that an interval takes as Arrow."""
    match interval:
        case Changes(lower, upper):
            return sum(
                batch.memory
                for batch in collection.batches
                if batch.lower < upper and batch.upper > lower
            )
        case Contents(as_of) | Rewrite(_, as_of):
            return sum(batch.memory for batch in collection.batches if batch.lower <= as_of)


def streams(plan: BindingPlan, interval: Interval, most_bytes: int) -> bool:
    """Return whether this process can read an interval part by part.

    In addition to one part, less than `most_bytes` must be in memory.
    """
    scan = _sorted_contents(plan, interval)
    if scan is None or scan.delta_memory >= most_bytes:
        return False
    if isinstance(interval, Rewrite) and interval.before is not None:
        return memory_of(plan.collection, _since(interval)) < most_bytes
    return True


def read_here(plan: BindingPlan, interval: Interval) -> Iterable[pa.Table]:
    """Return all updates or all documents of an interval, in order, read in this process."""
    scan = _sorted_contents(plan, interval)
    if scan is not None:
        return _parts(plan, interval, scan)
    return [_read_at_once(plan, interval)]


def _sorted_contents(plan: BindingPlan, interval: Interval) -> SnapshotScan | None:
    """Return a scan of contents whose base is in key order; None if they cannot be streamed."""
    if isinstance(interval, Changes) or not isinstance(plan.shape, Rows):
        return None
    scan = scan_snapshot(plan.collection, interval.as_of)
    if isinstance(interval, Rewrite) and interval.before is not None:
        try:
            since = _since(interval)
            scan_changes(plan.collection, since.lower, since.upper)
        except CollectionErrored:
            return None
    names = stored_columns_of(scan.schema)
    plain = not any(pa.types.is_nested(names.field(each).type) for each in plan.shape.key)
    return scan if scan.base and plan.shape.key == scan.schema.key and plain else None


def _since(interval: Rewrite) -> Changes:
    """Return the interval of the changes since the resource was written."""
    assert interval.before is not None
    return Changes(interval.before + 1, interval.as_of + 1)


def _parts(plan: BindingPlan, interval: Interval, scan: SnapshotScan) -> Iterator[pa.Table]:
    collection, key = plan.collection, scan.key
    read = partial(read_parts, plan.url, collection, schema=scan.schema)
    rest = pa.concat_tables([stored_columns_of(scan.schema).empty_table(), *read(scan.deltas)])
    part: pa.Table | None = None
    for following in read(scan.base):
        if not following.num_rows:
            continue
        if part is not None:
            mine, rest = cut(rest, bounds(following.slice(0, 1), key), key)
            yield advance(pa.concat_tables([part, mine]), scan.as_of)
        part = following
    last = [rest] if part is None else [part, rest]
    yield advance(pa.concat_tables(last), scan.as_of)
    if isinstance(interval, Rewrite) and interval.before is not None:
        # Only the changes contain the keys that were deleted since the resource was written.
        since = _since(interval)
        changes = _changes(plan.url, collection, since.lower, since.upper)
        changed = net(changes, key, collection=collection.name)
        gone = changed.rows.filter(changed.deletes)
        ones = pa.array(np.full(len(gone), -1))
        times = pa.array(np.full(len(gone), scan.as_of))
        yield gone.append_column(TIME, times).append_column(DIFF, ones)


def _read_at_once(plan: BindingPlan, interval: Interval) -> pa.Table:
    updates = _updates(plan, interval)
    match plan.shape:
        case Rows():
            return updates
        case Documents() as shape:
            if shape.counted and updates.num_rows:
                updates = consolidate(advance(updates, pc.max(updates.column(TIME)).as_py()))
            found = as_documents(updates, shape, collection=plan.bound.name)
            by = [(name, "ascending", "at_start") for name in ordered_by(shape)]
            found = found.take(pc.sort_indices(found, by))
            return found.select(COMBINED.names)


def as_documents(updates: pa.Table, shape: Documents, *, collection: str) -> pa.Table:
    """Return updates as documents: the columns of `COMBINED`, then the order columns.

    Counted rows carry their diff as `COUNT`.

    Raises:
        DefiniteError: a row has no document, or a document was deleted.
    """
    diffs = updates.column(DIFF).to_numpy()
    rows = updates.drop_columns([TIME, DIFF])
    if shape.counted:
        rows = _counted(rows, diffs)
        keys, texts = pack(field_columns(rows, [ROW])), documents(rows)
    else:
        check_only_added(diffs, collection=collection)
        rows = rows.take(pa.array(np.repeat(np.arange(len(diffs)), diffs)))
        texts = _texts(rows, shape, collection)
        if shape.document is None:
            columns = [each[1:].replace("~1", "/").replace("~0", "~") for each in shape.key]
            keys = pack(field_columns(rows, columns))
        else:
            what = f'document of collection "{collection}"'
            keys = packed_at(texts, shape.key, defaults=shape.defaults, what=what)
    found = pa.table([keys, texts], names=COMBINED.names)
    for at, name in enumerate(shape.order):
        found = found.append_column(f"{ORDER}{at}", rows.column(name))
    return found


def check_only_added(
    diffs: "np.ndarray[tuple[int], np.dtype[np.int64]]", *, collection: str
) -> None:
    """Raise DefiniteError if a reduced collection has a deleted row."""
    if (diffs < 0).any():
        raise DefiniteError(
            f'collection "{collection}" is reduced, and has rows that were taken away',
            detail="What was reduced into a document cannot be taken out of it.",
            hint="Take its schema out of collections:, so that its rows are those of a table.",
        )


def ordered_by(shape: Documents) -> list[str]:
    """Return the sort columns of documents: key, order columns, then the text of the document."""
    return ["key", *(f"{ORDER}{at}" for at in range(len(shape.order))), "document"]


def whole_keys(tables: Iterable[pa.Table], key: tuple[str, ...]) -> Iterator[pa.Table]:
    """Yield sorted updates as tables that contain all updates of each of their keys."""
    kept: pa.Table | None = None
    for each in tables:
        table = each if kept is None else pa.concat_tables([kept, each])
        if not table.num_rows:
            continue
        packed = pack(field_columns(table, key))
        differs = pc.not_equal(packed[1:], packed[:-1]).to_numpy(zero_copy_only=False)
        starts = np.flatnonzero(differs)
        last = int(starts[-1]) + 1 if len(starts) else 0
        if last:
            yield table.slice(0, last)
        kept = table.slice(last)
    if kept is not None:
        yield kept


def _updates(plan: BindingPlan, interval: Interval) -> pa.Table:
    url, collection = plan.url, plan.collection
    match interval:
        case Changes(lower, upper):
            return _changes(url, collection, lower, upper)
        case Contents(as_of) | Rewrite(None, as_of):
            return _contents(url, collection, as_of)
        case Rewrite(before, as_of):
            now = consolidate(_contents(url, collection, as_of))
            if not isinstance(plan.shape, Rows) or before is None:
                # Reduced documents are never deleted, and counted rows are truncated first.
                return now
            # Only the previous contents contain the keys that were deleted since.
            was = consolidate(_contents(url, collection, before))
            keys = [_keys(each, plan.shape.key) for each in (was, now)]
            gone = was.filter(pc.invert(pc.is_in(keys[0], keys[1])))
            return pa.concat_tables([now, negate(_like(advance(gone, as_of), now.schema))])


def _keys(rows: pa.Table, key: tuple[str, ...]) -> pa.Array:
    return pack(field_columns(rows, key)) if rows.num_rows else pa.array([], pa.binary())


def _like(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows of an older schema in `schema`; columns that they do not have are null."""
    columns = [
        rows.column(field.name).cast(field.type)
        if field.name in rows.column_names
        else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _texts(rows: pa.Table, shape: Documents, collection: str) -> pa.Array:
    if shape.document is None:
        return documents(rows)
    texts = rows.column(shape.document).combine_chunks()
    if texts.null_count:
        raise DefiniteError(
            f'column "{shape.document}" of collection "{collection}" has no document in some rows',
            hint="Correct them at their source: a deletion is a document too.",
        )
    return texts.cast(pa.large_binary())


def _counted(rows: pa.Table, diffs: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> pa.Table:
    """Return rows with the key column `ROW` and with their diffs as `COUNT`."""
    packed = pack(field_columns(rows, rows.column_names)) if rows.num_rows else []
    names = [hashlib.blake2b(each.as_py(), digest_size=16).hexdigest() for each in packed]
    row = pa.field(ROW, pa.string(), nullable=False)
    return rows.add_column(0, row, pa.array(names, pa.string())).append_column(
        pa.field(COUNT, pa.int64(), nullable=False), pa.array(diffs)
    )


def _changes(url: str, collection: CollectionState, lower: int, upper: int) -> pa.Table:
    scan = scan_changes(collection, lower, upper)
    found = read_parts(url, collection, scan.part_scans, scan.schema)
    return pa.concat_tables([stored_columns_of(scan.schema).empty_table(), *found])


def _contents(url: str, collection: CollectionState, as_of: int) -> pa.Table:
    scan = scan_snapshot(collection, as_of)
    found = read_parts(url, collection, (*scan.base, *scan.deltas), scan.schema)
    rows = pa.concat_tables([stored_columns_of(scan.schema).empty_table(), *found])
    return advance(rows, as_of)
