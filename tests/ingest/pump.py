"""Pipeline with one Postgres source, run in a thread or in a separate process.

with Pump(database, tmp_path) as pump:
    database.sql("INSERT …")
    pump.settle()          # each change acknowledged before this call is durable
check(pump, database)
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

import penstock.ingest
from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.ingest import Supervisor
from penstock.servers.postgres import Database

SOURCE = "shop"
TICK_MS = 50
PATIENCE_MS = 120_000

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PG")}


class Pump:
    """Pipeline that ingests one database."""

    def __init__(
        self,
        database: Database,
        folder: Path,
        *,
        url: str | None = None,
        tick_ms: int = TICK_MS,
        **options: Any,
    ) -> None:
        self.folder = folder
        self.location = f"file:{folder / 'lake'}"
        self.file = folder / "pipeline.yaml"
        self.file.write_text(
            yaml.safe_dump(
                {
                    "location": self.location,
                    "writer": "pump",
                    "tick": f"{tick_ms}ms",
                    "sources": {
                        SOURCE: {"postgres": {"url": url or database.url(), **options}},
                    },
                }
            )
        )
        self.supervisor: Supervisor | None = None
        self.error: BaseException | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        if kind is None and self.error is not None:
            raise self.error

    @property
    def storage(self) -> str:
        """Return the storage location of the source."""
        return f"{self.location}/{SOURCE}"

    # In a thread.

    def start(self) -> None:
        """Run the pipeline in a thread, until `stop`."""
        self._stop = threading.Event()
        self.error = None
        self._thread = threading.Thread(target=self._run, name="pump")
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; raise the error of the pipeline if it failed."""
        self.__exit__(None)

    def _run(self) -> None:
        try:
            penstock.ingest.run(self.file, stop=self._stop, on_start=self._set_supervisor)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self.error = error

    def _set_supervisor(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor

    # In a process.

    def spawn(
        self, *arguments: str, failpoints: str = "", **environment: str
    ) -> subprocess.Popen[bytes]:
        """Run the pipeline in a process, until `kill`."""
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli.main", "ingest", str(self.file), *arguments],
                env={**ENVIRONMENT, "PENSTOCK_FAILPOINTS": failpoints, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return self.process

    def kill(self) -> None:
        """Send SIGKILL to the process and wait for its end."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()

    def output(self) -> str:
        """Return stdout and stderr of the processes."""
        path = self.folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    # Reads.

    def upper(self) -> int:
        """Return the upper of the remap collection, or 0 before it is published."""
        try:
            with self.reader() as client:
                return client.collection(f"{SOURCE}_remap").upper
        except persist.CollectionMissing:
            return 0

    def settle(self, patience_ms: int = PATIENCE_MS) -> int:
        """Return a time at or after each change acknowledged by now, once it is durable."""
        called_at_ms = SYSTEM_CLOCK.now_ms()
        deadline = SYSTEM_CLOCK.boot_ms() + patience_ms
        with contextlib.ExitStack() as stack:
            client: persist.Client | None = None
            while True:
                self._must_run()
                if client is None and (self.folder / "lake" / SOURCE).exists():
                    client = stack.enter_context(self.reader())
                if client is not None:
                    with contextlib.suppress(persist.CollectionMissing):
                        # The time was read after `called_at_ms`, and the probe ran after that.
                        upper = client.collection(f"{SOURCE}_remap").upper
                        if upper - 1 > called_at_ms:
                            return upper - 1
                if SYSTEM_CLOCK.boot_ms() > deadline:
                    status = self.supervisor and self.supervisor.status()
                    raise TimeoutError(
                        f"not sealed past {called_at_ms}\n{status}{self.output()[-4000:]}"
                    )
                SYSTEM_CLOCK.wait(threading.Event(), 10)

    def await_error(self, patience_ms: int = PATIENCE_MS) -> BaseException:
        """Wait until the pipeline has failed, and return its error."""
        assert self._thread is not None
        self._thread.join(patience_ms / 1_000)
        if self.error is None:
            self.stop()
        assert self.error is not None, f"no error within {patience_ms} ms"
        error, self.error = self.error, None
        return error

    def reader(self, *, hold: bool = False) -> persist.Client:
        """Return a read-only client; without `hold`, files it reads may be garbage-collected."""
        return persist.open(self.storage, hold=hold)

    def state(self) -> dict[str, Any]:
        """Return the state store of the source."""
        # A tick may merge files that this read still needs.
        with self.reader(hold=True) as client:
            state = client.collection(f"{SOURCE}/state")
            return {update.data[0]: update.data[1] for update in state.snapshot(state.upper - 1)}

    def collections(self) -> Sequence[str]:
        """Return the published collections of tables."""
        with self.reader() as client:
            return [
                name
                for name in client.collections()
                if name.startswith(f"{SOURCE}.") and client.collection(name).upper
            ]

    def _must_run(self) -> None:
        if self.error is not None:
            raise self.error
        if self.process is not None and self.process.poll() not in (None, 0):
            raise AssertionError(f"exit status {self.process.returncode}\n{self.output()[-4000:]}")


def until(
    condition: Callable[[], object], description: str, patience_ms: int = PATIENCE_MS
) -> None:
    """Wait until the condition is true."""
    deadline = SYSTEM_CLOCK.boot_ms() + patience_ms
    while not condition():
        if SYSTEM_CLOCK.boot_ms() > deadline:
            raise TimeoutError(f"not within {patience_ms} ms: {description}")
        SYSTEM_CLOCK.wait(threading.Event(), 10)
