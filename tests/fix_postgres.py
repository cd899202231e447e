"""Real Postgres servers, one of each kind a session, and a database of its own for each test.

A server is up in about two seconds and a database in a tenth of one. The
session's servers do not sync to disk: only the operating system's crash could
tell, and no test makes one. A test that restarts or kills a server makes its own.
"""

import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from penstock.errors import UsageError
from penstock.testing.postgres import Database, PostgresServer

QUICK = {"fsync": "off", "max_replication_slots": 40, "max_wal_senders": 40}

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The oldest we promise to work with: Debian's."""
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
    authority, other = _authority(folder, "authority"), _authority(folder, "other")
    certificate, key = _certificate(folder, "localhost", authority)
    users = _certificate(folder, "by_certificate", authority)
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


def _authority(folder: Path, name: str) -> Path:
    certificate = folder / f"{name}.crt"
    _openssl(
        *("req", "-x509", "-days", "2", "-subj", f"/CN={name}"),
        *("-keyout", folder / f"{name}.key", "-out", certificate),
        *_NEW_KEY,
    )
    return certificate


def _certificate(folder: Path, name: str, authority: Path) -> tuple[Path, Path]:
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    request, names = folder / f"{name}.csr", folder / f"{name}.ext"
    names.write_text(f"subjectAltName=DNS:{name}\n")
    _openssl("req", "-subj", f"/CN={name}", "-keyout", key, "-out", request, *_NEW_KEY)
    _openssl(
        *("x509", "-req", "-days", "2", "-in", request, "-out", certificate, "-extfile", names),
        *("-CA", authority, "-CAkey", authority.with_suffix(".key"), "-CAcreateserial"),
    )
    key.chmod(0o600)
    return certificate, key


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def _serve(binaries: Literal["debian", "wheel"]) -> Iterator[PostgresServer]:
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
    database = server.create_database(f"test{next(_numbers)}")
    try:
        yield database
    finally:
        database.drop()
