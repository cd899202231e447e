"""Hung servers and half-open connections: detection, status and recovery."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.preflight import plan_file
from penstock.errors import TransientError
from penstock.pgclient import connect
from penstock.servers.postgres import Database, PostgresServer
from tests.ingest.checker import check
from tests.ingest.proxy import Proxy
from tests.ingest.pump import SOURCE, Pump, until
from tests.ingest.test_server_faults import through
from tests.shared_postgres import QUICK

TABLES = ["public.item"]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    # The server itself never ends a silent connection.
    with PostgresServer(settings={**QUICK, "wal_sender_timeout": "0"}) as server:
        yield server


@pytest.fixture
def items(server: PostgresServer, request: pytest.FixtureRequest) -> Iterator[Database]:
    database = server.create_database(f"items{abs(hash(request.node.name))}")
    database.sql("CREATE TABLE item (id int PRIMARY KEY); INSERT INTO item VALUES (1)")
    database.sql("CREATE PUBLICATION penstock FOR TABLE item")
    try:
        yield database
    finally:
        database.drop()


def status(pump: Pump) -> dict[str, Any]:
    """Return the status of the source as its loop reports it."""
    return {} if pump.supervisor is None else pump.supervisor.status()[SOURCE].to_json()


def is_disconnected(pump: Pump) -> bool:
    return status(pump).get("connected") is False


def assert_lag_is_unknown(pump: Pump) -> None:
    told = status(pump)
    assert told["lag_bytes"] is None
    assert told["lag_ms"] is None
    assert told["disconnected_since_ms"] > 0
    assert told["disconnected_reason"]


def test_source_with_half_open_connection_reports_it_and_resumes(
    items: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ANSWER_TIMEOUT", "0.5")
    with (
        Proxy(items.server.port) as proxy,
        Pump(items, tmp_path, url=f"{through(proxy, items)}?connect_timeout=1") as pump,
    ):
        pump.settle()
        assert status(pump)["connected"] is True
        assert status(pump)["lag_bytes"] == 0
        proxy.stall()
        items.sql("INSERT INTO item VALUES (2)")
        until(lambda: is_disconnected(pump), "the source to notice")
        assert_lag_is_unknown(pump)
        proxy.flow()
        pump.settle()
        until(lambda: status(pump)["connected"] is True, "the source to report its connection")
        check(pump, items, TABLES)


def test_source_with_half_open_stream_alone_reconnects(
    items: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # New connections work, as behind a router that lost the state of one connection.
    monkeypatch.setenv("PENSTOCK_ANSWER_TIMEOUT", "0.5")
    with (
        Proxy(items.server.port) as proxy,
        Pump(items, tmp_path, url=f"{through(proxy, items)}?connect_timeout=1") as pump,
    ):
        pump.settle()
        proxy.swallow()
        items.sql("INSERT INTO item VALUES (2)")
        pump.settle()
        check(pump, items, TABLES)


def test_source_with_hung_server_reports_it_and_resumes(
    server: PostgresServer, items: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ANSWER_TIMEOUT", "0.5")
    with Pump(items, tmp_path, url=items.url(connect_timeout="1")) as pump:
        pump.settle()
        with server.hung():
            until(lambda: is_disconnected(pump), "the source to notice")
            assert_lag_is_unknown(pump)
        items.sql("INSERT INTO item VALUES (2)")
        pump.settle()
        check(pump, items, TABLES)


def test_stop_signal_while_server_hangs_ends_the_process(
    server: PostgresServer, items: Database, tmp_path: Path
) -> None:
    pump = Pump(items, tmp_path)
    # The answer deadline is too long to end the process.
    process = pump.spawn(PENSTOCK_ANSWER_TIMEOUT="600")
    try:
        pump.settle(120_000)
        with server.hung():
            until(lambda: "waiting for an answer from" in pump.output(), "the progress line")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, pump.output()
        assert "stopped while waiting" in pump.output()
    finally:
        pump.kill()


def test_connect_to_hung_server_with_stop_event_raises_transient_error(items: Database) -> None:
    stop = threading.Event()
    stop.set()
    with items.server.hung(), pytest.raises(TransientError, match="stopped while waiting for"):
        connect(items.url(connect_timeout="600"), stop=stop)


def test_plan_with_hung_server_reports_unreachable_after_answer_deadline(
    items: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ANSWER_TIMEOUT", "0.5")
    file = tmp_path / "f.yaml"
    url = items.url(connect_timeout="600")
    file.write_text(
        f"location: file:{tmp_path}/lake\nsources:\n  shop:\n    postgres: {{url: '{url}'}}\n"
    )
    with items.server.hung():
        found = plan_file(file)
    assert "unreachable" in [each.action for each in found if each.name == "shop"]
