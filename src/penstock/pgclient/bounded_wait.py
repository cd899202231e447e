"""Bounded waits for a server.

A hanging server and a half-open connection look like a busy server: no bytes arrive. Each time the
answer deadline passes without a byte, a `SilenceWatch` has the backend of the connection inspected
over a second connection. If the backend is busy, the wait continues; otherwise it ends. After the
stop event is set, it ends within the grace period.
"""

import math
import select
import threading
from collections.abc import Callable

from psycopg import pq

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.deadlines import STOP_GRACE_S, answer_timeout_s
from penstock.errors import TransientError

__all__ = ["SLICE_S", "SilenceWatch", "poll_socket", "poll_until_done", "stop_error"]

SLICE_S = 0.2
"""Longest wait between two checks of the stop event."""


class SilenceWatch:
    """Time since the last byte of one connection, and the decision to end a wait."""

    def __init__(
        self,
        where: str,
        inspect: Callable[[], str] | None,
        stop: threading.Event | None,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Watch the connection to `where`.

        `inspect` returns why the connection is silent, as a clause, or an empty string if its
        backend is busy. Without `inspect`, silence is an error.
        """
        self._where = where
        self._clock = clock
        self._inspect = inspect
        self._stop = stop
        self._stopped_ms: int | None = None
        self._received_ms = self._clock.boot_ms()
        self.silent_since_ms: int | None = None
        """Time on the `boot_ms` clock since which an answer is due and no byte has arrived."""

    def expect_answer(self) -> None:
        """Measure silence from now on, unless silence is already being measured."""
        if self.silent_since_ms is None:
            self._received_ms = self._clock.boot_ms()

    def received(self) -> None:
        """Record that bytes arrived, and measure silence from now on."""
        self._received_ms, self.silent_since_ms = self._clock.boot_ms(), None

    def check(self) -> None:
        """Return if the wait for an answer may continue.

        Raises:
            TransientError: the server hangs, the connection is half open, or the stop event is
                set and no byte arrived within the grace period.
        """
        now_ms = self._clock.boot_ms()
        if self.silent_since_ms is None:
            self.silent_since_ms = self._received_ms
        if self._is_stopping():
            self._stopped_ms = self._stopped_ms or now_ms
            if now_ms - max(self._stopped_ms, self._received_ms) >= STOP_GRACE_S * 1_000:
                raise stop_error(self._where)
        if now_ms - self._received_ms >= answer_timeout_s() * 1_000:
            self._check_server()
            self._received_ms = self._clock.boot_ms()

    def _check_server(self) -> None:
        silence = f"Nothing was received for {answer_timeout_s():g} s"
        if self._inspect is None:
            raise self._no_answer(f"{silence}.")
        if reason := self._inspect():
            if self._is_stopping():
                raise stop_error(self._where)
            raise self._no_answer(f"{silence}, and {reason}.")

    def _is_stopping(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    def _no_answer(self, detail: str) -> TransientError:
        return TransientError(
            f"{self._where} does not answer",
            detail=detail,
            hint="Check the server and the network. Running tasks retry.",
        )


def stop_error(where: str) -> TransientError:
    """Return the error of a wait that ended because the process stops."""
    return TransientError(
        f"stopped while waiting for {where}",
        detail="The server has not answered. The next start repeats unfinished work.",
    )


def poll_socket(fileno: int, events: int, timeout_s: float | None) -> bool:
    """Return whether one of `events` occurred at the socket within `timeout_s`."""
    poll = select.poll()
    poll.register(fileno, events)
    return bool(poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1_000)))


def poll_until_done(
    connecting: pq.abc.PGconn | pq.abc.PGcancelConn,
    poll: Callable[[], int],
    timeout_s: float,
    stop: threading.Event | None = None,
) -> bool:
    """Return whether polling ended, with success or failure, within `timeout_s` and before `stop`.

    A `timeout_s` of 0 means no timeout.
    """
    until_ms = SYSTEM_CLOCK.boot_ms() + int(timeout_s * 1_000)
    events = select.POLLOUT
    while True:
        left_s = math.inf if timeout_s <= 0 else (until_ms - SYSTEM_CLOCK.boot_ms()) / 1_000
        if left_s <= 0 or (stop is not None and stop.is_set()):
            return False
        if not poll_socket(connecting.socket, events, min(left_s, SLICE_S)):
            continue
        match poll():
            case pq.PollingStatus.READING:
                events = select.POLLIN
            case pq.PollingStatus.WRITING:
                events = select.POLLOUT
            case _:
                return True
