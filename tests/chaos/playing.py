"""Plays a scenario with real processes, and judges what is there afterwards.

A bank posts, a runtime follows through the shim, and harm is done. While it is, the
endpoint is looked at before each message passes; at rest, everything is compared.
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
from penstock.materialize.driver import Materializing
from penstock.materialize.recovery import Log, recalled
from penstock.protocol.key_range import KeyRange
from penstock.protocol.messages import Kind
from penstock.testing.postgres import Database
from tests.chaos.actors import Connectors, Runtime, pause, until
from tests.chaos.endpoints import Endpoint
from tests.chaos.invariants import (
    Broken,
    Delivery,
    State,
    counted_twice,
    judged,
    monotonic,
    never_back,
    one_tick,
)
from tests.chaos.scenarios import TRANSACTIONAL, Scenario
from tests.chaos.shim import Shim
from tests.chaos.workload import SUMMED, Bank, Bound
from tests.ingest.proxy import Proxy

SUMS: Final = "collections" in inspect.signature(Materializing).parameters
"""Whether rows of a collection can be reduced."""

PATIENCE_MS: Final = 60_000
SUMMED_TWICE: Final = ("conservation", "oracle-agreement")
"""What a store without transactions does not promise of sums; see `counted_twice`."""

LOOK_MS: Final = 300
DEATHS: Final = 5
"""So often a runtime may end by itself before it is given up."""


class Runs(Protocol):
    """Who runs a pipeline, and can be killed."""

    defect: str | None
    starts: int

    @property
    def running(self) -> bool: ...
    def start(self, pipeline: Mapping[str, Any]) -> None: ...
    def kill(self) -> None: ...
    def kill_executors(self) -> None: ...
    def stop(self) -> None: ...
    def said(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of it."""

    fired: bool
    broken: tuple[Broken, ...]
    commits: int
    streams: int
    runtimes: int
    observations: int
    """How often the endpoint was read."""

    @property
    def names(self) -> set[str]:
        return {each.name for each in self.broken}


def bounds_of(connector: str) -> list[Bound]:
    """What is bound: each collection, in each mode that the connector has."""
    modes = {"plain-files": (False,), "push-files": (True,)}.get(connector, (False, True))
    kinds = ("accounts", "log", "balances") if SUMS else ("accounts", "log")
    return [Bound(what, delta) for what in kinds for delta in modes]


def play(
    scenario: Scenario,
    *,
    defect: str | None = None,
    seed: int = 1,
    database: Database | None = None,
    runtime: Runs | None = None,
) -> Verdict:
    """Tell the story; `database` is an empty one, where one is needed.

    Without a `runtime`, tasks are threads of the driver's process.
    """
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        with Play(scenario, folder, defect, seed, database, runtime) as story:
            story.tell()
            return story.verdict()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Play:
    """One run of a scenario."""

    scenario: Scenario
    folder: Path
    defect: str | None
    seed: int
    database: Database | None
    given: Runs | None
    bounds: list[Bound] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    deaths: int = 0
    observations: int = 0

    def __enter__(self) -> "Play":
        self._stack = ExitStack()
        self._writing, self._watching = threading.Lock(), threading.Lock()
        self._reader: persist.Client | None = None
        self._looked = (-1, 0)
        self._overtaken = False
        self.lake = f"file:{self.folder / 'lake'}"
        self.bank = Bank(f"{self.lake}/bank", random.Random(self.seed))
        self._stack.callback(self.bank.close)
        self.endpoint = self._endpoint()
        self.bounds = bounds_of(self.scenario.connector)
        self.connectors = Connectors(self.scenario.connector, self.folder, self.defect)
        self._stack.callback(self.connectors.close)
        self.runtime: Runs = self.given or Runtime(self.folder, moving=self.scenario.moving)
        self.runtime.defect, self.runtime.starts = self.defect, 0
        self.shim = Shim(
            f"unix:{self.folder / 's.sock'}",
            self.connectors,
            self.scenario.fault,
            fired_now=self._fired,
            kill_runtime=self.runtime.kill,
            kill_executors=self.runtime.kill_executors,
            watch=self._watch,
            spread=self.scenario.spread,
        )
        self._stack.callback(self.shim.close)
        self._stack.callback(self.runtime.stop)
        self.shards = self.scenario.shards
        self._to_come = list(self.scenario.then_shards)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # The story.

    def tell(self) -> None:
        scenario = self.scenario
        late = self.bounds[-1] if scenario.late_binding else None
        self._pipeline = self.pipeline(without=late)
        self.step()
        self.runtime.start(self._pipeline)
        self.arrive()
        for number in range(scenario.steps):
            if number == scenario.steps // 2:
                self._turn(late)
            if number == scenario.steps - 1 and self._haunted():
                self.shim.go_on.set()
                self.shim.zombie_done.wait(PATIENCE_MS / 1_000)
            if self._to_come and scenario.fault is None:
                self._reshard()
            if number == 1 and scenario.cut_off:
                self._cut_off()
            self.step()
            self.arrive()
            if self.broken:
                break
        if self.scenario.fault is not None and self.scenario.fault.deed == "stall":
            self.shim.go_on.set()
        self.rest()

    def _turn(self, late: Bound | None) -> None:
        """What happens half of the way."""
        scenario = self.scenario
        if scenario.restarts or late is not None:
            self.runtime.stop()
            self._pipeline = self.pipeline()
            self.runtime.start(self._pipeline)

    def _reshard(self) -> None:
        """Let there be another number of shards."""
        self.runtime.stop()
        self.shards = self._to_come.pop(0)
        self._pipeline = self.pipeline()
        self.runtime.start(self._pipeline)

    def _haunted(self) -> bool:
        fault = self.scenario.fault
        return fault is not None and fault.deed == "zombie" and bool(self.shim.fired)

    def step(self) -> None:
        with self._writing:
            self.bank.step()

    def arrive(self) -> None:
        """Wait until all that is written has been committed; whoever died is started again."""

        def arrived() -> bool:
            fault = self.scenario.fault
            stalled = self.shim.fired and fault is not None and fault.deed == "stall"
            if stalled and not self._overtaken:
                self._overtaken = True
                self.runtime.start(self._pipeline)
            elif not self.runtime.running:
                self.deaths += 1
                if self.scenario.compacts:
                    self.bank.outlast_leases()
                if self._to_come:
                    self._reshard()
                else:
                    self.runtime.start(self._pipeline)
            return self.deaths > DEATHS or (self._may_have_arrived() and self._committed())

        patience_ms = PATIENCE_MS if self.given is None else 3 * PATIENCE_MS
        if not until(arrived, patience_ms=patience_ms, pause_ms=30) or self.deaths > DEATHS:
            self.broken.append(Broken("progress", self.runtime.said()))

    def rest(self) -> None:
        """All is said; end the runtime, and look at what is there."""
        if not self.broken:
            self.broken += self._waiting()
        self.runtime.stop()
        self.states.append(self.endpoint.read(self.bounds))

    def _waiting(self) -> Iterator[Broken]:
        """Yield a violation if committed files stay staged though nothing else is to come."""
        if not until(lambda: not self._unapplied(), patience_ms=10_000):
            yield Broken("applied-when-idle", f"{len(self._unapplied())} files are staged")

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
        """Whether it is worth a look, which costs a hold on the log: something was acknowledged."""
        now = (self.shim.acknowledged, SYSTEM_CLOCK.boot_ms() // LOOK_MS)
        changed, self._looked = now != self._looked, now
        return changed

    def _committed(self) -> bool:
        """Whether all that is written is committed and acknowledged, as the log has it."""
        known = self.log()
        if known is None or not known.is_settled or len(known.shards) != self.shards:
            return False
        upper = self.bank.upper
        return all(
            each.checkpoint is not None
            and len(each.checkpoint.bindings) >= len(self._bound)
            and all(held.frontier >= upper for held in each.checkpoint.bindings.values())
            for each in known.shards
        )

    def log(self) -> Log | None:
        """What the recovery log says."""
        if not (self.folder / "lake" / "m").exists():
            return None
        try:
            if self._reader is None:
                self._reader = self._stack.enter_context(persist.open(f"{self.lake}/m"))
            notes = self._reader.collection("m/state")
            if not notes.upper:
                return None
            found = {each.data[0]: each.data[1] for each in notes.snapshot(notes.upper - 1)}
        except PenstockError:
            return None  # Not there yet, or compacted meanwhile.
        return recalled(found)

    # What is set up.

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
        """Let the endpoint be away while a transaction comes."""
        begun = self.shim.messages
        with self.endpoint.away():
            self.step()
            until(lambda: self.shim.messages > begun, patience_ms=5_000)
            pause(300)
            self.shim.fired = int(self.shim.messages > begun)

    # What is seen.

    def _fired(self) -> None:
        """More comes meanwhile, so whoever would plan again would plan something else."""
        if not self.scenario.idle:
            self.step()

    def _watch(self, _kind: Kind, _range: KeyRange) -> None:
        with self._watching:
            state = self.endpoint.read(self.bounds)
            self.observations += 1
            if not self.states or self.states[-1] != state:
                self.states.append(state)

    # What is wrong.

    def verdict(self) -> Verdict:
        broken = list(self.broken)
        broken += [Broken("shim", repr(each)) for each in self.shim.errors]
        if "progress" not in {each.name for each in broken}:
            broken += self._judged()
        harmless = self.scenario.fault is None and not self.scenario.cut_off
        fired = harmless or bool(self.shim.fired)
        return Verdict(
            fired,
            tuple(broken),
            len(self.shim.commits),
            self.shim.streams,
            self.runtime.starts,
            self.observations,
        )

    def _judged(self) -> Iterator[Broken]:
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
            found = judged(
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
        yield from self._true(last)
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
        """Where transactions began and ended."""
        found = {
            held.frontier
            for each in self.shim.planned
            for held in each.checkpoint.bindings.values()
        }
        return sorted({0, *found})

    def _true(self, state: State) -> Iterator[Broken]:
        """Whatever else: each row of the accounts is one that there was."""
        for name, lines in state.items():
            for line in lines:
                if name.startswith("accounts") and line.doc not in self.bank.versions:
                    yield Broken("invented", f"{name}: {line.doc}")
