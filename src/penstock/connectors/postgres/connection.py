"""Connection whose waits end if the server hangs.

After each answer deadline without a byte, a second connection inspects the backend of the first
one (`silence_reason`). If the backend is busy, the wait continues. Otherwise the socket is shut
down, and libpq reports a lost connection.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Generator, Mapping
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen

from penstock.clock import SYSTEM_CLOCK
from penstock.deadlines import STOP_GRACE_S, answer_timeout_s
from penstock.sources.postgres.connect import silence_reason

__all__ = ["WatchedConnection"]

_Result = TypeVar("_Result")


class WatchedConnection(psycopg.Connection[tuple[Any, ...]]):
    """Connection that is closed if its server is silent. Call `watch` after it is open."""

    silence = ""
    """Reason why the connection was closed, or empty."""

    _parameters: Mapping[str, str] | None = None
    _cancelled = threading.Event()
    _backend_pid = 0

    def watch(self, parameters: Mapping[str, str], cancelled: threading.Event) -> None:
        """Watch all waits from now on; `parameters` open the second connection.

        After `cancelled` is set, a wait ends within the grace.
        """
        # SUBTLE: not the pid of libpq, which a connection pooler invents.
        rows = self.execute("SELECT pg_catalog.pg_backend_pid()").fetchall()
        self._backend_pid = int(rows[0][0])
        self._cancelled = cancelled
        # With another name, because sessions of streams are found by their name and terminated.
        self._parameters = {**parameters, "application_name": "penstock"}

    def wait(self, gen: PQGen[_Result], *arguments: Any, **options: Any) -> _Result:
        """Wait as psycopg does, but with a time limit."""
        return super().wait(self._watched(gen), *arguments, **options)

    def _watched(self, gen: PQGen[_Result]) -> Generator[Any, Any, _Result]:
        received_ms = SYSTEM_CLOCK.boot_ms()
        cancelled_ms: int | None = None
        try:
            waits_for = next(gen)
            while True:
                ready = yield waits_for
                now_ms = SYSTEM_CLOCK.boot_ms()
                if ready:
                    received_ms = now_ms
                elif self._cancelled.is_set():
                    cancelled_ms = cancelled_ms or now_ms
                    if now_ms - max(received_ms, cancelled_ms) >= STOP_GRACE_S * 1_000:
                        self._shut_down()
                elif now_ms - received_ms >= answer_timeout_s() * 1_000:
                    self._check_server()
                    received_ms = SYSTEM_CLOCK.boot_ms()
                waits_for = gen.send(ready)
        except StopIteration as end:
            result: _Result = end.value
            return result

    def _check_server(self) -> None:
        silent = f"Nothing was received for {answer_timeout_s():g} s"
        if self._parameters is None:
            self.silence = f"{silent}."
        elif reason := silence_reason(
            self.pgconn, self._parameters, self._backend_pid, self._cancelled
        ):
            self.silence = f"{silent}, and {reason}."
        if self.silence:
            self._shut_down()

    def _shut_down(self) -> None:
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self.pgconn.socket)) as end,
        ):
            end.shutdown(socket.SHUT_RDWR)
