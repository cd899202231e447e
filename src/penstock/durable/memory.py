"""A store in memory, for experiments and tests.

The store keeps all guarantees of `Blob`, but does not outlive the process. Handles of one `Shelf`
share its objects, as processes share a folder. Each handle is closed separately.
"""

import threading
from dataclasses import dataclass, field

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.durable.blob import Listed
from penstock.durable.keys import checked_key, checked_prefix
from penstock.errors import UsageError

__all__ = ["MemoryBlob", "Shelf"]


@dataclass(slots=True)
class Shelf:
    """Objects that several handles may share."""

    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    """Bytes and time of the write, by key."""

    lock: threading.Lock = field(default_factory=threading.Lock)


class MemoryBlob:
    """A `Blob` in a dictionary. With a prefix, it is a folder of the shelf."""

    def __init__(
        self,
        shelf: Shelf | None = None,
        *,
        name: str = "memory:",
        prefix: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._shelf = Shelf() if shelf is None else shelf
        self._name = name
        self._prefix = prefix
        self._clock = clock
        self._closed = False

    @property
    def name(self) -> str:
        """`memory:`, with the name of the shelf, if it has one."""
        return self._name

    def get(self, key: str, *, start: int = 0) -> bytes | None:
        whole = self._checked(key)
        with self._shelf.lock:
            entry = self._shelf.objects.get(whole)
        return None if entry is None else entry[0][start:]

    def put(self, key: str, data: bytes) -> None:
        whole = self._checked(key)
        with self._shelf.lock:
            self._shelf.objects[whole] = (bytes(data), self._clock.now_ms())

    def create(self, key: str, data: bytes) -> bool:
        whole = self._checked(key)
        with self._shelf.lock:
            if whole in self._shelf.objects:
                return False
            self._shelf.objects[whole] = (bytes(data), self._clock.now_ms())
            return True

    def settle(self, keys: list[str]) -> None:
        """Do nothing: no object survives a power cut."""
        for key in keys:
            self._checked(key)

    def delete(self, key: str) -> None:
        whole = self._checked(key)
        with self._shelf.lock:
            self._shelf.objects.pop(whole, None)

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        self._open()
        whole = self._prefix + checked_prefix(prefix)
        beyond = self._prefix + after
        with self._shelf.lock:
            return sorted(
                Listed(key.removeprefix(self._prefix), len(data), modified_ms)
                for key, (data, modified_ms) in self._shelf.objects.items()
                if key.startswith(whole) and key > beyond
            )

    def close(self) -> bool:
        """Close this handle. Other handles of the shelf stay open."""
        with self._shelf.lock:
            closing, self._closed = not self._closed, True
        return closing

    def _checked(self, key: str) -> str:
        self._open()
        return self._prefix + checked_key(key)

    def _open(self) -> None:
        if self._closed:
            raise UsageError(f'location "{self._name}" is closed', hint="Open it again.")
