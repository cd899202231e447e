"""All changes of one tick, and the one entry that commits them.

A source reads into a `TickTransaction`. Rows beyond `SPOOL_BYTES` are written to files
under a staging id while the source continues, so a transaction larger than memory is
possible; the entry only links the files. Data, remap, the source's state and all uppers
are in one entry: a restart finds all of them or none.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from penstock import persist
from penstock.data import DIFF, TIME, consolidate
from penstock.data.schema import default_row
from penstock.errors import DefiniteError, InternalError
from penstock.failpoints import Failpoint, hit
from penstock.ingest.snapshot_loader import SnapshotLoad, SnapshotLoader
from penstock.persist import AppendTo, Collection, StoredError
from penstock.persist.append.task import all_of
from penstock.persist.collection_change import (
    Begin,
    CollectionChange,
    Fail,
    Grow,
    Recover,
    Replace,
    WriteTo,
)
from penstock.persist.state import Batch
from penstock.persist.state_store import StateStore
from penstock.sources.context import Scan
from penstock.sources.source import Split

__all__ = ["TickTransaction"]

SPOOL_BYTES: Final = 16 << 20
"""Rows of one collection beyond this size are written to files before the tick ends."""

SPOOLS: Final = 2
"""Maximum number of files being written at the same time."""

Rows: TypeAlias = pa.Table | persist.Staged


@dataclass(slots=True)
class _PendingChange:
    """Uncommitted changes of one collection."""

    loose: list[pa.Table] = field(default_factory=list)
    """Rows with diffs, in memory."""

    files: "list[Future[persist.Staged]]" = field(default_factory=list)
    """Rows written to files, or being written."""

    begins: bool = False
    grows: list[Grow] = field(default_factory=list)
    fails: Fail | None = None
    recovers: Recover | None = None
    copy: SnapshotLoad | None = None

    size: int = 0
    """Bytes of the rows in memory."""


class TickTransaction:
    """The transaction of one tick; see `penstock.sources.context.TickTransaction`."""

    def __init__(
        self,
        client: persist.Client,
        source: str,
        memory: StateStore,
        time: int,
        loader: SnapshotLoader,
        pool: ThreadPoolExecutor,
    ) -> None:
        """Create a transaction that writes files with `pool`."""
        self.time = time
        self._loader = loader
        self._pool = pool
        self._writing: deque[Future[persist.Staged]] = deque()
        self._client = client
        self._source = source
        self._memory = memory
        self._pending: dict[str, _PendingChange] = {}
        self._replacements: dict[str, Collection] = {}
        """New collections by name, for names that this tick moves."""

        self._state: dict[str, Any] = {}
        self._side_rows: dict[str, _PendingChange] = {}
        self._dropped_side_rows: list[str] = []
        self._staging = ExitStack()
        self._staging_id: str | None = None
        self.rows = 0
        self.bytes = 0
        self.corrected_rows = 0
        """Number of rows that comparisons have corrected."""

        self.failures: dict[str, DefiniteError] = {}
        """Errors by collection, for collections that fail at this tick."""

    def change(self, collection: str, *, deletes: pa.Table, inserts: pa.Table) -> None:
        """Apply deletes and inserts at this tick."""
        for rows, diff in ((deletes, -1), (inserts, +1)):
            if rows.num_rows:
                self._put(collection, _with_diff(rows, diff))

    def begin(self, collection: str) -> None:
        """Make the collection visible from this tick on, with all rows put into it."""
        self._of(collection).begins = True

    def link_snapshot(self, collection: str, copy: SnapshotLoad) -> None:
        """Link the files of a complete initial snapshot. `begin` makes them visible."""
        self._of(collection).copy = copy
        self.rows += copy.rows()

    def grow(self, collection: str, schema: pa.Schema, defaults: Mapping[str, Any]) -> None:
        """Add columns from this tick on. Older rows read `defaults` in them."""
        pending = self._of(collection)
        pending.grows.append(Grow(self._named(collection), schema, defaults))
        pending.loose = [self._conformed(collection, rows) for rows in pending.loose]

    def fail(self, collection: str, error: DefiniteError) -> None:
        """Make every read at or above this time fail; drop the changes of this tick."""
        self.failures[collection] = error
        pending = self._of(collection)
        pending.loose, pending.files, pending.size = [], [], 0
        if pending.recovers is not None:
            # The collection was errored and stays errored, with its first error.
            pending.recovers = None
            return
        stored = StoredError(type(error).__name__, str(error), error.detail, error.hint)
        pending.fails = Fail(self._named(collection), self.time, stored)

    def recover(self, collection: str) -> None:
        """End the error of a collection at this time."""
        self._of(collection).recovers = Recover(self._named(collection), self.time)

    def lookup(self, collection: str, keys: pa.Table) -> pa.Table:
        """Return the rows with these keys, changes of this tick included."""
        pending = self._of(collection)
        stored = self._named(collection).written(keys, self._files(pending), pending.grows)
        tables = [stored, *(_matching(rows, keys) for rows in pending.loose)]
        return _counted(tables).drop_columns([DIFF])

    def truncate(self, collection: str) -> None:
        """Delete all rows."""
        self._write_differences(collection, None)

    @contextmanager
    def compare(
        self, collection: str, splits: Sequence[Split], *, size: int
    ) -> Iterator[Callable[[], int]]:
        """Read all splits; yield a function that writes the differences.

        The function returns the number of rows changed.
        """
        grows = self._of(collection).grows
        copy = self._loader.read_again(collection, splits, size=size, growing=grows)
        try:
            target = copy.files

            def repair() -> int:
                row_count = self._write_differences(collection, target)
                self.corrected_rows += row_count
                return row_count

            yield repair
        finally:
            copy.release()

    @contextmanager
    def replace(
        self,
        collection: str,
        schema: pa.Schema,
        key: Sequence[str],
        splits: Sequence[Split],
        *,
        size: int,
    ) -> Iterator[Callable[[], int]]:
        """Read all splits into a new collection; yield a function that moves the name to it."""
        # The next start destroys this name unless the entry of this tick has moved it.
        hidden = self._side_name(f"new/{collection}")
        self._replacements.pop(collection, None)
        self._client.destroy(hidden)
        new = self._client.create_or_load(
            hidden, schema=schema, key_columns=key, owner=self._source
        )
        hit(Failpoint.REPLACEMENT_CREATED)
        copy = self._loader.read_again(hidden, splits, size=size, growing=())
        self._staging.callback(copy.release)
        copy.result()
        hit(Failpoint.REPLACEMENT_READ)

        def move() -> int:
            self._replacements[collection] = new
            self._pending[collection] = _PendingChange(begins=True, copy=copy)
            self.rows += copy.rows()
            self.corrected_rows += copy.rows()
            return copy.rows()

        yield move

    def _write_differences(self, collection: str, target: persist.Staged | None) -> int:
        """Make the contents equal to `target`; return the number of rows changed."""
        pending = self._of(collection)
        self._spool(self._named(collection), pending)
        difference = self._client.difference(
            self._named(collection),
            target,
            self._staged_under(),
            time=self.time,
            staged=self._files(pending),
            growing=pending.grows,
        )
        if isinstance(difference, persist.Staged):
            return 0 if difference.batch is None else self._link(collection, difference.batch)
        self._put(collection, difference.drop_columns([TIME]))
        return int(difference.num_rows)

    def scan(self, scan: Scan) -> list[Any]:
        """Read a range with Spark tasks, each directly into files; return their reports."""
        side_collections = {
            output: self._side_collection(side.name, side.schema).name
            for output, side in scan.side_rows.items()
        }
        scanned = self._loader.scan(
            scan, {**scan.into, **side_collections}, self._staged_under(), time=self.time
        )

        def written(output: str) -> Batch | None:
            return all_of(task.batch(output) for task in scanned)

        for output, collection in scan.into.items():
            if (batch := written(output)) is not None:
                self._link(collection, batch)
        for output, side_rows in scan.side_rows.items():
            if (batch := written(output)) is not None:
                side = self._side_rows.setdefault(side_rows.name, _PendingChange())
                side.files.append(_done(batch))
        return [task.report for task in scanned]

    def append_side_rows(self, name: str, rows: pa.Table) -> None:
        """Store hidden rows under a name of the source."""
        side = self._side_rows.setdefault(name, _PendingChange())
        side.loose.append(rows)
        side.size += rows.nbytes
        if side.size > SPOOL_BYTES:
            self._spool(self._side_collection(name, rows.schema), side)

    def side_rows(self, name: str) -> Iterator[pa.Table]:
        """Yield the side rows of a name, this tick included, in append order."""
        side = self._side_rows.get(name, _PendingChange())
        if self._side_name(name) in self._client.collections(hidden=True):
            collection = self._client.collection(self._side_name(name))
            for part in collection.parts(self._files(side)):
                yield part.drop_columns([TIME, DIFF])
        yield from side.loose

    def discard_side_rows(self, name: str) -> None:
        """Discard the side rows that this tick has appended under a name."""
        self._side_rows.pop(name, None)

    def drop_side_rows(self, name: str) -> None:
        """Drop all side rows of a name after the commit."""
        self._side_rows.pop(name, None)
        self._dropped_side_rows.append(name)

    def retain_side_rows(self, names: Set[str]) -> None:
        """Drop side rows of earlier ticks under all other names, after the commit."""
        for collection in self._client.collections(hidden=True):
            name = collection.removeprefix(self._side_name(""))
            if name != collection and name not in names:
                self.drop_side_rows(name)

    def put_state(self, name: str, value: Any) -> None:
        """Store a JSON value for the next start; None deletes the key."""
        # A copy: the caller may change the value before the commit.
        self._state[name] = copy.deepcopy(value)

    def commit(self, visible: Sequence[str], remap: AppendTo | None) -> None:
        """Commit all changes in one entry. Without `remap` nothing becomes visible yet."""
        appends = [] if remap is None else [remap]
        also: list[CollectionChange] = []
        seen = [] if remap is None else sorted({*visible, *self._begun()})
        for name in seen:
            collection = self._named(name)
            pending = self._of(name)
            rows = self._rows_of(pending, self.time)
            appends.append(AppendTo(collection, rows, collection.upper, self.time + 1))
        for name, pending in self._pending.items():
            collection = self._named(name)
            if pending.copy is not None:
                also.append(WriteTo(collection, pending.copy.files))
            if pending.begins:
                also.append(Begin(collection, self.time))
            if name in self._replacements:
                also.append(Replace(self._client.collection(name), collection, self.time))
            also += [each for each in (*pending.grows, pending.fails, pending.recovers) if each]
        appends += self._side_appends()
        memory = self._memory
        with memory.lock:
            state_time = max(self.time, memory.upper)
            updates = memory.updates(self._state, state_time)
            appends.append(AppendTo(memory.collection, updates, memory.upper, state_time + 1))
            hit(Failpoint.TICK_BEGIN)
            outcome = self._client.append_all(appends, collection_changes=also)
            hit(Failpoint.TICK_DONE)
            if not isinstance(outcome, persist.Appended):
                raise InternalError(
                    f'collection "{outcome.collection}" was written by another process',
                    hint="Stop the other process: a storage location has one writer.",
                )
            memory.learn(self._state, state_time + 1)
        for pending in self._pending.values():
            if pending.copy is not None:
                pending.copy.release()
        if self._dropped_side_rows:
            self._client.destroy(*map(self._side_name, self._dropped_side_rows))
        self.close()

    def close(self) -> None:
        """Wait for running writes and close the staging id."""
        for writing in self._writing:
            writing.exception()
        self._staging.close()

    def _link(self, collection: str, batch: Batch) -> int:
        """Link rows that are in files; return their number."""
        self._of(collection).files.append(_done(batch))
        self.rows += batch.rows
        self.bytes += batch.size
        return batch.rows

    def _put(self, collection: str, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        pending = self._of(collection)
        rows = self._conformed(collection, rows)
        size = rows.nbytes
        pending.loose.append(rows)
        pending.size += size
        self.rows += rows.num_rows
        self.bytes += size
        if pending.size > SPOOL_BYTES:
            self._spool(self._named(collection), pending)

    def _spool(self, collection: Collection, pending: _PendingChange) -> None:
        """Write the rows in memory to files, which the entry links."""
        if not pending.loose:
            return
        while len(self._writing) >= SPOOLS:
            # This wait bounds the memory of rows that are not written yet.
            self._writing.popleft().result()
        writing = self._pool.submit(
            self._client.stage,
            collection,
            pending.loose,
            self._staged_under(),
            time=max(self.time, collection.upper),
            growing=tuple(pending.grows),
        )
        self._writing.append(writing)
        pending.files.append(writing)
        pending.loose, pending.size = [], 0

    def _staged_under(self) -> str:
        """Return the staging id of this tick's files."""
        if self._staging_id is None:
            self._staging_id = self._staging.enter_context(self._client.staging())
        return self._staging_id

    def _rows_of(self, pending: _PendingChange, time: int) -> list[Rows]:
        rows: list[Rows] = [writing.result() for writing in pending.files]
        if pending.loose:
            loose = pa.concat_tables(pending.loose)
            times = pa.repeat(pa.scalar(time, pa.int64()), loose.num_rows)
            rows.append(loose.append_column(pa.field(TIME, pa.int64(), False), times))
        return rows

    def _side_appends(self) -> list[AppendTo]:
        appends = []
        for name, side in self._side_rows.items():
            if side.files:
                # All rows as files: they are read again in link order.
                self._spool(self._side_collection(name, None), side)
            collection = self._side_collection(name, side.loose[0].schema if side.loose else None)
            upper = collection.upper
            time = max(self.time, upper)
            appends.append(AppendTo(collection, self._rows_of(side, time), upper, time + 1))
        return appends

    def _side_collection(self, name: str, schema: pa.Schema | None) -> Collection:
        """Return the collection of side rows; create it if a schema is given."""
        if schema is None:
            return self._client.collection(self._side_name(name))
        return self._client.create_or_load(self._side_name(name), schema=schema, owner=self._source)

    def _side_name(self, name: str) -> str:
        return f"{self._source}/pending/{name}"

    def _begun(self) -> list[str]:
        return [name for name, pending in self._pending.items() if pending.begins]

    def _of(self, collection: str) -> _PendingChange:
        return self._pending.setdefault(collection, _PendingChange())

    def _named(self, collection: str) -> Collection:
        return self._replacements.get(collection) or self._client.collection(collection)

    def _files(self, pending: _PendingChange) -> list[persist.Staged]:
        """Return the files that the entry will link."""
        files = [writing.result() for writing in pending.files]
        return files if pending.copy is None else [pending.copy.files, *files]

    def _conformed(self, collection: str, rows: pa.Table) -> pa.Table:
        """Return rows, with the diff as last column, in the schema of this tick."""
        grows = self._of(collection).grows
        if not grows:
            return rows
        known = set(rows.column_names)
        schema = grows[-1].schema
        given = {name: value for grow in grows for name, value in grow.defaults.items()}
        defaults = default_row(schema, given)
        for index, column in enumerate(schema):
            if column.name not in known:
                value = (
                    defaults.column(column.name)[0]
                    if column.name in given
                    else pa.scalar(None, column.type)
                )
                rows = rows.add_column(index, column, pa.repeat(value, rows.num_rows))
            elif rows.schema.field(column.name).type != column.type:
                widened = rows.column(column.name).cast(column.type)
                rows = rows.set_column(index, column, widened)
        return rows


def _done(batch: Batch) -> Future[persist.Staged]:
    """Return a completed future for rows that are in files already."""
    linked: Future[persist.Staged] = Future()
    linked.set_result(persist.Staged(batch))
    return linked


def _with_diff(rows: pa.Table, diff: int) -> pa.Table:
    diffs = pa.repeat(pa.scalar(diff, pa.int64()), rows.num_rows)
    return rows.append_column(pa.field(DIFF, pa.int64(), False), diffs)


def _counted(tables: Sequence[pa.Table]) -> pa.Table:
    """Consolidate all rows; the diff stays the last column."""
    rows = pa.concat_tables(tables)
    zeros = pa.repeat(pa.scalar(0, pa.int64()), rows.num_rows)
    timed = rows.add_column(rows.num_columns - 1, pa.field(TIME, pa.int64(), False), zeros)
    return consolidate(timed).drop_columns([TIME])


def _matching(rows: pa.Table, keys: pa.Table) -> pa.Table:
    """Return the rows with a key in `keys`."""
    if rows.num_rows == 0 or keys.num_rows == 0:
        return rows.slice(0, 0)
    numbered = rows.select(keys.column_names).append_column(
        "row", pa.array(np.arange(rows.num_rows))
    )
    matches = numbered.join(keys, keys=keys.column_names, join_type="left semi")
    return rows.take(matches.column("row"))
