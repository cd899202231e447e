"""A pipeline that follows a database, in a thread or in a process of its own.

with Pump(database, tmp_path) as pump:
    database.sql("INSERT …")
    pump.settle()          # all that was acknowledged until now is durable
check(pump, database)
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
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
    """Follows one database."""

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
        self.running: Supervisor | None = None
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
        """The storage location of the source."""
        return f"{self.location}/{SOURCE}"

    # In a thread.

    def start(self) -> None:
        """Follow, until `stop`."""
        self._stop = threading.Event()
        self.error = None
        self._thread = threading.Thread(target=self._run, name="pump")
        self._thread.start()

    def stop(self) -> None:
        """End cleanly; raises what ended it before."""
        self.__exit__(None)

    def _run(self) -> None:
        try:
            penstock.ingest.run(self.file, stop=self._stop, on_start=self._told)
        except BaseException as error:  # noqa: BLE001 - told by whoever waits
            self.error = error

    def _told(self, running: Supervisor) -> None:
        self.running = running

    # In a process.

    def spawn(
        self, *arguments: str, failpoints: str = "", **environment: str
    ) -> subprocess.Popen[bytes]:
        """Follow in a process, which `kill` ends."""
        with (self.folder / "said").open("ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli.main", "ingest", str(self.file), *arguments],
                env={**ENVIRONMENT, "PENSTOCK_FAILPOINTS": failpoints, **environment},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        return self.process

    def kill(self) -> None:
        """End the process as a power cut of it would."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()

    def said(self) -> str:
        """What the processes wrote."""
        path = self.folder / "said"
        return path.read_text(errors="replace") if path.exists() else ""

    # Looking.

    def upper(self) -> int:
        """How far the source is sealed; 0 while nothing of it can be seen."""
        try:
            with self.reader() as client:
                return client.collection(f"{SOURCE}_remap").upper
        except persist.CollectionMissing:
            return 0

    def settle(self, patience_ms: int = PATIENCE_MS) -> int:
        """Wait until what was acknowledged upstream by now is durable; the time that holds it."""
        moment = SYSTEM_CLOCK.now_ms()
        deadline = SYSTEM_CLOCK.boot_ms() + patience_ms
        with contextlib.ExitStack() as stack:
            client: persist.Client | None = None
            while True:
                self._must_run()
                if client is None and (self.folder / "lake" / SOURCE).exists():
                    client = stack.enter_context(self.reader())
                if client is not None:
                    with contextlib.suppress(persist.CollectionMissing):
                        # A time that was read after `moment`, so the probe was later still.
                        upper = client.collection(f"{SOURCE}_remap").upper
                        if upper - 1 > moment:
                            return upper - 1
                if SYSTEM_CLOCK.boot_ms() > deadline:
                    status = self.running and self.running.status()
                    raise TimeoutError(f"not sealed past {moment}\n{status}{self.said()[-4000:]}")
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
        """A client that only reads; files that it needs may go, unless it holds them."""
        return persist.open(self.storage, hold=hold)

    def notes(self) -> dict[str, Any]:
        """What the source has written down."""
        # Every tick may merge files that a read still needs.
        with self.reader(hold=True) as client:
            state = client.collection(f"{SOURCE}/state")
            return {update.data[0]: update.data[1] for update in state.snapshot(state.upper - 1)}

    def collections(self) -> Sequence[str]:
        """The collections of tables that can be seen."""
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
            raise AssertionError(f"ended with {self.process.returncode}\n{self.said()[-4000:]}")


def until(claim: Any, what: str, patience_ms: int = PATIENCE_MS) -> None:
    """Wait for a claim to become true."""
    deadline = SYSTEM_CLOCK.boot_ms() + patience_ms
    while not claim():
        if SYSTEM_CLOCK.boot_ms() > deadline:
            raise TimeoutError(f"waited in vain for {what}")
        SYSTEM_CLOCK.wait(threading.Event(), 10)
