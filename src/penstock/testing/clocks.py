"""Manual clock for tests.

The time of a `ManualClock` advances when a test moves it, and when a thread waits: a wait returns
immediately and advances the clock by the requested time. A backoff of hours ends at once, and its
effect on the time can be observed.
"""

import threading

__all__ = ["ManualClock"]


class ManualClock:
    """`Clock` that stands still until it is moved."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._lock = threading.Lock()
        self._began_ms = now_ms
        self._now_ms = now_ms

    def now_ms(self) -> int:
        """Return the wall-clock time, as set."""
        return self._now_ms

    def boot_ms(self) -> int:
        """Return one hour plus the time since this clock was created."""
        return 3_600_000 + self._now_ms - self._began_ms

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        """Advance by `timeout_ms` immediately, unless `event` is already set."""
        if not event.is_set():
            self.move_ms(timeout_ms)
        return event.is_set()

    def move_ms(self, by_ms: int) -> None:
        """Advance the clock."""
        with self._lock:
            self._now_ms += by_ms
