"""Connection to a SQLite file."""

import math
import os
import shlex
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from penstock.deadlines import answer_timeout_s
from penstock.errors import TransientError
from penstock.sdk.errors import Refused
from penstock.sdk.sql.dialect import Column, Table
from penstock.sdk.sql.document_columns import double_text

__all__ = ["SqliteSession"]

NEEDED: Final = (3, 37)
"""First version with strict tables."""

PAUSE_S: Final = 0.01

READ_TIMEOUT_S: Final = 5.0
"""Time limit of reads. They wait for a connection that closes, not for a writer."""


class SqliteSession:
    """Connection for one thread at a time, except `interrupt`."""

    def __init__(
        self,
        path: Path,
        *,
        create: bool = True,
        cancelled: threading.Event | None = None,
        decimals: Literal["text", "real"] = "text",
    ) -> None:
        """Open the file at `path`, and create it if it does not exist.

        Without `create`, nothing is created: the session uses an empty database if the file does
        not exist, after a check that file and folder are readable and writable.

        After `cancelled` is set, all waits end.
        """
        if sqlite3.sqlite_version_info < NEEDED:
            raise Refused(
                f"SQLite version {sqlite3.sqlite_version} is not supported",
                hint="Use a Python with SQLite 3.37 or newer.",
            )
        self.path = path
        self.decimals: Literal["text", "real"] = decimals
        self._cancelled = cancelled or threading.Event()
        self._closing = threading.Lock()
        self._closed = False
        if not create:
            _check_access(path)
        use_file = create or path.exists()
        try:
            self.connection = sqlite3.connect(
                path if use_file else ":memory:",
                timeout=READ_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            if create:
                self._execute_with_retries("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA synchronous = FULL")
            # Views may refer to a table that is replaced, and must not be checked.
            self.connection.execute("PRAGMA legacy_alter_table = ON")
            # SQLite does not convert doubles to text exactly.
            self.connection.create_function("flow_text", 1, double_text, deterministic=True)
            # The first read opens the file and its -wal file.
            self.connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
        except sqlite3.Error as error:
            if _is_busy(error):
                raise self._busy(READ_TIMEOUT_S) from error
            raise Refused(
                f'could not open SQLite database "{path}": {error}',
                hint="Use a writable SQLite file in a folder that exists.",
            ) from error
        self._files = {file: _identity(file) for file in (path, path.with_name(f"{path.name}-wal"))}
        """Device and inode of the open files; None for a file that does not exist."""

    def commit(self) -> None:
        """Commit to the files at the path of the endpoint.

        SUBTLE: SQLite keeps writing to a file that was deleted or replaced, and reports success.
        The second check detects a file that disappeared during the commit: such a commit is not
        acknowledged.

        Raises:
            Refused: the files at the path are not the open files.
        """
        self.check_files()
        self.connection.execute("COMMIT")
        self.check_files()

    def check_files(self) -> None:
        """Compare the files at the path of the endpoint with the open files.

        Raises:
            Refused: a file was deleted or replaced.
        """
        for file, opened in self._files.items():
            current = _identity(file)
            if opened is None or current == opened:
                continue
            state = "was deleted" if current is None else "was replaced by another file"
            raise Refused(
                f'SQLite file "{file}" {state} while it was open',
                detail="The path refers to another file. The transaction is not acknowledged.",
                hint=f'Restore "{self.path}" with its -wal file and start again; or start with an '
                "empty file, and raise the backfill of each binding by one.",
            )

    def query(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Execute a query, and return its rows."""
        with self._translate_errors():
            return self.connection.execute(statement, parameters).fetchall()

    def run(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        """Execute a statement, and return the number of affected rows."""
        with self._translate_errors():
            return self.connection.execute(statement, parameters).rowcount

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise errors of SQLite as `TransientError` or `Refused`."""
        try:
            yield
        except sqlite3.Error as error:
            if _is_busy(error) and not self._cancelled.is_set():
                raise self._busy(READ_TIMEOUT_S) from error
            transient = self._cancelled.is_set() or _is_transient(error)
            kind = TransientError if transient else Refused
            raise kind(
                f'could not execute statement in SQLite database "{self.path}": {error}'
            ) from error

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all statements in the block, or none."""
        self.begin()
        try:
            yield
            self.commit()
        except BaseException:
            self.roll_back()
            raise

    def begin(self) -> None:
        """Begin a write transaction, after other writers have ended theirs."""
        self._execute_with_retries("BEGIN IMMEDIATE")

    def _execute_with_retries(self, statement: str) -> None:
        # The busy timeout of SQLite cannot be interrupted.
        self.connection.execute("PRAGMA busy_timeout = 0")
        try:
            self._retry_while_busy(statement)
        finally:
            self.connection.execute(f"PRAGMA busy_timeout = {int(READ_TIMEOUT_S * 1_000)}")

    def _retry_while_busy(self, statement: str) -> None:
        busy_s = answer_timeout_s()
        for _ in range(math.ceil(busy_s / PAUSE_S)):
            try:
                self.connection.execute(statement)
            except sqlite3.OperationalError as error:
                if not _is_busy(error):
                    raise
            else:
                return
            if self._cancelled.wait(PAUSE_S):
                raise TransientError(f'waiting for SQLite database "{self.path}" was cancelled')
        raise self._busy(busy_s)

    def _busy(self, after_s: float) -> TransientError:
        return TransientError(
            f'SQLite database "{self.path}" is locked by another connection',
            detail=f"The lock was held for {after_s:g} s.",
            hint="End the process with the open transaction: "
            f"fuser -v {shlex.quote(str(self.path))}",
        )

    def check_not_cancelled(self) -> None:
        """Check for cancellation between two statements.

        Raises:
            TransientError: the session was cancelled.
        """
        if self._cancelled.is_set():
            raise TransientError(f'transaction in SQLite database "{self.path}" was cancelled')

    def roll_back(self) -> None:
        """Roll back the uncommitted transaction."""
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def table(self, path: Sequence[str]) -> Table | None:
        """Return a table; None if it does not exist."""
        [name] = path
        rows = self.query("SELECT name, type, [notnull], pk FROM pragma_table_info(?)", [name])
        if not rows:
            return None
        columns = [
            Column(name, kind, not (fixed or pk), bool(pk)) for name, kind, fixed, pk in rows
        ]
        in_order = {name: pk for name, _, _, pk in rows if pk}
        keys = sorted(
            (column for column in columns if column.in_key),
            key=lambda column: in_order[column.name],
        )
        attached = self.query(
            "SELECT sql FROM sqlite_master WHERE tbl_name = ? COLLATE NOCASE "
            "AND type IN ('index', 'trigger') AND sql IS NOT NULL ORDER BY rowid",
            [name],
        )
        others = (column for column in columns if not column.in_key)
        return Table(tuple(path), (*keys, *others), attached=tuple(sql for (sql,) in attached))

    def interrupt(self) -> None:
        """Interrupt the running statement, from another thread."""
        self._cancelled.set()
        with self._closing:
            if not self._closed:
                self.connection.interrupt()

    def close(self) -> None:
        """Roll back the uncommitted transaction, and close the connection."""
        with self._closing:
            self._closed = True
            self.connection.close()


def _check_access(path: Path) -> None:
    """Check that the database can be created or opened for writing, without changing it.

    SQLite writes its log next to the file, so the folder must be writable too.
    """

    def allows(where: Path, mode: int) -> bool:
        return os.access(where, mode, effective_ids=os.access in os.supports_effective_ids)

    folder = path.absolute().parent
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise Refused(
            f'folder "{folder}" of SQLite database "{path.name}" {state}',
            hint=f"Create the folder (mkdir -p {shlex.quote(str(folder))}), or correct path in the "
            "endpoint: it must be in a folder that exists.",
        )
    if not allows(folder, os.W_OK | os.X_OK):
        raise Refused(
            f'folder "{folder}" of SQLite database "{path.name}" is not writable',
            detail="SQLite writes its log next to the database.",
            hint="Grant write permission on the folder, or use a file in another one.",
        )
    if path.exists() and not path.is_file():
        raise Refused(
            f'SQLite database "{path}" is not a file',
            hint="Set path in the endpoint to a file.",
        )
    if path.exists() and not allows(path, os.R_OK | os.W_OK):
        raise Refused(
            f'SQLite database "{path}" is not readable and writable',
            hint="Grant read and write permission on the file, or use another one.",
        )


def _is_busy(error: sqlite3.Error) -> bool:
    return _primary_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _is_transient(error: sqlite3.Error) -> bool:
    """Return whether the machine caused the error: a full disk, failed I/O, no memory."""
    return _primary_code(error) in (
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOMEM,
    )


def _primary_code(error: sqlite3.Error) -> int:
    # Errors of the sqlite3 module itself have no code.
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _identity(file: Path) -> tuple[int, int] | None:
    """Return device and inode of a file; None if there is no file at its path."""
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise TransientError(
            f'could not read the status of SQLite file "{file}"', detail=str(error)
        ) from error
    return status.st_dev, status.st_ino
