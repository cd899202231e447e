"""Log: numbered entries, each created once.

Entry *n* is an object that is created only if it does not exist. This creation is the only
linearization point of a storage location. Numbers start at 0 and have no gaps.

    mark/floor-3             entries below 3 are void, present or not
    log/…0/003  log/…0/004   dense from the floor to the head, 1000 in a folder
    mark/head-5              entries below 5 existed when this was written

Truncation writes the floor first and deletes entries second. An entry that is created later at a
truncated number is therefore void (hazard A1). A head mark records that entries existed: without
it, `verify` and readers could not detect the loss of the newest entry. Objects with other names do
not belong to the log, and are neither read nor deleted.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from penstock.durable.blob import Blob
from penstock.errors import Corruption, UsageError
from penstock.failpoints import Failpoint, hit

__all__ = ["Log", "Marks", "entry_key", "entry_number"]

ENTRIES: Final = "log/"
MARKS: Final = "mark/"

SEGMENT: Final = 1_000
"""Entries in a folder. A listing of one end of the log need not include all of it."""

SERIAL_READS: Final = 8
PARALLEL_READS: Final = 16


def entry_key(number: int) -> str:
    """Return the key of entry `number`."""
    return f"{_folder(number)}{number % SEGMENT:03d}"


def entry_number(key: str) -> int | None:
    """Return the number of the entry at `key`; None, if `key` is not the key of an entry."""
    match = _ENTRY.fullmatch(key)
    return None if match is None else int(match[1] + match[2])


@dataclass(frozen=True, slots=True)
class Marks:
    """Bounds of a log that are known without reading it."""

    floor: int
    """Entries below this number are void."""

    head: int
    """Entries below this number have existed."""


class Log:
    """The numbered entries of one storage location."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob

    def create(self, number: int, data: bytes) -> bool:
        """Create entry `number` if it does not exist, and return whether it was created."""
        hit(Failpoint.LOG_CREATE_BEGIN)
        created = self._blob.create(entry_key(number), data)
        hit(Failpoint.LOG_CREATE_DONE)
        return created

    def read(self, number: int) -> bytes | None:
        """Return entry `number`, settled; None, if it does not exist yet or any more."""
        data = self._blob.get(entry_key(number))
        if data is not None:
            self._blob.settle([entry_key(number)])
        return data

    def read_from(self, number: int, *, limit: int) -> list[bytes]:
        """Return at most `limit` entries from `number` to the first missing one, settled."""
        entries: list[bytes] = []
        while len(entries) < limit:
            data = self._blob.get(entry_key(number + len(entries)))
            if data is None:
                break
            entries.append(data)
            if len(entries) == SERIAL_READS and limit > SERIAL_READS:
                entries += self._read_many(number + SERIAL_READS, limit - SERIAL_READS)
                break
        if entries:
            self._blob.settle([entry_key(number + i) for i in range(len(entries))])
        return entries

    def _read_many(self, number: int, limit: int) -> list[bytes]:
        # Several at a time: a remote store has a high latency.
        entries: list[bytes] = []
        with ThreadPoolExecutor(PARALLEL_READS, "penstock-log") as pool:
            while len(entries) < limit:
                first = number + len(entries)
                keys = [
                    entry_key(first + i) for i in range(min(PARALLEL_READS, limit - len(entries)))
                ]
                for data in pool.map(self._blob.get, keys):
                    if data is None:
                        return entries
                    entries.append(data)
        return entries

    def marks(self) -> Marks:
        """Return the floor and the newest head mark."""
        floor = head = 0
        for listed in self._blob.list(MARKS):
            match _mark_of(listed.key):
                case "floor", number:
                    floor = max(floor, number)
                case "head", number:
                    head = max(head, number)
                case _:
                    pass
        return Marks(floor=floor, head=max(floor, head))

    def nothing_beyond(self, number: int) -> None:
        """Check that the log ends at `number`, and that `number` is not a gap."""
        listed = self._blob.list(ENTRIES, after=entry_key(number))
        beyond = [entry.key for entry in listed if entry_number(entry.key) is not None]
        # Another writer may have created the entry since the caller read it.
        if beyond and self._blob.get(entry_key(number)) is None and self.marks().floor <= number:
            raise Corruption(
                entry_key(number),
                where=self._blob.name,
                detail=f"The log entry is missing, and a later entry {beyond[0]} exists.",
            )

    def entries(self) -> list[int]:
        """Return the numbers of all stored entries, void ones included."""
        numbers = (entry_number(listed.key) for listed in self._blob.list(ENTRIES))
        return [number for number in numbers if number is not None]

    def written_ms(self, number: int) -> int | None:
        """Return the time of the write of an entry, by the clock of the store; None, if missing."""
        key = entry_key(number)
        times = [listed.modified_ms for listed in self._blob.list(key) if listed.key == key]
        return times[0] if times else None

    def truncate(self, floor: int, *, head: int) -> None:
        """Void the entries below `floor`, then delete them.

        The caller guarantees that a rollup contains them, and that each of them is too old to be
        the head in the view of a paused writer.
        """
        marks = self.marks()
        if not marks.floor <= floor <= head:
            raise UsageError(
                f'log of location "{self._blob.name}" cannot be truncated to {floor}',
                detail=f"The log has entries in [{marks.floor}, {head}).",
                hint=f"Truncate to a number from {marks.floor} to {head}.",
            )
        hit(Failpoint.FLOOR_BEGIN)
        self._mark("floor", floor)
        hit(Failpoint.FLOOR_DONE)
        for first in range(marks.floor // SEGMENT * SEGMENT, floor, SEGMENT):
            self._delete_below(floor, _folder(first))
        hit(Failpoint.TRUNCATE_DONE)

    def sweep(self) -> None:
        """Delete entries below the floor, such as a void entry that was created late."""
        self._delete_below(self.marks().floor, ENTRIES)

    def _delete_below(self, floor: int, prefix: str) -> None:
        for listed in self._blob.list(prefix):
            number = entry_number(listed.key)
            if number is None:
                continue
            if number >= floor:
                break
            self._blob.delete(listed.key)

    def witness(self, head: int) -> None:
        """Record that entries below `head` exist."""
        self._mark("head", head)

    def _mark(self, kind: str, number: int) -> None:
        older = [listed.key for listed in self._blob.list(f"{MARKS}{kind}-")]
        key = f"{MARKS}{kind}-{number:020d}"
        self._blob.create(key, b"")
        for stale in older:
            if stale < key and _mark_of(stale) is not None:
                self._blob.delete(stale)


_ENTRY: Final = re.compile(rf"{ENTRIES}([0-9]{{17}})/([0-9]{{3}})")
_MARK: Final = re.compile(rf"{MARKS}(floor|head)-([0-9]{{20}})")


def _mark_of(key: str) -> tuple[str, int] | None:
    match = _MARK.fullmatch(key)
    return None if match is None else (match[1], int(match[2]))


def _folder(number: int) -> str:
    return f"{ENTRIES}{number // SEGMENT:017d}/"
