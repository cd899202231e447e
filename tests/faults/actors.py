"""Processes of a history: each plays its role and records its observations.

    python -m tests.faults.actors ROLE WHO URL FOLDER [key=value …]

`puppet` executes one command per line and answers each with a line. `writer`,
`reader`, `listener` and `holder` act on their own, from a seed, until a stop
request or the end of standard input. Their exit statuses are

    0  stopped on request, no error        3  fenced
    4  stopped because the outcome of a write is indeterminate
    5  another id holds the lock

PENSTOCK_PLANTED names the bug to plant; see `planted_bugs.py`.
"""

import json
import os
import random
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.clock import SYSTEM_CLOCK
from penstock.durable import open_blob
from penstock.durable.retrying_blob import RetryingBlob
from penstock.errors import Corruption, Fenced, InternalError, PenstockError, UsageError
from penstock.persist import (
    TEXT,
    UNIT,
    Client,
    Collection,
    HoldLost,
    LockHeld,
    Settings,
    SinceError,
)
from penstock.testing.stores import UnreliableBlob
from tests.faults.history import Recorder, Scribe
from tests.faults.planted_bugs import planted

SOURCE = Path(__file__).parents[2]
PATIENCE_S = 180
"""Seconds that a process may take to start or to end on a loaded machine."""

HASTY: dict[str, Any] = {
    "inline_bytes": 1 << 10,
    "rollup_every": 16,
    "fan_in": 3,
    "lease_ms": 8_000,
    "poll_ms": 100,
    "upkeep_ms": 40,
    "young_ms": 800,
    "proof_ms": 300,
}
"""Settings that compress hours of operation into a second."""

FENCED, IN_DOUBT, REFUSED = 3, 4, 5


class Child:
    """Child process, which the parent ends through its handle."""

    def __init__(
        self,
        role: str,
        who: str,
        url: str,
        folder: Path,
        *,
        before: tuple[str, ...] = (),
        failpoints: str = "",
        bug: str | None = None,
        **options: Any,
    ) -> None:
        self.who = who
        self.role = role
        self.stopped = False
        words = [f"{name}={value}" for name, value in options.items()]
        self.process = subprocess.Popen(
            [
                *(*before, sys.executable, "-m", "tests.faults.actors"),
                *(role, who, url, str(folder), *words),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # Unbuffered: select sees all available output.
            env={
                **os.environ,
                "PYTHONPATH": f"{SOURCE / 'src'}:{SOURCE}",
                "PENSTOCK_FAILPOINTS": failpoints,
                "PENSTOCK_PLANTED": bug or "",
            },
        )

    def send(self, line: str) -> None:
        """Send a line, unless the process has closed its input."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def receive(self, *, timeout_s: float = PATIENCE_S) -> str:
        """Return the next line, or an empty string when the process has ended."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        if not ready:
            raise TimeoutError(f"{self.who} sends nothing")
        return self.process.stdout.readline().decode().strip()

    def request(self, line: str, *, timeout_s: float = PATIENCE_S) -> str:
        """Send a line and return the answer."""
        self.send(line)
        return self.receive(timeout_s=timeout_s)

    def wait(self, *, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end of the process, and return its exit status."""
        return self.process.wait(timeout_s)

    def end(self) -> None:
        """Kill the process if it runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def main(words: list[str]) -> int:
    role, who, url, folder, *rest = words
    options = dict(word.split("=", 1) for word in rest)
    recorder = Recorder(who, Path(folder) / f"{who}.jsonl")
    settings = Settings(**{**HASTY, **json.loads(options.get("settings", "{}"))})
    stage = _Process(recorder, url, options, settings)
    with planted(os.environ.get("PENSTOCK_PLANTED") or None):
        return ROLES[role](stage)


class Mostly(random.Random):
    """Generator that chooses the first item, which means success, three times out of four.

    A store that fails most of the time is only slow: backoff takes minutes.
    """

    def choice(self, seq: Any) -> Any:
        return seq[0] if self.randrange(4) else super().choice(seq)


class _Process:
    """Context that all roles share."""

    def __init__(
        self, recorder: Recorder, url: str, options: dict[str, str], settings: Settings
    ) -> None:
        self.recorder = recorder
        self.url = url
        self.options = options
        self.settings = settings
        self.chance = random.Random(options.get("seed", "0"))
        self.stop = threading.Event()
        self.told: dict[str, Any] = {}

    def open(self) -> Client:
        writer = self.options.get("writer")
        blob: Any = open_blob(self.url, writing=writer is not None)
        if "unreliable" in self.options:
            blob = UnreliableBlob(blob, rng=Mostly(self.chance.getrandbits(32)))
        steady = RetryingBlob(
            blob,
            self.settings.clock,
            self.settings.chance,
            patience_ms=self.settings.patience_ms,
        )
        return Client(steady, self.settings, writer=writer, hold=self.options.get("hold") != "no")

    def listen_to_parent(self) -> None:
        """Stop on request, or when the parent ends."""

        def read() -> None:
            line = sys.stdin.readline()
            if line.startswith("{"):
                self.told.update(json.loads(line))
            self.stop.set()

        threading.Thread(target=read, daemon=True).start()

    def pause(self, most_ms: int) -> bool:
        """Wait for a random time, and return whether to stop."""
        return SYSTEM_CLOCK.wait(self.stop, self.chance.randrange(most_ms + 1))


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def made(client: Client, name: str) -> Collection:
    """Return the collection with its current schema, created if it is missing."""
    try:
        return client.collection(name)
    except UsageError:
        if name.startswith("rows"):
            return client.create_or_load(
                name, schema=pa.schema([pa.field("k", pa.string(), False)]), key_columns=["k"]
            )
        return client.create_or_load(name, key=TEXT, value=UNIT)


# Puppets.


def puppet(stage: _Process) -> int:
    """Execute commands, and answer each with its outcome."""
    try:
        scribe = Scribe(stage.recorder, stage.open())
    except LockHeld:
        say("refused")
        return REFUSED
    except PenstockError as error:
        say(type(error).__name__)
        return IN_DOUBT
    say("ready")
    for line in sys.stdin:
        command, *words = line.split()
        try:
            answer = COMMANDS[command](scribe, *words)
        except Fenced as error:
            scribe.recorder.note("fenced", op="", error=str(error))
            answer = "fenced"
        except PenstockError as error:
            answer = type(error).__name__
        say(answer or "done")
        if scribe.fenced or answer == "fenced":
            return FENCED
        if command == "close":
            return 0
    return 0


def _append(scribe: Scribe, name: str = "words", wide: str = "0") -> str:
    words = made(scribe.client, name)
    upper = words.upper
    return scribe.append(words, [upper, upper + 3], upper, upper + 5, wide=int(wide))


def _write(scribe: Scribe, name: str = "words") -> str:
    words = made(scribe.client, name)
    return scribe.write(words, [words.upper + 2])


def _seal(scribe: Scribe, name: str = "words") -> str:
    words = made(scribe.client, name)
    return scribe.seal(words, words.upper + 5)


def _all(scribe: Scribe) -> str:
    shares = []
    for name in ("words", "others"):
        each = made(scribe.client, name)
        shares.append((each, [each.upper], each.upper, each.upper + 5))
    return scribe.append_all(shares)


def _allow(scribe: Scribe) -> str:
    words = made(scribe.client, "words")
    return scribe.control("allow", lambda: words.allow_compaction(words.upper - 1).result())


def _snapshot(scribe: Scribe) -> str:
    words = scribe.client.collection("words")
    scribe.inspect(words)
    return "read" if scribe.snapshot(words, words.upper - 1) is not None else "denied"


def _hold(scribe: Scribe) -> str:
    words = scribe.client.collection("words")
    since = words.since
    scribe.client.hold("owner").move({"words": since})
    scribe.recorder.note("held", holder="owner", id=words.id, since=since)
    return "held"


def _drop(scribe: Scribe) -> str:
    words = scribe.client.collection("words")
    scribe.recorder.note("unheld", holder="owner", id=words.id)
    scribe.client.hold("owner").drop()
    return "dropped"


COMMANDS: dict[str, Callable[..., str | None]] = {
    "append": _append,
    "write": _write,
    "seal": _seal,
    "all": _all,
    "allow": _allow,
    "snapshot": _snapshot,
    "hold": _hold,
    "drop": _drop,
    "compact": lambda scribe: scribe.control("compact", scribe.client.compact),
    "destroy": lambda scribe, name: scribe.destroy(made(scribe.client, name)),
    "close": lambda scribe: scribe.client.close(),
}


# Autonomous roles.


def writer(stage: _Process) -> int:
    """Write at random until stopped, killed or fenced."""
    stage.listen_to_parent()
    bug = os.environ.get("PENSTOCK_PLANTED")
    while True:
        status = _write_as_one(stage)
        if status != FENCED or bug != "retake_after_fenced" or stage.stop.is_set():
            return status


def _write_as_one(stage: _Process) -> int:
    try:
        scribe = Scribe(stage.recorder, stage.open())
    except LockHeld:
        stage.recorder.note("locked_out")
        return REFUSED
    except Fenced:
        return FENCED
    say("ready")
    deeds = Deeds(scribe, stage.chance)
    pace = int(stage.options.get("pace", "5"))
    while not stage.pause(pace):
        try:
            outcome = deeds.next()
        except Fenced as error:
            stage.recorder.note("fenced", op="", error=str(error))
            outcome = "fenced"
        except UsageError:
            continue  # A takeover shows first as a collection that does not exist.
        except PenstockError as error:
            stage.recorder.note("stopped", error=repr(error))
            outcome = "doubt"
        if outcome == "fenced":
            say("fenced")
            _closed(scribe.client)
            return FENCED
        if outcome == "doubt":
            _closed(scribe.client)
            return IN_DOUBT
    try:
        scribe.client.close()
    except Fenced as error:
        stage.recorder.note("fenced", op="", error=str(error))
        return FENCED
    except PenstockError:
        return IN_DOUBT
    return 0


def _closed(client: Client) -> None:
    with suppress(PenstockError):
        client.close()


class Deeds:
    """Random operations of a writer."""

    def __init__(self, scribe: Scribe, rng: random.Random) -> None:
        self._scribe = scribe
        self._rng = rng
        self._retractable: dict[int, list[str]] = {}
        self._number = 0

    def next(self) -> str:
        """Execute one operation, and return its outcome."""
        deed = self._rng.choices(
            [
                self._append,
                self._write,
                self._seal,
                self._burst,
                self._all,
                self._allow,
                self._compact,
                self._again,
                self._alter,
                self._read,
            ],
            [30, 12, 8, 6, 10, 10, 1, 1, 1, 4],
        )[0]
        return deed()

    def _pick(self) -> Collection:
        name = self._rng.choice(["words", "words", "others", "rows"])
        return made(self._scribe.client, name)

    def _append(self) -> str:
        each = self._pick()
        lower = each.upper
        upper = lower + self._rng.randrange(1, 10)
        times = [self._rng.randrange(lower, upper) for _ in range(self._rng.randrange(1, 4))]
        gone = self._retractable.get(each.id, [])
        retract = [gone.pop() for _ in range(min(len(gone), self._rng.randrange(2)))]
        wide = self._rng.choice([0, 0, 0, 100])
        expected = lower if self._rng.randrange(10) else lower + 1  # Sometimes a lost race.
        if expected != lower:
            times, upper = [expected], expected + 2
        outcome = self._scribe.append(each, times, expected, upper, retract=retract, wide=wide)
        if outcome == "acknowledged":
            self._retractable.setdefault(each.id, []).append(f"{self._scribe.last}.0")
        return outcome

    def _write(self) -> str:
        each = self._pick()
        at = each.upper + self._rng.randrange(20)
        if not self._rng.randrange(8):
            at = max(0, each.upper - 1)  # Rejected, changes nothing.
        return self._scribe.write(each, [at, at + self._rng.randrange(3)])

    def _seal(self) -> str:
        each = self._pick()
        return self._scribe.seal(each, each.upper + self._rng.randrange(8))

    def _burst(self) -> str:
        each = self._pick()
        upper = each.upper
        times = [[upper + self._rng.randrange(10)] for _ in range(4)]
        outcomes = self._scribe.burst(each, times, upper + self._rng.randrange(12))
        return next((o for o in outcomes if o in ("fenced", "doubt")), outcomes[-1])

    def _all(self) -> str:
        shares = []
        for name in self._rng.sample(["words", "others", "rows"], self._rng.choice([2, 3])):
            each = made(self._scribe.client, name)
            shares.append((each, [each.upper], each.upper, each.upper + 4))
        return self._scribe.append_all(shares)

    def _allow(self) -> str:
        each = self._pick()
        if each.upper < 2:
            return "nothing"
        to = self._rng.randrange(each.since, max(each.since + 1, each.upper - 1))
        return self._scribe.control("allow", lambda: each.allow_compaction(to).result())

    def _compact(self) -> str:
        return self._scribe.control("compact", self._scribe.client.compact)

    def _again(self) -> str:
        each = made(self._scribe.client, "others")
        return self._scribe.destroy(each)

    def _alter(self) -> str:
        rows = made(self._scribe.client, "rows")
        names = rows.schema.names
        if len(names) > 6:
            return "nothing"
        grown = rows.schema.append(pa.field(f"c{len(names)}", pa.int64()))
        return self._scribe.control("alter", lambda: rows.alter(grown))

    def _read(self) -> str:
        each = self._pick()
        since, upper = self._scribe.inspect(each)
        if upper > since:
            self._scribe.snapshot(each, self._rng.randrange(since, upper))
        return "read"


def _opened(stage: _Process) -> Scribe:
    """Return a scribe as soon as all collections exist."""
    while True:
        try:
            client = stage.open()
        except UsageError:
            stage.pause(20)
            continue
        if {"words", "others", "rows"} <= set(client.collections()):
            return Scribe(stage.recorder, client)
        client.close()
        if stage.pause(50):
            raise SystemExit(0)


def reader(stage: _Process) -> int:
    """Read collections as of random times until stopped."""
    stage.listen_to_parent()
    scribe = _opened(stage)
    say("ready")
    while not stage.pause(20):
        try:
            name = stage.chance.choice(["words", "others", "rows"])
            each = scribe.client.collection(name)
            since, upper = scribe.inspect(each)
            if upper > since:
                recent = max(since, upper - stage.chance.choice([1, 5, 50, 1_000]))
                scribe.snapshot(each, stage.chance.randrange(recent, upper))
        except HoldLost:
            _closed(scribe.client)
            scribe = Scribe(stage.recorder, stage.open())
        except UsageError:
            continue  # The collection was just destroyed.
        except (Corruption, InternalError) as error:
            stage.recorder.note("damaged", error=repr(error), key=getattr(error, "key", ""))
    _closed(scribe.client)
    return 0


def listener(stage: _Process) -> int:
    """Listen from since on, with a hold; at the end, reach the upper that the parent sends."""
    stage.listen_to_parent()
    scribe = _opened(stage)
    number = 0
    while True:
        name = stage.chance.choice(["words", "rows"])
        each = scribe.client.collection(name)
        since = each.since
        number += 1
        called = f"{stage.recorder.who}#{number}"
        try:
            listening = scribe.listen(each, since, called)
        except UsageError:
            stage.pause(20)
            continue
        say("ready")
        try:
            while not stage.stop.is_set():
                listening.step(timeout_ms=200)
                if not stage.chance.randrange(60):
                    break
            if not stage.stop.is_set():
                listening.listener.close()
                continue
            expected = int(stage.told.get(name, 0))
            deadline = SYSTEM_CLOCK.boot_ms() + 30_000
            while listening.listener.frontier < expected and SYSTEM_CLOCK.boot_ms() < deadline:
                listening.step(timeout_ms=500)
            listening.ended(expected=expected)
        except (HoldLost, SinceError) as error:
            # Compaction may overtake only a listener without a hold.
            if isinstance(error, SinceError) and stage.options.get("hold") != "no":
                stage.recorder.note(
                    "denied", id=each.id, as_of=since, error=f"SinceError: {error}", held=True
                )
            listening.listener.close()
            if not stage.stop.is_set():
                continue
        except (Corruption, InternalError) as error:
            stage.recorder.note("damaged", error=repr(error), key=getattr(error, "key", ""))
        except UsageError:
            if not stage.stop.is_set():
                continue
        _closed(scribe.client)
        return 0


def holder(stage: _Process) -> int:
    """Own a durable hold, move it from time to time, and read as of its since."""
    stage.listen_to_parent()
    scribe = _opened(stage)
    words = scribe.client.collection("words")
    owner = stage.options.get("owner", "owner")
    hold = scribe.client.hold(owner)
    say("ready")
    at: int | None = hold.sinces().get("words")
    if at is not None:
        stage.recorder.note("held", holder=owner, id=words.id, since=at)
    while not stage.pause(60):
        since, upper = scribe.inspect(words)
        if at is not None and stage.chance.randrange(6):
            scribe.snapshot(words, at, held=True)
        elif upper > since + 1:
            to = stage.chance.randrange(max(since, at or 0), upper)
            if at is not None:  # A hold shrinks at the request, and grows at the response.
                stage.recorder.note("held", holder=owner, id=words.id, since=to)
            try:
                hold.move({"words": to})
            except SinceError:
                if at is not None:
                    stage.recorder.note(
                        "denied", id=words.id, as_of=to, error="SinceError: move", held=True
                    )
                continue
            if at is None:
                stage.recorder.note("held", holder=owner, id=words.id, since=to)
            at = to
    if "keep" not in stage.options:
        stage.recorder.note("unheld", holder=owner, id=words.id)
        hold.drop()
    _closed(scribe.client)
    return 0


ROLES: dict[str, Callable[[_Process], int]] = {
    "puppet": puppet,
    "writer": writer,
    "reader": reader,
    "listener": listener,
    "holder": holder,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
