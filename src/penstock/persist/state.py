"""What a storage location is, and how one entry of its log changes it. Pure.

The state is the fold of the log: `apply(state, n, entry)`, from entry 0 on.
Every process that folds the same entries holds the same state, so there is no
other truth. Entries carry differences, and applying one touches only what it
names; maps are persistent, so a state is a value that can be kept, read by
many threads and written down as a rollup while the next one is made. What is
kept of each collection is in `records.py`.

An entry counts unless it is *void*: written in an epoch that is over, or
linking a file whose staging id is closed. A void entry takes its number and
changes nothing else, for every reader alike (hazards A2, A3).
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
    "Begin",
    "CloseStaging",
    "CollectionState",
    "Create",
    "Destroy",
    "Discard",
    "Entry",
    "ErrorSpan",
    "ExpireHold",
    "Fail",
    "Forget",
    "ForgetHold",
    "Inline",
    "Intend",
    "Link",
    "Merge",
    "OpenStaging",
    "Operation",
    "Part",
    "Recover",
    "Release",
    "Replace",
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
"""How many epochs back the last token is remembered."""


class TakeEpoch(Struct, frozen=True, tag="take_epoch"):
    """Begin a new epoch. Set by whoever opens for writing, or by `penstock release`."""

    writer: Writer | None
    location: str
    """The id of the location; only the first one counts."""


class Release(Struct, frozen=True, tag="release"):
    """Give the lock back. Later entries of this epoch are void."""


class Create(Struct, frozen=True, tag="create", omit_defaults=True):
    """Make a collection."""

    name: str
    schema: SchemaVersion
    owner: str = ""


class Alter(Struct, frozen=True, tag="alter"):
    """Give a collection a further schema version."""

    collection: int
    schema: SchemaVersion


class Destroy(Struct, frozen=True, tag="destroy"):
    """Remove a collection; its name may be used again, its id never."""

    collection: int


class Link(Struct, frozen=True, tag="link"):
    """Add batches to a collection."""

    collection: int
    batches: tuple[Batch, ...]


class Seal(Struct, frozen=True, tag="seal"):
    """Move a collection's upper."""

    collection: int
    upper: int


class Discard(Struct, frozen=True, tag="discard"):
    """Void the updates that were written but not sealed."""

    collection: int


class Allow(Struct, frozen=True, tag="allow"):
    """Permit since to go up to a time."""

    collection: int
    since: int


class Begin(Struct, frozen=True, tag="begin"):
    """Let a collection's history begin at a time: there is nothing before it."""

    collection: int
    since: int


class Fail(Struct, frozen=True, tag="fail"):
    """From a time on a collection cannot be read, for a reason that is kept."""

    collection: int
    time: int
    error: StoredError


class Recover(Struct, frozen=True, tag="recover"):
    """From a time on a collection that failed can be read again."""

    collection: int
    time: int


class Replace(Struct, frozen=True, tag="replace"):
    """From a time on, the name of a collection refers to another one."""

    collection: int
    by: int
    time: int


class Intend(Struct, frozen=True, tag="intend"):
    """Announce where sinces, and the deletion of unlinked files, are about to go."""

    sinces: dict[int, int]
    collect: int


class Settle(Struct, frozen=True, tag="settle"):
    """After looking at the holds: where they do go. Names every collection of its intention."""

    sinces: dict[int, int]
    collected: int


class Merge(Struct, frozen=True, tag="merge"):
    """Replace batches by one that sums to the same from since on, or by none."""

    collection: int
    inputs: tuple[int, ...]
    output: Batch | None


class OpenStaging(Struct, frozen=True, tag="open_staging"):
    """From here on files written under this id may be linked."""

    id: str


class CloseStaging(Struct, frozen=True, tag="close_staging"):
    """From here on nothing under this id can be linked; what is not, is garbage."""

    id: str


class Forget(Struct, frozen=True, tag="forget"):
    """These unlinked files have been deleted."""

    keys: tuple[str, ...]


class RolledUp(Struct, frozen=True, tag="rolled_up"):
    """A rollup of the state after entry `number` is durable."""

    number: int


class ExpireHold(Struct, frozen=True, tag="expire_hold"):
    """A lease ran out in the writer's eyes: the hold no longer counts."""

    hold: str


class ForgetHold(Struct, frozen=True, tag="forget_hold"):
    """An expired hold's object has been deleted."""

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
    | Begin
    | Fail
    | Recover
    | Replace
    | Intend
    | Settle
    | Merge
    | OpenStaging
    | CloseStaging
    | Forget
    | RolledUp
    | ExpireHold
    | ForgetHold
)


class Entry(Struct, frozen=True):
    """One entry of the log: all of it or none of it."""

    location: str
    """The id of the location it was written for."""

    epoch: int
    token: str
    """Told apart by it: our own earlier attempt from another writer's."""

    at_ms: int
    """The wall clock of the writer, for people."""

    operations: tuple[Operation, ...]


class State(Struct, frozen=True):
    """A storage location after `seqno` entries have been applied."""

    seqno: int = 0
    """The number of the next entry."""

    location: str = ""
    epoch: int = 0
    writer: Writer | None = None
    next_id: int = 1
    collections: Map[int, CollectionState] = field(default_factory=Map)
    names: Map[str, int] = field(default_factory=Map)
    staging: Map[str, int] = field(default_factory=Map)
    """Open staging ids, and the epoch that opened each."""

    garbage: Map[str, int] = field(default_factory=Map)
    """Files no longer linked, and the number of the entry that unlinked each."""

    collecting: int | None = None
    """Files unlinked up to this entry are about to be deleted: announced, not settled."""

    collected: int = 0
    """Files unlinked by entries below this may be gone."""

    rollups: tuple[int, ...] = ()
    """The rollups that exist for certain, at most two."""

    expired: Map[str, int] = field(default_factory=Map)
    """Holds that no longer count, and the entry that expired each."""

    tokens: Map[int, str] = field(default_factory=Map)
    """The last token of each recent epoch."""

    def named(self, name: str, as_of: int | None = None) -> CollectionState | None:
        """Return the collection that a name refers to, now or as of a time.

        A time before all generations that are retained gives the oldest of them.
        """
        number = self.names.get(name)
        if number is None:
            return None
        found = self.collections[number]
        if as_of is None or as_of >= found.begins:
            return found
        generations = self.generations(name)
        return next((each for each in generations if as_of < each.upper), found)

    def generations(self, name: str) -> list[CollectionState]:
        """Return the retained collections that a name has referred to, oldest first."""
        current = self.named(name)
        if current is None:
            return []
        older = (self.collections.get(id) for id in current.predecessors)
        return [*(each for each in older if each is not None), current]

    def listed(self, *, hidden: bool = False) -> list[str]:
        """The names of the collections, in order; of hidden ones only if asked for."""
        return sorted(name for name in self.names if hidden or not is_hidden(name))

    def linked(self) -> set[str]:
        """Every file that some collection needs."""
        return {key for c in self.collections.values() for b in c.batches for key in files_of(b)}


def void_reason(state: State, entry: Entry) -> str | None:
    """Why `entry` changes nothing, or None if it counts."""
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
    """The state after `entry`, which is number `state.seqno`."""
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
    """The state as an entry of these operations would leave it; its number is not taken."""
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
                # An intention dies with its epoch: its owner can no longer settle it.
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
        case Begin(collection=id, since=since):
            old = _collection(state, id)
            allowed = max(old.allowed, since)
            return _with(state, replace(old, begins=since, since=since, allowed=allowed))
        case Fail(collection=id, time=time, error=error):
            old = _collection(state, id)
            return _with(state, replace(old, errors=(*old.errors, ErrorSpan(time, error))))
        case Recover(collection=id, time=time):
            return _with(state, _recovered(_collection(state, id), time))
        case Replace(collection=id, by=by, time=time):
            return _replaced(state, _collection(state, id), _collection(state, by), time)
        case Intend(sinces=sinces, collect=collect):
            for id, since in sinces.items():
                if (intending := state.collections.get(id)) is not None:
                    state = _with(state, replace(intending, intended=since))
            return replace(state, collecting=collect)
        case Settle(sinces=sinces, collected=collected):
            for id, since in sinces.items():
                if (settled := state.collections.get(id)) is not None:
                    state = _with(state, _settled(settled, since))
            return replace(state, collecting=None, collected=max(state.collected, collected))
        case Merge(collection=id, inputs=inputs, output=output):
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
    # What ended before it began never was.
    ended = (replace(last, upper=time),) if last.lower < time else ()
    return replace(old, errors=(*over, *ended))


def _replaced(state: State, old: CollectionState, new: CollectionState, time: int) -> State:
    names = state.names.delete(new.name).set(old.name, new.id)
    state = _with(state, replace(old, upper=time, successor=new.id))
    predecessors = (*old.predecessors, old.id)
    new = replace(new, name=old.name, predecessors=predecessors)
    return replace(_with(state, new), names=names)


def _destroyed(state: State, number: int, gone: CollectionState) -> State:
    """Remove a collection and those that had its name before; of a replaced one, only itself."""
    collections, names = state.collections, state.names
    # SUBTLE: a hold on an older collection outlives a replaced one that nobody holds.
    older = () if gone.successor else gone.predecessors
    for id in (*older, gone.id):
        if (each := collections.get(id)) is not None:
            state = _unlinked(state, number, each.batches)
            collections = collections.delete(id)
    if names.get(gone.name) == gone.id:
        names = names.delete(gone.name)
    return replace(state, collections=collections, names=names)


def _settled(old: CollectionState, since: int) -> CollectionState:
    since = max(since, old.since)
    # No reading can meet a span that ends at or before since.
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
        case Merge(output=Batch() as output):
            return files_of(output)
        case _:
            return []
