"""The loop of one materialization: plan an interval, transact, commit, let go.

    uppers ─► plan ─► a job: a task for each shard ─► one entry ─► acknowledged ─► hold moves

The interval is in the recovery log before anything is stored, and after any crash that
very interval is finished first. All shards commit in one entry. History is held at the
least that every shard has acknowledged, so whatever must be read again can be.
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
"""How often it is looked whether collections have gone on."""

WATCH_S: Final = 0.2
"""Longest wait between two checks of the duration of a step, and of the stop event."""


class Jobs(Protocol):
    """What runs a task for each shard, all at the same time."""

    def run(self, plans: Sequence[ShardPlan], commits: Commits) -> None:
        """Run them to the end of the last transaction that is offered."""
        ...

    def cancel(self, materialization: str) -> None:
        """Cancel what `run` does for the recovery log of that id, so that it raises."""
        ...


class Materializing:
    """One materialization, kept in step with its collections."""

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
        """`sources` are those whose collections may be made later than this begins.

        With `allow_drop` a backfill also removes rows that this materialization did not write.
        After `process_stop` is set, the connector is not waited for without limit.
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
        """Of the transaction that is under way, and of the one that is offered."""

        self._offered: tuple[int, frozenset[str]] | None = None
        """The upper of the transaction that may follow, and the resources that it leaves out."""

        self._incompatible: dict[str, ErrorSpan] = {}
        """Replaced collections that a binding cannot store, from the frontier of their bindings
        on. They are frozen until this process ends: what helps is a start with --allow-drop or
        with another file."""

        self._rejected: dict[str, IncompatibleCollection] = {}
        """The errors of these collections."""

        self._begun_ms = 0
        self._goal: int | None = None
        self._stop = threading.Event()
        self._status = Status([each.collection for each in section.bindings], self._clock.now_ms())

    def status(self) -> Mapping[str, Any]:
        """For people."""
        return self._status.told()

    @property
    def version(self) -> str:
        """Of the specification that is applied."""
        return self._built.version

    def run(self, stop: threading.Event, *, once: bool) -> None:
        """Follow the collections until `stop` is set; with `once`, to where they are now.

        Raises:
            PenstockError: what a person must see to.
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
                    # The thread that waits reports what is wrong with the store.
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
        """What the collections are as of `upper`, or now."""
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
        """Return the time as of which a collection is bound; None for now."""
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
        """Validate and apply the collections as of `upper`, or now."""
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
                # SUBTLE: before Apply creates them. After a crash in between they exist, and the
                # checkpoint is still that of the ones that are lost.
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
        """Begin `step`; name the materialization and the step in a rejection, which is permanent.

        Errors of later steps, which begin within, are raised as they are.
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
        """Raise ForeignRows if a replacement would remove rows of somebody else."""
        replaced = replaced_bindings(self._section, self._built, self._log, predecessors)
        for number, reached in replaced.items():
            rows = self._built.answers[number].rows
            written = self._rows_written(number, reached.frontier, reached.collection)
            if written is None or rows <= written:
                continue
            planned = self._log.planned
            if planned is not None and rows == self._rows_written(number, planned):
                continue  # The planned transaction was committed, and the answer was lost.
            raise ForeignRows(
                self._path(number),
                reached,
                self._section.bindings[number],
                rows=rows,
                written=written,
            )

    def _rows_written(self, number: int, frontier: int, collection: str = "") -> int | None:
        """Return how many rows of ours a resource holds at a frontier; None if not known.

        The rows are those of the collection of that id, or of the one that has the name then.
        """
        if not self._built.deletes[number]:
            return None  # Deleted rows stay there, and delta updates add a row for each change.
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
                # What was staged by an earlier self is applied, though nothing else comes.
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
        """Change how keys are shared out, at one common frontier; whether that took a step.

        From several shards to several it goes by way of one. Else a range would cut those
        of before in two, and what connectors inherit then is a checkpoint of long ago.
        """
        ranges = list(split_evenly(self._section.shards))
        now = [each.key_range for each in self._log.shards]
        if now == ranges:
            return False
        reached = self._reached()
        upper = self._log.planned or self._upper_after(reached) or reached
        # Resources that several shards cannot truncate are replaced by the one that follows.
        left_out = self._log.unbound.intersection(self._paths()).union(
            check_shards(self._section, self._built, self._log, self._predecessors(upper or None)),
            self._truncated_by_shards(upper),
        )
        # Every shard is opened as it was, and what it has committed is acknowledged.
        if upper and not self._transact(upper, goes_on=False, left_out=left_out):
            return True
        if self._log.planned is None:
            one = [WHOLE]
            shared = ranges if one in (now, ranges) else one
            equal = [each for each in self._paths() if each not in left_out]
            self._write(self._log.share_out(shared, equal))
        return True

    def _truncated_by_shards(self, upper: int) -> frozenset[str]:
        """Return the resources that several shards would have to truncate, and cannot.

        Raises:
            SeveralShards: there is such a resource, and the file does not ask for one shard.
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
                    with suppress(UsageError):  # The shard reports it.
                        opened = plan.log.checkpoint or NOTHING
                        if needs_truncation(binding, interval_of(binding.bound, opened, upper)):
                            found.add(binding.bound.path)
        if found and self._section.shards > 1:
            raise SeveralShards(self.name, ".".join(json.loads(min(found))))
        return frozenset(found)

    def _transact(
        self, upper: int, *, goes_on: bool = True, left_out: frozenset[str] = frozenset()
    ) -> bool:
        """Run the transaction up to `upper`, without the resources that are `left_out`.

        Returns whether it was run. If not, a resource is found to be left out, too.
        """
        self._status.phase = "storing"
        described = self._described(upper)
        frozen = self._frozen_paths() if self._log.planned is None else self._log.frozen
        replaced = {each for each in self._replaced_by(upper) if self._path(each) not in frozen}
        if described != self._built.described or not replaced <= self._replaced:
            # Another collection may have the name, with the same columns.
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
        """Cancel the job of the block if it runs longer than a third of the stop deadline.

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
            # SUBTLE: more than once. What a job begins after the first time is not cancelled.
            while not ended.is_set():
                self._jobs.cancel(self._client.state.location)
                ended.wait(WATCH_S)

        threading.Thread(target=watch, name=f"stop of {self.name}", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _written_anew(self, backfills: Mapping[str, int]) -> bool:
        """Whether the file asks for that, of all resources that hold these backfills."""
        return all(
            backfills[path] < section.backfill
            for number, section in enumerate(self._section.bindings)
            if (path := self._path(number)) in backfills
        )

    # What the shards of a job say: see `Commits`.

    def opened(self) -> None:
        """The streams of all shards are open."""
        self._begin("store")

    def offer(self) -> Sequence[ShardPlan] | None:
        """What may follow the transaction that is being committed."""
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
            return None  # It is checked first whose rows would be removed, and by which shards.
        if not self._log.unbound.isdisjoint(self._paths()):
            return None  # What they hold is known once this one is committed.
        self._offered = upper, self._frozen_paths(planned)
        return self._plans(*self._offered, self._hold_files(upper))

    def commit(self, told: Sequence[Told], *, goes_on: bool) -> None:
        """All shards have committed."""
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
        """All shards have acknowledged what was committed."""
        self._begin("store")
        self._status.settle(acknowledged_ms)
        self._look()
        self._write(self._log.settle())
        self._hold()
        if len(self._files) > 1:
            self._files.pop(0).close()

    def _hold_files(self, upper: int) -> Mapping[str, Holding]:
        """Return the collections; their files stay until the transaction is settled."""
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
        """Whether transactions may truncate: with one shard, now and after this start."""
        return len(self._log.shards) == self._section.shards == 1

    # How far it is.

    def _paths(self) -> list[str]:
        return [self._path(number) for number in range(len(self._section.bindings))]

    def _path(self, number: int) -> str:
        return path_text(self._built.spec.bindings[number].resource_path)

    def _frontiers(self, number: int, *, settled: bool = False) -> list[int]:
        """How far each shard has come in a binding."""
        path, backfill = self._path(number), self._section.bindings[number].backfill
        if settled:
            return [_frontier(each.settled, path) for each in self._log.shards]
        if path in self._log.unbound:
            return [0]
        layout = self._built.layout_ids[number]
        # An empty id is of an earlier release, which recorded none.
        held = {"", layout, *self._continued[number]} if layout else None
        return [_frontier(each.checkpoint, path, backfill, held) for each in self._log.shards]

    def _committed(self) -> int:
        """The upper of the last transaction."""
        return max(
            _frontier(each.checkpoint, path) for each in self._log.shards for path in self._paths()
        )

    def _reached(self) -> int:
        """Return how far all shards have come in all bindings that are not frozen.

        If all of them are frozen, return how far the last one has come.
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
        """Return how far the next transaction may go.

        With `committed`, it is the one after the planned transaction, which ends there.
        """
        frontiers: dict[str, int] = {}
        for number, section in enumerate(self._section.bindings):
            path, name = self._path(number), section.collection
            # SUBTLE: without the layout. A frozen binding whose layout changes waits for the end
            # of the error; below it the rows still have the old one.
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
            # A binding that resumes goes to where the others are, in one transaction.
            reached = max(reached, min(self._committed(), ready.upper))
        return upper_within(states, reached, ready.upper, self._section.size)

    def _look(self) -> None:
        """Update the status, and log when an error of a collection begins or ends."""
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
        """Return the error of a collection that `on_error: stop` stops at here."""
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

    # What is kept.

    def _write(self, known: Log) -> None:
        gone = {f"shard {each.key_range}": None for each in self._log.shards}
        self._memory.put({**gone, **notes_of(known), STATUS: self.status()})
        self._log = known

    def _note_status(self) -> None:
        """Let others see how it is, if that has changed."""
        told = self.status()
        if told != self._memory.get(STATUS):
            self._memory.put({STATUS: told})

    def _hold(self) -> None:
        """Keep what must be read again if everything crashed now."""
        self._lake.hold(self._needed())

    def _needed(self) -> Mapping[str, int]:
        """From which time on each collection is needed."""
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

    That is so below `backfill`, and with a layout that is none of `layouts`.
    """
    reached = checkpoint.bindings.get(path) if checkpoint is not None else None
    if reached is None or reached.backfill < backfill:
        return 0
    return 0 if layouts is not None and reached.layout not in layouts else reached.frontier


class StoppedByError(DefiniteError):
    """A collection that is bound is in error."""


class _NotMade(Exception):
    """A collection is yet to be made."""
