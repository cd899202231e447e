import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.durable.cache import CachedBlob, checksum_of
from penstock.durable.memory import MemoryBlob
from penstock.errors import Corruption


@settings(deadline=None)  # Slow on two shared cores.
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    reads=st.lists(st.integers(0, 11), max_size=40),
    bound=st.integers(0, 100),
)
def test_cache_keeps_most_recent_objects_within_bound_and_returns_exact_bytes(
    sizes: list[int], reads: list[int], bound: int
) -> None:
    blob = MemoryBlob()
    objects = [bytes([number]) * size for number, size in enumerate(sizes)]
    for number, data in enumerate(objects):
        blob.put(f"part/{number}", data)
    cache = CachedBlob(blob, bound_bytes=bound)
    latest: list[int] = []
    for read in reads:
        number = read % len(objects)
        data = objects[number]
        hits = cache.statistics().hits
        assert cache.read(f"part/{number}", len(data), checksum_of(data)) == data
        assert cache.statistics().bytes_held <= bound
        held = _fitting([len(objects[each]) for each in latest], bound)
        assert (cache.statistics().hits == hits + 1) == (number in latest[:held])
        if len(data) <= bound:
            latest = [number, *(each for each in latest[:held] if each != number)]
    statistics = cache.statistics()
    assert statistics.hits + statistics.misses == len(reads)


def _fitting(sizes: list[int], bound: int) -> int:
    """Return how many of the most recent objects fit together."""
    count = 0
    while count < len(sizes) and sum(sizes[: count + 1]) <= bound:
        count += 1
    return count


DATA = b"a batch"


@pytest.mark.parametrize(
    ("stored", "detail"),
    [
        (b"a batc", "The object has 6 bytes and was written with 7."),
        (b"a bbtch", "The checksum is"),
        (None, "The object is missing."),
    ],
    ids=["truncated", "flipped", "missing"],
)
def test_cache_read_of_damaged_object_raises_corruption_and_caches_nothing(
    stored: bytes | None, detail: str
) -> None:
    blob = MemoryBlob(name="memory:lake")
    if stored is not None:
        blob.put("part/1", stored)
    cache = CachedBlob(blob, bound_bytes=100)
    for _ in range(2):
        with pytest.raises(
            Corruption, match='object "part/1" of location "memory:lake"'
        ) as damaged:
            cache.read("part/1", len(DATA), checksum_of(DATA))
        assert detail in damaged.value.detail
    assert cache.statistics().bytes_held == 0
    blob.put("part/1", DATA)
    assert cache.read("part/1", len(DATA), checksum_of(DATA)) == DATA


class LentBlob(MemoryBlob):
    """Store that returns its own mutable buffers. A test can damage them after the read."""

    def __init__(self) -> None:
        super().__init__()
        self.lent: list[bytearray] = []

    def get(self, key: str, *, start: int = 0) -> bytes | None:
        self.lent.append(bytearray(DATA[start:]))
        return self.lent[-1]  # type: ignore[return-value]  # A bytearray behaves as bytes here.


def test_cache_entry_damaged_in_memory_is_dropped_and_read_again() -> None:
    blob = LentBlob()
    cache = CachedBlob(blob, bound_bytes=100)
    cache.read("part/1", len(DATA), checksum_of(DATA))
    blob.lent[0][0] ^= 1
    assert cache.read("part/1", len(DATA), checksum_of(DATA)) == DATA
    assert len(blob.lent) == 2
    assert cache.statistics().hits == 0
    assert cache.read("part/1", len(DATA), checksum_of(DATA)) == DATA
    assert (cache.statistics().hits, cache.statistics().misses) == (1, 2)


def test_cache_shared_by_threads_returns_exact_bytes_within_bound() -> None:
    blob = MemoryBlob()
    for number in range(20):
        blob.put(f"part/{number}", bytes([number]) * 10)
    cache = CachedBlob(blob, bound_bytes=55)
    start = threading.Barrier(4, timeout=60)

    def run(seed: int) -> None:
        start.wait()
        for step in range(300):
            number = (step * (seed + 1)) % 20
            data = bytes([number]) * 10
            assert cache.read(f"part/{number}", 10, checksum_of(data)) == data

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))
    assert cache.statistics().hits + cache.statistics().misses == 1_200
    assert cache.statistics().bytes_held <= 55
