"""Loop of one materialization: plan an interval, transact, commit, advance the hold.

    uppers ─► plan ─► a job: a task for each shard ─► one entry ─► acknowledged ─► hold moves

The recovery log records the interval before the first Store. After a crash, the same interval is
completed first. The commits of all shards are one entry of the recovery log. The hold stays at the
lowest frontier that all shards have acknowledged, so any interval that must be read again is
readable.
"""

import json
import random
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, Protocol

from penstock import persist
from penstock.clock import Clock
from penstock.data.collection_name import source_of
from penstock.deadlines import answer_timeout_s, stop_timeout_s
from penstock.errors import DefiniteError, PenstockError, TransientError, UsageError
from penstock.failpoints import Failpoint, hit
from penstock.materialize.applied import applied_paths, note_of_applied
from penstock.materialize.backfill import (
    ForeignRows,
    Predecessors,
    SeveralShards,
    check_shards,
    lost_resources,
    replaced_bindings,
    replaced_resources,
    rows_written,
)
from penstock.materialize.binding import BindingPlan
from penstock.materialize.building import (
    Built,
    Described,
    IncompatibleCollection,
    IncompatibleResource,
    build,
)
from penstock.materialize.checkpoint import NOTHING, Checkpoint, path_text
from penstock.materialize.client import connect
from penstock.materialize.errors import ConnectorError, ConnectorRefused
from penstock.materialize.hosting import reached_connector
from penstock.materialize.intervals import interval_of
from penstock.materialize.known_layouts import KnownLayouts
from penstock.materialize.lakeside import Holding, Lakeside, Ready, owner_of
from penstock.materialize.pace import upper_within
from penstock.materialize.recovery import Log, ShardLog, notes_of, recalled
from penstock.materialize.rounds import Commits, Told
from penstock.materialize.shapes import shape_of
from penstock.materialize.shard import Forked, OpenedElsewhere, ShardPlan
from penstock.materialize.status import Status
from penstock.materialize.transact import needs_truncation
from penstock.persist.batch import defaults_of
from penstock.persist.errors import CollectionMissing
from penstock.persist.records import ErrorSpan, StoredError
from penstock.persist.state import END, columns_of, schema_as_of
from penstock.persist.state_store import StateStore
from penstock.pipeline.file import CollectionSection, MaterializationSection
from penstock.progress.time import describe_time
from penstock.protocol.key_range import WHOLE, split_evenly
from penstock.protocol.transport_security import Security
from penstock.retry import pauses_ms
from penstock.telemetry import fields, logger

__all__ = ["Jobs", "Materializing", "StoppedByError"]

log = logger("materialize")

STATUS: Final = "status"
LOOK_MS: Final = 100
"""Interval between two checks for new data in the collections."""

WATCH_S: Final = 0.2
"""Longest wait between two checks of the duration of a step, and of the stop event."""


class Jobs(Protocol):
    """Runner of one concurrent task for each shard."""

    def run(self, plans: Sequence[ShardPlan], commits: Commits) -> None:
        """Run the plans and each transaction that `commits` offers after them, then return."""
        ...

    def cancel(self, materialization: str) -> None:
        """Cancel the job of the recovery log with that id; its `run` then raises."""
        ...


class Materializing:
    """One materialization, which follows its collections."""

    def __init__(
        self,
        name: str,
        section: MaterializationSection,
        client: persist.Client,
        *,
        location: str,
        jobs: Jobs,
        tick_ms: int,
        clock: Clock,
        chance: random.Random,
        collections: Mapping[str, CollectionSection] | None = None,
        sources: Sequence[str] = (),
        append_only: Collection[str] = (),
        connector_host: str | None = None,
        allow_drop: bool = False,
        process_stop: threading.Event | None = None,
    ) -> None:
        """Prepare the materialization; `run` starts it.

        Args:
            name: name of the materialization.
            section: its section of the pipeline file.
            client: storage location of the recovery log.
            location: the lake.
            jobs: runner of the shards.
            tick_ms: pause between transactions, unless the section sets a pace.
            clock: source of time and waits.
            chance: random numbers for retry pauses and session ids.
            collections: sections of the collections in the pipeline file.
            sources: sources whose collections may be created after the start.
            append_only: collections whose rows are never deleted.
            connector_host: address that a built-in connector listens on; None for a Unix socket.
            allow_drop: allow a backfill to remove rows that this materialization did not write,
                and to drop and create resources again.
            process_stop: event after which waits for the connector are bounded.
        """
        self.name = name
        self._section = section
        self._collections = collections or {}
        self._sources = frozenset(sources)
        self._append_only = frozenset(append_only)
        self._client = client
        self._location = location
        self._jobs = jobs
        self._pace_ms = section.pace if section.pace is not None else tick_ms
        self._clock = clock
        self._chance = chance
        self._connector_host = connector_host
        self._allow_drop = allow_drop
        self._process_stop = process_stop
        self._memory = StateStore(client, name)
        self._lake: Lakeside
        self._address = ""
        self._security = Security()
        self._built: Built
        self._continued: Sequence[frozenset[str]] = ()
        """For each binding, ids of earlier layouts that need no rewrite."""

        self._replaced: frozenset[int] = frozenset()
        """Bindings whose replacement by the next transaction was checked for foreign rows."""

        self._log: Log
        self._files: list[ExitStack] = []
        """Claims on files: of the current transaction, then of the offered transaction."""

        self._offered: tuple[int, frozenset[str]] | None = None
        """Upper of the offered next transaction, and the resources that it leaves out."""

        self._incompatible: dict[str, ErrorSpan] = {}
        """Replaced collections that a binding cannot store, with the frontier of their bindings.

        Their bindings stay frozen until this process ends. To resume them, start again with
        --allow-drop or with another pipeline file.
        """

        self._rejected: dict[str, IncompatibleCollection] = {}
        """Errors of the collections in `_incompatible`."""

        self._begun_ms = 0
        self._goal: int | None = None
        self._stop = threading.Event()
        self._status = Status([each.collection for each in section.bindings], self._clock.now_ms())

    def status(self) -> Mapping[str, Any]:
        """Return the status as JSON values."""
        return self._status.told()

    @property
    def version(self) -> str:
        """Version of the applied specification."""
        return self._built.version

    def run(self, stop: threading.Event, *, once: bool) -> None:
        """Follow the collections until `stop` is set; with `once`, up to their present uppers.

        Transient errors and connector failures are retried.

        Raises:
            PenstockError: a permanent error, which needs a user to act.
        """
        self._stop = stop
        pauses = pauses_ms(self._chance)
        while not stop.is_set():
            before = self._status.transactions
            try:
                with ExitStack() as stack:
                    stack.enter_context(self._reporting_waits())
                    self._start(stack, wait=not once)
                    self._follow(once=once)
                break
            except _NotMade as missing:
                self._status.wait(str(missing))
                self._note_status()
                self._clock.wait(stop, self._pace_ms)
            except ConnectorRefused as error:
                self._fail("stopped", error)
                raise
            except (ConnectorError, TransientError) as error:
                if self._status.transactions > before:
                    pauses = pauses_ms(self._chance)
                event = "materialization failed; retrying"
                if stop.is_set():
                    event = "stopped before the transaction was complete"
                step = self._status.step
                self._fail("retrying", error)
                log.warning(
                    event,
                    extra=fields(
                        materialization=self.name,
                        step=step,
                        error=str(error),
                        detail=error.detail,
                    ),
                )
                self._clock.wait(stop, next(pauses))
            except PenstockError as error:
                self._fail("stopped", error)
                raise
        self._status.phase = "stopped"
        self._note_status()

    def _fail(self, phase: str, error: PenstockError) -> None:
        self._begin("")
        self._status.phase, self._status.error = phase, str(error)
        self._note_status()

    def _begin(self, step: str) -> None:
        self._status.begin(step, self._clock.now_ms() if step else 0)

    @contextmanager
    def _reporting_waits(self) -> Iterator[None]:
        """Report a step of the connector that takes longer than the answer deadline."""
        ended = threading.Event()
        deadline_ms = answer_timeout_s() * 1_000

        def watch() -> None:
            step, since_ms = "", 0
            while not ended.wait(WATCH_S):
                status, now_ms = self._status, self._clock.boot_ms()
                if (found := f"{status.step} {status.step_since_ms}") != step:
                    step, since_ms = found, now_ms
                elif status.step and not status.overdue and now_ms - since_ms >= deadline_ms:
                    status.overdue = True
                    # The main thread reports errors of the store.
                    with suppress(PenstockError):
                        self._note_status()

        watching = threading.Thread(target=watch, name=f"waits of {self.name}", daemon=True)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join()

    # Start.

    def _start(self, stack: ExitStack, *, wait: bool) -> None:
        names = list(dict.fromkeys(each.collection for each in self._section.bindings))
        try:
            self._lake = Lakeside(
                self._location, names, owner=owner_of(self.name), stop=self._process_stop
            )
        except CollectionMissing as error:
            if wait and all(self._made_by_a_source(each) for each in names):
                raise _NotMade(f"its source to make {error.name}") from error
            raise
        stack.callback(self._lake.close)
        self._begin("start")
        self._address, self._security = reached_connector(
            stack,
            self._section.connector,
            self._clock,
            self._connector_host,
            stop=self._process_stop,
        )
        known = recalled({name: self._memory.get(name) for name in self._memory.names()})
        if known is None:
            ranges = split_evenly(self._section.shards)
            known = Log("", tuple(ShardLog(each) for each in ranges))
        self._log = known
        self._incompatible, self._rejected = {}, {}
        while True:
            try:
                self._build(self._described(known.planned), known.planned)
            except IncompatibleCollection as error:
                self._freeze(error)
            else:
                return

    def _made_by_a_source(self, collection: str) -> bool:
        return source_of(collection, self._sources) is not None

    def _described(self, upper: int | None) -> list[Described]:
        """Return the spec and shape of each binding's collection as of `upper`, or now."""
        found = []
        for binding in self._section.bindings:
            name = binding.collection
            as_of = self._as_of(name, upper)
            state = self._lake.state(name, as_of)
            schema = state.schemas[-1] if as_of is None else schema_as_of(state, as_of)
            section = self._collections.get(name)
            defaults = defaults_of(state.schemas)
            found.append(shape_of(name, columns_of(schema), schema.key, section, defaults))
        return found

    def _as_of(self, name: str, upper: int | None) -> int | None:
        """Return the time for the lookup of a collection by name; None for now."""
        if name in self._incompatible:
            return self._incompatible[name].lower - 1
        return None if upper is None else max(upper - 1, 0)

    def _freeze(self, error: IncompatibleCollection) -> None:
        """Freeze the bindings of a replaced collection that one of them cannot store.

        Raises:
            IncompatibleCollection: the error, if the collection was not replaced since the last
                transaction, a planned transaction includes it, or errors stop all bindings.
        """
        name = error.collection
        planned = self._log.planned is not None and not self._log.frozen.issuperset(error.paths)
        if not self._leaves_behind or planned or name in self._incompatible:
            raise error
        backfills = [each.backfill for each in self._section.bindings if each.collection == name]
        frontier = min(
            _frontier(each.checkpoint, path, backfill)
            for path, backfill in zip(error.paths, backfills, strict=True)
            for each in self._log.shards
        )
        if not frontier or self._lake.state(name, frontier - 1).id == self._lake.state(name).id:
            raise error
        self._incompatible[name] = ErrorSpan(frontier, StoredError.of(error))
        self._rejected[name] = error

    def _build(self, described: list[Described], upper: int | None) -> None:
        """Validate and apply the specification for the collections as of `upper`, or now."""
        predecessors = self._predecessors(upper)
        with connect(self._address, self._security, stop=self._process_stop) as connection:
            with self._setup("validate"):
                self._built = build(
                    self.name,
                    self._section,
                    described,
                    connection,
                    append_only=self._append_only,
                    is_replaced=replaced_resources(self._section, self._log, predecessors),
                )
            self._status.build(self._built)
            applied = applied_paths(self._memory)
            lost = lost_resources(self._section, self._built, self._log, predecessors, applied)
            check_shards(self._section, self._built, self._log, predecessors)
            if not self._allow_drop:
                self._check_recreated()
                self._check_replaced(predecessors)
            self._replaced = self._replaced_by(upper)
            if lost:
                # SUBTLE: record this before Apply creates the resources. After a crash in between,
                # empty resources exist, and the checkpoint still covers the lost rows.
                self._write(self._log.doubt(lost))
            layouts = KnownLayouts.get(self._memory).with_built(self._built)
            self._continued = [
                layouts.continued(self._built, number) for number in range(len(described))
            ]
            self._memory.put({**note_of_applied(self._built), **layouts.note()})
            with self._setup("apply"):
                self._built.apply(connection)
            hit(Failpoint.APPLY_DONE)
        self._write(self._log.bind(self._built.version, self._paths()))

    def _predecessors(self, upper: int | None) -> Predecessors:
        return lambda name: self._lake.predecessors(name, self._as_of(name, upper))

    def _replaced_by(self, upper: int | None) -> frozenset[int]:
        """Return the bindings whose resources a transaction up to `upper` truncates."""
        is_replaced = replaced_resources(self._section, self._log, self._predecessors(upper))
        paths = [each.resource_path for each in self._built.spec.bindings]
        return frozenset(number for number, path in enumerate(paths) if is_replaced(number, path))

    @contextmanager
    def _setup(self, step: str) -> Iterator[None]:
        """Begin `step`, and add the materialization and the step to a rejection in the block.

        A rejection is permanent. Later steps may begin within the block. Their errors pass
        unchanged.
        """
        self._begin(step)
        try:
            yield
        except ConnectorRefused as error:
            if self._status.step != step:
                raise
            hint = "Correct the file or the endpoint, then run: penstock resume LOCATION "
            raise ConnectorRefused(
                f'connector of materialization "{self.name}" rejected {step.capitalize()}: {error}',
                detail=error.detail,
                hint=f"{error.hint} {hint}{self.name}".strip(),
            ) from error
        self._begin("")

    def _check_recreated(self) -> None:
        """Raise IncompatibleResource if a resource would be dropped and created again."""
        for number, answer in enumerate(self._built.answers):
            if answer.recreates:
                hint = "Run with --allow-drop to do so, or name another resource."
                raise IncompatibleResource(
                    self.name, self._section, self._built.answers, number, hint
                )

    def _check_replaced(self, predecessors: Predecessors) -> None:
        """Raise ForeignRows if a replacement would remove rows of another writer."""
        replaced = replaced_bindings(self._section, self._built, self._log, predecessors)
        for number, reached in replaced.items():
            rows = self._built.answers[number].rows
            written = self._rows_written(number, reached.frontier, reached.collection)
            if written is None or rows <= written:
                continue
            planned = self._log.planned
            if planned is not None and rows == self._rows_written(number, planned):
                continue  # The planned transaction was committed, and the response was lost.
            raise ForeignRows(
                self._path(number),
                reached,
                self._section.bindings[number],
                rows=rows,
                written=written,
            )

    def _rows_written(self, number: int, frontier: int, collection: str = "") -> int | None:
        """Return the number of rows that this materialization wrote, at a frontier.

        The result is None if the number is not known, or if the name does not refer to the
        collection with the id `collection` at that time. An empty id matches each collection.
        """
        if not self._built.deletes[number]:
            return None  # Deleted rows stay, and delta updates add a row for each change.
        name, (_, shape) = self._section.bindings[number].collection, self._built.described[number]
        with self._lake.reading({name: 0}, frontier) as held:
            if collection not in ("", held[name].id):
                return None
            return rows_written(held[name], shape, frontier)

    # Transactions.

    def _follow(self, *, once: bool) -> None:
        self._goal = None
        self._hold()
        while not self._stop.is_set():
            ready = self.ready()
            if once and self._goal is None and (ready.target or not ready.behind):
                self._goal = ready.target
            self._look()
            if self._shares_out_anew():
                continue
            upper = self._log.planned or self._upper_after(self._reached())
            if upper is None and not self._log.is_settled:
                # Acknowledge the last commit even without new data: an earlier process may have
                # left staged documents that the connector has not applied.
                upper = self._committed()
            if upper is not None:
                self._transact(upper)
            done = upper is None or self._reached() >= (self._goal or 0)
            if once and done and self._log.planned is None and (stopped := self._stopping_error()):
                raise stopped
            if self._goal is not None and done and self._log.planned is None:
                for error in self._rejected.values():
                    raise error
                return
            if once and self._goal is None and upper is None:
                raise UsageError(
                    f'materialization "{self.name}" cannot come to an end: it waits for '
                    f"{ready.behind}",
                    hint="Ingest what is missing first, or follow without --once.",
                )
            self._note_status()
            if not self._behind():
                self._clock.wait(self._stop, self._pace_ms if upper else LOOK_MS)

    def _shares_out_anew(self) -> bool:
        """Rebalance the key ranges at one common frontier; return whether that took a step.

        A change from several shards to several shards passes through one shard. Otherwise a new
        range could split a previous one, and its connector would inherit an old checkpoint.
        """
        ranges = list(split_evenly(self._section.shards))
        now = [each.key_range for each in self._log.shards]
        if now == ranges:
            return False
        reached = self._reached()
        upper = self._log.planned or self._upper_after(reached) or reached
        # Several shards cannot truncate these resources. The single shard replaces them later.
        left_out = self._log.unbound.intersection(self._paths()).union(
            check_shards(self._section, self._built, self._log, self._predecessors(upper or None)),
            self._truncated_by_shards(upper),
        )
        # Open each shard with its present range. This acknowledges its last commit.
        if upper and not self._transact(upper, goes_on=False, left_out=left_out):
            return True
        if self._log.planned is None:
            one = [WHOLE]
            shared = ranges if one in (now, ranges) else one
            equal = [each for each in self._paths() if each not in left_out]
            self._write(self._log.share_out(shared, equal))
        return True

    def _truncated_by_shards(self, upper: int) -> frozenset[str]:
        """Return the resources that need a truncation, which several shards cannot do.

        Raises:
            SeveralShards: there is such a resource, and the file requests several shards.
        """
        if len(self._log.shards) == 1 or not upper:
            return frozenset()
        frozen = self._frozen_paths() if self._log.planned is None else self._log.frozen
        found = set[str]()
        with self._lake.reading(self._needed(), upper) as held:
            for plan in self._plans(upper, frozen, held):
                for number, binding in enumerate(plan.bindings):
                    if plan.spec.bindings[number].delta_updates or not binding.empties:
                        continue
                    with suppress(UsageError):  # The shard raises it again.
                        opened = plan.log.checkpoint or NOTHING
                        if needs_truncation(binding, interval_of(binding.bound, opened, upper)):
                            found.add(binding.bound.path)
        if found and self._section.shards > 1:
            raise SeveralShards(self.name, ".".join(json.loads(min(found))))
        return frozenset(found)

    def _transact(
        self, upper: int, *, goes_on: bool = True, left_out: frozenset[str] = frozenset()
    ) -> bool:
        """Run the transaction up to `upper`, without the resources in `left_out`.

        Return whether it was run. If not, one more resource must be left out; try again.
        """
        self._status.phase = "storing"
        described = self._described(upper)
        frozen = self._frozen_paths() if self._log.planned is None else self._log.frozen
        replaced = {each for each in self._replaced_by(upper) if self._path(each) not in frozen}
        if described != self._built.described or not replaced <= self._replaced:
            # The name may refer to another collection with the same columns.
            before = self._built
            try:
                self._build(described, upper)
            except IncompatibleCollection as error:
                self._freeze(error)
                self._built = before
                return False
        if self._log.planned is None:
            check_shards(self._section, self._built, self._log, self._predecessors(upper))
            if not self._truncated_by_shards(upper) <= left_out:
                return False
            self._write(self._log.plan(upper, self._frozen_paths() | left_out))
            hit(Failpoint.PLAN_DONE)
        elif not left_out <= self._log.frozen:
            self._write(self._log.plan(upper, self._log.frozen | left_out))
        self._begun_ms = self._clock.boot_ms() if goes_on else END
        try:
            plans = self._plans(upper, self._log.frozen, self._hold_files(upper))
            with self._setup("open"), self._cancelling_after_stop():
                self._jobs.run(plans, self)
        except OpenedElsewhere as found:
            self._log = self._log.opened(found.key_range, found.checkpoint)
        except Forked as found:
            if not self._written_anew(found.backfills):
                raise
            self._write(self._log.doubt(found.backfills))
        finally:
            for files in self._files:
                files.close()
            self._files = []
        return True

    @contextmanager
    def _cancelling_after_stop(self) -> Iterator[None]:
        """Cancel the job of the block a third of the stop deadline after the process stops.

        The outcome of its transaction is then unknown, as after a crash.
        """
        stop, ended, grace_s = self._process_stop, threading.Event(), stop_timeout_s() / 3
        if stop is None:
            yield
            return

        def watch() -> None:
            while not stop.wait(WATCH_S):
                if ended.is_set():
                    return
            if ended.wait(grace_s):
                return
            log.warning(
                "transaction still under way; cancelling it",
                extra=fields(materialization=self.name, after_s=grace_s),
            )
            # SUBTLE: cancel repeatedly. One call does not cancel work that the job starts later.
            while not ended.is_set():
                self._jobs.cancel(self._client.state.location)
                ended.wait(WATCH_S)

        threading.Thread(target=watch, name=f"stop of {self.name}", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _written_anew(self, backfills: Mapping[str, int]) -> bool:
        """Return whether the file raises the backfill of each resource in `backfills`."""
        return all(
            backfills[path] < section.backfill
            for number, section in enumerate(self._section.bindings)
            if (path := self._path(number)) in backfills
        )

    # Callbacks of the shards of a job: see `Commits`.

    def opened(self) -> None:
        """Record that the streams of all shards are open."""
        self._begin("store")

    def offer(self) -> Sequence[ShardPlan] | None:
        """Return plans for the transaction after the current one; None if the job shall end.

        The shards call it while they commit the current transaction.
        """
        self._begin("commit")
        self._offered = None
        planned = self._log.planned
        if planned is None or self._stop.is_set():
            return None
        if self._goal is not None and planned >= self._goal:
            return None
        if self._clock.boot_ms() - self._begun_ms < self._pace_ms:
            return None
        upper = self._upper_after(planned)
        if upper is None or self._described(upper) != self._built.described:
            return None
        predecessors = self._predecessors(upper)
        if replaced_bindings(self._section, self._built, self._log, predecessors):
            return None  # `_build` must first check for foreign rows and for several shards.
        if not self._log.unbound.isdisjoint(self._paths()):
            return None  # Their contents are known only after the current commit.
        self._offered = upper, self._frozen_paths(planned)
        return self._plans(*self._offered, self._hold_files(upper))

    def commit(self, told: Sequence[Told], *, goes_on: bool) -> None:
        """Record the commits of all shards in one entry of the recovery log.

        If `goes_on`, the same entry plans the offered transaction.
        """
        self._begin("acknowledge")
        self._replaced = frozenset()
        self._status.commit(told, self._log.planned or 0)
        following, frozen = self._offered if goes_on and self._offered else (None, frozenset())
        upper, shards = self._log.planned or 0, [each.shard for each in told]
        written = [
            path
            for path in self._paths()
            if path not in self._log.frozen
            and all(_frontier(each.checkpoint, path) >= upper for each in shards)
        ]
        self._write(self._log.commit(shards, planned=following, frozen=frozen, written=written))
        if goes_on:
            hit(Failpoint.PLAN_DONE)
        self._begun_ms = self._clock.boot_ms()

    def settled(self, acknowledged_ms: int) -> None:
        """Record that all shards have acknowledged the commit, and advance the hold."""
        self._begin("store")
        self._status.settle(acknowledged_ms)
        self._look()
        self._write(self._log.settle())
        self._hold()
        if len(self._files) > 1:
            self._files.pop(0).close()

    def _hold_files(self, upper: int) -> Mapping[str, Holding]:
        """Return the collections, and keep their files until the commit is acknowledged."""
        files = ExitStack()
        held = files.enter_context(self._lake.reading(self._needed(), upper))
        self._files.append(files)
        return held

    def _plans(
        self, upper: int, frozen: Collection[str], held: Mapping[str, Holding]
    ) -> list[ShardPlan]:
        session = f"{self._chance.getrandbits(64):016x}"
        bindings = tuple(
            BindingPlan(
                held[section.collection].bound(
                    self._path(number),
                    section.backfill,
                    self._built.columns(number),
                    unknown=self._path(number) in self._log.unbound,
                    truncates=self._built.empties[number] and self._truncates,
                    layout=self._built.layout_ids[number],
                    continued=self._continued[number],
                    frozen=self._path(number) in frozen,
                ),
                held[section.collection].url,
                held[section.collection].state,
                self._built.described[number][1],
                deletes=self._built.deletes[number],
                empties=self._built.empties[number],
            )
            for number, section in enumerate(self._section.bindings)
        )
        return [
            ShardPlan(
                self._client.state.location,
                self._built.spec,
                self._built.version,
                each,
                bindings,
                upper,
                self._address,
                self._security,
                session,
            )
            for each in self._log.shards
        ]

    @property
    def _truncates(self) -> bool:
        """True if transactions may truncate: one shard runs, and the file requests one."""
        return len(self._log.shards) == self._section.shards == 1

    # Progress.

    def _paths(self) -> list[str]:
        return [self._path(number) for number in range(len(self._section.bindings))]

    def _path(self, number: int) -> str:
        return path_text(self._built.spec.bindings[number].resource_path)

    def _frontiers(self, number: int, *, settled: bool = False) -> list[int]:
        """Return the frontier of each shard in a binding.

        With `settled`, it is the acknowledged frontier. Otherwise it is 0 if all rows are to be
        stored again.
        """
        path, backfill = self._path(number), self._section.bindings[number].backfill
        if settled:
            return [_frontier(each.settled, path) for each in self._log.shards]
        if path in self._log.unbound:
            return [0]
        layout = self._built.layout_ids[number]
        # Earlier releases recorded no layout: their id is empty.
        held = {"", layout, *self._continued[number]} if layout else None
        return [_frontier(each.checkpoint, path, backfill, held) for each in self._log.shards]

    def _committed(self) -> int:
        """Return the upper of the last committed transaction."""
        return max(
            _frontier(each.checkpoint, path) for each in self._log.shards for path in self._paths()
        )

    def _reached(self) -> int:
        """Return the lowest frontier of all shards in all bindings that are not frozen.

        If all bindings are frozen, return the upper of the last committed transaction.
        """
        frozen = self.ready().frozen
        return min(
            (
                min(self._frontiers(number))
                for number, section in enumerate(self._section.bindings)
                if section.collection not in frozen
            ),
            default=self._committed(),
        )

    @property
    def _leaves_behind(self) -> bool:
        return self._section.on_error == "leave_behind"

    def ready(self, committed: int = 0) -> Ready:
        """Return the limits of the next transaction.

        With `committed`, assume that the planned transaction is committed up to that upper.
        """
        frontiers: dict[str, int] = {}
        for number, section in enumerate(self._section.bindings):
            path, name = self._path(number), section.collection
            # SUBTLE: ignore the layout. A frozen binding with a changed layout waits for the end
            # of the error. Below the error its rows still have the old layout.
            frontier = min(
                0
                if path in self._log.unbound
                else _frontier(each.checkpoint, path, section.backfill)
                for each in self._log.shards
            )
            if path not in self._log.frozen:
                frontier = max(frontier, committed)
            frontiers[name] = min(frontier, frontiers.get(name, frontier))
        return self._lake.ready(frontiers, self._incompatible, leave_behind=self._leaves_behind)

    def _frozen_paths(self, committed: int = 0) -> frozenset[str]:
        """Return the resources that the next transaction leaves out; see `ready`."""
        frozen = self.ready(committed).frozen
        return frozenset(
            self._path(number)
            for number, section in enumerate(self._section.bindings)
            if section.collection in frozen
        )

    def _upper_after(self, reached: int) -> int | None:
        """Return the upper of the next transaction; None if no collection has advanced."""
        ready = self.ready(self._log.planned or 0)
        if ready.upper <= reached:
            return None
        names = {each.collection for each in self._section.bindings} - ready.frozen
        states = [self._lake.state(name) for name in sorted(names)]
        if reached:
            # A binding that resumes reaches the frontier of the others in one transaction.
            reached = max(reached, min(self._committed(), ready.upper))
        return upper_within(states, reached, ready.upper, self._section.size)

    def _look(self) -> None:
        """Update the status, and log the start and the end of errors of collections."""
        ready, reached = self.ready(), self._reached()
        stopped = self._stopping_error() if self._log.planned is None else None
        before = dict(self._status.degraded), self._status.stopped
        self._status.look(ready, reached, stopped, leaves_behind=self._leaves_behind)
        known, was_stopped = before
        for name, span in self._status.degraded.items():
            if known.get(name) != span:
                log.warning(
                    "materialization degraded",
                    extra=fields(
                        materialization=self.name,
                        collection=name,
                        time=span.lower,
                        error=span.error.message,
                        hint=span.error.hint,
                    ),
                )
        for name in known.keys() - self._status.degraded.keys():
            log.info("binding resumes", extra=fields(materialization=self.name, collection=name))
        if stopped is not None and str(stopped) != was_stopped:
            log.error(
                "materialization stopped",
                extra=fields(materialization=self.name, error=str(stopped), hint=stopped.hint),
            )

    def _stopping_error(self) -> "StoppedByError | None":
        """Return the error that stops the materialization now; None with `leave_behind`."""
        ready, reached = self.ready(), self._reached()
        for name, span in ready.errored if not self._leaves_behind else ():
            if span.lower <= reached or not ready.upper:
                stored = span.error
                return StoppedByError(
                    f'materialization "{self.name}" has stopped at {describe_time(span.lower)}: '
                    f'collection "{name}" is in error: {stored.message}',
                    detail=stored.detail,
                    hint=f"{stored.hint} The materialization resumes when the error ends. To "
                    "continue without this collection, set on_error: leave_behind.".strip(),
                )
        return None

    def _behind(self) -> bool:
        return self.ready().upper - self._reached() > 2 * self._pace_ms

    # State and holds.

    def _write(self, known: Log) -> None:
        gone = {f"shard {each.key_range}": None for each in self._log.shards}
        self._memory.put({**gone, **notes_of(known), STATUS: self.status()})
        self._log = known

    def _note_status(self) -> None:
        """Store the status if it has changed. Other processes read it there."""
        told = self.status()
        if told != self._memory.get(STATUS):
            self._memory.put({STATUS: told})

    def _hold(self) -> None:
        """Hold all updates that must be read again after a crash at this time."""
        self._lake.hold(self._needed())

    def _needed(self) -> Mapping[str, int]:
        """Return, for each collection, the earliest time that is still needed."""
        sinces: dict[str, int] = {}
        for number, section in enumerate(self._section.bindings):
            name = section.collection
            least = min(self._frontiers(number, settled=True)) - 1
            least = max(least, self._lake.state(name, max(least, 0)).since)
            sinces[name] = min(least, sinces.get(name, least))
        return sinces


def _frontier(
    checkpoint: Checkpoint | None,
    path: str,
    backfill: int = 0,
    layouts: Collection[str] | None = None,
) -> int:
    """Return the frontier of a resource, or 0 if all of its rows are to be stored again.

    All rows are stored again if the stored backfill is below `backfill`, or if the stored layout
    is not in `layouts`.
    """
    reached = checkpoint.bindings.get(path) if checkpoint is not None else None
    if reached is None or reached.backfill < backfill:
        return 0
    return 0 if layouts is not None and reached.layout not in layouts else reached.frontier


class StoppedByError(DefiniteError):
    """A bound collection is in error, and `on_error: stop` applies."""


class _NotMade(Exception):
    """A bound collection is not created yet."""
