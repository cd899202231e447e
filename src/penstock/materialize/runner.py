"""Runners of the shards of a transaction, and the runner with threads of this process."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from penstock.materialize.commit_barrier import (
    CommitBarrier,
    CommitCoordinator,
    CommitNotRecorded,
    ShardReport,
)
from penstock.materialize.shard import ShardPlan, cancel_sessions, run_shard

__all__ = ["LocalChannel", "LocalRunner", "Runner"]


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
