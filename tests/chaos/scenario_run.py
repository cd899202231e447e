"""Runs a scenario with real processes, and checks the endpoint.

A bank posts, a runtime materializes through the shim, and the shim injects the fault. The
endpoint is read before each message is forwarded; at the end, everything is compared.
"""

import inspect
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import PenstockError
from penstock.materialize.loop import MaterializationLoop
from penstock.materialize.recovery_log import RecoveryLog, from_entries
from penstock.protocol.key_range import KeyRange
from penstock.protocol.messages import Kind
from penstock.servers.postgres import Database
from tests.chaos.actors import Connectors, Runtime, pause, until
from tests.chaos.endpoints import Endpoint
from tests.chaos.invariants import (
    Delivery,
    State,
    Violation,
    check_delivery,
    counted_twice,
    monotonic,
    never_back,
    one_tick,
)
from tests.chaos.scenarios import TRANSACTIONAL, Scenario
from tests.chaos.shim import Shim
from tests.chaos.workload import SUMMED, Bank, Bound
from tests.ingest.proxy import Proxy

SUMS: Final = "collections" in inspect.signature(MaterializationLoop).parameters
"""True if rows of a collection can be reduced."""

PATIENCE_MS: Final = 60_000
"""Time without a commit, an acknowledgement or a restart after which a run has failed."""

SPARK_PATIENCE_MS: Final = 300_000
"""The same on Spark: on a loaded machine, an executor takes minutes to start."""

SUMMED_TWICE: Final = ("conservation", "oracle-agreement")
"""Checks that do not apply to sums in a store without transactions; see `counted_twice`."""

LOOK_MS: Final = 300
DEATHS: Final = 5
"""Number of unexpected ends of a runtime that are tolerated."""


class ScenarioRuntime(Protocol):
    """Runtime of a pipeline that can be killed."""

    defect: str | None
    starts: int

    @property
    def running(self) -> bool: ...
    def start(self, pipeline: Mapping[str, Any]) -> None: ...
    def kill(self) -> None: ...
    def kill_executors(self) -> None: ...
    def stop(self) -> None: ...
    def log_tail(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a scenario run."""

    fired: bool
    violations: tuple[Violation, ...]
    commits: int
    streams: int
    runtimes: int
    observations: int
    """Number of reads of the endpoint."""

    @property
    def names(self) -> set[str]:
        return {each.name for each in self.violations}


def bindings_of(connector: str) -> list[Bound]:
    """Return a binding for each collection, in each mode that the connector supports."""
    modes = {"plain-files": (False,), "push-files": (True,)}.get(connector, (False, True))
    kinds = ("accounts", "log", "balances") if SUMS else ("accounts", "log")
    return [Bound(what, delta) for what in kinds for delta in modes]


def run_scenario(
    scenario: Scenario,
    *,
    defect: str | None = None,
    seed: int = 1,
    database: Database | None = None,
    runtime: ScenarioRuntime | None = None,
) -> Verdict:
    """Run a scenario and return its verdict; `database` is empty, if one is needed.

    Without a `runtime`, tasks are threads of the driver's process.
    """
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        with ScenarioRun(scenario, folder, defect, seed, database, runtime) as scenario_run:
            scenario_run.run()
            return scenario_run.verdict()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class ScenarioRun:
    """One run of a scenario."""

    scenario: Scenario
    folder: Path
    defect: str | None
    seed: int
    database: Database | None
    given: ScenarioRuntime | None
    bounds: list[Bound] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    deaths: int = 0
    observations: int = 0

    def __enter__(self) -> "ScenarioRun":
        self._stack = ExitStack()
        self._writing, self._watching = threading.Lock(), threading.Lock()
        self._reader: persist.Client | None = None
        self._last_check = (-1, 0)
        self._overtaken = False
        self.lake = f"file:{self.folder / 'lake'}"
        self.bank = Bank(f"{self.lake}/bank", random.Random(self.seed))
        self._stack.callback(self.bank.close)
        self.endpoint = self._endpoint()
        self.bounds = bindings_of(self.scenario.connector)
        self.connectors = Connectors(self.scenario.connector, self.folder, self.defect)
        self._stack.callback(self.connectors.close)
        self.runtime: ScenarioRuntime = self.given or Runtime(
            self.folder, moving=self.scenario.moving
        )
        self.runtime.defect, self.runtime.starts = self.defect, 0
        self.shim = Shim(
            f"unix:{self.folder / 's.sock'}",
            self.connectors,
            self.scenario.fault,
            on_fired=self._fired,
            kill_runtime=self.runtime.kill,
            kill_executors=self.runtime.kill_executors,
            watch=self._watch,
            spread=self.scenario.spread,
        )
        self._stack.callback(self.shim.close)
        self._stack.callback(self.runtime.stop)
        self.shards = self.scenario.shards
        self._next_shards = list(self.scenario.then_shards)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # Steps.

    def run(self) -> None:
        scenario = self.scenario
        late = self.bounds[-1] if scenario.late_binding else None
        self._pipeline = self.pipeline(without=late)
        self.step()
        self.runtime.start(self._pipeline)
        self.arrive()
        for number in range(scenario.steps):
            if number == scenario.steps // 2:
                self._turn(late)
            if number == scenario.steps - 1 and self._has_zombie():
                self.shim.resume.set()
                self.shim.zombie_done.wait(PATIENCE_MS / 1_000)
            if self._next_shards and scenario.fault is None:
                self._reshard()
            if number == 1 and scenario.cut_off:
                self._cut_off()
            self.step()
            self.arrive()
            if self.violations:
                break
        if self.scenario.fault is not None and self.scenario.fault.action == "stall":
            self.shim.resume.set()
        self.rest()

    def _turn(self, late: Bound | None) -> None:
        """Restart the runtime after half of the steps, if the scenario requires it."""
        scenario = self.scenario
        if scenario.restarts or late is not None:
            self.runtime.stop()
            self._pipeline = self.pipeline()
            self.runtime.start(self._pipeline)

    def _reshard(self) -> None:
        """Restart the runtime with the next number of shards."""
        self.runtime.stop()
        self.shards = self._next_shards.pop(0)
        self._pipeline = self.pipeline()
        self.runtime.start(self._pipeline)

    def _has_zombie(self) -> bool:
        fault = self.scenario.fault
        return fault is not None and fault.action == "zombie" and bool(self.shim.fired)

    def step(self) -> None:
        with self._writing:
            self.bank.step()

    def arrive(self) -> None:
        """Wait until all written changes are committed; restart a runtime that ended."""

        def arrived() -> bool:
            fault = self.scenario.fault
            stalled = self.shim.fired and fault is not None and fault.action == "stall"
            if stalled and not self._overtaken:
                self._overtaken = True
                self.runtime.start(self._pipeline)
            elif not self.runtime.running:
                self.deaths += 1
                if self.scenario.compacts:
                    self.bank.outlast_leases()
                if self._next_shards:
                    self._reshard()
                else:
                    self.runtime.start(self._pipeline)
            return self.deaths > DEATHS or (self._may_have_arrived() and self._committed())

        def activity() -> tuple[int, int, int]:
            return len(self.shim.commits), self.shim.acknowledged, self.deaths

        patience_ms = PATIENCE_MS if self.given is None else SPARK_PATIENCE_MS
        in_time = until(arrived, patience_ms=patience_ms, pause_ms=30, activity=activity)
        if not in_time or self.deaths > DEATHS:
            self.violations.append(Violation("progress", self.runtime.log_tail()))

    def rest(self) -> None:
        """Stop the runtime and read the endpoint."""
        if not self.violations:
            self.violations += self._waiting()
        self.runtime.stop()
        self.states.append(self.endpoint.read(self.bounds))

    def _waiting(self) -> Iterator[Violation]:
        """Yield a violation if committed files stay staged while the source is idle."""
        if not until(lambda: not self._unapplied(), patience_ms=10_000):
            yield Violation("applied-when-idle", f"{len(self._unapplied())} files are staged")

    def _unapplied(self) -> list[str]:
        """Return the staged files that the recovery log names.

        SUBTLE: a zombie that gets Store and StartCommit after its successor was opened leaves
        files that the log does not name. Their documents are the successor's to store, and the
        next Open of the range removes the files.
        """
        staged, known = self.endpoint.staged(), self.log()
        if not staged or known is None:
            return staged
        named = " ".join(shard.state_json for shard in known.shards)
        return [path for path in staged if Path(path).name in named]

    def _may_have_arrived(self) -> bool:
        """Return whether to check the log again: an acknowledgement arrived, or time passed."""
        now = (self.shim.acknowledged, SYSTEM_CLOCK.boot_ms() // LOOK_MS)
        changed, self._last_check = now != self._last_check, now
        return changed

    def _committed(self) -> bool:
        """Return whether the recovery log has acknowledged all written changes."""
        known = self.log()
        if known is None or not known.is_acknowledged or len(known.shards) != self.shards:
            return False
        upper = self.bank.upper
        return all(
            each.checkpoint is not None
            and len(each.checkpoint.bindings) >= len(self._bound)
            and all(held.frontier >= upper for held in each.checkpoint.bindings.values())
            for each in known.shards
        )

    def log(self) -> RecoveryLog | None:
        """Return the recovery log, or None if it cannot be read yet."""
        if not (self.folder / "lake" / "m").exists():
            return None
        try:
            if self._reader is None:
                self._reader = self._stack.enter_context(persist.open(f"{self.lake}/m"))
            state = self._reader.collection("m/state")
            if not state.upper:
                return None
            values = {update.data[0]: update.data[1] for update in state.snapshot(state.upper - 1)}
        except PenstockError:
            return None  # Does not exist yet, or was compacted.
        return from_entries(values)

    # Setup.

    def _endpoint(self) -> Endpoint:
        proxy = None
        if self.database is not None:
            proxy = self._stack.enter_context(Proxy(self.database.server.port))
        return Endpoint(self.scenario.connector, self.folder, self.database, proxy)

    def pipeline(self, *, without: Bound | None = None) -> Mapping[str, Any]:
        bound = [each for each in self.bounds if each != without]
        self._bound = bound
        materialization = {
            "connector": {"grpc": {"address": self.shim.address}},
            "endpoint": dict(self.endpoint.config),
            "bindings": [dict(self.endpoint.binding(each)) for each in bound],
            "shards": self.shards,
            "consistency": "per-shard" if self.shards > 1 else None,
        }
        return {
            "location": self.lake,
            "writer": "runtime",
            "tick": "1ms",
            "collections": {"bank.postings": dict(SUMMED)} if SUMS else {},
            "materializations": {"m": materialization},
        }

    def _cut_off(self) -> None:
        """Block the endpoint during a transaction."""
        begun = self.shim.messages
        with self.endpoint.away():
            self.step()
            until(lambda: self.shim.messages > begun, patience_ms=5_000)
            pause(300)
            self.shim.fired = int(self.shim.messages > begun)

    # Observations.

    def _fired(self) -> None:
        """Write more changes during the fault, so a second plan would differ."""
        if not self.scenario.idle:
            self.step()

    def _watch(self, _kind: Kind, _range: KeyRange) -> None:
        with self._watching:
            state = self.endpoint.read(self.bounds)
            self.observations += 1
            if not self.states or self.states[-1] != state:
                self.states.append(state)

    # Checks.

    def verdict(self) -> Verdict:
        violations = list(self.violations)
        violations += [Violation("shim", repr(each)) for each in self.shim.errors]
        if "progress" not in {each.name for each in violations}:
            violations += self._check_all()
        without_fault = self.scenario.fault is None and not self.scenario.cut_off
        fired = without_fault or bool(self.shim.fired)
        return Verdict(
            fired,
            tuple(violations),
            len(self.shim.commits),
            self.shim.streams,
            self.runtime.starts,
            self.observations,
        )

    def _check_all(self) -> Iterator[Violation]:
        scenario, last = self.scenario, self.states[-1]
        truth = self.bank.as_of(self.bank.upper)
        once = scenario.connector != "push-files"
        for what in dict.fromkeys(each.what for each in self.bounds):
            lines = {
                each.delta: last.get(each.resource, ()) for each in self.bounds if each.what == what
            }
            delta = lines.get(True)
            if delta is not None and not once:
                delta = list(dict.fromkeys(delta))
            found = check_delivery(
                Delivery(
                    what,
                    truth.of(what),
                    lines.get(False),
                    delta,
                    deletes=scenario.connector not in TRANSACTIONAL,
                )
            )
            if scenario.connector == "plain-files" and what == "balances":
                found = [each for each in found if each.name not in SUMMED_TWICE]
                yield from counted_twice(lines[False], self.bank, self._frontiers())
            yield from found
        yield from self._check_versions(last)
        yield from never_back(self.states, self.bounds)
        yield from monotonic(
            (str(each.key_range), max(held.frontier for held in each.checkpoint.bindings.values()))
            for each in self.shim.commits
        )
        one = scenario.shards == 1 and not scenario.then_shards
        if scenario.connector in TRANSACTIONAL and (one or scenario.whole):
            bounds = self.bounds[:-1] if scenario.late_binding else self.bounds
            yield from one_tick(self.states, self.bank, bounds, self._frontiers())

    def _frontiers(self) -> list[int]:
        """Return the frontiers of all planned transactions."""
        found = {
            held.frontier
            for each in self.shim.planned
            for held in each.checkpoint.bindings.values()
        }
        return sorted({0, *found})

    def _check_versions(self, state: State) -> Iterator[Violation]:
        """Each row of the accounts is a version that existed."""
        for name, lines in state.items():
            for line in lines:
                if name.startswith("accounts") and line.doc not in self.bank.versions:
                    yield Violation("invented", f"{name}: {line.doc}")
