"""Data of the status page: a lake, its running tasks and their recent history."""

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
    """Data source of the app. Its methods may be called by several threads."""

    def running(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the status of the tasks of this process, by name, without waiting."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return everything except rows."""
        ...

    def rows(self, collection: str, as_of: str, limit: int) -> Mapping[str, Any]:
        """Return some rows as of a time: epoch milliseconds, RFC 3339, earliest or latest."""
        ...

    def changes(self, collection: str, limit: int) -> Mapping[str, Any]:
        """Return the latest changes."""
        ...


class LakeView:
    """View of a lake from its log and state, and of the tasks of this process from their status.

    The lake is read at most once per second, for any number of clients.
    """

    def __init__(
        self,
        location: str,
        settings: persist.Settings,
        running: Callable[[], Mapping[str, Mapping[str, Any]]] = dict,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Create a view; `running` returns the status of each task, by name.

        A status also has these fields: `kind`, "source" or "materialization"; `state`, "starting",
        "running", "paused", "restarting", "stopped" or "ended"; `restarts`, a count; `error`, None
        or its message, detail and hint.
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
        """Close the clients of the lake."""
        with self._lock:
            self._inspector.close()

    def sample(self) -> None:
        """Add a sample of the current state to the history of the last ten minutes."""
        with self._lock:
            self._history.sample(self._clock.now_ms(), self._state())

    def state(self) -> Mapping[str, Any]:
        """Return sources, collections and materializations, with their history, and errors."""
        with self._lock:
            state = self._state()
            for each in state["sources"]:
                each |= self._history.of_source(each["name"])
            for each in state["materializations"]:
                each |= self._history.of_materialization(each["name"])
            return state

    def rows(self, collection: str, as_of: str, limit: int) -> Mapping[str, Any]:
        """Return at most `limit` exact rows as of a time, for a collection of any size."""

        def read(found: persist.Collection) -> dict[str, Any]:
            return sample(*find_generation(found, as_of), limit)

        return self._read(collection, read)

    def changes(self, collection: str, limit: int) -> Mapping[str, Any]:
        """Return at most `limit` of the latest changes, newest first."""
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
                    # Without a hold, compaction may delete files during the read; a retry reads the
                    # new ones.
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
