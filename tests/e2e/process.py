"""`penstock` as a process, controlled as a person or a supervisor does.

The process has its own session, so its complete process group can be killed.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from penstock.clock import SYSTEM_CLOCK
from tests.web.http_client import Answer, ask

T = TypeVar("T")

PROGRAM: Final = (sys.executable, "-m", "penstock.cli.main")
PATIENCE_S: Final = 240.0
"""Timeout of every wait, for a loaded machine."""


class Up:
    """Running `penstock up`, or another command that runs until it is stopped."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        """Start the command in `folder`, with its output in a file."""
        self.log = log or folder / "up.log"
        self._from = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*PROGRAM, *words],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(f"output of the process:\n{self.output()[-6_000:]}")
        self.kill()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def output(self) -> str:
        """Return the complete output of this process."""
        with self.log.open("rb") as file:
            file.seek(self._from)
            return file.read().decode(errors="replace")

    def page(self) -> str:
        """Return the URL of its status page."""

        def find_url() -> "re.Match[str] | None":
            self.check()
            return re.search(r"status page: (\S+)", self.output())

        match = until(find_url, "the status page")
        assert match is not None
        return match[1]

    def get(self, path: str) -> Answer:
        """Return the response of its status page."""
        return ask(self.page(), path)

    def state(self) -> Any:
        """Return the state in the status page."""
        return self.get("/api/state").json

    def check(self) -> None:
        """Check that the process runs."""
        assert self.running, f"exit status {self.process.poll()}: {self.output()[-4_000:]}"

    def await_ready(self, *names: str) -> None:
        """Wait until `/readyz` succeeds and these tasks exist."""

        def ready() -> bool:
            self.check()
            if self.get("/readyz").status != 200:
                return False
            state = self.state()
            return {*names} <= {
                each["name"] for kind in ("sources", "materializations") for each in state[kind]
            }

        until(ready, "/readyz")

    def kill(self) -> None:
        """Kill the process group and its stopped descendants; wait for the end of all."""
        if not self.running:
            return
        family = [self.process.pid, *descendants(self.process.pid)]
        stopped = self.stopped()
        os.killpg(self.process.pid, signal.SIGKILL)
        # A stopped process does not notice the end of its parents.
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        until(lambda: not [pid for pid in family if alive(pid)], f"the end of {family}")

    def pause(self) -> None:
        """Stop the process and all its descendants with SIGSTOP."""
        paused: set[int] = set()
        # A descendant may start another before it is stopped itself.
        while started := {self.process.pid, *descendants(self.process.pid)} - paused:
            for pid in sorted(started):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            paused |= started

    def resume(self) -> None:
        """Continue processes that `pause` or a failpoint has stopped."""
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def stopped(self) -> list[int]:
        """Return the processes that are stopped, the descendants included."""
        family = (self.process.pid, *descendants(self.process.pid))
        return [pid for pid in family if state_of(pid) == "T"]

    def terminate(self) -> int:
        """Send SIGTERM and return the exit status."""
        family = descendants(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        status = self.wait()
        until(lambda: not [pid for pid in family if alive(pid)], f"the end of {family}")
        return status

    def wait(self) -> int:
        """Wait for the end of the process and return its exit status."""
        return self.process.wait(PATIENCE_S)


def penstock(
    folder: Path, *words: str, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    return subprocess.run(
        [*PROGRAM, *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, **(environment or {})},
    )


def well(folder: Path, *words: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the output of a command that must succeed."""
    ended = penstock(folder, *words, environment=environment)
    assert ended.returncode == 0, (words, ended.stdout[-2_000:], ended.stderr[-4_000:])
    return ended.stdout


def lines(text: str) -> list[Any]:
    """Parse output with one JSON object per line."""
    return [json.loads(line) for line in text.splitlines()]


def until(poll: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """Poll until the result is true, and return it."""
    deadline = SYSTEM_CLOCK.boot_ms() + int(patience_s * 1_000)
    while True:
        result = poll()
        if result:
            return result
        assert SYSTEM_CLOCK.boot_ms() < deadline, f"waited {patience_s:g} s for {what}"
        rest(0.1)


def rest(seconds: float) -> None:
    """Wait for this many seconds."""
    SYSTEM_CLOCK.wait(threading.Event(), int(seconds * 1_000))


def descendants(pid: int) -> list[int]:
    """Return the PIDs of all descendants of a process."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(folder.name))
    pids, todo = list[int](), [pid]
    while todo:
        todo += (own := children.get(todo.pop(), []))
        pids += own
    return pids


def alive(pid: int) -> bool:
    """Return whether a process runs; a defunct process does not."""
    return state_of(pid) not in "ZX"


def state_of(pid: int) -> str:
    """Return the kernel's letter of the state of a process; X if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def java_of(pid: int) -> int:
    """Return the PID of the JVM that a process has started."""
    for child in descendants(pid):
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"java"):
            return child
    raise AssertionError(f"process {pid} has no JVM")
