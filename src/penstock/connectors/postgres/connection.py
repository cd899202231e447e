"""Connection of psycopg whose waits end if the server hangs.

If a `SilenceWatch` ends a wait, the socket is shut down, and libpq reports a lost connection.
"""

import functools
import threading
from collections.abc import Generator, Mapping
from typing import Any, Self, TypeVar

import psycopg
from psycopg import pq
from psycopg.abc import PQGen
from psycopg.rows import tuple_row

from penstock.errors import TransientError
from penstock.pgclient import SilenceWatch, inspect_backend, open_pgconn, shut_down

__all__ = ["WatchedConnection"]

_Result = TypeVar("_Result")


class WatchedConnection(psycopg.Connection[tuple[Any, ...]]):
    """Connection in autocommit mode that is closed if its server is silent."""

    silence: TransientError | None = None
    """Error that explains why the connection was closed."""

    def __init__(
        self, pgconn: pq.abc.PGconn, where: str, cancelled: threading.Event | None = None
    ) -> None:
        super().__init__(pgconn, tuple_row)
        self._watch = SilenceWatch(where, None, cancelled)

    @classmethod
    def open(cls, parameters: Mapping[str, str], where: str, cancelled: threading.Event) -> Self:
        """Connect with `parameters`. After `cancelled` is set, a wait ends within the grace.

        Raises:
            TransientError: the connection failed; `sqlstate` is the code of the server, if any.
            psycopg.Error: the connection was lost.
        """
        pgconn, attempt = open_pgconn(parameters, cancelled)
        pgconn.nonblocking = 1
        connection = cls(pgconn, where, cancelled)
        connection.autocommit = True
        connection.prepare_threshold = None
        connection.cursor_factory = psycopg.RawCursor
        try:
            # SUBTLE: not the pid of libpq, which a connection pooler invents.
            [(backend_pid,)] = connection.execute("SELECT pg_catalog.pg_backend_pid()").fetchall()
        except BaseException:
            connection.close()
            raise
        # With another name, because sessions of streams are found by their name and terminated.
        second = {**attempt, "application_name": "penstock"}
        inspect = functools.partial(inspect_backend, pgconn, second, int(backend_pid), cancelled)
        connection._watch = SilenceWatch(where, inspect, cancelled)
        return connection

    def wait(self, gen: PQGen[_Result], *arguments: Any, **options: Any) -> _Result:
        """Wait as psycopg does, but with a time limit."""
        return super().wait(self._watched(gen), *arguments, **options)

    def _watched(self, gen: PQGen[_Result]) -> Generator[Any, Any, _Result]:
        self._watch.received()
        try:
            waits_for = next(gen)
            while True:
                ready = yield waits_for
                if ready:
                    self._watch.received()
                else:
                    self._check()
                waits_for = gen.send(ready)
        except StopIteration as end:
            result: _Result = end.value
            return result

    def _check(self) -> None:
        try:
            self._watch.check()
        except TransientError as error:
            self.silence = error
            shut_down(self.pgconn)
