"""Work of one Spark task: the transactions of one shard, over a stream that outlives the task.

A Spark task may run in any process, and the next one in another. A process retains the streams
that it opened. It reuses a stream only if the recovery log names its session in the last commit
and the specification is the same. Otherwise the process closes the stream without an
Acknowledge, and a new Open fences it.

The next transaction is read while the connector commits and acknowledges the present one:

    store ▸ StartCommit   ▸   StartedCommit ▸ logged ▸ Acknowledge ▸ Acknowledged ▸ Flush …
                          └─ the next is read, combined ─┴─ its Loads ─┘
"""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Protocol

import pyarrow as pa

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import TransientError, UsageError
from penstock.failpoints import Failpoint, hit
from penstock.materialize.binding import BindingPlan
from penstock.materialize.checkpoint import Checkpoint
from penstock.materialize.client import Connection, connect
from penstock.materialize.feeds import read_here
from penstock.materialize.intervals import Interval, after, interval_of
from penstock.materialize.recovery import ShardLog
from penstock.materialize.rounds import Told
from penstock.materialize.session import Session
from penstock.materialize.transact import Count, Feed, Gathering
from penstock.protocol.connector_state import combine_state
from penstock.protocol.key_range import KeyRange
from penstock.protocol.messages import Open, StateUpdate
from penstock.protocol.specs import MaterializationSpec
from penstock.protocol.transport_security import Security

__all__ = [
    "Driver",
    "Forked",
    "OpenedElsewhere",
    "ShardPlan",
    "cancel_sessions",
    "forget_sessions",
    "run_shard",
]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Complete input of the Spark task of one shard."""

    materialization: str
    """Id of the recovery log of the materialization."""

    spec: MaterializationSpec
    version: str
    log: ShardLog
    bindings: tuple[BindingPlan, ...]
    upper: int
    address: str
    security: Security
    session: str
    """Session id for a stream that this Spark task opens."""


class Driver(Protocol):
    """Interface of the driver for one Spark task; see `Rounds`."""

    def opened(self) -> None:
        """Report that the stream is open."""
        ...

    def offer(self) -> ShardPlan | None:
        """Return the plan of the next transaction, or None."""
        ...

    def commit(self, told: Told) -> bool:
        """Wait until the commit is logged, and return whether the offered transaction follows."""
        ...

    def settled(self, acknowledged_ms: int) -> None:
        """Report that the last commit is acknowledged."""
        ...


class OpenedElsewhere(TransientError):
    """Checkpoint of an endpoint that differs from the one assumed when its rows were selected."""

    def __init__(self, key_range: KeyRange, checkpoint: Checkpoint) -> None:
        super().__init__(f"shard {key_range} was opened at another checkpoint than the last")
        self.key_range = key_range
        self.checkpoint = checkpoint

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenedElsewhere, (self.key_range, self.checkpoint)


class Forked(UsageError):
    """Endpoint with a transaction that the lake never planned, as after a restore of the lake."""

    def __init__(self, materialization: str, backfills: Mapping[str, int]) -> None:
        """Create the error; `backfills` are the backfill counters of the resources, by path."""
        super().__init__(
            f'materialization "{materialization}" has written to {", ".join(backfills)} what the '
            "location knows nothing of",
            detail="The location was restored from an earlier copy, or the materialization was "
            "dropped and its target kept. What is there may not be so any more.",
            hint="Write these resources anew: raise the backfill of each of their bindings by one.",
        )
        self.materialization = materialization
        self.backfills = dict(backfills)

    def __reduce__(self) -> tuple[Any, ...]:
        return Forked, (self.materialization, self.backfills)


@dataclass(slots=True)
class _Kept:
    connection: Connection
    session: Session
    pid: int


_connections: Final[dict[tuple[str, str], Connection]] = {}
"""Connections of this process, by materialization and key range, also while they open."""

_kept: Final[dict[tuple[str, str], _Kept]] = {}
"""Retained streams of this process, by materialization and key range."""


def run_shard(
    plan: ShardPlan,
    driver: Driver,
    feed: Feed | None = None,
    supposed: tuple[Interval | None, ...] | None = None,
) -> None:
    """Bring one shard to the upper of its plan, then run the transactions that the driver offers.

    Return when the last commit is acknowledged. `feed` yields the updates for the intervals in
    `supposed`. Without `feed`, the updates are read from the collections.

    Raises:
        OpenedElsewhere: the missing intervals differ from `supposed`.
        Forked: the endpoint holds a transaction that this lake never planned.
        ConnectorError: the connector rejected a request, or the connection was lost.
        DefiniteError: a collection contains data that cannot be materialized.
        UsageError: the contents of the endpoint cannot be continued.
        NotLogged: another shard or the driver has failed.
    """
    begun = SYSTEM_CLOCK.boot_ms()
    name = (plan.materialization, str(plan.log.key_range))
    kept = _kept.pop(name, None)
    opened = kept is None or not _continues(kept, plan)
    if opened:
        if kept is not None and kept.pid == os.getpid():
            _close(kept)
        kept = _opened(plan)
    assert kept is not None
    opened_ms = SYSTEM_CLOCK.boot_ms() - begun
    try:
        driver.opened()
        if opened:
            _check_not_forked(plan, kept.session.checkpoint)
            _check_not_emptied(plan, kept.session.checkpoint)
        if supposed is not None and supposed != _lacking(plan, kept.session.checkpoint):
            raise OpenedElsewhere(plan.log.key_range, kept.session.checkpoint)
        with ThreadPoolExecutor(1, "read ahead") as pool:
            run = _Run(kept.session, driver, pool)
            try:
                following = run.transact(plan, feed, opened=opened, opened_ms=opened_ms)
                while following is not None:
                    following = run.transact(following)
            finally:
                run.close()
    except BaseException:
        _close(kept)
        raise
    _kept[name] = kept


def _check_not_forked(plan: ShardPlan, opened: Checkpoint) -> None:
    """Check that no resource is ahead of its commit, except at the planned upper.

    A commit whose answer was lost is exactly at the upper that is still planned.

    Raises:
        Forked: a resource is ahead at another time.
    """
    committed = plan.log.checkpoint
    forked = {}
    for each in plan.bindings:
        path = each.bound.path
        there = opened.bindings.get(path)
        known = None if committed is None else committed.bindings.get(path)
        if there is None or each.bound.unknown or there.frontier == plan.upper:
            continue
        if known is None or there.frontier > known.frontier:
            forked[path] = there.backfill
    if forked:
        raise Forked(plan.spec.materialization, forked)


def _check_not_emptied(plan: ShardPlan, opened: Checkpoint) -> None:
    """Check that the endpoint has a checkpoint for each resource that was committed (hazard C12).

    Raises:
        UsageError: the endpoint was replaced by an empty one, and the file requests no backfill.
    """
    committed = plan.log.checkpoint
    for each in plan.bindings:
        path = each.bound.path
        known = None if committed is None else committed.bindings.get(path)
        if known is None or path in opened.bindings or each.bound.unknown:
            continue
        if known.frontier and known.backfill >= each.bound.backfill:
            raise UsageError(
                f'endpoint of materialization "{plan.spec.materialization}" has no checkpoint for '
                f"resource {path}",
                detail=f"The recovery log has committed it up to {known.frontier}, so the endpoint "
                "was deleted, replaced or restored from an earlier copy.",
                hint="Restore the endpoint; or write the resource again: set the backfill of its "
                f"binding to {known.backfill + 1}.",
            )


class _Run:
    """Transactions of one Spark task."""

    def __init__(self, session: Session, driver: Driver, pool: ThreadPoolExecutor) -> None:
        self._session = session
        self._driver = driver
        self._pool = pool
        self._ahead: Future[Gathering] | None = None
        self._acknowledge_ms: int | None = None
        """Time of the last Acknowledge, until its answer is reported to the driver."""

    def transact(
        self,
        plan: ShardPlan,
        feed: Feed | None = None,
        *,
        opened: bool = False,
        opened_ms: int = 0,
    ) -> ShardPlan | None:
        """Run one transaction, and return the plan of the next one, or None."""
        session, marks = self._session, [SYSTEM_CLOCK.boot_ms()]
        state: StateUpdate | None = None
        counts: tuple[Count, ...] = ()
        stored = any(_lacking(plan, session.checkpoint))
        if stored:
            ahead, self._ahead = self._ahead, None
            gathering = ahead.result() if ahead else _gathering(plan, session.checkpoint, feed)
            try:
                session.begin(gathering.loaded)
                for load in gathering.asked_ahead() if ahead else gathering.combine():
                    session.load(load)
                session.await_acknowledged()
                self._tell_settled()
                session.flush()
                marks.append(SYSTEM_CLOCK.boot_ms())
                counts = gathering.store(session)
                session.start_commit(_after(plan, session.checkpoint))
            finally:
                gathering.close()
        marks += [SYSTEM_CLOCK.boot_ms()] * (3 - len(marks))
        self.close()
        offered = self._driver.offer()
        if offered is not None:
            self._ahead = self._pool.submit(_read_ahead, offered, session.checkpoint)
        if stored:
            state = session.started_commit()
        hit(Failpoint.STORE_DONE)
        marks.append(SYSTEM_CLOCK.boot_ms())
        log = replace(
            plan.log,
            checkpoint=session.checkpoint,
            state_json=_with(plan.log.state_json, state),
            session=session.id,
        )
        read, store, commit = (later - sooner for sooner, later in pairwise(marks))
        goes_on = self._driver.commit(
            Told(log, counts, opened, opened_ms, read_ms=read, stored_ms=store, committed_ms=commit)
        )
        hit(Failpoint.RECOVERY_DONE)
        if stored:
            session.acknowledge()
        if self._acknowledge_ms is None:
            self._acknowledge_ms = SYSTEM_CLOCK.boot_ms()
        if goes_on and offered is not None:
            return replace(offered, log=log)
        session.settle()
        self._tell_settled()
        return None

    def close(self) -> None:
        """Discard the data that was read ahead and not used."""
        if self._ahead is not None and self._ahead.exception() is None:
            self._ahead.result().close()
        self._ahead = None

    def _tell_settled(self) -> None:
        if self._acknowledge_ms is not None:
            hit(Failpoint.ACKNOWLEDGE_DONE)
            self._driver.settled(SYSTEM_CLOCK.boot_ms() - self._acknowledge_ms)
            self._acknowledge_ms = None


def _gathering(plan: ShardPlan, held: Checkpoint, feed: Feed | None = None) -> Gathering:
    def here(number: int, interval: Interval) -> Iterable[pa.Table]:
        return read_here(plan.bindings[number], interval)

    return Gathering(
        plan.spec, plan.bindings, _lacking(plan, held), plan.log.key_range, feed or here
    )


def _read_ahead(plan: ShardPlan, held: Checkpoint) -> Gathering:
    gathering = _gathering(plan, held)
    try:
        gathering.read_ahead()
    except BaseException:
        gathering.close()
        raise
    return gathering


def _after(plan: ShardPlan, held: Checkpoint) -> Checkpoint:
    bounds = {each.bound.path: each.bound for each in plan.bindings}
    return after(plan.materialization, held, bounds, plan.upper)


def _lacking(plan: ShardPlan, held: Checkpoint) -> tuple[Interval | None, ...]:
    return tuple(interval_of(each.bound, held, plan.upper) for each in plan.bindings)


def forget_sessions() -> None:
    """Close all streams of this process."""
    for kept in _kept.values():
        _close(kept)
    _kept.clear()


def cancel_sessions(materialization: str) -> None:
    """Cancel the streams of a materialization in this process, from any thread."""
    for (name, _), connection in list(_connections.items()):
        if name == materialization:
            connection.close()


def _continues(kept: _Kept, plan: ShardPlan) -> bool:
    return (
        kept.pid == os.getpid()
        and kept.connection.address == plan.address
        and kept.session.id == plan.log.session
        and kept.session.version == plan.version
        and kept.session.idle
    )


def _opened(plan: ShardPlan) -> _Kept:
    connection = connect(plan.address, plan.security)
    _connections[plan.materialization, str(plan.log.key_range)] = connection
    try:
        request = Open(plan.spec, plan.version, plan.log.key_range, plan.log.state_json.encode())
        session = Session.open(connection, request, id=plan.session, logged=plan.log.checkpoint)
    except BaseException:
        connection.close()
        raise
    return _Kept(connection, session, os.getpid())


def _close(kept: _Kept) -> None:
    kept.session.close()
    kept.connection.close()


def _with(state_json: str, update: StateUpdate | None) -> str:
    if update is None:
        return state_json
    return (combine_state(StateUpdate(state_json.encode()), update).json or b"{}").decode()
