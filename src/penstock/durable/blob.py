"""Blob: keys to bytes, the only thing we ask of a store.

Six verbs, and one promise that everything stands on: of any number of callers
that `create` the same key, at whatever time and from whatever process, at
most one is told that it was created. `probe.py` tests a store for it.

Keys are `/`-separated, relative, of `[A-Za-z0-9._=-]` (see `keys.py`). An object is there
whole or not at all, whatever dies when.
"""

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Blob", "GetBlob", "Listed"]


@dataclass(frozen=True, slots=True, order=True)
class Listed:
    """One object of a listing."""

    key: str
    size: int
    modified_ms: int
    """When it was written, by the store's own clock."""


class GetBlob(Protocol):
    """The reading half, for those who need no more."""

    def get(self, key: str, *, start: int = 0) -> bytes | None:
        """The bytes at `key` from `start` on, or None if there is no such object."""
        ...


class Blob(GetBlob, Protocol):
    """A durable map from key to bytes. Safe to share between threads.

    Every method raises `DeterminateError` if nothing happened, `StoreRefused`
    if nothing happened and nothing will, `IndeterminateError` if it may have,
    `DurabilityLost` if a sync failed; and `UsageError` after `close`.
    """

    @property
    def name(self) -> str:
        """The URL of the store as people know it, without secrets."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Make `data` durable at `key`, replacing what was there."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Make `data` durable at `key` if nothing is there; whether it was done."""
        ...

    def settle(self, keys: list[str]) -> None:
        """Return once the objects at `keys`, which the caller has read, will survive a power cut.

        Local files are seen by readers a moment before they are durable; a
        reader settles a new log entry before acting on it (hazard A5).
        """
        ...

    def delete(self, key: str) -> None:
        """Remove `key`; a missing one is no error."""
        ...

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        """The objects whose key starts with `prefix` and sorts after `after`, in order of key."""
        ...

    def close(self) -> bool:
        """Refuse all further calls. Whether this call was the one that closed it."""
        ...
