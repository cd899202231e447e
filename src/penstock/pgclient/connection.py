"""Connections to a Postgres server, all with the same session settings.

Values are transferred as text. Every wait is bounded (`bounded_wait`): after each answer deadline
without a byte, a second connection queries the state of the first connection's backend:

    no second connection      the server hangs
    no such backend           the server has closed the connection
    it waits for its client   the connection is half open: each side waits for the other
    anything else             it is busy, or waits for a lock; the wait continues
"""

import contextlib
import ctypes
import functools
import math
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Self, TypeVar

import psycopg
from psycopg import conninfo, pq
from psycopg.pq.misc import find_libpq_full_path

from penstock.clock import SYSTEM_CLOCK
from penstock.deadlines import answer_timeout_s
from penstock.errors import SourceError, TransientError, UsageError
from penstock.pgclient.bounded_wait import (
    SLICE_S,
    SilenceWatch,
    poll_socket,
    poll_until_done,
    stop_error,
)
from penstock.pgclient.conninfo import (
    collect_secrets,
    describe_server,
    parse_conninfo,
    per_host,
    redact,
)
from penstock.pgclient.errors import connection_error, error_fields, server_error
from penstock.pgclient.settings import SETTINGS, set_statement

__all__ = ["Connection", "Row", "connect", "inspect_backend", "open_pgconn", "shut_down"]

Row = tuple[str | None, ...]

_Result = TypeVar("_Result")

DEFAULTS: Final[Mapping[str, tuple[str, str]]] = {
    "connect_timeout": ("10", "PGCONNECT_TIMEOUT"),
    "keepalives_idle": ("30", ""),
    "keepalives_interval": ("10", ""),
    "keepalives_count": ("3", ""),
    "tcp_user_timeout": ("30000", ""),
}
"""Default libpq parameters, each with the environment variable that overrides it. The defaults
of the operating system detect a dead server only after more than two hours."""

CANCEL_TIMEOUT_S: Final = 3
"""Longest time to deliver a cancel request to the server."""

INSPECT_TIMEOUT_S: Final = (1.0, 10.0)
"""Bounds of the connect timeout of a second connection."""

IN_FLIGHT_S: Final = 1.0
"""Time for bytes that the backend has sent and that have not arrived yet."""

WAITS_FOR_CLIENT: Final = ("Client", "Activity")
"""Wait event types of a backend that waits for its client, walsenders included."""

NO_PASSWORD: Final = "28P01"
"""SQLSTATE for a connection without a password, as the server would report it."""

DEFAULT_VERBOSITY: Final = 1
VERBOSE: Final = 2
"""Values of PGVerbosity. Only verbose messages contain the SQLSTATE."""

_FAILED: Final = frozenset({pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.BAD_RESPONSE})
_COPYING: Final = frozenset(
    {pq.ExecStatus.COPY_OUT, pq.ExecStatus.COPY_BOTH, pq.ExecStatus.COPY_IN}
)


def connect(
    where: str | Mapping[str, str],
    *,
    replication: bool = False,
    application_name: str = "penstock",
    stop: threading.Event | None = None,
) -> "Connection":
    """Connect to `where`: a URL, a connection string, or a mapping of parameters.

    After `stop` is set, every wait for the server, now or later, soon ends with an error.

    Raises:
        UsageError: `where` cannot be parsed.
        TransientError: the connection failed, for example in the network or at authentication.
            `sqlstate` is the code of the server, if the server sent one.
    """
    parameters = parse_conninfo(where)
    has_service = parameters.get("service") or os.environ.get("PGSERVICE")
    for name, (value, variable) in DEFAULTS.items():
        if not has_service and variable not in os.environ:
            parameters.setdefault(name, value)
    parameters["client_encoding"] = "UTF8"
    parameters.setdefault("fallback_application_name", application_name)
    if replication:
        parameters["replication"] = "database"
    pgconn, attempt = open_pgconn(parameters, stop)
    return _pin(Connection(pgconn, attempt, stop=stop))


def open_pgconn(
    parameters: Mapping[str, str], stop: threading.Event | None = None
) -> tuple[pq.abc.PGconn, dict[str, str]]:
    """Open a connection to the first host that accepts one, and return it with its parameters.

    Raises:
        TransientError: no host accepts the connection. The last host determines the error.
    """
    *others, last = per_host(parameters)
    for attempt in others:
        with contextlib.suppress(TransientError):
            return _open(attempt, stop), attempt
    return _open(last, stop), last


def _open(parameters: Mapping[str, str], stop: threading.Event | None) -> pq.abc.PGconn:
    # SUBTLE: libpq's blocking connect holds the GIL until it returns. It would stop all other
    # threads, among them the threads that send feedback to other servers.
    pgconn = pq.PGconn.connect_start(conninfo.make_conninfo(**parameters).encode())
    try:
        _set_verbosity(pgconn, VERBOSE)
        ended = pgconn.status == pq.ConnStatus.BAD or poll_until_done(
            pgconn, pgconn.connect_poll, _connect_timeout_s(pgconn), stop
        )
        where = describe_server(pgconn, parameters)
        if not ended and stop is not None and stop.is_set():
            raise stop_error(where)
        if not ended:
            raise connection_error(f"could not connect to {where}", "the connect timeout expired")
        if pgconn.status != pq.ConnStatus.OK:
            raise connection_error(
                f"could not connect to {where}",
                redact(pgconn.get_error_message(), collect_secrets(pgconn, parameters)),
                sqlstate=NO_PASSWORD if pgconn.needs_password else "",
            )
        _set_verbosity(pgconn, DEFAULT_VERBOSITY)
        pgconn.nonblocking = 0
    except BaseException:
        pgconn.finish()
        raise
    return pgconn


def _connect_timeout_s(pgconn: pq.abc.PGconn) -> float:
    """Return the timeout from parameters, service file or environment; 0 for no timeout."""
    values = (option.val for option in pgconn.info if option.keyword == b"connect_timeout")
    return float(next(values, None) or 0)


def _set_verbosity(pgconn: pq.abc.PGconn, verbosity: int) -> None:
    """Set the verbosity of error messages, if libpq can be called directly.

    psycopg does not wrap `PQsetErrorVerbosity`. It documents `pgconn_ptr` for such calls. Without
    the call, the SQLSTATE of a failed connection is missing, and the error counts as transient.
    """
    libpq = _load_libpq()
    pointer: int | None = getattr(pgconn, "pgconn_ptr", None)
    if libpq is not None and pointer is not None:
        libpq.PQsetErrorVerbosity(ctypes.c_void_p(pointer), verbosity)


@functools.cache
def _load_libpq() -> ctypes.CDLL | None:
    """Return the libpq that psycopg uses: a compiled module of psycopg is linked with it."""
    if pq.__impl__ == "python":
        path = find_libpq_full_path()
    else:
        path = sys.modules[pq.PGconn.__module__].__file__
    if path is None:
        return None
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(path)
        library.PQsetErrorVerbosity.restype = ctypes.c_int
        return library
    return None


def _pin(connection: "Connection") -> "Connection":
    """Apply the settings that change how values are printed, and disable timeouts."""
    try:
        connection.execute(set_statement(SETTINGS, connection.server_version))
    except BaseException:
        connection.close()
        raise
    return connection


class Connection:
    """Connection to a Postgres server. Not safe for use by two threads at the same time."""

    def __init__(
        self,
        pgconn: pq.abc.PGconn,
        parameters: Mapping[str, str],
        *,
        stop: threading.Event | None = None,
        inspects: bool = True,
    ) -> None:
        """Wrap an open libpq connection; callers use `connect`.

        With `inspects`, a second connection investigates silence. Without, silence is an error.
        """
        self.pgconn = pgconn
        self.where = describe_server(pgconn, parameters)
        self.replication = "replication" in parameters
        self.borrowed = False
        """True while a stream uses the connection, which then accepts no query."""

        self.watch = SilenceWatch(
            self.where,
            functools.partial(inspect_backend, pgconn, parameters, pgconn.backend_pid, stop)
            if inspects
            else None,
            stop,
        )
        self._secrets = collect_secrets(pgconn, parameters)
        self._results: list[pq.abc.PGresult] = []

    def __repr__(self) -> str:
        return f"<Connection to {self.where}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def server_version(self) -> int:
        """Return the server version as a number, for example 150018 for 15.18."""
        return self.pgconn.server_version

    @property
    def backend_pid(self) -> int:
        """Return the process id of the server's backend."""
        return self.pgconn.backend_pid

    @property
    def encrypted(self) -> bool:
        """Return whether the bytes are encrypted, so only libpq can read and write them."""
        return self.pgconn.ssl_in_use or self.pgconn.used_gssapi

    @property
    def closed(self) -> bool:
        """Return whether `close` was called or the connection broke."""
        return self.pgconn.status != pq.ConnStatus.OK

    def fileno(self) -> int:
        """Return the file descriptor of the socket."""
        return self.pgconn.socket

    def close(self) -> None:
        """Close the connection. A second call has no effect."""
        self.pgconn.finish()

    def query(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        """Execute `sql` and return its rows as text. Parameters are `$1`, `$2` and so on.

        Without parameters, `sql` may contain several statements; the rows of the last one are
        returned. A replication connection accepts no parameters.
        """
        self.send(sql, parameters)
        rows = self.receive()
        assert rows is not None
        return rows

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> None:
        """Execute `sql` and discard its rows."""
        self.query(sql, parameters)

    def send(self, sql: str, parameters: Sequence[object] = ()) -> None:
        """Send `sql` without waiting for its result; `receive` returns the result."""
        if self.borrowed:
            raise UsageError(
                f"connection to {self.where} is in use",
                detail=f"The connection is streaming a COPY. The statement is: {sql}",
            )
        if parameters and self.replication:
            raise UsageError("a replication connection takes no parameters", detail=sql)
        texts = [_to_text(value) for value in parameters]
        self.watch.expect_answer()
        if texts:
            self.call_libpq(lambda: self.pgconn.send_query_params(sql.encode(), texts))
        else:
            self.call_libpq(lambda: self.pgconn.send_query(sql.encode()))
        while self.call_libpq(self.pgconn.flush):
            self.wait(select.POLLOUT | select.POLLIN)
            self.call_libpq(self.pgconn.consume_input)

    def receive(self, timeout_s: float | None = None) -> list[Row] | None:
        """Return the rows of the statement that was sent, or None after `timeout_s`.

        Raises:
            SourceError: the server rejected the statement, or the connection broke.
        """
        while self._has_result(timeout_s):
            result = self.call_libpq(self.pgconn.get_result)
            if result is not None:
                self._results.append(result)
            if result is None or result.status in _COPYING:
                break
        else:
            return None
        results, self._results = self._results, []
        for result in results:
            if result.status in _FAILED:
                raise self._result_error(result)
        if not results:
            raise self.lost_error()
        return _to_rows(results[-1])

    def _has_result(self, timeout_s: float | None) -> bool:
        """Return whether a result is available within `timeout_s`; wait for it if necessary."""
        while self.call_libpq(self.pgconn.is_busy):
            if not self.wait(select.POLLIN, timeout_s):
                return False
            try:
                self.pgconn.consume_input()
            except psycopg.OperationalError:
                # The next result contains the reason, with the message of the server if it sent
                # one.
                return True
        return True

    def wait(self, events: int, timeout_s: float | None = None) -> bool:
        """Return whether one of `events` occurred at the socket within `timeout_s`.

        Raises:
            TransientError: the server hangs, the connection is half open, or the stop event is
                set and no byte arrived within the grace period.
        """
        until_ms = math.inf if timeout_s is None else SYSTEM_CLOCK.boot_ms() + timeout_s * 1_000
        while True:
            left_s = max(0.0, (until_ms - SYSTEM_CLOCK.boot_ms()) / 1_000)
            if poll_socket(self.fileno(), events, min(left_s, SLICE_S)):
                self.watch.received()
                return True
            now_ms = SYSTEM_CLOCK.boot_ms()
            try:
                self.watch.check()
            except TransientError:
                shut_down(self.pgconn)
                raise
            if now_ms >= until_ms:
                return False

    def call_libpq(self, call: Callable[[], _Result]) -> _Result:
        """Call libpq, and raise a `TransientError` if the connection broke."""
        # An exception of psycopg contains the unredacted message of libpq; `lost_error` redacts it.
        with contextlib.suppress(psycopg.OperationalError):
            return call()
        raise self.lost_error()

    def cancel(self) -> None:
        """Request cancellation of the current statement, if the server is reachable soon."""
        if self.closed:
            return
        # As for connecting, libpq's blocking cancel would hold the GIL until it returns.
        request = self.pgconn.cancel_conn()
        try:
            with contextlib.suppress(psycopg.OperationalError):
                request.start()
                poll_until_done(request, request.poll, CANCEL_TIMEOUT_S)
        finally:
            request.finish()

    def server_error(self, fields: Mapping[str, str]) -> SourceError:
        """Return the error for the fields of an ErrorResponse, redacted."""
        redacted = {letter: redact(text, self._secrets) for letter, text in fields.items()}
        return server_error(self.where, redacted)

    def lost_error(self) -> TransientError:
        """Return the error for a lost connection, with the redacted message of libpq."""
        text = redact(self.pgconn.get_error_message(), self._secrets)
        return connection_error(f"lost the connection to {self.where}", text)

    def _result_error(self, result: pq.abc.PGresult) -> SourceError:
        fields = error_fields(result)
        # A result without a code is a message of libpq: the connection was lost.
        return self.server_error(fields) if fields["C"] else self.lost_error()


def inspect_backend(
    pgconn: pq.abc.PGconn,
    parameters: Mapping[str, str],
    backend_pid: int,
    stop: threading.Event | None = None,
) -> str:
    """Return why a connection is silent, as a clause; an empty string if its backend is busy.

    A second connection, opened with `parameters`, queries the state of the backend.
    """
    shortest_s, longest_s = INSPECT_TIMEOUT_S
    second = {name: value for name, value in parameters.items() if name != "replication"}
    second["connect_timeout"] = str(min(longest_s, max(shortest_s, answer_timeout_s())))
    # Pin the host: there may be several, and a host name may resolve to several servers.
    if pgconn.host:
        second |= {"host": pgconn.host.decode(), "port": pgconn.port.decode()}
    if pgconn.hostaddr and not pgconn.host.startswith((b"/", b"@")):
        second["hostaddr"] = pgconn.hostaddr.decode()
    try:
        connection = Connection(_open(second, stop), second, stop=stop, inspects=False)
        with _pin(connection):
            rows = connection.query(
                "SELECT wait_event_type FROM pg_catalog.pg_stat_activity WHERE pid = $1::int",
                [backend_pid],
            )
    except TransientError as error:
        if error.sqlstate != TransientError.sqlstate:
            return ""  # A rejected login, such as one too many, is an answer.
        return "a second connection gets no answer"
    if not rows:
        reason = "the server has closed the connection"
    elif rows[0][0] in WAITS_FOR_CLIENT:
        reason = "the server waits for its client: the connection is half open"
    else:
        return ""
    return "" if poll_socket(pgconn.socket, select.POLLIN, IN_FLIGHT_S) else reason


def shut_down(pgconn: pq.abc.PGconn) -> None:
    """Shut down the socket of a connection, which libpq then reports as lost."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pgconn.socket)) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)


def _to_text(value: object) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, str | int):
        return str(value).encode()
    raise UsageError(f"type {type(value).__name__} of a query parameter is not supported")


def _to_rows(result: pq.abc.PGresult) -> list[Row]:
    columns = range(result.nfields)
    return [
        tuple(
            None if (value := result.get_value(row, column)) is None else value.decode()
            for column in columns
        )
        for row in range(result.ntuples)
    ]
