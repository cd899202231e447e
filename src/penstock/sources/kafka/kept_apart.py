"""Dead-letter collection of a source.

The collection becomes visible at the first tick with dead-lettering enabled, and its upper advances
with every later tick. If dead-lettering is disabled later, the collection receives no rows and
remains readable.
"""

from collections.abc import Sequence
from typing import Final

from penstock.sources.kafka.layout import ERRORS_SCHEMA
from penstock.sources.source import SnapshotLoader, StateStore, TickTransaction

__all__ = ["KeptApart"]

BEGUN: Final = "errors"
"""State key that records that the collection is visible."""


class KeptApart:
    """Dead-letter collection of one source."""

    def __init__(self, name: str, *, wanted: bool) -> None:
        """Describe the collection `name`; `wanted` is true if the file enables dead-lettering."""
        self.name = name
        self.wanted = wanted
        self._begun = False

    def open(self, memory: StateStore, loader: SnapshotLoader) -> None:
        """Read whether the collection is visible, and create it if it is enabled."""
        self._begun = bool(memory.get(BEGUN))
        if self.wanted:
            loader.create(self.name, ERRORS_SCHEMA, ("topic", "partition", "offset"))

    def begin(self, tick: TickTransaction) -> None:
        """Publish the collection at this tick if it is enabled and not visible yet."""
        if self.wanted and not self._begun:
            tick.begin(self.name)
            tick.put_state(BEGUN, True)
            self._begun = True

    def names(self) -> Sequence[str]:
        """Return the collections that advance with the source: this one, or none."""
        return [self.name] if self._begun or self.wanted else []
