"""Loop of one materialization: plan an interval, transact, commit, advance the hold.

    uppers ─► plan ─► a job: a task for each shard ─► one entry ─► acknowledged ─► hold advances

The recovery log records the interval before the first Store. After a crash, the same interval is
completed first. The commits of all shards are one entry of the recovery log. The hold stays at the
lowest frontier that all shards have acknowledged, so any interval that must be read again is
readable.
"""

import json
import random
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from penstock import persist
from penstock.clock import Clock
from penstock.data.collection_name import source_of
from penstock.errors import PenstockError, TransientError, UsageError
from penstock.failpoints import Failpoint, hit
from penstock.materialize.backfill import (
    Predecessors,
    SeveralShards,
    check_foreign_rows,
    check_recreated,
    check_shards,
    lost_resources,
    replaced_bindings,
    replaced_resources,
    rows_written,
    truncated_resources,
)
from penstock.materialize.binding_kind import BindingPlan, describe_collection
from penstock.materialize.commit_barrier import ShardReport
from penstock.materialize.connector_client import connect
from penstock.materialize.connector_process import resolve_connector
from penstock.materialize.errors import ConnectorRefused
from penstock.materialize.inputs import (
    ClaimedCollection,
    InputCollections,
    Readiness,
    StoppedByError,
    hold_owner,
    stopping_error,
)
from penstock.materialize.intervals import limit_upper
from penstock.materialize.layout import KnownLayouts
from penstock.materialize.recovery_log import (
    Progress,
    RecoveryLog,
    RequestedResource,
    ShardLog,
    from_entries,
    resource_frontier,
    to_entries,
)
from penstock.materialize.runner import Runner, cancel_after_stop
from penstock.materialize.shard import CheckpointMismatch, EndpointAhead, ShardPlan
from penstock.materialize.spec_builder import (
    BuiltSpec,
    DescribedCollection,
    IncompatibleCollection,
    build,
)
from penstock.materialize.status import Status, log_degraded, report_overdue_steps
from penstock.materialize.teardown import encode_applied, load_applied_paths
from penstock.persist.batch import defaults_of
from penstock.persist.errors import CollectionMissing
from penstock.persist.records import ErrorSpan, StoredError
from penstock.persist.state import END, columns_of, schema_as_of
from penstock.persist.state_store import StateStore
from penstock.pipeline import CollectionSection, MaterializationSection
from penstock.protocol.key_range import WHOLE, split_evenly
from penstock.protocol.transport_security import Security
from penstock.supervisor.status import MaterializationStatus
from penstock.telemetry import fields, logger

__all__ = ["MaterializationLoop", "StoppedByError"]

log = logger("materialize")

STATUS: Final = "status"
POLL_MS: Final = 100
"""Interval between two checks for new data in the collections."""


class MaterializationLoop:
    """One materialization, which follows its collections; a `CommitCoordinator` of its jobs."""

    def __init__(
        self,
        name: str,
        section: MaterializationSection,
        client: persist.Client,
        *,
        location: str,
        jobs: Runner,
        tick_ms: int,
        clock: Clock,
        rng: random.Random,
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
            rng: random numbers for session ids.
            collections: sections of the collections in the pipeline file.
            sources: sources whose collections may be created after the start.
            append_only: collections whose rows are never deleted.
            connector_host: address that a built-in connector listens on; None for a Unix socket.
            allow_drop: allow a backfill to remove rows that this materialization did not write,
                and to drop and create resources again.
            process_stop: event after which waits for the connector are bounded.
        """
        self.name = name
        self.step = ""
        """Step in which the last run failed."""

        self._section = section
        self._collections = collections or {}
        self._sources = frozenset(sources)
        self._append_only = frozenset(append_only)
        self._client = client
        self._location = location
        self._jobs = jobs
        self._pace_ms = section.pace if section.pace is not None else tick_ms
        self._clock = clock
        self._rng = rng
        self._connector_host = connector_host
        self._allow_drop = allow_drop
        self._process_stop = process_stop
        self._store = StateStore(client, name)
        self._inputs: InputCollections
        self._address = ""
        self._security = Security()
        self._built: BuiltSpec
        self._continued: Sequence[frozenset[str]] = ()
        """For each binding, ids of earlier layouts that need no rewrite."""

        self._replaced: frozenset[int] = frozenset()
        """Bindings whose replacement by the next transaction was checked for foreign rows."""

        self._log: RecoveryLog
        self._claims: list[ExitStack] = []
        """Claims on files: of the current transaction, then of the next one."""

        self._next: tuple[int, frozenset[str]] | None = None
        """Upper of the planned next transaction, and the resources that it leaves out."""

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
        names = [binding.collection for binding in section.bindings]
        self._status = Status(names, self._clock.now_ms())

    def status(self) -> MaterializationStatus:
        """Return phase, counters, lag and the current wait."""
        return self._status.snapshot()

    @property
    def commits(self) -> int:
        """Return the number of committed transactions."""
        return self._status.transactions

    @property
    def is_resumable(self) -> bool:
        """Return True: the connector was configured, so a run with `once` waits for it."""
        return True

    @property
    def version(self) -> str:
        """Version of the applied specification."""
        return self._built.version

    def run(self, stop: threading.Event, *, once: bool) -> None:
        """Follow the collections until `stop` is set; with `once`, up to their present uppers.

        Raises:
            TransientError: an attempt failed; a later run continues from the recovery log.
            PenstockError: a permanent error, which needs a user to act.
        """
        self._stop = stop
        while not stop.is_set():
            try:
                with ExitStack() as stack:
                    stack.enter_context(
                        report_overdue_steps(
                            self._status,
                            self._clock,
                            self._write_status,
                            materialization=self.name,
                        )
                    )
                    self._start(stack, wait=not once)
                    self._follow(once=once)
                break
            except _CollectionNotCreated as missing:
                self._status.wait(str(missing))
                self._write_status()
                self._clock.wait(stop, self._pace_ms)
            except TransientError as error:
                self._fail("stopped" if stop.is_set() else "retrying", error)
                raise
            except PenstockError as error:
                self._fail("stopped", error)
                raise
        self._status.phase = "stopped"
        self._write_status()

    def _fail(self, phase: str, error: PenstockError) -> None:
        self.step = self._status.step
        self._begin("")
        self._status.phase, self._status.error = phase, str(error)
        self._write_status()

    def _begin(self, step: str) -> None:
        self._status.begin(step, self._clock.now_ms() if step else 0)

    # Start.

    def _start(self, stack: ExitStack, *, wait: bool) -> None:
        names = list(dict.fromkeys(binding.collection for binding in self._section.bindings))
        try:
            self._inputs = InputCollections(
                self._location, names, owner=hold_owner(self.name), stop=self._process_stop
            )
        except CollectionMissing as error:
            if wait and all(source_of(name, self._sources) is not None for name in names):
                raise _CollectionNotCreated(f"its source to make {error.name}") from error
            raise
        stack.callback(self._inputs.close)
        self._begin("start")
        self._address, self._security = resolve_connector(
            stack,
            self._section.connector,
            self._clock,
            self._connector_host,
            stop=self._process_stop,
        )
        stored = from_entries({name: self._store.get(name) for name in self._store.names()})
        if stored is None:
            ranges = split_evenly(self._section.shards)
            stored = RecoveryLog("", tuple(ShardLog(key_range) for key_range in ranges))
        self._log = stored
        self._incompatible, self._rejected = {}, {}
        while True:
            try:
                self._build(self._describe(stored.planned), stored.planned)
            except IncompatibleCollection as error:
                self._freeze(error)
            else:
                return

    def _describe(self, upper: int | None) -> list[DescribedCollection]:
        """Return the spec and kind of each binding's collection as of `upper`, or now."""
        described = []
        for binding in self._section.bindings:
            name = binding.collection
            as_of = self._as_of(name, upper)
            state = self._inputs.state(name, as_of)
            schema = state.schemas[-1] if as_of is None else schema_as_of(state, as_of)
            section = self._collections.get(name)
            defaults = defaults_of(state.schemas)
            described.append(
                describe_collection(name, columns_of(schema), schema.key, section, defaults)
            )
        return described

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
        frontier = self._freeze_frontier(error)
        if frontier is None or name in self._incompatible:
            raise error
        if self._inputs.state(name, frontier - 1).id == self._inputs.state(name).id:
            raise error
        self._incompatible[name] = ErrorSpan(frontier, StoredError.of(error))
        self._rejected[name] = error

    def _freeze_frontier(self, error: IncompatibleCollection) -> int | None:
        """Return the freeze frontier of the bindings of a replaced collection.

        Return None if they cannot freeze: errors stop all bindings, a planned transaction includes
        one of them, or a resource holds no rows.
        """
        planned = self._log.planned is not None
        if not self._leaves_behind or (planned and not self._log.frozen.issuperset(error.paths)):
            return None
        backfills = [
            binding.backfill
            for binding in self._section.bindings
            if binding.collection == error.collection
        ]
        frontier = min(
            resource_frontier(shard.checkpoint, path, backfill)
            for path, backfill in zip(error.paths, backfills, strict=True)
            for shard in self._log.shards
        )
        return frontier or None

    def _build(self, described: list[DescribedCollection], upper: int | None) -> None:
        """Validate and apply the specification for the collections as of `upper`, or now."""
        predecessors = self._predecessors(upper)
        with connect(self._address, self._security, stop=self._process_stop) as connection:
            with self._setup("validate"):
                built = build(
                    self.name,
                    self._section,
                    described,
                    connection,
                    append_only=self._append_only,
                    is_replaced=replaced_resources(self._section, self._log, predecessors),
                )
            self._built = built
            self._status.build(built)
            applied = load_applied_paths(self._store)
            lost = lost_resources(self._section, built, self._log, predecessors, applied)
            check_shards(self._section, built, self._log, predecessors)
            if not self._allow_drop:
                check_recreated(self.name, self._section, built)
                check_foreign_rows(
                    self._section, built, self._log, predecessors, self._count_rows_written
                )
            self._replaced = self._replaced_by(upper)
            if lost:
                # SUBTLE: record this before Apply creates the resources. After a crash in between,
                # empty resources exist, and the checkpoint still covers the lost rows.
                self._write(self._log.mark_unknown(lost))
            present = dict(zip(built.paths, built.layouts, strict=True))
            layouts = KnownLayouts.load(self._store).with_layouts(present)
            self._continued = [
                layouts.continued(path, present[path], filled)
                for path, filled in zip(built.paths, built.filled, strict=True)
            ]
            self._store.put({**encode_applied(built), **layouts.to_state()})
            with self._setup("apply"):
                built.apply(connection)
            hit(Failpoint.APPLY_DONE)
        self._write(self._log.bind(built.version, built.paths))

    def _predecessors(self, upper: int | None) -> Predecessors:
        return lambda name: self._inputs.predecessors(name, self._as_of(name, upper))

    def _replaced_by(self, upper: int | None) -> frozenset[int]:
        """Return the bindings whose resources a transaction up to `upper` truncates."""
        is_replaced = replaced_resources(self._section, self._log, self._predecessors(upper))
        paths = [binding.resource_path for binding in self._built.spec.bindings]
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

    def _count_rows_written(self, number: int, frontier: int, collection: str) -> int | None:
        """Return the number of rows that this materialization wrote, at a frontier.

        The result is None if the number is not known, or if the name does not refer to the
        collection with the id `collection` at that time. An empty id matches each collection.
        """
        if not self._built.deletes[number]:
            return None  # Deleted rows stay, and delta updates add a row for each change.
        name, (_, kind) = self._section.bindings[number].collection, self._built.described[number]
        with self._inputs.claim({name: 0}, frontier) as claimed:
            if collection not in ("", claimed[name].id):
                return None
            return rows_written(claimed[name], kind, frontier)

    # Transactions.

    def _follow(self, *, once: bool) -> None:
        self._goal = None
        self._hold()
        while not self._stop.is_set():
            ready = self.ready()
            if once and self._goal is None and (ready.target or not ready.behind):
                self._goal = ready.target
            self._update_status()
            if self._rebalance():
                continue
            upper = self._log.planned or self._next_upper(self._reached())
            if upper is None and not self._log.is_acknowledged:
                # Acknowledge the last commit even without new data: an earlier process may have
                # left staged documents that the connector has not applied.
                upper = self._progress().committed()
            if upper is not None:
                self._transact(upper)
            if once and self._is_complete(ready, upper):
                return
            self._write_status()
            if not self._is_behind():
                self._clock.wait(self._stop, self._pace_ms if upper else POLL_MS)

    def _is_complete(self, ready: Readiness, upper: int | None) -> bool:
        """Return whether a run with `once` has reached its goal, after a transaction to `upper`.

        Raises:
            StoppedByError: a collection in error stops the materialization.
            IncompatibleCollection: a binding cannot store its replaced collection.
            UsageError: the collections have no common upper, so there is no goal.
        """
        if self._log.planned is None and (upper is None or self._reached() >= (self._goal or 0)):
            stopped = self._stopping_error()
            if stopped is not None:
                raise stopped
            if self._goal is not None:
                for error in self._rejected.values():
                    raise error
                return True
        if self._goal is None and upper is None:
            raise UsageError(
                f'materialization "{self.name}" cannot complete with --once: it waits for '
                f"{ready.behind}",
                hint="Ingest the missing data first, or run without --once.",
            )
        return False

    def _rebalance(self) -> bool:
        """Change the key ranges at one common frontier; return whether that took a step.

        A change from several shards to several shards passes through one shard. Otherwise a new
        range could split a previous one, and its connector would inherit an old checkpoint.
        """
        ranges = list(split_evenly(self._section.shards))
        present = [shard.key_range for shard in self._log.shards]
        if present == ranges:
            return False
        reached = self._reached()
        upper = self._log.planned or self._next_upper(reached) or reached
        # Several shards cannot truncate these resources. The single shard replaces them later.
        left_out = self._log.unknown.intersection(self._built.paths).union(
            check_shards(self._section, self._built, self._log, self._predecessors(upper or None)),
            self._truncated_by_shards(upper),
        )
        # Open each shard with its present range. This acknowledges its last commit.
        if upper and not self._transact(upper, continues=False, left_out=left_out):
            return True
        if self._log.planned is None:
            one = [WHOLE]
            following = ranges if one in (present, ranges) else one
            equal = [path for path in self._built.paths if path not in left_out]
            self._write(self._log.rebalance(following, equal))
        return True

    def _truncated_by_shards(self, upper: int) -> frozenset[str]:
        """Return the resources that need a truncation, which several shards cannot do.

        Raises:
            SeveralShards: there is such a resource, and the file requests several shards.
        """
        if len(self._log.shards) == 1 or not upper:
            return frozenset()
        frozen = self._frozen_paths() if self._log.planned is None else self._log.frozen
        with self._inputs.claim(self._sinces(), upper) as claimed:
            bindings = self._plan_bindings(frozen, claimed)
            paths = truncated_resources(self._built, self._log, bindings, upper)
        if paths and self._section.shards > 1:
            raise SeveralShards(self.name, ".".join(json.loads(min(paths))))
        return paths

    def _transact(
        self, upper: int, *, continues: bool = True, left_out: frozenset[str] = frozenset()
    ) -> bool:
        """Run the transaction up to `upper`, without the resources in `left_out`.

        If `continues`, the job may run further transactions. Return whether the transaction was
        run. If not, one more resource must be left out; try again.
        """
        self._status.phase = "storing"
        if not self._rebuild(upper):
            return False
        if self._log.planned is None:
            check_shards(self._section, self._built, self._log, self._predecessors(upper))
            if not self._truncated_by_shards(upper) <= left_out:
                return False
            self._write(self._log.plan(upper, self._frozen_paths() | left_out))
            hit(Failpoint.PLAN_DONE)
        elif not left_out <= self._log.frozen:
            self._write(self._log.plan(upper, self._log.frozen | left_out))
        self._begun_ms = self._clock.boot_ms() if continues else END
        try:
            plans = self._plan_shards(upper, self._log.frozen)
            with self._setup("open"), self._cancel_after_stop():
                self._jobs.run(plans, self)
        except CheckpointMismatch as mismatch:
            self._log = self._log.adopt_checkpoint(mismatch.key_range, mismatch.checkpoint)
        except EndpointAhead as ahead:
            if not self._raises_backfills(ahead.backfills):
                raise
            self._write(self._log.mark_unknown(ahead.backfills))
        finally:
            for claim in self._claims:
                claim.close()
            self._claims = []
        return True

    def _rebuild(self, upper: int) -> bool:
        """Build the specification again if a collection has changed as of `upper`.

        Return False if a replaced collection was frozen instead.
        """
        described = self._describe(upper)
        frozen = self._frozen_paths() if self._log.planned is None else self._log.frozen
        replaced = {
            number for number in self._replaced_by(upper) if self._built.path(number) not in frozen
        }
        # A name may refer to another collection with the same columns.
        if described == self._built.described and replaced <= self._replaced:
            return True
        before = self._built
        try:
            self._build(described, upper)
        except IncompatibleCollection as error:
            self._freeze(error)
            self._built = before
            return False
        return True

    @contextmanager
    def _cancel_after_stop(self) -> Iterator[None]:
        def cancel() -> None:
            self._jobs.cancel(self._client.state.location)

        with cancel_after_stop(self._process_stop, cancel, materialization=self.name):
            yield

    def _raises_backfills(self, backfills: Mapping[str, int]) -> bool:
        """Return whether the file raises the backfill of each resource in `backfills`."""
        return all(
            backfills[path] < binding.backfill
            for path, binding in zip(self._built.paths, self._section.bindings, strict=True)
            if path in backfills
        )

    # Callbacks of the shards of a job: see `CommitCoordinator`.

    def opened(self) -> None:
        """Record that the streams of all shards are open."""
        self._begin("store")

    def plan_next(self) -> Sequence[ShardPlan] | None:
        """Return plans for the transaction after the current one; None if the job shall end.

        The shards call it while they commit the current transaction.
        """
        self._begin("commit")
        self._next = None
        planned = self._log.planned
        if planned is None or self._stop.is_set():
            return None
        if self._goal is not None and planned >= self._goal:
            return None
        if self._clock.boot_ms() - self._begun_ms < self._pace_ms:
            return None
        upper = self._next_upper(planned)
        if upper is None or self._describe(upper) != self._built.described:
            return None
        predecessors = self._predecessors(upper)
        if replaced_bindings(self._section, self._built, self._log, predecessors):
            return None  # `_build` must first check for foreign rows and for several shards.
        if not self._log.unknown.isdisjoint(self._built.paths):
            return None  # Their contents are known only after the current commit.
        self._next = upper, self._frozen_paths(planned)
        return self._plan_shards(*self._next)

    def commit(self, reports: Sequence[ShardReport], *, continues: bool) -> None:
        """Record the commits of all shards in one entry of the recovery log.

        If `continues`, the same entry plans the next transaction.
        """
        self._begin("acknowledge")
        self._replaced = frozenset()
        upper = self._log.planned or 0
        self._status.commit(reports, upper)
        following, frozen = self._next if continues and self._next else (None, frozenset())
        shards = [report.shard for report in reports]
        written = [
            path
            for path in self._built.paths
            if path not in self._log.frozen
            and all(resource_frontier(shard.checkpoint, path) >= upper for shard in shards)
        ]
        self._write(self._log.commit(shards, planned=following, frozen=frozen, written=written))
        if continues:
            hit(Failpoint.PLAN_DONE)
        self._begun_ms = self._clock.boot_ms()

    def acknowledged(self, acknowledged_ms: int) -> None:
        """Record that all shards have acknowledged the commit, and advance the hold."""
        self._begin("store")
        self._status.acknowledge(acknowledged_ms)
        self._update_status()
        self._write(self._log.acknowledge())
        self._hold()
        if len(self._claims) > 1:
            self._claims.pop(0).close()

    def _plan_shards(self, upper: int, frozen: Collection[str]) -> list[ShardPlan]:
        """Return the plans of all shards, and retain their files until the acknowledgement."""
        claim = ExitStack()
        claimed = claim.enter_context(self._inputs.claim(self._sinces(), upper))
        self._claims.append(claim)
        bindings = self._plan_bindings(frozen, claimed)
        session = f"{self._rng.getrandbits(64):016x}"
        return [
            ShardPlan(
                self._client.state.location,
                self._built.spec,
                self._built.version,
                shard,
                bindings,
                upper,
                self._address,
                self._security,
                session,
            )
            for shard in self._log.shards
        ]

    def _plan_bindings(
        self, frozen: Collection[str], claimed: Mapping[str, ClaimedCollection]
    ) -> tuple[BindingPlan, ...]:
        """Return the inputs of each binding, without the resources in `frozen`."""
        built = self._built
        # A transaction may truncate only if one shard runs, and the file requests one.
        one_shard = len(self._log.shards) == self._section.shards == 1
        plans = []
        for number, binding in enumerate(self._section.bindings):
            path, collection = built.path(number), claimed[binding.collection]
            bound = collection.bind(
                path,
                binding.backfill,
                built.columns(number),
                unknown=path in self._log.unknown,
                truncates=built.empties[number] and one_shard,
                layout=built.layout_ids[number],
                continued=self._continued[number],
                frozen=path in frozen,
            )
            _, kind = built.described[number]
            plans.append(
                BindingPlan(
                    bound,
                    collection.url,
                    collection.state,
                    kind,
                    deletes=built.deletes[number],
                    empties=built.empties[number],
                )
            )
        return tuple(plans)

    # Progress.

    def _progress(self) -> Progress:
        resources = []
        for number, binding in enumerate(self._section.bindings):
            layout = self._built.layout_ids[number]
            # Earlier releases recorded no layout: their id is empty.
            layouts = frozenset({"", layout, *self._continued[number]}) if layout else None
            path = self._built.path(number)
            resources.append(RequestedResource(path, binding.collection, binding.backfill, layouts))
        return Progress(self._log, tuple(resources))

    def ready(self, committed: int = 0) -> Readiness:
        """Return the limits of the next transaction.

        With `committed`, assume that the planned transaction is committed up to that upper.
        """
        return self._inputs.ready(
            self._progress().by_collection(committed),
            self._incompatible,
            leave_behind=self._leaves_behind,
        )

    def _reached(self) -> int:
        """Return the lowest frontier of all shards in all bindings that are not frozen."""
        return self._progress().reached(self.ready().frozen)

    @property
    def _leaves_behind(self) -> bool:
        return self._section.on_error == "leave_behind"

    def _frozen_paths(self, committed: int = 0) -> frozenset[str]:
        """Return the resources that the next transaction leaves out; see `ready`."""
        return self._progress().paths_of(self.ready(committed).frozen)

    def _next_upper(self, reached: int) -> int | None:
        """Return the upper of the next transaction; None if no collection has advanced."""
        ready = self.ready(self._log.planned or 0)
        if ready.upper <= reached:
            return None
        if reached:
            # A binding that resumes reaches the frontier of the others in one transaction.
            reached = max(reached, min(self._progress().committed(), ready.upper))
        names = {binding.collection for binding in self._section.bindings} - ready.frozen
        states = [self._inputs.state(name) for name in sorted(names)]
        return limit_upper(states, reached, ready.upper, self._section.size)

    def _is_behind(self) -> bool:
        return self.ready().upper - self._reached() > 2 * self._pace_ms

    def _update_status(self) -> None:
        """Update the status, and log the start and the end of errors of collections."""
        stopped = self._stopping_error() if self._log.planned is None else None
        degraded, was_stopped = dict(self._status.degraded), self._status.stopped
        self._status.update(
            self.ready(), self._reached(), stopped, leaves_behind=self._leaves_behind
        )
        log_degraded(self.name, degraded, self._status.degraded)
        if stopped is not None and str(stopped) != was_stopped:
            log.error(
                "materialization stopped",
                extra=fields(materialization=self.name, error=str(stopped), hint=stopped.hint),
            )

    def _stopping_error(self) -> StoppedByError | None:
        """Return the error that stops the materialization now; None with `leave_behind`."""
        if self._leaves_behind:
            return None
        return stopping_error(self.name, self.ready(), self._reached())

    # State and holds.

    def _write(self, recovery_log: RecoveryLog) -> None:
        removed = {f"shard {shard.key_range}": None for shard in self._log.shards}
        self._store.put({**removed, **to_entries(recovery_log), STATUS: self.status().to_json()})
        self._log = recovery_log

    def _write_status(self) -> None:
        """Store the status if it has changed. Other processes read it there."""
        status = self.status().to_json()
        if status != self._store.get(STATUS):
            self._store.put({STATUS: status})

    def _hold(self) -> None:
        """Hold all updates that must be read again after a crash at this time."""
        self._inputs.hold(self._sinces())

    def _sinces(self) -> Mapping[str, int]:
        """Return, for each collection, the earliest time that is still needed."""
        sinces: dict[str, int] = {}
        progress = self._progress()
        for resource in progress.resources:
            name = resource.collection
            since = progress.acknowledged(resource) - 1
            since = max(since, self._inputs.state(name, max(since, 0)).since)
            sinces[name] = min(since, sinces.get(name, since))
        return sinces


class _CollectionNotCreated(Exception):
    """A bound collection is not created yet."""
