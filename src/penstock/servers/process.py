"""Process of a local server: start, wait for a condition, read the log, end.

The process ends with its parent, even after `kill -9`, if the kernel signals the death of a parent
(Linux, with `setpriv`, started by the main thread).
"""

import shutil
import signal
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self

from penstock.clock import SYSTEM_CLOCK

__all__ = [
    "LocalServer",
    "ServerProcess",
    "end_with_parent",
    "free_port",
    "free_ports",
    "wait_until",
]

TIMEOUT_MS: Final = 60_000
"""Time limit for a start or stop; recovery after a kill takes a second or two."""


class LocalServer(ABC):
    """Server that runs while a `with` block runs."""

    @abstractmethod
    def start(self) -> None:
        """Start the server if it does not run, and wait until it answers."""

    @abstractmethod
    def close(self) -> None:
        """End the server and remove its temporary files. Safe to call twice."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ServerProcess:
    """Process in a folder, which can be restarted after its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[Any] | None = None

    def start(self, command: Sequence[str], **options: Any) -> None:
        """Start the process in a new session, with a log in its folder."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else None."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        """Return whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Exit status, or None before the end of the process."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self) -> None:
        """Wait until the process has ended.

        Raises:
            TimeoutExpired: the process has not ended within `TIMEOUT_MS`.
        """
        if self._process is not None:
            self._process.wait(TIMEOUT_MS / 1_000)

    def wait_or_kill(self) -> None:
        """Wait until the process has ended; kill it after `TIMEOUT_MS`."""
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.wait()

    def log_tail(self, lines: int = 30) -> str:
        """Return the end of the output."""
        try:
            log = (self.folder / "log").read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(log.splitlines()[-lines:])


def end_with_parent(command: Sequence[str], signal_name: str) -> list[str]:
    """Return the command, wrapped to receive this signal at the death of this process."""
    # The kernel sends the signal when the *thread* that started the child ends, so only the main
    # thread may request it.
    if threading.current_thread() is threading.main_thread() and shutil.which("setpriv"):
        return ["setpriv", "--pdeathsig", signal_name, "--", *command]
    return [*command]


def wait_until(
    condition: Callable[[], bool], description: str, *, log: Callable[[], str] | None = None
) -> None:
    """Poll until `condition` returns true.

    Raises:
        TimeoutError: it was not true within `TIMEOUT_MS`; a note has the output of `log`.
    """
    deadline_ms = SYSTEM_CLOCK.boot_ms() + TIMEOUT_MS
    never = threading.Event()
    while not condition():
        if SYSTEM_CLOCK.boot_ms() > deadline_ms:
            error = TimeoutError(f"waited {TIMEOUT_MS:_} ms for {description}")
            if log is not None:
                error.add_note(log())
            raise error
        SYSTEM_CLOCK.wait(never, 20)


def free_port() -> int:
    """Return a loopback port that was free at the time of the call."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return distinct free ports."""
    # All are bound before one is released.
    sockets = [socket.socket() for _ in range(count)]
    try:
        for bound_socket in sockets:
            bound_socket.bind(("127.0.0.1", 0))
        return [bound_socket.getsockname()[1] for bound_socket in sockets]
    finally:
        for bound_socket in sockets:
            bound_socket.close()
