"""Processes that can be killed: connectors and runtimes, forked from one that has imported all.

A process of its own takes a second to start, most of it imports, and a suite of
crashes starts hundreds. So they are forked by multiprocessing's forkserver, which
itself runs nothing. What they say goes to a file; a bug is planted in them by name.
"""

import faulthandler
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from penstock.clock import SYSTEM_CLOCK
from penstock.connectors import built_in
from penstock.materialize import driver, shard
from penstock.materialize.here import TasksHere
from penstock.materialize.running import tasks_of
from penstock.pipeline import Pipeline
from penstock.pipeline.supervisor import Supervisor
from penstock.sdk import serve
from tests.chaos.defects import planted

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "tests.chaos.warm",
        *(
            f"penstock.connectors.{each}"
            for each in (
                "sqlite",
                "postgres",
                "files.plain_files",
                "files.push_files",
                "files.staged_files",
            )
        ),
    ]
)

PATIENCE_MS = 60_000


def spoken(said: str) -> None:
    """From now on, what is said goes to a file, and of the parents nothing is left."""
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def serving(name: str, address: str, defect: str | None, said: str) -> None:
    """Be a connector."""
    spoken(said)
    with planted(defect), serve(built_in(name), address) as server:
        server.wait()


class Moving(TasksHere):
    """Tasks that go to one of two workers in turn; each has the streams that it has kept."""

    def __init__(self) -> None:
        self._workers: list[dict[Any, Any]] = [{}, {}]

    def run(self, *given: Any) -> Any:
        self._workers.reverse()
        with mock.patch.object(shard, "_kept", self._workers[0]):
            return super().run(*given)


def materializing(pipeline: Mapping[str, Any], moving: bool, defect: str | None, said: str) -> None:
    """Be a runtime, with a thread for each shard."""
    spoken(said)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    driver.LOOK_MS = 10  # type: ignore[misc]
    jobs = Moving() if moving else TasksHere()
    # A stalled runtime is still alive when the next one takes its place.
    tasks = [
        replace(task, take_over=True)
        for task in tasks_of(Pipeline.model_validate(pipeline), jobs=jobs)
    ]
    with planted(defect):
        Supervisor(tasks, stop).run(once=False)


@dataclass
class Runtime:
    """Runs a pipeline in a process, and another after it was killed."""

    folder: Path
    defect: str | None = None
    moving: bool = False
    starts: int = 0
    processes: list[Any] = field(default_factory=list)

    def start(self, pipeline: Mapping[str, Any]) -> None:
        self.starts += 1
        process = FORKS.Process(
            target=materializing,
            args=(pipeline, self.moving, self.defect, str(self.folder / "runtime.log")),
            daemon=True,
        )
        process.start()
        self.processes.append(process)

    @property
    def running(self) -> bool:
        return bool(self.processes) and self.processes[-1].is_alive()

    def kill(self) -> None:
        """As the kernel would when memory runs out."""
        self.processes[-1].kill()

    def kill_executors(self) -> None:
        """They are threads of the driver."""
        self.kill()

    def stop(self) -> None:
        """Ask all of them to end, and see that they have."""
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        for process in self.processes:
            process.join(PATIENCE_MS / 1_000)
            if process.is_alive():
                process.kill()
                process.join()

    def said(self) -> str:
        """What went wrong, in their own words."""
        log = self.folder / "runtime.log"
        return log.read_text(errors="replace")[-4_000:] if log.exists() else ""


@dataclass
class Connectors:
    """Processes of one connector, each a host of its own, started when they are called."""

    name: str
    folder: Path
    defect: str | None = None
    _running: dict[int, tuple[Any, str]] = field(default_factory=dict)
    _starts: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def address(self, host: int = 0) -> str:
        """Where a host listens."""
        with self._lock:
            process, address = self._running.get(host, (None, ""))
            if process is not None and process.is_alive():
                return address
            self._starts += 1
            socket = self.folder / f"c{self._starts}.sock"
            process = FORKS.Process(
                target=serving,
                args=(
                    self.name,
                    f"unix:{socket}",
                    self.defect,
                    str(self.folder / "connector.log"),
                ),
                daemon=True,
            )
            process.start()
            until = SYSTEM_CLOCK.boot_ms() + PATIENCE_MS
            while not socket.exists():
                if not process.is_alive() or SYSTEM_CLOCK.boot_ms() > until:
                    raise AssertionError((self.folder / "connector.log").read_text())
                pause(5)
            self._running[host] = (process, f"unix:{socket}")
            return f"unix:{socket}"

    def kill(self, host: int = 0) -> None:
        """As the kernel would."""
        with self._lock:
            process, _ = self._running[host]
            process.kill()
            process.join()

    def close(self) -> None:
        with self._lock:
            for process, _ in self._running.values():
                process.kill()
                process.join()


def pause(ms: int) -> None:
    SYSTEM_CLOCK.wait(threading.Event(), ms)


def until(true: Any, *, patience_ms: int, pause_ms: int = 10) -> bool:
    """Wait until something is true; whether it was, in time."""
    deadline = SYSTEM_CLOCK.boot_ms() + patience_ms
    while not true():
        if SYSTEM_CLOCK.boot_ms() > deadline:
            return False
        pause(pause_ms)
    return True
