"""Commit barriers between the shards of a job and their driver."""

import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import IndeterminateError, PenstockError
from penstock.failpoints import Action, Failpoint, armed
from penstock.materialize import loop
from penstock.materialize.checkpoint import NOTHING
from penstock.materialize.commit_barrier import CommitBarrier, CommitCoordinator, ShardReport
from penstock.materialize.driver_channel import DriverChannel, DriverChannelServer
from penstock.materialize.intervals import missing_interval
from penstock.materialize.recovery_log import RecoveryLog
from penstock.materialize.runner import LocalChannel
from penstock.materialize.shard import ShardPlan, run_shard
from tests.materialize.lake import Endpoint, Table, materializing, once, stored_state

PATIENCE_S = 60
KEY = b"x" * 32


class Supposing:
    """Tasks that assume the checkpoint of the endpoint, as the tasks of a small Spark job do."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, plans: Sequence[ShardPlan], commits: CommitCoordinator) -> None:
        self.runs += 1
        assert self.runs < 50, "the job does not end"
        rounds = CommitBarrier(len(plans), commits, lambda _: True)
        for at, plan in enumerate(plans):
            held = plan.log.checkpoint or NOTHING
            bounds = [each.bound for each in plan.bindings]
            supposed = tuple(missing_interval(each, held, plan.upper) for each in bounds)
            run_shard(plan, LocalChannel(rounds, at), None, supposed)
        if rounds.error:
            raise rounds.error


class Recording:
    """A driver that plans transactions and records the calls."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def opened(self) -> None:
        self.said.append("opened")

    def plan_next(self) -> Any:
        return ["a", "b"]

    def commit(self, reports: Sequence[ShardReport], *, continues: bool) -> None:
        self.said.append("commit")

    def acknowledged(self, acknowledged_ms: int) -> None:
        self.said.append("acknowledged")


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
    assert stored_state(lake)["materialization"]["planned"] is None


def test_recovery_log_commit_does_not_change_acknowledged_checkpoint(
    lake: str, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acknowledged = []
    commit = RecoveryLog.commit

    def committed(self: RecoveryLog, shards: Any, **given: Any) -> RecoveryLog:
        before = self.shards[0].acknowledged
        after = commit(self, shards, **given)
        acknowledged.append((before, after.shards[0].acknowledged))
        return after

    monkeypatch.setattr(loop.RecoveryLog, "commit", committed)
    with materializing(
        lake, Endpoint("sqlite", tmp_path), tmp_path, section={"size": "1KiB", "pace": "0s"}
    ) as materialization:
        once(materialization)
        for _ in range(4):
            table.change()
        once(materialization)
    assert len(acknowledged) > 3
    assert all(before == after for before, after in acknowledged), acknowledged


def test_acknowledgement_of_earlier_commit_does_not_settle_later_commit() -> None:
    recording = Recording()
    rounds = CommitBarrier(2, recording, lambda _: True)

    def commit() -> None:
        other = threading.Thread(target=rounds.commit, args=(0, ShardReport(None)))
        other.start()
        rounds.commit(1, ShardReport(None))
        other.join()

    commit()
    # Shard 0 acknowledges the first commit before the second, shard 1 only after the second.
    rounds.acknowledged(0, 1)
    commit()
    rounds.acknowledged(1, 1)
    assert recording.said == ["commit", "commit"]


def test_failed_plan_of_next_transaction_ends_commit_of_other_shard() -> None:
    def fits(_: Any) -> bool:
        raise PenstockError("since has passed")

    server = DriverChannelServer(CommitBarrier(2, Recording(), fits), "127.0.0.1", KEY, 2)
    first, second = DriverChannel(server.address, 0), DriverChannel(server.address, 1)
    ended = threading.Event()

    def commit() -> None:
        try:
            second.commit(ShardReport(None))
        except PenstockError:
            ended.set()

    threading.Thread(target=commit, daemon=True).start()
    assert first.plan_next() is None
    assert ended.wait(PATIENCE_S)
    server.close()


def test_task_connects_to_driver_while_another_connection_is_silent() -> None:
    server = DriverChannelServer(CommitBarrier(1, Recording(), lambda _: True), "127.0.0.1", KEY, 1)
    stranger = socket.create_connection((server.address.host, server.address.port))
    done = threading.Event()

    def call() -> None:
        DriverChannel(server.address, 0)
        done.set()

    threading.Thread(target=call, daemon=True).start()
    came = done.wait(PATIENCE_S)
    stranger.close()
    assert came, "a task waits behind a connection that says nothing"
    server.close()
