"""Commit barrier: the shards of a job finish each transaction together, under their driver.

A job can run several transactions. While the connectors commit one, the driver may *offer* the
plan of the next. The commits of all shards and this plan are written as one log entry, which
ends one transaction and begins the next.

    shard    opened ─► offer? ──► commit ───────────────► settled      offer? ──► commit ─► …
    driver                  │          │ all shards:           │ all shards:
                            │          │ one log entry         │ the hold moves
                            └ one plan for all shards

If a shard fails, no other shard waits for it: the job ends, and the driver starts another job
from the recovery log.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from penstock.errors import TransientError
from penstock.materialize.recovery import ShardLog
from penstock.materialize.transact import Count

if TYPE_CHECKING:
    from penstock.materialize.shard import ShardPlan

_T = TypeVar("_T")

__all__ = ["Commits", "NotLogged", "Rounds", "Told"]


class NotLogged(TransientError):
    """A commit that is not in the recovery log: another shard or the driver has failed."""

    def __init__(self, *, detail: str = "") -> None:
        super().__init__("the commit of a shard was not written down", detail=detail)


@dataclass(frozen=True, slots=True)
class Told:
    """Report of a shard: its commit, the stored amounts and the durations of the phases."""

    shard: ShardLog
    counts: tuple[Count, ...] = ()
    opened: bool = False
    """True if the stream was opened for this transaction."""

    opened_ms: int = 0
    read_ms: int = 0
    stored_ms: int = 0
    committed_ms: int = 0


class Commits(Protocol):
    """Interface of the driver for its jobs."""

    def opened(self) -> None:
        """Handle the event that the streams of all shards are open."""
        ...

    def offer(self) -> "Sequence[ShardPlan] | None":
        """Return, for every shard, the plan of the next transaction, or None."""
        ...

    def commit(self, told: Sequence[Told], *, goes_on: bool) -> None:
        """Log the commits of all shards. With `goes_on`, log the offered plan in the same entry."""
        ...

    def settled(self, acknowledged_ms: int) -> None:
        """Handle the event that all shards have acknowledged their last commit."""
        ...


class Rounds:
    """Barrier of one job: the driver is called once the calls of all shards have arrived."""

    def __init__(
        self, count: int, commits: Commits, fits: "Callable[[Sequence[ShardPlan]], bool]"
    ) -> None:
        """Create the barrier for `count` shards.

        `fits` returns whether the present Spark tasks can run an offered transaction.
        """
        self._count = count
        self._commits = commits
        self._fits = fits
        self._changed = threading.Condition()
        self._round = 0
        self._asked = False
        self._offered: Sequence[ShardPlan] | None = None
        self._goes_on = False
        self._opened: set[int] = set()
        self._told: dict[int, Told] = {}
        self._settled: dict[int, int] = {}
        self._broken = False
        self.error: BaseException | None = None
        """First error that the driver raised."""

    @property
    def broken(self) -> bool:
        """Return whether the job has ended because a shard or the driver failed."""
        return self._broken

    def opened(self, at: int) -> None:
        """Record that the stream of shard `at` is open."""
        with self._changed:
            self._opened.add(at)
            if len(self._opened) == self._count:
                self._ask(self._commits.opened)

    def offer(self, at: int) -> "ShardPlan | None":
        """Return the plan of the next transaction of shard `at`, or None.

        A shard calls this once per transaction, before `commit`. All shards receive plans from
        the same offer.
        """
        with self._changed:
            if not self._asked:
                self._asked = True
                self._offered = self._ask(self._fitting)
            return self._offered[at] if self._offered is not None else None

    def _fitting(self) -> "Sequence[ShardPlan] | None":
        offered = self._commits.offer()
        return offered if offered and self._fits(offered) else None

    def commit(self, at: int, told: Told) -> bool:
        """Wait until the commits of all shards are logged, and return whether the offer follows.

        Raises:
            NotLogged: the commits were not logged.
        """
        with self._changed:
            mine = self._round
            self._told[at] = told
            if len(self._told) == self._count and not self._broken:
                self._goes_on = self._offered is not None
                everything = [self._told[each] for each in range(self._count)]
                self._ask(lambda: self._commits.commit(everything, goes_on=self._goes_on))
                self._told, self._asked, self._offered, self._settled = {}, False, None, {}
                self._round += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._round > mine or self._broken)
            if self._round == mine or self.error is not None:
                raise NotLogged(detail="Another shard has failed.")
            return self._goes_on

    def settled(self, at: int, acknowledged_ms: int) -> None:
        """Record that shard `at` has acknowledged its last commit."""
        with self._changed:
            self._settled[at] = acknowledged_ms
            if len(self._settled) == self._count:
                slowest = max(self._settled.values())
                self._settled = {}
                self._ask(lambda: self._commits.settled(slowest))

    def fail(self) -> None:
        """End the job after a failure: every waiting shard raises `NotLogged`."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def _ask(self, ask: Callable[[], _T]) -> _T | None:
        try:
            return ask()
        except BaseException as error:  # noqa: BLE001 - raised by the driver when the job is over
            self.error = self.error or error
            self._broken = True
            self._changed.notify_all()
            return None
