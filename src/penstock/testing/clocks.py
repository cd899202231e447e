"""Clocks that obey.

On a `ManualClock` time passes when a test says so, and when somebody waits:
waiting takes no time, and moves the clock by as much as was waited for. So a
backoff of hours is over at once, and what it did to the time can be seen.
"""

import threading

__all__ = ["ManualClock"]


class ManualClock:
    """A `Clock` that stands still until it is moved."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._lock = threading.Lock()
        self._began_ms = now_ms
        self._now_ms = now_ms

    def now_ms(self) -> int:
        """The calendar, as set."""
        return self._now_ms

    def boot_ms(self) -> int:
        """An hour, and what has passed since this clock was made."""
        return 3_600_000 + self._now_ms - self._began_ms

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        """Move on by `timeout_ms` at once, unless `event` is set already."""
        if not event.is_set():
            self.move_ms(timeout_ms)
        return event.is_set()

    def move_ms(self, by_ms: int) -> None:
        """Let time pass."""
        with self._lock:
            self._now_ms += by_ms
