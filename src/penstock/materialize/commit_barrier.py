"""Commit barrier: the shards of a job finish each transaction together, under their driver.

A job can run several transactions. While the connectors commit one transaction, the driver may
plan the next one. The commits of all shards and this plan are one entry of the recovery log,
which ends one transaction and begins the next.

    shard    opened ─► plan_next ─► commit ──────────► acknowledged ─► plan_next ─► …
    driver                  │          │ all shards:        │ all shards:
                            │          │ one log entry      │ the hold advances
                            └ one plan for all shards

If a shard fails, no other shard waits for it: the job ends, and the driver starts another job
from the recovery log.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from penstock.errors import TransientError
from penstock.materialize.recovery_log import ShardLog
from penstock.materialize.shard_transaction import StoredCount

if TYPE_CHECKING:
    from penstock.materialize.shard import ShardPlan

_T = TypeVar("_T")

__all__ = ["CommitBarrier", "CommitCoordinator", "CommitNotRecorded", "ShardReport"]


class CommitNotRecorded(TransientError):
    """A commit that is not in the recovery log: another shard or the driver has failed."""

    def __init__(self, *, detail: str = "") -> None:
        super().__init__("commit of a shard was not recorded", detail=detail)


@dataclass(frozen=True, slots=True)
class ShardReport:
    """Commit of a shard, with the stored amounts and the durations of the phases."""

    shard: ShardLog
    counts: tuple[StoredCount, ...] = ()
    opened: bool = False
    """True if the stream was opened for this transaction."""

    opened_ms: int = 0
    read_ms: int = 0
    stored_ms: int = 0
    committed_ms: int = 0


class CommitCoordinator(Protocol):
    """Interface of the driver for its jobs."""

    def opened(self) -> None:
        """Handle the event that the streams of all shards are open."""
        ...

    def plan_next(self) -> "Sequence[ShardPlan] | None":
        """Return, for every shard, the plan of the next transaction, or None."""
        ...

    def commit(self, reports: Sequence[ShardReport], *, continues: bool) -> None:
        """Record the commits of all shards.

        If `continues`, record the plan of the next transaction in the same entry.
        """
        ...

    def acknowledged(self, acknowledged_ms: int) -> None:
        """Handle the event that all shards have acknowledged their last commit."""
        ...


class CommitBarrier:
    """Barrier of one job: the driver is called once the calls of all shards have arrived."""

    def __init__(
        self,
        count: int,
        coordinator: CommitCoordinator,
        can_run: "Callable[[Sequence[ShardPlan]], bool]",
    ) -> None:
        """Create the barrier for `count` shards.

        `can_run` returns whether the present Spark tasks can run a planned transaction.
        """
        self._count = count
        self._coordinator = coordinator
        self._can_run = can_run
        self._changed = threading.Condition()
        self._transaction = 0
        self._is_planned = False
        self._next_plans: Sequence[ShardPlan] | None = None
        self._continues = False
        self._opened: set[int] = set()
        self._reports: dict[int, ShardReport] = {}
        self._acknowledged_ms: dict[int, int] = {}
        self._failed = False
        self.error: BaseException | None = None
        """First error that the driver raised."""

    @property
    def failed(self) -> bool:
        """True if the job has ended because a shard or the driver failed."""
        return self._failed

    def opened(self, shard: int) -> None:
        """Record that the stream of a shard is open."""
        with self._changed:
            self._opened.add(shard)
            if len(self._opened) == self._count:
                self._call(self._coordinator.opened)

    def plan_next(self, shard: int) -> "ShardPlan | None":
        """Return the plan of the next transaction of a shard, or None.

        A shard calls this once per transaction, before `commit`. All shards receive plans of
        the same transaction.
        """
        with self._changed:
            if not self._is_planned:
                self._is_planned = True
                self._next_plans = self._call(self._runnable_plans)
            return self._next_plans[shard] if self._next_plans is not None else None

    def _runnable_plans(self) -> "Sequence[ShardPlan] | None":
        plans = self._coordinator.plan_next()
        return plans if plans and self._can_run(plans) else None

    def commit(self, shard: int, report: ShardReport) -> bool:
        """Wait until the commits of all shards are recorded.

        Return whether the job continues with the planned transaction.

        Raises:
            CommitNotRecorded: the commits were not recorded.
        """
        with self._changed:
            transaction = self._transaction
            self._reports[shard] = report
            if len(self._reports) == self._count and not self._failed:
                self._record_commits()
            self._changed.wait_for(lambda: self._transaction > transaction or self._failed)
            if self._transaction == transaction or self.error is not None:
                raise CommitNotRecorded(detail="Another shard has failed.")
            return self._continues

    def _record_commits(self) -> None:
        self._continues = self._next_plans is not None
        reports = [self._reports[number] for number in range(self._count)]
        self._call(lambda: self._coordinator.commit(reports, continues=self._continues))
        self._reports, self._acknowledged_ms = {}, {}
        self._is_planned, self._next_plans = False, None
        self._transaction += 1
        self._changed.notify_all()

    def acknowledged(self, shard: int, acknowledged_ms: int) -> None:
        """Record that a shard has acknowledged its last commit."""
        with self._changed:
            self._acknowledged_ms[shard] = acknowledged_ms
            if len(self._acknowledged_ms) == self._count:
                slowest_ms = max(self._acknowledged_ms.values())
                self._acknowledged_ms = {}
                self._call(lambda: self._coordinator.acknowledged(slowest_ms))

    def fail(self) -> None:
        """End the job after a failure: every waiting shard raises `CommitNotRecorded`."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def _call(self, call: Callable[[], _T]) -> _T | None:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - raised by the driver when the job is over
            self.error = self.error or error
            self._failed = True
            self._changed.notify_all()
            return None
