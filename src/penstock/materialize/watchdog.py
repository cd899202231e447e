"""Threads that watch a running step: one reports overdue steps, one cancels after a stop."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from penstock.clock import Clock
from penstock.deadlines import answer_timeout_s, stop_timeout_s
from penstock.errors import PenstockError
from penstock.materialize.status import Status
from penstock.telemetry import fields, logger

__all__ = ["cancel_after_stop", "report_overdue_steps"]

log = logger("materialize")

POLL_S: Final = 0.2
"""Longest wait between two checks of the step, and of the stop event."""


@contextmanager
def report_overdue_steps(
    status: Status, clock: Clock, write_status: Callable[[], None], *, materialization: str
) -> Iterator[None]:
    """Mark a step of the block that takes longer than the answer deadline as overdue.

    `write_status` stores the status for other processes.
    """
    ended = threading.Event()
    deadline_ms = answer_timeout_s() * 1_000

    def watch() -> None:
        watched, since_ms = ("", 0), 0
        while not ended.wait(POLL_S):
            now_ms = clock.boot_ms()
            step = (status.step, status.step_since_ms)
            if step != watched:
                watched, since_ms = step, now_ms
            elif status.step and not status.overdue and now_ms - since_ms >= deadline_ms:
                status.overdue = True
                # The main thread reports errors of the store.
                with suppress(PenstockError):
                    write_status()

    thread = threading.Thread(target=watch, name=f"waits of {materialization}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def cancel_after_stop(
    stop: threading.Event | None, cancel: Callable[[], None], *, materialization: str
) -> Iterator[None]:
    """Call `cancel` a third of the stop deadline after `stop` is set, until the block ends.

    The outcome of a cancelled transaction is unknown, as after a crash.
    """
    if stop is None:
        yield
        return
    ended, grace_s = threading.Event(), stop_timeout_s() / 3

    def watch() -> None:
        while not stop.wait(POLL_S):
            if ended.is_set():
                return
        if ended.wait(grace_s):
            return
        log.warning(
            "transaction still running; cancelling it",
            extra=fields(materialization=materialization, after_s=grace_s),
        )
        # SUBTLE: cancel repeatedly. One call does not cancel work that the job starts later.
        while not ended.is_set():
            cancel()
            ended.wait(POLL_S)

    threading.Thread(target=watch, name=f"stop of {materialization}", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
