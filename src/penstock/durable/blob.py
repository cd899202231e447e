"""Blob: the interface of a store, a map from keys to bytes.

Guarantee: of all callers that `create` the same key, in any process and at any time, at most one
receives True. `probe.py` tests a store for it. An object exists completely or not at all, after
any crash.

Keys are relative, `/`-separated words of `[A-Za-z0-9._=-]` (see `keys.py`).
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
    """Time of the write, by the clock of the store."""


class GetBlob(Protocol):
    """The read operation of a `Blob`."""

    def get(self, key: str, *, start: int = 0) -> bytes | None:
        """Return the bytes at `key` from `start` on, or None if the object does not exist."""
        ...


class Blob(GetBlob, Protocol):
    """A durable map from keys to bytes, safe for use by several threads.

    Every method raises `DeterminateError` if nothing was written, `StoreRefused` if in addition a
    retry does not help, `IndeterminateError` if the outcome is unknown, `DurabilityLost` if an
    fsync failed, and `UsageError` after `close`.
    """

    @property
    def name(self) -> str:
        """URL of the store, without secrets."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write `data` durably at `key`, and replace an existing object."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write `data` durably at `key` if it does not exist, and return whether it was created."""
        ...

    def settle(self, keys: list[str]) -> None:
        """Make the objects at `keys`, which the caller has read, durable.

        Readers can see a local file before it is durable. A reader therefore settles a new log
        entry before it acts on the entry (hazard A5).
        """
        ...

    def delete(self, key: str) -> None:
        """Delete the object at `key`, if it exists."""
        ...

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        """Return the objects with `prefix` and a key above `after`, in order of key."""
        ...

    def close(self) -> bool:
        """Reject all further calls, and return whether the store was still open."""
        ...
