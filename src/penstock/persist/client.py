"""Open a storage location, and hand out its collections.

A client with a writer's id reads and writes; without one it only reads. It may
be shared by threads. `close` finishes what was accepted, refuses what comes
after, and gives the lock back; a client that is merely forgotten is closed when
it is collected or the program ends, and one that is killed loses nothing.
"""

import os
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from penstock.data import TIME, Codec, check_row_schema
from penstock.data.codec import BUILT_IN
from penstock.durable.cache import CachedBlob
from penstock.durable.probe import probe
from penstock.durable.steady import SteadyBlob, SteadyStatistics
from penstock.errors import DeterminateError, PenstockError, UsageError
from penstock.failpoints import Failpoint, pass_by
from penstock.persist.batch import Batches
from penstock.persist.collection import AppendTo, Collection
from penstock.persist.compact import BigMerges, Merger
from penstock.persist.errors import Closed, CollectionMissing, LockHeld
from penstock.persist.gc import Collector
from penstock.persist.holds import Claims, DurableHold, LeasedClaims, LocalClaims, NoClaims
from penstock.persist.intake import (
    check_frontier,
    columns_shown,
)
from penstock.persist.lake import check_not_a_lake, open_store
from penstock.persist.machine import Machine
from penstock.persist.notify import Bell, Ear, News
from penstock.persist.read import Reader
from penstock.persist.settings import Settings
from penstock.persist.staging import Staging
from penstock.persist.state import (
    Alter,
    CollectionState,
    Create,
    Destroy,
    Discard,
    OpenStaging,
    Operation,
    Release,
    SchemaVersion,
    State,
    TakeEpoch,
    Writer,
    columns_of,
)
from penstock.persist.upkeep import Upkeep
from penstock.persist.write import (
    Append,
    Appended,
    Committer,
    Piece,
    UpperMismatch,
)
from penstock.telemetry import fields, logger

__all__ = ["Client", "Unsealed", "open", "release"]

log = logger("persist")


@dataclass(frozen=True, slots=True)
class Unsealed:
    """Updates that were written and not sealed, as a takeover finds them."""

    collection: str
    updates: int
    lower: int
    upper: int


def open(
    url: str, *, writer: str | None = None, hold: bool = True, settings: Settings | None = None
) -> "Client":
    """Open one storage location.

    With `writer`, a reentrance id, it is opened for reading and writing: the
    same id takes over from a crashed or running predecessor, which is fenced;
    another id is refused while one holds the lock. Without, only for reading;
    `hold=False` then leaves no trace at all and needs no permission to write,
    at the price that compaction may get in the way, as an error that says so.

    Raises:
        LockHeld: another id is writing.
        StoreRefused: the store cannot be trusted with a log, or refuses us.
    """
    settings = settings or Settings()
    if writer is not None:
        _check_writer_id(writer)
    steady = open_store(url, settings, writing=writer is not None)
    try:
        if writer is not None:
            check_not_a_lake(url, steady)
        return Client(steady, settings, writer=writer, hold=hold)
    except BaseException:
        steady.close()
        raise


def release(url: str, *, settings: Settings | None = None) -> Writer | None:
    """Give up the lock on behalf of a writer that is dead; who it was, if there was one.

    Should it live after all, it is fenced: this costs it its work, never data.
    """
    settings = settings or Settings()
    blob = open_store(url, settings)
    try:
        machine = Machine(blob, settings)
        holder = machine.load().writer
        if holder is not None:
            machine.take_epoch(lambda state: [TakeEpoch(None, state.location)], own=False)
        return holder
    finally:
        blob.close()


class Client:
    """An open storage location. See `open`."""

    def __init__(
        self, blob: SteadyBlob, settings: Settings, *, writer: str | None, hold: bool
    ) -> None:
        self._blob = blob
        self._settings = settings
        self._machine = Machine(blob, settings)
        self._cache = CachedBlob(blob, bound_bytes=settings.cache_bytes)
        self._batches = Batches(blob, self._cache, settings)
        self._news = News()
        self._ear = Ear(self._news)
        self._closed = threading.Event()
        self._parts = _Parts(blob, self._closed, self._ear)
        if writer is not None:
            probe(blob, lambda: f"{settings.chance.getrandbits(64):016x}")
            self._machine.load()
            self._parts.bell = bell = _bell(settings.notify)
            try:
                self._take_lock(writer, bell)
            except BaseException:
                if bell is not None:
                    bell.close()
                raise
            self._start_writing(bell)
        else:
            self._machine.load()
            owner = f"{socket.gethostname()}-{os.getpid()}"
            claims: Claims = (
                LeasedClaims(self._machine, settings, owner=owner)
                if hold
                else NoClaims(self._machine)
            )
            self._parts.claims = claims
        self.reader = Reader(
            machine=self._machine,
            batches=self._batches,
            claims=self._parts.claims,
            settings=settings,
            owns_writer=writer is not None,
            news=self._news,
            ear=self._ear,
            closed=self._closed,
        )
        self._finalizer = weakref.finalize(self, _Parts.close_forgotten, self._parts)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.close()
        except PenstockError as failed:
            if error is None:
                raise
            # What went wrong inside is what the caller must hear of first.
            error.add_note(f"closing failed too: {failed}")

    @property
    def url(self) -> str:
        """The location, as people know it."""
        return self._blob.name

    @property
    def state(self) -> State:
        """Everything that is known about the location, as one value."""
        return self.reader.look()

    @property
    def epoch(self) -> int | None:
        """The epoch this client writes in."""
        return self._machine.epoch

    def statistics(self) -> SteadyStatistics:
        """Store operations so far, and those that are failing right now, since when."""
        return self._blob.statistics()

    def create_or_load(
        self,
        name: str,
        *,
        key: Codec | None = None,
        value: Codec | None = None,
        schema: pa.Schema | None = None,
        key_columns: Sequence[str] = (),
    ) -> "Collection":
        """The collection of that name, made if there is none.

        Give codecs for `key` and `value`, or a `schema` for rows with the
        columns that identify one. An existing collection must have the same;
        codecs may be of a newer version than what is stored.
        """
        key, value = _codec(key), _codec(value)
        wanted = _schema_version(name, key, value, schema, key_columns)
        found = self.reader.look().named(name)
        if found is None:
            found = self.committer.run(
                lambda state: [] if state.named(name) else [Create(name, wanted)],
                lambda _, after: after.named(name),
            )
        self._accept(found, wanted)
        if key is not None and value is not None:
            self._batches.codecs[found.id] = (key, value)
        if found.schemas[-1].codecs != wanted.codecs and self._parts.committer is not None:
            self._move_codecs(found.id, wanted)
        return Collection(self, found.id, name)

    def collection(self, name: str) -> "Collection":
        """The collection of that name, with whatever codecs or schema it has."""
        state = self.reader.look()
        found = state.named(name)
        if found is None:
            raise CollectionMissing(name, where=self.url, known=sorted(state.names))
        names = [codec for codec, _ in found.schemas[-1].codecs]
        if names and found.id not in self._batches.codecs and all(n in BUILT_IN for n in names):
            self._batches.codecs[found.id] = (BUILT_IN[names[0]], BUILT_IN[names[1]])
        return Collection(self, found.id, name)

    def collections(self) -> list[str]:
        """The names of all collections, in order."""
        return sorted(self.reader.look().names)

    def append_all(self, appends: Sequence[AppendTo]) -> Appended | UpperMismatch:
        """`compare_and_append` on several collections: all of it or none, uppers included."""
        if not appends:
            raise UsageError("append_all was given no collection", hint="Name at least one.")
        if len({append.collection.id for append in appends}) != len(appends):
            raise UsageError(
                "append_all names a collection twice", hint="Give each its updates once."
            )
        for append in appends:
            self._must_be_ours(append.collection)
        pieces = [
            append.collection.piece(
                append.updates, expected=append.expected_upper, upper=append.new_upper
            )
            for append in appends
        ]
        outcome: Appended | UpperMismatch = self.committer.submit(Append(pieces)).result()
        return outcome

    def seal_all(self, uppers: "Mapping[Collection, int]") -> "Future[Appended]":
        """Seal several collections at once."""
        pieces = [Piece(c.id, upper=check_frontier(upper)) for c, upper in uppers.items()]
        if not pieces:
            raise UsageError("seal_all was given no collection", hint="Name at least one.")
        if len({collection.id for collection in uppers}) != len(uppers):
            raise UsageError("seal_all names a collection twice", hint="Seal each once.")
        for collection in uppers:
            self._must_be_ours(collection)
        return self.committer.submit(Append(pieces))

    def destroy(self, name: str) -> bool:
        """Remove a collection and everything in it; whether it was there.

        The name may be used again, for a new and empty collection.
        """

        def plan(state: State) -> list[Operation]:
            found = state.named(name)
            return [] if found is None else [Destroy(found.id)]

        there = self.committer.run(plan, lambda before, after: before is not after)
        return bool(there)

    def unsealed(self) -> list[Unsealed]:
        """What was written and never sealed: after a takeover, what the predecessor left."""
        state = self.reader.look()
        found = []
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
                found.append(
                    Unsealed(
                        collection.name,
                        count,
                        min(each["min"].as_py() for each in bounds),
                        max(each["max"].as_py() for each in bounds) + 1,
                    )
                )
        return sorted(found, key=lambda each: each.collection)

    def discard_unsealed(self, names: Sequence[str] | None = None) -> None:
        """Void what was written and never sealed, in one entry; of all collections or some."""

        def plan(state: State) -> list[Operation]:
            chosen = sorted(state.names) if names is None else names
            found = [self._named(state, name) for name in chosen]
            return [Discard(c.id) for c in found if any(b.upper > c.upper for b in c.batches)]

        self.committer.run(plan, lambda _before, _after: None)

    def hold(self, owner: str) -> DurableHold:
        """The durable hold of `owner`, taken over if another process has it."""
        self.reader.look()
        return DurableHold(self._machine, self._settings, owner)

    def compact(self) -> None:
        """Do all upkeep now: merge, roll up, let go of what nobody needs."""
        self._upkeep().compact()

    def delegate_big_merges(self, to: BigMerges | None) -> None:
        """Let merges beyond `merge_bytes` be done by `to`; `penstock.spark.compactor` makes one."""
        self._upkeep().merger.big = to

    def upkeep(self) -> None:
        """One round of what otherwise happens in the background."""
        self._upkeep().round()

    def close(self) -> None:
        """Finish what was accepted, refuse what comes after, release the lock.

        May be called twice. Raises if the lock could not be released because
        this writer was fenced or broke; everything is closed all the same.
        """
        if self._parts.committer is not None:
            self._parts.committer.must_not_be_closed_from_here()
        if self._finalizer.detach() is not None:
            self._parts.close()

    def _take_lock(self, writer: str, bell: Bell | None) -> None:
        clock = self._settings.clock
        me = Writer(
            id=writer,
            host=socket.gethostname(),
            pid=os.getpid(),
            taken_ms=clock.now_ms(),
            address=bell.address if bell else "",
        )
        name = f"l{self._settings.chance.getrandbits(64):016x}"

        def plan(state: State) -> list[Operation]:
            if state.writer is not None and state.writer.id != writer:
                held = state.writer
                raise LockHeld(
                    where=self.url,
                    writer=writer,
                    holder=held.id,
                    host=held.host,
                    pid=held.pid,
                    taken_ms=held.taken_ms,
                )
            return [TakeEpoch(me, state.location or name), OpenStaging(f"{state.epoch + 1}-0")]

        self._machine.take_epoch(plan)

    def _start_writing(self, bell: Bell | None) -> None:
        machine, settings, parts = self._machine, self._settings, self._parts
        epoch = machine.epoch
        assert epoch is not None
        staging = Staging(epoch)
        claims = LocalClaims(machine, settings)
        collector = Collector(machine, claims, settings)
        if bell is not None:
            bell.start(machine.state.location)
        news = self._news

        def wake(seqno: int) -> None:
            news.tell()
            if bell is not None:
                bell.ring(seqno)

        parts.claims = claims
        parts.machine = machine
        merger = Merger(self._batches, staging, settings)
        parts.upkeep = Upkeep(machine, merger, collector, settings)
        parts.committer = Committer(
            machine, self._batches, staging, allow=collector.allow_and_settle, wake=wake
        )
        left = [
            c.name
            for c in machine.state.collections.values()
            if any(batch.upper > c.upper for batch in c.batches)
        ]
        if left:
            log.warning(
                "found updates that were written and not sealed; see Client.unsealed",
                extra=fields(location=self.url, collections=left),
            )
        if settings.background:
            parts.upkeep.start()

    @property
    def committer(self) -> Committer:
        """Where work is queued; for the collections of this client."""
        self._parts.must_not_be_forked()
        if self._parts.committer is None or self._closed.is_set():
            raise self._cannot_write()
        return self._parts.committer

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

    def _upkeep(self) -> Upkeep:
        if self._parts.upkeep is None or self._closed.is_set():
            raise self._cannot_write()
        return self._parts.upkeep

    def _named(self, state: State, name: str) -> CollectionState:
        found = state.named(name)
        if found is None:
            raise CollectionMissing(name, where=self.url, known=sorted(state.names))
        return found

    def _accept(self, found: CollectionState, wanted: SchemaVersion) -> None:
        stored = found.schemas[-1]
        what = f'collection "{found.name}" of location "{self.url}"'
        if bool(stored.codecs) != bool(wanted.codecs):
            holds = "keys and values" if stored.codecs else "rows"
            raise UsageError(f"{what} holds {holds}", hint=f"Open it for {holds}.")
        for role, (has, at), (asked, asked_at) in zip(
            ("key", "value"), stored.codecs, wanted.codecs, strict=False
        ):
            if has != asked:
                raise UsageError(
                    f'{what} has codec "{has}" for its {role}, not "{asked}"',
                    hint=f'Open it with the codec "{has}".',
                )
            if columns_of(stored).field(role).type != columns_of(wanted).field(role).type:
                raise UsageError(
                    f'{what} stores what codec "{has}" makes of its {role} in another type',
                    detail=f"There it is {columns_of(stored).field(role).type}; the codec given "
                    f"has {columns_of(wanted).field(role).type}.",
                    hint="Open it with the codec it was made with.",
                )
            if asked_at < at:
                raise UsageError(
                    f'{what} was written with version {at} of codec "{has}"',
                    detail=f"The codec given is version {asked_at}.",
                    hint="Open it with that version or a newer one.",
                )
        if not stored.codecs and (
            not columns_of(stored).equals(columns_of(wanted)) or stored.key != wanted.key
        ):
            raise UsageError(
                f"{what} has another schema",
                detail=f"It has {_shown(stored)}; asked for was {_shown(wanted)}.",
                hint="Open it with its own schema, then let it grow with alter.",
            )

    def _move_codecs(self, id: int, wanted: SchemaVersion) -> None:
        def plan(state: State) -> list[Operation]:
            stored = state.collections[id].schemas[-1]
            if stored.codecs == wanted.codecs:
                return []
            return [Alter(id, structs.replace(wanted, version=stored.version + 1))]

        self.committer.run(plan, lambda _before, _after: None, touches=[id])


def _bell(address: str) -> Bell | None:
    """What wakes listeners of other processes, if it can; they poll all the same."""
    if not address:
        return None
    try:
        return Bell(address)
    except OSError as error:
        log.warning("listeners cannot be woken", extra=fields(address=address, error=str(error)))
        return None


class _Parts:
    """What a client has running, apart from it, so that it can be closed when it is gone."""

    def __init__(self, blob: SteadyBlob, closed: threading.Event, ear: Ear) -> None:
        self.blob = blob
        self.closed = closed
        self.ear = ear
        self.claims: Claims
        self._pid = os.getpid()
        self.machine: Machine | None = None
        self.bell: Bell | None = None
        self.upkeep: Upkeep | None = None
        self.committer: Committer | None = None

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # A forked child has our threads' memory, but not our threads; nor our lock.
        if self.committer is not None:
            self.committer.close()
        self.closed.set()
        try:
            if self.upkeep is not None:
                self.upkeep.stop()
            self.claims.close()
            self._release()
        finally:
            self.ear.close()
            if self.bell is not None:
                self.bell.close()
            self.blob.close()

    def close_forgotten(self) -> None:
        """Close what nobody closed; nobody is there to hear of an error either."""
        try:
            self.close()
        except PenstockError as error:
            log.warning("a forgotten client could not be closed", extra=fields(error=str(error)))

    def must_not_be_forked(self) -> None:
        """A client's threads do not come along through a fork."""
        if os.getpid() != self._pid:
            raise UsageError(
                f'client of location "{self.blob.name}" was opened before a fork',
                hint="Open the location again in the child process.",
            )

    def _release(self) -> None:
        if self.machine is None or self.committer is None or self.upkeep is None:
            return
        if self.committer.broken is not None:
            raise self.committer.broken
        upkeep = self.upkeep
        if upkeep.entries_since_rollup() >= 16:
            try:
                upkeep.roll_up()
            except DeterminateError as error:
                log.warning("no rollup was written", extra=fields(error=str(error)))
        _, after = self.machine.commit(lambda _: [*upkeep.rollup_record(), Release()])
        self.machine.log.witness(after.seqno)
        pass_by(Failpoint.RELEASE_DONE)


def _check_writer_id(writer: str) -> None:
    if not writer or not writer.isprintable() or len(writer) > 200:
        raise UsageError(
            f"writer id {writer!r} cannot be used",
            hint="Use a short printable name that outlives restarts, such as the host's.",
        )


def _codec(given: Codec | str | None) -> Codec | None:
    if not isinstance(given, str):
        return given
    if given not in BUILT_IN:
        raise UsageError(
            f'codec "{given}" does not exist',
            hint=f"Name one of {', '.join(BUILT_IN)}, or give a UserCodec.",
        )
    return BUILT_IN[given]


def _schema_version(
    name: str,
    key: Codec | None,
    value: Codec | None,
    schema: pa.Schema | None,
    key_columns: Sequence[str],
) -> SchemaVersion:
    if not name or not name.isprintable() or len(name) > 500:
        raise UsageError(
            f"collection name {name!r} cannot be used", hint="Use a short printable name."
        )
    if (key is None) != (value is None) or (key is None) == (schema is None):
        raise UsageError(
            f'collection "{name}" needs either codecs or a schema',
            hint="Give key=… and value=…, or schema=… with key_columns=….",
        )
    if schema is not None:
        checked = check_row_schema(schema, key_columns, collection=name)
        return SchemaVersion(0, 0, checked.serialize().to_pybytes(), key=tuple(key_columns))
    assert key is not None
    assert value is not None
    columns = pa.schema([("key", key.stored_as), ("value", value.stored_as)])
    codecs = ((key.name, key.version), (value.name, value.version))
    return SchemaVersion(0, 0, columns.serialize().to_pybytes(), key=("key",), codecs=codecs)


def _shown(schema: SchemaVersion) -> str:
    return f"{columns_shown(columns_of(schema))} with key {', '.join(schema.key) or 'none'}"
