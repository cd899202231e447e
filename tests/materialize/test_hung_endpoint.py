"""An endpoint that hangs: reported with the step that waits, and no obstacle to a stop."""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import materialize, persist
from penstock.clock import SYSTEM_CLOCK
from penstock.persist.memory import Memory
from penstock.pipeline.running import Running
from penstock.testing.postgres import Database, PostgresServer

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)])


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
    """A materialization into `database` that runs in a thread."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.file = folder / "f.yaml"
        self.stop = threading.Event()
        self._running: Running | None = None
        self.file.write_text(
            f"location: file:{folder}/lake\nwriter: w\nmaterializations:\n  desk:\n"
            f"    connector: postgres\n    endpoint: {json.dumps({'url': database.url()})}\n"
            "    pace: 50ms\n    bindings:\n      - {collection: a, resource: {table: a}}\n"
        )
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        materialize.run(self.file, jobs=materialize.TasksHere(), stop=self.stop, told=self._told)

    def _told(self, running: Running) -> None:
        self._running = running

    def status(self) -> Mapping[str, Any]:
        return {} if self._running is None else self._running.status()["desk"]


def test_hung_endpoint_is_reported_and_does_not_hold_up_a_stop(
    postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ANSWER_TIMEOUT", "0.2")
    monkeypatch.setenv("PENSTOCK_STOP_TIMEOUT", "3")
    database = postgres_server.create_database("hung")
    append(tmp_path, 1, 1_000, 2_000)
    run = Run(tmp_path, database)
    run.thread.start()
    until(lambda: run.status().get("upper") == 2_000, "the first transaction")
    with postgres_server.hung():
        append(tmp_path, 2, 2_000, 3_000)
        until(lambda: run.status().get("waiting") is not None, "the status to report the wait")
        assert run.status()["waiting"]["step"] == "commit"
        assert "commit since" in run.status()["waits_for"]
        run.stop.set()
        run.thread.join(60)
        assert not run.thread.is_alive()
    with persist.open(f"file:{tmp_path}/lake/desk", writer="w") as client:
        stored = Memory(client, "desk").recall("status")
    assert stored["waiting"] is None
    assert stored["phase"] == "stopped"
    materialize.run(run.file, jobs=materialize.TasksHere(), once=True)
    assert database.sql("SELECT id FROM a ORDER BY id") == [(1,), (2,)]
    database.drop()
