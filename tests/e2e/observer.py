"""Observers that read an endpoint all the time and check every state that they see."""

import sqlite3
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import psycopg

from penstock.clock import SYSTEM_CLOCK
from penstock.demo.comparison import Row, rows_in_postgres, rows_in_sqlite
from tests.e2e.ledger import History, State, read_state

PAUSE_MS: Final = 150


class TableMissing(Exception):
    """A table does not exist in the endpoint."""


class Endpoint(ABC):
    """A copy of all tables, read directly."""

    name: str

    @abstractmethod
    def read(self) -> State | None:
        """Read one state in one transaction; None if the endpoint cannot be read now.

        Raises:
            TableMissing: not all tables exist.
        """

    @abstractmethod
    def rows(self, table: str, columns: Sequence[str]) -> Counter[Row]:
        """Return the rows of a table as text."""


class SqliteEndpoint(Endpoint):
    """A database file of SQLite."""

    name = "sqlite"

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> State | None:
        if not self.path.exists():
            return None
        uri = f"{self.path.as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=1)) as database:
                database.execute("BEGIN")
                return read_state(lambda text: database.execute(text).fetchone())
        except sqlite3.OperationalError as error:
            if str(error).startswith("no such table"):
                raise TableMissing(str(error)) from error
            return None

    def rows(self, table: str, columns: Sequence[str]) -> Counter[Row]:
        with closing(sqlite3.connect(self.path)) as database:
            return rows_in_sqlite(database, table, columns)


class PostgresEndpoint(Endpoint):
    """A database of a Postgres server."""

    name = "postgres"

    def __init__(self, url: str) -> None:
        self.url = url

    def read(self) -> State | None:
        try:
            with psycopg.connect(self.url, connect_timeout=5) as connection:
                connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                connection.read_only = True

                def query(text: str) -> Sequence[object]:
                    (row,) = connection.execute(text.encode()).fetchall()
                    return row

                return read_state(query)
        except psycopg.errors.UndefinedTable as error:
            raise TableMissing(str(error)) from error
        except psycopg.OperationalError:
            return None

    def rows(self, table: str, columns: Sequence[str]) -> Counter[Row]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("SET TimeZone = 'UTC'; SET DateStyle = 'ISO'")
            return rows_in_postgres(connection, table, columns)


class Checker:
    """Checks the states of one endpoint, in the order of observation."""

    def __init__(self, endpoint: str, history: History) -> None:
        self._endpoint = endpoint
        self._history = history
        self.observations = 0
        self.versions: set[int] = set()
        """All versions observed."""

        self.latest: int | None = None
        """The version of the last observation."""

        self.violations: list[str] = []

    def check(self, state: State) -> None:
        """Check one state. Before the initial snapshot the tables may exist and be empty."""
        if state.is_empty and self.latest is None:
            return
        self.observations += 1
        if state.is_empty:
            self.report("emptied", f"no rows after version {self.latest}")
            return
        if torn := state.torn():
            self.report("torn", f"version {state.version}: {torn}")
        if self.latest is not None and state.version < self.latest:
            self.report("reversed", f"version {state.version} after version {self.latest}")
        legal = self._history.checksum(state.version)
        if legal is None:
            self.report("invented", f"the source never committed version {state.version}")
        elif legal != state.checksum:
            self.report(
                "altered", f"version {state.version} is {state.checksum} and must be {legal}"
            )
        self.versions.add(state.version)
        self.latest = state.version

    def check_missing(self, error: TableMissing) -> None:
        """Check that a table that does not exist never existed."""
        if self.latest is not None:
            self.report("missing", f"{error} after version {self.latest}")

    def report(self, kind: str, detail: str) -> None:
        self.violations.append(f"{self._endpoint}: {kind}: {detail}")


class Observer:
    """A thread that reads one endpoint and checks each state."""

    def __init__(self, endpoint: Endpoint, history: History) -> None:
        self.endpoint = endpoint
        self.checker = Checker(endpoint.name, history)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"observer of {endpoint.name}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def observe(self) -> None:
        """Read the endpoint once and check its state."""
        try:
            state = self.endpoint.read()
        except TableMissing as error:
            self.checker.check_missing(error)
            return
        if state is not None:
            self.checker.check(state)

    def _run(self) -> None:
        try:
            while not SYSTEM_CLOCK.wait(self._stop, PAUSE_MS):
                self.observe()
        except Exception as error:  # noqa: BLE001
            # An endpoint that cannot be read as a database is a violation as well.
            self.checker.report("unreadable", f"{type(error).__name__}: {error}")
