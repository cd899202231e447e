"""Connections to a Postgres server, all with the same session settings.

libpq opens the connections through psycopg. Everything that works for `psql` works here: passwords
and `.pgpass`, TLS and client certificates, `PG*` variables, service files and multiple hosts.
Values are transferred as text.

A value is compared with a value read earlier, possibly over another connection by another process.
Every connection therefore pins all settings that change how a server prints values. Settings of the
server, the database or the role have no effect (hazard B6).

A server error becomes a `DefiniteError` if it is about the request or the data, and a
`TransientError` otherwise. `sqlstate` holds the code of the server. For some codes it is uncertain
whether a retry can succeed. They are transient if a change outside Penstock, such as a GRANT,
resolves them.

A hanging server and a half-open connection look like a busy server: no bytes arrive. Each time the
answer deadline passes without a byte, a second connection queries the state of the first
connection's backend:

    no second connection      the server hangs
    no such backend           the server has closed the connection
    it waits for its client   the connection is half open: each side waits for the other
    anything else             it is busy, or waits for a lock; the wait continues
"""

import contextlib
import math
import os
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import psycopg
from psycopg import conninfo, pq

from penstock.clock import SYSTEM_CLOCK
from penstock.deadlines import STOP_GRACE_S, answer_timeout_s
from penstock.errors import DefiniteError, SourceError, TransientError, UsageError
from penstock.sources.postgres.config import SECRETS

__all__ = [
    "Connection",
    "awaited",
    "connect",
    "quote_identifier",
    "quote_literal",
    "server_error",
    "silence_reason",
]

Row = tuple[str | None, ...]

_Answer = TypeVar("_Answer")

SETTINGS: Final[Mapping[str, str]] = {
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "search_path": "",
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
    "row_security": "off",
    "jit": "off",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}
"""Session settings of every connection; `client_encoding` is set while connecting."""

NEWER_SETTINGS: Final[Mapping[str, int]] = {
    "idle_session_timeout": 14_00_00,
    "transaction_timeout": 17_00_00,
}
"""Timeouts that must be off, with the server version that introduced each."""

DEFAULTS: Final[Mapping[str, tuple[str, str]]] = {
    "connect_timeout": ("10", "PGCONNECT_TIMEOUT"),
    "keepalives_idle": ("30", ""),
    "keepalives_interval": ("10", ""),
    "keepalives_count": ("3", ""),
    "tcp_user_timeout": ("30000", ""),
}
"""Default libpq parameters, each with the environment variable that overrides it. The defaults
of the operating system detect a dead server only after more than two hours."""

CANCEL_S: Final = 3
"""Longest time to deliver a cancel request to the server."""

SLICE_S: Final = 0.2
"""Longest wait between two checks of the stop event."""

CHECK_S: Final = (1.0, 10.0)
"""Bounds of the connect timeout of a second connection."""

IN_FLIGHT_S: Final = 1.0
"""Time for bytes that the backend has sent and that have not arrived yet."""

WAITS_FOR_CLIENT: Final = ("Client", "Activity")
"""Wait event types of a backend that waits for its client, walsenders included."""


def connect(
    where: str | Mapping[str, str],
    *,
    replication: bool = False,
    application_name: str = "penstock",
    coded: bool = False,
    stop: threading.Event | None = None,
) -> "Connection":
    """Connect to `where`: a URL, a connection string, or a mapping of parameters.

    After `stop` is set, every wait for the server, now or later, soon ends with an error.

    Raises:
        UsageError: `where` cannot be parsed.
        TransientError: the connection failed, for example in the network or at authentication.
            With `coded`, `sqlstate` is the code of the server, if the server sent one.
    """
    parameters = _parsed(where)
    known = parameters.get("service") or os.environ.get("PGSERVICE")
    for name, (value, variable) in DEFAULTS.items():
        if not known and variable not in os.environ:
            parameters.setdefault(name, value)
    parameters["client_encoding"] = "UTF8"
    parameters.setdefault("fallback_application_name", application_name)
    if replication:
        parameters["replication"] = "database"
    failed: TransientError | None = None
    for attempt in _attempts(parameters):
        try:
            return _opened(attempt, replication=replication, coded=coded, stop=stop)
        except TransientError as error:
            failed = error
    assert failed is not None
    raise failed


def _attempts(parameters: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the parameters of one attempt per host, in their order."""
    said = {name: parameters[name].split(",") for name in _PLACES if name in parameters}
    count = max(map(len, said.values()), default=1)
    return [
        {**parameters, **{name: each[min(at, len(each) - 1)] for name, each in said.items()}}
        for at in range(count)
    ]


def _opened(
    parameters: Mapping[str, str],
    *,
    replication: bool,
    coded: bool,
    stop: threading.Event | None = None,
    checks: bool = True,
) -> "Connection":
    # SUBTLE: libpq's blocking connect holds the GIL until it returns. It would stop all other
    # threads, among them the threads that send feedback to other servers.
    pgconn = pq.PGconn.connect_start(conninfo.make_conninfo(**parameters).encode())
    connection = Connection(pgconn, parameters, replication=replication, stop=stop, checks=checks)
    try:
        with _overheard(pgconn) if coded else contextlib.nullcontext(str) as heard:
            if not _established(pgconn, float(parameters.get("connect_timeout", 0)), stop):
                if stop is not None and stop.is_set():
                    raise connection.stopped()
                raise TransientError(
                    f"cannot connect to {connection.where}",
                    detail="It took too long.",
                    hint="Check host and port, the server and the network; what runs keeps trying.",
                )
            if pgconn.status != pq.ConnStatus.OK:
                error = connection.lost("cannot connect to")
                if code := NO_PASSWORD if pgconn.needs_password else heard():
                    error.__dict__["sqlstate"] = code
                raise error
        pgconn.nonblocking = 0
        connection = Connection(
            pgconn, parameters, replication=replication, stop=stop, checks=checks
        )
        connection.pin()
    except BaseException:
        pgconn.finish()
        raise
    return connection


@contextlib.contextmanager
def _overheard(pgconn: pq.abc.PGconn) -> Iterator[Callable[[], str]]:
    """Trace a connection, and yield a function that returns the server's last SQLSTATE.

    libpq does not expose the SQLSTATE of an error until the connection is established, and its
    messages may be localized. A trace can contain a password, so it is written only to memory. Each
    trace leaks some kilobytes, which psycopg never frees.
    """
    if not hasattr(os, "memfd_create"):
        yield lambda: ""
        return
    with open(os.memfd_create("penstock"), "r+b") as file:  # noqa: PTH123 - it has no path
        pgconn.trace(file.fileno())

        def code() -> str:
            pgconn.untrace()
            file.seek(0)
            found = _SAID_CODE.findall(file.read())
            return found[-1].decode() if found else ""

        try:
            yield code
        finally:
            pgconn.untrace()


def _established(pgconn: pq.abc.PGconn, timeout_s: float, stop: threading.Event | None) -> bool:
    """Return whether the connection attempt ended in time, with success or failure."""
    return pgconn.status == pq.ConnStatus.BAD or _polled(
        pgconn, pgconn.connect_poll, timeout_s, stop
    )


def _polled(
    connecting: pq.abc.PGconn | pq.abc.PGcancelConn,
    poll: Callable[[], int],
    timeout_s: float,
    stop: threading.Event | None = None,
) -> bool:
    """Return whether polling ended, with success or failure, within `timeout_s` and before `stop`.

    A `timeout_s` of 0 means no timeout.
    """
    until = SYSTEM_CLOCK.boot_ms() + int(timeout_s * 1_000)
    events = select.POLLOUT
    while True:
        while True:
            left_s = math.inf if timeout_s <= 0 else (until - SYSTEM_CLOCK.boot_ms()) / 1_000
            if left_s <= 0 or (stop is not None and stop.is_set()):
                return False
            if awaited(connecting.socket, events, min(left_s, SLICE_S)):
                break
        match poll():
            case pq.PollingStatus.READING:
                events = select.POLLIN
            case pq.PollingStatus.WRITING:
                events = select.POLLOUT
            case _:
                return True


class Connection:
    """Connection to a Postgres server. Not safe for use by two threads at the same time."""

    def __init__(
        self,
        pgconn: pq.abc.PGconn,
        parameters: Mapping[str, str],
        *,
        replication: bool,
        stop: threading.Event | None = None,
        checks: bool = True,
    ) -> None:
        """Wrap an open libpq connection; callers use `connect`.

        With `checks`, a second connection investigates silence. Without, silence is an error.
        """
        self.pgconn = pgconn
        self._parameters = parameters
        self._stop = stop
        self._checks = checks
        self._heard_ms = SYSTEM_CLOCK.boot_ms()
        self._stopped_ms: int | None = None
        self.silent_since_ms: int | None = None
        """Time on the `boot_ms` clock since which an answer is due and no byte has arrived."""

        self.replication = replication
        self.where = _where(pgconn, parameters)
        self.borrowed = False
        """True while a stream uses the connection, which then accepts no query."""

        self._secrets = _secrets(pgconn, parameters)
        self._results: list[pq.abc.PGresult] = []

    def __repr__(self) -> str:
        return f"<Connection to {self.where}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
            raise UsageError(f"{self.where} is read as a stream and takes no query", detail=sql)
        if parameters and self.replication:
            raise UsageError("a replication connection takes no parameters", detail=sql)
        texts = [_text(value) for value in parameters]
        self.expect_answer()
        if texts:
            self.ask(lambda: self.pgconn.send_query_params(sql.encode(), texts))
        else:
            self.ask(lambda: self.pgconn.send_query(sql.encode()))
        while self.ask(self.pgconn.flush):
            self.wait(select.POLLOUT | select.POLLIN)
            self.ask(self.pgconn.consume_input)

    def receive(self, timeout_s: float | None = None) -> list[Row] | None:
        """Return the rows of the statement that was sent, or None after `timeout_s`.

        Raises:
            SourceError: the server rejected the statement, or the connection broke.
        """
        while self.ready(timeout_s):
            result = self.ask(self.pgconn.get_result)
            if result is not None:
                self._results.append(result)
            if result is None or result.status in _COPYING:
                break
        else:
            return None
        results, self._results = self._results, []
        for result in results:
            if result.status in _FAILED:
                raise self.refused(result)
        if not results:
            raise self.lost("lost the connection to")
        return _rows(results[-1])

    def ready(self, timeout_s: float | None = None) -> bool:
        """Return whether a result is available within `timeout_s`; wait for it if necessary."""
        while self.ask(self.pgconn.is_busy):
            if not self.wait(select.POLLIN, timeout_s):
                return False
            try:
                self.pgconn.consume_input()
            except psycopg.OperationalError:
                # The next result contains the reason, with the message of the server if it sent
                # one.
                return True
        return True

    def expect_answer(self) -> None:
        """Measure silence from now on, unless silence is already being measured."""
        if self.silent_since_ms is None:
            self._heard_ms = SYSTEM_CLOCK.boot_ms()

    def received(self) -> None:
        """Record that bytes arrived, and measure silence from now on."""
        self._heard_ms, self.silent_since_ms = SYSTEM_CLOCK.boot_ms(), None

    def wait(self, events: int, timeout_s: float | None = None) -> bool:
        """Return whether one of `events` occurred at the socket within `timeout_s`.

        Raises:
            TransientError: the server hangs, the connection is half open, or the stop event is
                set and no byte arrived within the grace period.
        """
        until = math.inf if timeout_s is None else SYSTEM_CLOCK.boot_ms() + timeout_s * 1_000
        while True:
            left_s = max(0.0, (until - SYSTEM_CLOCK.boot_ms()) / 1_000)
            if awaited(self.fileno(), events, min(left_s, SLICE_S)):
                self.received()
                return True
            now = SYSTEM_CLOCK.boot_ms()
            if self.silent_since_ms is None:
                self.silent_since_ms = self._heard_ms
            if self._stop is not None and self._stop.is_set():
                self._stopped_ms = self._stopped_ms or now
                if now - max(self._stopped_ms, self._heard_ms) >= STOP_GRACE_S * 1_000:
                    raise self.stopped()
            if now - self._heard_ms >= answer_timeout_s() * 1_000:
                self._check_server()
                self._heard_ms = SYSTEM_CLOCK.boot_ms()
            if now >= until:
                return False

    def stopped(self) -> TransientError:
        """Return the error of a wait that ended because the process stops."""
        return TransientError(
            f"stopped while waiting for {self.where}",
            detail="The server has not answered. What is not durable is read again at the next "
            "start.",
        )

    def _check_server(self) -> None:
        """Return if the backend is busy.

        Raises:
            TransientError: the server does not answer, or the connection is lost.
        """
        silent = f"Nothing was received for {answer_timeout_s():g} s"
        if not self._checks:
            raise self._abort(f"{silent}.")
        reason = silence_reason(self.pgconn, self._parameters, self.backend_pid, self._stop)
        if reason and self._stop is not None and self._stop.is_set():
            raise self.stopped()
        if reason:
            raise self._abort(f"{silent}, and {reason}.")

    def _abort(self, detail: str) -> TransientError:
        """Close the connection without waiting for the server, and return the error to raise."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        return TransientError(
            f"{self.where} does not answer",
            detail=detail,
            hint="Check the server and the network; what runs keeps trying.",
        )

    def ask(self, what: Callable[[], _Answer]) -> _Answer:
        """Call libpq, and raise a `TransientError` if the connection broke."""
        # An exception of psycopg contains the unredacted message of libpq; `lost` redacts it.
        with contextlib.suppress(psycopg.OperationalError):
            return what()
        raise self.lost("lost the connection to")

    def cancel(self) -> None:
        """Request cancellation of the current statement, if the server is reachable soon."""
        if self.pgconn.status != pq.ConnStatus.OK:
            return
        # As for connecting, libpq's blocking cancel would hold the GIL until it returns.
        cancelling = self.pgconn.cancel_conn()
        try:
            with contextlib.suppress(psycopg.OperationalError):
                cancelling.start()
                _polled(cancelling, cancelling.poll, CANCEL_S)
        finally:
            cancelling.finish()

    def pin(self) -> None:
        """Set everything that changes how values are printed, and turn timeouts off."""
        settings = dict(SETTINGS)
        for name, since in NEWER_SETTINGS.items():
            if self.server_version >= since:
                settings[name] = "0"
        self.execute(
            "; ".join(
                f"SET SESSION {name} = {quote_literal(value)}" for name, value in settings.items()
            )
        )

    def refused(self, result: pq.abc.PGresult) -> SourceError:
        """Return the error of a failed result."""
        said = self.fields(result)
        # A result without a code is a message of libpq: the connection was lost.
        return self.said(said) if said["C"] else self.lost("lost the connection to")

    def fields(self, result: pq.abc.PGresult) -> dict[str, str]:
        """Return the error fields of a result, by the letters of ErrorResponse."""
        return {
            name: (result.error_field(field) or b"").decode(errors="replace")
            for name, field in _FIELDS.items()
        }

    def said(self, said: Mapping[str, str]) -> SourceError:
        """Return the error for the fields of an ErrorResponse, redacted."""
        return server_error(self.where, {name: self.redacted(text) for name, text in said.items()})

    def lost(self, what: str) -> TransientError:
        """Return the error for a lost or failed connection, with the redacted message of libpq."""
        said = self.redacted(self.pgconn.get_error_message()).strip()
        return TransientError(
            f"{what} {self.where}",
            detail=_sentence(said),
            hint="Check host, port, database, user and password; what runs keeps trying.",
        )

    def redacted(self, text: str) -> str:
        """Return `text` with secrets replaced by asterisks."""
        for secret in self._secrets:
            text = text.replace(secret, "********")
        return text


def server_error(where: str, said: Mapping[str, str]) -> SourceError:
    """Return the error for the fields of an ErrorResponse of the server."""
    code = said.get("C") or "XX000"
    definite = code in DEFINITE or (code[:2] in DEFINITE and code not in TRANSIENT)
    kind = DefiniteError if definite else TransientError
    message = said.get("M", "").strip().rstrip(".") or "the server gave no reason"
    detail = f"{_sentence(said.get('D', ''))} The server's code is {code}."
    error = kind(
        f"{where} says: {message}",
        detail=detail.strip(),
        hint=_sentence(said.get("H", "")) or HINTS.get(code, ""),
    )
    # `sqlstate` of the class is a default; this instance has the code of the server.
    error.__dict__["sqlstate"] = code
    return error


NO_PASSWORD: Final = "28P01"
"""SQLSTATE for a connection without a password, as the server would report it."""

_SAID_CODE: Final = re.compile(rb'\tErrorResponse\t.*? C "([0-9A-Z]{5})"')

DEFINITE: Final = frozenset({"0A", "22", "26", "34", "3F", "42", "54", "55000"})
"""SQLSTATE codes, and classes of codes, about the request or the data."""

TRANSIENT: Final = frozenset({"42501"})
"""Codes of those classes that a change outside Penstock, such as a GRANT, can resolve."""

HINTS: Final[Mapping[str, str]] = {
    "42501": "Grant the role of this connection what it lacks.",
    "53300": "Raise max_connections of the server, or close connections to it.",
    "55006": "Another connection uses it; it is free when that one ends.",
}


def quote_identifier(name: str) -> str:
    """Return `name` quoted for SQL and replication commands."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """Return `text` as a string literal for SQL and replication commands."""
    return "'" + text.replace("'", "''") + "'"


def silence_reason(
    pgconn: pq.abc.PGconn,
    parameters: Mapping[str, str],
    backend_pid: int,
    stop: threading.Event | None = None,
) -> str:
    """Return why a connection is silent, as a clause; an empty string if its backend is busy.

    A second connection, opened with `parameters`, queries the state of the backend.
    """
    shortest, longest = CHECK_S
    found = {name: value for name, value in parameters.items() if name != "replication"}
    found["connect_timeout"] = str(min(longest, max(shortest, answer_timeout_s())))
    # Pin the host: there may be several, and a host name may resolve to several servers.
    if pgconn.host:
        found |= {"host": pgconn.host.decode(), "port": pgconn.port.decode()}
    if pgconn.hostaddr and not pgconn.host.startswith((b"/", b"@")):
        found["hostaddr"] = pgconn.hostaddr.decode()
    try:
        with _opened(found, replication=False, coded=True, stop=stop, checks=False) as other:
            rows = other.query(
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
        reason = "the server waits for us: the connection is half open"
    else:
        return ""
    return "" if awaited(pgconn.socket, select.POLLIN, IN_FLIGHT_S) else reason


def awaited(fileno: int, events: int, timeout_s: float | None) -> bool:
    """Return whether one of `events` occurred at the socket within `timeout_s`."""
    poll = select.poll()
    poll.register(fileno, events)
    return bool(poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1_000)))


_FIELDS: Final = {
    "C": pq.DiagnosticField.SQLSTATE,
    "M": pq.DiagnosticField.MESSAGE_PRIMARY,
    "D": pq.DiagnosticField.MESSAGE_DETAIL,
    "H": pq.DiagnosticField.MESSAGE_HINT,
}
_FAILED: Final = frozenset({pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.BAD_RESPONSE})
_COPYING: Final = frozenset(
    {pq.ExecStatus.COPY_OUT, pq.ExecStatus.COPY_BOTH, pq.ExecStatus.COPY_IN}
)


def _parsed(where: str | Mapping[str, str]) -> dict[str, str]:
    # SUBTLE: libpq quotes input that it cannot parse. That can be the end of a password which
    # contains "@" or "/". The message is therefore not shown, and not chained, because the context
    # of an error can be logged.
    parsed: dict[str, Any] | None = None
    with contextlib.suppress(psycopg.Error):
        text = where if isinstance(where, str) else conninfo.make_conninfo("", **where)
        parsed = conninfo.conninfo_to_dict(text)
    if parsed is None:
        raise UsageError(
            "connection parameters of the postgres source cannot be understood",
            detail="They are not repeated here, because a password may be among them.",
            hint=_SPELLING,
        )
    parameters = {name: str(value) for name, value in parsed.items() if value is not None}
    if isinstance(where, str) and any("@" in parameters.get(name, "") for name in _MISREAD):
        raise UsageError(
            'connection string of the postgres source has an "@" too many', hint=_SPELLING
        )
    return parameters


_PLACES: Final = ("host", "hostaddr", "port")
_MISREAD: Final = ("host", "port", "dbname")
_SPELLING: Final = (
    "Write it as postgresql://user@host:port/database; in a password write @ as %40, "
    "/ as %2F, : as %3A, ? as %3F and % as %25."
)


def _where(pgconn: pq.abc.PGconn, parameters: Mapping[str, str]) -> str:
    """Return the server and the database for display, without secrets."""
    host = pgconn.host.decode(errors="replace") or parameters.get("host", "")
    port = pgconn.port.decode(errors="replace") or parameters.get("port", "")
    database = pgconn.db.decode(errors="replace") or parameters.get("dbname", "")
    return f'postgres database "{database}" at {host}:{port}'


def _secrets(pgconn: pq.abc.PGconn, parameters: Mapping[str, str]) -> tuple[str, ...]:
    """Return the secrets to redact, longest first, because one can be part of another."""
    found = {parameters.get(name, "") for name in SECRETS}
    found |= {pgconn.password.decode(errors="replace"), os.environ.get("PGPASSWORD", "")}
    return tuple(sorted(found - {""}, key=len, reverse=True))


def _text(value: object) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, str | int):
        return str(value).encode()
    raise UsageError(f"parameter of type {type(value).__name__} is not understood")


def _rows(result: pq.abc.PGresult) -> list[Row]:
    columns = range(result.nfields)
    return [
        tuple(
            None if (value := result.get_value(row, column)) is None else value.decode()
            for column in columns
        )
        for row in range(result.ntuples)
    ]


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return f"{text[0].upper()}{text[1:].rstrip('.')}." if text else ""
