"""A gRPC connector whose process hangs is reported and retried, and does not delay a stop."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import TransientError
from penstock.materialize import connect
from penstock.materialize.errors import ConnectorUnreachable
from penstock.sdk import serve
from penstock.supervisor import run_loop
from tests.materialize.lake import Endpoint, Table, materializing
from tests.materialize.test_hung_endpoint import Run, append, first_transaction, until
from tests.sdk.stream_client import committed, ready
from tests.sdk.toy import Toy, ToyTransactor


@contextmanager
def sqlite_connector(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Serve the SQLite connector in a separate process."""
    listens = ["--listen", f"unix:{folder}/c.socket", "--until-stdin-ends"]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "connector", "serve", "sqlite", *listens],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "listens on" in process.stdout.readline()
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def run_to_first_transaction(folder: Path) -> Iterator[Run]:
    connector = f"{{grpc: {{address: 'unix:{folder}/c.socket'}}}}"
    with first_transaction(folder, connector, {"path": str(folder / "a.db")}) as run:
        yield run


def test_suspended_connector_is_retried_after_answer_timeout_and_stop_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ANSWER_TIMEOUT", "0.5")
    monkeypatch.setenv("PENSTOCK_STOP_TIMEOUT", "3")
    with sqlite_connector(tmp_path) as process, run_to_first_transaction(tmp_path) as run:
        process.send_signal(signal.SIGSTOP)
        append(tmp_path, 2, 2_000, 3_000)
        run.reports("does not answer")
        process.send_signal(signal.SIGCONT)
        run.reaches(3_000)
        assert run.status()["error"] is None
        process.send_signal(signal.SIGSTOP)
        monkeypatch.setenv("PENSTOCK_ANSWER_TIMEOUT", "600")
        append(tmp_path, 3, 3_000, 4_000)
        until(lambda: run.status()["phase"] == "storing", "the transaction to begin")
        run.end()
        assert run.status()["upper"] == 3_000


def test_call_to_silent_listener_after_answer_timeout_raises_connector_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_ANSWER_TIMEOUT", "0.3")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with (
            connect(address) as connection,
            pytest.raises(ConnectorUnreachable, match="does not answer") as caught,
        ):
            connection.spec()
    assert "no second connection could be established" in caught.value.detail


def test_call_to_silent_listener_during_stop_raises_connector_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_STOP_TIMEOUT", "0.3")
    stop = threading.Event()
    stop.set()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with (
            connect(address, stop=stop) as connection,
            pytest.raises(ConnectorUnreachable, match="stopped while waiting for the connector"),
        ):
            connection.spec()


def test_reachable_connector_may_commit_longer_than_answer_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ANSWER_TIMEOUT", "0.1")
    toy, checks, enough = Toy(), iter(range(100)), threading.Event()

    class Slow(ToyTransactor):
        def start_commit(self, checkpoint: bytes) -> None:
            assert enough.wait(60)

    toy.transactor = Slow
    with serve(toy, f"unix:{tmp_path}/toy.sock") as server, connect(server.address) as connection:
        is_reachable = connection.is_reachable

        def check() -> bool:
            if next(checks) == 3:
                enough.set()
            return is_reachable()

        monkeypatch.setattr(connection, "is_reachable", check)
        stream = ready(connection)
        committed(stream)
        stream.cancel()


class _StartsLate:
    """A job that ignores its first cancellation, because its work starts after it."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._cancelled = threading.Semaphore(0)

    def run(self, plans: Any, commits: Any) -> None:
        self._stop.set()
        for _ in range(2):
            assert self._cancelled.acquire(timeout=20)
        raise TransientError("cancelled")

    def cancel(self, materialization: str) -> None:
        self._cancelled.release()


def test_job_that_starts_after_first_cancel_is_cancelled_again(
    lake: str, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_STOP_TIMEOUT", "0.3")
    stop = threading.Event()
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path, jobs=_StartsLate(stop)) as materialization:
        materialization._process_stop = stop
        run_loop(materialization, stop, once=False, clock=SYSTEM_CLOCK, name="local")
    assert materialization.status().phase == "stopped"
