"""Progress lines on standard error while tasks run."""

import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.catalog import encode_line
from penstock.clock import SYSTEM_CLOCK
from penstock.progress.time import describe_time

if TYPE_CHECKING:
    from penstock.supervisor import Supervisor
    from penstock.supervisor.status import TaskStatus

__all__ = ["ProgressPrinter"]

PRINT_EVERY_MS: Final = 1_000
BEHIND_MS: Final = 5_000
"""Lag above which a task is behind. A change of this state is printed."""

COUNTERS: Final = {"source": "rows", "materialization": "documents"}
"""Counter in the status of each kind of task."""


class ProgressPrinter:
    """Thread that prints the status of tasks when it has changed."""

    def __init__(self, stop: threading.Event, for_seconds: int | None, *, as_json: bool) -> None:
        """Prepare a printer that sets `stop` this many seconds after the first row is delivered."""
        from penstock.cli.snapshot_progress import SnapshotProgress

        self._stop = stop
        self._for_seconds = for_seconds
        self._as_json = as_json
        self._printed: dict[str, object] = {}
        self._snapshots = SnapshotProgress()

    def start(self, supervisor: "Supervisor") -> None:
        """Start the thread."""
        threading.Thread(target=self._run, args=(supervisor,), daemon=True).start()

    def _run(self, supervisor: "Supervisor") -> None:
        first_row_ms: int | None = None
        while not SYSTEM_CLOCK.wait(self._stop, PRINT_EVERY_MS):
            statuses = supervisor.status()
            with suppress(OSError):  # Standard error may be closed.
                self._print_all(statuses)
            if first_row_ms is None and _has_rows(statuses):
                first_row_ms = SYSTEM_CLOCK.boot_ms()
            if (
                self._for_seconds is not None
                and first_row_ms is not None
                and SYSTEM_CLOCK.boot_ms() - first_row_ms >= self._for_seconds * 1_000
            ):
                self._stop.set()
        self._snapshots.close()
        if not self._as_json and supervisor.fenced() is None:
            with suppress(OSError):
                sys.stderr.write("stopping after the current transactions\n")

    def _print_all(self, statuses: Mapping[str, "TaskStatus"]) -> None:
        for name, status in statuses.items():
            self._print_status(name, status)
        if not self._as_json:
            for line in self._snapshots.lines(statuses):
                self._print_if_changed(line.partition(":")[0], line)

    def _print_status(self, name: str, status: "TaskStatus") -> None:
        if self._as_json:
            line = encode_line({status.kind: name, **status.to_json()})
            self._print_if_changed(name, line)
        else:
            self._print_if_changed(name, _line(name, status), state=_relevant_state(status))

    def _print_if_changed(self, name: str, line: str, *, state: object = None) -> None:
        """Print a line if `state`, by default the line, differs from the last one of that name."""
        state = line if state is None else state
        if self._printed.get(name) != state:
            self._printed[name] = state
            sys.stderr.write(line + "\n")


def _line(name: str, status: "TaskStatus") -> str:
    source, is_running = status.source, status.state == "running"
    phase = (status.phase or "starting") if is_running else status.state
    line = f"{name}: {phase}, {_count(status) or 0} {COUNTERS[status.kind]}"
    if source.lsn is not None:
        line += f", at {source.lsn}"
    if source.lag_bytes is not None:
        line += f", {source.lag_bytes} bytes behind"
    if source.lag_records is not None:
        line += f", {source.lag_records} records behind"
    if lag_ms := _lag_ms(status):
        line += f", {lag_ms / 1_000:.1f} s behind"
    if status.error is not None and (not is_running or status.phase == "stopped"):
        return f"{line}: {status.error.message}"
    for frozen in status.materialization.degraded:
        since = describe_time(frozen.time)
        line += f"; {frozen.collection} is in error since {since}: {frozen.message}"
        line += f". {frozen.hint}" if frozen.hint else ""
    if status.waits_for:
        line += f", waiting for {status.waits_for}"
    return line


def _count(status: "TaskStatus") -> int | None:
    """Return the rows or documents since the start; None before the first report."""
    return status.source.rows if status.kind == "source" else status.materialization.documents


def _lag_ms(status: "TaskStatus") -> int | None:
    return None if status.loop is None else status.loop.lag_ms


def _relevant_state(status: "TaskStatus") -> object:
    """Return the parts of a status whose change is printed; times and positions are not."""
    return (
        status.state,
        "following" if status.phase == "storing" else status.phase,
        _count(status),
        (_lag_ms(status) or 0) >= BEHIND_MS,
        status.waits_for,
        status.error,
        status.materialization.degraded,
    )


def _has_rows(statuses: Mapping[str, "TaskStatus"]) -> bool:
    """Return whether the last tasks of the pipeline have delivered rows, in this run or before."""
    last = [status for status in statuses.values() if status.kind == "materialization"]
    return any(
        _count(status) or status.materialization.transactions or status.source.as_of
        for status in last or statuses.values()
    )
