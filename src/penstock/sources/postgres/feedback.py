"""Timer that confirms the durable position to the server.

Postgres deletes WAL below the confirmed position, so only durable changes may be confirmed. Changes
that were only read would be lost if the process stopped before the next commit. A server that
receives no feedback for `wal_sender_timeout` closes the connection, even while the process is busy.
Feedback therefore has its own timer.

A fenced process that kept sending feedback would keep the slot active, and the new owner could not
use it (hazard A7). Feedback therefore pauses if ownership was last verified more than
`OWNERSHIP_VALID_MS` ago. A commit that became durable is one such verification.
"""

import threading
from typing import Final

from penstock.clock import Clock
from penstock.errors import SourceError
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.replication_stream import ReplicationStream

__all__ = ["Feedback", "feedback_interval_ms"]

INTERVAL_MS: Final = 1_000
SHORTEST_MS: Final = 50
"""Shortest interval between two feedback messages, even for a very short `wal_sender_timeout`."""

OWNERSHIP_VALID_MS: Final = 30_000
"""Validity of a verification of ownership."""


class Feedback:
    """Feedback timer of one stream."""

    def __init__(self, stream: ReplicationStream, clock: Clock, *, durable: Lsn) -> None:
        self._stream = stream
        self._interval_ms = feedback_interval_ms(stream.server_timeout_ms)
        self._clock = clock
        self._durable = durable
        self._verified_ms = clock.boot_ms()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feedback", daemon=True)

    def start(self) -> None:
        """Start the timer."""
        self._thread.start()

    def durable(self, position: Lsn) -> None:
        """Confirm `position` now and at each interval: all commits below it are durable."""
        self._durable = position
        self.ownership_verified()
        self._stream.confirm(position)

    def ownership_verified(self) -> None:
        """Record that this process is the writer as of now."""
        self._verified_ms = self._clock.boot_ms()

    def stop(self) -> None:
        """Stop the timer and wait for its thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._clock.wait(self._stop, self._interval_ms):
            if self._clock.boot_ms() - self._verified_ms > OWNERSHIP_VALID_MS:
                continue
            try:
                self._stream.confirm(self._durable)
            except SourceError:
                return  # The reader of the stream receives the same error and handles it.


def feedback_interval_ms(server_timeout_ms: int) -> int:
    """Return the feedback interval for a server's `wal_sender_timeout`; 0 means no timeout.

    The interval is a third of the timeout, so the connection survives one late message.
    """
    if not server_timeout_ms:
        return INTERVAL_MS
    return max(SHORTEST_MS, min(INTERVAL_MS, server_timeout_ms // 3))
