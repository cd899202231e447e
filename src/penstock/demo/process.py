"""Local server process: wait for it, store its output, and end it with its parent.

The process ends with its parent, even after `kill -9`, if the kernel signals the death of a parent
(Linux, with `setpriv`, started by the main thread).
"""

import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.clock import SYSTEM_CLOCK

__all__ = ["ServerProcess", "await_claim", "free_port", "free_ports", "until_we_end"]

PATIENCE_MS: Final = 60_000
"""Time limit for a start or stop; recovery after a kill takes a second or two."""


class ServerProcess:
    """Process in a folder, which can be restarted after its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[Any] | None = None

    def start(self, command: Sequence[str], **how: Any) -> None:
        """Start the process in a new session, with a log in its folder."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **how,
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

    def signal(self, how: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self._process is not None:
            self._process.send_signal(how)

    def wait(self) -> None:
        """Wait until the process has ended.

        Raises:
            TimeoutExpired: the process has not ended within `PATIENCE_MS`.
        """
        if self._process is not None:
            self._process.wait(PATIENCE_MS / 1_000)

    def wait_or_kill(self) -> None:
        """Wait until the process has ended; kill it after `PATIENCE_MS`."""
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.wait()

    def log_tail(self, lines: int = 30) -> str:
        """Return the end of the output."""
        try:
            said = (self.folder / "log").read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(said.splitlines()[-lines:])


def until_we_end(command: Sequence[str], end: str) -> list[str]:
    """Return the command, wrapped to receive the signal `end` at the death of this process."""
    # The kernel sends the signal when the *thread* that started the child ends, so only the main
    # thread may request it.
    if threading.current_thread() is threading.main_thread() and shutil.which("setpriv"):
        return ["setpriv", "--pdeathsig", end, "--", *command]
    return [*command]


def await_claim(
    claim: Callable[[], bool], what: str, *, said: Callable[[], str] | None = None
) -> None:
    """Poll until `claim` returns true.

    Raises:
        TimeoutError: it was not true within `PATIENCE_MS`; a note has the output of `said`.
    """
    until = SYSTEM_CLOCK.boot_ms() + PATIENCE_MS
    never = threading.Event()
    while not claim():
        if SYSTEM_CLOCK.boot_ms() > until:
            late = TimeoutError(f"waited {PATIENCE_MS:_} ms for {what}")
            if said is not None:
                late.add_note(said())
            raise late
        SYSTEM_CLOCK.wait(never, 20)


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return distinct free ports."""
    # All are bound before one is released.
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
