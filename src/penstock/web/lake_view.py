"""What there is to show: a lake, what runs on it, and what of it was seen lately."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from penstock import __version__, persist
from penstock.catalog.inspect import LakeInspector
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import Corruption, InternalError, PenstockError, UsageError
from penstock.persist.errors import CollectionMissing
from penstock.persist.lake import find_collection, find_generation
from penstock.persist.state import is_hidden
from penstock.web.history import History
from penstock.web.page_state import state_of
from penstock.web.row_sample import latest_changes, sample

__all__ = ["LakeView", "View"]

LOOK_EVERY_MS: Final = 900
ATTEMPTS: Final = 3


class View(Protocol):
    """What the app shows. May be asked by several threads."""

    def running(self) -> Mapping[str, Mapping[str, Any]]:
        """What runs in this process, by name; answers at once."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Everything there is, but for rows."""
        ...

    def rows(self, collection: str, as_of: str, limit: int) -> Mapping[str, Any]:
        """A few rows as of a time: epoch milliseconds, RFC 3339, earliest or latest."""
        ...

    def changes(self, collection: str, limit: int) -> Mapping[str, Any]:
        """The latest changes."""
        ...


class LakeView:
    """A lake as its log and notes have it, and what runs in this process as it says itself.

    However many look, the lake is looked at once a second.
    """

    def __init__(
        self,
        location: str,
        settings: persist.Settings,
        running: Callable[[], Mapping[str, Mapping[str, Any]]] = dict,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`running` gives, by name, what a task says of itself, and some things besides.

        `kind` is "source" or "materialization"; `state` "starting", "running", "paused",
        "restarting", "stopped" or "ended"; `restarts` how often; `error` None, or its
        message, detail and hint.
        """
        self.location = location
        self.running = running
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._inspector = LakeInspector(settings)
        self._looked_ms: int | None = None
        self._found: list[dict[str, Any]] = []
        self._failed: dict[str, PenstockError] = {}
        self._history = History()

    def close(self) -> None:
        """Let go of the lake."""
        with self._lock:
            self._inspector.close()

    def sample(self) -> None:
        """Add how everything is now to what is kept of the last ten minutes."""
        with self._lock:
            self._history.sample(self._clock.now_ms(), self._state())

    def state(self) -> Mapping[str, Any]:
        """Sources, collections and materializations, with their history, and errors."""
        with self._lock:
            state = self._state()
            for each in state["sources"]:
                each |= self._history.of_source(each["name"])
            for each in state["materializations"]:
                each |= self._history.of_materialization(each["name"])
            return state

    def rows(self, collection: str, as_of: str, limit: int) -> Mapping[str, Any]:
        """At most `limit` rows as of a time, exact, whatever the size of the collection."""

        def read(found: persist.Collection) -> dict[str, Any]:
            return sample(*find_generation(found, as_of), limit)

        return self._read(collection, read)

    def changes(self, collection: str, limit: int) -> Mapping[str, Any]:
        """At most `limit` of the latest changes, the newest first."""
        return self._read(collection, lambda found: latest_changes(found, limit))

    def _read(
        self, name: str, read: Callable[[persist.Collection], dict[str, Any]]
    ) -> dict[str, Any]:
        if is_hidden(name):
            raise CollectionMissing(name, where=self.location, known=[])
        client, found = find_collection(self.location, name, hold=False, settings=self._settings)
        with client:
            for attempt in range(ATTEMPTS):
                batches = found.state.batches
                try:
                    return read(found)
                except (Corruption, UsageError):
                    # Without a hold, files may be merged away under us; then there are others.
                    if attempt == ATTEMPTS - 1 or found.state.batches == batches:
                        raise
        raise InternalError("reading a collection ended without rows or an error")

    def _look(self) -> None:
        now = self._clock.boot_ms()
        if self._looked_ms is not None and now - self._looked_ms < LOOK_EVERY_MS:
            return
        failed: dict[str, PenstockError] = {}
        known = {each["location"]: each for each in self._found}
        found = []
        try:
            urls = self._inspector.locations(self.location)
        except PenstockError as error:
            urls, found = [], self._found
            failed[self.location] = error
        for url in urls:
            try:
                found.append(self._inspector.inspect(url))
            except PenstockError as error:
                failed[url] = error
                found += [known[url]] if url in known else []
        self._found, self._failed = found, failed
        self._looked_ms = self._clock.boot_ms()

    def _state(self) -> dict[str, Any]:
        self._look()
        state = state_of(self._found, self.running(), self._failed, self._clock.now_ms())
        return {"lake": self.location, "version": __version__, **state}
