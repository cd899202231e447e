"""How far first copies are: bars on a terminal, words elsewhere."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from penstock.clock import SYSTEM_CLOCK, Clock

__all__ = ["Copies", "copying"]

LOADING: Final = frozenset({"loading"})
BEGUN_MS: Final = 2_000
"""Before so long has passed, a rate says little."""


@dataclass(frozen=True, slots=True)
class Copying:
    """A table whose first copy is under way."""

    table: str
    rows: int
    about: int
    """How many rows the server thinks there are."""


def copying(told: Mapping[str, Mapping[str, Any]]) -> Iterator[Copying]:
    """The first copies that sources tell of."""
    for status in told.values():
        for table in status.get("tables", ()):
            rows, about = int(table["rows"]), int(table["estimated_rows"] or 0)
            if table["phase"] in LOADING and max(rows, about) > 0:
                yield Copying(table["collection"], rows, max(rows, about))


class Copies:
    """What is said of them, time after time."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._began: dict[str, tuple[int, int]] = {}
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

    def lines(self, told: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """What to say of them now; nothing, if it is drawn."""
        now = list(copying(told))
        words = [self._words(each) for each in now]
        if self._progress is None:
            return words
        self._draw(self._progress, now)
        return []

    def close(self) -> None:
        """Nothing more is drawn."""
        if self._progress is not None:
            self._progress.stop()

    def _draw(self, progress: Progress, now: list[Copying]) -> None:
        if now and not self._bars:
            progress.start()
        for each in now:
            if each.table not in self._bars:
                self._bars[each.table] = progress.add_task(each.table, total=1, rate="")
            rate = f"{self._rate(each):,.0f} rows/s"
            bar = self._bars[each.table]
            progress.update(bar, completed=each.rows, total=max(each.about, 1), rate=rate)
        gone = self._bars.keys() - {each.table for each in now}
        for table in gone:
            progress.remove_task(self._bars.pop(table))
        if gone and not self._bars:
            progress.stop()

    def _words(self, each: Copying) -> str:
        words = f"{each.table}: copying, {each.rows:,} of about {each.about:,} rows"
        if rate := self._rate(each):
            left = (each.about - each.rows) / rate
            words += f", {rate:,.0f} rows/s, about {left:,.0f} s left"
        return words

    def _rate(self, each: Copying) -> float:
        """Rows a second, since it was first seen."""
        now = self._clock.boot_ms()
        began, rows = self._began.setdefault(each.table, (now, each.rows))
        passed = now - began
        return (each.rows - rows) * 1_000 / passed if passed >= BEGUN_MS else 0.0
