"""A connection to a SQLite file."""

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
"""The first version with strict tables."""

PAUSE_S: Final = 0.01

GLANCE_S: Final = 5.0
"""So long a reader may wait: for one who writes it need not, for one who closes it must."""


class SqliteSession:
    """Runs statements on a SQLite file; one thread at a time, but for `interrupt`."""

    def __init__(
        self,
        path: Path,
        *,
        create: bool = True,
        gave_up: threading.Event | None = None,
        decimals: Literal["text", "real"] = "text",
    ) -> None:
        """Open the file at `path`; if it is not there, make it.

        Without `create`, nothing is made: the session is on an empty database in place of a
        file that does not exist, and file and folder are checked to be readable and writable.

        Once `gave_up` is set, nothing is waited for.
        """
        if sqlite3.sqlite_version_info < NEEDED:
            raise Refused(
                f"SQLite is {sqlite3.sqlite_version}, and must be 3.37 or newer",
                hint="Use a Python with a newer one.",
            )
        self.path = path
        self.decimals: Literal["text", "real"] = decimals
        self._gave_up = gave_up or threading.Event()
        self._closing = threading.Lock()
        self._closed = False
        if not create:
            _check_access(path)
        there = create or path.exists()
        try:
            self.connection = sqlite3.connect(
                path if there else ":memory:",
                timeout=GLANCE_S,
                isolation_level=None,
                check_same_thread=False,
            )
            if create:
                self._patiently("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA synchronous = FULL")
            # A table that is replaced may be seen by views, which need not be looked at.
            self.connection.execute("PRAGMA legacy_alter_table = ON")
            # SQLite's own way to write a double is not exact.
            self.connection.create_function("flow_text", 1, double_text, deterministic=True)
            # The first read opens the file and its -wal file.
            self.connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
        except sqlite3.Error as error:
            if _is_busy(error):
                raise self._busy(GLANCE_S) from error
            raise Refused(
                f'"{path}" cannot be opened as a SQLite file: {error}',
                hint="Name a SQLite file that can be written, in a folder that exists.",
            ) from error
        self._files = {file: _identity(file) for file in (path, path.with_name(f"{path.name}-wal"))}
        """Device and inode of the files that are open, None for one that does not exist."""

    def commit(self) -> None:
        """Commit to the files at the path of the endpoint.

        SUBTLE: SQLite keeps writing to a file that was deleted or replaced, and reports success.
        The second check is for one that went while the commit was under way: such a commit is
        not acknowledged.

        Raises:
            Refused: the files at the path are not the ones that are open.
        """
        self.check_files()
        self.connection.execute("COMMIT")
        self.check_files()

    def check_files(self) -> None:
        """Compare the files at the path of the endpoint with the ones that are open.

        Raises:
            Refused: one of them was deleted or replaced.
        """
        for file, opened in self._files.items():
            found = _identity(file)
            if opened is None or found == opened:
                continue
            state = "was deleted" if found is None else "was replaced by another file"
            raise Refused(
                f'SQLite file "{file}" {state} while it was open',
                detail="What is written would not be found at that path. The transaction is not "
                "acknowledged.",
                hint=f'Restore "{self.path}" with its -wal file and start again; or start with an '
                "empty file, and raise the backfill of each binding by one.",
            )

    def query(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of a statement that has some."""
        with self._telling():
            return self.connection.execute(statement, parameters).fetchall()

    def run(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement; how many rows it touched."""
        with self._telling():
            return self.connection.execute(statement, parameters).rowcount

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What SQLite refuses is for a person to read."""
        try:
            yield
        except sqlite3.Error as error:
            if _is_busy(error) and not self._gave_up.is_set():
                raise self._busy(GLANCE_S) from error
            passes = self._gave_up.is_set() or _is_transient(error)
            kind = TransientError if passes else Refused
            raise kind(f'"{self.path}" does not do as request: {error}') from error

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of what is run within, or nothing."""
        self.begin()
        try:
            yield
            self.commit()
        except BaseException:
            self.roll_back()
            raise

    def begin(self) -> None:
        """Be the one who writes; waits for another who does."""
        self._patiently("BEGIN IMMEDIATE")

    def _patiently(self, statement: str) -> None:
        # Not by SQLite's own patience, which nothing interrupts.
        self.connection.execute("PRAGMA busy_timeout = 0")
        try:
            self._try_again_and_again(statement)
        finally:
            self.connection.execute(f"PRAGMA busy_timeout = {int(GLANCE_S * 1_000)}")

    def _try_again_and_again(self, statement: str) -> None:
        busy_s = answer_timeout_s()
        for _ in range(math.ceil(busy_s / PAUSE_S)):
            try:
                self.connection.execute(statement)
            except sqlite3.OperationalError as error:
                if not _is_busy(error):
                    raise
            else:
                return
            if self._gave_up.wait(PAUSE_S):
                raise TransientError(f'waiting for "{self.path}" was broken off')
        raise self._busy(busy_s)

    def _busy(self, after_s: float) -> TransientError:
        return TransientError(
            f'SQLite database "{self.path}" is locked by another connection',
            detail=f"The lock was held for {after_s:g} s.",
            hint="End the process that holds a transaction open in it: "
            f"fuser -v {shlex.quote(str(self.path))}",
        )

    def must_go_on(self) -> None:
        """Notice between two statements that we were told to stop.

        Raises:
            TransientError: we were.
        """
        if self._gave_up.is_set():
            raise TransientError(f'work on "{self.path}" was broken off')

    def roll_back(self) -> None:
        """Undo what is not committed."""
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def table(self, path: Sequence[str]) -> Table | None:
        """The table of that name as it is, if it is there."""
        [name] = path
        found = self.query("SELECT name, type, [notnull], pk FROM pragma_table_info(?)", [name])
        if not found:
            return None
        columns = [
            Column(name, kind, not (fixed or pk), bool(pk)) for name, kind, fixed, pk in found
        ]
        in_order = {name: pk for name, _, _, pk in found if pk}
        keys = sorted((each for each in columns if each.in_key), key=lambda it: in_order[it.name])
        attached = self.query(
            "SELECT sql FROM sqlite_master WHERE tbl_name = ? COLLATE NOCASE "
            "AND type IN ('index', 'trigger') AND sql IS NOT NULL ORDER BY rowid",
            [name],
        )
        others = (each for each in columns if not each.in_key)
        return Table(tuple(path), (*keys, *others), attached=tuple(sql for (sql,) in attached))

    def interrupt(self) -> None:
        """Break off what is under way; called by another thread."""
        self._gave_up.set()
        with self._closing:
            if not self._closed:
                self.connection.interrupt()

    def close(self) -> None:
        """Let go; what is not committed is rolled back."""
        with self._closing:
            self._closed = True
            self.connection.close()


def _check_access(path: Path) -> None:
    """Check that the database can be created, or opened for writing, without touching it.

    SQLite writes its log next to the file, so the folder must be writable too.
    """

    def allows(where: Path, mode: int) -> bool:
        return os.access(where, mode, effective_ids=os.access in os.supports_effective_ids)

    folder = path.absolute().parent
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise Refused(
            f'folder "{folder}" of SQLite database "{path.name}" {state}',
            hint=f"Create it (mkdir -p {shlex.quote(str(folder))}), or correct path in the "
            "endpoint: it must be in a folder that exists.",
        )
    if not allows(folder, os.W_OK | os.X_OK):
        raise Refused(
            f'folder "{folder}" of SQLite database "{path.name}" is not writable',
            detail="SQLite keeps its log next to the database.",
            hint="Grant write permission on the folder, or name a file in another one.",
        )
    if path.exists() and not path.is_file():
        raise Refused(
            f'SQLite database "{path}" is not a file',
            hint="Name a file under path in the endpoint.",
        )
    if path.exists() and not allows(path, os.R_OK | os.W_OK):
        raise Refused(
            f'SQLite database "{path}" is not readable and writable',
            hint="Grant read and write permission on the file, or name another one.",
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
    # An error of the sqlite3 module itself has no code.
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
