"""The shards of a job in step with their driver, transaction after transaction.

A job need not end with its first transaction. While its connectors commit, the driver
may *offer* the next one, and what every shard has committed is written down together
with that plan: one entry ends a transaction and begins the next.

    shard    opened ─► offer? ──► commit ───────────────► settled      offer? ──► commit ─► …
    driver                  │          │ all of them:          │ all of them:
                            │          │ one entry             │ the hold moves
                            └ one for all shards

If one of them fails, nobody waits for it: the job is over, and the driver begins another
from what is written down.
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
    """A commit was not written down: another shard failed, or the driver is gone."""

    def __init__(self, *, detail: str = "") -> None:
        super().__init__("the commit of a shard was not written down", detail=detail)


@dataclass(frozen=True, slots=True)
class Told:
    """What a shard's connector has committed, and what it took."""

    shard: ShardLog
    counts: tuple[Count, ...] = ()
    opened: bool = False
    """Whether the stream was opened for it."""

    opened_ms: int = 0
    read_ms: int = 0
    stored_ms: int = 0
    committed_ms: int = 0


class Commits(Protocol):
    """The driver, as its jobs see it."""

    def opened(self) -> None:
        """The streams of all shards are open."""
        ...

    def offer(self) -> "Sequence[ShardPlan] | None":
        """What may follow the transaction that is being committed, for every shard."""
        ...

    def commit(self, told: Sequence[Told], *, goes_on: bool) -> None:
        """All shards have committed; with `goes_on`, plan what was offered."""
        ...

    def settled(self, acknowledged_ms: int) -> None:
        """All shards have acknowledged what was committed."""
        ...


class Rounds:
    """What the shards of one job say to their driver, gathered."""

    def __init__(
        self, count: int, commits: Commits, fits: "Callable[[Sequence[ShardPlan]], bool]"
    ) -> None:
        """`fits` says whether a transaction can be done by the tasks that run now."""
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
        """What the driver raised."""

    @property
    def broken(self) -> bool:
        """Whether the job is over, as one of its shards has failed."""
        return self._broken

    def opened(self, at: int) -> None:
        """The stream of a shard is open."""
        with self._changed:
            self._opened.add(at)
            if len(self._opened) == self._count:
                self._ask(self._commits.opened)

    def offer(self, at: int) -> "ShardPlan | None":
        """What a shard may do next; asked once for each transaction, before `commit`."""
        with self._changed:
            if not self._asked:
                self._asked = True
                self._offered = self._ask(self._fitting)
            return self._offered[at] if self._offered is not None else None

    def _fitting(self) -> "Sequence[ShardPlan] | None":
        offered = self._commits.offer()
        return offered if offered and self._fits(offered) else None

    def commit(self, at: int, told: Told) -> bool:
        """Wait until the commits of all shards are written down; whether what was offered follows.

        Raises:
            NotLogged: they are not.
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
        """A shard has acknowledged its last commit."""
        with self._changed:
            self._settled[at] = acknowledged_ms
            if len(self._settled) == self._count:
                slowest = max(self._settled.values())
                self._settled = {}
                self._ask(lambda: self._commits.settled(slowest))

    def fail(self) -> None:
        """Somebody has failed: nobody waits any more."""
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
