"""Durable state of a task, in a collection of its own.

Each name has one JSON value. The collection commits together with the tick that
changed it, so a restart reads both or neither. The times of the collection are a
counter of writes, not clock times.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock import persist
from penstock.errors import InternalError

__all__ = ["FAILURE", "PAUSED", "StateStore"]

PAUSED: Final = "paused"
"""State key: the task does not run until it is resumed."""

FAILURE: Final = "failure"
"""State key: the error that stopped a task, as task kind, message, detail, hint and at_ms."""

Update = tuple[tuple[str, Any], int, int]


class StateStore:
    """State of one source or materialization."""

    def __init__(self, client: persist.Client, owner: str) -> None:
        self.collection = client.create_or_load(
            f"{owner}/state", key=persist.TEXT, value=persist.JSON, owner=owner
        )
        self.lock = threading.RLock()
        """Held from reading the current values until the new ones are durable."""

        self._known: dict[str, Any] = {}
        self.upper = self.collection.upper
        if self.upper:
            for update in self.collection.snapshot(self.upper - 1):
                name, value = update.data
                self._known[name] = value

    def get(self, name: str) -> Any:
        """Return the value of `name`, or None."""
        return self._known.get(name)

    def names(self) -> Sequence[str]:
        """Return all names, sorted."""
        return sorted(self._known)

    def put(self, values: Mapping[str, Any]) -> None:
        """Write `values` durably, in one entry; None deletes a name."""
        with self.lock:
            time = self.upper
            outcome = self.collection.compare_and_append(
                self.updates(values, time), self.upper, time + 1
            )
            if not isinstance(outcome, persist.Appended):
                raise InternalError(
                    f'collection "{self.collection.name}" was written by another process',
                    hint="Stop the other process.",
                )
            self.learn(values, time + 1)
        self.collection.allow_compaction(time)

    def updates(self, values: Mapping[str, Any], time: int) -> list[Update]:
        """Return the updates that set `values` at a time."""
        changes: list[Update] = []
        for name, value in values.items():
            known = self._known.get(name)
            if value == known:
                continue
            if known is not None:
                changes.append(((name, known), time, -1))
            if value is not None:
                changes.append(((name, value), time, +1))
        return changes

    def learn(self, values: Mapping[str, Any], upper: int) -> None:
        """Record that `values` are durable, up to `upper`."""
        self.upper = upper
        for name, value in values.items():
            if value is None:
                self._known.pop(name, None)
            else:
                self._known[name] = value
