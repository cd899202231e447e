"""Whether a store really creates only once.

Some servers take `If-None-Match` and ignore it. On such a store two writers
could both be told that entry *n* is theirs, and everything above would be
wrong without a sign. So before a location is first written to, many threads
race to create one key; each time exactly one may win, its bytes must be what
is read, and a late creator must be refused. What passed is remembered in the
store itself.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from penstock.durable.blob import Blob
from penstock.errors import StoreRefused
from penstock.telemetry import fields, logger

__all__ = ["PASSED", "probe"]

log = logger("durable")

PASSED: Final = "probe/passed-1"
"""The object that says so; the number is that of the test it passed."""


def probe(blob: Blob, ids: Callable[[], str], *, racers: int = 16, rounds: int = 3) -> bool:
    """Check that `blob` creates only once; whether it had to be tried now.

    `ids` gives words nobody has used before, so that probes do not meet. Give
    it a `RetryingBlob`, or a moment's trouble ends the probe with its error.

    Raises:
        StoreRefused: if the store let two creators win, or lost the winner's bytes.
    """
    if blob.get(PASSED) is not None:
        return False
    nonce = ids()
    keys = [f"probe/{nonce}-{number}" for number in range(rounds)]
    try:
        for key in keys:
            _race(blob, key, racers)
    finally:
        for key in keys:
            blob.delete(key)
    blob.create(PASSED, b"")
    log.info("probed store", extra=fields(store=blob.name, racers=racers, rounds=rounds))
    return True


def _race(blob: Blob, key: str, racers: int) -> None:
    start = threading.Barrier(racers)

    def run(data: bytes) -> bool:
        start.wait()
        return blob.create(key, data)

    entries = [f"{key} by racer {number}".encode() for number in range(racers)]
    with ThreadPoolExecutor(racers) as threads:
        # Taken one by one, so that every racer is through before an error is told.
        futures = [threads.submit(run, entry) for entry in entries]
    won = [entry for entry, future in zip(entries, futures, strict=True) if future.result()]
    if len(won) != 1:
        raise _refused(
            blob, f"Of {racers} racing creators of one key {len(won)} were told they won."
        )
    if blob.get(key) != won[0]:
        raise _refused(blob, "A creator was told it won, and other bytes were read back.")
    if blob.create(key, b"late"):
        raise _refused(blob, "A key that was there already was created a second time.")


def _refused(blob: Blob, seen: str) -> StoreRefused:
    return StoreRefused(
        f'location "{blob.name}" does not keep to one creator for each key',
        detail=seen,
        hint="Use a store with conditional create (If-None-Match: *), as S3 has it, and no proxy "
        "in front of it that drops the header.",
    )
