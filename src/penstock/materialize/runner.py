"""Runners of the shards of a transaction, and the runner with threads of this process."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from penstock.deadlines import stop_timeout_s
from penstock.materialize.commit_barrier import (
    CommitBarrier,
    CommitCoordinator,
    CommitNotRecorded,
    ShardReport,
)
from penstock.materialize.shard import ShardPlan, cancel_sessions, run_shard
from penstock.telemetry import fields, logger

__all__ = ["LocalChannel", "LocalRunner", "Runner", "cancel_after_stop"]

log = logger("materialize")

POLL_S: Final = 0.2
"""Longest wait between two checks of the stop event."""


class Runner(Protocol):
    """Runner of one concurrent task for each shard."""

    def run(self, plans: Sequence[ShardPlan], coordinator: CommitCoordinator) -> None:
        """Run the plans and each transaction that `coordinator` plans after them."""
        ...

    def cancel(self, materialization: str) -> None:
        """Cancel the job of the recovery log with that id; its `run` then raises."""
        ...


class LocalRunner:
    """Runner with one thread of this process for each shard."""

    def run(self, plans: Sequence[ShardPlan], coordinator: CommitCoordinator) -> None:
        """Run one thread for each plan; see `Runner.run`.

        Raise the error of the driver if there is one, else the first error of a shard.
        """
        barrier = CommitBarrier(len(plans), coordinator, lambda _: True)

        def run(shard: int) -> None:
            try:
                run_shard(plans[shard], LocalChannel(barrier, shard))
            except BaseException:
                barrier.fail()
                raise

        with ThreadPoolExecutor(len(plans)) as pool:
            futures = [pool.submit(run, shard) for shard in range(len(plans))]
        if barrier.error is not None:
            raise barrier.error
        errors = [error for future in futures if (error := future.exception()) is not None]
        # Raise the cause first. CommitNotRecorded in the other shards is only its consequence.
        for error in sorted(errors, key=lambda error: isinstance(error, CommitNotRecorded)):
            raise error

    def cancel(self, materialization: str) -> None:
        """Cancel the sessions of the materialization; see `Runner.cancel`."""
        cancel_sessions(materialization)


@dataclass(frozen=True, slots=True)
class LocalChannel:
    """Channel of one shard to a commit barrier in the same process."""

    barrier: CommitBarrier
    shard: int

    def opened(self) -> None:
        """See `ShardChannel`."""
        self.barrier.opened(self.shard)

    def plan_next(self) -> ShardPlan | None:
        """See `ShardChannel`."""
        return self.barrier.plan_next(self.shard)

    def commit(self, report: ShardReport) -> bool:
        """See `ShardChannel`."""
        return self.barrier.commit(self.shard, report)

    def acknowledged(self, acknowledged_ms: int) -> None:
        """See `ShardChannel`."""
        self.barrier.acknowledged(self.shard, acknowledged_ms)


@contextmanager
def cancel_after_stop(
    stop: threading.Event | None, cancel: Callable[[], None], *, materialization: str
) -> Iterator[None]:
    """Call `cancel` a third of the stop deadline after `stop` is set, until the block ends.

    The outcome of a cancelled transaction is unknown, as after a crash.
    """
    if stop is None:
        yield
        return
    ended, grace_s = threading.Event(), stop_timeout_s() / 3

    def watch() -> None:
        while not stop.wait(POLL_S):
            if ended.is_set():
                return
        if ended.wait(grace_s):
            return
        log.warning(
            "transaction still running; cancelling it",
            extra=fields(materialization=materialization, after_s=grace_s),
        )
        # SUBTLE: cancel repeatedly. One call does not cancel work that the job starts later.
        while not ended.is_set():
            cancel()
            ended.wait(POLL_S)

    threading.Thread(target=watch, name=f"stop of {materialization}", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
