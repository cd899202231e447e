"""Writers in turn, readers, listeners and a holder, under injected faults.

    python -m tests.faults.nemesis --for SECONDS [--seed N] [--store file|power|memory]

`file` runs real processes on real files. They are killed with -9 at random
and at named failpoints, stopped and continued across takeovers that truncate
the log past them, and run two at a time under one id, over a store that loses
requests and answers. `memory` and `power` are executions in one process, where
the same seed gives the same run: many writers and readers by turns, a store
that loses requests and answers, writers that pause for hours, and, for
`power`, a disk that keeps any part of the data that was not synced.

All events are recorded (`history.py`) and checked (`validator.py`). The nemesis
runs rounds until the time is over, prints the seed of each, and ends with status 1
and the folder of the history at the first round that breaks an invariant.
"""

import random
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event as Never
from typing import Any

from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.durable.files import FileBlob
from penstock.durable.memory import MemoryBlob, Shelf
from penstock.errors import Fenced, PenstockError, UsageError
from penstock.failpoints import Action, Failpoint
from penstock.persist import Collection, Settings
from penstock.testing.stores import PowerCutDisk, UnreliableBlob
from tests.faults.actors import FENCED, HASTY, IN_DOUBT, PATIENCE_S, REFUSED, Child, made
from tests.faults.actors import Deeds as WritersDeeds
from tests.faults.history import Event, Listening, Recorder, read_history
from tests.faults.inspect import inspected
from tests.faults.stage import HOUR_MS, Actor, ManualClock, SlowClock, Stage
from tests.faults.validator import Violation, violations
from tests.nemesis_driver import Tally, Turn, argument_parser, in_folder, run_nemesis, say

STORES = ("file", "power", "memory")


# Real processes.


@dataclass
class Round:
    """One location with all its processes, for some seconds."""

    url: str
    folder: Path
    chance: random.Random
    recorder: Recorder
    children: list[Child] = field(default_factory=list)
    number: int = 0

    def play(self, seconds: float) -> None:
        """Inject faults until the time is over, then let all processes finish."""
        deadline = SYSTEM_CLOCK.boot_ms() + int(seconds * 1_000)
        writer = self._writer(peaceful=True)
        bystanders = [self._bystander(i) for i in range(4)]
        self._wait(300)
        while SYSTEM_CLOCK.boot_ms() < deadline:
            writer = self.chance.choice(
                [
                    self._killed,
                    self._killed,
                    self._tripped,
                    self._tripped,
                    self._stopped,
                    self._stopped,
                    self._two_at_once,
                    self._another_id,
                    self._released,
                ]
            )(writer)
            if not self.chance.randrange(3):
                at = self.chance.randrange(len(bystanders))
                self._kill(bystanders[at])
                bystanders[at] = self._bystander(at)
        self._finish(writer, bystanders)

    def close(self) -> None:
        """End every process that was started."""
        for child in self.children:
            child.end()

    def _killed(self, writer: Child) -> Child:
        self._wait(self.chance.randrange(50, 900))
        self._kill(writer)
        return self._writer()

    def _tripped(self, writer: Child) -> Child:
        """Kill the writer; its successor dies, fails or stops at a named failpoint."""
        self._kill(writer)
        point = self.chance.choice([*Failpoint])
        action = self.chance.choice([Action.KILL, Action.KILL, Action.ERROR, Action.STOP])
        turn = self.chance.randrange(1, 25)
        tripped = self._writer(failpoints=f"{point}={action}@{turn}")
        self._wait(self.chance.randrange(300, 1_500))
        if not self.chance.randrange(3):
            return tripped
        successor = self._writer()
        self._wait(self.chance.randrange(100, 1_500))
        # A writer that stopped itself now resumes behind its successor.
        self._signal(tripped, signal.SIGCONT)
        self._ended(tripped)
        return successor

    def _stopped(self, writer: Child) -> Child:
        """Stop a writer while its successor runs, rolls up and truncates past it."""
        self._signal(writer, signal.SIGSTOP)
        successor = self._writer(peaceful=True)
        self._wait(self.chance.choice([100, 1_200, 2_500]))
        self._signal(writer, signal.SIGCONT)
        self._ended(writer)
        return successor

    def _two_at_once(self, writer: Child) -> Child:
        begin = self._now()
        successor = self._writer(peaceful=True)
        self._ended(writer)
        deadline = SYSTEM_CLOCK.boot_ms() + PATIENCE_S * 1_000
        while SYSTEM_CLOCK.boot_ms() < deadline and not self._made_progress(successor):
            self._wait(50)
        if successor.process.poll() is None:
            self.recorder.note("contest", begin=begin, end=self._now())
        return successor

    def _made_progress(self, writer: Child) -> bool:
        """Return whether the writer ended, or noted an acknowledged operation."""
        history = self.folder / f"{writer.who}.jsonl"
        return writer.process.poll() is not None or (
            history.exists() and b'"outcome": "acknowledged"' in history.read_bytes()
        )

    def _another_id(self, writer: Child) -> Child:
        other = self._child("writer", writer="b", seed=1)
        status = other.wait()
        self.recorder.note("exit", of=other.who, status=status)
        assert status == REFUSED, f"another id was not refused but ended with {status}"
        return writer

    def _released(self, writer: Child) -> Child:
        """Release the lock of a live writer, as an operator can."""
        persist.release(self.url)
        self._ended(writer)
        return self._writer()

    def _finish(self, writer: Child, bystanders: list[Child]) -> None:
        self._signal(writer, signal.SIGCONT)
        writer.send("stop")
        self._ended(writer)
        settings = Settings(**HASTY)
        with persist.open(self.url, writer="a", settings=settings) as client:
            uppers = {}
            for name in ("words", "others", "rows"):
                each = made(client, name)
                each.seal(each.upper + 1).result()
                uppers[name] = each.upper
            client.compact()
        told = str(uppers).replace("'", '"')
        for child in bystanders:
            child.send(told)
        for child in bystanders:
            status = child.wait()
            assert status == 0, f"{child.who} ended with {status}"

    def _writer(self, *, peaceful: bool = False, failpoints: str = "") -> Child:
        options = {"writer": "a", "seed": self.chance.getrandbits(32), "pace": 8}
        if not peaceful and not failpoints and not self.chance.randrange(3):
            options["unreliable"] = 1
        writer = self._child("writer", failpoints=failpoints, **options)
        self._await_start(writer)
        return writer

    def _await_start(self, writer: Child) -> None:
        """Wait until the writer has the lock, has ended, or was stopped by a failpoint.

        A successor that is started earlier could open the location first.
        """
        deadline = SYSTEM_CLOCK.boot_ms() + PATIENCE_S * 1_000
        while SYSTEM_CLOCK.boot_ms() < deadline:
            with suppress(TimeoutError):
                writer.receive(timeout_s=0.05)
                return
            stat = Path(f"/proc/{writer.process.pid}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] == "T":
                return

    def _bystander(self, at: int) -> Child:
        role = ["listener", "reader", "holder", "listener"][at]
        hold = "no" if role == "reader" and self.chance.randrange(2) else "yes"
        return self._child(role, seed=self.chance.getrandbits(32), hold=hold)

    def _child(self, role: str, *, failpoints: str = "", **options: Any) -> Child:
        self.number += 1
        who = f"{role}-{self.number}"
        self.recorder.note("started", of=who, failpoints=failpoints, **options)
        child = Child(role, who, self.url, self.folder, failpoints=failpoints, **options)
        self.children.append(child)
        return child

    def _kill(self, child: Child) -> None:
        self._signal(child, signal.SIGKILL)
        child.wait()

    def _ended(self, child: Child) -> None:
        """Wait for the end of a process that met its successor or its fault."""
        with suppress(ProcessLookupError):
            child.process.send_signal(signal.SIGCONT)  # A failpoint may have stopped the process.
        status = child.wait()
        self.recorder.note("exit", of=child.who, status=status)
        well = (0, FENCED, IN_DOUBT, -signal.SIGKILL)
        assert status in well, f"{child.who} ended with {status}"

    def _signal(self, child: Child, which: signal.Signals) -> None:
        self.recorder.note("signal", of=child.who, signal=which.name)
        with suppress(ProcessLookupError):
            child.process.send_signal(which)

    def _wait(self, ms: int) -> None:
        SYSTEM_CLOCK.wait(Never(), ms)

    def _now(self) -> int:
        return SYSTEM_CLOCK.boot_ms() * 1_000_000


def play_processes(
    seed: int, seconds: float, folder: Path, *, tally: Tally | None = None
) -> list[Violation]:
    """Run a round of real processes, and return its violations."""
    history = folder / "history"
    history.mkdir(parents=True)
    url = f"file:{folder / 'data'}"
    recorder = Recorder("nemesis", history / "nemesis.jsonl")
    play = Round(url, history, random.Random(seed), recorder)
    try:
        play.play(seconds)
    finally:
        play.close()
    return _judged([*read_history(history), *inspected(url)], tally)


# One process, where the same seed gives the same run.


class Simulation:
    """Writers and readers in turns, on a stage."""

    def __init__(self, seed: int, *, power: bool) -> None:
        self.chance = random.Random(seed)
        self.power = power
        self.disk = PowerCutDisk()
        shelf = Shelf()

        def store(clock: ManualClock) -> FileBlob | MemoryBlob:
            if power:
                return FileBlob("/lake", disk=self.disk, clock=clock)
            return MemoryBlob(shelf, name="memory:nemesis", clock=clock)

        self.stage = Stage(store, seed=seed)
        self.stage.settings = Settings(
            background=False,
            notify="",
            upkeep_ms=0,
            inline_bytes=1 << 10,
            rollup_every=8,
            fan_in=3,
        )
        self.number = 0
        self.asleep: list[tuple[Actor, WritersDeeds]] = []
        self.readers: list[tuple[Actor, Listening | None]] = []

    def play(self, turns: int) -> list[Event]:
        """Run turns, and return the history with the final state."""
        actor, deeds = self._writer()
        for _ in range(turns):
            match self.chance.choices(range(8), [60, 10, 12, 3, 3, 3, 2, 1])[0]:
                case 0:
                    if not self._deed(actor, deeds):
                        actor, deeds = self._writer()
                case 1:
                    with suppress(PenstockError):
                        actor.client.run_maintenance()
                case 2:
                    self._inspect()
                case 3:
                    self.stage.clock.advance(self.chance.choice([1_000, HOUR_MS // 2, HOUR_MS]))
                case 4:
                    self.asleep.append((actor, deeds))
                    actor, deeds = self._writer()
                case 5 if self.asleep:
                    self._deed(*self.asleep.pop())
                case 6:
                    actor.cut_off()
                    actor, deeds = self._writer()
                case 7 if self.power:
                    self._cut()
                    actor, deeds = self._writer()
                case _:
                    self._reader()
        while self.asleep:
            self._deed(*self.asleep.pop())
        last, _ = self._writer(reliable=True)
        words = made(last.client, "words")
        last.scribe.seal(words, words.upper + 1)
        for _, listening in self.readers:
            if listening is not None:
                with suppress(UsageError):  # Compaction may overtake a listener without a hold.
                    while listening.step():
                        pass
                    listening.ended(expected=words.upper)
        return self.stage.history()

    def _writer(self, *, reliable: bool = False) -> tuple[Actor, WritersDeeds]:
        self.number += 1
        inner = self.stage.store(self.stage.clock)
        if not reliable and not self.chance.randrange(2):
            inner = UnreliableBlob(inner, rng=random.Random(self.chance.getrandbits(32)))
        actor = self.stage.enter(f"w{self.number}", writer="a", inner=inner)
        return actor, WritersDeeds(actor.scribe, self.chance)

    def _deed(self, actor: Actor, deeds: WritersDeeds) -> bool:
        """Run one operation, and return whether the writer may continue."""
        try:
            outcome = deeds.next()
        except Fenced as error:
            actor.scribe.recorder.note("fenced", op="", error=str(error))
            outcome = "fenced"
        except UsageError:
            return True
        if outcome not in ("fenced", "doubt"):
            return True
        actor.cut_off()
        return False

    def _reader(self) -> None:
        self.number += 1
        hold = bool(self.chance.randrange(3))
        clock = SlowClock(self.stage.clock, self.chance.choice([0, 9 * HOUR_MS]))
        actor = self.stage.enter(f"r{self.number}", hold=hold, clock=clock)
        listening = None
        with suppress(UsageError):
            words = actor.client.collection("words")
            listening = actor.scribe.listen(words, words.since, f"l{self.number}")
        self.readers.append((actor, listening))
        if len(self.readers) > 4:
            gone, _ = self.readers.pop(0)
            gone.cut_off()

    def _inspect(self) -> None:
        for actor, listening in self.readers:
            with suppress(UsageError, persist.HoldLost):
                if listening is not None and self.chance.randrange(2):
                    listening.step()
                    continue
                each = self._some(actor)
                since, upper = actor.scribe.inspect(each)
                if upper > since:
                    actor.scribe.snapshot(each, self.chance.randrange(since, upper))

    def _some(self, actor: Actor) -> Collection:
        return actor.client.collection(self.chance.choice(actor.client.collections() or ["words"]))

    def _cut(self) -> None:
        """Cut the power for all processes; any part of the unsynced data remains."""
        for actor in self.stage.actors:
            actor.cut_off()
        self.stage.actors.clear()
        self.readers.clear()
        self.asleep.clear()
        self.disk = self.disk.after_power_cut(self.chance)
        self.stage.recorders[0].note("power_cut")


def play_simulation(
    seed: int, *, power: bool, turns: int = 150, tally: Tally | None = None
) -> list[Violation]:
    """Run a round in one process, and return its violations."""
    simulation = Simulation(seed, power=power)
    try:
        return _judged(simulation.play(turns), tally)
    finally:
        simulation.stage.close()


# The command.


def _judged(events: list[Event], tally: Tally | None) -> list[Violation]:
    """Count the faults and observations of a history, and return its violations."""
    if tally is not None:
        for event in events:
            _count(event, tally)
    return violations(events)


def _count(event: Event, tally: Tally) -> None:
    match event:
        case {"event": "signal", "signal": "SIGKILL"} | {"event": "exit", "status": -9}:
            tally.kills += 1
        case {"event": "signal", "signal": "SIGSTOP"}:
            tally.faults["stopped process"] += 1
        case {"event": "started", "unreliable": _}:
            tally.faults["unreliable store"] += 1
        case {"event": "started", "failpoints": armed} if armed:
            tally.faults["armed failpoint"] += 1
        case {"event": "contest" | "power_cut" as kind}:
            tally.faults[kind.replace("_", " ")] += 1
        case {"event": "snapshot"}:
            tally.observations["snapshots"] += 1
        case {"event": "changes"}:
            tally.observations["batches of changes"] += 1
        case _:
            pass


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--store", choices=STORES, action="append")
    asked = parser.parse_args()
    stores = asked.store or [*STORES]
    tally = Tally("faults")

    def play(turn: Turn) -> list[Violation]:
        store = stores[turn.number % len(stores)]
        say(f"  --store {store}")
        if store != "file":
            broken = play_simulation(turn.seed, power=store == "power", tally=tally)
            for violation in broken[:20]:
                say(str(violation))
            return broken
        seconds = max(5, min(30, turn.seconds))
        return in_folder(partial(play_processes, turn.seed, seconds, tally=tally))

    return run_nemesis(asked, tally, play)


if __name__ == "__main__":
    sys.exit(main())
