"""Log: numbered entries, each created once.

Entry *n* is an object that is created only if it does not exist, and that
creation is the one linearization point of everything above. Numbers start at
0 and have no gaps.

    mark/floor-3             entries below 3 are void, present or not
    log/…0/003  log/…0/004   dense from the floor to the head, a thousand to a folder
    mark/head-5              entries below 5 existed when this was written

Truncation writes the floor first and deletes after, so that an entry created
at a number that had been truncated is never taken for one that counts
(hazard A1). A head mark is a witness: it lets `verify` and any reader notice
that the newest entry has been lost, which its absence alone would not show.
Objects called otherwise are not ours, and are neither read nor deleted.
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
"""Entries to a folder: a look at one end of the log need not list all of it."""

FEW: Final = 8
AT_ONCE: Final = 16


def entry_key(number: int) -> str:
    """What the object of entry `number` is called."""
    return f"{_folder(number)}{number % SEGMENT:03d}"


def entry_number(key: str) -> int | None:
    """The number of the entry whose object is called `key`; None if it is not ours."""
    found = _ENTRY.fullmatch(key)
    return None if found is None else int(found[1] + found[2])


@dataclass(frozen=True, slots=True)
class Marks:
    """What is known of a log's two ends without reading it."""

    floor: int
    """Entries below it are void."""

    head: int
    """Entries below it existed once."""


class Log:
    """The numbered entries of one storage location."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob

    def create(self, number: int, data: bytes) -> bool:
        """Make `data` entry `number` if there is none; whether it was done."""
        hit(Failpoint.LOG_CREATE_BEGIN)
        created = self._blob.create(entry_key(number), data)
        hit(Failpoint.LOG_CREATE_DONE)
        return created

    def read(self, number: int) -> bytes | None:
        """Entry `number`, settled, or None if there is none (yet, or any more)."""
        data = self._blob.get(entry_key(number))
        if data is not None:
            self._blob.settle([entry_key(number)])
        return data

    def read_from(self, number: int, *, limit: int) -> list[bytes]:
        """The entries from `number` on, settled, up to the first that is missing or `limit`."""
        found: list[bytes] = []
        while len(found) < limit:
            data = self._blob.get(entry_key(number + len(found)))
            if data is None:
                break
            found.append(data)
            if len(found) == FEW and limit > FEW:
                found += self._read_many(number + FEW, limit - FEW)
                break
        if found:
            self._blob.settle([entry_key(number + i) for i in range(len(found))])
        return found

    def _read_many(self, number: int, limit: int) -> list[bytes]:
        """The same, several at once: a store far away takes its time over each."""
        found: list[bytes] = []
        with ThreadPoolExecutor(AT_ONCE, "penstock-log") as pool:
            while len(found) < limit:
                first = number + len(found)
                keys = [entry_key(first + i) for i in range(min(AT_ONCE, limit - len(found)))]
                for data in pool.map(self._blob.get, keys):
                    if data is None:
                        return found
                    found.append(data)
        return found

    def marks(self) -> Marks:
        """The floor and the newest witness of the head."""
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
        """Check that `number` is where the log ends, not a hole in it."""
        listed = self._blob.list(ENTRIES, after=entry_key(number))
        beyond = [each.key for each in listed if entry_number(each.key) is not None]
        # The number itself may have been created since the caller looked.
        if beyond and self._blob.get(entry_key(number)) is None and self.marks().floor <= number:
            raise Corruption(
                entry_key(number),
                where=self._blob.name,
                detail=f"The log entry is missing, though {beyond[0]} exists after it.",
            )

    def entries(self) -> list[int]:
        """The numbers that have an object, voided ones included."""
        numbers = (entry_number(listed.key) for listed in self._blob.list(ENTRIES))
        return [number for number in numbers if number is not None]

    def written_ms(self, number: int) -> int | None:
        """When entry `number` was written, by the store's clock; None if it is not there."""
        key = entry_key(number)
        found = [listed.modified_ms for listed in self._blob.list(key) if listed.key == key]
        return found[0] if found else None

    def truncate(self, floor: int, *, head: int) -> None:
        """Make entries below `floor` void, then delete them. Exclusive.

        The caller vouches that everything below is in a rollup and that no
        entry below `floor` is young enough for a paused writer to believe it
        stands at the head.
        """
        marks = self.marks()
        if not marks.floor <= floor <= head:
            raise UsageError(
                f'log of location "{self._blob.name}" cannot be truncated to {floor}',
                detail=f"Its entries are {marks.floor} up to {head}, the latter not included.",
                hint=f"Truncate to a number from {marks.floor} to {head}.",
            )
        hit(Failpoint.FLOOR_BEGIN)
        self._mark("floor", floor)
        hit(Failpoint.FLOOR_DONE)
        for first in range(marks.floor // SEGMENT * SEGMENT, floor, SEGMENT):
            self._delete_below(floor, _folder(first))
        hit(Failpoint.TRUNCATE_DONE)

    def sweep(self) -> None:
        """Delete what lies below the floor, such as a void entry that landed late."""
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
        """Note down that entries below `head` exist."""
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
    found = _MARK.fullmatch(key)
    return None if found is None else (found[1], int(found[2]))


def _folder(number: int) -> str:
    return f"{ENTRIES}{number // SEGMENT:017d}/"
