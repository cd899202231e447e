"""Something that is done again and again beside all else, until it is stopped."""

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import UsageError

__all__ = ["Steady"]


@dataclass(slots=True)
class Steady(ABC):
    """Does it about `rate` times a second, in a thread of its own."""

    url: str = field(repr=False)
    chance: random.Random
    rate: float = 50
    clock: Clock = SYSTEM_CLOCK
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _error: UsageError | None = None

    @abstractmethod
    def _acting(self) -> AbstractContextManager[Callable[[], None]]:
        """Connect, and hand over what does it once; raises UsageError where that fails."""

    def start(self) -> None:
        """Begin."""
        name = type(self).__name__.lower()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it after what is under way; raises what ended it before."""
        self.end()
        self.check()

    def end(self) -> None:
        """End it, whatever became of it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """See whether it goes on.

        Raises:
            UsageError: it does not.
        """
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with self._acting() as act:
                began, done = self.clock.boot_ms(), 0
                while not self._stop.is_set():
                    act()
                    done += 1
                    due = began + int(done * 1_000 / self.rate)
                    self.clock.wait(self._stop, max(0, due - self.clock.boot_ms()))
        except UsageError as error:
            self._error = error
