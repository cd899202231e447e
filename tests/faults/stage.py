"""Stage for step-by-step executions in one process.

Clients represent processes. Each has its own view of one store and can be cut
off at any time; after that, none of its calls reaches the store. Time passes
only when the test advances it, or by waits on it.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.durable import Blob
from penstock.durable.blob import Listed
from penstock.durable.memory import MemoryBlob, Shelf
from penstock.durable.retrying_blob import RetryingBlob
from penstock.errors import IndeterminateError, PenstockError, StoreRefused
from penstock.persist import TEXT, UNIT, Client, Collection, Settings
from penstock.persist.maintenance import Maintenance
from penstock.testing.stores import PowerCut
from tests.faults.history import Event, Recorder, Scribe, merged, note_final

HOUR_MS = 60 * 60_000


class ManualClock:
    """Manual clock: a wait returns at once and advances the time by its timeout."""

    def __init__(self, now_ms: int = 10 * HOUR_MS) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()

    def now_ms(self) -> int:
        return self._now_ms

    def boot_ms(self) -> int:
        return self._now_ms

    def advance(self, ms: int) -> None:
        with self._lock:
            self._now_ms += ms

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        self.advance(timeout_ms)
        return event.is_set()


class SlowClock(ManualClock):
    """Clock of another machine, whose calendar is `behind_ms` behind."""

    def __init__(self, other: ManualClock, behind_ms: int) -> None:
        self._other = other
        self._behind_ms = behind_ms

    def now_ms(self) -> int:
        return self._other.now_ms() - self._behind_ms

    def boot_ms(self) -> int:
        return self._other.boot_ms()

    def advance(self, ms: int) -> None:
        self._other.advance(ms)


class HookBlob:
    """`Blob` that calls a hook around each call, and can be cut off."""

    def __init__(self, inner: Blob) -> None:
        self.inner = inner
        self.before: Callable[[str, str, bytes], bool] | None = None
        """Hook, called with operation, key and bytes. It is disarmed while it runs."""

        self.after: Callable[[str, str, bytes], bool] | None = None
        self.dead = False

    @property
    def name(self) -> str:
        return self.inner.name

    def get(self, key: str, *, start: int = 0) -> bytes | None:
        return self._call("get", key, b"", lambda: self.inner.get(key, start=start))

    def put(self, key: str, data: bytes) -> None:
        self._call("put", key, data, lambda: self.inner.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        return self._call("create", key, data, lambda: self.inner.create(key, data))

    def settle(self, keys: list[str]) -> None:
        self._call("settle", keys[0] if keys else "", b"", lambda: self.inner.settle(keys))

    def delete(self, key: str) -> None:
        self._call("delete", key, b"", lambda: self.inner.delete(key))

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        return self._call("list", prefix, b"", lambda: self.inner.list(prefix, after=after))

    def close(self) -> bool:
        return True

    def _call(self, verb: str, key: str, data: bytes, call: Callable[[], Any]) -> Any:
        hook, self.before = self.before, None
        if hook is not None:
            self.before = hook if not self._run(hook, verb, key, data) else self.before
        if self.dead:
            raise StoreRefused("this process was cut off")
        try:
            answer = call()
        except PowerCut:
            self.dead = True
            raise IndeterminateError("the power failed") from None
        hook, self.after = self.after, None
        if hook is not None:
            self.after = hook if not self._run(hook, verb, key, data) else self.after
        return answer

    def _run(self, hook: Callable[..., object], verb: str, key: str, data: bytes) -> bool:
        """Return whether the hook is finished and must not run again."""
        return bool(hook(verb, key, data))


def once(
    verb: str, prefix: str, deed: Callable[[bytes], object]
) -> Callable[[str, str, bytes], bool]:
    """Return a hook that runs `deed` once, at the first `verb` on a key with `prefix`."""

    def hook(operation: str, key: str, data: bytes) -> bool:
        if operation != verb or not key.startswith(prefix):
            return False
        deed(data)
        return True

    return hook


@dataclass
class Actor:
    """Client that represents a process."""

    scribe: Scribe
    blob: HookBlob
    clock: ManualClock

    @property
    def client(self) -> Client:
        return self.scribe.client

    def words(self, name: str = "words") -> Collection:
        return self.client.create_or_load(name, key=TEXT, value=UNIT)

    @property
    def maintenance(self) -> Maintenance:
        maintenance = self.client._runtime.maintenance
        assert maintenance is not None
        return maintenance

    def roll_up(self) -> None:
        self.maintenance.roll_up()

    def truncate(self) -> None:
        self.maintenance._collector.truncate()

    def cut_off(self) -> None:
        """Prevent all further calls from reaching the store, as `kill -9` does."""
        with suppress(PenstockError):
            for listener in self.scribe.listeners:
                listener.close()
        self.blob.dead = True
        self.client._finalizer.detach()
        with suppress(PenstockError):
            self.client._runtime.close()


@dataclass
class Stage:
    """Store with all its clients."""

    store: Callable[[ManualClock], Blob]
    settings: Settings = field(
        default_factory=lambda: Settings(background=False, notify="", upkeep_ms=0, poll_ms=1_000)
    )
    seed: int = 1
    recorders: list[Recorder] = field(default_factory=list)
    actors: list[Actor] = field(default_factory=list)
    clock: ManualClock = field(default_factory=ManualClock)

    @classmethod
    def in_memory(cls, **settings: Any) -> "Stage":
        shelf = Shelf()
        stage = cls(lambda clock: MemoryBlob(shelf, name="memory:stage", clock=clock))
        stage.settings = replace(stage.settings, **settings)
        return stage

    def enter(
        self,
        who: str,
        *,
        writer: str | None = None,
        hold: bool = True,
        clock: ManualClock | None = None,
        inner: Blob | None = None,
        **settings: Any,
    ) -> Actor:
        """Open the location as a new process."""
        clock = clock or self.clock
        blob = HookBlob(inner or self.store(clock))
        self.seed += 1
        chosen = replace(self.settings, clock=clock, chance=random.Random(self.seed), **settings)
        steady = RetryingBlob(blob, clock, chosen.chance, patience_ms=chosen.patience_ms)
        recorder = Recorder(who)
        self.recorders.append(recorder)
        client = Client(steady, chosen, writer=writer, hold=hold)
        actor = Actor(Scribe(recorder, client), blob, clock)
        self.actors.append(actor)
        return actor

    def history(self, *, final: bool = True) -> list[Event]:
        """Return all recorded events, with the state that a new reader finds at the end."""
        if final:
            recorder = Recorder("inspector")
            self.recorders.append(recorder)
            try:
                actor = self.enter("reader-at-the-end", hold=False)
            except PenstockError as error:
                recorder.note("damaged", error=repr(error), key=getattr(error, "key", ""))
            else:
                note_final(recorder, actor.client, actor.blob)
        return merged(self.recorders)

    def close(self) -> None:
        for actor in self.actors:
            actor.cut_off()


@contextmanager
def on(stage: Stage) -> Iterator[Stage]:
    """Yield a stage that is closed at the end."""
    try:
        yield stage
    finally:
        stage.close()
