"""Background thread that repeats an action at a constant rate until it is stopped."""

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import UsageError

__all__ = ["RepeatedAction"]


@dataclass(slots=True)
class RepeatedAction(ABC):
    """Action that runs about `rate` times per second in its own thread."""

    url: str = field(repr=False)
    rng: random.Random
    rate: float = 50
    clock: Clock = SYSTEM_CLOCK
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _error: UsageError | None = None

    @abstractmethod
    def _connect(self) -> AbstractContextManager[Callable[[], None]]:
        """Connect, and yield a function that runs the action once; raise UsageError on failure."""

    def start(self) -> None:
        name = type(self).__name__.lower()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current action; raise the error if the thread has failed."""
        self.end()
        self.check()

    def end(self) -> None:
        """Stop after the current action, without raising the error of the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Check that the thread has not failed.

        Raises:
            UsageError: the thread has failed.
        """
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with self._connect() as act:
                start_ms, count = self.clock.boot_ms(), 0
                while not self._stop.is_set():
                    act()
                    count += 1
                    due_ms = start_ms + int(count * 1_000 / self.rate)
                    self.clock.wait(self._stop, max(0, due_ms - self.clock.boot_ms()))
        except UsageError as error:
            self._error = error
