"""Holds: claims of readers that keep history from a time on readable.

A hold is an object next to the log, so readers never write to the log and never slow its
writer. A hold records the lowest time that each collection must keep (`sinces`) and the log
position of its reads (`position`). Files linked at that position are retained even after a
merge has replaced them.

    hold/<id>=<version>     the newest version counts; each is created, never changed

A claim and an advancing since agree as follows (hazard A6). The writer announces the
intended since in an entry, *then* lists the holds, then settles in a second entry at or
below the lowest hold. A hold counts once its owner, *after* creating it, has read the log
to its head and found no announcement above it. Of the two, the later one always sees the
earlier one.

A leased hold ends by a log entry, after the writer has seen it unchanged for its complete
lease. No clock is compared with the clock of another process. A durable hold belongs to a
named owner and lives until it is dropped. Its token increases with each opening, so an
older process of the owner detects that it has lost the hold.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Protocol

from msgspec import Struct, structs

from penstock.durable import Blob
from penstock.errors import Fenced, PenstockError, StoreError, UsageError
from penstock.failpoints import Failpoint, hit
from penstock.persist.encoding import FrameKind, decode_frame, encode_frame
from penstock.persist.errors import CollectionMissing, HoldLost, SinceError
from penstock.persist.machine import Machine
from penstock.persist.paths import HOLDS, hold_key, hold_of, hold_prefix
from penstock.persist.readability import check_since
from penstock.persist.settings import Settings
from penstock.persist.state import END, CollectionState, State
from penstock.telemetry import fields, logger

__all__ = [
    "Claim",
    "Claims",
    "DurableHold",
    "Hold",
    "LeasedClaims",
    "LocalClaims",
    "NoClaims",
    "list_holds",
]

log = logger("persist")

SETTLE_PATIENCE_MS: Final = 10_000

VERSIONS_KEPT: Final = 4
"""Number of stored versions of a hold; only the newest counts."""


class Hold(Struct, frozen=True):
    """Contents of a hold object."""

    id: str
    owner: str
    token: int
    """Fencing token, which increases with each opening of a durable hold."""

    lease_ms: int | None
    """Lifetime without a new version; None if the hold lives until it is dropped."""

    position: int
    """Log position: files linked after this number of entries are retained."""

    sinces: dict[int, int]
    """Lowest retained time of each collection, by collection id."""

    placed_ms: int
    """Creation time of the first version by the owner's clock; only for display."""

    written_ms: int
    """Creation time of this version by the owner's clock; only for display."""


def list_holds(blob: Blob) -> dict[str, tuple[int, Hold]]:
    """Return the newest version number and contents of each hold, by hold id."""
    newest = {parsed[0] for listed in blob.list(HOLDS) if (parsed := hold_of(listed.key))}
    holds: dict[str, tuple[int, Hold]] = {}
    for id in sorted(newest):
        # The owner may replace a version between the listing and the read, repeatedly.
        while versions := [
            parsed[1] for listed in blob.list(hold_prefix(id)) if (parsed := hold_of(listed.key))
        ]:
            key = hold_key(id, versions[-1])
            if (data := blob.get(key)) is not None:
                hold = decode_frame(data, FrameKind.HOLD, Hold, key=key, where=blob.name)
                holds[id] = (versions[-1], hold)
                break
    return holds


class _Object:
    """Object of one hold, with its sequence of versions."""

    def __init__(self, blob: Blob, hold: Hold, version: int) -> None:
        self._blob = blob
        self.hold = hold
        self.version = version

    def write(self, hold: Hold) -> None:
        """Create `hold` as the next version.

        Raises:
            Fenced: a newer process owns the hold.
        """
        key = hold_key(hold.id, self.version + 1)
        created = self._blob.create(key, encode_frame(FrameKind.HOLD, hold))
        # SUBTLE: a newer owner may have deleted this version number, so creation alone
        # proves nothing. At least one later version of that owner always exists.
        versions = self._blob.list(hold_prefix(hold.id)) if hold.lease_ms is None else []
        if not created or any(listed.key > key for listed in versions):
            if created:
                self._blob.delete(key)
            raise Fenced(
                f'hold of "{hold.owner}" on location "{self._blob.name}" was taken over',
                detail="A newer process moved it first.",
                hint="Only one process may own a durable hold. Stop this one, or the other.",
            )
        self.hold, self.version = hold, self.version + 1
        # SUBTLE: a concurrent listing may miss both the new and the deleted version. It
        # then finds a version between them, which claims no less.
        if self.version >= VERSIONS_KEPT:
            self._blob.delete(hold_key(hold.id, self.version - VERSIONS_KEPT))

    def drop(self) -> None:
        for listed in self._blob.list(hold_prefix(self.hold.id)):
            self._blob.delete(listed.key)


class Claim:
    """Active claim: a state whose files and history are retained."""

    def __init__(self, id: int, since: int, state: State) -> None:
        self.id = id
        self.since = since
        self.state = state

    @property
    def position(self) -> int:
        """Log position whose files are retained."""
        return self.state.seqno


class Claims(Protocol):
    """Retention of history and files for the readers of one client."""

    def claim(self, id: int, name: str, since: int) -> AbstractContextManager[Claim]:
        """Retain collection `id` from `since` on, and the files of `claim.state`, in the block.

        Raises:
            SinceError: history at `since` is no longer retained.
        """
        ...

    def advance(self, claim: Claim, since: int, state: State) -> None:
        """Reduce the claim to times from `since` on and to the files of `state`."""
        ...

    def check(self, state: State) -> None:
        """Check that all claims are still retained in `state`, which was just read.

        Raises:
            HoldLost: a claim is lost, and no claim of this client counts any more.
        """
        ...

    def close(self) -> None:
        """Drop every claim."""
        ...


class NoClaims:
    """No retention, for a reader that cannot or does not want to write objects."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @contextmanager
    def claim(self, id: int, name: str, since: int) -> Iterator[Claim]:
        """Yield the newest state, whose files may be deleted at any time."""
        state = self._machine.refresh()
        _check_since(state, id, name, since)
        yield Claim(id, since, state)

    def advance(self, claim: Claim, since: int, state: State) -> None:
        claim.since, claim.state = since, state

    def check(self, state: State) -> None:
        """Do nothing: without retention, nothing can be lost."""

    def close(self) -> None:
        """Do nothing: there is no claim to drop."""


class _Registered(ABC):
    """Claims in a place that the writer inspects before it settles."""

    def __init__(self, machine: Machine, settings: Settings) -> None:
        self._machine = machine
        self._settings = settings
        self._lock = threading.Lock()
        self._claims: dict[int, Claim] = {}
        self._next = 0

    @contextmanager
    def claim(self, id: int, name: str, since: int) -> Iterator[Claim]:
        """Register the claim, then check that it was registered in time."""
        with self._lock:
            number = self._next
            self._next += 1
        try:
            yield self._place(number, id, name, since)
        finally:
            with self._lock:
                self._claims.pop(number, None)
            self._published_less()

    def advance(self, claim: Claim, since: int, state: State) -> None:
        """Reduce the claim; the writer may learn of it later."""
        with self._lock:
            claim.since, claim.state = since, state
        self._published_less()

    def needs(self) -> tuple[dict[int, int], int]:
        """Return the lowest since of each claimed collection, and the lowest position."""
        with self._lock:
            sinces: dict[int, int] = {}
            for claim in self._claims.values():
                sinces[claim.id] = min(claim.since, sinces.get(claim.id, END))
            return sinces, min((claim.position for claim in self._claims.values()), default=END)

    def _place(self, number: int, id: int, name: str, since: int) -> Claim:
        while True:
            state = self._refresh()
            _check_since(state, id, name, since)
            claim = Claim(id, since, state)
            with self._lock:
                self._claims[number] = claim
            self._published_more()
            hit(Failpoint.HOLD_PLACED)
            state = self._await_announcements(id, since, claim.position)
            _check_since(state, id, name, since)
            if state.collected <= claim.position:
                hit(Failpoint.HOLD_COUNTED)
                return claim

    def _await_announcements(self, id: int, since: int, position: int) -> State:
        """Return the state at the log's head, once no announcement is above the claim."""
        clock, never = self._settings.clock, threading.Event()
        deadline = clock.boot_ms() + SETTLE_PATIENCE_MS
        while True:
            state = self._refresh()
            if _counts(state, {id: since}, position):
                return state
            if clock.boot_ms() >= deadline:
                raise UsageError(
                    f'location "{self._machine.blob.name}" is advancing its since',
                    detail="The writer announced a new since and has not completed it. The "
                    "writer may have died.",
                    hint="Read as of a later time, or start the writer again.",
                )
            clock.wait(never, 20)

    @abstractmethod
    def _refresh(self) -> State:
        """Return the newest state."""

    @abstractmethod
    def _published_more(self) -> None:
        """Publish an extended claim; the writer can see it when this method returns."""

    @abstractmethod
    def _published_less(self) -> None:
        """Publish a reduced claim; the writer may see it later."""


class LocalClaims(_Registered):
    """Claims of readers in the writer's process; the writer calls `needs` directly."""

    def _refresh(self) -> State:
        return self._machine.state

    def _published_more(self) -> None:
        pass

    def _published_less(self) -> None:
        pass

    def check(self, state: State) -> None:
        """Do nothing: the writer checks `needs` before it deletes history, so nothing is lost."""

    def close(self) -> None:
        """Do nothing: no claim outlives the process."""


class LeasedClaims(_Registered):
    """Claims of a reader in another process, as one leased hold object."""

    def __init__(self, machine: Machine, settings: Settings, *, owner: str) -> None:
        super().__init__(machine, settings)
        self._object: _Object | None = None
        self._owner = owner
        self._writing = threading.Lock()
        self._written_ms = 0
        self._lost: PenstockError | None = None
        self._left = False
        self._stop = threading.Event()
        self._renewal: threading.Thread | None = None

    def renew(self) -> None:
        """Write a new version, and check that the hold still counts."""
        if self._lost is not None:
            raise self._lost
        with self._writing:
            self._write()
        self.check(self._refresh())

    def check(self, state: State) -> None:
        """Check that the hold, as last written, still counts."""
        # SUBTLE: without the lock, `state` may result from a version that is being written.
        with self._writing:
            held = self._object
            if self._lost is None and held is not None and not _is_retained(state, held.hold):
                self._lost = _expired(held.hold, self._machine.blob.name)
        if self._lost is not None:
            raise self._lost

    def leave(self) -> None:
        """Leave the present claims to their lease, which alone ends them from now on."""
        self._left = True

    def close(self) -> None:
        """Drop the hold, unless it was left to its lease."""
        self._stop.set()
        if self._renewal is not None:
            self._renewal.join()
        with self._writing:
            if self._object is not None and not self._left:
                self._object.drop()
                self._object = None

    def _refresh(self) -> State:
        if self._lost is not None:
            raise self._lost
        state = self._machine.refresh()
        if self._object is not None and self._object.hold.id in state.expired:
            # The writer ignores claims under an expired hold.
            self._lost = _expired(self._object.hold, self._machine.blob.name)
            raise self._lost
        return state

    def _published_more(self) -> None:
        with self._writing:
            self._write()
            if self._renewal is None and self._settings.background:
                self._renewal = threading.Thread(
                    target=self._renew_for_ever, name="penstock-hold", daemon=True
                )
                self._renewal.start()

    def _published_less(self) -> None:
        # Claiming slightly too much for a short time is cheaper than a write for each
        # reduction.
        clock = self._settings.clock
        if (
            self._left
            or self._lost is not None
            or clock.boot_ms() - self._written_ms < min(5_000, self._settings.lease_ms // 8)
        ):
            return
        try:
            with self._writing:
                if self._object is not None:
                    self._write()
        except StoreError as error:
            # Claiming too much harms no read; the next renewal tries again.
            log.warning("hold could not be moved", extra=fields(error=str(error)))

    def _write(self) -> None:
        now_ms = self._settings.clock.now_ms()
        sinces, position = self.needs()
        if self._object is None:
            id = f"r{self._settings.chance.getrandbits(64):016x}"
            hold = Hold(
                id=id,
                owner=self._owner,
                token=1,
                lease_ms=self._settings.lease_ms,
                position=position,
                sinces=sinces,
                placed_ms=now_ms,
                written_ms=now_ms,
            )
            self._object = _Object(self._machine.blob, hold, -1)
        else:
            hold = structs.replace(
                self._object.hold, position=position, sinces=sinces, written_ms=now_ms
            )
        self._object.write(hold)
        self._written_ms = self._settings.clock.boot_ms()

    def _renew_for_ever(self) -> None:
        while not self._settings.clock.wait(self._stop, self._settings.lease_ms // 4):
            try:
                self.renew()
            except PenstockError as error:
                log.warning(
                    "hold could not be renewed", extra=fields(owner=self._owner, error=str(error))
                )
                if self._lost is not None:
                    return


class DurableHold:
    """Hold that lives until it is dropped, owned by one process at a time.

    Opening it again under the same owner increases its token. The previous process then
    gets `Fenced` at its next `move` or `drop`.
    """

    def __init__(self, machine: Machine, settings: Settings, owner: str) -> None:
        if not owner or not all(c.isascii() and (c.isalnum() or c in "._-") for c in owner):
            raise UsageError(
                f'owner "{owner}" of a durable hold cannot be used',
                hint="Use letters, digits, dots, dashes and underscores.",
            )
        self._machine = machine
        self._settings = settings
        now_ms = settings.clock.now_ms()
        version, stored = list_holds(machine.blob).get(f"d-{owner}", (-1, None))
        fresh = Hold(
            id=f"d-{owner}",
            owner=owner,
            token=1,
            lease_ms=None,
            position=END,
            sinces={},
            placed_ms=now_ms,
            written_ms=now_ms,
        )
        self._object = _Object(machine.blob, stored or fresh, version)
        taken = self._object.hold
        self._object.write(structs.replace(taken, token=taken.token + (stored is not None)))

    @property
    def token(self) -> int:
        """Fencing token; the process with the highest token owns the hold."""
        return self._object.hold.token

    def sinces(self) -> dict[str, int]:
        """Return the lowest retained time of each held collection, by name."""
        state = self._machine.refresh()
        held = self._object.hold.sinces
        sinces: dict[str, int] = {}
        for id, since in held.items():
            if (collection := state.collections.get(id)) is not None:
                sinces[collection.name] = min(since, sinces.get(collection.name, END))
        return sinces

    def move(self, sinces: Mapping[str, int]) -> None:
        """Hold exactly these collections from these times on, earlier generations included.

        Raises:
            SinceError: history at one of the times is no longer retained; the hold is unchanged.
            Fenced: a newer process owns the hold.
        """
        state = self._machine.refresh()
        wanted: dict[int, int] = {}
        for name, since in sinces.items():
            generations = state.generations(name)
            if not generations:
                raise CollectionMissing(name, where=self._machine.blob.name, known=state.listed())
            for id, held in _from(generations, since).items():
                _check_since(state, id, name, held)
                wanted[id] = held
        before = self._object.hold
        # A durable hold retains history, not the files of one position. A reader under it
        # claims those files while it reads.
        self._object.write(
            structs.replace(before, sinces=wanted, written_ms=self._settings.clock.now_ms())
        )
        hit(Failpoint.HOLD_PLACED)
        clock, never = self._settings.clock, threading.Event()
        deadline = clock.boot_ms() + SETTLE_PATIENCE_MS
        while not _counts(state := self._machine.refresh(), wanted, END):
            if clock.boot_ms() >= deadline:
                break
            clock.wait(never, 20)
        for id, since in wanted.items():
            collection = state.collections.get(id)
            if collection is not None and (
                not _keeps(collection, since) or not _counts(state, {id: since}, END)
            ):
                self._object.write(before)
                raise SinceError(
                    collection.name,
                    as_of=since,
                    since=collection.intended or collection.since,
                    begins=collection.begins,
                )
        hit(Failpoint.HOLD_COUNTED)

    def drop(self) -> None:
        """Drop the hold permanently.

        Raises:
            Fenced: a newer process owns the hold and keeps it.
        """
        self._object.write(self._object.hold)
        self._object.drop()


def _from(generations: Sequence[CollectionState], since: int) -> dict[int, int]:
    """Return the lowest time that each generation must retain for the history from `since` on."""
    *older, current = generations
    needed = {each.id: max(since, each.begins) for each in older if each.upper > since}
    # Without an older generation to read, the current one alone decides whether `since` is
    # retained.
    needed[current.id] = max(since, current.begins) if needed else since
    return needed


def _check_since(state: State, id: int, name: str, since: int) -> None:
    collection = state.collections.get(id)
    if collection is None:
        raise UsageError(
            f'collection "{name}" was destroyed',
            hint="Open it again by name if it was created again.",
        )
    if not _keeps(collection, since):
        check_since(collection, since)


def _keeps(collection: CollectionState, since: int) -> bool:
    """Return whether the complete history from a time on is still retained."""
    return collection.since <= since or collection.whole


def _expired(hold: Hold, where: str) -> HoldLost:
    detail = "Its lease ran out before it was renewed, and the data it claimed may be deleted."
    return HoldLost(hold.owner, where=where, detail=detail)


def _counts(state: State, sinces: Mapping[int, int], position: int) -> bool:
    """Return whether no announcement is above the claim."""
    for id, since in sinces.items():
        collection = state.collections.get(id)
        if (
            collection is not None
            and collection.intended is not None
            and collection.intended > since
        ):
            return False
    return state.collecting is None or state.collecting <= position


def _is_retained(state: State, hold: Hold) -> bool:
    """Return whether everything that the hold claims is still retained."""
    return (
        hold.id not in state.expired
        and state.collected <= hold.position
        and all(
            id not in state.collections or _keeps(state.collections[id], since)
            for id, since in hold.sinces.items()
        )
    )
