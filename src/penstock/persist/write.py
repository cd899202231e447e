"""Writes: a queue, the thread that commits it, and the outcomes.

Calls are linearized in call order and committed in groups. All calls made while the last
entry was being made durable are committed in the next one, so sixty-four callers cost one
sync. Each call still succeeds or fails on its own.

    write(…) ─┐                      ┌─► futures
    seal(…)  ─┼─► queue ─► one entry ┤
    write(…) ─┘   in order           └─► listeners are woken

A failed call fails all calls queued behind it on the same collections. Otherwise, a seal
could overtake its failed write and seal a hole (hazard A8).
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa

from penstock.data import conform
from penstock.errors import (
    Corruption,
    DeterminateError,
    IndeterminateError,
    PenstockError,
    UsageError,
)
from penstock.persist.batch import Batches, defaults_of
from penstock.persist.errors import AlreadyFailed, Closed, CollectionReplaced
from penstock.persist.machine import Machine, PlanFailed
from penstock.persist.staging import Staging
from penstock.persist.state import (
    END,
    Allow,
    Batch,
    CollectionState,
    Link,
    Operation,
    Seal,
    State,
    foreseen,
    stored_columns_of,
    types_of,
)
from penstock.telemetry import fields, logger

__all__ = ["Allowed", "Appended", "CollectionAppend", "Committer", "Loose", "UpperMismatch"]

log = logger("persist")

GROUP_BYTES: Final = 1 << 20
"""Maximum size of the updates inside one entry, in bytes; one call alone may exceed it."""

UPLOADS_AT_ONCE: Final = 2


@dataclass(frozen=True, slots=True)
class Appended:
    """Outcome of a successful append: durable updates, and the collection's new upper."""

    upper: int


@dataclass(frozen=True, slots=True)
class UpperMismatch:
    """Outcome of an append that expected another upper. Nothing was written."""

    collection: str
    current: int


@dataclass(frozen=True, slots=True)
class Allowed:
    """Outcome of a durable permission; since is now `since`, at or below every hold."""

    since: int


@dataclass(slots=True)
class Loose:
    """A few updates in stored form, to be combined with others in one batch."""

    columns: list[list[Any]]
    times: list[int]
    diffs: list[int]

    def __len__(self) -> int:
        return len(self.times)


Updates: TypeAlias = Loose | pa.Table | None


@dataclass(slots=True)
class CollectionAppend:
    """Part of a call for one collection: updates, a new upper, or both."""

    collection: int
    updates: Updates = None
    expected: int | None = None
    upper: int | None = None
    stored: "Future[Batch] | None" = None
    lower: int = 0
    """Lowest time among the updates."""

    beyond: int = 0
    """Highest time among the updates, plus one; 0 without updates."""

    size: int = 0
    schema: int = 0
    """Index of the collection's schema version of the updates."""


@dataclass(slots=True)
class AppendCall:
    """Call that writes to or seals one or several collections.

    With `plan_changes`, the call gets its own entry, which contains further operations.
    """

    appends: list[CollectionAppend]
    future: "Future[Any]" = field(default_factory=Future)
    plan_changes: Callable[[State], Sequence[Operation]] | None = None
    """Function that returns the further operations of the entry, or raises `UsageError`."""

    changed_ids: list[int] = field(default_factory=list)
    """Ids of the collections that the further operations change."""

    def touches(self) -> list[int]:
        return [*self.changed_ids, *(append.collection for append in self.appends)]


@dataclass(slots=True)
class AllowCall:
    """Call that permits sinces to advance."""

    sinces: dict[int, int]
    future: "Future[Any]" = field(default_factory=Future)

    def touches(self) -> list[int]:
        return list(self.sinces)


@dataclass(slots=True)
class Control:
    """Call that is committed in its own entry."""

    plan: Callable[[State], Sequence[Operation]]
    outcome: Callable[[State, State], Any]
    collections: list[int] = field(default_factory=list)
    future: "Future[Any]" = field(default_factory=Future)

    def touches(self) -> list[int]:
        return self.collections


Call: TypeAlias = AppendCall | AllowCall
Work: TypeAlias = Call | Control


class Committer:
    """Owner of the queue, the thread that commits it and the upload pool."""

    def __init__(
        self,
        machine: Machine,
        batches: Batches,
        staging: Staging,
        *,
        allow: Callable[[list[int]], None],
        wake: Callable[[int], None],
    ) -> None:
        self._machine = machine
        self._batches = batches
        self._staging = staging
        self._allow = allow
        self._wake = wake
        self._queue: deque[Work] = deque()
        self._ready = threading.Condition()
        self._closing = False
        self._broken: PenstockError | None = None
        self._pool = ThreadPoolExecutor(UPLOADS_AT_ONCE, "penstock-upload")
        self._uploading = threading.BoundedSemaphore(2 * UPLOADS_AT_ONCE)
        self._thread = threading.Thread(target=self._run, name="penstock-commit", daemon=True)
        self._thread.start()

    @property
    def broken(self) -> PenstockError | None:
        """Error that has stopped this writer permanently, or None."""
        return self._broken

    def submit(self, work: Work) -> "Future[Any]":
        """Queue `work`, and return the future of its outcome.

        Raises:
            Closed: the client is closed.
            PenstockError: the error that has stopped this writer.
        """
        with self._ready:
            self._must_be_open()
        staged = _staged(work)
        self._staging.share(staged)
        uploads = self._start_uploads(work)
        with self._ready:
            try:
                self._must_be_open()
            except PenstockError:
                for upload in uploads:
                    upload.cancel()
                for batch in staged:
                    self._staging.release(batch)
                raise
            # From here on the call succeeds or fails. It may be part of an entry, so it
            # cannot be cancelled.
            work.future.set_running_or_notify_cancel()
            self._queue.append(work)
            if len(self._queue) == 1:
                self._ready.notify()
        return work.future

    def run(
        self,
        plan: Callable[[State], Sequence[Operation]],
        outcome: Callable[[State, State], Any],
        *,
        touches: list[int] | None = None,
    ) -> Any:
        """Commit `plan` in its own entry, after all earlier calls, and return its outcome."""
        return self.submit(Control(plan, outcome, touches or [])).result()

    def close(self) -> None:
        """Reject new calls, and return when all accepted ones are done."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join()
        self._pool.shutdown()

    def must_not_be_closed_from_here(self) -> None:
        """Check that the caller is not a callback: it runs in the thread that `close` waits for.

        Raises:
            UsageError: the caller runs in the commit thread.
        """
        if threading.current_thread() is self._thread:
            raise UsageError(
                f'client of location "{self._machine.blob.name}" cannot be closed by a callback',
                hint="Close it where the future is waited for.",
            )

    def _must_be_open(self) -> None:
        if self._closing or self._broken:
            raise self._broken or Closed(self._machine.blob.name)

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._queue and not self._closing:
                    self._ready.wait()
                if not self._queue:
                    return
                group = self._take_group()
            works: list[Work] = [group] if isinstance(group, Control) else [*group]
            try:
                if isinstance(group, Control):
                    self._commit_control(group)
                else:
                    self._commit_group(group)
            except PenstockError as error:
                self._fail(works, error)
            except Exception as error:  # noqa: BLE001 - thread boundary: all futures must fail
                broke = IndeterminateError(
                    f'commit to location "{self._machine.blob.name}" was interrupted',
                    detail="The entry may have been written.",
                    hint="Open the location again to find out.",
                )
                broke.__cause__ = error
                self._fail(works, broke)

    def _take_group(self) -> "Control | list[Call]":
        first = self._queue[0]
        if isinstance(first, Control):
            self._queue.popleft()
            return first
        group: list[Call] = []
        size = 0
        while self._queue and size < GROUP_BYTES:
            work = self._queue[0]
            alone = isinstance(work, AppendCall) and work.plan_changes is not None
            if isinstance(work, Control) or (group and alone):
                break
            self._queue.popleft()
            group.append(work)
            if alone:
                break
            if isinstance(work, AppendCall):
                size += sum(append.size for append in work.appends)
        return group

    def _commit_control(self, control: Control) -> None:
        before, after = self._machine.commit(control.plan)
        self._wake(after.seqno)
        control.future.set_result(control.outcome(before, after))

    def _commit_group(self, group: "list[Call]") -> None:
        for work in group:
            if isinstance(work, AppendCall):
                self._await_uploads(work)
        gathered = _Gathered([])

        def plan(state: State) -> list[Operation]:
            nonlocal gathered
            gathered = _gather(group, state, self._batches)
            return gathered.operations

        before, after = self._machine.commit(plan)
        if after is not before:
            self._wake(after.seqno)
        # SUBTLE: outcomes of writes are reported before sinces are settled. If settling
        # fails, only the calls that requested it may report the failure.
        self._answer(group, gathered, after)
        allowing = [work for work in gathered.outcomes if isinstance(work, AllowCall)]
        if allowing:
            try:
                self._allow([id for work in allowing for id in work.sinces])
            except (DeterminateError, Corruption) as error:
                # The permission is durable nevertheless; maintenance settles it later.
                log.warning("since could not be settled yet", extra=fields(error=str(error)))
            _complete_allowing(allowing, self._machine.state)
        for work in group:
            self._release_uploads(work)

    def _answer(self, group: list[Call], gathered: "_Gathered", state: State) -> None:
        behind: list[Work] = []
        if gathered.failed:
            # Both happen under the lock: no call may be queued between a failure and the
            # failure of the calls behind it.
            with self._ready:
                behind = self._drop_behind(gathered.failed)
                _complete_calls(group, gathered.outcomes, state)
        else:
            _complete_calls(group, gathered.outcomes, state)
        for work in behind:
            # A call may fail because of another dropped call, so none of its collections
            # need be in `failed`.
            touched = work.touches()
            name = next((id for id in touched if id in gathered.failed), touched[0])
            work.future.set_exception(AlreadyFailed(_name(state, name)))
            self._release_uploads(work)

    def _fail(self, group: list[Work], error: PenstockError) -> None:
        """Fail the complete group; stop the writer if a repeated call would be unsafe."""
        with self._ready:
            if not isinstance(error, DeterminateError | UsageError | PlanFailed):
                self._broken = error
                behind: list[Work] = list(self._queue)
                self._queue.clear()
            else:
                behind = self._drop_behind({id for work in group for id in work.touches()})
            for work in group:
                if not work.future.done():
                    work.future.set_exception(error)
        state = self._machine.state
        for work in behind:
            touched = work.touches()
            reason = (
                error if self._broken or not touched else AlreadyFailed(_name(state, touched[0]))
            )
            work.future.set_exception(reason)
        for work in (*group, *behind):
            self._release_uploads(work)

    def _drop_behind(self, failed: set[int]) -> list[Work]:
        """Remove queued calls that touch a failed collection; their collections fail too."""
        failed = set(failed)
        dropped: list[Work] = []
        kept: deque[Work] = deque()
        for work in self._queue:
            if failed.isdisjoint(work.touches()):
                kept.append(work)
            else:
                failed.update(work.touches())
                dropped.append(work)
        self._queue = kept
        return dropped

    def _start_uploads(self, work: Work) -> "list[Future[Batch]]":
        if not isinstance(work, AppendCall):
            return []
        uploads: list[Future[Batch]] = []
        for append in work.appends:
            if isinstance(append.updates, pa.Table) and not self._batches.inline(append.updates):
                # Callers that outpace the store wait here: the number of uploads in flight
                # bounds memory.
                self._uploading.acquire()
                append.stored = self._pool.submit(self._upload, append.updates, append.schema)
                append.stored.add_done_callback(lambda _: self._uploading.release())
                append.updates = None
                uploads.append(append.stored)
        return uploads

    def _upload(self, updates: pa.Table, schema: int) -> Batch:
        staging = self._staging.acquire()
        try:
            return self._batches.build_stored(updates, schema, staging)
        except BaseException:
            self._staging.give_up(staging)
            raise

    def _await_uploads(self, work: AppendCall) -> None:
        for append in work.appends:
            if append.stored is not None:
                append.stored.exception()

    def _release_uploads(self, work: Work) -> None:
        if isinstance(work, AppendCall):
            for append in work.appends:
                if append.stored is not None and append.stored.exception() is None:
                    self._staging.release(append.stored.result())


@dataclass(slots=True)
class _Gathered:
    """Outcomes and operations of one group, planned against one state."""

    operations: list[Operation]
    outcomes: list[Any] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)


def _gather(group: Sequence[Call], state: State, batches: Batches) -> _Gathered:
    """Return the outcome of each call, in order, and the operations of the valid calls."""
    gathered = _Gathered([])
    uppers: dict[int, int] = {}
    loose: dict[int, list[Updates]] = {}
    stored: dict[int, list[Batch]] = {}
    allowed: dict[int, int] = {}
    for work in group:
        failed = next((id for id in work.touches() if id in gathered.failed), None)
        outcome: Any
        if failed is not None:
            outcome = AlreadyFailed(_name(state, failed))
        elif isinstance(work, AllowCall):
            destroyed = [id for id in work.sinces if id not in state.collections]
            outcome = _destroyed(destroyed[0]) if destroyed else work
            for id, since in () if destroyed else work.sinces.items():
                allowed[id] = max(since, allowed.get(id, 0))
        else:
            outcome, operations = _judge(work, state, uppers)
            if isinstance(outcome, Appended):
                gathered.operations += operations
                state = foreseen(state, operations)
                for append in work.appends:
                    if append.updates is not None:
                        loose.setdefault(append.collection, []).append(append.updates)
                    if append.stored is not None:
                        stored.setdefault(append.collection, []).append(append.stored.result())
                    if append.upper is not None:
                        uppers[append.collection] = append.upper
        gathered.outcomes.append(outcome)
        # An upper mismatch is no failure: its caller waits for the outcome, and so has
        # queued nothing behind it.
        if isinstance(outcome, BaseException):
            gathered.failed.update(work.touches())
    for id in dict.fromkeys([*loose, *stored]):
        linked = list(stored.get(id, []))
        if id in loose:
            linked.append(_batch_of(loose[id], state.collections[id], batches))
        gathered.operations.append(Link(id, tuple(linked)))
    for id, upper in uppers.items():
        if upper != state.collections[id].upper:
            gathered.operations.append(Seal(id, upper))
    for id, since in allowed.items():
        if since > state.collections[id].allowed:
            gathered.operations.append(Allow(id, since))
    return gathered


def _judge(
    work: AppendCall, state: State, uppers: dict[int, int]
) -> tuple[Any, Sequence[Operation]]:
    """Return the outcome of a call, and the further operations of its entry.

    The outcome is `Appended`, `UpperMismatch` or an error, against the uppers that the
    group has reached so far.
    """
    for id in work.touches():
        if id not in state.collections:
            return _destroyed(id), ()
    for append in work.appends:
        if append.stored is not None and (error := append.stored.exception()) is not None:
            return error, ()
        collection = state.collections[append.collection]
        upper = uppers.get(append.collection, collection.upper)
        if append.expected is not None and append.expected != upper:
            return UpperMismatch(collection.name, upper), ()
    operations: Sequence[Operation] = ()
    reached = 0
    if work.plan_changes is not None:
        try:
            operations = work.plan_changes(state)
        except UsageError as error:
            return error, ()
        state = foreseen(state, operations)
        reached = state.collections[work.changed_ids[-1]].upper
    for append in work.appends:
        collection = state.collections[append.collection]
        upper = uppers.get(append.collection, collection.upper)
        if (refused := _refusal(append, collection, upper)) is not None:
            return refused, ()
        reached = upper if append.upper is None else append.upper
    return Appended(reached), operations


def _refusal(
    append: CollectionAppend, collection: CollectionState, upper: int
) -> UsageError | None:
    if collection.successor:
        return CollectionReplaced(collection.name, at=collection.upper)
    if append.upper is not None and append.upper < upper:
        return UsageError(
            f'collection "{collection.name}" cannot be sealed at {append.upper}',
            detail=f"Its upper is {upper} already, and times below it stay complete.",
            hint=f"Seal at {upper} or later.",
        )
    if append.beyond and append.lower < upper:
        return UsageError(
            f'collection "{collection.name}" cannot take an update at {append.lower}',
            detail=f"Its upper is {upper}: times below it are complete. Nothing was written.",
            hint=f"Write at {upper} or later." if upper < END else "The collection is closed.",
        )
    if append.schema >= len(collection.schemas):
        return UsageError(
            f'updates for collection "{collection.name}" were staged in a schema it does not have',
            hint="Grow the collection in the same append_all.",
        )
    return None


def _staged(work: Work) -> list[Batch]:
    """Return the batches that were written before the call."""
    appends = work.appends if isinstance(work, AppendCall) else []
    return [append.stored.result() for append in appends if append.stored is not None]


def _destroyed(id: int) -> UsageError:
    return UsageError(f"collection {id} was destroyed", hint="Make it again with create_or_load.")


def _batch_of(updates: list[Updates], collection: CollectionState, batches: Batches) -> Batch:
    """Combine all small updates of one collection in a group into one inline batch."""
    newest = len(collection.schemas) - 1
    schema = stored_columns_of(collection.schemas[newest])
    few = [part for part in updates if isinstance(part, Loose)]
    loose = _rows_of(few, schema, types_of(collection.schemas[newest])) if few else None
    if loose is not None and len(few) == len(updates):
        times = [time for part in few for time in part.times]
        return batches.build_few(loose, newest, lower=min(times), upper=max(times) + 1)
    # The schema may have grown after the caller prepared a table.
    defaults = defaults_of(collection.schemas)
    tables = [conform(part, schema, defaults) for part in updates if isinstance(part, pa.Table)]
    if loose is not None:
        tables.append(pa.Table.from_batches([loose]))
    return batches.build_inline(pa.concat_tables(tables) if len(tables) > 1 else tables[0], newest)


def _rows_of(few: list[Loose], schema: pa.Schema, types: tuple[pa.DataType, ...]) -> pa.RecordBatch:
    columns: list[list[Any]] = [[] for _ in types]
    for part in few:
        for column, more in zip(columns, (*part.columns, part.times, part.diffs), strict=True):
            column.extend(more)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _complete_calls(group: list[Call], outcomes: list[Any], state: State) -> None:
    for work, outcome in zip(group, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            work.future.set_exception(outcome)
        elif not isinstance(outcome, AllowCall):
            work.future.set_result(outcome)


def _complete_allowing(allowing: list[AllowCall], state: State) -> None:
    for work in allowing:
        sinces = [state.collections[id].since for id in work.sinces if id in state.collections]
        work.future.set_result(Allowed(min(sinces, default=0)))


def _name(state: State, id: int) -> str:
    collection = state.collections.get(id)
    return str(id) if collection is None else collection.name
