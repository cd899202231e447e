"""State machine over the log: follow a storage location, and change it as its writer.

Following applies log entries to the newest rollup. Changing creates the next entry.
`commit` takes a function from a state to operations, and calls it again whenever the state
has advanced. No planned entry is ever renumbered without a new plan (hazard A6).

An attempt ends only when its entry number is occupied. If the occupant has the bytes of
this attempt, an attempt that seemed to fail was written. If the occupant has other bytes,
this attempt never will be written (hazard A3).

The creation of a number proves nothing once the log may have been truncated past it. A
creation counts only if the writer was at the head less than `proof_ms` ago, or if the floor
is not above the number (A1).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from penstock.durable import Blob, Log, entry_key
from penstock.errors import (
    Corruption,
    DeterminateError,
    DurabilityLost,
    Fenced,
    IndeterminateError,
    InternalError,
    PenstockError,
)
from penstock.failpoints import Failpoint, hit
from penstock.persist.encoding import decode_entry, decode_rollup, encode_entry, encode_rollup
from penstock.persist.paths import ROLLUPS, number_of, rollup_key
from penstock.persist.settings import Settings
from penstock.persist.state import Entry, Operation, State, TakeEpoch, apply, void_reason
from penstock.telemetry import fields, logger

__all__ = ["Machine", "PlanFailed"]

log = logger("persist")

READ_AHEAD: Final = 256


class PlanFailed(InternalError):
    """Plan that raised an unexpected error before anything was sent: nothing was written."""


class Machine:
    """View of a location's state in one process. Threads may share it."""

    def __init__(self, blob: Blob, settings: Settings) -> None:
        self.blob = blob
        self.log = Log(blob)
        self._settings = settings
        self._advancing = threading.Lock()
        self._state = State()
        self._epoch: int | None = None
        self._proved_ms = 0
        self._looked_ms = 0
        self.bytes_since_rollup = 0

    @property
    def state(self) -> State:
        """Newest state known to this process; all of it is durable."""
        return self._state

    @property
    def epoch(self) -> int | None:
        """Epoch of this process's writes; None before it takes one."""
        return self._epoch

    def load(self) -> State:
        """Load the newest rollup and follow the log to its head."""
        with self._advancing:
            self._load()
            return self._state

    def refresh(self, *, thorough: bool = False) -> State:
        """Follow the log to its head, as far as this process can see.

        `thorough` also checks that the end is the real end of the log, and neither a
        missing entry nor a truncated number (hazard A4).
        """
        with self._advancing:
            # A missing entry proves nothing once its number may have been truncated.
            idle_ms = self._settings.clock.boot_ms() - self._looked_ms
            self._follow()
            if thorough or idle_ms >= self._settings.proof_ms:
                self._check_end()
            return self._state

    def commit(self, plan: Callable[[State], Sequence[Operation]]) -> tuple[State, State]:
        """Write the operations that `plan` returns as the next entry, in this process's epoch.

        Return the state before and after. An empty plan writes nothing.

        Raises:
            Fenced: another owner's epoch has begun, and nothing was written.
        """
        if self._epoch is None:
            raise InternalError("commit without an epoch")
        with self._advancing:
            while True:
                self.must_own()
                before = self._state
                operations = self._planned(plan, before)
                if not operations:
                    return before, before
                if self._create(before, self._epoch, operations):
                    return before, self._state

    def take_epoch(
        self, plan: Callable[[State], Sequence[Operation]], *, own: bool = True
    ) -> State:
        """Begin a new epoch for this process or, with `own=False` to release, without an owner."""
        with self._advancing:
            while True:
                self._check_end()
                before = self._state
                if self._create(before, before.epoch + 1, tuple(plan(before))):
                    break
            if own:
                # Not the epoch of the state: other entries may already follow this one.
                self._epoch = before.epoch + 1
            hit(Failpoint.EPOCH_TAKEN)
            return self._state

    def adopt(self, epoch: int) -> None:
        """Resume an epoch that another process of the same writer began.

        Raises:
            Fenced: the epoch is over.
        """
        with self._advancing:
            self._check_end()
            self._epoch = epoch
            self.must_own()

    def write_rollup(self, state: State) -> None:
        """Write `state` as a rollup, so opening need not apply the log from its start."""
        data = encode_rollup(state)
        hit(Failpoint.ROLLUP_BEGIN)
        self.blob.create(rollup_key(state.seqno), data)
        hit(Failpoint.ROLLUP_DONE)
        self.bytes_since_rollup = 0

    def _create(self, before: State, epoch: int, operations: tuple[Operation, ...]) -> bool:
        """Return whether the entry is now number `before.seqno`, and counts."""
        entry = Entry(
            location=_location_of(before, operations),
            epoch=epoch,
            token=f"{self._settings.chance.getrandbits(64):016x}",
            at_ms=self._settings.clock.now_ms(),
            operations=operations,
        )
        if (reason := void_reason(before, entry)) is not None:
            raise InternalError(f"an entry about to be written would be void: {reason}")
        number, data = before.seqno, encode_entry(entry)
        asked_ms = self._settings.clock.boot_ms()
        try:
            created = self.log.create(number, data)
        except DurabilityLost:
            raise
        except IndeterminateError:
            with self._in_doubt():
                truncated = number < self.log.marks().floor
            if not truncated:
                raise
            return self._landed_before_truncation(entry)
        if not created:
            occupant = self.log.read(number)
            if occupant is None:
                return self._landed_before_truncation(entry)
            if occupant != data:
                self._follow()
                return False
        elif self._settings.clock.boot_ms() - self._proved_ms >= self._settings.proof_ms:
            with self._in_doubt():
                truncated = number < self.log.marks().floor
            if truncated:
                # SUBTLE: the number was free because it had been truncated. The new object
                # is void, and the present owner sweeps it.
                return self._landed_before_truncation(entry)
        self._state = apply(before, entry)
        self._proved_ms = asked_ms
        self.bytes_since_rollup += len(data)
        return True

    def _planned(
        self, plan: Callable[[State], Sequence[Operation]], state: State
    ) -> tuple[Operation, ...]:
        try:
            return tuple(plan(state))
        except PenstockError:
            raise
        except Exception as error:
            raise PlanFailed(
                f'could not prepare an entry of location "{self.blob.name}"',
                detail="Nothing was written.",
                hint="This is a defect of Penstock; please report it with the failed call.",
            ) from error

    def _landed_before_truncation(self, entry: Entry) -> bool:
        """Return whether `entry` was written before the log was truncated past it.

        The tokens in the newest rollup record the last entry of each epoch.
        """
        with self._in_doubt():
            self._load()
        if entry.epoch not in self._state.tokens:
            raise IndeterminateError(
                f'an entry of epoch {entry.epoch} in location "{self.blob.name}" is in doubt',
                detail="The log was truncated while the writer was paused, and so many epochs have "
                "passed that what became of its last entry is no longer known.",
                hint="Read the collection to find out.",
            )
        return self._state.tokens[entry.epoch] == entry.token

    @contextmanager
    def _in_doubt(self) -> Iterator[None]:
        """Convert errors in the block to indeterminate ones: an entry has been sent.

        A failed read then must not be reported as "not written".
        """
        try:
            yield
        except DeterminateError as error:
            raise IndeterminateError(
                f'an entry of location "{self.blob.name}" is in doubt',
                detail=f"{error}.",
                hint=error.hint,
            ) from error

    def must_own(self) -> None:
        """Check that this process owns the newest epoch that it knows of.

        Raises:
            Fenced: another epoch has begun, or the lock was released.
        """
        state = self._state
        if state.epoch == self._epoch and state.writer is not None:
            return
        if state.epoch == self._epoch:
            raise Fenced(
                f'writer of location "{self.blob.name}" gave up its lock',
                hint="Open the location again to write.",
            )
        by = "released by an operator"
        if (new := state.writer) is not None:
            by = f'taken over by "{new.id}", process {new.pid} on host "{new.host}"'
        raise Fenced(
            f'writer of location "{self.blob.name}" was fenced',
            detail=f"It wrote in epoch {self._epoch}; epoch {state.epoch} has begun, {by}. "
            "Unacknowledged entries were not written.",
            hint="Only one writer may run. Stop one of the two processes.",
        )

    @contextmanager
    def fence_before_damage(self) -> Iterator[None]:
        """Raise `Fenced` instead of `Corruption` if another epoch has begun.

        SUBTLE: a fenced writer may not know it yet. Its state links objects that the next
        writer has merged and garbage-collected, so a missing object proves no damage.
        """
        try:
            yield
        except Corruption as error:
            self.refresh(thorough=True)
            try:
                self.must_own()
            except Fenced as fenced:
                raise fenced from error
            raise

    def _load(self) -> None:
        state: State | None = None
        seen: set[str] = set()
        while state is None:
            marks = self.log.marks()
            listed = [each.key for each in self.blob.list(ROLLUPS)]
            rollups = [key for key in listed if number_of(key) is not None]
            if not rollups:
                state = State()
            elif (data := self.blob.get(rollups[-1])) is not None:
                state = decode_rollup(data, key=rollups[-1], where=self.blob.name)
                if state.seqno != number_of(rollups[-1]):
                    raise self._damaged(rollups[-1], "It holds another rollup.")
            elif rollups[-1] in seen:
                raise self._damaged(rollups[-1], "It is listed but cannot be read.")
            else:
                seen.add(rollups[-1])  # Deleted between listing and read: a newer one exists.
                continue
            if state.seqno < marks.floor:
                raise self._damaged(
                    rollup_key(marks.floor),
                    f"The log begins at entry {marks.floor} and no rollup reaches that far.",
                )
        if state.seqno >= self._state.seqno:
            self._state = state
        self._follow()
        self._check_end()

    def _follow(self) -> None:
        while True:
            asked_ms = self._settings.clock.boot_ms()
            first = self._state.seqno
            found = self.log.read_from(first, limit=READ_AHEAD)
            slept_ms = self._settings.clock.boot_ms() - self._looked_ms
            if slept_ms >= self._settings.proof_ms and first < self.log.marks().floor:
                # SUBTLE: a missing entry may have been truncated. A present entry may be
                # the work of a paused writer at a truncated number (hazards A1, A4).
                self._load()
                return
            for i, data in enumerate(found):
                key = entry_key(first + i)
                entry = decode_entry(data, key=key, where=self.blob.name)
                if (reason := void_reason(self._state, entry)) is not None:
                    log.info("entry is void", extra=fields(entry=first + i, reason=reason))
                self._state = apply(self._state, entry)
                self.bytes_since_rollup += len(data)
            if len(found) < READ_AHEAD:
                break
        self._looked_ms = asked_ms

    def _check_end(self) -> None:
        marks = self.log.marks()
        if self._state.seqno < marks.floor:
            self._load()
            return
        if self._state.seqno < marks.head:
            self._follow()
            if self._state.seqno < marks.head and self.log.marks().floor <= self._state.seqno:
                raise self._damaged(
                    entry_key(self._state.seqno),
                    f"The log entry is missing, though the log once reached {marks.head}.",
                )
        self.log.nothing_beyond(self._state.seqno)
        self._proved_ms = self._looked_ms

    def _damaged(self, key: str, detail: str) -> Corruption:
        return Corruption(key, where=self.blob.name, detail=detail)


def _location_of(state: State, operations: tuple[Operation, ...]) -> str:
    """Return the location's id, which the entry of the first epoch assigns."""
    first = operations[0]
    return state.location or (first.location if isinstance(first, TakeEpoch) else "")
