"""Checksum walk: verify that every object exists and holds the bytes that were written.

The walk reads each entry, rollup, hold and batch independently, so one damaged object does
not hide another. The walk may run next to a writer: an object that the writer deletes
correctly during the walk is not damage.

The walk verifies that log entries are dense from the floor to the newest trace of the head:
an entry, a rollup, or the mark of a clean close. Rollups that the log records must exist,
and so must every file that the state links. The loss of the last entry of a killed writer
cannot be detected, because only that entry proves its own existence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from penstock.durable import Blob, Log, entry_key
from penstock.errors import Corruption, InternalError, StoreRefused
from penstock.persist.encoding import FrameKind, checksum, decode_entry, decode_frame, decode_rollup
from penstock.persist.holds import Hold
from penstock.persist.paths import HOLDS, ROLLUPS, hold_of, number_of, rollup_key
from penstock.persist.state import Entry, State, Stored, apply

__all__ = ["ChecksumReport", "Damage", "verify"]


@dataclass(frozen=True, slots=True)
class Damage:
    """One object that is missing or differs from the bytes that were written."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class ChecksumReport:
    """Result of a checksum walk."""

    location: str
    objects: int
    bytes: int
    damage: tuple[Damage, ...]

    @property
    def sound(self) -> bool:
        """Return whether the walk found no damage."""
        return not self.damage


def verify(blob: Blob) -> ChecksumReport:
    """Read and check every object of a storage location."""
    walk = _Walk(blob).walked()
    damage = walk.damage
    if damage:
        # A writer may have correctly deleted an object that the walk was about to read. A
        # second walk no longer expects that object.
        again = _Walk(blob).walked().damage
        damage = {key: reason for key, reason in damage.items() if key in again}
    found = tuple(Damage(key, damage[key]) for key in sorted(damage))
    return ChecksumReport(blob.name, walk.objects, walk.size, found)


class _Walk:
    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._log = Log(blob)
        self._entries: dict[int, Entry] = {}
        self._rollups: dict[int, State] = {}
        self.damage: dict[str, str] = {}
        self.objects = 0
        self.size = 0

    def walked(self) -> Self:
        self.entries()
        self.rollups()
        self.batches(self.newest_state())
        self.holds()
        return self

    def entries(self) -> None:
        marks = self._log.marks()
        numbers = self._log.entries()
        rolled = self._listed_rollups()
        end = max([marks.head, *(number + 1 for number in numbers[-1:]), *rolled])
        for number in range(marks.floor, end):
            key = entry_key(number)
            data = self._read(key)
            if data is None:
                self._damaged(key, "The log entry is missing.")
                continue
            try:
                self._entries[number] = decode_entry(data, key=key, where=self._blob.name)
            except (Corruption, StoreRefused) as error:
                self._damaged(key, error.detail)

    def rollups(self) -> None:
        for number in self._listed_rollups():
            key = rollup_key(number)
            data = self._read(key)
            if data is None:
                continue  # Deleted after the listing; `newest_state` reports a recorded one.
            try:
                state = decode_rollup(data, key=key, where=self._blob.name)
            except (Corruption, StoreRefused) as error:
                self._damaged(key, error.detail)
                continue
            if state.seqno != number:
                self._damaged(key, "It holds another rollup.")
            else:
                self._rollups[state.seqno] = state

    def newest_state(self) -> State:
        """Return the newest state that undamaged objects lead to."""
        state = self._rollups[max(self._rollups)] if self._rollups else State()
        while state.seqno in self._entries:
            try:
                state = apply(state, self._entries[state.seqno])
            except InternalError as error:
                self._damaged(
                    entry_key(state.seqno), f"It does not follow the one before: {error}."
                )
                break
        present = self._listed_rollups()
        for number in state.rollups:
            if number not in present:
                self._damaged(rollup_key(number), "The rollup is missing.")
        return state

    def batches(self, state: State) -> None:
        for part in _stored_parts(state):
            data = self._read(part.key)
            if data is None:
                self._damaged(part.key, "The batch is missing.")
            elif len(data) != part.size:
                self._damaged(part.key, f"It has {len(data)} bytes and should have {part.size}.")
            elif checksum(data) != part.checksum:
                self._damaged(part.key, "Its checksum does not match its contents.")

    def holds(self) -> None:
        for listed in self._blob.list(HOLDS):
            if hold_of(listed.key) is None:
                continue
            data = self._read(listed.key)
            if data is not None:
                try:
                    decode_frame(data, FrameKind.HOLD, Hold, key=listed.key, where=self._blob.name)
                except (Corruption, StoreRefused) as error:
                    self._damaged(listed.key, error.detail)

    def _listed_rollups(self) -> list[int]:
        numbers = (number_of(listed.key) for listed in self._blob.list(ROLLUPS))
        return [number for number in numbers if number is not None]

    def _read(self, key: str) -> bytes | None:
        data = self._blob.get(key)
        if data is not None:
            self.objects += 1
            self.size += len(data)
        return data

    def _damaged(self, key: str, reason: str) -> None:
        self.damage.setdefault(key, reason)


def _stored_parts(state: State) -> Iterator[Stored]:
    for id in sorted(state.collections):
        for batch in state.collections[id].batches:
            yield from (part for part in batch.parts if isinstance(part, Stored))
