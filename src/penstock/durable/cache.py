"""A cache of write-once objects, verified at every read.

A reference to an object contains its size and checksum. `read` returns exactly the bytes that were
written, or raises `Corruption`. A missing, truncated or damaged object is never returned, neither
from the store nor from memory.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

import xxhash

from penstock.durable.blob import Blob
from penstock.errors import Corruption

__all__ = ["CacheStatistics", "CachedBlob", "checksum_of"]


def checksum_of(data: bytes | memoryview) -> int:
    """Return XXH64 with seed 0, the checksum of all stored objects."""
    return xxhash.xxh64_intdigest(data)


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counters of a cache."""

    hits: int
    misses: int
    bytes_held: int


class CachedBlob:
    """A least-recently-used cache of write-once objects, of at most `bound_bytes`."""

    def __init__(self, blob: Blob, *, bound_bytes: int) -> None:
        self._blob = blob
        self._bound = bound_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._bytes_held = 0
        self._hits = 0
        self._misses = 0

    def read(self, key: str, size: int, checksum: int) -> bytes:
        """Return the object at `key` with the given size and checksum.

        Raises:
            Corruption: the object is missing, or has another size or checksum.
        """
        cached = self._cached(key)
        if cached is not None and _fault(cached, size, checksum) is None:
            with self._lock:
                self._hits += 1
            return cached
        self._drop(key)  # A damaged copy in memory does not mean that the object is damaged.
        with self._lock:
            self._misses += 1
        data = self._blob.get(key)
        if data is None:
            raise Corruption(key, where=self._blob.name, detail="The object is missing.")
        fault = _fault(data, size, checksum)
        if fault is not None:
            raise Corruption(key, where=self._blob.name, detail=fault)
        self._add(key, data)
        return data

    def statistics(self) -> CacheStatistics:
        """Return hits, misses and the current size."""
        with self._lock:
            return CacheStatistics(self._hits, self._misses, self._bytes_held)

    def _cached(self, key: str) -> bytes | None:
        with self._lock:
            data = self._held.get(key)
            if data is not None:
                self._held.move_to_end(key)
            return data

    def _drop(self, key: str) -> None:
        with self._lock:
            self._bytes_held -= len(self._held.pop(key, b""))

    def _add(self, key: str, data: bytes) -> None:
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
        return f"The object has {len(data)} bytes and was written with {size}."
    actual = checksum_of(data)
    if actual != checksum:
        return f"The checksum is {actual:016x} and was {checksum:016x} at the write."
    return None
