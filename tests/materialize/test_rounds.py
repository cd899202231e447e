"""Commit barriers between the shards of a job and their driver."""

import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import IndeterminateError, PenstockError
from penstock.failpoints import Action, Failpoint, armed
from penstock.materialize import driver
from penstock.materialize.checkpoint import NOTHING
from penstock.materialize.here import _Here
from penstock.materialize.intervals import interval_of
from penstock.materialize.line import Line, RoundsServer
from penstock.materialize.recovery import Log
from penstock.materialize.rounds import Commits, Rounds, Told
from penstock.materialize.shard import ShardPlan, run_shard
from tests.materialize.lake import Endpoint, Table, materializing, notes, once

PATIENCE_S = 60
KEY = b"x" * 32


class Supposing:
    """Tasks that assume the checkpoint of the endpoint, as the tasks of a small Spark job do."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, plans: Sequence[ShardPlan], commits: Commits) -> None:
        self.runs += 1
        assert self.runs < 50, "it comes to no end"
        rounds = Rounds(len(plans), commits, lambda _: True)
        for at, plan in enumerate(plans):
            held = plan.log.checkpoint or NOTHING
            bounds = [each.bound for each in plan.bindings]
            supposed = tuple(interval_of(each, held, plan.upper) for each in bounds)
            run_shard(plan, _Here(rounds, at), None, supposed)
        if rounds.error:
            raise rounds.error


class Recording:
    """A driver that plans transactions and records the calls."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def opened(self) -> None:
        self.said.append("opened")

    def offer(self) -> Any:
        return ["a", "b"]

    def commit(self, told: Sequence[Told], *, goes_on: bool) -> None:
        self.said.append("commit")

    def settled(self, acknowledged_ms: int) -> None:
        self.said.append("settled")


def test_planned_transaction_with_outdated_assumed_interval_is_stored_once(
    lake: str, table: Table, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(lake, endpoint, tmp_path, jobs=Supposing()) as materialization:
        once(materialization)
        table.change()
        with armed(Failpoint.STORE_DONE, Action.ERROR), pytest.raises(IndeterminateError):
            once(materialization)
    with materializing(lake, endpoint, tmp_path, jobs=Supposing()) as materialization:
        once(materialization)
    assert endpoint.rows() == table.contents()
    assert notes(lake)["materialization"]["planned"] is None


def test_recovery_log_commit_does_not_change_acknowledged_checkpoint(
    lake: str, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = []
    commit = Log.commit

    def committed(self: Log, shards: Any, **given: Any) -> Log:
        before = self.shards[0].settled
        after = commit(self, shards, **given)
        settled.append((before, after.shards[0].settled))
        return after

    monkeypatch.setattr(driver.Log, "commit", committed)
    with materializing(
        lake, Endpoint("sqlite", tmp_path), tmp_path, section={"size": "1KiB", "pace": "0s"}
    ) as materialization:
        once(materialization)
        for _ in range(4):
            table.change()
        once(materialization)
    assert len(settled) > 3
    assert all(before == after for before, after in settled), settled


def test_acknowledgement_of_earlier_commit_does_not_settle_later_commit() -> None:
    recording = Recording()
    rounds = Rounds(2, recording, lambda _: True)

    def commit() -> None:
        other = threading.Thread(target=rounds.commit, args=(0, Told(None)))
        other.start()
        rounds.commit(1, Told(None))
        other.join()

    commit()
    # Shard 0 acknowledges the first commit before the second, shard 1 only after the second.
    rounds.settled(0, 1)
    commit()
    rounds.settled(1, 1)
    assert recording.said == ["commit", "commit"]


def test_failed_plan_of_next_transaction_ends_commit_of_other_shard() -> None:
    def fits(_: Any) -> bool:
        raise PenstockError("since has passed")

    server = RoundsServer(Rounds(2, Recording(), fits), "127.0.0.1", KEY, 2)
    first, second = Line(server.address, 0), Line(server.address, 1)
    ended = threading.Event()

    def commit() -> None:
        try:
            second.commit(Told(None))
        except PenstockError:
            ended.set()

    threading.Thread(target=commit, daemon=True).start()
    assert first.offer() is None
    assert ended.wait(PATIENCE_S)
    server.close()


def test_task_connects_to_driver_while_another_connection_is_silent() -> None:
    server = RoundsServer(Rounds(1, Recording(), lambda _: True), "127.0.0.1", KEY, 1)
    stranger = socket.create_connection((server.address.host, server.address.port))
    done = threading.Event()

    def call() -> None:
        Line(server.address, 0)
        done.set()

    threading.Thread(target=call, daemon=True).start()
    came = done.wait(PATIENCE_S)
    stranger.close()
    assert came, "a task waits behind a connection that says nothing"
    server.close()
