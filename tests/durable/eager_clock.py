"""Clock on which each wait returns at once and advances the time by its timeout."""

import threading


class EagerClock:
    def __init__(self, now_ms: int = 1_000_000) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self.waits_ms: list[int] = []

    def now_ms(self) -> int:
        return self._now_ms

    def boot_ms(self) -> int:
        return self._now_ms - 900_000

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        with self._lock:
            self.waits_ms.append(timeout_ms)
            self._now_ms += timeout_ms
        return event.is_set()
