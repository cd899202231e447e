"""`penstock` as a process: what a person or a supervisor can do with it, and no more.

It is started in a session of its own, so that a kill of its group is what an operating
system without memory, or an impatient person, does to it.
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
"""For whatever must come at last, on a machine that is busy with others."""


class Up:
    """A `penstock up`, or another verb that runs on."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        """Start it in `folder`, with what it says in a file."""
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
            error.add_note(f"it said:\n{self.said()[-6_000:]}")
        self.kill()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        """All that it has said."""
        with self.log.open("rb") as file:
            file.seek(self._from)
            return file.read().decode(errors="replace")

    def page(self) -> str:
        """Where its page is."""

        def there() -> "re.Match[str] | None":
            self.check()
            return re.search(r"the page is at (\S+)", self.said())

        found = until(there, "the page")
        assert found is not None
        return found[1]

    def ask(self, path: str) -> Answer:
        """What its page answers."""
        return ask(self.page(), path)

    def state(self) -> Any:
        """What the page knows."""
        return self.ask("/api/state").json

    def check(self) -> None:
        """That it runs."""
        assert self.running, f"it ended with {self.process.poll()}: {self.said()[-4_000:]}"

    def await_ready(self, *names: str) -> None:
        """That everything is there and followed, and these are among it."""

        def ready() -> bool:
            self.check()
            if self.ask("/readyz").status != 200:
                return False
            state = self.state()
            return {*names} <= {
                each["name"] for kind in ("sources", "materializations") for each in state[kind]
            }

        until(ready, "/readyz")

    def kill(self) -> None:
        """The whole group, at once; and wait for what was not of the group but belongs to it."""
        if not self.running:
            return
        family = [self.process.pid, *descendants(self.process.pid)]
        stopped = self.stopped()
        os.killpg(self.process.pid, signal.SIGKILL)
        # A stopped process does not notice that those it belongs to have ended.
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        until(lambda: not [pid for pid in family if alive(pid)], f"the end of {family}")

    def pause(self) -> None:
        """Stop the process and all its descendants with SIGSTOP, wherever they are."""
        paused: set[int] = set()
        # A descendant may start another before it is stopped itself.
        while started := {self.process.pid, *descendants(self.process.pid)} - paused:
            for pid in sorted(started):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            paused |= started

    def resume(self) -> None:
        """Continue what `pause` or a failpoint has stopped."""
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def stopped(self) -> list[int]:
        """Return the processes that are stopped, the descendants included."""
        family = (self.process.pid, *descendants(self.process.pid))
        return [pid for pid in family if state_of(pid) == "T"]

    def terminate(self) -> int:
        """Ask it to end as supervisors do; its exit status."""
        family = descendants(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        status = self.wait()
        until(lambda: not [pid for pid in family if alive(pid)], f"the end of {family}")
        return status

    def wait(self) -> int:
        """Its exit status, once it has ended by itself."""
        return self.process.wait(PATIENCE_S)


def penstock(
    folder: Path, *words: str, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """A verb, run to its end."""
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
    """What a verb says that must succeed."""
    ended = penstock(folder, *words, environment=environment)
    assert ended.returncode == 0, (words, ended.stdout[-2_000:], ended.stderr[-4_000:])
    return ended.stdout


def lines(said: str) -> list[Any]:
    """What was printed, one JSON object a line."""
    return [json.loads(line) for line in said.splitlines()]


def until(found: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """Look again and again until there is something."""
    deadline = SYSTEM_CLOCK.boot_ms() + int(patience_s * 1_000)
    while True:
        got = found()
        if got:
            return got
        assert SYSTEM_CLOCK.boot_ms() < deadline, f"waited {patience_s:g} s for {what}"
        rest(0.1)


def rest(seconds: float) -> None:
    """Let time pass."""
    SYSTEM_CLOCK.wait(threading.Event(), int(seconds * 1_000))


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            try:
                parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(each.name))
    found, todo = list[int](), [pid]
    while todo:
        todo += (own := children.get(todo.pop(), []))
        found += own
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not yet buried does not."""
    return state_of(pid) not in "ZX"


def state_of(pid: int) -> str:
    """Return the letter that the kernel has for the state of a process; X if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def java_of(pid: int) -> int:
    """The JVM that a process has started."""
    for each in descendants(pid):
        try:
            words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"java"):
            return each
    raise AssertionError(f"process {pid} has no JVM")
