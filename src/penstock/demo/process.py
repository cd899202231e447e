"""The process of a server that is ours: it is awaited, what it says is kept, and it ends with us.

It ends with whoever started it, also by `kill -9`, where the kernel tells a child
of its parent's death (Linux, with `setpriv`, if the main thread has started it).
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
"""How long a server may take to start or stop; recovery after a kill takes a second or two."""


class ServerProcess:
    """A process in a folder, which may be started again when it has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[Any] | None = None

    def start(self, command: Sequence[str], **how: Any) -> None:
        """Start it, in a session of its own, with a log in its folder."""
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
        """Its id, while it runs."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether it is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """How it ended, if it was started and has."""
        return None if self._process is None else self._process.poll()

    def signal(self, how: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self._process is not None:
            self._process.send_signal(how)

    def wait(self) -> None:
        """Until it has ended.

        Raises:
            TimeoutExpired: it has not within `PATIENCE_MS`.
        """
        if self._process is not None:
            self._process.wait(PATIENCE_MS / 1_000)

    def wait_or_kill(self) -> None:
        """Until it has ended; one that takes longer than `PATIENCE_MS` is killed."""
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.wait()

    def log_tail(self, lines: int = 30) -> str:
        """The end of what it said."""
        try:
            said = (self.folder / "log").read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(said.splitlines()[-lines:])


def until_we_end(command: Sequence[str], end: str) -> list[str]:
    """The command, such that it gets the signal `end` when we end."""
    # The signal of a parent's death comes when the *thread* that started
    # the child ends, so only the main thread may ask for it.
    if threading.current_thread() is threading.main_thread() and shutil.which("setpriv"):
        return ["setpriv", "--pdeathsig", end, "--", *command]
    return [*command]


def await_claim(
    claim: Callable[[], bool], what: str, *, said: Callable[[], str] | None = None
) -> None:
    """Look again and again until it is so.

    Raises:
        TimeoutError: it was not within `PATIENCE_MS`; with what a server `said`.
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
    """A port of loopback that nobody listened on just now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Several, no two of them the same."""
    # All are taken before one is given back.
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
