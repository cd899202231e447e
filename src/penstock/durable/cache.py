"""Objects that are written once, kept near and checked at every reading.

Whoever links an object knows its size and checksum, and asks with them. What
comes back is what was written, or `Corruption`: a missing, shortened or
flipped object is never passed on, from the store or from memory.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

import xxhash

from penstock.durable.blob import Blob
from penstock.errors import Corruption

__all__ = ["CacheStatistics", "CachedBlob", "checksum_of"]


def checksum_of(data: bytes | memoryview) -> int:
    """XXH64 with seed 0, the one checksum of the house."""
    return xxhash.xxh64_intdigest(data)


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """How well the cache does."""

    hits: int
    misses: int
    bytes_held: int


class CachedBlob:
    """Reads write-once objects of `blob`, holding at most `bound_bytes` of the latest used."""

    def __init__(self, blob: Blob, *, bound_bytes: int) -> None:
        self._blob = blob
        self._bound = bound_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._bytes_held = 0
        self._hits = 0
        self._misses = 0

    def read(self, key: str, size: int, checksum: int) -> bytes:
        """The object at `key`, which is known to have this size and checksum.

        Raises:
            Corruption: if the store has no such object, or another.
        """
        near = self._near(key)
        if near is not None and _fault(near, size, checksum) is None:
            with self._lock:
                self._hits += 1
            return near
        self._forget(key)  # A damaged copy says nothing of the object; the store is asked.
        with self._lock:
            self._misses += 1
        data = self._blob.get(key)
        if data is None:
            raise Corruption(key, where=self._blob.name, detail="The object is missing.")
        fault = _fault(data, size, checksum)
        if fault is not None:
            raise Corruption(key, where=self._blob.name, detail=fault)
        self._keep(key, data)
        return data

    def statistics(self) -> CacheStatistics:
        """Hits, misses and what is held now."""
        with self._lock:
            return CacheStatistics(self._hits, self._misses, self._bytes_held)

    def _near(self, key: str) -> bytes | None:
        with self._lock:
            data = self._held.get(key)
            if data is not None:
                self._held.move_to_end(key)
            return data

    def _forget(self, key: str) -> None:
        with self._lock:
            self._bytes_held -= len(self._held.pop(key, b""))

    def _keep(self, key: str, data: bytes) -> None:
        if len(data) > self._bound:
            return
        with self._lock:
            self._bytes_held += len(data) - len(self._held.pop(key, b""))
            self._held[key] = data
            while self._bytes_held > self._bound:
                _, dropped = self._held.popitem(last=False)
                self._bytes_held -= len(dropped)


def _fault(data: bytes, size: int, checksum: int) -> str | None:
    if len(data) != size:
        return f"It has {len(data)} bytes and was written with {size}."
    found = checksum_of(data)
    if found != checksum:
        return f"Its checksum is {found:016x} and was {checksum:016x} when it was written."
    return None
