"""The tasks of one file, each in a thread of its own, kept running.

    running ──error of the moment──► restarting ──pause──► running
       │ ──what a person must see to──► stopped ──resume──► running
       │ ──pause──► paused ──resume──► running
       └ ──drop──► gone

One that fails leaves the others running. A writer that was fenced ends everything and takes
nothing back. The task's thread holds its lock as long as the process lives, paused and
stopped too, so whatever is asked of it is asked of somebody who may do it.
"""

import queue
import random
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import xxhash

from penstock import persist
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.durable import Blob, normal
from penstock.errors import (
    Corruption,
    Fenced,
    PenstockError,
    StoreError,
    TransientError,
    UsageError,
)
from penstock.persist.errors import Closed
from penstock.persist.lake import open_store
from penstock.persist.memory import PAUSED, Memory
from penstock.persist.requests import Request, answer, forget_old_answers, requests
from penstock.pipeline.file import Pipeline
from penstock.retry import pauses_ms
from penstock.telemetry import fields, logger

__all__ = ["Kind", "Loop", "Running", "Task", "told_of", "writer_of"]

log = logger("pipeline")

Kind = Literal["source", "materialization"]

HEAR_EVERY_MS: Final = 1_000
FORGET_EVERY_MS: Final = 60_000
FIRST_PAUSE_MS: Final = 500
LONGEST_PAUSE_MS: Final = 30_000
OWN: Final = frozenset({"resync"})
"""What a loop hears itself, at its ticks."""


class Loop(Protocol):
    """What runs until it is stopped."""

    def run(self, stop: threading.Event, *, once: bool) -> None:
        """Run; with `once`, to where its input is now."""
        ...

    def status(self) -> Mapping[str, Any]:
        """For people."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """A source or a materialization, and how it is run."""

    name: str
    kind: Kind
    url: str
    """Its storage location."""

    writer: str
    build: Callable[[persist.Client], Loop]
    drop: Callable[[persist.Client, bool], None]
    """Take back all it made outside its storage location; or all but its target."""


class Running:
    """What runs, by name."""

    def __init__(
        self,
        tasks: Sequence[Task],
        stop: threading.Event | None = None,
        *,
        restarts: bool = False,
        clock: Clock = SYSTEM_CLOCK,
        dropped: Callable[[Task], None] = lambda _: None,
    ) -> None:
        """With `restarts`, whatever fails but may work later is tried again, for ever."""
        self.stop = stop or threading.Event()
        self._restarts = restarts
        self._clock = clock
        self._dropped = dropped
        self.tasks = {task.name: _Kept(task, self) for task in tasks}

    def status(self) -> Mapping[str, Mapping[str, Any]]:
        """For people, by name."""
        return {name: each.status() for name, each in self.tasks.items()}

    def collections(self) -> frozenset[str]:
        """The collections that tasks have by now."""
        found: set[str] = set()
        for each in self.tasks.values():
            with suppress(Closed):
                if (client := each.client) is not None:
                    found.update(client.state.listed())
        return frozenset(found)

    def run(self, *, once: bool) -> None:
        """Run all of them to their end; with `once`, sources before what takes from them.

        Raises:
            PenstockError: what ended a task, of the first that was.
        """
        waves: Sequence[Sequence[_Kept]] = [
            [each for each in self.tasks.values() if each.task.kind == kind]
            for kind in ("source", "materialization")
        ]
        if not once:
            waves = [[*self.tasks.values()]]
        ended = threading.Event()
        desk = threading.Thread(target=self._hear, args=(ended,), name="desk", daemon=True)
        desk.start()
        try:
            for wave in waves:
                self._run_together(wave, once=once)
                if any(each.error is not None for each in wave):
                    break
        finally:
            ended.set()
            desk.join()
        for each in sorted(self.tasks.values(), key=lambda each: not each.fatal):
            if each.error is not None:
                raise each.error

    def _run_together(self, wave: Sequence["_Kept"], *, once: bool) -> None:
        threads = [
            threading.Thread(target=each.keep, args=(once,), name=each.task.name) for each in wave
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
                if self.stop.is_set() or self._nothing_runs(wave):
                    for each in wave:
                        each.end()

    def _nothing_runs(self, wave: Sequence["_Kept"]) -> bool:
        return all(each.state in ("stopped", "ended") for each in wave)

    def _hear(self, ended: threading.Event) -> None:
        """Bring what is asked of a task to it."""
        forgot_ms = self._clock.boot_ms()
        while not self._clock.wait(ended, HEAR_EVERY_MS):
            forget = self._clock.boot_ms() - forgot_ms >= FORGET_EVERY_MS
            for each in self.tasks.values():
                try:
                    each.hear(forget=forget)
                except StoreError as error:
                    log.warning("requests cannot be read", extra=told_of(each.task.name, error))
            if forget:
                forgot_ms = self._clock.boot_ms()


class _Kept:
    """One task, and what it is doing."""

    def __init__(self, task: Task, running: Running) -> None:
        self.task = task
        self.state = "starting"
        self.error: BaseException | None = None
        """What ended it, or is waited out."""

        self.fatal = False
        """Whether that ends the whole."""

        self._running = running
        self._clock = running._clock
        self._stop = threading.Event()
        self._wakes = threading.Event()
        self._asked: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._taken: set[str] = set()
        self._restarts = 0
        self._loop: Loop | None = None
        self.client: persist.Client | None = None
        self._ending = threading.Event()

    def status(self) -> Mapping[str, Any]:
        """What its loop tells, and what becomes of it."""
        told = {} if self._loop is None else dict(self._loop.status())
        error = self.error or told.get("error")
        return {
            **told,
            "kind": self.task.kind,
            "state": self.state,
            "restarts": self._restarts,
            "error": error
            and {
                "message": str(error),
                "detail": getattr(error, "detail", ""),
                "hint": getattr(error, "hint", ""),
            },
        }

    def end(self) -> None:
        """Let it come to its end."""
        self._ending.set()
        self._interrupt()

    def _interrupt(self) -> None:
        self._stop.set()
        self._wakes.set()

    def hear(self, *, forget: bool) -> None:
        """Take up what is asked of it, if it is ours to do."""
        client = self.client
        if client is None or self.state == "ended":
            return
        beside = self._beside()
        try:
            for request in requests(beside, now_ms=self._clock.now_ms()):
                if request.verb in OWN:
                    if self.task.kind != "source" or self.state in (PAUSED, "stopped"):
                        answer(beside, request, error=self._cannot(request))
                elif request.id not in self._taken:
                    self._taken.add(request.id)
                    self._take_up(request, client)
            if forget:
                forget_old_answers(beside, now_ms=self._clock.now_ms())
        finally:
            beside.close()

    def _take_up(self, request: Request, client: persist.Client) -> None:
        if request.verb == "compact":
            # Upkeep goes on beside what the task does.
            name = f"upkeep of {self.task.name}"
            threading.Thread(target=self._answer, args=(request, client), name=name).start()
        else:
            self._asked.put(request)
            self._interrupt()

    def _cannot(self, request: Request) -> PenstockError:
        if self.task.kind != "source":
            return UsageError(
                f'materialization "{self.task.name}" cannot {request.verb}',
                hint="To write a resource anew, raise backfill: of its binding in the file.",
            )
        return UsageError(
            f'source "{self.task.name}" cannot {request.verb}: it is {self.state}',
            hint=f"First let it go on: penstock resume LOCATION {self.task.name}",
        )

    # Its thread.

    def keep(self, once: bool) -> None:
        """Run it, and do what is asked of it, until the end."""
        pauses = self._pauses()
        try:
            while not self._ending.is_set() and self.state != "ended":
                self._stop.clear()
                self._wakes.clear()
                if self._ending.is_set() or not self._asked.empty():
                    self._interrupt()
                try:
                    with persist.open(self.task.url, writer=self.task.writer) as client:
                        self.client = client
                        if self._is_idle(client):
                            if once:
                                return
                            self._wakes.wait()
                        else:
                            self._run(client, once=once)
                            pauses = self._pauses()
                        self._carry_out(client)
                        if once and self._asked.empty():
                            return
                except Exception as error:  # noqa: BLE001 - the thread's door: told at the end
                    if self.state == "stopped":
                        self._wakes.wait()  # It cannot even be opened, so nothing is asked of it.
                    else:
                        self._judge(error, once=once)
                finally:
                    self.client = None
                if self.state == "restarting":
                    self._clock.wait(self._stop, next(pauses))
        finally:
            self.state = "stopped" if self.error is not None else "ended"

    def _is_idle(self, client: persist.Client) -> bool:
        """Whether somebody must say that it may run."""
        if Memory(client, self.task.name).recall(PAUSED):
            self.state, self.error = PAUSED, None
        return self.state in (PAUSED, "stopped")

    def _run(self, client: persist.Client, *, once: bool) -> None:
        self._loop = self.task.build(client)
        self.state = "running"
        self._loop.run(self._stop, once=once)
        self.error = None

    def _judge(self, error: Exception, *, once: bool) -> None:
        """What to do about an error: everything ends, or this waits, for a while or a person."""
        self.error = error
        name = self.task.name
        unforeseen = not isinstance(error, PenstockError)
        if isinstance(error, Fenced) or (unforeseen and not self._running._restarts):
            self.fatal = True
            self._ending.set()
            self._running.stop.set()
        elif self._running._restarts and not once and (unforeseen or _of_the_moment(error)):
            self.state = "restarting"
            self._restarts += 1
            log.warning("it failed and is started again", extra=told_of(name, error))
            if unforeseen:
                log.error("this was not foreseen; please report it", exc_info=error)
        else:
            self.state = "stopped"
            if once:
                self._ending.set()
            log.error("it has stopped", extra=told_of(name, error))

    def _pauses(self) -> Any:
        return pauses_ms(random.Random(), first_ms=FIRST_PAUSE_MS, cap_ms=LONGEST_PAUSE_MS)

    # What is asked of it.

    def _carry_out(self, client: persist.Client) -> None:
        """Do what is asked, one after the other."""
        while self.state != "ended":
            try:
                request = self._asked.get_nowait()
            except queue.Empty:
                return
            self._answer(request, client)

    def _answer(self, request: Request, client: persist.Client) -> None:
        beside = self._beside()
        try:
            try:
                self._obey(request, client)
            except Fenced:
                raise
            except PenstockError as error:
                answer(beside, request, error=error)
            else:
                answer(beside, request)
        finally:
            beside.close()

    def _obey(self, request: Request, client: persist.Client) -> None:
        match request.verb:
            case "pause":
                Memory(client, self.task.name).write_down({PAUSED: True})
            case "resume":
                Memory(client, self.task.name).write_down({PAUSED: None})
                self.state, self.error = "starting", None
            case "drop":
                self.task.drop(client, request.keep_target)
                self._running._dropped(self.task)
                self.state, self.error = "ended", None
            case "compact":
                client.compact()
            case _:
                raise UsageError(
                    f'{self.task.kind} "{self.task.name}" cannot {request.verb}',
                    hint="Ask it to pause, resume, compact or drop; a source also to resync.",
                )

    def _beside(self) -> Blob:
        return open_store(self.task.url, persist.Settings())


def _of_the_moment(error: Exception) -> bool:
    """Whether it may pass: a line, a store that is away or full; not an object that is damaged."""
    return isinstance(error, TransientError | StoreError) and not isinstance(error, Corruption)


def told_of(name: str, error: BaseException) -> dict[str, Any]:
    """The fields of a log line about what happened to a task."""
    detail = getattr(error, "detail", "")
    return fields(name=name, error=str(error), **({"detail": detail} if detail else {}))


def writer_of(pipeline: Pipeline) -> str:
    """The reentrance id: what the file says, else one of this lake and host."""
    if pipeline.writer is not None:
        return pipeline.writer
    lake = xxhash.xxh64_hexdigest(normal(pipeline.location).encode())[:8]
    return f"{lake}-{socket.gethostname()}"
