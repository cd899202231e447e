"""Connector and runtime processes that can be killed.

A new process takes a second to start, mostly for imports, and the suite starts hundreds. So
processes are forked by multiprocessing's forkserver, which has imported all modules. Their
output is redirected to a file; a bug is planted in them by name.
"""

import faulthandler
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from penstock.clock import SYSTEM_CLOCK
from penstock.connectors import built_in
from penstock.materialize import loop, shard
from penstock.materialize.runner import LocalRunner
from penstock.materialize.tasks import tasks_of
from penstock.pipeline import Pipeline
from penstock.sdk import serve
from penstock.supervisor import Supervisor
from tests.chaos.defects import planted

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "tests.chaos.warm",
        *(
            f"penstock.connectors.{name}"
            for name in (
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


def redirect_output(log_path: str) -> None:
    """Redirect stdout and stderr to a file."""
    out = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def serve_connector(name: str, address: str, defect: str | None, log_path: str) -> None:
    """Run a connector process."""
    redirect_output(log_path)
    with planted(defect), serve(built_in(name), address) as server:
        server.wait()


class AlternatingTasks(LocalRunner):
    """Runs tasks on two workers in turn; each has its own open streams."""

    def __init__(self) -> None:
        self._workers: list[dict[Any, Any]] = [{}, {}]

    def run(self, *given: Any) -> Any:
        self._workers.reverse()
        with mock.patch.object(shard, "_sessions", self._workers[0]):
            return super().run(*given)


def run_materializations(
    pipeline: Mapping[str, Any], moving: bool, defect: str | None, log_path: str
) -> None:
    """Run a runtime process, with a thread for each shard."""
    redirect_output(log_path)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    loop.POLL_MS = 10  # type: ignore[misc]
    jobs = AlternatingTasks() if moving else LocalRunner()
    # A stalled runtime is still alive when the next one takes its place.
    tasks = [
        replace(task, take_over=True)
        for task in tasks_of(Pipeline.model_validate(pipeline), jobs=jobs)
    ]
    with planted(defect):
        Supervisor(tasks, stop).run(once=False)


@dataclass
class Runtime:
    """Runs a pipeline in a process; can be killed and started again."""

    folder: Path
    defect: str | None = None
    moving: bool = False
    starts: int = 0
    processes: list[Any] = field(default_factory=list)

    def start(self, pipeline: Mapping[str, Any]) -> None:
        self.starts += 1
        process = FORKS.Process(
            target=run_materializations,
            args=(pipeline, self.moving, self.defect, str(self.folder / "runtime.log")),
            daemon=True,
        )
        process.start()
        self.processes.append(process)

    @property
    def running(self) -> bool:
        return bool(self.processes) and self.processes[-1].is_alive()

    def kill(self) -> None:
        """Kill the newest process."""
        self.processes[-1].kill()

    def kill_executors(self) -> None:
        """Kill the driver: executors are its threads."""
        self.kill()

    def stop(self) -> None:
        """Terminate all processes and wait for their end."""
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        for process in self.processes:
            process.join(PATIENCE_MS / 1_000)
            if process.is_alive():
                process.kill()
                process.join()

    def log_tail(self) -> str:
        """Return the end of the log."""
        log = self.folder / "runtime.log"
        return log.read_text(errors="replace")[-4_000:] if log.exists() else ""


@dataclass
class Connectors:
    """Processes of one connector, one for each host, started on demand."""

    name: str
    folder: Path
    defect: str | None = None
    _running: dict[int, tuple[Any, str]] = field(default_factory=dict)
    _starts: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def address(self, host: int = 0) -> str:
        """Return the address of a host; start its process if necessary."""
        with self._lock:
            process, address = self._running.get(host, (None, ""))
            if process is not None and process.is_alive():
                return address
            self._starts += 1
            socket = self.folder / f"c{self._starts}.sock"
            process = FORKS.Process(
                target=serve_connector,
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
        """Kill the process of a host."""
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


def until(
    true: Callable[[], object],
    *,
    patience_ms: int,
    pause_ms: int = 10,
    activity: Callable[[], object] = lambda: None,
) -> bool:
    """Wait until a condition is true; return whether it was true in time.

    The time starts again whenever the value of `activity` changes.
    """
    seen, deadline = activity(), SYSTEM_CLOCK.boot_ms() + patience_ms
    while not true():
        if (now := activity()) != seen:
            seen, deadline = now, SYSTEM_CLOCK.boot_ms() + patience_ms
        if SYSTEM_CLOCK.boot_ms() > deadline:
            return False
        pause(pause_ms)
    return True
