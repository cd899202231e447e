"""The collection of records that could not be taken, as its source goes on.

It begins with the tick from which on such records are kept, and moves with every later one,
also if they are not kept any more: then nothing is added, and what is in it can still be read.
"""

from collections.abc import Sequence
from typing import Final

from penstock.sources.kafka.layout import ERRORS_SCHEMA
from penstock.sources.source import SnapshotLoader, StateStore, TickTransaction

__all__ = ["KeptApart"]

BEGUN: Final = "errors"
"""The note that says that it is there."""


class KeptApart:
    """Of one source."""

    def __init__(self, name: str, *, wanted: bool) -> None:
        """`wanted` if the file says to keep them."""
        self.name = name
        self.wanted = wanted
        self._begun = False

    def open(self, memory: StateStore, loader: SnapshotLoader) -> None:
        """Find out whether it is there; if it is wanted, let it be."""
        self._begun = bool(memory.get(BEGUN))
        if self.wanted:
            loader.create(self.name, ERRORS_SCHEMA, ("topic", "partition", "offset"))

    def begin(self, tick: TickTransaction) -> None:
        """Let it be seen from now on, if it is not yet."""
        if self.wanted and not self._begun:
            tick.begin(self.name)
            tick.put_state(BEGUN, True)
            self._begun = True

    def names(self) -> Sequence[str]:
        """What moves with the source: itself, if it is there."""
        return [self.name] if self._begun or self.wanted else []
