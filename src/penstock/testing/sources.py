"""Scripted source for tests.

A `ScriptedSource` is upstream system and source in one. A test appends rows to its partitions, and
the ingest loop reads them as from any other source. A test can make it fail, report another time or
lose rows, at any point.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock.errors import PenstockError, TransientError
from penstock.progress import Frontier
from penstock.sources.context import SnapshotLoader, StateStore, TickTransaction
from penstock.sources.source import Probe

__all__ = ["ScriptedSource"]

SCHEMA = pa.schema([("partition", pa.string()), ("offset", pa.int64()), ("word", pa.string())])


class ScriptedSource:
    """Source of words in partitions, each at the next offset."""

    def __init__(self, kind: str, collection: str = "words") -> None:
        self.kind = kind
        self.collection = collection
        self.now_ms: int | None = None
        """Upstream time of a probe; None for the time of arrival."""

        self.confirmed: list[Frontier[Any] | None] = []
        """Frontiers that were confirmed as durable, in order."""

        self.opened: list[Frontier[Any] | None] = []
        """Frontiers of all calls of `open`, in order."""

        self.asked: list[tuple[str, ...]] = []
        self.proofs = 0
        """Number of calls of `ownership_verified` during long ticks."""

        self.waiting = ""
        self.dropped = False
        self.stop = threading.Event()
        """Event that cancels the waits of the source."""

        self._lock = threading.Lock()
        self._words: dict[Any, list[str]] = {}
        self._failures: dict[str, list[PenstockError]] = {}
        self._begun = False
        self._drawn: Frontier[Any] = Frontier()

    def append(self, partition: Any, *words: str) -> None:
        """Append words to a partition upstream."""
        with self._lock:
            self._words.setdefault(partition, []).extend(words)

    def forget(self, partition: Any, count: int) -> None:
        """Remove the last `count` words of a partition upstream."""
        with self._lock:
            del self._words[partition][-count:]

    def fail(self, step: str, error: PenstockError | None = None) -> None:
        """Make the next `open`, `probe`, `read_into` or `committed` fail."""
        self._failures.setdefault(step, []).append(error or TransientError(f"{step} was scripted"))

    def use_stop(self, stop: threading.Event) -> None:
        self.stop = stop

    def open(self, memory: StateStore, loader: SnapshotLoader, bound: Frontier[Any] | None) -> None:
        """Resume from `bound`."""
        self._trip("open")
        self.opened.append(bound)
        self._drawn = bound or Frontier()
        self._begun = bound is not None
        loader.create(self.collection, SCHEMA, ["partition", "offset"])

    def probe(self) -> Probe:
        """Return the number of words in each partition."""
        self._trip("probe")
        with self._lock:
            ends = {partition: len(words) for partition, words in self._words.items()}
        return Probe(Frontier(ends), self.now_ms if self.now_ms is not None else 2**62)

    def read_into(self, tick: TickTransaction, up_to: Frontier[Any]) -> Frontier[Any] | None:
        """Read the words below `up_to` that were not read before."""
        with self._lock:
            rows = [
                {"partition": str(partition), "offset": offset, "word": words[offset]}
                for partition, words in self._words.items()
                for offset in range(self._drawn[partition], up_to[partition])
            ]
        if not self._begun:
            tick.begin(self.collection)
        inserts = pa.Table.from_pylist(rows, schema=SCHEMA)
        tick.change(self.collection, deletes=SCHEMA.empty_table(), inserts=inserts)
        tick.put_state("words", sum(position for _, position in up_to.items()))
        self._trip("read_into")
        return up_to

    def collections(self) -> Sequence[str]:
        return [self.collection]

    def committed(self, frontier: Frontier[Any] | None) -> None:
        """Record that the words below `frontier` are durable."""
        self._begun = True
        self._drawn = frontier or Frontier()
        self.confirmed.append(frontier)
        self._trip("committed")

    def resync(self, parts: Sequence[str]) -> None:
        """Record the request."""
        self.asked.append(tuple(parts))

    def status(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "phase": "following"}

    def ownership_verified(self) -> None:
        """Count the call."""
        self.proofs += 1

    def is_loaded(self) -> bool:
        """Return True: the source has no initial snapshot."""
        return True

    def waits_for(self) -> str:
        """Return the text that the test has set."""
        return self.waiting

    def drop(self, memory: StateStore) -> None:
        """Record the drop."""
        self.dropped = True

    def close(self) -> None:
        """Do nothing: the source holds no resources."""

    def _trip(self, step: str) -> None:
        waiting = self._failures.get(step)
        if waiting:
            raise waiting.pop(0)
