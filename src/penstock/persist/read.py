"""The reading side: contents as of a time, and changes from a time on.

Both are definite: `snapshot(as_of)` is the sum of all updates at or before
`as_of`, and `listen(as_of)` gives every update after it exactly once, in order
of time, with the upper reached. So for every t between as_of and upper

    snapshot(t)  =  snapshot(as_of)  +  what listen(as_of) gave up to t

whoever reads, whenever, and whatever was merged in between.
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
"""Claims the files of a state and no history: wherever since moves, they are kept.

For the writer, who adds up all there is and does not care what it was as of some time.
"""

Decoder = Callable[[pa.Table], Iterator[Any]]


class _Rows:
    """Updates as Arrow or as Python values, as the caller likes."""

    def __init__(self, table: pa.Table, decode: Decoder) -> None:
        self._table = table
        self._decode = decode

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Update[Any]]:
        """Each distinct row once, with its time and how often it is there."""
        times, diffs = self._table.column(TIME), self._table.column(DIFF)
        data = self._decode(self._table)
        for datum, time, diff in zip(data, times.to_pylist(), diffs.to_pylist(), strict=True):
            yield Update(datum, time, diff)

    def arrow(self) -> pa.Table:
        """The user's columns, then `mz_timestamp` and `mz_diff`."""
        return self._table


class Snapshot(_Rows):
    """The contents of a collection as of a time."""

    def __init__(self, table: pa.Table, decode: Decoder, as_of: int) -> None:
        super().__init__(table, decode)
        self.as_of = as_of


class Changes(_Rows):
    """All updates in `[lower, upper)`: everything below `upper` has now been given."""

    def __init__(self, table: pa.Table, decode: Decoder, lower: int, upper: int) -> None:
        super().__init__(table, decode)
        self.lower = lower
        self.upper = upper


@dataclass(slots=True)
class Reader:
    """What reading needs, for all collections of one client."""

    machine: Machine
    batches: Batches
    claims: Claims
    settings: Settings
    owns_writer: bool
    wakeups: Wakeups
    notifications: NotificationListener
    closed: threading.Event

    def look(self) -> State:
        """The newest state that this client can see."""
        if self.closed.is_set():
            raise Closed(self.machine.blob.name)
        return self.machine.state if self.owns_writer else self.machine.refresh()

    def snapshot(self, collection: CollectionState, as_of: int) -> Snapshot:
        """The contents as of a time in `[since, upper)` at which there is no error."""
        id, name = collection.id, collection.name
        with self.claims.claim(id, name, as_of) as claim:
            current = claim.state.collections[id]
            check_contents(current, as_of)
            schema = self.schema_as_of(current, as_of)
            rows = self.rows(current, schema, lower=0, upper=as_of + 1)
        return Snapshot(consolidate(advance(rows, as_of)), self.decoder(current, schema), as_of)

    def lookup(self, collection: CollectionState, keys: pa.Table, as_of: int) -> pa.Table:
        """The rows as of a time whose key is among `keys`, with `mz_diff`."""
        id, name = collection.id, collection.name
        with self.claims.claim(id, name, as_of) as claim:
            current = claim.state.collections[id]
            check_contents(current, as_of)
            schema = schema_as_of(current, as_of)
            wanted = LookupKeys(keys, schema, collection=name)
            found = [stored_columns_of(schema).empty_table()]
            for batch in current.batches:
                if batch.lower > as_of:
                    continue
                with self._overtaking_told(current, batch):
                    for piece in part_scans_of(current, batch, upper=as_of + 1):
                        found += matching_rows(self.batches, current, piece, schema, wanted)
        rows = advance(pa.concat_tables(found), as_of)
        if not distinct(rows, schema.key, since=as_of):  # Mostly there is nothing to add up.
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
        """The rows with `keys` of all that was written, sealed or not, and of `staged`.

        Added up, with `mz_diff`. For the writer, who goes on from it whatever readers may see.
        """
        id, name = collection.id, collection.name
        with self.claims.claim(id, name, FILES_ONLY) as claim:
            current = with_growth(claim.state.collections[id], growing)
            return written_rows(self.batches, current, keys, staged)

    @contextmanager
    def files_of(self, collection: CollectionState) -> Iterator[CollectionState]:
        """All that was written, sealed or not, whose files stay until the end of the block."""
        with self.claims.claim(collection.id, collection.name, FILES_ONLY) as claim:
            yield claim.state.collections[collection.id]

    def parts(self, collection: CollectionState, staged: Sequence[Batch]) -> Iterator[pa.Table]:
        """All that was written, sealed or not, and `staged` too, a part at a time, in order."""
        id, name = collection.id, collection.name
        with self.claims.claim(id, name, FILES_ONLY) as claim:
            current = claim.state.collections[id]
            for batch in (*current.batches, *staged):
                for piece in part_scans_of(current, batch):
                    yield self.batches.part_rows(current, piece, current.schemas[-1])

    def rows(
        self, collection: CollectionState, schema: SchemaVersion, *, lower: int, upper: int
    ) -> pa.Table:
        """The updates with times in `[lower, upper)`, not added up."""
        found = [
            self._batch_rows(collection, i, schema, lower, upper)
            for i, batch in enumerate(collection.batches)
            if batch.lower < upper and batch.upper > lower
        ]
        return pa.concat_tables(found) if found else stored_columns_of(schema).empty_table()

    def schema_as_of(self, collection: CollectionState, as_of: int) -> SchemaVersion:
        """The version to read as of a time, keys and values as this client's codecs write them."""
        schema = schema_as_of(collection, as_of)
        opened = self.batches.codecs.get(collection.id)
        if not schema.codecs or opened is None:
            return schema
        codecs = tuple((codec.name, codec.version) for codec in opened)
        # A reader may be ahead of what is stored; no stored version has this number.
        return (
            schema
            if codecs == schema.codecs
            else structs.replace(schema, version=-1, codecs=codecs)
        )

    def decoder(self, collection: CollectionState, schema: SchemaVersion) -> Decoder:
        """How rows become the caller's values."""
        codecs = self.batches.codecs.get(collection.id)
        if schema.codecs and codecs is not None:
            return lambda table: _pairs(table, schema, codecs)
        return _dicts

    def _batch_rows(
        self, collection: CollectionState, at: int, schema: SchemaVersion, lower: int, upper: int
    ) -> pa.Table:
        batch = collection.batches[at]
        with self._overtaking_told(collection, batch):
            return self.batches.rows(collection, batch, schema, lower=lower, upper=upper)

    @contextmanager
    def _overtaking_told(self, collection: CollectionState, batch: Batch) -> Iterator[None]:
        """Tell an object that was rightly deleted meanwhile from one that is damaged."""
        try:
            yield
        except Corruption as error:
            # A writer may have been fenced without knowing, and its files collected.
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
    """Gives the changes of a collection, in order, as they become complete.

    Iterating waits for more; `next_changes` waits as long as it is told. What
    was given is never given again, whatever is merged meanwhile. A context
    manager: leaving it lets go of the history it was holding.
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
        self._client = client  # Which must not be collected, and closed, while we listen.
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
        """Every update below it has been given."""
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
        """Let go."""
        self._closed = True
        self._stack.close()

    def next_changes(self, *, timeout_ms: int | None) -> "Changes | Snapshot | None":
        """What has become complete since the last call, or None if nothing did in time.

        Raises:
            SinceError: the reader has no hold and was overtaken by compaction.
            CollectionErrored: the collection is in error from here on; all before it was given.
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
            # Cleared before looking: a ring between the look and the wait is not missed.
            self._wakeups.clear()
            state = self._look()
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
                # Nothing new here, but files that others replaced need not wait for us.
                reader.claims.advance(self._claim, self._claim.since, state)
            left = reader.settings.poll_ms
            if deadline is not None:
                left = min(left, deadline - clock.boot_ms())
                if left <= 0:
                    return None
            if not reader.owns_writer and state.writer is not None:
                reader.notifications.connect(state.writer.address, state.location)
            clock.wait(self._wakeups, left)

    def _look(self) -> State:
        reader = self._reader
        now_ms = reader.settings.clock.boot_ms()
        state = reader.look()
        if now_ms - self._checked_ms >= 10 * reader.settings.poll_ms:
            # SUBTLE: "no such entry" may mean truncated rather than not yet
            # written, and only the floor can tell (hazard A4). A writer looks too:
            # it may have been fenced and would hear of nothing any more.
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
        # Never across a change of schema, so that all listeners get the same rows.
        grown = [version.since for version in collection.schemas if version.since > lower]
        upper = min([reachable(collection, lower), *grown])
        reader = self._reader
        schema = reader.schema_as_of(collection, upper - 1)
        if collection.whole and lower <= collection.begins:
            # Whatever its time, what was there when it began came with the beginning.
            begun = reader.rows(collection, schema, lower=0, upper=upper)
            rows = advance(begun if upper > collection.begins else begun[:0], collection.begins)
        else:
            # Since at the frontier itself is too far: it brings updates that were
            # given before up to a time that has not been.
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
