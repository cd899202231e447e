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
from penstock.materialize.binding import COUNT, BindingPlan, Documents, Rows
from penstock.materialize.described import defaults_of
from penstock.materialize.extracting import packed_at
from penstock.materialize.intervals import Contents, Interval, Rewrite
from penstock.materialize.netting import Net, net
from penstock.materialize.rows import documents, field_columns
from penstock.materialize.session import Session
from penstock.materialize.spill import Combining
from penstock.protocol.key_range import WHOLE, KeyRange
from penstock.protocol.messages import Load, Loaded, Store
from penstock.protocol.specs import MaterializationBinding, MaterializationSpec

__all__ = ["Count", "Feed", "Gathering", "needs_truncation", "reading_order"]

STORE_BYTES: Final = 1 << 20
"""Approximate size of one Store."""

LOAD_KEYS: Final = 1 << 14
"""Maximum number of keys in one Load."""

Feed = Callable[[int, Interval], Iterable[pa.Table]]
"""Reader of the updates of a binding in an interval (see `feeds.py`).

The bindings are read in the order of `reading_order`.
"""


@dataclass(frozen=True, slots=True)
class Count:
    """Number and size of the stored documents, for the status."""

    documents: int = 0
    bytes: int = 0


def reading_order(bindings: Sequence[BindingPlan]) -> list[int]:
    """Return the numbers of the bindings in read order.

    Bindings of documents are first, because no Load may follow the first Store.
    """
    return sorted(range(len(bindings)), key=lambda at: isinstance(bindings[at].shape, Rows))


def needs_truncation(plan: BindingPlan, interval: Interval | None) -> bool:
    """Return whether a rewrite must truncate the resource, because its keys are unknown."""
    counted = isinstance(plan.shape, Documents) and plan.shape.counted
    return isinstance(interval, Rewrite) and (counted or interval.before is None)


class Gathering:
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
        feed: Feed,
    ) -> None:
        self._spec = spec
        self._bindings = bindings
        self._intervals = intervals
        self._key_range = key_range
        self._feed = feed
        self._stack = ExitStack()
        self._combining: dict[int, Combining] = {}
        self._rows: dict[int, list[pa.Table]] = {}
        self._asked: list[tuple[int, pa.BinaryArray]] = []

    def close(self) -> None:
        """Discard the input."""
        self._stack.close()

    def combine(self) -> Iterator[Load]:
        """Read and combine all documents, and yield the Loads of the stored documents they need."""
        for number in reading_order(self._bindings):
            plan, interval = self._bindings[number], self._intervals[number]
            if interval is None or not isinstance(plan.shape, Documents):
                continue
            combining = self._stack.enter_context(Combining(plan.shape.reducer))
            self._combining[number] = combining
            loads = not self._spec.bindings[number].delta_updates and not isinstance(
                interval, Contents | Rewrite
            )
            for table in self._feed(number, interval):
                yield from _loads(number, combining.add(self._of_range(table)), wanted=loads)
            yield from _loads(number, combining.finish(), wanted=loads)

    def read_ahead(self) -> None:
        """Do all work that does not depend on the outcome of the last commit."""
        for load in self.combine():
            self._asked.append((load.binding, load.packed_keys))
        for number in reading_order(self._bindings):
            interval = self._intervals[number]
            if interval is not None and number not in self._combining:
                self._rows[number] = list(self._feed(number, interval))

    def asked_ahead(self) -> Iterator[Load]:
        """Yield the Loads that `read_ahead` has collected."""
        for number, keys in self._asked:
            yield Load(number, keys)

    def loaded(self, found: Loaded) -> None:
        """Add documents that the connector has loaded."""
        combining = self._combining.get(found.binding)
        if combining is None:
            raise InternalError(f"binding {found.binding} was sent documents nobody asked for")
        spec = self._spec.bindings[found.binding].collection
        keys = packed_at(
            found.docs_json,
            spec.key_ptrs,
            defaults=defaults_of(spec),
            what="document that was loaded",
        )
        combining.loaded(keys, found.docs_json)

    def store(self, session: Session) -> tuple[Count, ...]:
        """Send the Stores of all bindings, and return the counts per binding."""
        counts = [Count()] * len(self._bindings)
        for number in reading_order(self._bindings):
            interval = self._intervals[number]
            if interval is None:
                continue
            stored = size = 0
            for request in self._requests(number, interval):
                session.store(request)
                stored += len(request.packed_keys)
                size += request.packed_values.nbytes + request.docs_json.nbytes
            counts[number] = Count(stored, size)
        return tuple(counts)

    def _requests(self, number: int, interval: Interval) -> Iterator[Store]:
        plan, spec = self._bindings[number], self._spec.bindings[number]
        if isinstance(interval, Rewrite) and self._empties(plan, spec, interval):
            yield Store.truncate(number)
        match plan.shape:
            case Rows(key):
                tables = self._rows.pop(number, None) or self._feed(number, interval)
                for updates in tables:
                    rows = self._net(plan, spec, updates, interval, key)
                    yield from _stores(number, spec, rows)
            case Documents() as shape:
                known = not isinstance(interval, Rewrite) or interval.before is None
                for stores in self._documents(
                    self._combining[number], plan, spec, shape, known=known
                ):
                    yield from stores.requests(number, delta=spec.delta_updates)

    def _empties(self, plan: BindingPlan, spec: MaterializationBinding, interval: Rewrite) -> bool:
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
            f"resource {plan.bound.path} cannot be written anew from collection "
            f'"{plan.bound.name}"',
            detail="What it holds now is not known any more, so it would have to be emptied."
            + (
                " A shard cannot do so, as it does not know which rows are its own."
                if plan.empties
                else " Its connector cannot."
            ),
            hint="Say shards: 1 while it is written anew."
            if plan.empties
            else "Give the binding another resource, or empty it by hand and drop its checkpoint.",
        )

    def _net(
        self,
        plan: BindingPlan,
        spec: MaterializationBinding,
        updates: pa.Table,
        interval: Interval,
        key: tuple[str, ...],
    ) -> Net:
        rows = net(updates, key, collection=plan.bound.name)
        if self._key_range != WHOLE and len(rows):
            rows = rows.filter(_within(rows.packed_keys, self._key_range))
        if isinstance(interval, Rewrite) or spec.delta_updates:
            rows = rows.as_new()
        return rows if plan.deletes else rows.filter(pc.invert(rows.deletes))

    def _documents(
        self,
        combining: Combining,
        plan: BindingPlan,
        spec: MaterializationBinding,
        shape: Documents,
        *,
        known: bool,
    ) -> Iterator["_Documents"]:
        """Yield the documents to store.

        `known` is true if a key that was not loaded is certainly absent from the resource.
        """
        selection, collection = spec.field_selection, spec.collection
        pointers = [_pointer(spec, each) for each in selection.values]
        defaults = defaults_of(collection)
        # If the row is the document, NaN and infinities are text in it.
        numbers = pointers if shape.document is None else []
        what = f'document of collection "{collection.collection}"'
        batches = combining.combined() if spec.delta_updates else combining.reduced()
        for batch in batches:
            texts = batch.column("document").cast(pa.binary())
            count = len(batch)
            exists = deletes = _none(count)
            if not spec.delta_updates:
                exists, deletes = batch.column("exists"), batch.column("deleted")
            if shape.counted:
                counts = _counts(texts, what)
                if not spec.delta_updates:
                    _check_counts(counts, collection.collection)
                deletes = pc.equal(counts, 0)
            found = _Documents(
                batch.column("key"),
                packed_at(texts, pointers, defaults=defaults, numbers=numbers, what=what),
                texts if selection.document else _empty(count),
                exists,
                deletes,
            )
            # A document inserted and deleted within the transaction was never stored.
            absent = pc.invert(exists) if known else _none(count)
            gone = deletes if not plan.deletes else pc.and_(deletes, absent)
            yield found.filter(pc.invert(gone))

    def _of_range(self, rows: pa.Table) -> pa.Table:
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

    def filter(self, kept: pa.BooleanArray) -> "_Documents":
        return _Documents(
            self.keys.filter(kept),
            self.values.filter(kept),
            self.docs.filter(kept),
            self.exists.filter(kept),
            self.deletes.filter(kept),
        )

    def requests(self, number: int, *, delta: bool) -> Iterator[Store]:
        """Yield the documents as Stores of about `STORE_BYTES` each."""
        sizes = np.zeros(len(self), np.int64)
        for column in (self.keys, self.values, self.docs):
            sizes += pc.binary_length(column).to_numpy()
        exists = _none(len(self)) if delta else self.exists
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


def _stores(number: int, spec: MaterializationBinding, rows: Net) -> Iterator[Store]:
    if not len(rows):
        return
    selection = spec.field_selection
    columns = [_column(spec, each) for each in selection.values]
    found = _Documents(
        rows.packed_keys,
        pack(field_columns(rows.rows, columns)) if columns else _empty(len(rows)),
        documents(rows.rows) if selection.document else _empty(len(rows)),
        rows.exists,
        rows.deletes,
    )
    yield from found.requests(number, delta=spec.delta_updates)


def _loads(number: int, keys: Iterable[pa.BinaryArray], *, wanted: bool) -> Iterator[Load]:
    for each in keys if wanted else ():
        for start in range(0, len(each), LOAD_KEYS):
            yield Load(number, each[start : start + LOAD_KEYS])


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
    packed = packed_at(texts, [f"/{COUNT}"], what=what)
    return pa.array([unpack_row(each.as_py())[0] for each in packed], pa.int64())


def _check_counts(counts: pa.Array, collection: str) -> None:
    if pc.any(pc.less(counts, 0)).as_py():
        raise DefiniteError(
            f'collection "{collection}" has taken away rows that were not there',
            detail="A row would be there less than no times, so we have lost track of it.",
            hint="Compare the collection with its source: penstock resync",
        )


def _empty(count: int) -> pa.BinaryArray:
    return pa.array([b""] * count, pa.binary())


def _none(count: int) -> pa.BooleanArray:
    return pa.array(np.zeros(count, np.bool_))
