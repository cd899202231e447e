"""Dead-letter collection of a source.

The collection becomes visible at the first tick with dead-lettering enabled, and its upper advances
with every later tick. If dead-lettering is disabled later, the collection receives no rows and
remains readable.
"""

from collections.abc import Sequence
from typing import Final

from penstock.sources.context import SnapshotLoader, StateStore, TickTransaction
from penstock.sources.kafka.output_schema import ERRORS_SCHEMA

__all__ = ["DeadLetterCollection"]

STATE_KEY: Final = "errors"
"""State key that records that the collection is visible."""


class DeadLetterCollection:
    """Dead-letter collection of one source."""

    def __init__(self, name: str, *, enabled: bool) -> None:
        """Describe the collection `name`; `enabled` is true if the file enables dead-lettering."""
        self.name = name
        self.enabled = enabled
        self._is_visible = False

    def open(self, state: StateStore, loader: SnapshotLoader) -> None:
        """Read whether the collection is visible, and create it if it is enabled."""
        self._is_visible = bool(state.get(STATE_KEY))
        if self.enabled:
            loader.create(self.name, ERRORS_SCHEMA, ("topic", "partition", "offset"))

    def begin(self, tick: TickTransaction) -> None:
        """Publish the collection at this tick if it is enabled and not visible yet."""
        if self.enabled and not self._is_visible:
            tick.begin(self.name)
            tick.put_state(STATE_KEY, True)
            self._is_visible = True

    def names(self) -> Sequence[str]:
        """Return the collections that advance with the source: this one, or none."""
        return [self.name] if self._is_visible or self.enabled else []
