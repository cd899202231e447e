"""`penstock ingest`: the sources of a file into collections."""

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.options import AsJson
from penstock.cli.rows import encode_line
from penstock.cli.stopping import stop_on_signals
from penstock.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from penstock.ingest.loading import ManyTasks
    from penstock.ingest.running import Running
    from penstock.persist.compact import BigMerges

__all__ = ["ingest"]

TOLD_EVERY_MS: Final = 1_000


def ingest(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The pipeline's file.")],
    once: Annotated[
        bool, typer.Option("--once", help="End when all that was upstream at the start is durable.")
    ] = False,
    for_seconds: Annotated[
        int | None,
        typer.Option("--for", metavar="SECONDS", help="End so long after the first row."),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where Spark reads large first copies: local[*], spark://host:port.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Follow the sources of FILE: a complete first copy, then every change.

    Stops cleanly on SIGINT and SIGTERM; started again, it goes on where it was.
    """
    # Sources bring a compiler along, which no other verb should wait for.
    from penstock.ingest.running import run
    from penstock.pipeline import load

    pipeline = load(file)
    stop = threading.Event()
    stop_on_signals(stop)
    teller = _Teller(stop, for_seconds, as_json=as_json)
    many = _SparkWhenNeeded(master, quiet=as_json)
    run(pipeline, once=once, stop=stop, many=many, told=teller.start)


class _SparkWhenNeeded:
    """Tasks of a Spark session, which is started for the first work that is worth it."""

    def __init__(self, master: str | None, *, quiet: bool) -> None:
        self._master = master
        self._quiet = quiet
        self._lock = threading.Lock()
        self._tasks: ManyTasks | None = None

    def read(self, share: Any, pieces: Any, watch: Any) -> Any:
        """As `ManyTasks` has it."""
        return self._started().read(share, pieces, watch)

    def merges(self, url: str) -> "BigMerges":
        """As `ManyTasks` has it."""
        from penstock.persist.compact import WhenNeeded

        return WhenNeeded(lambda _collection, _memory: self._started().merges(url))

    def _started(self) -> "ManyTasks":
        with self._lock:
            if self._tasks is None:
                from penstock.engine.spark import session
                from penstock.ingest.spark import tasks_of

                if not self._quiet:
                    sys.stderr.write("Spark starts, for a large table; this takes some seconds\n")
                self._tasks = tasks_of(session(master=self._master))
            return self._tasks


class _Teller:
    """Says on standard error what goes on, when that has changed."""

    def __init__(self, stop: threading.Event, for_seconds: int | None, *, as_json: bool) -> None:
        self._stop = stop
        self._for_seconds = for_seconds
        self._as_json = as_json
        self._said: dict[str, str] = {}

    def start(self, running: "Running") -> None:
        """Begin to look."""
        threading.Thread(target=self._look, args=(running,), daemon=True).start()

    def _look(self, running: "Running") -> None:
        first_row_ms: int | None = None
        while not SYSTEM_CLOCK.wait(self._stop, TOLD_EVERY_MS):
            for name, status in running.status().items():
                self._tell(name, status)
                if first_row_ms is None and status.get("rows"):
                    first_row_ms = SYSTEM_CLOCK.boot_ms()
            if (
                self._for_seconds is not None
                and first_row_ms is not None
                and SYSTEM_CLOCK.boot_ms() - first_row_ms >= self._for_seconds * 1_000
            ):
                self._stop.set()

    def _tell(self, name: str, status: Mapping[str, Any]) -> None:
        if not status:
            return
        line = (
            encode_line({"source": name, **status})
            if self._as_json
            else f"{name}: {status.get('phase') or 'starting'}, {status.get('rows', 0)} rows"
            + (
                f", at {status['lsn']}, {status['lag_bytes']} bytes behind"
                if "lsn" in status
                else ""
            )
        )
        waits = status.get("waits_for")
        if waits and not self._as_json:
            line += f", waiting for {waits}"
        if self._said.get(name) != line:
            self._said[name] = line
            sys.stderr.write(line + "\n")
