"""Reads: contents as of a time, and changes from a time on.

Both are definite. `snapshot(as_of)` is the sum of all updates at or before `as_of`.
`listen(as_of)` yields every later update exactly once, in order of time, with the upper
reached. For every t between `as_of` and upper:

    snapshot(t)  =  snapshot(as_of)  +  updates of listen(as_of) up to t

This holds for every reader, at every time, and across merges.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from penstock.data import DIFF, TIME, Codec, advance, consolidate
from penstock.errors import Corruption, InternalError, UsageError
from penstock.persist.batch import Batches, part_scans_of
from penstock.persist.collection_change import Grow, with_growth
from penstock.persist.errors import Closed
from penstock.persist.holds import Claims
from penstock.persist.lookup import LookupKeys, matching_rows, written_rows
from penstock.persist.machine import Machine
from penstock.persist.merge.merger import distinct
from penstock.persist.notify import NotificationListener, Wakeups
from penstock.persist.readability import check_changes, check_contents, check_since, reachable
from penstock.persist.settings import Settings
from penstock.persist.state import (
    END,
    Batch,
    CollectionState,
    SchemaVersion,
    State,
    schema_as_of,
    stored_columns_of,
)
from penstock.progress import Update

__all__ = ["FILES_ONLY", "Changes", "Listener", "Reader", "Snapshot"]

FILES_ONLY: Final = END
"""Since of a claim on the files of a state without history; an advancing since does not end it.

The writer uses it to sum all updates, and does not need contents as of an earlier time.
"""

Decoder = Callable[[pa.Table], Iterator[Any]]


class _Rows:
    """Updates, available as Arrow or as Python values."""

    def __init__(self, table: pa.Table, decode: Decoder) -> None:
        self._table = table
        self._decode = decode

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Update[Any]]:
        """Yield each distinct row with its time and its multiplicity."""
        times, diffs = self._table.column(TIME), self._table.column(DIFF)
        data = self._decode(self._table)
        for datum, time, diff in zip(data, times.to_pylist(), diffs.to_pylist(), strict=True):
            yield Update(datum, time, diff)

    def arrow(self) -> pa.Table:
        """Return the user's columns, then `mz_timestamp` and `mz_diff`."""
        return self._table


class Snapshot(_Rows):
    """Contents of a collection as of a time."""

    def __init__(self, table: pa.Table, decode: Decoder, as_of: int) -> None:
        super().__init__(table, decode)
        self.as_of = as_of


class Changes(_Rows):
    """All updates in `[lower, upper)`; with them, every update below `upper` has been delivered."""

    def __init__(self, table: pa.Table, decode: Decoder, lower: int, upper: int) -> None:
        super().__init__(table, decode)
        self.lower = lower
        self.upper = upper


@dataclass(slots=True)
class Reader:
    """Shared context of reads, for all collections of one client."""

    machine: Machine
    batches: Batches
    claims: Claims
    settings: Settings
    owns_writer: bool
    wakeups: Wakeups
    notifications: NotificationListener
    closed: threading.Event

    def refresh(self) -> State:
        """Return the newest state that this client can see."""
        if self.closed.is_set():
            raise Closed(self.machine.blob.name)
        return self.machine.state if self.owns_writer else self.machine.refresh()

    def snapshot(self, collection: CollectionState, as_of: int) -> Snapshot:
        """Return the contents as of a time in `[since, upper)` that no error covers."""
        id, name = collection.id, collection.name
        with self.claims.claim(id, name, as_of) as claim:
            current = claim.state.collections[id]
            check_contents(current, as_of)
            schema = self.schema_as_of(current, as_of)
            rows = self.rows(current, schema, lower=0, upper=as_of + 1)
        return Snapshot(consolidate(advance(rows, as_of)), self.decoder(current, schema), as_of)

    def lookup(self, collection: CollectionState, keys: pa.Table, as_of: int) -> pa.Table:
        """Return the rows as of a time that have one of `keys`, with `mz_diff`."""
        id, name = collection.id, collection.name
        with self.claims.claim(id, name, as_of) as claim:
            current = claim.state.collections[id]
            check_contents(current, as_of)
            schema = schema_as_of(current, as_of)
            lookup_keys = LookupKeys(keys, schema, collection=name)
            tables = [stored_columns_of(schema).empty_table()]
            for batch in current.batches:
                if batch.lower > as_of:
                    continue
                with self._mapped_overtaking(current, batch):
                    for part_scan in part_scans_of(current, batch, upper=as_of + 1):
                        tables += matching_rows(
                            self.batches, current, part_scan, schema, lookup_keys
                        )
        rows = advance(pa.concat_tables(tables), as_of)
        if not distinct(rows, schema.key, since=as_of):  # Usually there is nothing to consolidate.
            rows = consolidate(rows)
        least = pc.min(rows.column(DIFF)).as_py()
        if least is not None and least < 0:
            raise InternalError(
                f'collection "{name}" holds {least} of a row as of {as_of}',
                detail="It was retracted more often than it was written.",
                hint="Look at its changes with penstock tail to see when.",
            )
        return rows.drop_columns([TIME])

    def written(
        self,
        collection: CollectionState,
        keys: pa.Table,
        staged: Sequence[Batch],
        growing: Sequence[Grow],
    ) -> pa.Table:
        """Return the rows with `keys` among all written updates, sealed or not, and `staged`.

        The result is consolidated and has `mz_diff`. For the writer, which ignores the
        times that readers may see.
        """
        id, name = collection.id, collection.name
        with self.claims.claim(id, name, FILES_ONLY) as claim:
            current = with_growth(claim.state.collections[id], growing)
            return written_rows(self.batches, current, keys, staged)

    @contextmanager
    def files_of(self, collection: CollectionState) -> Iterator[CollectionState]:
        """Yield the state with all written updates, sealed or not, and retain its files."""
        with self.claims.claim(collection.id, collection.name, FILES_ONLY) as claim:
            yield claim.state.collections[collection.id]

    def parts(self, collection: CollectionState, staged: Sequence[Batch]) -> Iterator[pa.Table]:
        """Yield all written updates, sealed or not, and `staged`, one part at a time, in order."""
        id, name = collection.id, collection.name
        with self.claims.claim(id, name, FILES_ONLY) as claim:
            current = claim.state.collections[id]
            for batch in (*current.batches, *staged):
                for part_scan in part_scans_of(current, batch):
                    yield self.batches.part_rows(current, part_scan, current.schemas[-1])

    def rows(
        self, collection: CollectionState, schema: SchemaVersion, *, lower: int, upper: int
    ) -> pa.Table:
        """Return the updates with times in `[lower, upper)`, not consolidated."""
        tables = [
            self._batch_rows(collection, i, schema, lower, upper)
            for i, batch in enumerate(collection.batches)
            if batch.lower < upper and batch.upper > lower
        ]
        return pa.concat_tables(tables) if tables else stored_columns_of(schema).empty_table()

    def schema_as_of(self, collection: CollectionState, as_of: int) -> SchemaVersion:
        """Return the schema version for a read as of a time, with the codecs of this client."""
        schema = schema_as_of(collection, as_of)
        opened = self.batches.codecs.get(collection.id)
        if not schema.codecs or opened is None:
            return schema
        codecs = tuple((codec.name, codec.version) for codec in opened)
        # This client's codecs may be newer than the stored ones. No stored version has
        # number -1.
        return (
            schema
            if codecs == schema.codecs
            else structs.replace(schema, version=-1, codecs=codecs)
        )

    def decoder(self, collection: CollectionState, schema: SchemaVersion) -> Decoder:
        """Return the function that converts rows to the caller's values."""
        codecs = self.batches.codecs.get(collection.id)
        if schema.codecs and codecs is not None:
            return lambda table: _pairs(table, schema, codecs)
        return _dicts

    def _batch_rows(
        self, collection: CollectionState, at: int, schema: SchemaVersion, lower: int, upper: int
    ) -> pa.Table:
        batch = collection.batches[at]
        with self._mapped_overtaking(collection, batch):
            return self.batches.rows(collection, batch, schema, lower=lower, upper=upper)

    @contextmanager
    def _mapped_overtaking(self, collection: CollectionState, batch: Batch) -> Iterator[None]:
        """Report an object that compaction deleted as an overtaken read, not as damage."""
        try:
            yield
        except Corruption as error:
            # A writer may have been fenced without knowing it, and its files
            # garbage-collected.
            now = self.machine.refresh(thorough=True)
            current = now.collections.get(collection.id)
            if current is not None and batch.id in {other.id for other in current.batches}:
                raise
            raise UsageError(
                f'collection "{collection.name}" was compacted while it was being read',
                detail="The reader had no hold, or had lost it."
                + (f" The collection's since is now {current.since}." if current else ""),
                hint="Read again, or open the location with hold=True.",
            ) from error


class Listener:
    """Iterator over the changes of a collection, in order, as they become complete.

    Iteration waits for more changes; `next_changes` waits up to its timeout. No change is
    delivered twice, even across merges. At the end of its context, the listener releases
    the history that it holds.
    """

    def __init__(
        self,
        reader: Reader,
        collection: CollectionState,
        as_of: int,
        *,
        snapshot: bool,
        client: object,
    ) -> None:
        if as_of >= 0:
            check_since(collection, as_of)
        self._reader = reader
        self._client = client  # Keeps the client alive: a garbage-collected client closes itself.
        self._closed = False
        self._id, self._name = collection.id, collection.name
        self._frontier = as_of + 1
        self._snapshot_due = snapshot
        self._stack = ExitStack()
        self._claim = self._stack.enter_context(
            reader.claims.claim(self._id, self._name, max(as_of, 0))
        )
        self._wakeups = reader.wakeups.subscribe()
        self._stack.callback(reader.wakeups.unsubscribe, self._wakeups)
        self._checked_ms = reader.settings.clock.boot_ms()

    @property
    def frontier(self) -> int:
        """Frontier of delivered updates: every update below it has been delivered."""
        return self._frontier

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator["Changes | Snapshot"]:
        while True:
            changes = self.next_changes(timeout_ms=None)
            if changes is not None:
                yield changes

    def close(self) -> None:
        """Stop listening, and release the retained history."""
        self._closed = True
        self._stack.close()

    def next_changes(self, *, timeout_ms: int | None) -> "Changes | Snapshot | None":
        """Return the changes that became complete since the last call, or None after the timeout.

        Raises:
            SinceError: the reader has no hold and was overtaken by compaction.
            CollectionErrored: the collection is in error from here on; all earlier changes were
                delivered.
            CollectionReplaced: the name refers to another collection from here on.
        """
        if self._closed:
            raise UsageError(
                f'listener of collection "{self._name}" is closed', hint="Listen again."
            )
        reader = self._reader
        clock = reader.settings.clock
        deadline = None if timeout_ms is None else clock.boot_ms() + timeout_ms
        while True:
            # Cleared before the check: a wakeup between the check and the wait is not
            # missed.
            self._wakeups.clear()
            state = self._refresh()
            collection = state.collections.get(self._id)
            if collection is None:
                raise UsageError(
                    f'collection "{self._name}" was destroyed', hint="Listen to another one."
                )
            if self._snapshot_due and collection.upper >= self._frontier:
                contents = self._contents(collection)
                self._snapshot_due = False
                return contents
            if collection.upper > self._frontier or collection.successor:
                changes = self._changes(collection)
                self._frontier = changes.upper
                reader.claims.advance(self._claim, changes.upper - 1, state)
                return changes
            if state.seqno != self._claim.position:
                # No new changes, but the writer may delete files that merges have replaced.
                reader.claims.advance(self._claim, self._claim.since, state)
            left = reader.settings.poll_ms
            if deadline is not None:
                left = min(left, deadline - clock.boot_ms())
                if left <= 0:
                    return None
            if not reader.owns_writer and state.writer is not None:
                reader.notifications.connect(state.writer.address, state.location)
            clock.wait(self._wakeups, left)

    def _refresh(self) -> State:
        reader = self._reader
        now_ms = reader.settings.clock.boot_ms()
        state = reader.refresh()
        if now_ms - self._checked_ms >= 10 * reader.settings.poll_ms:
            # SUBTLE: a missing entry may be truncated rather than not yet written, and only
            # the floor distinguishes the two (hazard A4). A writer checks too: after it was
            # fenced, it would receive no wakeups.
            self._checked_ms = now_ms
            state = reader.machine.refresh(thorough=True)
            if reader.owns_writer:
                reader.machine.must_own()
        return state

    def _contents(self, collection: CollectionState) -> Snapshot:
        as_of = self._frontier - 1
        if as_of >= 0:
            return self._reader.snapshot(collection, as_of)
        schema = self._reader.schema_as_of(collection, 0)
        nothing = stored_columns_of(schema).empty_table()
        return Snapshot(nothing, self._reader.decoder(collection, schema), as_of)

    def _changes(self, collection: CollectionState) -> Changes:
        lower = self._frontier
        # Changes never span two schema versions, so all listeners receive the same rows.
        grown = [version.since for version in collection.schemas if version.since > lower]
        upper = min([reachable(collection, lower), *grown])
        reader = self._reader
        schema = reader.schema_as_of(collection, upper - 1)
        if collection.whole and lower <= collection.begins:
            # Updates written before the collection's beginning count at its beginning.
            begun = reader.rows(collection, schema, lower=0, upper=upper)
            rows = advance(begun if upper > collection.begins else begun[:0], collection.begins)
        else:
            # A since at the frontier itself is too high: compaction has advanced updates
            # that were already delivered to a time that was not.
            check_changes(collection, lower, upper)
            rows = reader.rows(collection, schema, lower=lower, upper=upper)
        rows = consolidate(rows).sort_by(TIME)
        return Changes(rows, reader.decoder(collection, schema), lower, upper)


def _dicts(table: pa.Table) -> Iterator[dict[str, Any]]:
    yield from table.drop_columns([TIME, DIFF]).to_pylist()


def _pairs(
    table: pa.Table, schema: SchemaVersion, codecs: tuple[Codec, Codec]
) -> Iterator[tuple[Any, Any]]:
    (_, key_version), (_, value_version) = schema.codecs
    keys, values = (table.column(i).to_pylist() for i in (0, 1))
    for key, value in zip(keys, values, strict=True):
        yield codecs[0].decode(key, key_version), codecs[1].decode(value, value_version)
