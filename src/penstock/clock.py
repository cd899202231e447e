"""Clocks, passed as arguments.

A clock has two readings. `now_ms` is calendar time: it may step forwards or backwards, and is
used for times that people read. `boot_ms` never decreases and includes time in suspend: it
measures durations on one machine.
"""

import threading
import time
from typing import Final, Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SystemClock"]


class Clock(Protocol):
    """A source of time, and a wait with a timeout."""

    def now_ms(self) -> int:
        """Return milliseconds since the epoch. The value may step in both directions."""
        ...

    def boot_ms(self) -> int:
        """Return milliseconds of a clock that never steps and never stops."""
        ...

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        """Wait until `event` is set, at most `timeout_ms`, and return whether it was set."""
        ...


class SystemClock:
    """The clocks of the operating system."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def boot_ms(self) -> int:
        return time.clock_gettime_ns(_BOOT) // 1_000_000

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        return event.wait(timeout_ms / 1_000)


# CLOCK_MONOTONIC of Linux stops during suspend.
_BOOT: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

SYSTEM_CLOCK: Final = SystemClock()
