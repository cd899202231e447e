"""What somebody wrote down for their next start, in a collection of its own.

Each name has one JSON value. The collection commits together with the tick
that changed it, so a restart finds both or neither. Its own times only count
what was written: no clock is read for them, and nobody takes the time from them.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock import persist
from penstock.errors import InternalError

__all__ = ["FAILURE", "PAUSED", "StateStore"]

PAUSED: Final = "paused"
"""The note that a task is not to run until somebody says so."""

FAILURE: Final = "failure"
"""The note of the error that stopped a task: kind of the task, message, detail, hint, at_ms."""

Update = tuple[tuple[str, Any], int, int]


class StateStore:
    """The notes of one source, or of one materialization."""

    def __init__(self, client: persist.Client, owner: str) -> None:
        self.collection = client.create_or_load(
            f"{owner}/state", key=persist.TEXT, value=persist.JSON, owner=owner
        )
        self.lock = threading.RLock()
        """Held by whoever writes, from what is known to what is learned."""

        self._known: dict[str, Any] = {}
        self.upper = self.collection.upper
        if self.upper:
            for update in self.collection.snapshot(self.upper - 1):
                name, value = update.data
                self._known[name] = value

    def get(self, name: str) -> Any:
        """What is remembered under `name`, or None."""
        return self._known.get(name)

    def names(self) -> Sequence[str]:
        """All names, in order."""
        return sorted(self._known)

    def put(self, values: Mapping[str, Any]) -> None:
        """Make `values` durable now, in one step; None forgets a name."""
        with self.lock:
            time = self.upper
            outcome = self.collection.compare_and_append(
                self.updates(values, time), self.upper, time + 1
            )
            if not isinstance(outcome, persist.Appended):
                raise InternalError(
                    f'notes of collection "{self.collection.name}" were written by another',
                    hint="Stop the other process.",
                )
            self.learn(values, time + 1)
        self.collection.allow_compaction(time)

    def updates(self, values: Mapping[str, Any], time: int) -> list[Update]:
        """What changes when `values` are written down at a time."""
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
        """`values` are durable, up to `upper`."""
        self.upper = upper
        for name, value in values.items():
            if value is None:
                self._known.pop(name, None)
            else:
                self._known[name] = value
