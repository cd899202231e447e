"""Resource usage of a pipeline, and a check that it does not grow without limit."""

import os
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg

from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from tests.e2e.process import Up, descendants
from tests.e2e.shop import Stage

EVERY_MS: Final = 5_000
MB: Final = 1 << 20
FACTOR: Final = 1.5

ALLOWED: Final[Mapping[str, int]] = {
    "rss": 300 * MB,
    "lake_files": 400,
    "old_entries": 4_000,
    "slot_bytes": 64 * MB,
    "disk_bytes": 64 * MB,
}
"""Measured values, with the allowed growth from the middle to the end in addition to `FACTOR`.

The shop itself grows until its maximum number of orders, and maintenance runs in steps. Log
entries are retained for an hour, so only older entries count.
"""

SHOWN: Final = (*ALLOWED, "log_entries")

YOUNG_S: Final = persist.Settings().young_ms / 1_000

FEWEST: Final = 16
"""Minimum number of samples for a result."""


@dataclass(frozen=True)
class Sample:
    """One sample."""

    second: int
    used: Mapping[str, int]
    following: bool
    """True if the start is long enough ago to count for memory."""


class Sampler:
    """Thread that samples a stage and the process that runs on it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._up: Up | None = None
        self._started_ms = self._began_ms = SYSTEM_CLOCK.boot_ms()
        self._over = threading.Event()
        self._samples: list[Sample] = []
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def watch(self, up: Up) -> None:
        self._up, self._started_ms = up, SYSTEM_CLOCK.boot_ms()

    def stop(self) -> list[Sample]:
        self._over.set()
        self._thread.join()
        return self._samples

    def _run(self) -> None:
        while not SYSTEM_CLOCK.wait(self._over, EVERY_MS):
            with suppress(psycopg.OperationalError, OSError):
                self._samples.append(self._sample())

    def _sample(self) -> Sample:
        now_ms = SYSTEM_CLOCK.boot_ms()
        lake = Path(self._stage.places.lake.removeprefix("file:"))
        entries, others = list[os.stat_result](), list[os.stat_result]()
        for path, found in _files(lake):
            (entries if "log" in path.relative_to(lake).parts else others).append(found)
        oldest = max((each.st_mtime for each in entries), default=0.0) - YOUNG_S
        old = [each for each in entries if each.st_mtime < oldest]
        kept = self._stage.source.sql(
            "SELECT coalesce(max(pg_current_wal_lsn() - restart_lsn), 0) FROM pg_replication_slots"
        )
        sqlite = self._stage.places.sqlite
        written = [path.stat() for path in sqlite.parent.glob(f"{sqlite.name}*")]
        used = {
            "rss": 0 if self._up is None else sum(rss_of(self._up.process.pid).values()),
            "lake_files": len(others),
            "old_entries": len(old),
            "slot_bytes": int(kept[0][0]),
            "disk_bytes": sum(each.st_size for each in (*others, *old, *written)),
            "log_entries": len(entries),
        }
        return Sample(
            (now_ms - self._began_ms) // 1_000, used, now_ms - self._started_ms > 4 * EVERY_MS
        )


def rss_of(pid: int) -> dict[int, int]:
    """Return the resident memory in bytes of a process and its descendants, by PID."""
    page = os.sysconf("SC_PAGE_SIZE")
    sizes = {}
    for member in (pid, *descendants(pid)):
        with suppress(OSError, IndexError):
            sizes[member] = int(Path(f"/proc/{member}/statm").read_text().split()[1]) * page
    return sizes


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                yield path, path.stat()


def unbounded(samples: Sequence[Sample]) -> list[str]:
    """Return the values that grew from the second quarter to the last by more than allowed."""
    found = []
    for name, allowed in ALLOWED.items():
        of = [each.used[name] for each in samples if each.following or name != "rss"]
        if len(of) < FEWEST:
            continue
        quarter = len(of) // 4
        before = statistics.median(of[quarter : 2 * quarter])
        after = statistics.median(of[-quarter:])
        if after > FACTOR * before + allowed:
            found.append(f"{name} grew from {before:,.0f} to {after:,.0f}")
    return found


def table(samples: Sequence[Sample], lines: int = 24) -> Iterator[str]:
    """Yield lines of a table of some samples."""
    yield "  second " + "".join(f"{name:>16}" for name in SHOWN)
    for each in samples[:: max(1, len(samples) // lines)]:
        yield f"{each.second:8} " + "".join(f"{each.used[name]:16,}" for name in SHOWN)
