"""Progress of initial snapshots: bars on a terminal, lines of text otherwise."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from penstock.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from penstock.supervisor.status import TaskStatus

__all__ = ["SnapshotProgress"]

LOADING: Final = frozenset({"loading"})
RATE_AFTER_MS: Final = 2_000
"""Observation time before a rate is printed."""


@dataclass(frozen=True, slots=True)
class _LoadingTable:
    """Table whose initial snapshot is in progress."""

    name: str
    rows: int
    estimate: int
    """Number of rows by the estimate of the server, at least `rows`."""


def _loading_tables(statuses: Mapping[str, "TaskStatus"]) -> Iterator[_LoadingTable]:
    for status in statuses.values():
        for table in status.source.tables:
            rows, estimate = table.rows, int(table.estimated_rows or 0)
            if table.phase in LOADING and max(rows, estimate) > 0:
                yield _LoadingTable(table.collection, rows, max(rows, estimate))


class SnapshotProgress:
    """Bars or lines for the initial snapshots of all tables."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._first_seen: dict[str, tuple[int, int]] = {}
        """Time and number of rows, by table."""

        self._bars: dict[str, TaskID] = {}
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.completed:,.0f} of about {task.total:,.0f} rows"),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )

    def lines(self, statuses: Mapping[str, "TaskStatus"]) -> list[str]:
        """Return the lines to print; on a terminal, update the bars and return none."""
        tables = list(_loading_tables(statuses))
        lines = [self._line(table) for table in tables]
        if self._progress is None:
            return lines
        self._update_bars(self._progress, tables)
        return []

    def close(self) -> None:
        """Remove the bars."""
        if self._progress is not None:
            self._progress.stop()

    def _update_bars(self, progress: Progress, tables: list[_LoadingTable]) -> None:
        if tables and not self._bars:
            progress.start()
        for table in tables:
            if table.name not in self._bars:
                self._bars[table.name] = progress.add_task(table.name, total=1, rate="")
            rate = f"{self._rate(table):,.0f} rows/s"
            bar = self._bars[table.name]
            progress.update(bar, completed=table.rows, total=max(table.estimate, 1), rate=rate)
        loaded = self._bars.keys() - {table.name for table in tables}
        for name in loaded:
            progress.remove_task(self._bars.pop(name))
        if loaded and not self._bars:
            progress.stop()

    def _line(self, table: _LoadingTable) -> str:
        line = f"{table.name}: initial snapshot, {table.rows:,} of about {table.estimate:,} rows"
        if rate := self._rate(table):
            remaining_s = (table.estimate - table.rows) / rate
            line += f", {rate:,.0f} rows/s, about {remaining_s:,.0f} s left"
        return line

    def _rate(self, table: _LoadingTable) -> float:
        """Return rows per second since the table was first seen."""
        now_ms = self._clock.boot_ms()
        first_ms, first_rows = self._first_seen.setdefault(table.name, (now_ms, table.rows))
        elapsed_ms = now_ms - first_ms
        if elapsed_ms < RATE_AFTER_MS:
            return 0.0
        return (table.rows - first_rows) * 1_000 / elapsed_ms
