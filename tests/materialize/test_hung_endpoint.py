"""A hung endpoint is retried. A slow endpoint is reported, and the runtime waits for it."""

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from penstock import materialize, persist
from penstock.clock import SYSTEM_CLOCK
from penstock.connectors import built_in
from penstock.persist.state_store import StateStore
from penstock.sdk import serve
from penstock.servers.postgres import Database, PostgresServer
from penstock.supervisor import Supervisor
from tests.ingest.proxy import Proxy
from tests.ingest.test_server_faults import through

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)])


@pytest.fixture(autouse=True)
def deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ANSWER_TIMEOUT", "0.2")
    monkeypatch.setenv("PENSTOCK_STOP_TIMEOUT", "3")


@pytest.fixture
def database(postgres_server: PostgresServer) -> Iterator[Database]:
    database = postgres_server.create_database("hung")
    try:
        yield database
    finally:
        database.drop()


def append(folder: Path, id: int, lower: int, upper: int) -> None:
    with persist.open(f"file:{folder}/lake/shop", writer="upstream") as client:
        collection = client.create_or_load("a", schema=SCHEMA, key_columns=["id"])
        collection.compare_and_append([({"id": id}, lower, 1)], collection.upper, upper)


def until(holds: Callable[[], bool], awaited: str) -> None:
    for _ in range(1_200):
        if holds():
            return
        SYSTEM_CLOCK.wait(threading.Event(), 50)
    pytest.fail(f"waited for {awaited}")


class Run:
    """A materialization that runs in a thread."""

    def __init__(self, folder: Path, connector: str, endpoint: Mapping[str, Any]) -> None:
        self.file = folder / "f.yaml"
        self.stop = threading.Event()
        self._supervisor: Supervisor | None = None
        self.file.write_text(
            f"location: file:{folder}/lake\nwriter: w\nmaterializations:\n  desk:\n"
            f"    connector: {connector}\n    endpoint: {json.dumps(endpoint)}\n"
            "    pace: 50ms\n    bindings:\n      - {collection: a, resource: {table: a}}\n"
        )
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        materialize.run(
            self.file, jobs=materialize.LocalRunner(), stop=self.stop, on_start=self._set_supervisor
        )

    def _set_supervisor(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def status(self) -> Mapping[str, Any]:
        return {} if self._supervisor is None else self._supervisor.status()["desk"].to_json()

    def reaches(self, upper: int) -> None:
        until(lambda: self.status().get("upper") == upper, f"upper {upper}")

    def reports(self, error: str) -> None:
        until(
            lambda: error in (self.status().get("error") or {}).get("message", ""),
            f'the error "{error}"',
        )

    def end(self) -> None:
        self.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextmanager
def served(folder: Path, connector: str, endpoint: Mapping[str, Any]) -> Iterator[Run]:
    """Run a materialization with the connector in this process."""
    address = f"unix:{folder}/c.socket"
    with (
        serve(built_in(connector), address),
        first_transaction(folder, f"{{grpc: {{address: '{address}'}}}}", endpoint) as run,
    ):
        yield run


@contextmanager
def first_transaction(folder: Path, connector: str, endpoint: Mapping[str, Any]) -> Iterator[Run]:
    """Run a materialization whose first transaction is complete."""
    append(folder, 1, 1_000, 2_000)
    run = Run(folder, connector, endpoint)
    run.thread.start()
    try:
        run.reaches(2_000)
        yield run
    finally:
        run.end()


def test_slow_endpoint_is_reported_as_waiting_and_does_not_delay_stop(
    database: Database, tmp_path: Path
) -> None:
    with (
        first_transaction(tmp_path, "postgres", {"url": database.url()}) as run,
        psycopg.connect(database.url()) as other,
    ):
        other.execute("LOCK TABLE a")
        append(tmp_path, 2, 2_000, 3_000)
        until(lambda: run.status().get("waiting") is not None, "the status to report the wait")
        assert run.status()["waiting"]["step"] == "commit"
        assert "commit since" in run.status()["waits_for"]
        assert run.status()["error"] is None
        run.end()
    with persist.open(f"file:{tmp_path}/lake/desk", writer="w") as client:
        stored = StateStore(client, "desk").get("status")
    assert stored["waiting"] is None
    assert stored["phase"] == "stopped"
    materialize.run(run.file, jobs=materialize.LocalRunner(), once=True)
    assert database.sql("SELECT id FROM a ORDER BY id") == [(1,), (2,)]


def test_half_open_connection_and_hung_postgres_are_retried_after_answer_timeout(
    postgres_server: PostgresServer, database: Database, tmp_path: Path
) -> None:
    with (
        Proxy(database.server.port) as proxy,
        served(tmp_path, "postgres", {"url": through(proxy, database)}) as run,
    ):
        proxy.swallow()
        append(tmp_path, 2, 2_000, 3_000)
        run.reaches(3_000)
        with postgres_server.hung():
            append(tmp_path, 3, 3_000, 4_000)
            run.reports("does not answer")
        run.reaches(4_000)
        assert run.status()["error"] is None
    assert database.sql("SELECT id FROM a ORDER BY id") == [(1,), (2,), (3,)]


def test_locked_sqlite_file_is_reported_and_retried(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with served(tmp_path, "sqlite", {"path": str(path)}) as run:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        append(tmp_path, 2, 2_000, 3_000)
        run.reports("is locked by another connection")
        other.execute("COMMIT")
        run.reaches(3_000)
        assert other.execute("SELECT id FROM a ORDER BY id").fetchall() == [(1,), (2,)]
        other.close()
