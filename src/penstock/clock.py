"""Time as an argument.

There are two times. `now_ms` is the calendar's and may step either way; it
goes into what people read. `boot_ms` only ever rises and counts suspended
time too; it decides how long ago something was, within one machine.
"""

import threading
import time
from typing import Final, Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SystemClock"]


class Clock(Protocol):
    """What time it is, and how to wait."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch, as the calendar has it."""
        ...

    def boot_ms(self) -> int:
        """Milliseconds on a clock that never steps and never stops."""
        ...

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        """Wait until `event` is set, at most `timeout_ms`. Whether it was set."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_ms(self) -> int:
        """The wall clock."""
        return time.time_ns() // 1_000_000

    def boot_ms(self) -> int:
        """CLOCK_BOOTTIME, where there is one, so that a suspended laptop counts."""
        return time.clock_gettime_ns(_BOOT) // 1_000_000

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        """Wait in real time."""
        return event.wait(timeout_ms / 1_000)


_BOOT: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

SYSTEM_CLOCK: Final = SystemClock()
