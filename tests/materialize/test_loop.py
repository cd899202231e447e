"""Materializations that run: connectors that are killed or reject, and backlogs."""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.connectors import built_in
from penstock.materialize.commit_barrier import CommitCoordinator, ShardReport
from penstock.materialize.connector_process import ConnectorProcess
from penstock.materialize.errors import ConnectorRefused
from penstock.materialize.runner import LocalRunner
from penstock.materialize.shard import ShardPlan, close_sessions
from penstock.materialize.tasks import Supervisor, run
from penstock.sdk import serve
from penstock.supervisor import supervised_task
from tests.materialize.lake import (
    KEYED,
    Endpoint,
    Table,
    following,
    materializing,
    once,
    row,
    stored_state,
)
from tests.materialize.test_documents import COLUMNS, Log, by_columns
from tests.materialize.test_documents import table as rows_of

TICKS = 12


class Watched:
    """Tasks in this process, with callbacks before their calls of the driver."""

    def __init__(
        self,
        *,
        at_plan_next: Callable[[], None] = lambda: None,
        at_commit: Callable[[Sequence[ShardReport]], None] = lambda _: None,
    ) -> None:
        self._at_plan_next = at_plan_next
        self._at_commit = at_commit
        self._commits: CommitCoordinator

    def run(self, plans: Sequence[ShardPlan], commits: CommitCoordinator) -> None:
        self._commits = commits
        LocalRunner().run(plans, self)

    def opened(self) -> None:
        self._commits.opened()

    def plan_next(self) -> Sequence[ShardPlan] | None:
        self._at_plan_next()
        return self._commits.plan_next()

    def commit(self, reports: Sequence[ShardReport], *, continues: bool) -> None:
        self._at_commit(reports)
        self._commits.commit(reports, continues=continues)

    def acknowledged(self, acknowledged_ms: int) -> None:
        self._commits.acknowledged(acknowledged_ms)


class Mortal:
    """Connector processes that are killed once at each step in `doomed`."""

    def __init__(self) -> None:
        self.doomed: list[str] = []
        self.last: ConnectorProcess
        self.started = 0

    def hit(self, where: str) -> None:
        if where in self.doomed:
            self.doomed.remove(where)
            self.kill()

    def kill(self) -> None:
        process = self.last._process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def listening(self, start: Callable[..., None]) -> Callable[..., None]:
        """Return `start` with a record of each started process."""

        def starts(hosted: ConnectorProcess, *arguments: object) -> None:
            self.last = hosted
            self.started += 1
            if "starting" in self.doomed:
                threading.Thread(target=self._kill_early).start()
            start(hosted, *arguments)

        return starts

    def _kill_early(self) -> None:
        while not self.last.running():
            SYSTEM_CLOCK.wait(threading.Event(), 1)
        self.hit("starting")


def test_killed_connector_is_restarted_with_backoff_and_delivers_each_change_once(
    lake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal, paused, pauses_ms = Mortal(), list[int](), supervised_task.pauses_ms

    def pauses(rng: random.Random) -> Iterator[int]:
        for pause in pauses_ms(rng):
            paused.append(pause)
            yield pause

    monkeypatch.setattr(ConnectorProcess, "start", mortal.listening(ConnectorProcess.start))
    monkeypatch.setattr(supervised_task, "pauses_ms", pauses)
    log, endpoint = Log(lake, "shop.t", COLUMNS), Endpoint("sqlite", tmp_path)
    log.add((0, 0, 1, "n", 0))
    with materializing(
        lake,
        endpoint,
        tmp_path,
        jobs=Watched(at_plan_next=lambda: mortal.hit("committing")),
        collections=by_columns(),
        section={"connector": "sqlite"},
    ) as materialization:

        def caught_up() -> bool:
            return bool(materialization.status().upper == log.collection.upper)

        with following(materialization) as until:
            until(caught_up)
            for doomed in (["committing", "starting"], []):
                mortal.doomed += doomed
                upper = log.collection.upper
                log.add(*((upper + n, n, 1, "n", 0) for n in range(3)))
                until(lambda: not mortal.doomed and caught_up())
    log.client.close()
    assert mortal.started == 3
    assert len(paused) == 2
    assert paused[0] <= 20 <= paused[1], "it is waited longer the second time"
    assert rows_of(endpoint, "id, amount") == [(0, 3), (1, 2), (2, 2)]


TWO = """\
location: {lake}
tick: 1ms
materializations:
  refused:
    connector: {{grpc: {{address: "{address}"}}}}
    endpoint: {{path: "{path}"}}
    bindings:
      - {{collection: shop.t, resource: {{table: sqlite_t}}}}
  local:
    connector: {{grpc: {{address: "{address}"}}}}
    endpoint: {{path: "{path}"}}
    bindings:
      - {{collection: shop.t, resource: {{table: t}}}}
"""


class Whole:
    """All tasks of a pipeline file, as one loop."""

    commits = 0
    is_resumable = True
    step = ""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._told: list[Supervisor] = []

    def run(self, stop: threading.Event, *, once: bool) -> None:
        run(self._file, jobs=LocalRunner(), once=once, stop=stop, on_start=self._told.append)

    def status(self) -> Mapping[str, Any]:
        statuses = self._told[0].status() if self._told else {}
        return {name: status.to_json() for name, status in statuses.items()}

    def status_of(self, name: str, what: str) -> Any:
        return self.status().get(name, {}).get(what)


def test_materialization_continues_while_another_is_rejected(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint, address = Endpoint("sqlite", tmp_path), f"unix:{tmp_path / 'connector.socket'}"
    file = tmp_path / "pipeline.yaml"
    file.write_text(TWO.format(lake=lake, address=address, path=endpoint.config["path"]))
    whole = Whole(file)

    def follow() -> None:
        with following(whole) as until:
            until(lambda: whole.status_of("refused", "phase") == "stopped")
            for _ in range(2):
                table.change()
                until(lambda: whole.status_of("local", "upper") == table.collection.upper)
                assert endpoint.rows() == table.contents()

    with serve(built_in("sqlite"), address):
        try:
            with pytest.raises(ConnectorRefused, match="sqlite_t") as refusal:
                follow()
        finally:
            close_sessions()
    assert whole.status_of("local", "error") is None
    assert str(refusal.value) in str(whole.status_of("refused", "error"))
    assert stored_state(lake, "refused")["status"]["error"] == str(refusal.value)


@pytest.mark.parametrize("size", ["2KiB", None], ids=["small", "default"])
def test_backlog_larger_than_size_is_split_only_between_times(
    lake: str, tmp_path: Path, size: str | None
) -> None:
    # A merged batch of the backlog could not be split.
    settings = persist.Settings(background=False)
    client = persist.open(f"{lake}/shop", writer="upstream", settings=settings)
    collection = client.create_or_load("shop.t", **KEYED)
    collection.compare_and_append([(row(0), 0, 1)], 0, 10)
    endpoint = Endpoint("sqlite", tmp_path)
    seen: list[tuple[int, Any]] = []

    def record(reports: Sequence[ShardReport]) -> None:
        (checkpoint,) = (each.shard.checkpoint for each in reports)
        assert checkpoint is not None
        (reached,) = checkpoint.bindings.values()
        seen.append((reached.frontier, endpoint.rows()))

    section = {} if size is None else {"size": size}
    with materializing(
        lake, endpoint, tmp_path, jobs=Watched(at_commit=record), section=section
    ) as materialization:
        once(materialization)
        for upper in range(10, 10 * TICKS, 10):
            # Inserts at shared times, and a delete at the time of an insert.
            came = [(row(upper + n), upper + n % 2, 1) for n in range(9)]
            swapped = [(row(upper - 10), upper + 5, -1), (row(upper + 9), upper + 5, 1)]
            collection.compare_and_append([*came, *swapped], upper, upper + 10)
        once(materialization)
    (first, _), *backlog = seen
    assert first == 10
    assert [upper for upper, _ in backlog] == sorted({upper for upper, _ in backlog})
    assert len(backlog) == 1 if size is None else 2 < len(backlog) < TICKS
    for upper, rows in backlog:
        contents = [each.data for each in collection.snapshot(upper - 1)]
        assert rows == sorted(contents, key=lambda each: each["id"])
    assert backlog[-1][0] == collection.upper
    client.close()
