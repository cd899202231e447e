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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import xxhash

from penstock import persist
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.durable import Blob, normal
from penstock.errors import (
    Corruption,
    DefiniteError,
    Fenced,
    InternalError,
    PenstockError,
    Problem,
    StoreError,
    TransientError,
    UsageError,
)
from penstock.persist.errors import Closed
from penstock.persist.requests import (
    Request,
    answer,
    forget_old_answers,
    is_pending,
    requests,
)
from penstock.persist.state_store import FAILURE, PAUSED, StateStore
from penstock.persist.store import open_store
from penstock.pipeline.file import Pipeline
from penstock.progress.time import describe_time
from penstock.retry import pauses_ms
from penstock.telemetry import fields, logger

__all__ = ["Kind", "Loop", "Running", "Task", "told_of", "writer_of"]

log = logger("pipeline")

Kind = Literal["source", "materialization"]

HEAR_EVERY_MS: Final = 1_000
FORGET_EVERY_MS: Final = 60_000
PROVE_EVERY_MS: Final = 5_000
"""How long a task that rests may not know that another has taken its place."""

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

    take_over: bool = False
    """Whether to replace a process of this host that runs it."""


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

    def fenced(self) -> Fenced | None:
        """Return the error of a task that another process has taken over; None without one."""
        errors = [task.error for task in self.tasks.values()]
        return next((error for error in errors if isinstance(error, Fenced)), None)

    def unfinished(self) -> list[str]:
        """Return a sentence for each task that has not ended, with what it waits for."""
        lines = []
        for name, task in self.tasks.items():
            if task.state in ("stopped", "ended"):
                continue
            waits_for = ""
            with suppress(Exception):  # The store that holds the status may be what hangs.
                waits_for = str(task.status().get("waits_for") or "")
            end = f" and waits for {waits_for.rstrip('.')}" if waits_for else ""
            lines.append(f'{task.task.kind.capitalize()} "{name}" has not ended{end}.')
        return lines

    def run(self, *, once: bool) -> None:
        """Run all of them to their end; with `once`, sources before what takes from them.

        Raises:
            PenstockError: what ended a task, of the first that was; or, with `once`, what a
                task could not bring.
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
        for each in self.tasks.values():
            if each.lacks is not None:
                raise each.lacks

    def _run_together(self, wave: Sequence["_Kept"], *, once: bool) -> None:
        threads = [
            threading.Thread(target=each.keep, args=(once,), name=each.task.name) for each in wave
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
                if self.stop.is_set() or _none_runs(wave):
                    for each in wave:
                        each.end()

    def is_ending(self) -> bool:
        """Return whether the process is about to end, asked to or for lack of a running task."""
        return self.stop.is_set() or _none_runs(self.tasks.values())

    def _hear(self, ended: threading.Event) -> None:
        """Bring what is asked of a task to it."""
        forgot_ms = self._clock.boot_ms()
        while not self._clock.wait(ended, HEAR_EVERY_MS):
            forget = self._clock.boot_ms() - forgot_ms >= FORGET_EVERY_MS
            for each in self.tasks.values():
                try:
                    each.hear(forget=forget)
                except PenstockError as error:
                    log.warning("requests cannot be read", extra=told_of(each.task.name, error))
                except Exception:
                    # Whoever asks the other tasks must be heard all the same.
                    log.exception("requests cannot be read", extra=fields(name=each.task.name))
            if forget:
                forgot_ms = self._clock.boot_ms()


def _none_runs(tasks: Iterable["_Kept"]) -> bool:
    return all(each.state in ("stopped", "ended") for each in tasks)


class _Kept:
    """One task, and what it is doing."""

    def __init__(self, task: Task, running: Running) -> None:
        self.task = task
        self.state = "starting"
        self.error: BaseException | None = None
        """What ended it, or is waited out."""

        self.fatal = False
        """Whether that ends the whole."""

        self.lacks: PenstockError | None = None
        """What it could not bring, if it was to run once and came to its end."""

        self._running = running
        self._clock = running._clock
        self._stop = threading.Event()
        self._wakes = threading.Event()
        self._asked: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._taken: set[str] = set()
        self._restarts = 0
        self._loop: Loop | None = None
        self.client: persist.Client | None = None
        self._epoch: int | None = None
        """In which it wrote last."""

        self._upkeep_error: Exception | None = None
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
            "error": error and _described(error),
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
                    # A process that is about to end leaves the request to the next one.
                    if self._cannot_now() and not self._running.is_ending():
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
            threading.Thread(target=self._keep_up, args=(request, client), name=name).start()
        else:
            self._asked.put(request)
            self._interrupt()

    def _cannot_now(self) -> bool:
        return self.task.kind != "source" or self.state in (PAUSED, "stopped")

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

    def _keep_up(self, request: Request, client: persist.Client) -> None:
        """Upkeep that was asked for. What it fails of is for the task's thread to judge."""
        try:
            self._answer(request, client)
        except Exception as error:  # noqa: BLE001 - the thread's door: raised in the task's own
            if client is self.client:
                self._upkeep_error = error
                self._interrupt()
            else:
                # SUBTLE: a client that was closed meanwhile has given up its lock, and that is
                # no newer owner. The task goes on with another one, and hears this again.
                self._taken.discard(request.id)

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
                    self._check_upkeep()
                    with persist.open(
                        self.task.url,
                        writer=self.task.writer,
                        after=self._epoch,
                        take_over=self.task.take_over,
                        settings=persist.Settings(stop=self._ending),
                    ) as client:
                        self.client, self._epoch = client, client.epoch
                        try:
                            if self._is_idle(client):
                                if once:
                                    self.error = self._is_paused()
                                    return
                                pauses = self._pauses()
                                self._rest(client)
                            else:
                                try:
                                    self._run_and_note_failure(client, once=once)
                                    pauses = self._pauses()
                                except TransientError as error:
                                    if not self._is_restarted(error, once=once):
                                        raise
                                    # SUBTLE: with its lock, so that no other process starts
                                    # the task meanwhile, and requests are answered.
                                    self._judge(error, once=once)
                                    self._clock.wait(self._stop, next(pauses))
                                    self.state = "starting"
                            self._check_upkeep()
                            self._carry_out(client)
                        finally:
                            self.client = None
                        if once and self._asked.empty():
                            return
                except Exception as error:  # noqa: BLE001 - the thread's door: told at the end
                    had_stopped = self.state == "stopped"
                    self._hear_of(error, once=once)
                    if had_stopped and not self._ending.is_set():
                        # It is heard only while it is open, so that is tried again, too.
                        self._clock.wait(self._wakes, next(pauses))
                if self.state == "restarting":
                    self._clock.wait(self._stop, next(pauses))
        finally:
            self.state = "stopped" if self.error is not None else "ended"

    def _check_upkeep(self) -> None:
        """Raise what upkeep that was asked for failed of, if it did."""
        error, self._upkeep_error = self._upkeep_error, None
        if error is not None:
            raise error

    def _is_idle(self, client: persist.Client) -> bool:
        """Whether somebody must say that it may run."""
        memory = StateStore(client, self.task.name)
        if memory.get(PAUSED):
            self.state, self.error = PAUSED, None
        if self.state in (PAUSED, "stopped"):
            return True
        if memory.get(FAILURE):
            memory.put({FAILURE: None})
        return False

    def _rest(self, client: persist.Client) -> None:
        """Wait until something is asked of it, and look whether it still is ours meanwhile.

        Raises:
            Fenced: another process has taken its place.
        """
        while not self._clock.wait(self._wakes, PROVE_EVERY_MS):
            # Of a store that is away nothing can be learned; it may be back at the next look.
            with suppress(StoreError):
                client.prove()

    def _is_paused(self) -> UsageError:
        return UsageError(
            f'{self.task.kind} "{self.task.name}" is paused, so nothing was done for it',
            hint=f"Let it go on first: penstock resume {self._lake} {self.task.name}",
        )

    def _run_and_note_failure(self, client: persist.Client, *, once: bool) -> None:
        """Run the task, and store the error that stops it, so that other processes can report it.

        The error may be that nothing can be stored; then only this process reports it.
        """
        try:
            self._run(client, once=once)
        except Exception as error:
            if not isinstance(error, Fenced) and not self._is_restarted(error, once=once):
                failure = {"kind": self.task.kind, **_described(error)}
                with suppress(PenstockError):
                    StateStore(client, self.task.name).put(
                        {FAILURE: {**failure, "at_ms": self._clock.now_ms()}}
                    )
            raise

    def _run(self, client: persist.Client, *, once: bool) -> None:
        self._loop = self.task.build(client)
        self.state = "running"
        self._loop.run(self._stop, once=once)
        self.error = None
        if once and self.task.kind == "source":
            self.lacks = self._tables_in_error(self._loop.status().get("tables") or ())
        elif once:
            self.lacks = self._frozen_bindings(self._loop.status().get("degraded") or ())

    def _tables_in_error(self, tables: Sequence[Mapping[str, Any]]) -> PenstockError | None:
        errors = {
            table["name"]: Problem(
                table["error"], table.get("error_detail", ""), table.get("error_hint", "")
            )
            for table in tables
            if table.get("error")
        }
        if not errors:
            return None
        problems = [*dict.fromkeys(errors.values())]
        first = problems[0]
        return DefiniteError(
            f'source "{self.task.name}" has tables in error: {", ".join(errors)}',
            detail=f"{first.message.rstrip('.')}. {first.detail}".strip(),
            hint=(first.hint if len(problems) == 1 else "")
            or "Do what each of them asks for, then compare them again while it runs: "
            f"penstock resync {self._lake} {self.task.name}",
            problems=problems,
        )

    def _frozen_bindings(self, degraded: Sequence[Mapping[str, Any]]) -> PenstockError | None:
        if not degraded:
            return None
        names = ", ".join(each["collection"] for each in degraded)
        return DefiniteError(
            f'materialization "{self.task.name}" is degraded: bindings to errored collections are '
            f"frozen: {names}",
            detail=" ".join(
                f"{each['collection']} is in error since {describe_time(each['time'])}: "
                f"{each['message'].rstrip('.')}."
                for each in degraded
            ),
            hint=" ".join(dict.fromkeys(each["hint"] for each in degraded if each["hint"])),
        )

    @property
    def _lake(self) -> str:
        return self.task.url.removesuffix(f"/{self.task.name}")

    def _hear_of(self, error: Exception, *, once: bool) -> None:
        """An error of its thread: it is judged, unless nothing is to come of it any more."""
        name = self.task.name
        if isinstance(error, Fenced) or self.state not in ("stopped", "ended"):
            self._judge(error, once=once)
        elif self.state == "ended":
            log.warning("it was dropped, and then this failed", extra=told_of(name, error))
        else:
            # What it has stopped for is what people must see to.
            log.warning("it has stopped, and cannot be asked now", extra=told_of(name, error))

    def _judge(self, error: Exception, *, once: bool) -> None:
        """What to do about an error: everything ends, or this waits, for a while or a person."""
        self.error = error
        name = self.task.name
        unforeseen = not isinstance(error, PenstockError)
        if isinstance(error, Fenced) or (unforeseen and not self._running._restarts):
            self.fatal = True
            self._ending.set()
            self._running.stop.set()
        elif self._is_restarted(error, once=once):
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

    def _is_restarted(self, error: Exception, *, once: bool) -> bool:
        unforeseen = not isinstance(error, PenstockError)
        return self._running._restarts and not once and (unforeseen or _of_the_moment(error))

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
        self._say_it_is_gone()

    def _say_it_is_gone(self) -> None:
        """Answer all that was asked besides: whoever comes later finds nobody to ask."""
        beside = self._beside()
        try:
            for request in requests(beside, now_ms=self._clock.now_ms()):
                gone = UsageError(
                    f'{self.task.kind} "{self.task.name}" cannot {request.verb}: it was dropped',
                    hint=f"See what there is: penstock status {self._lake}",
                )
                answer(beside, request, error=None if request.verb == "drop" else gone)
        finally:
            beside.close()

    def _answer(self, request: Request, client: persist.Client) -> None:
        beside = self._beside()
        try:
            # The task may have come to this long after it was asked, and they have gone.
            if not is_pending(beside, request, now_ms=self._clock.now_ms()):
                return
            try:
                self._obey(request, client)
            except Fenced:
                raise  # Whoever took our place hears the request, too, and answers it.
            except PenstockError as error:
                answer(beside, request, error=error)
            except Exception as error:
                answer(beside, request, error=self._mistake(request, error))
                raise
            else:
                answer(beside, request)
        finally:
            beside.close()

    def _mistake(self, request: Request, error: Exception) -> InternalError:
        return InternalError(
            f'{self.task.kind} "{self.task.name}" could not {request.verb}',
            detail=f"This was not foreseen: {type(error).__name__}: {error}.",
            hint="Look at its log, and please report it. It may be asked again.",
        )

    def _obey(self, request: Request, client: persist.Client) -> None:
        match request.verb:
            case "pause":
                StateStore(client, self.task.name).put({PAUSED: True})
            case "resume":
                StateStore(client, self.task.name).put({PAUSED: None})
                self.state, self.error = "starting", None
            case "drop":
                self.task.drop(client, request.keep_target)
                # It is gone, whatever comes now: what is run again would be made anew.
                self.state, self.error = "ended", None
                self._tell_dropped()
            case "compact":
                client.compact()
            case _:
                raise UsageError(
                    f'{self.task.kind} "{self.task.name}" cannot {request.verb}',
                    hint="Ask it to pause, resume, compact or drop; a source also to resync.",
                )

    def _tell_dropped(self) -> None:
        try:
            self._running._dropped(self.task)
        except Exception as error:  # noqa: BLE001 - of the catalog, and not of this task
            log.warning(
                "it was dropped, but the catalog still has it; that is tried again",
                extra=told_of(self.task.name, error),
            )

    def _beside(self) -> Blob:
        return open_store(self.task.url, persist.Settings(stop=self._ending))


def _described(error: Any) -> dict[str, str]:
    if isinstance(error, Mapping):
        return {name: error.get(name) or "" for name in ("message", "detail", "hint")}
    text = str(error) if isinstance(error, PenstockError | str) else repr(error)
    detail, hint = getattr(error, "detail", ""), getattr(error, "hint", "")
    return {"message": text, "detail": detail, "hint": hint}


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
