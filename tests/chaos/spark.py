"""Runtime with tasks on `local-cluster`, in a process that can be killed.

    python -m tests.chaos.spark

A line of JSON on standard input starts a pipeline, `{"pipeline": …, "defect": …}`, or stops
it, `{}`; results are lines on standard output. `SparkRuntime` is the client: it starts
another process after a kill.
"""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TextIO

import pyspark

from penstock.engine.spark import session
from penstock.engine.storage_access.spark import find_native_root
from penstock.materialize import loop
from penstock.materialize.spark import SparkRunner
from penstock.materialize.tasks import run
from penstock.pipeline import Pipeline
from tests.chaos.actors import until
from tests.chaos.defects import planted
from tests.fix_spark import SHORT_LIVED

MASTER: Final = os.environ.get("PENSTOCK_CHAOS_MASTER", "local-cluster[3,1,512]")
CONFIG: Final = {
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": SHORT_LIVED,
    "spark.task.maxFailures": "4",
    "spark.deploy.maxExecutorRetries": "20",
    "spark.ui.enabled": "false",
    # Otherwise a job with a missing executor checks again after 15 seconds.
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
}
PATIENCE_S: Final = 600.0


class SparkRuntime:
    """ScenarioRuntime pipelines on Spark, one after the other; outlives each of them."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-spark-"))
        self.defect: str | None = None
        self.starts = 0
        self._process: subprocess.Popen[str] | None = None
        self._received: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._runs = False

    def start(self, pipeline: Mapping[str, Any]) -> None:
        self.starts += 1
        if self._process is None or self._process.poll() is not None:
            self._begin()
        self._send({"pipeline": pipeline, "defect": self.defect})
        self._runs = True

    @property
    def running(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            return False
        while not self._received.empty():
            if self._received.get() == "stopped":
                self._runs = False
        return self._runs

    def kill(self) -> None:
        """Kill the driver."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def kill_executors(self) -> None:
        """Kill all executors, but not their children."""
        assert self._process is not None
        for pid in _executors(self._process.pid):
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop the running pipeline and wait for its end."""
        if not self.running:
            return
        # The shim's thread may kill the process at the same time.
        with suppress(BrokenPipeError, ValueError):
            self._send({})
        if not until(lambda: not self.running, patience_ms=60_000):
            self.kill()

    def log_tail(self) -> str:
        log = self.folder / "spark.log"
        return log.read_text(errors="replace")[-4_000:] if log.exists() else ""

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self._close_pipes()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _close_pipes(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._listener.join()
        with suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()

    def _begin(self) -> None:
        home = self.folder / "home"
        if not home.exists():
            # Executors write files into SPARK_HOME/work, so it is a folder of links.
            home.mkdir()
            for path in Path(pyspark.__file__).parent.iterdir():
                if path.name != "work":
                    (home / path.name).symlink_to(path)
        with (self.folder / "spark.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.spark"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=Path(__file__).parents[2],
                env={
                    **os.environ,
                    "SPARK_HOME": str(home),
                    "SPARK_LOCAL_IP": "127.0.0.1",
                    "XDG_CACHE_HOME": str(self.folder / "cache"),
                },
            )
        assert self._process.stdout is not None
        self._received = queue.SimpleQueue()
        self._listener = threading.Thread(
            target=_listen, args=(self._process.stdout, self._received), daemon=True
        )
        self._listener.start()
        assert self._received.get(timeout=PATIENCE_S) == "ready", self.log_tail()

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()


def _listen(output: TextIO, received: "queue.SimpleQueue[str]") -> None:
    for line in output:
        received.put(line.strip())
    received.put("gone")


def _executors(driver_pid: int) -> list[int]:
    """Return the PIDs of the executors below a driver."""
    parents: dict[int, int] = {}
    commands: dict[int, bytes] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid = int(stat.parent.name)
            parents[pid] = int(stat.read_text().rpartition(")")[2].split()[1])
            commands[pid] = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
    return [
        pid
        for pid, command in commands.items()
        if b"CoarseGrainedExecutorBackend" in command
        and driver_pid in (parents[pid], parents.get(parents[pid]))
    ]


def main(questions: TextIO, answers: TextIO) -> None:
    loop.POLL_MS = 10  # type: ignore[misc]
    spark = session(master=MASTER, config=CONFIG)
    jobs = SparkRunner(spark, lambda url: find_native_root(spark, url))

    def say(word: str) -> None:
        answers.write(f"{word}\n")
        answers.flush()

    def materialize(request: Mapping[str, Any], stop: threading.Event) -> None:
        try:
            with planted(request["defect"]):
                run(Pipeline.model_validate(request["pipeline"]), jobs=jobs, stop=stop)
        except Exception:  # noqa: BLE001 - printed
            sys.excepthook(*sys.exc_info())
        finally:
            say("stopped")

    say("ready")
    stop = threading.Event()
    thread: threading.Thread | None = None
    for line in questions:
        request = json.loads(line)
        stop.set()
        if thread is not None:
            thread.join()
        if request:
            stop = threading.Event()
            thread = threading.Thread(target=materialize, args=(request, stop))
            thread.start()
    stop.set()
    if thread is not None:
        thread.join()
    spark.stop()


if __name__ == "__main__":
    # SUBTLE: output of Spark must not mix with the answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(sys.stdin, out)
