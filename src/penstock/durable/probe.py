"""Check that a store creates each key only once.

Some servers accept `If-None-Match` and ignore it. On such a store two writers could both create
entry *n*, without any error. Before the first write to a location, several threads therefore race
to create one key. In each race exactly one thread must succeed, a read must return its bytes, and
a later creator must be rejected. The store records that it has passed.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from penstock.durable.blob import Blob
from penstock.errors import StoreRefused
from penstock.telemetry import fields, logger

__all__ = ["PASSED", "probe_location"]

log = logger("durable")

PASSED: Final = "probe/passed-1"
"""Object that records a passed probe, with the version of the probe."""


def probe_location(blob: Blob, ids: Callable[[], str], *, racers: int = 16, races: int = 3) -> bool:
    """Check that `blob` creates each key only once; return False if it has passed before.

    `ids` returns unique words, which keeps concurrent probes apart. `blob` should be a
    `RetryingBlob`: otherwise a transient error ends the probe.

    Raises:
        StoreRefused: two creators succeeded, or the bytes of the winner were lost.
    """
    if blob.get(PASSED) is not None:
        return False
    nonce = ids()
    keys = [f"probe/{nonce}-{number}" for number in range(races)]
    try:
        for key in keys:
            _race(blob, key, racers)
    finally:
        for key in keys:
            blob.delete(key)
    blob.create(PASSED, b"")
    log.info("probed store", extra=fields(store=blob.name, racers=racers, races=races))
    return True


def _race(blob: Blob, key: str, racers: int) -> None:
    start = threading.Barrier(racers)

    def run(data: bytes) -> bool:
        start.wait()
        return blob.create(key, data)

    entries = [f"{key} by racer {number}".encode() for number in range(racers)]
    with ThreadPoolExecutor(racers) as threads:
        # All racers end before the first result is read, which may be an error.
        futures = [threads.submit(run, entry) for entry in entries]
    won = [entry for entry, future in zip(entries, futures, strict=True) if future.result()]
    if len(won) != 1:
        raise _refused(blob, f"Of {racers} concurrent creators of one key, {len(won)} succeeded.")
    if blob.get(key) != won[0]:
        raise _refused(blob, "A create succeeded, and a read returned other bytes.")
    if blob.create(key, b"late"):
        raise _refused(blob, "A create of an existing key succeeded.")


def _refused(blob: Blob, detail: str) -> StoreRefused:
    return StoreRefused(
        f'location "{blob.name}" accepts several creators of one key',
        detail=detail,
        hint="Use a store with conditional create (If-None-Match: *), such as S3, without a proxy "
        "that drops the header.",
    )
