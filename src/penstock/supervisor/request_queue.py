"""Requests of other processes to the tasks of this process.

One poller lists the requests of all tasks, and no other code does. The supervisor executes most
requests in the thread of their task, in order. The loop of a task handles the others
(`LOOP_COMMANDS`) at its ticks: it gets them from the queue, not from the store.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from penstock import persist
from penstock.clock import Clock
from penstock.durable import Blob
from penstock.errors import PenstockError, UsageError
from penstock.persist.requests import (
    Request,
    answer,
    forget_old_answers,
    is_pending,
    requests,
)
from penstock.persist.store import open_store
from penstock.supervisor.task import Task, error_fields
from penstock.telemetry import fields, logger

__all__ = ["LOOP_COMMANDS", "RequestQueue", "polling_requests"]

log = logger("supervisor")

POLL_MS: Final = 1_000
CLEAN_UP_MS: Final = 60_000
LOOP_COMMANDS: Final = frozenset({"resync"})
"""Commands that the loop itself handles, at its ticks."""


class RequestQueue:
    """Requests to one task that its thread or its loop has not executed yet."""

    def __init__(self, task: Task, *, stop: threading.Event, clock: Clock) -> None:
        """Create an empty queue; `stop` ends waits for the store."""
        self._task = task
        self._stop = stop
        self._clock = clock
        self._queue: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._accepted: set[str] = set()
        self._loop_requests: Sequence[Request] = ()

    def poll(self) -> list[Request]:
        """Return the requests for the thread of the task that were not accepted yet, oldest first.

        `loop_requests` returns the requests for the loop.
        """
        with self._store() as blob:
            pending = requests(blob, now_ms=self._clock.now_ms())
        self._loop_requests = tuple(request for request in pending if request.verb in LOOP_COMMANDS)
        return [
            request
            for request in pending
            if request.verb not in LOOP_COMMANDS and request.id not in self._accepted
        ]

    def loop_requests(self) -> Sequence[Request]:
        """Return the requests for the loop, oldest first, until each has a response.

        A tick that fails therefore leaves its requests to the next tick.
        """
        polled = self._loop_requests
        if not polled:
            return ()
        # SUBTLE: a poll that began before a response may return a request again that has it.
        with self._store() as blob:
            now = self._clock.now_ms()
            return [request for request in polled if is_pending(blob, request, now_ms=now)]

    def accept(self, request: Request) -> None:
        """Record that a request will be executed."""
        self._accepted.add(request.id)

    def release(self, request: Request) -> None:
        """Undo `accept`: a later poll returns the request again."""
        self._accepted.discard(request.id)

    def put(self, request: Request) -> None:
        """Add a request for the thread of the task."""
        self._queue.put(request)

    def get(self) -> Request | None:
        """Remove and return the oldest request of the queue; None if it is empty."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def is_empty(self) -> bool:
        """Return whether no request waits for the thread of the task."""
        return self._queue.empty()

    def is_pending(self, request: Request) -> bool:
        """Return whether the requester still waits for the response."""
        with self._store() as blob:
            return is_pending(blob, request, now_ms=self._clock.now_ms())

    def respond(
        self,
        request: Request,
        error: PenstockError | None = None,
        *,
        left: Mapping[str, str] | None = None,
        corrected_rows: int | None = None,
    ) -> None:
        """Respond that a request was executed, except for the tables `left`, or with an error."""
        with self._store() as blob:
            answer(blob, request, left=left, corrected_rows=corrected_rows, error=error)

    def respond_after_drop(self) -> None:
        """Respond to the remaining requests: after the drop no process would."""
        with self._store() as blob:
            for request in requests(blob, now_ms=self._clock.now_ms()):
                error = UsageError(
                    f'{self._task.kind} "{self._task.name}" cannot {request.verb}: it was dropped',
                    hint=f"List the tasks: penstock status {self._task.lake}",
                )
                answer(blob, request, error=None if request.verb == "drop" else error)

    def clean_up(self) -> None:
        """Delete old responses that no requester read."""
        with self._store() as blob:
            forget_old_answers(blob, now_ms=self._clock.now_ms())

    @contextmanager
    def _store(self) -> Iterator[Blob]:
        blob = open_store(self._task.url, persist.Settings(stop=self._stop))
        try:
            yield blob
        finally:
            blob.close()


@contextmanager
def polling_requests(pollers: Mapping[str, Callable[[bool], None]], clock: Clock) -> Iterator[None]:
    """Call the poller of each task regularly during the block, in one thread.

    A poller gets True if it shall also delete old responses.
    """
    ended = threading.Event()
    thread = threading.Thread(
        target=_poll_requests, args=(pollers, clock, ended), name="requests", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _poll_requests(
    pollers: Mapping[str, Callable[[bool], None]], clock: Clock, ended: threading.Event
) -> None:
    cleaned_up_ms = clock.boot_ms()
    while not clock.wait(ended, POLL_MS):
        clean_up = clock.boot_ms() - cleaned_up_ms >= CLEAN_UP_MS
        for name, poll in pollers.items():
            try:
                poll(clean_up)
            except PenstockError as error:
                log.warning("could not read requests", extra=error_fields(name, error))
            except Exception:
                # Requests to the other tasks must still be answered.
                log.exception("could not read requests", extra=fields(name=name))
        if clean_up:
            cleaned_up_ms = clock.boot_ms()
