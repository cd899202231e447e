"""What a storage location is, and how one entry of its log changes it. Pure.

The state is the fold of the log: `apply(state, n, entry)`, from entry 0 on.
Every process that folds the same entries holds the same state, so there is no
other truth. Entries carry differences, and applying one touches only what it
names; maps are persistent, so a state is a value that can be kept, read by
many threads and written down as a rollup while the next one is made.

A collection is a bag of batches and two times:

            since                    upper
    ──────────┼────────────────────────┼──────────────► time
              │ readable, definite     │ written, not yet sealed

A write that is not sealed is an ordinary batch whose times lie at or past
upper; readers look only at times below it. So `seal` moves one number, and
there is no second place to look.

An entry counts unless it is *void*: written in an epoch that is over, or
linking a file whose staging id is closed. A void entry takes its number and
changes nothing else, for every reader alike (hazards A2, A3).
"""

from functools import lru_cache
from typing import Final, assert_never

import pyarrow as pa
from immutables import Map
from msgspec import Struct, field
from msgspec.structs import replace

from penstock.data import stored_schema
from penstock.errors import InternalError

__all__ = [
    "END",
    "Allow",
    "Alter",
    "Batch",
    "CloseStaging",
    "CollectionState",
    "Create",
    "Destroy",
    "Discard",
    "Entry",
    "ExpireHold",
    "Forget",
    "ForgetHold",
    "Inline",
    "Intend",
    "Link",
    "Merge",
    "OpenStaging",
    "Operation",
    "Release",
    "RolledUp",
    "SchemaVersion",
    "Seal",
    "Settle",
    "State",
    "Stored",
    "TakeEpoch",
    "Writer",
    "apply",
    "schema_as_of",
    "void_reason",
]

END: Final = 2**63 - 1
"""After all times. An upper of END closes a collection; a since of END gives up its history."""

TOKENS_KEPT: Final = 64
"""How many epochs back the last token is remembered."""


# What is stored. These are msgspec structs because they are exactly what the
# bytes hold; `encoding.py` frames them.


class Inline(Struct, frozen=True, tag="inline"):
    """Rows that travel inside the log: one Arrow IPC record-batch message."""

    rows: bytes


class Stored(Struct, frozen=True, tag="stored"):
    """Rows in a Parquet object."""

    key: str
    size: int
    checksum: int
    """XXH64, seed 0, of the whole object."""

    footer: int
    """Bytes of the Parquet footer, from its first to the end of the object."""

    footer_checksum: int
    """XXH64, seed 0, of the footer, for readers that check pages by their own checksums."""


Part = Inline | Stored


class Batch(Struct, frozen=True, omit_defaults=True):
    """Updates that were written, or merged, together."""

    schema: int
    """Which of the collection's schema versions the parts have."""

    lower: int
    """The least time among the updates."""

    upper: int
    """The greatest time among the updates, plus one."""

    rows: int
    size: int
    """Bytes of the parts at rest."""

    parts: tuple[Part, ...]
    memory: int = 0
    """Bytes of the rows as Arrow has them in memory."""

    since: int = 0
    """Times below it have been advanced to it."""

    until: int = END
    """Updates at or past it were discarded and do not count."""

    merged: bool = False
    """Sorted and consolidated, by a merge."""

    distinct: bool = False
    """Of a merge: its rows at `since` are there once each, and no two have the same key."""

    id: int = 0
    """Unique in the location; given when the batch is linked."""


class SchemaVersion(Struct, frozen=True, omit_defaults=True):
    """One version of what a collection's rows are."""

    version: int
    since: int
    """The first time whose readers see this version."""

    columns: bytes
    """The user's columns, as an Arrow IPC schema message."""

    key: tuple[str, ...] = ()
    defaults: bytes = b""
    """An Arrow IPC stream of one row: what older rows hold in columns added here."""

    codecs: tuple[tuple[str, int], ...] = ()
    """Name and version of the key's and the value's codec; empty for rows."""


class Writer(Struct, frozen=True, omit_defaults=True):
    """Who holds the writer's lock, for people and for notifications."""

    id: str
    host: str = ""
    pid: int = 0
    taken_ms: int = 0
    address: str = ""
    """Where the writer tells readers of new entries, as host:port."""


class CollectionState(Struct, frozen=True, omit_defaults=True):
    """One named collection."""

    id: int
    name: str
    schemas: tuple[SchemaVersion, ...]
    owner: str = ""
    """Who alone writes it, such as a source; empty if it is the user's own."""

    since: int = 0
    upper: int = 0
    allowed: int = 0
    """How far the writer allowed since to go; holds may keep it behind."""

    intended: int | None = None
    """Where since is about to go: announced, and not yet settled."""

    batches: tuple[Batch, ...] = ()


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

    def named(self, name: str) -> CollectionState | None:
        """The collection of that name."""
        number = self.names.get(name)
        return None if number is None else self.collections[number]

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
            gone = _collection(state, id)
            state = _unlinked(state, number, gone.batches)
            return replace(
                state, collections=state.collections.delete(id), names=state.names.delete(gone.name)
            )
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
        case Intend(sinces=sinces, collect=collect):
            for id, since in sinces.items():
                if (intending := state.collections.get(id)) is not None:
                    state = _with(state, replace(intending, intended=since))
            return replace(state, collecting=collect)
        case Settle(sinces=sinces, collected=collected):
            for id, since in sinces.items():
                if (settled := state.collections.get(id)) is not None:
                    since = max(since, settled.since)
                    state = _with(state, replace(settled, since=since, intended=None))
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


def schema_as_of(collection: CollectionState, as_of: int) -> SchemaVersion:
    """The version that readers as of a time see.

    Keys and values always come through the newest codecs; only the columns of
    rows are part of what was promised as of a time.
    """
    if collection.schemas[-1].codecs:
        return collection.schemas[-1]
    seen = collection.schemas[0]
    for version in collection.schemas:
        if version.since <= as_of:
            seen = version
    return seen


def files_of(batch: Batch) -> list[str]:
    """The objects that hold a batch's rows."""
    return [part.key for part in batch.parts if isinstance(part, Stored)]


def staging_of(key: str) -> str:
    """The staging id under which a file was written."""
    return key.split("/")[1]


@lru_cache(maxsize=4096)
def columns_of(schema: SchemaVersion) -> pa.Schema:
    """The user's columns of a schema version."""
    return pa.ipc.read_schema(pa.py_buffer(schema.columns))


@lru_cache(maxsize=4096)
def types_of(schema: SchemaVersion) -> tuple[pa.DataType, ...]:
    """The types of those columns and of time and diff; Arrow takes its time to tell them."""
    return tuple(stored_columns_of(schema).types)


@lru_cache(maxsize=4096)
def stored_columns_of(schema: SchemaVersion) -> pa.Schema:
    """The columns of a schema version as they are in a batch."""
    return stored_schema(columns_of(schema))
