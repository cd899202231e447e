"""Data of the status page: a lake, its running tasks and their recent history."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from penstock import __version__, persist
from penstock.catalog import LakeInspector, LocationStatus
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import Corruption, InternalError, PenstockError, UsageError
from penstock.persist.errors import CollectionMissing
from penstock.persist.lake import find_collection, find_generation
from penstock.persist.state import is_hidden
from penstock.supervisor.status import TaskStatus
from penstock.web.history import History
from penstock.web.page_state import PageState, state_of
from penstock.web.row_sample import latest_changes, sample

__all__ = ["LakeView", "View"]

INSPECT_EVERY_MS: Final = 900
ATTEMPTS: Final = 3


class View(Protocol):
    """Data source of the app. Its methods may be called by several threads."""

    def running(self) -> Mapping[str, TaskStatus]:
        """Return the status of the tasks of this process, by name, without waiting."""
        ...

    def page_state(self) -> PageState:
        """Return everything except rows and history."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return everything except rows, as JSON values."""
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
        running: Callable[[], Mapping[str, TaskStatus]] = dict,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Create a view; `running` returns the status of the tasks of this process, by name."""
        self.location = location
        self.running = running
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._inspector = LakeInspector(settings)
        self._inspected_ms: int | None = None
        self._locations: list[LocationStatus] = []
        self._failures: dict[str, PenstockError] = {}
        self._history = History()

    def close(self) -> None:
        """Close the clients of the lake."""
        with self._lock:
            self._inspector.close()

    def sample(self) -> None:
        """Add a sample of the current state to the history of the last ten minutes."""
        with self._lock:
            self._history.sample(self._clock.now_ms(), self._page_state())

    def page_state(self) -> PageState:
        """Return sources, collections, materializations and errors."""
        with self._lock:
            return self._page_state()

    def state(self) -> Mapping[str, Any]:
        """Return sources, collections and materializations, with their history, and errors."""
        with self._lock:
            state = self._page_state().to_json()
            for source in state["sources"]:
                source |= self._history.of_source(source["name"])
            for materialization in state["materializations"]:
                materialization |= self._history.of_materialization(materialization["name"])
            return {"lake": self.location, "version": __version__, **state}

    def rows(self, collection: str, as_of: str, limit: int) -> Mapping[str, Any]:
        """Return at most `limit` exact rows as of a time, for a collection of any size."""

        def read(generations: persist.Collection) -> dict[str, Any]:
            return sample(*find_generation(generations, as_of), limit)

        return self._read(collection, read)

    def changes(self, collection: str, limit: int) -> Mapping[str, Any]:
        """Return at most `limit` of the latest changes, newest first."""
        return self._read(collection, lambda newest: latest_changes(newest, limit))

    def _read(
        self, name: str, read: Callable[[persist.Collection], dict[str, Any]]
    ) -> dict[str, Any]:
        if is_hidden(name):
            raise CollectionMissing(name, where=self.location, known=[])
        client, collection = find_collection(
            self.location, name, hold=False, settings=self._settings
        )
        with client:
            for attempt in range(ATTEMPTS):
                batches = collection.state.batches
                try:
                    return read(collection)
                except (Corruption, UsageError):
                    # Without a hold, compaction may delete files during the read; a retry reads the
                    # new ones.
                    if attempt == ATTEMPTS - 1 or collection.state.batches == batches:
                        raise
        raise InternalError("reading a collection ended without rows or an error")

    def _page_state(self) -> PageState:
        self._inspect()
        return state_of(self._locations, self.running(), self._failures, self._clock.now_ms())

    def _inspect(self) -> None:
        """Inspect the lake, unless that was done recently.

        A location that cannot be read keeps its last status.
        """
        now = self._clock.boot_ms()
        if self._inspected_ms is not None and now - self._inspected_ms < INSPECT_EVERY_MS:
            return
        failures: dict[str, PenstockError] = {}
        known = {location.url: location for location in self._locations}
        locations: list[LocationStatus] = []
        try:
            urls = self._inspector.locations(self.location)
        except PenstockError as error:
            urls, locations = [], self._locations
            failures[self.location] = error
        for url in urls:
            try:
                locations.append(self._inspector.inspect(url))
            except PenstockError as error:
                failures[url] = error
                locations += [known[url]] if url in known else []
        self._locations, self._failures = locations, failures
        self._inspected_ms = self._clock.boot_ms()
