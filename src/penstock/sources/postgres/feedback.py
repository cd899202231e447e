"""Telling the server, on a timer of its own, what it may forget.

Postgres deletes log behind the confirmed position, so only what is durable here
may be confirmed: what was merely read would be lost if we stopped before the
next commit. A server that hears nothing for a while hangs up, however busy we
are; hence the timer. But one that keeps a slot alive for a process that has been
fenced would keep the new owner out, so the timer stops when nothing has proved for
half a minute that we are the writer, such as something that was made durable
(hazard A7).
"""

import threading
from typing import Final

from penstock.clock import Clock
from penstock.errors import SourceError
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.stream import ReplicationStream

__all__ = ["Feedback", "feedback_interval_ms"]

EVERY_MS: Final = 1_000
LEAST_MS: Final = 50
"""Feedback is not sent more often, however short `wal_sender_timeout` is."""

PROVED_MS: Final = 30_000
"""How long a proof that we are the writer lasts."""


class Feedback:
    """The timer of one stream."""

    def __init__(self, stream: ReplicationStream, clock: Clock, *, durable: Lsn) -> None:
        self._stream = stream
        self._interval_ms = feedback_interval_ms(stream.server_timeout_ms)
        self._clock = clock
        self._durable = durable
        self._proved_ms = clock.boot_ms()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feedback", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def durable(self, position: Lsn) -> None:
        """Everything that committed below `position` is durable; say so now, and from now on."""
        self._durable = position
        self.ownership_verified()
        self._stream.confirm(position)

    def ownership_verified(self) -> None:
        """We are the writer, as of now."""
        self._proved_ms = self._clock.boot_ms()

    def stop(self) -> None:
        """Send nothing more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._clock.wait(self._stop, self._interval_ms):
            if self._clock.boot_ms() - self._proved_ms > PROVED_MS:
                continue
            try:
                self._stream.confirm(self._durable)
            except SourceError:
                return  # Whoever reads the stream hears of it too, and does something about it.


def feedback_interval_ms(server_timeout_ms: int) -> int:
    """Return how often to send feedback to a server with this `wal_sender_timeout`; 0 is none.

    A third of the timeout: one message may be late, and the connection survives.
    """
    if not server_timeout_ms:
        return EVERY_MS
    return max(LEAST_MS, min(EVERY_MS, server_timeout_ms // 3))
