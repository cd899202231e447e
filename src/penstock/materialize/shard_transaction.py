"""One transaction of one shard: read, load, reduce and store.

The checkpoint of the endpoint is known only when the stream is open. The intervals to read are
therefore determined in the shard, not by the planner of the transaction. Reading and storing are
separate steps: the next transaction is read and combined while the last one is committed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data.packed import key_hashes, pack, unpack_row
from penstock.errors import DefiniteError, InternalError, UsageError
from penstock.materialize.binding_kind import COUNT, BindingPlan, DocumentsKind, RowsKind
from penstock.materialize.connector_session import ConnectorSession
from penstock.materialize.document_fields import field_defaults, pack_fields
from penstock.materialize.intervals import ContentsInterval, Interval, RewriteInterval
from penstock.materialize.last_row_per_key import LastRows, select_last_rows
from penstock.materialize.row_encoder import encode_documents, encode_fields
from penstock.materialize.spill import SpillingCombiner
from penstock.protocol.key_range import WHOLE, KeyRange
from penstock.protocol.messages import Load, Loaded, Store
from penstock.protocol.specs import MaterializationBinding, MaterializationSpec

__all__ = ["IntervalReader", "StoredCount", "TransactionInput", "needs_truncation", "read_order"]

STORE_BYTES: Final = 1 << 20
"""Approximate size of one Store."""

LOAD_KEYS: Final = 1 << 14
"""Maximum number of keys in one Load."""

IntervalReader = Callable[[int, Interval], Iterable[pa.Table]]
"""Reader of the updates of a binding in an interval (see `interval_reader`).

The bindings are read in the order of `read_order`.
"""


@dataclass(frozen=True, slots=True)
class StoredCount:
    """Number and size of the stored documents, for the status."""

    documents: int = 0
    bytes: int = 0


def read_order(bindings: Sequence[BindingPlan]) -> list[int]:
    """Return the numbers of the bindings in read order.

    Bindings of documents are first, because no Load may follow the first Store.
    """
    return sorted(
        range(len(bindings)), key=lambda number: isinstance(bindings[number].kind, RowsKind)
    )


def needs_truncation(plan: BindingPlan, interval: Interval | None) -> bool:
    """Return whether a rewrite must truncate the resource, because its keys are unknown."""
    counted = isinstance(plan.kind, DocumentsKind) and plan.kind.counted
    return isinstance(interval, RewriteInterval) and (counted or interval.before is None)


class TransactionInput:
    """Input of one transaction, from the first read to the last Store.

    Documents are combined as they are read. Rows are read when they are stored, or earlier by
    `read_ahead`.
    """

    def __init__(
        self,
        spec: MaterializationSpec,
        bindings: Sequence[BindingPlan],
        intervals: Sequence[Interval | None],
        key_range: KeyRange,
        read: IntervalReader,
    ) -> None:
        self._spec = spec
        self._bindings = bindings
        self._intervals = intervals
        self._key_range = key_range
        self._read = read
        self._stack = ExitStack()
        self._combining: dict[int, SpillingCombiner] = {}
        self._rows: dict[int, list[pa.Table]] = {}
        self._requested: list[tuple[int, pa.BinaryArray]] = []

    def close(self) -> None:
        """Discard the input."""
        self._stack.close()

    def combine(self) -> Iterator[Load]:
        """Read and combine all documents, and yield the Loads of the stored documents they need."""
        for number in read_order(self._bindings):
            plan, interval = self._bindings[number], self._intervals[number]
            if interval is None or not isinstance(plan.kind, DocumentsKind):
                continue
            combining = self._stack.enter_context(SpillingCombiner(plan.kind.reducer))
            self._combining[number] = combining
            loads = not self._spec.bindings[number].delta_updates and not isinstance(
                interval, ContentsInterval | RewriteInterval
            )
            for table in self._read(number, interval):
                yield from _loads(number, combining.add(self._in_key_range(table)), loads=loads)
            yield from _loads(number, combining.finish(), loads=loads)

    def read_ahead(self) -> None:
        """Do all work that does not depend on the outcome of the last commit."""
        for load in self.combine():
            self._requested.append((load.binding, load.packed_keys))
        for number in read_order(self._bindings):
            interval = self._intervals[number]
            if interval is not None and number not in self._combining:
                self._rows[number] = list(self._read(number, interval))

    def requested_loads(self) -> Iterator[Load]:
        """Yield the Loads that `read_ahead` has collected."""
        for number, keys in self._requested:
            yield Load(number, keys)

    def loaded(self, response: Loaded) -> None:
        """Add documents that the connector has loaded."""
        combining = self._combining.get(response.binding)
        if combining is None:
            raise InternalError(
                f"connector loaded documents of binding {response.binding} without a request"
            )
        spec = self._spec.bindings[response.binding].collection
        keys = pack_fields(
            response.docs_json,
            spec.key_ptrs,
            defaults=field_defaults(spec),
            what="loaded document",
        )
        combining.loaded(keys, response.docs_json)

    def store(self, session: ConnectorSession) -> tuple[StoredCount, ...]:
        """Send the Stores of all bindings, and return the counts per binding."""
        counts = [StoredCount()] * len(self._bindings)
        for number in read_order(self._bindings):
            interval = self._intervals[number]
            if interval is None:
                continue
            stored = size = 0
            for request in self._requests(number, interval):
                session.store(request)
                stored += len(request.packed_keys)
                size += request.packed_values.nbytes + request.docs_json.nbytes
            counts[number] = StoredCount(stored, size)
        return tuple(counts)

    def _requests(self, number: int, interval: Interval) -> Iterator[Store]:
        plan, spec = self._bindings[number], self._spec.bindings[number]
        if isinstance(interval, RewriteInterval) and self._must_truncate(plan, spec, interval):
            yield Store.truncate(number)
        match plan.kind:
            case RowsKind(key):
                tables = self._rows.pop(number, None) or self._read(number, interval)
                for updates in tables:
                    rows = self._last_rows(plan, spec, updates, interval, key)
                    yield from _stores(number, spec, rows)
            case DocumentsKind() as kind:
                known = not isinstance(interval, RewriteInterval) or interval.before is None
                for stores in self._documents(
                    self._combining[number], plan, spec, kind, known=known
                ):
                    yield from stores.requests(number, delta=spec.delta_updates)

    def _must_truncate(
        self, plan: BindingPlan, spec: MaterializationBinding, interval: RewriteInterval
    ) -> bool:
        """Return whether the resource must be truncated first, because its keys are unknown.

        Reduced documents need no truncation: their keys are never removed from a collection, so
        every key is stored again.

        Raises:
            UsageError: truncation is required, but the connector or the shard cannot truncate.
        """
        if not needs_truncation(plan, interval) and not spec.delta_updates:
            return False
        if plan.empties and self._key_range == WHOLE:
            return True
        if spec.delta_updates:
            return False  # Delta updates: all rows are sent once more.
        raise UsageError(
            f"resource {plan.bound.path} cannot be written again from collection "
            f'"{plan.bound.name}"',
            detail="Its contents are not known, so it must be truncated first."
            + (
                " A shard cannot truncate, because it cannot identify its own rows."
                if plan.empties
                else " Its connector cannot truncate."
            ),
            hint="Set shards: 1 until it is written again."
            if plan.empties
            else "Give the binding another resource, or truncate it and drop its checkpoint.",
        )

    def _last_rows(
        self,
        plan: BindingPlan,
        spec: MaterializationBinding,
        updates: pa.Table,
        interval: Interval,
        key: tuple[str, ...],
    ) -> LastRows:
        rows = select_last_rows(updates, key, collection=plan.bound.name)
        if self._key_range != WHOLE and len(rows):
            rows = rows.filter(_within(rows.packed_keys, self._key_range))
        if isinstance(interval, RewriteInterval) or spec.delta_updates:
            rows = rows.as_new()
        return rows if plan.deletes else rows.filter(pc.invert(rows.deletes))

    def _documents(
        self,
        combining: SpillingCombiner,
        plan: BindingPlan,
        spec: MaterializationBinding,
        kind: DocumentsKind,
        *,
        known: bool,
    ) -> Iterator["_Documents"]:
        """Yield the documents to store.

        `known` is true if a key that was not loaded is certainly absent from the resource.
        """
        selection, collection = spec.field_selection, spec.collection
        pointers = [_pointer(spec, field) for field in selection.values]
        defaults = field_defaults(collection)
        # If the row is the document, NaN and infinities are text in it.
        numbers = pointers if kind.document is None else []
        what = f'document of collection "{collection.collection}"'
        batches = combining.combined() if spec.delta_updates else combining.reduced()
        for batch in batches:
            texts = batch.column("document").cast(pa.binary())
            count = len(batch)
            exists = deletes = _all_false(count)
            if not spec.delta_updates:
                exists, deletes = batch.column("exists"), batch.column("deleted")
            if kind.counted:
                counts = _counts(texts, what)
                if not spec.delta_updates:
                    _check_counts(counts, collection.collection)
                deletes = pc.equal(counts, 0)
            stored = _Documents(
                batch.column("key"),
                pack_fields(texts, pointers, defaults=defaults, numbers=numbers, what=what),
                texts if selection.document else _empty(count),
                exists,
                deletes,
            )
            # A document inserted and deleted within the transaction was never stored.
            absent = pc.invert(exists) if known else _all_false(count)
            skipped = deletes if not plan.deletes else pc.and_(deletes, absent)
            yield stored.filter(pc.invert(skipped))

    def _in_key_range(self, rows: pa.Table) -> pa.Table:
        if self._key_range == WHOLE or not rows.num_rows:
            return rows
        return rows.filter(_within(rows.column("key").combine_chunks(), self._key_range))


@dataclass(frozen=True, slots=True)
class _Documents:
    """Columns of the documents to store."""

    keys: pa.BinaryArray
    values: pa.BinaryArray
    docs: pa.BinaryArray
    exists: pa.BooleanArray
    deletes: pa.BooleanArray

    def __len__(self) -> int:
        return len(self.keys)

    def filter(self, mask: pa.BooleanArray) -> "_Documents":
        return _Documents(
            self.keys.filter(mask),
            self.values.filter(mask),
            self.docs.filter(mask),
            self.exists.filter(mask),
            self.deletes.filter(mask),
        )

    def requests(self, number: int, *, delta: bool) -> Iterator[Store]:
        """Yield the documents as Stores of about `STORE_BYTES` each."""
        sizes = np.zeros(len(self), np.int64)
        for column in (self.keys, self.values, self.docs):
            sizes += pc.binary_length(column).to_numpy()
        exists = _all_false(len(self)) if delta else self.exists
        ends = np.cumsum(sizes)
        start = 0
        while start < len(self):
            limit = (ends[start - 1] if start else 0) + STORE_BYTES
            end = max(start + 1, int(np.searchsorted(ends, limit, side="right")))
            part = slice(start, end)
            yield Store(
                number,
                self.keys[part],
                self.values[part],
                self.docs[part],
                exists[part],
                self.deletes[part] if pc.any(self.deletes[part]).as_py() else None,
            )
            start = end


def _stores(number: int, spec: MaterializationBinding, rows: LastRows) -> Iterator[Store]:
    if not len(rows):
        return
    selection = spec.field_selection
    columns = [_column(spec, field) for field in selection.values]
    stored = _Documents(
        rows.packed_keys,
        pack(encode_fields(rows.rows, columns)) if columns else _empty(len(rows)),
        encode_documents(rows.rows) if selection.document else _empty(len(rows)),
        rows.exists,
        rows.deletes,
    )
    yield from stored.requests(number, delta=spec.delta_updates)


def _loads(number: int, keys: Iterable[pa.BinaryArray], *, loads: bool) -> Iterator[Load]:
    for key_batch in keys if loads else ():
        for start in range(0, len(key_batch), LOAD_KEYS):
            yield Load(number, key_batch[start : start + LOAD_KEYS])


def _within(keys: pa.BinaryArray, key_range: KeyRange) -> pa.BooleanArray:
    hashes = key_hashes(keys)
    return pa.array((hashes >= key_range.begin) & (hashes <= key_range.end))


def _pointer(spec: MaterializationBinding, field: str) -> str:
    projection = spec.collection.projection(field)
    if projection is None:
        raise InternalError(f'field "{field}" has no projection')
    return projection.ptr


def _column(spec: MaterializationBinding, field: str) -> str:
    """Return the column of a field. The projection of a row field always points to one column."""
    return _pointer(spec, field)[1:].replace("~1", "/").replace("~0", "~")


def _counts(texts: pa.BinaryArray, what: str) -> pa.Array:
    """Return the multiplicity of each row."""
    packed = pack_fields(texts, [f"/{COUNT}"], what=what)
    return pa.array([unpack_row(packed_count.as_py())[0] for packed_count in packed], pa.int64())


def _check_counts(counts: pa.Array, collection: str) -> None:
    if pc.any(pc.less(counts, 0)).as_py():
        raise DefiniteError(
            f'collection "{collection}" has a row with a negative count',
            detail="The collection has diverged from its source.",
            hint="Compare the collection with its source: penstock resync",
        )


def _empty(count: int) -> pa.BinaryArray:
    return pa.array([b""] * count, pa.binary())


def _all_false(count: int) -> pa.BooleanArray:
    return pa.array(np.zeros(count, np.bool_))
