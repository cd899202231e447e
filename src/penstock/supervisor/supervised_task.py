"""One supervised task: its thread, its state and its requests.

The thread of a task holds the lock of its storage location as long as the process lives, also
while the task is paused or stopped. So the owner of the lock answers every request.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from penstock import persist
from penstock.clock import Clock
from penstock.errors import (
    DefiniteError,
    Fenced,
    InternalError,
    PenstockError,
    Problem,
    StoreError,
    TransientError,
    UsageError,
)
from penstock.persist.requests import Request
from penstock.persist.state_store import FAILURE, PAUSED, StateStore
from penstock.progress.time import describe_time
from penstock.retry import Policy, pauses_ms, policy_of
from penstock.supervisor.request_queue import RequestQueue
from penstock.supervisor.states import Event, State, event_of, next_state
from penstock.supervisor.status import (
    ErrorStatus,
    FrozenBinding,
    MaterializationStatus,
    SourceStatus,
    TableStatus,
    TaskStatus,
)
from penstock.supervisor.task import Loop, RequestHandler, Task, error_fields
from penstock.telemetry import logger

__all__ = ["SupervisedTask", "run_loop"]

log = logger("supervisor")

LOCK_CHECK_MS: Final = 5_000
"""Interval of the check whether an idle task was fenced."""

FIRST_RESTART_MS: Final = 500
LONGEST_RESTART_MS: Final = 30_000


class SupervisedTask:
    """One task that runs in a thread, and the requests to it."""

    def __init__(
        self,
        task: Task,
        *,
        process_stop: threading.Event,
        restarts: bool,
        clock: Clock,
        dropped: Callable[[Task], None],
    ) -> None:
        """Prepare the task; `run_until_end` runs it.

        Args:
            task: the source or materialization.
            process_stop: event that the task sets if an error ends the process.
            restarts: restart the task after an error that may be transient.
            clock: source of time and waits.
            dropped: function that is called after the task was dropped.
        """
        self.task = task
        self.state = State.STARTING
        self.error: BaseException | None = None
        """Error that stopped the task, or the error before a restart."""

        self.is_fatal = False
        """True if the error ends the process."""

        self.incomplete: PenstockError | None = None
        """With `once`: the error of tables or bindings that are incomplete."""

        self.client: persist.Client | None = None
        self._process_stop = process_stop
        self._may_restart = restarts
        self._clock = clock
        self._dropped = dropped
        self._stop = threading.Event()
        self._wakeup = threading.Event()
        self._ending = threading.Event()
        self._requests = RequestQueue(task, stop=self._ending, clock=clock)
        self._restarts = 0
        self._loop: Loop | None = None
        self._epoch: int | None = None
        """Epoch of the last client."""

        self._maintenance_error: Exception | None = None

    def status(self) -> TaskStatus:
        """Return the state of the task with the status of its loop."""
        loop = None if self._loop is None else self._loop.status()
        error = None if loop is None else loop.error_status
        if self.error is not None:
            error = ErrorStatus.of(self.error)
        return TaskStatus(self.task.kind, self.state, self._restarts, error, loop)

    def is_over(self) -> bool:
        """Return whether the task neither runs nor will run without a request."""
        return self.state in (State.STOPPED, State.ENDED)

    def end(self) -> None:
        """Request the end of the task."""
        self._ending.set()
        self._interrupt()

    def _interrupt(self) -> None:
        self._stop.set()
        self._wakeup.set()

    # The thread of the poller.

    def poll_requests(self, *, clean_up: bool, is_ending: Callable[[], bool]) -> None:
        """Accept new requests to this task; `is_ending` returns whether the process ends."""
        client = self.client
        if client is None or self.state == State.ENDED:
            return
        for request in self._requests.poll():
            self._accept(request, client)
        # A process that is about to end leaves the requests to its successor.
        if self._rejects_loop_commands() and not is_ending():
            for request in self._requests.loop_requests():
                self._requests.respond(request, self._rejection(request))
        if clean_up:
            self._requests.clean_up()

    def _accept(self, request: Request, client: persist.Client) -> None:
        self._requests.accept(request)
        if request.verb == "compact":
            # Maintenance runs next to the loop of the task.
            name = f"maintenance of {self.task.name}"
            threading.Thread(
                target=self._run_maintenance, args=(request, client), name=name
            ).start()
        else:
            self._requests.put(request)
            self._interrupt()

    def _rejects_loop_commands(self) -> bool:
        return self.task.kind != "source" or self.state in (State.PAUSED, State.STOPPED)

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
            self._execute_and_respond(request, client)
        except Exception as error:  # noqa: BLE001 - thread boundary: raised in the thread of the task
            if client is self.client:
                self._maintenance_error = error
                self._interrupt()
            else:
                # SUBTLE: a client that was closed concurrently has released its lock. That is not
                # a newer owner: the task continues with another client and accepts this again.
                self._requests.release(request)

    # The thread of the task.

    def run_until_end(self, once: bool) -> None:
        """Run the task and its requests until the end."""
        pauses = _restart_pauses()
        try:
            while not self._ending.is_set() and self.state != State.ENDED:
                self._stop.clear()
                self._wakeup.clear()
                if self._ending.is_set() or not self._requests.is_empty():
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
                                pauses = _restart_pauses()
                                self._wait_for_request(client)
                            else:
                                try:
                                    self._run_and_store_failure(client, once=once)
                                    pauses = _restart_pauses()
                                except Exception as error:
                                    if not self._keeps_lock(error, once=once):
                                        raise
                                    # SUBTLE: the lock is held during the backoff, so no other
                                    # process starts the task, and requests are answered.
                                    self._handle_error(error, once=once)
                                    self._clock.wait(self._stop, next(pauses))
                            self._raise_maintenance_error()
                            self._run_requests(client)
                        finally:
                            self.client = None
                        if once and self._requests.is_empty():
                            return
                except Exception as error:  # noqa: BLE001 - thread boundary: reported at the end
                    was_stopped = self.state == State.STOPPED
                    self._handle_error(error, once=once)
                    if self.state == State.RESTARTING:
                        self._clock.wait(self._stop, next(pauses))
                    elif was_stopped and not self._ending.is_set():
                        # Requests are accepted only with an open client, so opening is retried.
                        self._clock.wait(self._wakeup, next(pauses))
        finally:
            self._move(Event.FAIL if self.error is not None else Event.END)

    def _move(self, event: Event) -> None:
        self.state = next_state(self.state, event)

    def _raise_maintenance_error(self) -> None:
        """Raise the error of requested maintenance, if it failed."""
        error, self._maintenance_error = self._maintenance_error, None
        if error is not None:
            raise error

    def _is_idle(self, client: persist.Client) -> bool:
        """Return whether the task waits for a request to run."""
        store = StateStore(client, self.task.name)
        if store.get(PAUSED):
            self._move(Event.PAUSE)
            self.error = None
        if self.state in (State.PAUSED, State.STOPPED):
            return True
        if store.get(FAILURE):
            store.put({FAILURE: None})
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
            hint=f"Resume it first: penstock resume {self.task.lake} {self.task.name}",
        )

    def _run_and_store_failure(self, client: persist.Client, *, once: bool) -> None:
        """Run the task, and store the error that stops it for other processes to report.

        If the error prevents the write, only this process reports it.
        """
        try:
            self._run(client, once=once)
        except Exception as error:
            if not isinstance(error, Fenced) and self._event(error, once=once) != Event.RETRY:
                failure = {"kind": self.task.kind, **ErrorStatus.of(error).to_json()}
                with suppress(PenstockError):
                    StateStore(client, self.task.name).put(
                        {FAILURE: {**failure, "at_ms": self._clock.now_ms()}}
                    )
            raise

    def _run(self, client: persist.Client, *, once: bool) -> None:
        try:
            self._loop = loop = self.task.build(client)
        except TransientError:
            # A wait that the end of the task cancels is not a failure.
            if self._stop.is_set() or self._process_stop.is_set():
                return
            raise
        self._move(Event.RUN)
        if isinstance(loop, RequestHandler):
            loop.use_requests(self._requests)
            # A run with `once` may end before the poller lists the requests.
            self._requests.poll()
        run_loop(loop, self._stop, once=once, clock=self._clock, name=self.task.name)
        self.error = None
        if once:
            match loop.status():
                case SourceStatus(tables=tables):
                    self.incomplete = self._tables_in_error(tables)
                case MaterializationStatus(degraded=degraded):
                    self.incomplete = self._frozen_bindings(degraded)

    def _tables_in_error(self, tables: Sequence[TableStatus]) -> PenstockError | None:
        errors = {
            table.name: Problem(table.error, table.error_detail, table.error_hint)
            for table in tables
            if table.error
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
            f"penstock resync {self.task.lake} {self.task.name}",
            problems=problems,
        )

    def _frozen_bindings(self, degraded: Sequence[FrozenBinding]) -> PenstockError | None:
        if not degraded:
            return None
        names = ", ".join(binding.collection for binding in degraded)
        return DefiniteError(
            f'materialization "{self.task.name}" is degraded: bindings to errored collections are '
            f"frozen: {names}",
            detail=" ".join(
                f"{binding.collection} is in error since {describe_time(binding.time)}: "
                f"{binding.message.rstrip('.')}."
                for binding in degraded
            ),
            hint=" ".join(dict.fromkeys(binding.hint for binding in degraded if binding.hint)),
        )

    def _event(self, error: Exception, *, once: bool) -> Event:
        return event_of(policy_of(error), restarts=self._may_restart and not once)

    def _keeps_lock(self, error: Exception, *, once: bool) -> bool:
        """Return whether the client stays open during the backoff: the store has not failed."""
        return policy_of(error) is Policy.RESUME and self._event(error, once=once) == Event.RETRY

    def _handle_error(self, error: Exception, *, once: bool) -> None:
        """Set the next state by the error: end the process, restart, or stop the task.

        A stopped or dropped task keeps its state, unless another process owns its lock.
        """
        event, extra = self._event(error, once=once), error_fields(self.task.name, error)
        was_over = self.is_over()
        if was_over and event != Event.EXIT:
            ended = self.state == State.ENDED
            log.warning(
                "error after drop" if ended else "stopped task cannot accept requests", extra=extra
            )
            return
        self._move(event)
        self.error = error
        match event:
            case Event.EXIT:
                self.is_fatal = True
                self._ending.set()
                self._process_stop.set()
            case Event.RETRY:
                self._restarts += 1
                log.warning("task failed; restarting", extra=extra)
                if policy_of(error) is Policy.REPORT:
                    log.error("unexpected error; please report it", exc_info=error)
            case _:
                if once:
                    self._ending.set()
                log.error("task stopped", extra=extra)

    # Requests.

    def _run_requests(self, client: persist.Client) -> None:
        """Run the accepted requests in order."""
        while self.state != State.ENDED:
            request = self._requests.get()
            if request is None:
                return
            self._execute_and_respond(request, client)
        self._requests.respond_after_drop()

    def _execute_and_respond(self, request: Request, client: persist.Client) -> None:
        # The requester may have withdrawn the request while the task was busy.
        if not self._requests.is_pending(request):
            return
        try:
            self._execute(request, client)
        except Fenced:
            raise  # The new owner of the lock answers the request.
        except PenstockError as error:
            self._requests.respond(request, error)
        except Exception as error:
            self._requests.respond(request, self._internal_error(request, error))
            raise
        else:
            self._requests.respond(request)

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
                self._move(Event.RESUME)
                self.error = None
            case "drop":
                self.task.drop(client, request.keep_target)
                # The task is dropped even if the next step fails: a restart would create it again.
                self._move(Event.DROP)
                self.error = None
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
            self._dropped(self.task)
        except Exception as error:  # noqa: BLE001 - an error of the catalog, not of this task
            log.warning(
                "dropped task still in catalog; retrying",
                extra=error_fields(self.task.name, error),
            )


def run_loop(loop: Loop, stop: threading.Event, *, once: bool, clock: Clock, name: str) -> None:
    """Run a loop to its end, and resume it after each transient error, with backoff.

    The loop keeps its counters, and the caller the lock of the storage location.

    Raises:
        PenstockError: an error after which the loop cannot be resumed.
    """
    pauses = pauses_ms(random.Random())
    while True:
        commits = loop.commits
        try:
            loop.run(stop, once=once)
        except Exception as error:
            if policy_of(error) is not Policy.RESUME or (once and not loop.is_resumable):
                raise
            if loop.commits > commits:
                pauses = pauses_ms(random.Random())
            pause_ms = next(pauses)
            extra = error_fields(name, error, step=loop.step, pause_ms=pause_ms)
            if stop.is_set():
                log.warning("task stopped before its transaction was complete", extra=extra)
                return
            log.warning("task failed; retrying", extra=extra)
            clock.wait(stop, pause_ms)
        else:
            return


def _restart_pauses() -> Iterator[int]:
    return pauses_ms(random.Random(), first_ms=FIRST_RESTART_MS, cap_ms=LONGEST_RESTART_MS)
