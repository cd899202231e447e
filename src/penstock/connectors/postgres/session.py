"""A connection to a Postgres database.

libpq opens it, so that what works for `psql` works here. Whatever changes how the
server reads or prints a value is set alike on each. The connection commits by itself;
a transaction is begun by name, and never held while nothing is to be written.
"""

import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
import pyarrow as pa
from psycopg import conninfo

from penstock.connectors.postgres.connection import WatchedConnection
from penstock.connectors.postgres.dialect import EndpointType, literal
from penstock.deadlines import answer_timeout_s
from penstock.errors import InternalError, PenstockError, SourceError, TransientError
from penstock.sdk.errors import Refused
from penstock.sdk.sql.dialect import Column, Table
from penstock.sources.postgres.connect import connect

__all__ = ["PostgresSession", "Where", "told"]

NEEDED: Final = 12_00_00
LOCK_TIMEOUT_S: Final = 20
"""So long somebody else may hold a lock that Apply or Open needs."""

CANCEL_S: Final = 2.0
CANCELS: Final = 5
CANCEL_AGAIN_S: Final = 0.05

SETTINGS: Final[Mapping[str, str]] = {
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "xmloption": "content",
    "standard_conforming_strings": "on",
    "search_path": "pg_catalog",
    "synchronous_commit": "on",
    "statement_timeout": "0",
    "lock_timeout": "0",
    # All rows of a cursor are taken, so the plan for all of them is wanted.
    "cursor_tuple_fraction": "1",
    # A client that vanished with its machine must not keep locks.
    "idle_in_transaction_session_timeout": "15min",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
NEWER_SETTINGS: Final[Mapping[str, tuple[int, str]]] = {
    "idle_session_timeout": (14_00_00, "0"),
    "transaction_timeout": (17_00_00, "0"),
}
"""By the version that brought them."""

PARAMETERS: Final[Mapping[str, str]] = {
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
"""What is asked of libpq, unless the user says otherwise."""

_SECRETS: Final = frozenset(
    {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}
)
_REFUSALS: Final = frozenset({"0A", "22", "23", "2B", "3F", "42", "54", "55"})
"""Classes of codes about what was asked; the others are about the moment."""


@dataclass(frozen=True, slots=True)
class Where:
    """A database, and how to connect to it."""

    parameters: Mapping[str, str] = field(repr=False)
    """Of libpq; secrets among them."""

    @classmethod
    def of(cls, url: str, others: Mapping[str, str]) -> "Where":
        """By URL, or by parameters.

        Raises:
            Refused: libpq cannot read them. They are not shown, for they may hold a password.
        """
        found: dict[str, Any] | None = None
        with suppress(psycopg.Error):
            found = conninfo.conninfo_to_dict(url or conninfo.make_conninfo("", **others))
        if found is None or any("@" in str(found.get(each, "")) for each in ("host", "port")):
            raise Refused(
                f"{'url' if url else 'parameters'} of the postgres endpoint cannot be understood",
                hint="Write postgresql://user:password@host:5432/database; in a password, "
                "write @ as %40, : as %3A, / as %2F, % as %25.",
            )
        return cls({name: str(value) for name, value in found.items() if value is not None})

    def __str__(self) -> str:
        host = self.parameters.get("host", "") or self.parameters.get("hostaddr", "")
        port = self.parameters.get("port", "5432")
        return f'postgres database "{self.parameters.get("dbname", "")}" at {host}:{port}'

    def redacted(self, text: str) -> str:
        """Without secrets."""
        secrets = (self.parameters.get(name, "") for name in _SECRETS)
        for secret in sorted(filter(None, secrets), key=len, reverse=True):
            text = text.replace(secret, "********")
        return text


class PostgresSession:
    """Runs statements in a Postgres database; one thread at a time, but for `interrupt`."""

    def __init__(
        self,
        where: Where,
        *,
        name: str = "penstock",
        touch: bool = True,
        turn: str = "",
        gave_up: threading.Event | None = None,
    ) -> None:
        """Connect, as an application called `name`; unless it may `touch`, only to read.

        Transactions of one `turn` are had one at a time. Once `gave_up` is set, nothing is
        waited for.
        """
        self.where = where
        self._touch = touch
        self._turn = turn
        self._gave_up = gave_up or threading.Event()
        self._closed = threading.Event()
        self.connection = self._connected(name)
        try:
            self._prepare()
        except BaseException:
            self.connection.close()
            raise

    def _connected(self, name: str) -> WatchedConnection:
        parameters: dict[str, Any] = {
            **PARAMETERS,
            "connect_timeout": str(math.ceil(answer_timeout_s())),
            **self.where.parameters,
            "application_name": name,
            "client_encoding": "UTF8",
        }
        said = code = ""
        try:
            connection = WatchedConnection.connect(
                "",
                autocommit=True,
                prepare_threshold=None,
                cursor_factory=psycopg.RawCursor,
                **parameters,
            )
            try:
                connection.watch(parameters, self._gave_up)
            except BaseException:
                connection.close()
                raise
            return connection
        except psycopg.Error as error:
            # Not chained: libpq's words are for redacted eyes only.
            said = self.where.redacted(" ".join(str(error).split()))
            if not isinstance(error, psycopg.errors.ConnectionTimeout):
                code = _login_sqlstate(parameters)
        if code[:2] in _LOGIN_REJECTIONS:
            raise Refused(
                f"{self.where} rejected the login",
                detail=f"{said}. The server's code is {code}.",
                hint=_LOGIN_REJECTIONS[code[:2]],
            )
        raise TransientError(
            f"could not connect to {self.where}",
            detail=f"{said}.",
            hint="See that the server runs, can be reached, and lets this role in.",
        )

    def _prepare(self) -> None:
        version = self.connection.info.server_version
        if version < NEEDED:
            raise Refused(
                f"{self.where} is of version {version // 10_000}, and must be 12 or newer"
            )
        settings = dict(SETTINGS)
        for name, (since, value) in NEWER_SETTINGS.items():
            if version >= since:
                settings[name] = value
        if not self._touch:
            settings["default_transaction_read_only"] = "on"
        with self.telling("be set up"):
            said = "; ".join(f"SET {name} = {literal(value)}" for name, value in settings.items())
            self.connection.execute(said.encode())
        with suppress(psycopg.Error):
            # From 14 on, and not on every system: what a client asked for ends with it.
            self.connection.execute("SET client_connection_check_interval = '5s'")

    # What the shared parts need.

    def query(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of a statement that has some; written with `?` for values."""
        with self.telling("answer"):
            said = _numbered(statement, parameters).encode()
            return self.connection.execute(said, parameters).fetchall()

    def run(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement; how many rows it touched."""
        with self.telling("do as asked"):
            said = _numbered(statement, parameters).encode()
            return self.connection.execute(said, parameters or None).rowcount

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of what is run within, or nothing; locks are not waited for long."""
        self.run("BEGIN")
        try:
            self.run(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'")
            if self._touch:
                self.query("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", [self._turn])
            yield
        except BaseException:
            self.roll_back()
            raise
        self.commit()

    def commit(self) -> None:
        """Keep what was done since BEGIN."""
        with self.telling("commit"):
            said = self.connection.execute("COMMIT").statusmessage
        if said != "COMMIT":
            raise InternalError(f"{self.where} answered COMMIT with {said}")

    def roll_back(self) -> None:
        """Undo what is not committed; if the connection is gone, the server has."""
        with suppress(psycopg.Error):
            if self.connection.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE:
                self.connection.execute("ROLLBACK")

    def table(self, path: Sequence[str]) -> Table | None:
        """The table of that name as it is, if it is there.

        Raises:
            Refused: what is there is no table.
        """
        schema, name = path
        found = self.query(_COLUMNS, [schema, name])
        if not found:
            return None
        if found[0][0] not in ("r", "p"):
            raise Refused(
                f'"{schema}.{name}" is there, and is not a table', hint="Name another one."
            )
        columns = [
            (place, Column(name, kind, not fixed, place is not None))
            for _, _, name, kind, fixed, place in found
            if name is not None
        ]
        # Python's sort keeps the order of what is equal.
        columns.sort(key=lambda it: (it[0] is None, it[0] or 0))
        return Table(tuple(path), tuple(each for _, each in columns), found[0][1] or "")

    # What is asked of Postgres alone.

    def copy(self, statement: str, data: Sequence[pa.Buffer]) -> None:
        """Run a COPY from us; what the server says of the data is raised as it is.

        Raises:
            psycopg.Error: it does not take it.
        """
        with self.connection.cursor() as cursor, cursor.copy(statement.encode()) as copy:
            for each in data:
                copy.write(memoryview(each))

    def schemas(self, names: Sequence[str]) -> frozenset[str]:
        """Those of `names` that are there."""
        found = self.query("SELECT nspname FROM pg_namespace WHERE nspname = ANY(?)", [[*names]])
        return frozenset(name for (name,) in found)

    def endpoint_type(self, said: str) -> EndpointType | None:
        """The type that is called so here, if there is one."""
        try:
            with self.connection.transaction():
                found = self.connection.execute(_BASE_TYPE, [said]).fetchall()
                if not found:
                    return None
                oid, is_domain, base = found[0]
                # It parses as the name of a type, so it can be part of a statement. What is in
                # its parentheses is told only by the description of a result; of a domain, wrongly.
                result = self.connection.execute(
                    f"SELECT NULL::{said}\nWHERE false".encode()
                ).pgresult
                assert result is not None
                size = -1 if is_domain else result.fmod(0)
                [(name,)] = self.connection.execute(
                    "SELECT format_type($1::oid, $2::integer)", [oid, size]
                ).fetchall()
                return EndpointType(name, base)
        except (psycopg.ProgrammingError, psycopg.DataError, psycopg.NotSupportedError):
            return None

    def see_operators(self, tables: Sequence[str]) -> None:
        """Find the operators that compare the keys of `tables`, which an extension may have."""
        self.query(
            "SELECT set_config('search_path', concat_ws(', ', 'pg_catalog', string_agg(DISTINCT "
            "quote_ident(n.nspname), ', ')), false) FROM pg_index i "
            "JOIN pg_opclass o ON o.oid = ANY(i.indclass) "
            "JOIN pg_namespace n ON n.oid = o.opcnamespace "
            "WHERE i.indisprimary AND n.nspname <> 'pg_catalog' "
            "AND i.indrelid = ANY(SELECT to_regclass(each) FROM unnest(?::text[]) each)",
            [[*tables]],
        )

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Say what went wrong in our own words."""
        try:
            if self._gave_up.is_set():
                raise TransientError(f"work of {self.where} was broken off")
            yield
        except psycopg.Error as error:
            raise self.explained(error, f"{self.where} could not {what}") from error

    def explained(self, error: psycopg.Error, what: str) -> PenstockError:
        """An error of the server or of libpq."""
        if self._gave_up.is_set():
            return TransientError(f"work of {self.where} was broken off")
        if silence := self.connection.silence:
            return TransientError(
                f"{self.where} does not answer",
                detail=silence,
                hint="Check the server and the network; what runs keeps trying.",
            )
        return told(error, what, self.where)

    @property
    def gave_up(self) -> bool:
        """Whether it was interrupted."""
        return self._gave_up.is_set()

    def interrupt(self) -> None:
        """Break off what is under way; called by another thread."""
        self._gave_up.set()
        for _ in range(CANCELS):
            # More than once: the statement may not have been sent the first time.
            with suppress(psycopg.Error):
                self.connection.cancel_safe(timeout=CANCEL_S)
            if self._closed.wait(CANCEL_AGAIN_S):
                return

    def close(self) -> None:
        """Let go; what is not committed is rolled back."""
        self.connection.close()
        self._closed.set()


_LOGIN_REJECTIONS: Final[Mapping[str, str]] = {
    "28": "Correct user and password of the endpoint, or allow the role in pg_hba.conf.",
    "3D": "Create the database, or correct its name in the endpoint.",
}
"""Hints by class of code: invalid authorization, and database that does not exist."""


def _login_sqlstate(parameters: Mapping[str, Any]) -> str:
    """Return the code with which the server rejects a login, or an empty text.

    psycopg does not report the code of a login. With several hosts there is no single answer.
    """
    if any("," in str(parameters.get(name, "")) for name in ("host", "hostaddr", "port")):
        return ""
    try:
        connect({name: str(value) for name, value in parameters.items()}, coded=True).close()
    except SourceError as error:
        return error.sqlstate
    return ""


def told(error: psycopg.Error, what: str, where: Where) -> PenstockError:
    """An error of the server or of libpq: what a person must change, or what may pass."""
    code = error.sqlstate or ""
    primary = error.diag.message_primary or " ".join(str(error).split()) or "no reason was given"
    message = where.redacted(f"{what}: {primary}")
    found = re.search(r'column ("(?:[^"]|"")*"|[^:,]+)', error.diag.context or "")
    column = error.diag.column_name or (found[1].strip('"') if found else "")
    parts = [
        f'It is about column "{column}".' if column else "",
        _sentence(error.diag.message_detail or ""),
        f"The server's code is {code}." if code else "",
    ]
    detail = where.redacted(" ".join(part for part in parts if part))
    kind = Refused if code[:2] in _REFUSALS and code != "55P03" else TransientError
    return kind(message, detail=detail, hint=_HINTS.get(code, "") or _sentence(_hint(error)))


_HINTS: Final[Mapping[str, str]] = {
    "22003": "Exclude the field, or let the schema of the collection say of it "
    '"x-postgres-type": "numeric".',
    "22021": "Exclude the field; no text in Postgres has a NUL in it.",
    "2BP01": "Drop the objects that depend on the table, run again, and create them again.",
    "42501": "Grant the role of this connection what it lacks.",
    "55P03": "End whoever holds a transaction open that uses the table.",
}


def _hint(error: psycopg.Error) -> str:
    return error.diag.message_hint or ""


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return f"{text.rstrip('.')}." if text else ""


def _numbered(statement: str, parameters: Sequence[Any]) -> str:
    """`?` as `$1`, `$2` …, but for those within quotes."""
    if not parameters:
        return statement
    numbers = iter(range(1, len(parameters) + 1))
    return re.sub(
        r"""("(?:[^"]|"")*"|'(?:[^']|'')*')|\?""",
        lambda found: found[1] or f"${next(numbers)}",
        statement,
    )


_COLUMNS: Final = """
SELECT c.relkind::text, k.conname::text, a.attname::text,
       format_type(a.atttypid, a.atttypmod), a.attnotnull, array_position(k.conkey, a.attnum)
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_constraint k ON k.conrelid = c.oid AND k.contype = 'p'
WHERE n.nspname = ? AND c.relname = ?
ORDER BY a.attnum
"""

_BASE_TYPE: Final = """
WITH RECURSIVE base(asked, oid, size, depth) AS (
    SELECT to_regtype($1)::oid, to_regtype($1)::oid, -1, 0
    UNION ALL
    SELECT asked, t.typbasetype, t.typtypmod, depth + 1
    FROM base JOIN pg_type t ON t.oid = base.oid WHERE t.typtype = 'd'
)
SELECT asked, depth > 0, format_type(base.oid, NULL)
FROM base JOIN pg_type t ON t.oid = asked WHERE t.typtype <> 'p'
ORDER BY depth DESC LIMIT 1
"""
