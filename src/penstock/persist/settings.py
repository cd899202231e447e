"""What can be chosen when a location is opened.

The defaults are for production. Tests shorten the ages and turn the
background off, so that they decide what happens when.
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
    """How a location is kept; see docs/reference/settings.md."""

    cache_bytes: int = 64 << 20
    """How much of the batches a client keeps in memory for reading again."""

    inline_bytes: int = 16 << 10
    """Batches up to this size travel inside the log entry."""

    part_bytes: int = 64 << 20
    """Larger batches are split into Parquet objects of about this size."""

    merge_bytes: int = 512 << 20
    """Batches are merged in process while their rows take up to this much memory together."""

    fan_in: int = 8
    """How many batches of one size are merged into one of the next."""

    rollup_every: int = 512
    """After how many entries a rollup is written."""

    lease_ms: int = 15 * 60_000
    """How long a reader's hold lives without being renewed."""

    poll_ms: int = 1_000
    """How often a listener looks by itself, should the writer not wake it."""

    upkeep_ms: int = 500
    """How often the writer looks for upkeep to do."""

    settle_ms: int = 5_000
    """How often the writer looks whether holds let it give up more."""

    young_ms: int = 60 * 60_000
    """Log entries younger than this are never deleted."""

    proof_ms: int = 10_000
    """How long after seeing the log's head a writer may trust that it still stands there."""

    patience_ms: int | None = None
    """How long a failing store operation is retried before it surfaces; None is for ever."""

    notify: str = "127.0.0.1"
    """The address on which a writer wakes listeners of other processes; empty for none."""

    background: bool = True
    """Whether upkeep runs by itself."""

    stop: threading.Event | None = None
    """Ends the retries of a failing store operation, a third of the stop deadline after it is
    set."""

    clock: Clock = SYSTEM_CLOCK
    chance: random.Random = field(default_factory=random.SystemRandom)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(
                    f'setting "{name}" is {value}', hint=f"Give it a number from {least} on."
                )


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
