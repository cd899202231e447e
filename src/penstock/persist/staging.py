"""Staging ids: under which files are written before they are linked.

A file may be linked only while its id is open in the log, and may be deleted
only once its id is closed and nothing links it; so no sweep, however late it
reads or however old the file, can take what is about to be linked (hazard A2).
Ids begin with the epoch that opened them.
"""

import threading
from collections.abc import Sequence
from typing import Final

from penstock.errors import UsageError
from penstock.persist.state import Batch, files_of, staging_of

__all__ = ["Staging", "epoch_of"]

FILES_PER_ID: Final = 256


def epoch_of(staging: str) -> int:
    """The epoch in which a staging id was opened."""
    return int(staging.partition("-")[0])


class Staging:
    """The ids of this writer: one in use, and older ones until their last file is linked."""

    def __init__(self, epoch: int, current: str | None = None) -> None:
        self._lock = threading.Lock()
        self._epoch = epoch
        self._turn = 0 if current is None else int(current.partition("-")[2])
        self._users: dict[str, int] = {self.current: 0}
        self._used = 0

    @property
    def current(self) -> str:
        """The id under which to write now."""
        return f"{self._epoch}-{self._turn}"

    def acquire(self) -> str:
        """The id to write one batch under; give it back with `release` once linked or given up."""
        with self._lock:
            self._users[self.current] += 1
            self._used += 1
            return self.current

    def share(self, batches: Sequence[Batch]) -> None:
        """The batches, written under ids that are in use, are about to be linked; all or none."""
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
        """The batch was linked, or never will be."""
        for staging in {staging_of(key) for key in files_of(batch)}:
            with self._lock:
                self._users[staging] -= 1

    def give_up(self, staging: str) -> None:
        """Nothing more will be written under this use of the id."""
        with self._lock:
            self._users[staging] -= 1

    def wear_out(self) -> None:
        """Take a new id soon: others wrote under this one, and may have left garbage."""
        with self._lock:
            self._used = FILES_PER_ID

    def worn(self) -> bool:
        """Whether it is time for a new id, so that the old one's garbage can be found."""
        with self._lock:
            return self._used >= FILES_PER_ID

    def next_id(self) -> str:
        """The id that `turn_over` will bring into use."""
        return f"{self._epoch}-{self._turn + 1}"

    def turn_over(self) -> None:
        """Use the next id, which the log has opened, from now on."""
        with self._lock:
            self._turn += 1
            self._users[self.current] = 0
            self._used = 0

    def finished(self) -> list[str]:
        """Older ids that nobody writes under any more; each is told once."""
        with self._lock:
            done = [id for id, users in self._users.items() if users == 0 and id != self.current]
            for id in done:
                del self._users[id]
            return done
