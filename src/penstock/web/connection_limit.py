"""Limits of the status page: connections, time to send a request, log lines.

The page shares its process with the pipeline. Any client that reaches its address can open
connections and send nothing, without a token. The page uses at most a fixed share of the file
descriptors of the process, and leaves the others to the pipeline.
"""

import asyncio
import logging
import resource
import time
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["ACCEPTED_AT_ONCE", "MOST_CONNECTIONS", "LimitedProtocol", "LogRate", "connection_limit"]

MOST_CONNECTIONS: Final = 64
ACCEPTED_AT_ONCE: Final = 16
"""Backlog, and also the number of connections that asyncio accepts in one iteration."""

REQUEST_S: Final = 10.0
"""Time limit for a client to send the head of a request, in seconds."""

LOG_EVERY_S: Final = 10.0


def connection_limit() -> int:
    """Return the connection limit of the page: an eighth of the descriptors of the process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    share = MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else soft // 8
    return max(4, min(MOST_CONNECTIONS, share))


class LimitedProtocol(H11Protocol):
    """Connection whose arrival closes the oldest idle connection if the limit is exceeded."""

    transport: asyncio.Transport

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limit = connection_limit()
        self._opened_s = self.loop.time()
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, and close the oldest idle one if there are too many."""
        super().connection_made(transport)
        self._start_deadline()
        others = [each for each in self.connections if isinstance(each, LimitedProtocol)]
        open_ones = [each for each in others if not each.transport.is_closing()]
        if len(open_ones) > self._limit:
            waiting = [each for each in open_ones if not each._is_answering()]
            min(waiting, key=lambda each: each._opened_s).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Receive bytes; the connection is closed if its request is not complete in time."""
        super().data_received(data)
        if self._is_answering():
            self._stop_deadline()
        elif self._deadline is None and not self.transport.is_closing():
            self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        self._stop_deadline()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # None before the first request.
        return cycle is not None and not cycle.response_complete

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class LogRate(logging.Filter):
    """Filter that passes one record of each message per `LOG_EVERY_S` and counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s: dict[object, float] = {}
        self._left_out: dict[object, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged."""
        now_s = time.monotonic()
        if now_s - self._last_s.get(record.msg, -LOG_EVERY_S) < LOG_EVERY_S:
            self._left_out[record.msg] = self._left_out.get(record.msg, 0) + 1
            return False
        if len(self._last_s) > 100:
            self._last_s.clear()
            self._left_out.clear()
        self._last_s[record.msg] = now_s
        if left_out := self._left_out.pop(record.msg, 0):
            record.msg = f"{record.msg} ({left_out} more in {LOG_EVERY_S:.0f} s)"
        return True
