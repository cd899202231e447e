"""First start: missing prerequisites are reported, and permanent errors are not retried."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import TransientError
from penstock.servers.postgres import Database
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.errors import NotReady
from penstock.sources.postgres.source import PostgresSource
from tests.ingest.pump import ENVIRONMENT, Pump, until


@pytest.fixture
def file(tmp_path: Path):
    def write(url: str) -> Path:
        path = tmp_path / "shop.yaml"
        said = {
            "location": f"file:{tmp_path}/lake",
            "sources": {"shop": {"postgres": {"url": url}}},
        }
        path.write_text(yaml.safe_dump(said))
        return path

    return write


def ingest(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "ingest", str(path), *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_ingest_with_role_without_replication_fails_with_statement_to_run(
    database: Database, file
) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION penstock FOR TABLE t")
    role = f"plain_{database.name}"
    database.sql(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'; GRANT SELECT ON t TO {role}")
    try:
        done = ingest(file(database.url(user=role, password="secret", host="tcp")))
        assert done.returncode == 1
        assert f"ALTER ROLE {role} REPLICATION" in done.stderr
        assert "secret" not in done.stderr
    finally:
        database.sql(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_ingest_once_with_unreachable_server_fails_without_waiting(file) -> None:
    done = ingest(file("postgresql://nobody@127.0.0.1:1/nothing"), "--once")
    assert done.returncode == 1
    assert "could not connect to" in done.stderr
    assert "Check host, port, database, user and password" in done.stderr


@pytest.mark.parametrize("password", ["wrong", ""], ids=["another", "none"])
def test_ingest_with_rejected_password_at_first_start_fails_without_waiting(
    database: Database, file, password: str
) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION penstock FOR TABLE t")
    role = f"role_{database.name}"
    database.sql(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'right'")
    try:
        done = ingest(file(database.url(user=role, password=password, host="tcp")))
        assert done.returncode == 1
        assert "is not ready: the server rejected the login" in done.stderr
        assert "Check user and password" in done.stderr
        assert "wrong" not in done.stderr
    finally:
        database.sql(f"DROP ROLE {role}")


def test_check_with_rejected_password_is_transient_only_for_started_source(
    database: Database, tmp_path: Path
) -> None:
    url = database.url(password="wrong", host="tcp")
    source = PostgresSource(
        "shop",
        PostgresConfig.parse({"url": url}),
        location=f"file:{tmp_path}",
        clock=SYSTEM_CLOCK,
        rng=random.Random(1),
        tasks=1,
    )
    with pytest.raises(TransientError):
        source.check(started=True)
    with pytest.raises(NotReady):
        source.check(started=False)


def test_ingest_with_unescaped_at_sign_in_password_does_not_print_it(file) -> None:
    done = ingest(file("postgresql://penstock:p@ss@w:rd@127.0.0.1:54777/shop"))
    assert done.returncode == 1
    assert "has an @ too many" in done.stderr
    assert "write @ as %40" in done.stderr
    for part in ("ss@w", "w:rd", "p@ss"):
        assert part not in done.stderr


def test_ingest_with_burst_of_stop_signals_exits_0(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION penstock FOR TABLE t")
    pump = Pump(database, tmp_path)
    process = pump.spawn()
    try:
        until(lambda: "following" in pump.output(), "the copy")
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT) * 5:
            os.kill(process.pid, each)
        assert process.wait(60) == 0, pump.output()
    finally:
        pump.kill()
