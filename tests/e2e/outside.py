"""Nemesis of a complete pipeline with two endpoints.

    python -m tests.e2e.outside --for SECONDS [--seed N]

One `penstock up` materializes a shop and a bank (`ledger.py`) from Postgres in SQLite and in
another Postgres. The nemesis injects faults: it kills the process group at random times and
at failpoints, pauses it, starts a second process that takes over, restarts both servers,
cuts and stalls connections, terminates backends and holds locks in the endpoints. An observer
of each endpoint checks every state that it sees (`observer.py`). At the end the traffic stops,
`up --once` delivers the rest, and source, collections and endpoints must be equal. Memory, disk
and WAL are sampled and must not grow without limit. The last line is one JSON object of counts.
"""

import random
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import SubprocessError
from typing import Final

import psycopg

from penstock.clock import SYSTEM_CLOCK
from penstock.demo.comparison import FEWEST_ROWS, position, rows_in_collection, time_at
from penstock.errors import PenstockError
from penstock.failpoints import ENVIRONMENT, Action, Failpoint
from penstock.servers.postgres import Database
from tests.e2e.ledger import TABLES
from tests.e2e.observer import Observer, PostgresEndpoint
from tests.e2e.process import PATIENCE_S, Up, lines, rest, until, well
from tests.e2e.resource_sampler import Sampler, table, unbounded
from tests.e2e.shop import Stage, staged
from tests.ingest.proxy import Proxy
from tests.nemesis_driver import Tally, Turn, argument_parser, in_folder, run_nemesis, say

STARTING_S: Final = (0.5, 12.0)
"""Time from the start of a pipeline to its kill, possibly before it follows anything."""

FOLLOWING_S: Final = (0.0, 3.0)
"""Time from the following of both endpoints to the kill of a pipeline."""

FAULT_S: Final = (0.2, 6.0)
"""The duration of a pause, an outage, a stall or a lock."""

FIRED_STATES: Final = 10
"""New states of each endpoint after which a failpoint no longer counts as about to fire."""

PROGRESS_S: Final = 4 * PATIENCE_S
"""The time for both endpoints to follow, or for a process to end, however busy the machine is."""

BLOCKED_S: Final = 45.0
"""The time for a second process to follow while the first may hold locks in an endpoint."""

FENCED: Final = 3
"""The exit status of a process that another has replaced."""

FAILURES: Final = (
    AssertionError,
    OSError,
    PenstockError,
    SubprocessError,
    psycopg.Error,
    sqlite3.Error,
)
"""Errors that end a run as a violation, with its figures."""

COMMIT_WINDOW: Final = (
    Failpoint.PLAN_DONE,
    Failpoint.STORE_DONE,
    Failpoint.RECOVERY_DONE,
    Failpoint.ACKNOWLEDGE_DONE,
)

STEPS: Final = (
    *2 * COMMIT_WINDOW,
    Failpoint.TICK_BEGIN,
    Failpoint.TICK_DONE,
    Failpoint.CONFIRM_DONE,
    Failpoint.LOG_CREATE_BEGIN,
    Failpoint.LOG_CREATE_DONE,
    Failpoint.BLOB_PUT_DONE,
    Failpoint.EPOCH_TAKEN,
    Failpoint.HOLD_PLACED,
    Failpoint.SINCE_INTENDED,
    Failpoint.MERGE_BUILT,
    Failpoint.MERGE_DONE,
)


@dataclass
class Figures(Tally):
    """The figures of this nemesis."""

    transactions: int = 0
    lives: int = 0
    states: Counter[str] = field(default_factory=Counter)
    """Distinct states observed, by endpoint."""


@dataclass
class Outside:
    """A pipeline, the faults injected into it, and the observers of its endpoints."""

    stage: Stage
    rng: random.Random
    observers: Mapping[str, Observer]
    tally: Figures
    sampler: Sampler | None = None
    on_event: Callable[[str], None] | None = None
    events: list[str] = field(default_factory=list)

    def start(self, *words: str, failpoints: str = "") -> Up:
        """Start one more `up`."""
        self.tally.lives += 1
        words = words or ("--http", "127.0.0.1:0")
        up = Up(
            self.stage.folder,
            "up",
            str(self.stage.file),
            *words,
            environment={ENVIRONMENT: failpoints},
            log=self.stage.folder / f"up-{self.tally.lives}.log",
        )
        if self.sampler is not None:
            self.sampler.watch(up)
        return up

    def await_progress(self, up: Up, patience_s: float = PROGRESS_S) -> None:
        """Wait until every endpoint has shown two new states."""
        before = {name: self._state_count(name) for name in self.observers}

        def progressed() -> bool:
            up.check()
            self.check()
            return all(self._state_count(name) > before[name] + 1 for name in before)

        until(progressed, f"{' and '.join(before)} to follow", patience_s)

    # Lives.

    def live(self) -> None:
        """Run one pipeline, or two, with a random end."""
        life = self.rng.choice(
            [
                self.kill_starting,
                *2 * [self.kill_at_failpoint],
                *2 * [self.take_over],
                *4 * [self.kill_following],
            ]
        )
        life()

    def kill_starting(self) -> None:
        """Kill a pipeline that has just been started."""
        seconds = self.rng.uniform(*STARTING_S)
        with self.start() as up:
            self._live(up, seconds)
            self._kill(up, f"killed {seconds:.1f} s after its start")

    def kill_at_failpoint(self) -> None:
        """Kill a pipeline while one of its processes stands at a failpoint."""
        point = self._failpoint()
        with self.start(failpoints=point) as up:
            fired = self._await_failpoint(up)
            self._kill(up, f"killed at {point}" if fired else f"killed before {point}")
        if fired:
            self.tally.faults["failpoint"] += 1

    def kill_following(self, fault_count: int | None = None) -> None:
        """Kill a pipeline that follows, after some faults that it must survive."""
        if fault_count is None:
            fault_count = self.rng.randint(1, 6)
        with self.start() as up:
            self.await_progress(up)
            for fault in self.rng.choices(FAULTS, k=fault_count):
                self.inject(fault, up)
                if self.rng.random() < 0.5:
                    self.await_progress(up)
            self.await_progress(up)
            self._kill_later(up)

    def take_over(self) -> None:
        """Replace a paused pipeline by another; the first one resumes and must end as fenced."""
        point = self._failpoint() if self.rng.random() < 0.5 else ""
        with self.start(failpoints=point) as first:
            if point:
                self._await_failpoint(first)
            else:
                self.await_progress(first)
                self._live(first, self.rng.uniform(*FOLLOWING_S))
            first.pause()
            self._event(f"paused{f' at {point}' if point else ''}, then replaced")
            with self.start("--http", "127.0.0.1:0", "--take-over") as second:
                # While the first one stands within a transaction, it may hold the lock of SQLite.
                with suppress(AssertionError):
                    self.await_progress(second, BLOCKED_S)
                second.check()
                self.check()
                first.resume()
                status = self._status(first)
                assert status == FENCED, (status, first.output()[-4_000:])
                self.tally.faults["take over"] += 1
                self.await_progress(second)
                self._kill_later(second)

    def stop(self) -> None:
        """Terminate a pipeline: it releases all locks and confirms its durable position."""
        with self.start() as up:
            self.await_progress(up)
            lsn = until(lambda: self._durable_lsn(up), "the status page", PROGRESS_S)
            self.await_progress(up)
            asked_ms = SYSTEM_CLOCK.boot_ms()
            assert up.terminate() == 0, up.output()[-4_000:]
            self._event(f"stopped within {(SYSTEM_CLOCK.boot_ms() - asked_ms) / 1_000:.1f} s")
        lake = self.stage.places.lake
        (status,) = lines(well(self.stage.folder, "status", lake, "--json"))
        for location in status["storage_locations"]:
            assert location["writer"] is None, (location["location"], location["writer"])
        slots = self.stage.source.sql(
            "SELECT active, confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots",
            [lsn],
        )
        assert slots == [(False, True)], (lsn, slots)

    def end(self) -> list[str]:
        """Stop the traffic, deliver the rest and return all differences."""
        self.stage.traffic.stop()
        lsn = position(self.stage.places.postgres)
        with self.start("--once", "--http", "none") as up:
            assert self._status(up) == 0, up.output()[-4_000:]
        as_of = time_at(self.stage.places, lsn)
        assert as_of is not None, "up --once ended before it had all that was upstream at its start"
        wrong = []
        for name, observer in self.observers.items():
            observer.stop()
            observer.observe()
            if observer.checker.latest != self.stage.traffic.history.latest:
                wrong.append(f"{name} ended at version {observer.checker.latest}")
        return [*wrong, *self._differences(as_of)]

    # Faults that a pipeline must survive.

    def inject(self, fault: str, up: Up) -> None:
        """Inject one fault, and end it."""
        seconds = self.rng.uniform(*FAULT_S)
        self._event(f"{fault}, {seconds:.1f} s")
        match fault:
            case "pause":
                up.pause()
                self._hold(seconds)
                up.resume()
            case "kill source" | "kill endpoint":
                server = self._database(fault).server
                server.kill()
                self._hold(seconds)
                server.start()
            case "restart source" | "restart endpoint":
                self._database(fault).server.restart()
            case "cut source" | "cut endpoint":
                proxy = self._proxy(fault)
                proxy.refuses = True
                proxy.cut()
                self._hold(seconds)
                proxy.refuses = False
            case "stall source" | "stall endpoint":
                proxy = self._proxy(fault)
                proxy.stall()
                self._hold(seconds)
                if self.rng.random() < 0.5:
                    proxy.cut()
                proxy.flow()
            case "terminate source backends" | "terminate endpoint backends":
                self._database(fault).sql(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND application_name LIKE 'penstock%%'"
                )
            case "lock sqlite":
                self._lock_sqlite(seconds)
            case "lock endpoint table":
                self._lock_table(seconds)
            case _:
                raise AssertionError(fault)
        self.tally.faults[fault] += 1
        up.check()
        self.check()

    def _lock_sqlite(self, seconds: float) -> None:
        path = self.stage.places.sqlite
        with closing(sqlite3.connect(path, timeout=PATIENCE_S, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            self._hold(seconds)
            database.execute("ROLLBACK")

    def _lock_table(self, seconds: float) -> None:
        """Hold a lock that stops writers of a table, and no readers."""
        name = self.rng.choice(sorted(TABLES))
        with psycopg.connect(self.stage.target.url()) as connection:
            connection.execute(f"LOCK TABLE {name} IN EXCLUSIVE MODE".encode())
            self._hold(seconds)

    def _database(self, fault: str) -> Database:
        return self.stage.source if "source" in fault else self.stage.target

    def _proxy(self, fault: str) -> Proxy:
        return self.stage.to_source if "source" in fault else self.stage.to_target

    # Checks.

    def check(self) -> None:
        """Check what holds at all times."""
        assert not self.violations(), self.violations()[:5]
        self.stage.traffic.check()

    def violations(self) -> list[str]:
        return [
            violation
            for observer in self.observers.values()
            for violation in observer.checker.violations
        ]

    def count(self) -> None:
        """Add the counts of the observers and the traffic to the tally."""
        self.tally.transactions += self.stage.traffic.history.latest
        for name, observer in self.observers.items():
            self.tally.observations[name] += observer.checker.observations
            self.tally.states[name] += len(observer.checker.versions)

    def _differences(self, as_of: int) -> list[str]:
        """Return the rows that collections or endpoints lack or have in excess."""
        places, rows, wrong = self.stage.places, 0, list[str]()
        for name, columns in TABLES.items():
            expected = PostgresEndpoint(places.postgres).rows(name, columns)
            rows += expected.total()
            copies = {
                "the collection": rows_in_collection(
                    places.lake, places.collection(name), columns, as_of
                )
            }
            for endpoint in self.stage.endpoints:
                copies[endpoint.name] = endpoint.rows(name, columns)
            for copy, actual in copies.items():
                for what, excess in (("lacks", expected - actual), ("adds", actual - expected)):
                    if excess:
                        first = next(iter(excess))
                        wrong.append(f"{name}: {copy} {what} {excess.total()} rows, as {first}")
        made = self.stage.traffic.counts
        if rows < FEWEST_ROWS or not made.updates or not made.deletes:
            wrong.append(f"{rows} rows and {made} prove nothing")
        return wrong

    def _state_count(self, name: str) -> int:
        return len(self.observers[name].checker.versions)

    # Steps of a life.

    def _failpoint(self) -> str:
        return f"{self.rng.choice(STEPS)}={Action.STOP}@{self.rng.randint(1, 15)}"

    def _await_failpoint(self, up: Up) -> bool:
        """Wait until a process stands at the failpoint; return False if none does in time."""
        before = {name: self._state_count(name) for name in self.observers}

        def fired() -> bool:
            up.check()
            self.check()
            return bool(up.stopped()) or all(
                self._state_count(name) > before[name] + FIRED_STATES for name in before
            )

        until(fired, "a failpoint", PROGRESS_S)
        return bool(up.stopped())

    def _durable_lsn(self, up: Up) -> str | None:
        """Return the position of the source; None if the status page does not answer in time."""
        try:
            (source,) = up.state()["sources"]
        except TimeoutError:
            return None
        return str(source["lsn"])

    def _status(self, up: Up) -> int:
        """Wait until a process has ended by itself; return its exit status."""
        until(lambda: not up.running, "the process to end", PROGRESS_S)
        return up.wait()

    def _kill_later(self, up: Up) -> None:
        seconds = self.rng.uniform(*FOLLOWING_S)
        self._live(up, seconds)
        self._kill(up, f"killed {seconds:.1f} s after it followed")

    def _kill(self, up: Up, event: str) -> None:
        up.kill()
        self.tally.kills += 1
        self._event(event)
        self.check()

    def _live(self, up: Up, seconds: float) -> None:
        self._hold(seconds)
        up.check()

    def _hold(self, seconds: float) -> None:
        """Wait while the traffic and the observers continue."""
        until_ms = SYSTEM_CLOCK.boot_ms() + int(seconds * 1_000)
        while (left_ms := until_ms - SYSTEM_CLOCK.boot_ms()) > 0:
            self.check()
            rest(min(left_ms / 1_000, 0.1))

    def _event(self, event: str) -> None:
        self.events.append(event)
        if self.on_event is not None:
            self.on_event(event)


FAULTS: Final = (
    "pause",
    "kill source",
    "kill endpoint",
    "restart source",
    "restart endpoint",
    "cut source",
    "cut endpoint",
    "stall source",
    "stall endpoint",
    "terminate source backends",
    "terminate endpoint backends",
    "lock sqlite",
    "lock endpoint table",
)


def outside(
    stack: ExitStack, folder: Path, rng: random.Random, tally: Figures, *, sampled: bool
) -> Outside:
    """Create a source with traffic and an observer of each endpoint."""
    stage = stack.enter_context(staged(folder, random.Random(rng.getrandbits(32))))
    observers = dict[str, Observer]()
    for endpoint in stage.endpoints:
        observers[endpoint.name] = Observer(endpoint, stage.traffic.history)
        stack.callback(observers[endpoint.name].stop)
    sampler = None
    if sampled:
        sampler = Sampler(stage)
        stack.callback(sampler.stop)
    stage.traffic.start()
    return Outside(stage, rng, observers, tally, sampler)


def play(folder: Path, rng: random.Random, seconds: float, tally: Figures) -> list[str]:
    """Inject faults for this many seconds; return the violations."""
    began_ms = SYSTEM_CLOCK.boot_ms()
    folder.chmod(0o711)
    wrong = list[str]()
    with ExitStack() as stack:
        run = outside(stack, folder, rng, tally, sampled=True)
        assert run.sampler is not None

        def report(event: str) -> None:
            say(f"  {(SYSTEM_CLOCK.boot_ms() - began_ms) // 1_000:5} s: {event}")

        run.on_event = report
        try:
            while SYSTEM_CLOCK.boot_ms() < began_ms + int(seconds * 1_000):
                run.live()
            run.stop()
            wrong = run.end()
            samples = run.sampler.stop()
            say("\n".join(table(samples)))
            wrong += unbounded(samples)
        except FAILURES as error:
            wrong.append("\n".join([str(error), *getattr(error, "__notes__", [])]))
        finally:
            run.count()
        wrong += run.violations()
    return wrong


def main() -> int:
    # On SIGTERM, end the processes that were started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    tally = Figures("both")

    def play_turn(turn: Turn) -> list[str]:
        return in_folder(lambda folder: play(folder, random.Random(turn.seed), turn.seconds, tally))

    return run_nemesis(argument_parser(__doc__).parse_args(), tally, play_turn)


if __name__ == "__main__":
    sys.exit(main())
