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
    """Size of a client's read cache of stored batches. Checksums are verified at each read,
    including cached ones.
    """

    inline_bytes: int = 16 << 10
    """A batch up to this size in memory, as Arrow, is stored inside its log entry; a larger one
    as Parquet objects.
    """

    part_bytes: int = 64 << 20
    """A batch above this size in memory, as Arrow, is split into several Parquet objects."""

    merge_bytes: int = 512 << 20
    """Maximum size in memory, as Arrow, of the inputs of a merge in this process. Larger merges
    run on Spark if the client has a session; otherwise the batches stay separate. A merge holds
    inputs and result at the same time.
    """

    fan_in: int = 8
    """Number of batches of one size that are merged into one of the next."""

    rollup_every: int = 512
    """Number of entries between rollups. The writer also writes one after 8 MiB of at least 16
    entries.
    """

    lease_ms: int = 15 * 60_000
    """Lifetime of a reader's hold without renewal, by the writer's clock. The reader renews it
    four times as often.
    """

    poll_ms: int = 1_000
    """Poll interval of a listener that receives no notification."""

    upkeep_ms: int = 500
    """Interval of the writer's maintenance."""

    settle_ms: int = 5_000
    """Interval of the writer's check of holds, to advance since or delete files."""

    young_ms: int = 60 * 60_000
    """Minimum age of deleted log entries, by the store's clock."""

    proof_ms: int = 10_000
    """Validity of a client's last observation of the log's head. Must be well below the
    `young_ms` of every writer of the location.
    """

    patience_ms: int | None = None
    """Maximum time of retries after transient failures of a store operation. `None` retries
    without limit.
    """

    notify: str = "127.0.0.1"
    """Address, with a free port, from where a writer wakes listeners of other processes. `""`
    opens no port.
    """

    background: bool = True
    """Run maintenance and renew holds in the background. If False, call
    `client.run_maintenance()`; holds of readers are then not renewed.
    """

    stop: threading.Event | None = None
    """A `threading.Event`. A store operation that still fails a third of
    `PENSTOCK_STOP_TIMEOUT` after the event is set is not retried, and its error is raised.
    """

    clock: Clock = SYSTEM_CLOCK
    """Clock, for tests."""

    chance: random.Random = field(default_factory=random.SystemRandom)
    """Random numbers, for reproducible tests."""

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
