"""Supervisor of the tasks of one file, each in its own thread.

    running ──transient error──► restarting ──backoff──► running
       │ ──other error──► stopped ──resume──► running
       │ ──pause──► paused ──resume──► running
       └ ──drop──► ended

A failed task leaves the others running. A fenced writer ends the process and takes nothing
back. The thread of a task holds its lock as long as the process lives, also while the task is
paused or stopped, so the owner of the lock answers every request.
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

__all__ = ["Kind", "Loop", "Supervisor", "Task", "error_fields", "writer_id"]

log = logger("pipeline")

Kind = Literal["source", "materialization"]

REQUEST_POLL_MS: Final = 1_000
ANSWER_CLEANUP_MS: Final = 60_000
LOCK_CHECK_MS: Final = 5_000
"""Interval of the check whether an idle task was fenced."""

FIRST_PAUSE_MS: Final = 500
LONGEST_PAUSE_MS: Final = 30_000
LOOP_COMMANDS: Final = frozenset({"resync"})
"""Commands that the loop itself handles, at its ticks."""


class Loop(Protocol):
    """A loop that runs until it is stopped."""

    def run(self, stop: threading.Event, *, once: bool) -> None:
        """Run until `stop` is set; with `once`, up to the current end of the input."""
        ...

    def status(self) -> Mapping[str, Any]:
        """Return the status as JSON values."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """A source or a materialization, and the functions that run and drop it."""

    name: str
    kind: Kind
    url: str
    """URL of its storage location."""

    writer: str
    build: Callable[[persist.Client], Loop]
    drop: Callable[[persist.Client, bool], None]
    """Drop everything it created outside its storage location; if True, except its resources."""

    take_over: bool = False
    """Replace a process of this host that runs the task."""


class Supervisor:
    """Supervised tasks, by name."""

    def __init__(
        self,
        tasks: Sequence[Task],
        stop: threading.Event | None = None,
        *,
        restarts: bool = False,
        clock: Clock = SYSTEM_CLOCK,
        dropped: Callable[[Task], None] = lambda _: None,
    ) -> None:
        """With `restarts`, a task that fails with a transient error is restarted without limit."""
        self.stop = stop or threading.Event()
        self._restarts = restarts
        self._clock = clock
        self._dropped = dropped
        self.tasks = {task.name: _SupervisedTask(task, self) for task in tasks}

    def status(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the status of the tasks by name."""
        return {name: task.status() for name, task in self.tasks.items()}

    def collections(self) -> frozenset[str]:
        """Return the collections that exist in the storage locations of the tasks."""
        names: set[str] = set()
        for task in self.tasks.values():
            with suppress(Closed):
                if (client := task.client) is not None:
                    names.update(client.state.listed())
        return frozenset(names)

    def fenced(self) -> Fenced | None:
        """Return the error of a task that another process has taken over; None without one."""
        errors = [task.error for task in self.tasks.values()]
        return next((error for error in errors if isinstance(error, Fenced)), None)

    def unfinished(self) -> list[str]:
        """Return a sentence for each task that has not ended, with the reason of its wait."""
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
        """Run all tasks to their end; with `once`, sources before materializations.

        Raises:
            PenstockError: The error that ended a task, fatal errors first; with `once`, also
                the error of a table or binding that is incomplete.
        """
        waves: Sequence[Sequence[_SupervisedTask]] = [
            [task for task in self.tasks.values() if task.task.kind == kind]
            for kind in ("source", "materialization")
        ]
        if not once:
            waves = [[*self.tasks.values()]]
        ended = threading.Event()
        poller = threading.Thread(
            target=self._poll_requests, args=(ended,), name="desk", daemon=True
        )
        poller.start()
        try:
            for wave in waves:
                self._run_together(wave, once=once)
                if any(task.error is not None for task in wave):
                    break
        finally:
            ended.set()
            poller.join()
        for task in sorted(self.tasks.values(), key=lambda task: not task.fatal):
            if task.error is not None:
                raise task.error
        for task in self.tasks.values():
            if task.incomplete is not None:
                raise task.incomplete

    def _run_together(self, wave: Sequence["_SupervisedTask"], *, once: bool) -> None:
        threads = [
            threading.Thread(target=task.run_until_end, args=(once,), name=task.task.name)
            for task in wave
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
                if self.stop.is_set() or _all_stopped(wave):
                    for task in wave:
                        task.end()

    def is_ending(self) -> bool:
        """Return whether the process is about to end, on request or without a running task."""
        return self.stop.is_set() or _all_stopped(self.tasks.values())

    def _poll_requests(self, ended: threading.Event) -> None:
        """Poll the requests of all tasks."""
        cleaned_up_ms = self._clock.boot_ms()
        while not self._clock.wait(ended, REQUEST_POLL_MS):
            clean_up = self._clock.boot_ms() - cleaned_up_ms >= ANSWER_CLEANUP_MS
            for task in self.tasks.values():
                try:
                    task.poll_requests(clean_up=clean_up)
                except PenstockError as error:
                    log.warning(
                        "could not read requests", extra=error_fields(task.task.name, error)
                    )
                except Exception:
                    # Requests to the other tasks must still be answered.
                    log.exception("could not read requests", extra=fields(name=task.task.name))
            if clean_up:
                cleaned_up_ms = self._clock.boot_ms()


def _all_stopped(tasks: Iterable["_SupervisedTask"]) -> bool:
    return all(task.state in ("stopped", "ended") for task in tasks)


class _SupervisedTask:
    """One supervised task and its state."""

    def __init__(self, task: Task, supervisor: Supervisor) -> None:
        self.task = task
        self.state = "starting"
        self.error: BaseException | None = None
        """Error that stopped the task, or the transient error before a restart."""

        self.fatal = False
        """True if the error ends the process."""

        self.incomplete: PenstockError | None = None
        """With `once`: the error of tables or bindings that are incomplete."""

        self._supervisor = supervisor
        self._clock = supervisor._clock
        self._stop = threading.Event()
        self._wakeup = threading.Event()
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._accepted: set[str] = set()
        self._restarts = 0
        self._loop: Loop | None = None
        self.client: persist.Client | None = None
        self._epoch: int | None = None
        """Epoch of the last client."""

        self._maintenance_error: Exception | None = None
        self._ending = threading.Event()

    def status(self) -> Mapping[str, Any]:
        """Return the status of the loop with the state of the task."""
        told = {} if self._loop is None else dict(self._loop.status())
        error = self.error or told.get("error")
        return {
            **told,
            "kind": self.task.kind,
            "state": self.state,
            "restarts": self._restarts,
            "error": error and _describe_error(error),
        }

    def end(self) -> None:
        """Request the end of the task."""
        self._ending.set()
        self._interrupt()

    def _interrupt(self) -> None:
        self._stop.set()
        self._wakeup.set()

    def poll_requests(self, *, clean_up: bool) -> None:
        """Accept new requests to this task."""
        client = self.client
        if client is None or self.state == "ended":
            return
        blob = self._open_blob()
        try:
            for request in requests(blob, now_ms=self._clock.now_ms()):
                if request.verb in LOOP_COMMANDS:
                    # A process that is about to end leaves the request to its successor.
                    if self._rejects_loop_commands() and not self._supervisor.is_ending():
                        answer(blob, request, error=self._rejection(request))
                elif request.id not in self._accepted:
                    self._accepted.add(request.id)
                    self._accept(request, client)
            if clean_up:
                forget_old_answers(blob, now_ms=self._clock.now_ms())
        finally:
            blob.close()

    def _accept(self, request: Request, client: persist.Client) -> None:
        if request.verb == "compact":
            # Maintenance runs next to the loop of the task.
            name = f"upkeep of {self.task.name}"
            threading.Thread(
                target=self._run_maintenance, args=(request, client), name=name
            ).start()
        else:
            self._requests.put(request)
            self._interrupt()

    def _rejects_loop_commands(self) -> bool:
        return self.task.kind != "source" or self.state in (PAUSED, "stopped")

    def _rejection(self, request: Request) -> PenstockError:
        if self.task.kind != "source":
            return UsageError(
                f'materialization "{self.task.name}" cannot {request.verb}',
                hint="To backfill a resource, increase backfill: of its binding in the file.",
            )
        return UsageError(
            f'source "{self.task.name}" cannot {request.verb}: it is {self.state}',
            hint=f"Resume the source first: penstock resume LOCATION {self.task.name}",
        )

    def _run_maintenance(self, request: Request, client: persist.Client) -> None:
        """Run requested maintenance; the thread of the task handles its errors."""
        try:
            self._answer(request, client)
        except Exception as error:  # noqa: BLE001 - thread boundary: raised in the thread of the task
            if client is self.client:
                self._maintenance_error = error
                self._interrupt()
            else:
                # SUBTLE: a client that was closed concurrently has released its lock. That is not
                # a newer owner: the task continues with another client and accepts this again.
                self._accepted.discard(request.id)

    # The thread of the task.

    def run_until_end(self, once: bool) -> None:
        """Run the task and its requests until the end."""
        pauses = self._pauses()
        try:
            while not self._ending.is_set() and self.state != "ended":
                self._stop.clear()
                self._wakeup.clear()
                if self._ending.is_set() or not self._requests.empty():
                    self._interrupt()
                try:
                    self._raise_maintenance_error()
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
                                    self.error = self._paused_error()
                                    return
                                pauses = self._pauses()
                                self._wait_for_request(client)
                            else:
                                try:
                                    self._run_and_store_failure(client, once=once)
                                    pauses = self._pauses()
                                except TransientError as error:
                                    if not self._is_restarted(error, once=once):
                                        raise
                                    # SUBTLE: the lock is held during the backoff, so no other
                                    # process starts the task, and requests are answered.
                                    self._apply_policy(error, once=once)
                                    self._clock.wait(self._stop, next(pauses))
                                    self.state = "starting"
                            self._raise_maintenance_error()
                            self._run_requests(client)
                        finally:
                            self.client = None
                        if once and self._requests.empty():
                            return
                except Exception as error:  # noqa: BLE001 - thread boundary: reported at the end
                    was_stopped = self.state == "stopped"
                    self._handle_error(error, once=once)
                    if was_stopped and not self._ending.is_set():
                        # Requests are accepted only with an open client, so opening is retried.
                        self._clock.wait(self._wakeup, next(pauses))
                if self.state == "restarting":
                    self._clock.wait(self._stop, next(pauses))
        finally:
            self.state = "stopped" if self.error is not None else "ended"

    def _raise_maintenance_error(self) -> None:
        """Raise the error of requested maintenance, if it failed."""
        error, self._maintenance_error = self._maintenance_error, None
        if error is not None:
            raise error

    def _is_idle(self, client: persist.Client) -> bool:
        """Return whether the task waits for a request to run."""
        memory = StateStore(client, self.task.name)
        if memory.get(PAUSED):
            self.state, self.error = PAUSED, None
        if self.state in (PAUSED, "stopped"):
            return True
        if memory.get(FAILURE):
            memory.put({FAILURE: None})
        return False

    def _wait_for_request(self, client: persist.Client) -> None:
        """Wait for a request, and check regularly that the lock is still held.

        Raises:
            Fenced: Another process owns the lock.
        """
        while not self._clock.wait(self._wakeup, LOCK_CHECK_MS):
            # An unreachable store may be back at the next check.
            with suppress(StoreError):
                client.prove()

    def _paused_error(self) -> UsageError:
        return UsageError(
            f'{self.task.kind} "{self.task.name}" is paused, so nothing was done for it',
            hint=f"Resume it first: penstock resume {self._lake} {self.task.name}",
        )

    def _run_and_store_failure(self, client: persist.Client, *, once: bool) -> None:
        """Run the task, and store the error that stops it for other processes to report.

        If the error prevents the write, only this process reports it.
        """
        try:
            self._run(client, once=once)
        except Exception as error:
            if not isinstance(error, Fenced) and not self._is_restarted(error, once=once):
                failure = {"kind": self.task.kind, **_describe_error(error)}
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
            self.incomplete = self._tables_in_error(self._loop.status().get("tables") or ())
        elif once:
            self.incomplete = self._frozen_bindings(self._loop.status().get("degraded") or ())

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
            or "Follow the hint of each table, then resync the source while it runs: "
            f"penstock resync {self._lake} {self.task.name}",
            problems=problems,
        )

    def _frozen_bindings(self, degraded: Sequence[Mapping[str, Any]]) -> PenstockError | None:
        if not degraded:
            return None
        names = ", ".join(binding["collection"] for binding in degraded)
        return DefiniteError(
            f'materialization "{self.task.name}" is degraded: bindings to errored collections are '
            f"frozen: {names}",
            detail=" ".join(
                f"{binding['collection']} is in error since {describe_time(binding['time'])}: "
                f"{binding['message'].rstrip('.')}."
                for binding in degraded
            ),
            hint=" ".join(
                dict.fromkeys(binding["hint"] for binding in degraded if binding["hint"])
            ),
        )

    @property
    def _lake(self) -> str:
        return self.task.url.removesuffix(f"/{self.task.name}")

    def _handle_error(self, error: Exception, *, once: bool) -> None:
        """Handle an error of the thread; a stopped or dropped task keeps its state."""
        name = self.task.name
        if isinstance(error, Fenced) or self.state not in ("stopped", "ended"):
            self._apply_policy(error, once=once)
        elif self.state == "ended":
            log.warning("error after drop", extra=error_fields(name, error))
        else:
            # The error that stopped the task has priority.
            log.warning("stopped task cannot accept requests", extra=error_fields(name, error))

    def _apply_policy(self, error: Exception, *, once: bool) -> None:
        """Set the next state by the error: end the process, restart, or stop the task."""
        self.error = error
        name = self.task.name
        is_unexpected = not isinstance(error, PenstockError)
        if isinstance(error, Fenced) or (is_unexpected and not self._supervisor._restarts):
            self.fatal = True
            self._ending.set()
            self._supervisor.stop.set()
        elif self._is_restarted(error, once=once):
            self.state = "restarting"
            self._restarts += 1
            log.warning("task failed; restarting", extra=error_fields(name, error))
            if is_unexpected:
                log.error("unexpected error; please report it", exc_info=error)
        else:
            self.state = "stopped"
            if once:
                self._ending.set()
            log.error("task stopped", extra=error_fields(name, error))

    def _is_restarted(self, error: Exception, *, once: bool) -> bool:
        is_unexpected = not isinstance(error, PenstockError)
        return self._supervisor._restarts and not once and (is_unexpected or _is_transient(error))

    def _pauses(self) -> Any:
        return pauses_ms(random.Random(), first_ms=FIRST_PAUSE_MS, cap_ms=LONGEST_PAUSE_MS)

    # Requests.

    def _run_requests(self, client: persist.Client) -> None:
        """Run the accepted requests in order."""
        while self.state != "ended":
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                return
            self._answer(request, client)
        self._answer_after_drop()

    def _answer_after_drop(self) -> None:
        """Answer the remaining requests: after the drop no process would."""
        blob = self._open_blob()
        try:
            for request in requests(blob, now_ms=self._clock.now_ms()):
                error = UsageError(
                    f'{self.task.kind} "{self.task.name}" cannot {request.verb}: it was dropped',
                    hint=f"List the tasks: penstock status {self._lake}",
                )
                answer(blob, request, error=None if request.verb == "drop" else error)
        finally:
            blob.close()

    def _answer(self, request: Request, client: persist.Client) -> None:
        blob = self._open_blob()
        try:
            # The requester may have withdrawn the request while the task was busy.
            if not is_pending(blob, request, now_ms=self._clock.now_ms()):
                return
            try:
                self._execute(request, client)
            except Fenced:
                raise  # The new owner of the lock answers the request.
            except PenstockError as error:
                answer(blob, request, error=error)
            except Exception as error:
                answer(blob, request, error=self._internal_error(request, error))
                raise
            else:
                answer(blob, request)
        finally:
            blob.close()

    def _internal_error(self, request: Request, error: Exception) -> InternalError:
        return InternalError(
            f'{self.task.kind} "{self.task.name}" could not {request.verb}',
            detail=f"Unexpected error: {type(error).__name__}: {error}.",
            hint="Please report it with the log. The request can be repeated.",
        )

    def _execute(self, request: Request, client: persist.Client) -> None:
        match request.verb:
            case "pause":
                StateStore(client, self.task.name).put({PAUSED: True})
            case "resume":
                StateStore(client, self.task.name).put({PAUSED: None})
                self.state, self.error = "starting", None
            case "drop":
                self.task.drop(client, request.keep_target)
                # The task is dropped even if the next step fails: a restart would create it again.
                self.state, self.error = "ended", None
                self._report_dropped()
            case "compact":
                client.compact()
            case _:
                raise UsageError(
                    f'{self.task.kind} "{self.task.name}" cannot {request.verb}',
                    hint="Use pause, resume, compact or drop, or for a source resync.",
                )

    def _report_dropped(self) -> None:
        try:
            self._supervisor._dropped(self.task)
        except Exception as error:  # noqa: BLE001 - an error of the catalog, not of this task
            log.warning(
                "dropped task still in catalog; retrying",
                extra=error_fields(self.task.name, error),
            )

    def _open_blob(self) -> Blob:
        return open_store(self.task.url, persist.Settings(stop=self._ending))


def _describe_error(error: Any) -> dict[str, str]:
    if isinstance(error, Mapping):
        return {name: error.get(name) or "" for name in ("message", "detail", "hint")}
    text = str(error) if isinstance(error, PenstockError | str) else repr(error)
    detail, hint = getattr(error, "detail", ""), getattr(error, "hint", "")
    return {"message": text, "detail": detail, "hint": hint}


def _is_transient(error: Exception) -> bool:
    """Return whether the error is transient: a connection, or an unreachable or full store."""
    return isinstance(error, TransientError | StoreError) and not isinstance(error, Corruption)


def error_fields(name: str, error: BaseException) -> dict[str, Any]:
    """Return the log fields of an error of a task."""
    detail = getattr(error, "detail", "")
    return fields(name=name, error=str(error), **({"detail": detail} if detail else {}))


def writer_id(pipeline: Pipeline) -> str:
    """Return the writer id: the id in the file, or one derived from the lake and the host."""
    if pipeline.writer is not None:
        return pipeline.writer
    lake = xxhash.xxh64_hexdigest(normal(pipeline.location).encode())[:8]
    return f"{lake}-{socket.gethostname()}"
