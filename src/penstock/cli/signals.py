"""Signals and deadlines that end a command which runs until it is stopped."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

from penstock.clock import SYSTEM_CLOCK
from penstock.deadlines import STOP_TIMEOUT_S, stop_timeout_s
from penstock.errors import Fenced, UsageError

__all__ = ["FENCED", "exit_in_time", "stop_in_time", "stop_on_signals"]

FENCED: Final = 3
"""Exit status of a fenced process: a supervisor must not start it again."""

RESUMES: Final = "Durable data is intact; the next start resumes from it."

BURST_MS: Final = 1_000
"""Signals this soon after the first one count as one: a terminal and a supervisor may both send."""


def stop_on_signals(stop: threading.Event) -> None:
    """Set `stop` at SIGINT or SIGTERM; a second signal, after a second, ends the process at once.

    SUBTLE: signal handlers cannot do this. They run only in the main thread, at any point of its
    code. They would block on a lock that the main thread holds. They do not run while the main
    thread waits for a lock and the system delivers the signal to another thread. The interpreter
    writes the number of each signal to a pipe at once, and a thread reads that pipe.
    """
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)

    def wait() -> None:
        os.read(receiver, 1)
        first_ms = SYSTEM_CLOCK.boot_ms()
        stop.set()
        while True:
            number = os.read(receiver, 1)[0]
            if SYSTEM_CLOCK.boot_ms() - first_ms >= BURST_MS:
                _exit("stopped at once by a second signal", status=128 + number)

    threading.Thread(target=wait, name="signals", daemon=True).start()
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)


@contextmanager
def stop_in_time(
    stop: threading.Event,
    unfinished: Callable[[], Sequence[str]],
    fenced: Callable[[], Fenced | None] = lambda: None,
) -> Iterator[None]:
    """End the process if the block still runs when the stop deadline after `stop` has passed.

    `unfinished` names the tasks that the process could not finish. A `fenced` process reports that
    error and exits with its status.
    """
    done = threading.Event()
    timeout_s = stop_timeout_s()

    def watch() -> None:
        while not done.is_set():
            if stop.wait(0.2) and not done.wait(timeout_s):
                if (error := fenced()) is not None:
                    details = [f"detail: {error.detail}"] if error.detail else []
                    _exit(str(error), *details, hint=error.hint, status=FENCED)
                _exit(
                    f"could not stop within {timeout_s:g} s",
                    *(f"detail: {line}" for line in unfinished()),
                    status=1,
                )

    threading.Thread(target=watch, name="stop deadline", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def exit_in_time(status: int) -> None:
    """End the process with `status` if the interpreter has not ended within the stop deadline.

    Threads that wait for a peer keep an interpreter alive that has nothing else to do.
    """
    try:
        timeout_s = stop_timeout_s()
    except UsageError:
        timeout_s = STOP_TIMEOUT_S  # A command that needs the setting has reported it.

    def watch() -> None:
        threading.Event().wait(timeout_s)
        os._exit(status)

    threading.Thread(target=watch, name="exit deadline", daemon=True).start()


def _exit(*lines: str, hint: str = RESUMES, status: int) -> NoReturn:
    """End the process without waiting for anything; durable state is as after a crash."""
    message, *details = lines
    with suppress(OSError):
        os.write(
            sys.__stderr__.fileno() if sys.__stderr__ else 2,
            "\n".join([f"error: {message}", *details, f"hint: {hint}", ""]).encode(),
        )
    os._exit(status)
