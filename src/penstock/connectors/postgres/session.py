"""Connection to a Postgres database.

libpq opens the connection, so parameters that work for `psql` work here. All settings that change
how the server parses or prints values are pinned. The connection is in autocommit mode, and a
transaction is open only while there is data to write.
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

from penstock.connectors.postgres.connection import WatchedConnection
from penstock.connectors.postgres.dialect import EndpointType
from penstock.deadlines import answer_timeout_s
from penstock.errors import InternalError, PenstockError, TransientError, UsageError
from penstock.pgclient import (
    SECRETS,
    VALUE_SETTINGS,
    parse_conninfo,
    redact,
    set_statement,
    to_sentence,
)
from penstock.sdk.errors import Refused
from penstock.sdk.sql.dialect import Column, Table

__all__ = ["PostgresSession", "Server", "translate_error"]

NEEDED: Final = 12_00_00
LOCK_TIMEOUT_S: Final = 20
"""Time limit for locks that Apply or Open needs."""

CANCEL_S: Final = 2.0
CANCELS: Final = 5
CANCEL_AGAIN_S: Final = 0.05

SETTINGS: Final[Mapping[str, str]] = {
    **VALUE_SETTINGS,
    "xmloption": "content",
    "search_path": "pg_catalog",
    "synchronous_commit": "on",
    # All rows of a cursor are fetched, so the plan must be optimal for all.
    "cursor_tuple_fraction": "1",
    # A client whose host has failed must not hold locks.
    "idle_in_transaction_session_timeout": "15min",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
PARAMETERS: Final[Mapping[str, str]] = {
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
"""Default parameters of libpq."""

_REFUSALS: Final = frozenset({"0A", "22", "23", "2B", "3F", "42", "54", "55"})
"""SQLSTATE classes of permanent errors. All others are transient."""


@dataclass(frozen=True, slots=True)
class Server:
    """Connection parameters of a database."""

    parameters: Mapping[str, str] = field(repr=False)
    """Parameters of libpq, including secrets."""

    @classmethod
    def parse(cls, url: str, others: Mapping[str, str]) -> "Server":
        """Parse a URL or, if it is empty, parameters.

        Raises:
            Refused: libpq cannot parse them. The message omits them, because of the password.
        """
        try:
            return cls(parse_conninfo(url or others))
        except UsageError as error:
            raise Refused(
                f"{'url' if url else 'parameters'} of the postgres endpoint cannot be parsed",
                hint=error.hint,
            ) from error

    def __str__(self) -> str:
        host = self.parameters.get("host", "") or self.parameters.get("hostaddr", "")
        port = self.parameters.get("port", "5432")
        return f'postgres database "{self.parameters.get("dbname", "")}" at {host}:{port}'

    @property
    def has_several_hosts(self) -> bool:
        """Return whether there are several hosts, which may reject a login for several reasons."""
        hosts = (self.parameters.get(name, "") for name in ("host", "hostaddr", "port"))
        return any("," in value for value in hosts)

    def redacted(self, text: str) -> str:
        """Return a text without the secrets of the parameters."""
        return redact(text, (self.parameters.get(name, "") for name in SECRETS))


class PostgresSession:
    """Connection for one thread at a time, except `interrupt`."""

    def __init__(
        self,
        server: Server,
        *,
        name: str = "penstock",
        touch: bool = True,
        turn: str = "",
        cancelled: threading.Event | None = None,
    ) -> None:
        """Connect with the application name `name`; read-only without `touch`.

        Transactions with the same `turn` exclude each other. After `cancelled` is set, all waits
        end.
        """
        self.server = server
        self._touch = touch
        self._turn = turn
        self._cancelled = cancelled or threading.Event()
        self._closed = threading.Event()
        self.connection = self._connect(name)
        try:
            self._prepare()
        except BaseException:
            self.connection.close()
            raise

    def _connect(self, name: str) -> WatchedConnection:
        parameters = {
            **PARAMETERS,
            "connect_timeout": str(math.ceil(answer_timeout_s())),
            **self.server.parameters,
            "application_name": name,
            "client_encoding": "UTF8",
        }
        try:
            return WatchedConnection.open(parameters, str(self.server), self._cancelled)
        except TransientError as error:
            code = error.sqlstate
            if code[:2] in _LOGIN_REJECTIONS and not self.server.has_several_hosts:
                raise Refused(
                    f"{self.server} rejected the login",
                    detail=f"{error.detail} The SQLSTATE is {code}.",
                    hint=_LOGIN_REJECTIONS[code[:2]],
                ) from error
            raise
        except psycopg.Error as error:
            text = self.server.redacted(str(error))
        # Not chained, because the text of libpq is not redacted.
        raise TransientError(
            f"could not connect to {self.server}",
            detail=to_sentence(text),
            hint="Check that the server runs, is reachable, and accepts this role.",
        )

    def _prepare(self) -> None:
        version = self.connection.info.server_version
        if version < NEEDED:
            raise Refused(
                f"version {version // 10_000} of {self.server} is not supported",
                hint="Use Postgres 12 or newer.",
            )
        settings = dict(SETTINGS)
        if not self._touch:
            settings["default_transaction_read_only"] = "on"
        with self.translate_errors("change settings"):
            self.connection.execute(set_statement(settings, version).encode())
        with suppress(psycopg.Error):
            # From version 14, and not on every system: a statement ends with its client.
            self.connection.execute("SET client_connection_check_interval = '5s'")

    # Interface of `penstock.sdk.sql`.

    def query(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Execute a query with `?` placeholders, and return its rows."""
        with self.translate_errors("execute a query"):
            query = _numbered(statement, parameters).encode()
            return self.connection.execute(query, parameters).fetchall()

    def run(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        """Execute a statement, and return the number of affected rows."""
        with self.translate_errors("execute a statement"):
            command = _numbered(statement, parameters).encode()
            return self.connection.execute(command, parameters or None).rowcount

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all statements in the block, or none. Waits for locks are limited."""
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
        """Commit the transaction."""
        with self.translate_errors("commit"):
            status = self.connection.execute("COMMIT").statusmessage
        if status != "COMMIT":
            raise InternalError(f"{self.server} returned status {status} for COMMIT")

    def roll_back(self) -> None:
        """Roll back the transaction. If the connection is lost, the server does it."""
        with suppress(psycopg.Error):
            if self.connection.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE:
                self.connection.execute("ROLLBACK")

    def table(self, path: Sequence[str]) -> Table | None:
        """Return a table; None if it does not exist.

        Raises:
            Refused: the relation is not a table.
        """
        schema, name = path
        rows = self.query(_COLUMNS, [schema, name])
        if not rows:
            return None
        if rows[0][0] not in ("r", "p"):
            raise Refused(
                f'relation "{schema}.{name}" is not a table', hint="Use another table name."
            )
        columns = [
            (place, Column(name, kind, not fixed, place is not None))
            for _, _, name, kind, fixed, place in rows
            if name is not None
        ]
        # The sort is stable.
        columns.sort(key=lambda entry: (entry[0] is None, entry[0] or 0))
        return Table(tuple(path), tuple(column for _, column in columns), rows[0][1] or "")

    # Only for Postgres.

    def copy(self, statement: str, data: Sequence[pa.Buffer]) -> None:
        """Run COPY FROM STDIN.

        Raises:
            psycopg.Error: the server rejects the data.
        """
        with self.connection.cursor() as cursor, cursor.copy(statement.encode()) as copy:
            for buffer in data:
                copy.write(memoryview(buffer))

    def schemas(self, names: Sequence[str]) -> frozenset[str]:
        """Return the names of existing schemas."""
        rows = self.query("SELECT nspname FROM pg_namespace WHERE nspname = ANY(?)", [[*names]])
        return frozenset(name for (name,) in rows)

    def endpoint_type(self, type_name: str) -> EndpointType | None:
        """Return the type with this name; None if the endpoint does not have it."""
        try:
            with self.connection.transaction():
                rows = self.connection.execute(_BASE_TYPE, [type_name]).fetchall()
                if not rows:
                    return None
                oid, is_domain, base = rows[0]
                # The server has parsed it as a type name, so it is safe in a statement. Only the
                # description of a result has the type modifier; for a domain, it is wrong.
                result = self.connection.execute(
                    f"SELECT NULL::{type_name}\nWHERE false".encode()
                ).pgresult
                assert result is not None
                size = -1 if is_domain else result.fmod(0)
                [(name,)] = self.connection.execute(
                    "SELECT format_type($1::oid, $2::integer)", [oid, size]
                ).fetchall()
                return EndpointType(name, base)
        except (psycopg.ProgrammingError, psycopg.DataError, psycopg.NotSupportedError):
            return None

    def add_operator_schemas(self, tables: Sequence[str]) -> None:
        """Add schemas to the search path that have the operators for the keys of `tables`."""
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
    def translate_errors(self, action: str) -> Iterator[None]:
        """Raise errors of psycopg as errors of Penstock."""
        try:
            if self._cancelled.is_set():
                raise TransientError(f"transaction in {self.server} was cancelled")
            yield
        except psycopg.Error as error:
            raise self.to_penstock_error(error, f"{self.server} could not {action}") from error

    def to_penstock_error(self, error: psycopg.Error, message: str) -> PenstockError:
        """Return the error of Penstock for an error of the server or of libpq."""
        if self._cancelled.is_set():
            return TransientError(f"transaction in {self.server} was cancelled")
        if self.connection.silence is not None:
            return self.connection.silence
        return translate_error(error, message, self.server)

    @property
    def is_cancelled(self) -> bool:
        """Return whether the session was interrupted."""
        return self._cancelled.is_set()

    def interrupt(self) -> None:
        """Cancel the running statement, from another thread."""
        self._cancelled.set()
        for _ in range(CANCELS):
            # Repeated, because the statement may not have been sent at the first attempt.
            with suppress(psycopg.Error):
                self.connection.cancel_safe(timeout=CANCEL_S)
            if self._closed.wait(CANCEL_AGAIN_S):
                return

    def close(self) -> None:
        """Roll back the uncommitted transaction, and close the connection."""
        self.connection.close()
        self._closed.set()


_LOGIN_REJECTIONS: Final[Mapping[str, str]] = {
    "28": "Correct user and password of the endpoint, or allow the role in pg_hba.conf.",
    "3D": "Create the database, or correct its name in the endpoint.",
}
"""Hints by SQLSTATE class: invalid authorization, and missing database."""


def translate_error(error: psycopg.Error, message: str, server: Server) -> PenstockError:
    """Return `Refused` for a permanent error of server or libpq, else `TransientError`."""
    code = error.sqlstate or ""
    primary = error.diag.message_primary or " ".join(str(error).split()) or "no reason was given"
    text = server.redacted(f"{message}: {primary}")
    match = re.search(r'column ("(?:[^"]|"")*"|[^:,]+)', error.diag.context or "")
    column = error.diag.column_name or (match[1].strip('"') if match else "")
    parts = [
        f'The column is "{column}".' if column else "",
        to_sentence(error.diag.message_detail or ""),
        f"The SQLSTATE is {code}." if code else "",
    ]
    detail = server.redacted(" ".join(part for part in parts if part))
    kind = Refused if code[:2] in _REFUSALS and code != "55P03" else TransientError
    return kind(text, detail=detail, hint=_HINTS.get(code, "") or to_sentence(_hint(error)))


_HINTS: Final[Mapping[str, str]] = {
    "22003": "Exclude the field, or set "
    '"x-postgres-type": "numeric" for it in the schema of the collection.',
    "22021": "Exclude the field: text in Postgres cannot contain a NUL.",
    "2BP01": "Drop the objects that depend on the table, run again, and create them again.",
    "42501": "Grant the missing privilege to the role of this connection.",
    "55P03": "End the transaction that uses the table.",
}


def _hint(error: psycopg.Error) -> str:
    return error.diag.message_hint or ""


def _numbered(statement: str, parameters: Sequence[Any]) -> str:
    """Replace `?` outside quotes by `$1`, `$2` …."""
    if not parameters:
        return statement
    numbers = iter(range(1, len(parameters) + 1))
    return re.sub(
        r"""("(?:[^"]|"")*"|'(?:[^']|'')*')|\?""",
        lambda match: match[1] or f"${next(numbers)}",
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
