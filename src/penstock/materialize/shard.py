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
from penstock.materialize.binding_kind import BindingPlan
from penstock.materialize.checkpoint import Checkpoint
from penstock.materialize.commit_barrier import ShardReport
from penstock.materialize.connector_client import ConnectorConnection, connect
from penstock.materialize.connector_session import ConnectorSession
from penstock.materialize.interval_reader import read_locally
from penstock.materialize.intervals import Interval, checkpoint_after, missing_interval
from penstock.materialize.recovery_log import ShardLog
from penstock.materialize.shard_transaction import IntervalReader, StoredCount, TransactionInput
from penstock.protocol.connector_state import combine_state
from penstock.protocol.key_range import KeyRange
from penstock.protocol.messages import Open, StateUpdate
from penstock.protocol.specs import MaterializationSpec
from penstock.protocol.transport_security import Security

__all__ = [
    "CheckpointMismatch",
    "EndpointAhead",
    "ShardChannel",
    "ShardPlan",
    "cancel_sessions",
    "close_sessions",
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
    """ConnectorSession id for a stream that this Spark task opens."""


class ShardChannel(Protocol):
    """Channel of one Spark task to the commit barrier of its job."""

    def opened(self) -> None:
        """Report that the stream is open."""
        ...

    def plan_next(self) -> ShardPlan | None:
        """Return the plan of the next transaction, or None."""
        ...

    def commit(self, report: ShardReport) -> bool:
        """Wait until the commit is recorded, and return whether the next transaction follows."""
        ...

    def acknowledged(self, acknowledged_ms: int) -> None:
        """Report that the last commit is acknowledged."""
        ...


class CheckpointMismatch(TransientError):
    """Checkpoint of an endpoint that differs from the one assumed when its rows were selected."""

    def __init__(self, key_range: KeyRange, checkpoint: Checkpoint) -> None:
        super().__init__(
            f"endpoint of shard {key_range} has another checkpoint than the recovery log"
        )
        self.key_range = key_range
        self.checkpoint = checkpoint

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointMismatch, (self.key_range, self.checkpoint)


class EndpointAhead(UsageError):
    """Endpoint with a transaction that the lake never planned, as after a restore of the lake."""

    def __init__(self, materialization: str, backfills: Mapping[str, int]) -> None:
        """Create the error; `backfills` are the backfill counters of the resources, by path."""
        super().__init__(
            f'materialization "{materialization}" is ahead of its recovery log in '
            f"{', '.join(backfills)}",
            detail="The location was restored from an earlier copy, or the materialization was "
            "dropped with --keep-target. Some of these rows may no longer exist upstream.",
            hint="Write these resources again: raise the backfill of each binding by one.",
        )
        self.materialization = materialization
        self.backfills = dict(backfills)

    def __reduce__(self) -> tuple[Any, ...]:
        return EndpointAhead, (self.materialization, self.backfills)


@dataclass(slots=True)
class _OpenSession:
    connection: ConnectorConnection
    session: ConnectorSession
    pid: int


_connections: Final[dict[tuple[str, str], ConnectorConnection]] = {}
"""Connections of this process, by materialization and key range, also while they open."""

_sessions: Final[dict[tuple[str, str], _OpenSession]] = {}
"""Retained streams of this process, by materialization and key range."""


def run_shard(
    plan: ShardPlan,
    channel: ShardChannel,
    reader: IntervalReader | None = None,
    expected: tuple[Interval | None, ...] | None = None,
) -> None:
    """Bring one shard to the upper of its plan, then run the transactions that the driver offers.

    Return when the last commit is acknowledged. `reader` yields the updates for the intervals in
    `expected`. Without `reader`, the updates are read from the collections.

    Raises:
        CheckpointMismatch: the missing intervals differ from `expected`.
        EndpointAhead: the endpoint holds a transaction that this lake never planned.
        ConnectorError: the connector rejected a request, or the connection was lost.
        DefiniteError: a collection contains data that cannot be materialized.
        UsageError: the contents of the endpoint cannot be continued.
        CommitNotRecorded: another shard or the driver has failed.
    """
    begun = SYSTEM_CLOCK.boot_ms()
    name = (plan.materialization, str(plan.log.key_range))
    open_session = _sessions.pop(name, None)
    opened = open_session is None or not _continues(open_session, plan)
    if opened:
        if open_session is not None and open_session.pid == os.getpid():
            _close(open_session)
        open_session = _opened(plan)
    assert open_session is not None
    opened_ms = SYSTEM_CLOCK.boot_ms() - begun
    try:
        channel.opened()
        if opened:
            _check_not_ahead(plan, open_session.session.checkpoint)
            _check_not_emptied(plan, open_session.session.checkpoint)
        if expected is not None and expected != _missing_intervals(
            plan, open_session.session.checkpoint
        ):
            raise CheckpointMismatch(plan.log.key_range, open_session.session.checkpoint)
        with ThreadPoolExecutor(1, "read ahead") as pool:
            run = _TransactionRun(open_session.session, channel, pool)
            try:
                following = run.transact(plan, reader, opened=opened, opened_ms=opened_ms)
                while following is not None:
                    following = run.transact(following)
            finally:
                run.close()
    except BaseException:
        _close(open_session)
        raise
    _sessions[name] = open_session


def _check_not_ahead(plan: ShardPlan, opened: Checkpoint) -> None:
    """Check that no resource is ahead of its commit, except at the planned upper.

    A commit whose answer was lost is exactly at the upper that is still planned.

    Raises:
        EndpointAhead: a resource is ahead at another time.
    """
    committed = plan.log.checkpoint
    ahead_backfills = {}
    for binding in plan.bindings:
        path = binding.bound.path
        stored = opened.bindings.get(path)
        known = None if committed is None else committed.bindings.get(path)
        if stored is None or binding.bound.unknown or stored.frontier == plan.upper:
            continue
        if known is None or stored.frontier > known.frontier:
            ahead_backfills[path] = stored.backfill
    if ahead_backfills:
        raise EndpointAhead(plan.spec.materialization, ahead_backfills)


def _check_not_emptied(plan: ShardPlan, opened: Checkpoint) -> None:
    """Check that the endpoint has a checkpoint for each resource that was committed (hazard C12).

    Raises:
        UsageError: the endpoint was replaced by an empty one, and the file requests no backfill.
    """
    committed = plan.log.checkpoint
    for binding in plan.bindings:
        path = binding.bound.path
        known = None if committed is None else committed.bindings.get(path)
        if known is None or path in opened.bindings or binding.bound.unknown:
            continue
        if known.frontier and known.backfill >= binding.bound.backfill:
            raise UsageError(
                f'endpoint of materialization "{plan.spec.materialization}" has no checkpoint for '
                f"resource {path}",
                detail=f"The recovery log has committed it up to {known.frontier}, so the endpoint "
                "was deleted, replaced or restored from an earlier copy.",
                hint="Restore the endpoint; or write the resource again: set the backfill of its "
                f"binding to {known.backfill + 1}.",
            )


class _TransactionRun:
    """Transactions of one Spark task."""

    def __init__(
        self, session: ConnectorSession, channel: ShardChannel, pool: ThreadPoolExecutor
    ) -> None:
        self._session = session
        self._channel = channel
        self._pool = pool
        self._ahead: Future[TransactionInput] | None = None
        self._acknowledge_ms: int | None = None
        """Time of the last Acknowledge, until its answer is reported to the driver."""

    def transact(
        self,
        plan: ShardPlan,
        reader: IntervalReader | None = None,
        *,
        opened: bool = False,
        opened_ms: int = 0,
    ) -> ShardPlan | None:
        """Run one transaction, and return the plan of the next one, or None."""
        session, marks = self._session, [SYSTEM_CLOCK.boot_ms()]
        state: StateUpdate | None = None
        counts: tuple[StoredCount, ...] = ()
        stored = any(_missing_intervals(plan, session.checkpoint))
        if stored:
            ahead, self._ahead = self._ahead, None
            inputs = (
                ahead.result() if ahead else _transaction_input(plan, session.checkpoint, reader)
            )
            try:
                session.begin(inputs.loaded)
                for load in inputs.requested_loads() if ahead else inputs.combine():
                    session.load(load)
                session.await_acknowledged()
                self._report_acknowledged()
                session.flush()
                marks.append(SYSTEM_CLOCK.boot_ms())
                counts = inputs.store(session)
                session.start_commit(_after(plan, session.checkpoint))
            finally:
                inputs.close()
        marks += [SYSTEM_CLOCK.boot_ms()] * (3 - len(marks))
        self.close()
        next_plan = self._channel.plan_next()
        if next_plan is not None:
            self._ahead = self._pool.submit(_read_ahead, next_plan, session.checkpoint)
        if stored:
            state = session.started_commit()
        hit(Failpoint.STORE_DONE)
        marks.append(SYSTEM_CLOCK.boot_ms())
        log = replace(
            plan.log,
            checkpoint=session.checkpoint,
            state_json=_merge_state(plan.log.state_json, state),
            session=session.id,
        )
        read, store, commit = (later - sooner for sooner, later in pairwise(marks))
        continues = self._channel.commit(
            ShardReport(
                log, counts, opened, opened_ms, read_ms=read, stored_ms=store, committed_ms=commit
            )
        )
        hit(Failpoint.RECOVERY_DONE)
        if stored:
            session.acknowledge()
        if self._acknowledge_ms is None:
            self._acknowledge_ms = SYSTEM_CLOCK.boot_ms()
        if continues and next_plan is not None:
            return replace(next_plan, log=log)
        session.settle()
        self._report_acknowledged()
        return None

    def close(self) -> None:
        """Discard the data that was read ahead and not used."""
        if self._ahead is not None and self._ahead.exception() is None:
            self._ahead.result().close()
        self._ahead = None

    def _report_acknowledged(self) -> None:
        if self._acknowledge_ms is not None:
            hit(Failpoint.ACKNOWLEDGE_DONE)
            self._channel.acknowledged(SYSTEM_CLOCK.boot_ms() - self._acknowledge_ms)
            self._acknowledge_ms = None


def _transaction_input(
    plan: ShardPlan, checkpoint: Checkpoint, reader: IntervalReader | None = None
) -> TransactionInput:
    def read(number: int, interval: Interval) -> Iterable[pa.Table]:
        return read_locally(plan.bindings[number], interval)

    return TransactionInput(
        plan.spec,
        plan.bindings,
        _missing_intervals(plan, checkpoint),
        plan.log.key_range,
        reader or read,
    )


def _read_ahead(plan: ShardPlan, checkpoint: Checkpoint) -> TransactionInput:
    inputs = _transaction_input(plan, checkpoint)
    try:
        inputs.read_ahead()
    except BaseException:
        inputs.close()
        raise
    return inputs


def _after(plan: ShardPlan, checkpoint: Checkpoint) -> Checkpoint:
    bounds = {binding.bound.path: binding.bound for binding in plan.bindings}
    return checkpoint_after(plan.materialization, checkpoint, bounds, plan.upper)


def _missing_intervals(plan: ShardPlan, checkpoint: Checkpoint) -> tuple[Interval | None, ...]:
    return tuple(
        missing_interval(binding.bound, checkpoint, plan.upper) for binding in plan.bindings
    )


def close_sessions() -> None:
    """Close all streams of this process."""
    for open_session in _sessions.values():
        _close(open_session)
    _sessions.clear()


def cancel_sessions(materialization: str) -> None:
    """Cancel the streams of a materialization in this process, from any thread."""
    for (name, _), connection in list(_connections.items()):
        if name == materialization:
            connection.close()


def _continues(open_session: _OpenSession, plan: ShardPlan) -> bool:
    return (
        open_session.pid == os.getpid()
        and open_session.connection.address == plan.address
        and open_session.session.id == plan.log.session
        and open_session.session.version == plan.version
        and open_session.session.idle
    )


def _opened(plan: ShardPlan) -> _OpenSession:
    connection = connect(plan.address, plan.security)
    _connections[plan.materialization, str(plan.log.key_range)] = connection
    try:
        request = Open(plan.spec, plan.version, plan.log.key_range, plan.log.state_json.encode())
        session = ConnectorSession.open(
            connection, request, id=plan.session, logged=plan.log.checkpoint
        )
    except BaseException:
        connection.close()
        raise
    return _OpenSession(connection, session, os.getpid())


def _close(open_session: _OpenSession) -> None:
    open_session.session.close()
    open_session.connection.close()


def _merge_state(state_json: str, update: StateUpdate | None) -> str:
    if update is None:
        return state_json
    return (combine_state(StateUpdate(state_json.encode()), update).json or b"{}").decode()
