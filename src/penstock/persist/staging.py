"""Staging ids: files are written under one before they are linked.

A file may be linked only while the log has its id open, and may be deleted only after
the id is closed and if nothing links the file. So no sweep can delete a file that is
about to be linked, however old the file or stale the sweep (hazard A2). An id begins
with the epoch that opened it.
"""

import threading
from collections.abc import Sequence
from typing import Final

from penstock.errors import UsageError
from penstock.persist.state import Batch, files_of, staging_of

__all__ = ["Staging", "epoch_of"]

FILES_PER_ID: Final = 256


def epoch_of(staging: str) -> int:
    """Return the epoch that opened a staging id."""
    return int(staging.partition("-")[0])


class Staging:
    """Staging ids of this writer: the current one, and older ones with unlinked files."""

    def __init__(self, epoch: int, current: str | None = None) -> None:
        self._lock = threading.Lock()
        self._epoch = epoch
        self._turn = 0 if current is None else int(current.partition("-")[2])
        self._users: dict[str, int] = {self.current: 0}
        self._used = 0

    @property
    def current(self) -> str:
        """Id for new files."""
        return f"{self._epoch}-{self._turn}"

    def acquire(self) -> str:
        """Return the id for one batch. Call `release` once it is linked, or `give_up`."""
        with self._lock:
            self._users[self.current] += 1
            self._used += 1
            return self.current

    def share(self, batches: Sequence[Batch]) -> None:
        """Count the batches, written under ids in use, as about to be linked; all or none."""
        with self._lock:
            used = [id for batch in batches for id in {staging_of(key) for key in files_of(batch)}]
            for id in used:
                if id not in self._users:
                    raise UsageError(
                        f'batch was written under staging id "{id}", which is not in use here',
                        hint="Append it inside the block that opened the id.",
                    )
            for id in used:
                self._users[id] += 1

    def release(self, batch: Batch) -> None:
        """Record that the batch was linked, or never will be."""
        for staging in {staging_of(key) for key in files_of(batch)}:
            with self._lock:
                self._users[staging] -= 1

    def give_up(self, staging: str) -> None:
        """Record that this use of the id writes no more files."""
        with self._lock:
            self._users[staging] -= 1

    def wear_out(self) -> None:
        """Request a new id soon: other processes wrote under this one and may have left garbage."""
        with self._lock:
            self._used = FILES_PER_ID

    def worn(self) -> bool:
        """Return whether a new id is due; closing the old one makes its garbage collectable."""
        with self._lock:
            return self._used >= FILES_PER_ID

    def next_id(self) -> str:
        """Return the id that `turn_over` will use."""
        return f"{self._epoch}-{self._turn + 1}"

    def turn_over(self) -> None:
        """Switch to the next id, which the log has opened."""
        with self._lock:
            self._turn += 1
            self._users[self.current] = 0
            self._used = 0

    def finished(self) -> list[str]:
        """Return older ids without users, each once."""
        with self._lock:
            done = [id for id, users in self._users.items() if users == 0 and id != self.current]
            for id in done:
                del self._users[id]
            return done
