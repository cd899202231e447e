"""Settings of an open storage location.

The defaults are for production. Tests shorten the ages and turn off background
work, to decide when it happens.
"""

import random
import threading
from dataclasses import dataclass, field
from typing import Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import UsageError

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one client; see docs/reference/settings.md."""

    cache_bytes: int = 64 << 20
    """Memory for batches that are read again."""

    inline_bytes: int = 16 << 10
    """Batches up to this size are stored inside the log entry."""

    part_bytes: int = 64 << 20
    """Approximate size of the Parquet objects of a larger batch."""

    merge_bytes: int = 512 << 20
    """Memory up to which batches are merged in this process."""

    fan_in: int = 8
    """Number of batches of one level that are merged into one of the next."""

    rollup_every: int = 512
    """Number of entries between rollups."""

    lease_ms: int = 15 * 60_000
    """Lifetime of a reader's hold without renewal."""

    poll_ms: int = 1_000
    """Poll interval of a listener that gets no notification."""

    upkeep_ms: int = 500
    """Interval of the writer's maintenance."""

    settle_ms: int = 5_000
    """Interval at which the writer checks whether holds permit since to advance."""

    young_ms: int = 60 * 60_000
    """Log entries younger than this are never deleted."""

    proof_ms: int = 10_000
    """A writer that saw the head of the log assumes for this time that it is still there."""

    patience_ms: int | None = None
    """A failing store operation is retried for this time; None: without limit."""

    notify: str = "127.0.0.1"
    """Address on which a writer notifies listeners of other processes; empty: none."""

    background: bool = True
    """Run maintenance and the renewal of holds in the background."""

    stop: threading.Event | None = None
    """When set, retries of a failing store operation end after a third of the stop deadline."""

    clock: Clock = SYSTEM_CLOCK
    chance: random.Random = field(default_factory=random.SystemRandom)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f'setting "{name}" is {value}', hint=f"Set it to {least} or more.")


_LEAST: Final = {
    "cache_bytes": 0,
    "inline_bytes": 0,
    "part_bytes": 1,
    "merge_bytes": 1,
    "fan_in": 2,
    "rollup_every": 1,
    "lease_ms": 1,
    "poll_ms": 1,
    "upkeep_ms": 0,
    "settle_ms": 0,
    "young_ms": 0,
    "proof_ms": 0,
    "patience_ms": 0,
}
