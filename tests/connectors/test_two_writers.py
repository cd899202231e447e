"""Two writers of one key range in separate processes, killed and paused at every step.

At most one writer commits past the fence. The endpoint holds a prefix of the transactions
of the first writer, followed by the transactions of the second.
"""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from penstock.data.packed import pack_row
from penstock.errors import PenstockError
from penstock.materialize import ConnectorStream, connect
from penstock.protocol.key_range import WHOLE
from penstock.protocol.messages import (
    Acknowledge,
    Acknowledged,
    Apply,
    Flush,
    Flushed,
    Load,
    Loaded,
    Open,
    Opened,
    StartCommit,
    StartedCommit,
    Store,
)
from penstock.protocol.specs import MaterializationSpec
from penstock.servers.postgres import Database
from penstock.testing.specs import bound, collection, materialization, projection

STEPS = ["opened", "acknowledged", "loaded", "flushed", "stored", "committing", "committed"]
LOG = collection(
    "a/log", projection("id", "integer", must=True), projection("n", "integer", must=True)
)


class Process:
    """Connector in a separate process."""

    def __init__(self, name: str, folder: Path, number: int) -> None:
        self.address = f"unix:{folder}/{number}.sock"
        command = [sys.executable, "-m", "penstock.cli.main", "connector", "serve", name]
        self._process = subprocess.Popen(
            [*command, "--listen", self.address], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Writer:
    """Client that sends transactions 1, 2, …; each sets `n` of the only document."""

    def __init__(self, process: Process, spec: MaterializationSpec) -> None:
        self.process = process
        self._spec = spec
        self._connection = connect(process.address)
        self._stream: ConnectorStream | None = None
        self.at = 0

    def step(self, name: str) -> None:
        """Execute one step of the protocol."""
        stream = self._stream
        if stream is None:
            assert name == "opened"
            self._stream = stream = self._connection.transactions()
            stream.send(Open(self._spec, "v", WHOLE))
            found = stream.receive()
            assert isinstance(found, Opened)
            self.at = int(found.checkpoint) if found.checkpoint.isdigit() else 0
            return
        none, key = pa.array([b""], pa.binary()), pa.array([pack_row((1,))], pa.binary())
        value = pa.array([pack_row((self.at + 1,))], pa.binary())
        doc = pa.array([json.dumps({"id": 1, "n": self.at + 1}).encode()], pa.binary())
        match name:
            case "acknowledged":
                stream.send(Acknowledge())
                assert stream.receive() == Acknowledged()
            case "loaded":
                stream.send(Load(0, key))
            case "flushed":
                stream.send(Flush())
                found = stream.receive()
                while isinstance(found, Loaded):
                    assert json.loads(found.docs_json[0].as_py())["n"] == self.at
                    found = stream.receive()
                assert found == Flushed()
            case "stored":
                stream.send(Store(0, key, value, doc, pa.array([self.at > 0])))
                stream.send(Store(1, key, value, none, pa.array([False])))
            case "committing":
                stream.send(StartCommit(str(self.at + 1).encode()))
            case "committed":
                assert isinstance(stream.receive(), StartedCommit)
                self.at += 1
            case _:
                raise AssertionError(name)

    def transaction(self) -> None:
        for name in STEPS[1:]:
            self.step(name)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        self._connection.close()


class Target:
    """Endpoint of both writers: the last state, and a row for each transaction."""

    def __init__(self, name: str, endpoint: dict[str, Any], folder: Path) -> None:
        self.name = name
        self.endpoint = endpoint
        self._folder = folder
        self._processes: list[Process] = []
        self._writers: list[Writer] = []
        path = () if name == "sqlite" else ("public",)
        delta = {"table": "log", "delta_updates": True}
        self.spec = materialization(
            "m",
            endpoint,
            bound(LOG, {"table": "state"}, (*path, "state")),
            bound(LOG, delta, (*path, "log"), document=False, delta=True),
        )

    def process(self) -> Process:
        process = Process(self.name, self._folder, len(self._processes))
        self._processes.append(process)
        return process

    def writer(self, process: Process) -> Writer:
        writer = Writer(process, self.spec)
        self._writers.append(writer)
        return writer

    def apply(self, process: Process) -> None:
        with connect(process.address) as connection:
            connection.apply(Apply(self.spec, "v"))

    def clear(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers = []
        for table in ("state", "log", "flow_checkpoints_v1"):
            self._run(f"DELETE FROM {table}")

    def contents(self) -> tuple[int, list[int]]:
        state = self._run("SELECT n FROM state")
        log = self._run("SELECT n FROM log ORDER BY n")
        return (state[0][0] if state else 0), [each for (each,) in log]

    def _run(self, statement: str) -> list[Any]:
        if self.name == "sqlite":
            connection = sqlite3.connect(self.endpoint["path"], timeout=30)
            found = connection.execute(statement)
            rows = found.fetchall()
            connection.commit()
            connection.close()
            return rows
        with psycopg.connect(self.endpoint["url"]) as session:
            done = session.execute(statement.encode())
            return done.fetchall() if done.description else []

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGCONT)
            process.end()


@pytest.fixture(params=["sqlite", "postgres"])
def target(request, tmp_path) -> Iterator[Target]:
    if request.param == "sqlite":
        endpoint = {"path": str(tmp_path / "x.db")}
    else:
        database: Database = request.getfixturevalue("database")
        endpoint = {"url": database.url()}
    target = Target(request.param, endpoint, tmp_path)
    yield target
    target.close()


def in_order(target: Target, first: int, second: int) -> None:
    """Assert that every transaction up to the last of the second writer is stored once."""
    state, log = target.contents()
    assert log == list(range(1, second + 1)), (first, second)
    assert state == second


def test_writer_paused_at_every_step_cannot_commit_after_newer_open(target):
    one, other = target.process(), target.process()
    target.apply(one)
    for transactions in (0, 1):
        for at in range(len(STEPS)):
            zombie = target.writer(one)
            zombie.step("opened")
            for _ in range(transactions):
                zombie.transaction()
            for name in STEPS[1 : at + 1]:
                zombie.step(name)
            one.signal(signal.SIGSTOP)
            try:
                newer = target.writer(other)
                newer.step("opened")
                took_up = newer.at
                newer.transaction()
            finally:
                one.signal(signal.SIGCONT)
            assert zombie.at <= took_up <= zombie.at + (STEPS[at] in ("committing", "committed"))
            with contextlib.suppress(PenstockError, AssertionError):
                for name in STEPS[at + 1 :]:
                    zombie.step(name)
                zombie.transaction()
            newer.transaction()
            in_order(target, took_up, newer.at)
            assert newer.at == took_up + 2
            target.clear()


def test_writer_killed_at_every_step_is_resumed_from_last_commit(target):
    other = target.process()
    target.apply(other)
    # Processes start slowly, and the steps around the commit are the critical ones.
    for at in range(len(STEPS)) if target.name == "sqlite" else (4, 5, 6):
        process = target.process()
        writer = target.writer(process)
        writer.step("opened")
        writer.transaction()
        for name in STEPS[1 : at + 1]:
            writer.step(name)
        process.end()
        newer = target.writer(other)
        newer.step("opened")
        assert writer.at <= newer.at <= writer.at + (STEPS[at] == "committing")
        newer.transaction()
        in_order(target, writer.at, newer.at)
        target.clear()
