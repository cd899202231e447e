"""Open a storage location, and return its collections.

A client with a writer id reads and writes; a client without one only reads. Threads may
share a client. `close` finishes accepted calls, rejects later ones and releases the lock. A
client that is not closed explicitly is closed when it is garbage-collected or the program
exits. A killed client loses no acknowledged write.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from penstock.data import TIME, Codec
from penstock.data.codec import BUILT_IN
from penstock.durable import RetryingBlob, StoreStatistics
from penstock.errors import Fenced, PenstockError, UsageError
from penstock.persist.collection import AppendTo, Collection, collection_append
from penstock.persist.collection_change import (
    CollectionChange,
    Grow,
    WriteTo,
    operations_of,
    with_growth,
)
from penstock.persist.errors import Closed, CollectionMissing
from penstock.persist.holds import DurableHold, list_holds
from penstock.persist.input_validation import Staged, check_frontier, split_updates, table_of
from penstock.persist.lock import LockHandoff, check_writer_id
from penstock.persist.maintenance import Maintenance
from penstock.persist.merge.merger import BigMerges
from penstock.persist.read import FILES_ONLY, Reader
from penstock.persist.runtime import Runtime
from penstock.persist.schema_check import accept, check_name, codec_of, schema_version
from penstock.persist.settings import Settings
from penstock.persist.state import (
    Alter,
    Batch,
    CollectionState,
    Create,
    Destroy,
    Discard,
    Operation,
    SchemaVersion,
    State,
    columns_of,
)
from penstock.persist.store import check_not_a_lake, open_store
from penstock.persist.write import AppendCall, Appended, CollectionAppend, Committer, UpperMismatch

__all__ = ["Client", "Unsealed", "attach", "open"]


@dataclass(frozen=True, slots=True)
class Unsealed:
    """Updates of one collection that were written but not sealed, as a takeover finds them."""

    collection: str
    updates: int
    lower: int
    upper: int


def open(
    url: str,
    *,
    writer: str | None = None,
    after: int | None = None,
    take_over: bool = True,
    pid: int | None = None,
    hold: bool = True,
    settings: Settings | None = None,
) -> "Client":
    """Open one storage location.

    With `writer`, a reentrance id, open it for reading and writing. The same id takes over
    from a crashed or running predecessor, which is fenced. Another id is rejected while the
    lock is held, unless the holder is a dead process of this host.

    With `take_over=False`, a running process of this host is not replaced either. With
    `after`, the last epoch that this process wrote in, the call does not take over from a
    process that took the lock after that epoch. The lock is held on behalf of process `pid`
    of this host, by default of this one.

    Without `writer`, open it for reading only. With `hold=False`, the reader then writes no
    object and needs no write permission. Compaction may then overtake a read, which fails
    with an error that names the cause.

    Raises:
        LockHeld: another id is writing; or, without `take_over`, another process of this host.
        Fenced: a live process with the same id has begun to write after epoch `after`.
        StoreRefused: the store is not safe for a log, or denies access.
    """
    settings = settings or Settings()
    if writer is not None:
        check_writer_id(writer)
    steady = open_store(url, settings, writing=writer is not None)
    try:
        if writer is not None:
            check_not_a_lake(url, steady)
        return Client(
            steady, settings, writer=writer, after=after, take_over=take_over, pid=pid, hold=hold
        )
    except BaseException:
        steady.close()
        raise


def attach(handoff: LockHandoff, *, settings: Settings | None = None) -> "Client":
    """Resume as the writer of `handoff`, in its epoch.

    Raises:
        Fenced: another writer has taken the lock since, or it was released.
    """
    settings = settings or Settings()
    steady = open_store(handoff.url, settings, writing=True)
    try:
        return Client(steady, settings, writer=handoff.writer, hold=True, handoff=handoff)
    except BaseException:
        steady.close()
        raise


class Client:
    """An open storage location; see `open`."""

    def __init__(
        self,
        blob: RetryingBlob,
        settings: Settings,
        *,
        writer: str | None,
        hold: bool,
        after: int | None = None,
        handoff: LockHandoff | None = None,
        take_over: bool = True,
        pid: int | None = None,
    ) -> None:
        self._runtime = runtime = Runtime(blob, settings)
        self._blob = blob
        self._settings = settings
        self._machine = runtime.machine
        self._batches = runtime.batches
        self._closed = runtime.closed
        if writer is None:
            runtime.read(hold=hold)
        else:
            runtime.write(writer, after=after, handoff=handoff, take_over=take_over, pid=pid)
        self.reader = Reader(
            machine=runtime.machine,
            batches=runtime.batches,
            claims=runtime.claims,
            settings=settings,
            owns_writer=writer is not None,
            wakeups=runtime.wakeups,
            notifications=runtime.notifications,
            closed=runtime.closed,
        )
        self._finalizer = weakref.finalize(self, Runtime.close_forgotten, runtime)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.close()
        except PenstockError as failed:
            if error is None:
                raise
            if isinstance(error, Fenced) and isinstance(failed, Fenced):
                return  # Closing repeats the error that the caller already gets.
            # The caller gets the error of the block; the failure to close becomes a note.
            error.add_note(f"closing failed too: {failed}")

    @property
    def url(self) -> str:
        """URL of the location."""
        return self._blob.name

    @property
    def state(self) -> State:
        """Complete state of the location, as one immutable value."""
        return self.reader.refresh()

    @property
    def epoch(self) -> int | None:
        """Epoch of this client's writes; None for a reader."""
        return self._machine.epoch

    def statistics(self) -> StoreStatistics:
        """Return counts of store operations, and which of them currently fail and since when."""
        return self._blob.statistics()

    def create_or_load(
        self,
        name: str,
        *,
        key: Codec | str | None = None,
        value: Codec | str | None = None,
        schema: pa.Schema | None = None,
        key_columns: Sequence[str] = (),
        owner: str = "",
    ) -> "Collection":
        """Return the collection with this name; create it if it does not exist.

        Pass codecs for `key` and `value`, or names of built-in codecs, or a `schema` for rows
        together with the key columns. An existing collection must have the same. A codec may
        be newer than the stored version. `owner` names the only writer of a new collection,
        such as a source; a user collection has no owner.
        """
        check_name(name, owner)
        key, value = codec_of(key), codec_of(value)
        requested = schema_version(name, key, value, schema, key_columns)
        collection = self.reader.refresh().named(name)
        if collection is None:
            collection = self.committer.run(
                lambda state: [] if state.named(name) else [Create(name, requested, owner)],
                lambda _, after: after.named(name),
            )
        accept(collection, requested, where=self.url)
        if key is not None and value is not None:
            self._batches.codecs[collection.id] = (key, value)
        if (
            collection.schemas[-1].codecs != requested.codecs
            and self._runtime.committer is not None
        ):
            self._move_codecs(collection.id, requested)
        return Collection(self, collection.id, name)

    def collection(self, name: str, *, as_of: int | None = None) -> "Collection":
        """Return the collection that a name refers to, with the codecs or schema that it has.

        With `as_of`, return the collection that a read as of that time uses: an earlier
        collection of the same name may have been replaced.
        """
        state = self.reader.refresh()
        collection = state.named(name, as_of)
        if collection is None:
            raise CollectionMissing(name, where=self.url, known=state.listed())
        names = [codec for codec, _ in collection.schemas[-1].codecs]
        if (
            names
            and collection.id not in self._batches.codecs
            and all(n in BUILT_IN for n in names)
        ):
            self._batches.codecs[collection.id] = (BUILT_IN[names[0]], BUILT_IN[names[1]])
        return Collection(self, collection.id, name)

    def collections(self, *, hidden: bool = False) -> list[str]:
        """Return the sorted names of all collections, without hidden ones by default.

        A hidden collection has a slash in its name and holds internal state of a source.
        """
        return self.reader.refresh().listed(hidden=hidden)

    def append_all(
        self, appends: Sequence[AppendTo], collection_changes: Sequence[CollectionChange] = ()
    ) -> Appended | UpperMismatch:
        """Run `compare_and_append` on several collections atomically, uppers included.

        `collection_changes` are further changes, of these or of other collections, in the
        same log entry.
        """
        if not appends and not collection_changes:
            raise UsageError("append_all was given no collection", hint="Name at least one.")
        if len({append.collection.id for append in appends}) != len(appends):
            raise UsageError(
                "append_all names a collection twice", hint="Give each its updates once."
            )
        for named in (*appends, *collection_changes):
            self._must_be_ours(named.collection)
        # Updates for a collection that grows are prepared in its new schema.
        growing: dict[Collection, list[Grow]] = {}
        for change in collection_changes:
            if isinstance(change, Grow):
                growing.setdefault(change.collection, []).append(change)
        before = {collection.id: collection.state for collection in growing}
        after = {
            collection.id: with_growth(before[collection.id], grows).schemas
            for collection, grows in growing.items()
        }
        pieces: list[CollectionAppend] = []
        for change in collection_changes:
            if isinstance(change, WriteTo):
                schemas = after.get(change.collection.id)
                pieces += [
                    collection_append(change.collection, u, schemas=schemas)
                    for u in split_updates(change.updates)
                ]
        for append in appends:
            pieces += [
                collection_append(
                    append.collection,
                    updates,
                    expected=append.expected_upper,
                    upper=append.new_upper,
                    schemas=after.get(append.collection.id),
                )
                for updates in split_updates(append.updates)
            ]
        work = AppendCall(pieces)
        if collection_changes:
            versions = {id: len(state.schemas) for id, state in before.items()}
            work.plan_changes = partial(operations_of, collection_changes, versions=versions)
            work.changed_ids = [change.collection.id for change in collection_changes]
        outcome: Appended | UpperMismatch = self.committer.submit(work).result()
        return outcome

    def seal_all(self, uppers: "Mapping[Collection, int]") -> "Future[Appended]":
        """Seal several collections atomically."""
        pieces = [
            CollectionAppend(c.id, upper=check_frontier(upper)) for c, upper in uppers.items()
        ]
        if not pieces:
            raise UsageError("seal_all was given no collection", hint="Name at least one.")
        if len({collection.id for collection in uppers}) != len(uppers):
            raise UsageError("seal_all names a collection twice", hint="Seal each once.")
        for collection in uppers:
            self._must_be_ours(collection)
        return self.committer.submit(AppendCall(pieces))

    def destroy(self, *names: str) -> bool:
        """Remove collections with their data atomically, and return whether any existed.

        A name may be used again, for a new and empty collection.
        """

        def plan(state: State) -> list[Operation]:
            collections = (state.named(name) for name in names)
            return [Destroy(collection.id) for collection in collections if collection is not None]

        changed = self.committer.run(plan, lambda before, after: before is not after)
        return bool(changed)

    def unsealed(self) -> list[Unsealed]:
        """Return the updates that were written but not sealed, by collection.

        After a takeover, these are the unfinished writes of the predecessor.
        """
        state = self.reader.refresh()
        ranges = []
        for collection in state.collections.values():
            rows = [
                self._batches.rows(
                    collection, batch, collection.schemas[batch.schema], lower=collection.upper
                )
                for batch in collection.batches
                if batch.upper > collection.upper
            ]
            count = sum(table.num_rows for table in rows)
            if count:
                bounds = [pc.min_max(table.column(TIME)) for table in rows if table.num_rows]
                ranges.append(
                    Unsealed(
                        collection.name,
                        count,
                        min(bound["min"].as_py() for bound in bounds),
                        max(bound["max"].as_py() for bound in bounds) + 1,
                    )
                )
        return sorted(ranges, key=lambda unsealed: unsealed.collection)

    def discard_unsealed(self, names: Sequence[str] | None = None) -> None:
        """Void updates that were written but not sealed, in one log entry.

        The default is all collections.
        """

        def plan(state: State) -> list[Operation]:
            chosen = sorted(state.names) if names is None else names
            collections = [self._named(state, name) for name in chosen]
            return [Discard(c.id) for c in collections if any(b.upper > c.upper for b in c.batches)]

        self.committer.run(plan, lambda _before, _after: None)

    @contextmanager
    def staging(self) -> Iterator[str]:
        """Yield a staging id for files that other processes write for this client.

        Append these files, as `Staged`, before the block ends.
        """
        staging = self._maintenance().merger.staging
        id = staging.acquire()
        try:
            yield id
        finally:
            staging.wear_out()
            staging.give_up(id)

    def stage(
        self,
        collection: Collection,
        tables: Iterable[pa.Table],
        staging: str,
        *,
        time: int | None = None,
        growing: Sequence[Grow] = (),
    ) -> Staged:
        """Write tables, as they arrive, as files under `staging`, a staging id in use.

        About one part of rows is in memory at a time. With `growing`, the tables have the
        schema that these changes produce; pass the same changes to the `append_all` that
        links the files.
        """
        self._must_be_ours(collection)
        schemas = with_growth(collection.state, growing).schemas
        columns = columns_of(schemas[-1])
        stored = (
            table_of(table, columns, time=time, collection=collection.name) for table in tables
        )
        version, part_bytes = len(schemas) - 1, self._settings.part_bytes
        return Staged(self._batches.build_streamed(stored, version, staging, part_bytes=part_bytes))

    def difference(
        self,
        collection: Collection,
        expected: Staged | None,
        staging: str,
        *,
        time: int,
        staged: Sequence[Staged] = (),
        growing: Sequence[Grow] = (),
    ) -> "pa.Table | Staged":
        """Return the updates at `time` that make the contents equal to `expected`.

        The current contents are all updates that were written to the collection, sealed or
        not, and `staged`. A comparison larger than `merge_bytes` is delegated to the
        executor of big merges, if there is one, which writes files under `staging`, a
        staging id in use.
        """
        self._must_be_ours(collection)
        id, name = collection.id, collection.name
        with self.reader.claims.claim(id, name, FILES_ONLY) as claim:
            state = with_growth(claim.state.collections[id], growing)
            minus = [*state.batches, *(part.batch for part in staged if part.batch is not None)]
            plus = [] if expected is None or expected.batch is None else [expected.batch]
            with self._machine.fence_before_damage():
                difference = self._maintenance().merger.difference(
                    state, minus, plus, staging, time=time
                )
        return difference if isinstance(difference, pa.Table) else Staged(difference)

    def hand_over(self, staging: str) -> LockHandoff:
        """Close without releasing the lock, and return the handoff for another process.

        That process resumes in this epoch and can append files written under `staging`, a
        staging id in use.
        """
        state = self._machine.state
        assert state.writer is not None
        handoff = LockHandoff(self.url, state.writer.id, state.epoch, staging)
        if self._finalizer.detach() is not None:
            self._runtime.close(release=False)
        return handoff

    def share_staged(self, batch: Batch) -> None:
        """Keep the staging ids of `batch` open, as for a batch that is about to be linked."""
        self._maintenance().merger.staging.share([batch])

    def hold(self, owner: str) -> DurableHold:
        """Return the durable hold of `owner`; take it over if another process owns it."""
        self.reader.refresh()
        return DurableHold(self._machine, self._settings, owner)

    def drop_hold(self, owner: str) -> None:
        """Drop the durable hold of `owner`, if it exists."""
        if f"d-{owner}" in list_holds(self._machine.blob):
            self.hold(owner).drop()

    def prove(self) -> None:
        """Check in the log that this client still owns the lock, without a write.

        Raises:
            Fenced: another owner's epoch has begun.
        """
        if self._runtime.committer is None or self._closed.is_set():
            raise self._cannot_write()
        self._machine.refresh()
        self._machine.must_own()

    def compact(self) -> None:
        """Run all maintenance now: merge, write a rollup, delete unneeded history and files."""
        self._maintenance().compact()

    def delegate_big_merges(self, to: BigMerges | None) -> None:
        """Delegate merges beyond `merge_bytes` to `to`, such as a `penstock.spark.compactor`."""
        self._maintenance().merger.big = to

    def run_maintenance(self) -> None:
        """Run one cycle of background maintenance."""
        self._maintenance().round()

    def close(self) -> None:
        """Finish accepted calls, reject later ones, and release the lock.

        A second call does nothing. The call raises if the lock could not be released
        because this writer was fenced or had failed. All resources are closed in this case
        too.
        """
        if self._runtime.committer is not None:
            self._runtime.committer.must_not_be_closed_from_here()
        if self._finalizer.detach() is not None:
            self._runtime.close()

    @property
    def committer(self) -> Committer:
        """Commit queue of this client; for its collections."""
        self._runtime.must_not_be_forked()
        if self._runtime.committer is None or self._closed.is_set():
            raise self._cannot_write()
        return self._runtime.committer

    def _must_be_ours(self, collection: Collection) -> None:
        if collection.client is not self:
            raise UsageError(
                f'collection "{collection.name}" belongs to another client',
                hint="Only collections of one location can be written together.",
            )

    def _cannot_write(self) -> UsageError:
        if self._closed.is_set():
            return Closed(self.url)
        return UsageError(
            f'client of location "{self.url}" only reads',
            hint='Open it with a writer\'s id: penstock.persist.open(url, writer="…").',
        )

    def _maintenance(self) -> Maintenance:
        if self._runtime.maintenance is None or self._closed.is_set():
            raise self._cannot_write()
        return self._runtime.maintenance

    def _named(self, state: State, name: str) -> CollectionState:
        collection = state.named(name)
        if collection is None:
            raise CollectionMissing(name, where=self.url, known=state.listed())
        return collection

    def _move_codecs(self, id: int, requested: SchemaVersion) -> None:
        def plan(state: State) -> list[Operation]:
            stored = state.collections[id].schemas[-1]
            if stored.codecs == requested.codecs:
                return []
            return [Alter(id, structs.replace(requested, version=stored.version + 1))]

        self.committer.run(plan, lambda _before, _after: None, touches=[id])
