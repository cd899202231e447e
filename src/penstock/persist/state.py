"""State of a storage location, and its transitions by log entries. Pure.

The state is the fold of the log: `apply(state, entry)`, from entry 0 on. Every process that
applies the same entries has the same state, so the log is the only source of truth. An
entry carries differences, and applying it changes only the objects that it names. Maps are
persistent, so a state is a value: threads can share it, and a rollup of it can be written
while the next state is made. `records.py` defines the state of each collection.

An entry counts unless it is *void*: written in an epoch that is over, or linking a file
whose staging id is closed. A void entry occupies its number and changes nothing else, for
every reader (hazards A2, A3).
"""

from collections.abc import Iterable
from typing import Final, assert_never

from immutables import Map
from msgspec import Struct, field
from msgspec.structs import replace

from penstock.errors import InternalError
from penstock.persist.records import (
    END,
    Batch,
    CollectionState,
    ErrorSpan,
    Inline,
    Part,
    SchemaVersion,
    Stored,
    StoredError,
    Writer,
    columns_of,
    files_of,
    is_hidden,
    schema_as_of,
    staging_of,
    stored_columns_of,
    types_of,
)

__all__ = [
    "END",
    "Allow",
    "Alter",
    "Batch",
    "BeginHistory",
    "CloseStaging",
    "CollectionState",
    "Create",
    "Destroy",
    "Discard",
    "Entry",
    "ErrorSpan",
    "ExpireHold",
    "FailCollection",
    "Forget",
    "ForgetHold",
    "Inline",
    "Intend",
    "Link",
    "MergeBatches",
    "OpenStaging",
    "Operation",
    "Part",
    "RecoverCollection",
    "Release",
    "ReplaceCollection",
    "RolledUp",
    "SchemaVersion",
    "Seal",
    "Settle",
    "State",
    "Stored",
    "StoredError",
    "TakeEpoch",
    "Writer",
    "apply",
    "columns_of",
    "files_of",
    "foreseen",
    "is_hidden",
    "schema_as_of",
    "staging_of",
    "stored_columns_of",
    "types_of",
    "void_reason",
]

TOKENS_KEPT: Final = 64
"""Number of epochs whose last token is retained."""


class TakeEpoch(Struct, frozen=True, tag="take_epoch"):
    """Start of a new epoch, by a process that opens for writing or by `penstock release`."""

    writer: Writer | None
    location: str
    """Id of the location; only the first such entry assigns it."""


class Release(Struct, frozen=True, tag="release"):
    """Release of the lock. Later entries of this epoch are void."""


class Create(Struct, frozen=True, tag="create", omit_defaults=True):
    """Creation of a collection."""

    name: str
    schema: SchemaVersion
    owner: str = ""


class Alter(Struct, frozen=True, tag="alter"):
    """New schema version of a collection."""

    collection: int
    schema: SchemaVersion


class Destroy(Struct, frozen=True, tag="destroy"):
    """Removal of a collection; its name may be used again, its id never."""

    collection: int


class Link(Struct, frozen=True, tag="link"):
    """New batches of a collection."""

    collection: int
    batches: tuple[Batch, ...]


class Seal(Struct, frozen=True, tag="seal"):
    """New upper of a collection."""

    collection: int
    upper: int


class Discard(Struct, frozen=True, tag="discard"):
    """Voiding of the updates that were written but not sealed."""

    collection: int


class Allow(Struct, frozen=True, tag="allow"):
    """Permission for since to advance up to a time."""

    collection: int
    since: int


class BeginHistory(Struct, frozen=True, tag="begin"):
    """Start of a collection's history at a time: there is nothing before it."""

    collection: int
    since: int


class FailCollection(Struct, frozen=True, tag="fail"):
    """Failure of a collection: it cannot be read from a time on, for the stored reason."""

    collection: int
    time: int
    error: StoredError


class RecoverCollection(Struct, frozen=True, tag="recover"):
    """End of a failure: the collection can be read again from a time on."""

    collection: int
    time: int


class ReplaceCollection(Struct, frozen=True, tag="replace"):
    """Move of a collection's name, from a time on, to another collection."""

    collection: int
    by: int
    time: int


class Intend(Struct, frozen=True, tag="intend"):
    """Announcement of the next sinces and of the next deletion of unlinked files."""

    sinces: dict[int, int]
    collect: int


class Settle(Struct, frozen=True, tag="settle"):
    """Outcome of an announcement after the holds were listed; names all of its collections."""

    sinces: dict[int, int]
    collected: int


class MergeBatches(Struct, frozen=True, tag="merge"):
    """Replacement of batches by one with the same sum from since on, or by none."""

    collection: int
    inputs: tuple[int, ...]
    output: Batch | None


class OpenStaging(Struct, frozen=True, tag="open_staging"):
    """Opening of a staging id: files under it may be linked from now on."""

    id: str


class CloseStaging(Struct, frozen=True, tag="close_staging"):
    """Closing of a staging id: files under it that are not linked are garbage from now on."""

    id: str


class Forget(Struct, frozen=True, tag="forget"):
    """Record that these unlinked files have been deleted."""

    keys: tuple[str, ...]


class RolledUp(Struct, frozen=True, tag="rolled_up"):
    """Record that a rollup of the state after entry `number` is durable."""

    number: int


class ExpireHold(Struct, frozen=True, tag="expire_hold"):
    """End of a lease by the writer's clock: the hold no longer counts."""

    hold: str


class ForgetHold(Struct, frozen=True, tag="forget_hold"):
    """Record that the object of an expired hold has been deleted."""

    hold: str


Operation = (
    TakeEpoch
    | Release
    | Create
    | Alter
    | Destroy
    | Link
    | Seal
    | Discard
    | Allow
    | BeginHistory
    | FailCollection
    | RecoverCollection
    | ReplaceCollection
    | Intend
    | Settle
    | MergeBatches
    | OpenStaging
    | CloseStaging
    | Forget
    | RolledUp
    | ExpireHold
    | ForgetHold
)


class Entry(Struct, frozen=True):
    """One atomic entry of the log."""

    location: str
    """Id of the location that the entry was written for."""

    epoch: int
    token: str
    """Random token that distinguishes this writer's earlier attempt from another writer's entry."""

    at_ms: int
    """Wall-clock time of the writer; only for display."""

    operations: tuple[Operation, ...]


class State(Struct, frozen=True):
    """State of a storage location after `seqno` entries have been applied."""

    seqno: int = 0
    """Number of the next entry."""

    location: str = ""
    epoch: int = 0
    writer: Writer | None = None
    next_id: int = 1
    collections: Map[int, CollectionState] = field(default_factory=Map)
    names: Map[str, int] = field(default_factory=Map)
    staging: Map[str, int] = field(default_factory=Map)
    """Open staging ids, with the epoch that opened each."""

    garbage: Map[str, int] = field(default_factory=Map)
    """Files that are no longer linked, with the number of the entry that unlinked each."""

    collecting: int | None = None
    """Announced and not yet settled bound: files unlinked up to this entry are to be deleted."""

    collected: int = 0
    """Settled bound: files unlinked by entries below it may have been deleted."""

    rollups: tuple[int, ...] = ()
    """Rollups that are known to exist, at most two."""

    expired: Map[str, int] = field(default_factory=Map)
    """Holds that no longer count, with the number of the entry that expired each."""

    tokens: Map[int, str] = field(default_factory=Map)
    """Last token of each recent epoch."""

    def named(self, name: str, as_of: int | None = None) -> CollectionState | None:
        """Return the collection that a name refers to, now or as of a time.

        A time before all retained generations gives the oldest of them.
        """
        number = self.names.get(name)
        if number is None:
            return None
        collection = self.collections[number]
        if as_of is None or as_of >= collection.begins:
            return collection
        generations = self.generations(name)
        return next(
            (generation for generation in generations if as_of < generation.upper), collection
        )

    def generations(self, name: str) -> list[CollectionState]:
        """Return the retained collections that a name has referred to, oldest first."""
        current = self.named(name)
        if current is None:
            return []
        older = (self.collections.get(id) for id in current.predecessors)
        return [*(generation for generation in older if generation is not None), current]

    def listed(self, *, hidden: bool = False) -> list[str]:
        """Return the sorted names of the collections, without hidden ones by default."""
        return sorted(name for name in self.names if hidden or not is_hidden(name))

    def linked(self) -> set[str]:
        """Return the keys of all files that collections link."""
        return {key for c in self.collections.values() for b in c.batches for key in files_of(b)}


def void_reason(state: State, entry: Entry) -> str | None:
    """Return the reason that `entry` changes nothing, or None if it counts."""
    if state.location and entry.location != state.location:
        return f'it was written for location "{entry.location}"'
    takes = bool(entry.operations) and isinstance(entry.operations[0], TakeEpoch)
    if takes:
        if entry.epoch != state.epoch + 1:
            return f"epoch {entry.epoch} cannot follow epoch {state.epoch}"
        return None
    if entry.epoch < state.epoch:
        return f"epoch {entry.epoch} is over; epoch {state.epoch} has begun"
    if entry.epoch > state.epoch:
        raise InternalError(
            f"entry {state.seqno} is of epoch {entry.epoch}, which no entry before it began"
        )
    if state.writer is None:
        return f"epoch {entry.epoch} was released"
    for operation in entry.operations:
        for key in _links(operation):
            staging = staging_of(key)
            if staging not in state.staging:
                return f'staging id "{staging}" is closed, so "{key}" cannot be linked'
    return None


def apply(state: State, entry: Entry) -> State:
    """Return the state after `entry`, which is number `state.seqno`."""
    number = state.seqno
    if void_reason(state, entry) is not None:
        return replace(state, seqno=number + 1)
    for operation in entry.operations:
        state = _after(state, number, entry.epoch, operation)
    tokens = state.tokens.set(entry.epoch, entry.token)
    stale = entry.epoch - TOKENS_KEPT
    if stale in tokens:
        tokens = tokens.delete(stale)
    return replace(state, seqno=number + 1, tokens=tokens)


def foreseen(state: State, operations: Iterable[Operation]) -> State:
    """Return the state that an entry of these operations would produce, with the same `seqno`."""
    for operation in operations:
        state = _after(state, state.seqno, state.epoch, operation)
    return state


def _after(state: State, number: int, epoch: int, operation: Operation) -> State:
    match operation:
        case TakeEpoch(writer=writer, location=location):
            return replace(
                state,
                epoch=epoch,
                writer=writer,
                location=state.location or location,
                staging=Map(),
                collecting=None,
                # An announcement ends with its epoch: its owner can no longer settle it.
                collections=_without_intentions(state.collections),
            )
        case Release():
            return replace(state, writer=None, staging=Map())
        case Create(name=name, schema=schema, owner=owner):
            made = CollectionState(id=state.next_id, name=name, schemas=(schema,), owner=owner)
            return replace(
                state,
                next_id=state.next_id + 1,
                collections=state.collections.set(made.id, made),
                names=state.names.set(name, made.id),
            )
        case Destroy(collection=id):
            return _destroyed(state, number, _collection(state, id))
        case Alter(collection=id, schema=schema):
            old = _collection(state, id)
            return _with(state, replace(old, schemas=(*old.schemas, schema)))
        case Link(collection=id, batches=batches):
            old = _collection(state, id)
            given = tuple(replace(batch, id=state.next_id + i) for i, batch in enumerate(batches))
            state = replace(state, next_id=state.next_id + len(batches))
            return _with(state, replace(old, batches=old.batches + given))
        case Seal(collection=id, upper=upper):
            return _with(state, replace(_collection(state, id), upper=upper))
        case Discard(collection=id):
            return _discarded(state, number, _collection(state, id))
        case Allow(collection=id, since=since):
            old = _collection(state, id)
            return _with(state, replace(old, allowed=max(old.allowed, since)))
        case BeginHistory(collection=id, since=since):
            old = _collection(state, id)
            allowed = max(old.allowed, since)
            return _with(state, replace(old, begins=since, since=since, allowed=allowed))
        case FailCollection(collection=id, time=time, error=error):
            old = _collection(state, id)
            return _with(state, replace(old, errors=(*old.errors, ErrorSpan(time, error))))
        case RecoverCollection(collection=id, time=time):
            return _with(state, _recovered(_collection(state, id), time))
        case ReplaceCollection(collection=id, by=by, time=time):
            return _replaced(state, _collection(state, id), _collection(state, by), time)
        case Intend(sinces=sinces, collect=collect):
            for id, since in sinces.items():
                if (intending := state.collections.get(id)) is not None:
                    state = _with(state, replace(intending, intended=since))
            return replace(state, collecting=collect)
        case Settle(sinces=sinces, collected=collected):
            for id, since in sinces.items():
                if (collection := state.collections.get(id)) is not None:
                    state = _with(state, _with_since(collection, since))
            return replace(state, collecting=None, collected=max(state.collected, collected))
        case MergeBatches(collection=id, inputs=inputs, output=output):
            return _merged(state, number, id, inputs, output)
        case OpenStaging(id=staging):
            return replace(state, staging=state.staging.set(staging, epoch))
        case CloseStaging(id=staging):
            return replace(state, staging=state.staging.delete(staging))
        case Forget(keys=keys):
            garbage = state.garbage.mutate()
            for key in keys:
                garbage.pop(key, None)
            return replace(state, garbage=garbage.finish())
        case RolledUp(number=rolled):
            return replace(state, rollups=(*state.rollups[-1:], rolled))
        case ExpireHold(hold=hold):
            return replace(state, expired=state.expired.set(hold, number))
        case ForgetHold(hold=hold):
            return replace(state, expired=state.expired.delete(hold))
        case unhandled:
            assert_never(unhandled)


def _collection(state: State, id: int) -> CollectionState:
    try:
        return state.collections[id]
    except KeyError:
        raise InternalError(
            f"entry {state.seqno} names collection {id}, which does not exist"
        ) from None


def _with(state: State, collection: CollectionState) -> State:
    return replace(state, collections=state.collections.set(collection.id, collection))


def _without_intentions(collections: Map[int, CollectionState]) -> Map[int, CollectionState]:
    for id, collection in collections.items():
        if collection.intended is not None:
            collections = collections.set(id, replace(collection, intended=None))
    return collections


def _recovered(old: CollectionState, time: int) -> CollectionState:
    *over, last = old.errors
    # An error span that ends at or before its start is empty, and so is not stored.
    ended = (replace(last, upper=time),) if last.lower < time else ()
    return replace(old, errors=(*over, *ended))


def _replaced(state: State, old: CollectionState, new: CollectionState, time: int) -> State:
    names = state.names.delete(new.name).set(old.name, new.id)
    state = _with(state, replace(old, upper=time, successor=new.id))
    predecessors = (*old.predecessors, old.id)
    new = replace(new, name=old.name, predecessors=predecessors)
    return replace(_with(state, new), names=names)


def _destroyed(state: State, number: int, collection: CollectionState) -> State:
    """Remove a collection and its predecessors; of a replaced collection, only itself."""
    collections, names = state.collections, state.names
    # SUBTLE: a hold may retain an older collection after a replaced one without holds is
    # removed.
    older = () if collection.successor else collection.predecessors
    for id in (*older, collection.id):
        if (member := collections.get(id)) is not None:
            state = _unlinked(state, number, member.batches)
            collections = collections.delete(id)
    if names.get(collection.name) == collection.id:
        names = names.delete(collection.name)
    return replace(state, collections=collections, names=names)


def _with_since(old: CollectionState, since: int) -> CollectionState:
    since = max(since, old.since)
    # No read can meet a span that ends at or before since.
    errors = tuple(span for span in old.errors if span.upper > since)
    return replace(old, since=since, intended=None, errors=errors)


def _discarded(state: State, number: int, old: CollectionState) -> State:
    kept: list[Batch] = []
    dropped: list[Batch] = []
    for batch in old.batches:
        if batch.upper <= old.upper:
            kept.append(batch)
        elif batch.lower < old.upper:
            kept.append(replace(batch, until=old.upper, upper=old.upper))
        else:
            dropped.append(batch)
    state = _unlinked(state, number, tuple(dropped))
    return _with(state, replace(old, batches=tuple(kept)))


def _merged(
    state: State, number: int, id: int, inputs: tuple[int, ...], output: Batch | None
) -> State:
    old = _collection(state, id)
    replaced = tuple(batch for batch in old.batches if batch.id in inputs)
    if len(replaced) != len(inputs):
        raise InternalError(f'entry {number} merges batches that collection "{old.name}" lacks')
    given: tuple[Batch, ...] = ()
    if output is not None:
        given = (replace(output, id=state.next_id),)
    at = next(i for i, batch in enumerate(old.batches) if batch.id in inputs)
    rest = [batch for batch in old.batches if batch.id not in inputs]
    batches = (*rest[:at], *given, *rest[at:])
    state = _unlinked(state, number, replaced)
    state = replace(state, next_id=state.next_id + len(given))
    return _with(state, replace(old, batches=batches))


def _unlinked(state: State, number: int, batches: tuple[Batch, ...]) -> State:
    garbage = state.garbage
    for batch in batches:
        for key in files_of(batch):
            garbage = garbage.set(key, number)
    return replace(state, garbage=garbage)


def _links(operation: Operation) -> list[str]:
    match operation:
        case Link(batches=batches):
            return [key for batch in batches for key in files_of(batch)]
        case MergeBatches(output=Batch() as output):
            return files_of(output)
        case _:
            return []
