"""Sources that do as they are told.

A `ScriptedSource` is upstream and source in one: a test appends rows to its
partitions, and the loop reads them as from any other. It can be made to fail,
to tell another time and to go back, at the moment a test chooses.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock.errors import PenstockError, TransientError
from penstock.sources.source import Frontier, Probe, SnapshotLoader, StateStore, TickTransaction

__all__ = ["ScriptedSource"]

SCHEMA = pa.schema([("partition", pa.string()), ("offset", pa.int64()), ("word", pa.string())])


class ScriptedSource:
    """Words in partitions, each at the next offset."""

    def __init__(self, kind: str, collection: str = "words") -> None:
        self.kind = kind
        self.collection = collection
        self.now_ms: int | None = None
        """What upstream's clock says; None for the time of the words' arrival."""

        self.confirmed: list[Frontier | None] = []
        """What the source was told is durable, in order."""

        self.opened: list[Frontier | None] = []
        """From where it was asked to go on, each time."""

        self.asked: list[tuple[str, ...]] = []
        self.proofs = 0
        """How often it was told, in a tick that took long, that we are the writer."""

        self.waiting = ""
        self.dropped = False
        self.stop = threading.Event()
        """Set when it is to give up what it waits for."""

        self._lock = threading.Lock()
        self._words: dict[Any, list[str]] = {}
        self._failures: dict[str, list[PenstockError]] = {}
        self._begun = False
        self._drawn: dict[Any, int] = {}

    def append(self, partition: Any, *words: str) -> None:
        """Upstream has more."""
        with self._lock:
            self._words.setdefault(partition, []).extend(words)

    def forget(self, partition: Any, count: int) -> None:
        """Upstream went back by `count` words."""
        with self._lock:
            del self._words[partition][-count:]

    def fail(self, step: str, error: PenstockError | None = None) -> None:
        """The next `open`, `probe`, `read_into` or `committed` fails."""
        self._failures.setdefault(step, []).append(error or TransientError(f"{step} was scripted"))

    def use_stop(self, stop: threading.Event) -> None:
        """Keep it."""
        self.stop = stop

    def open(self, memory: StateStore, loader: SnapshotLoader, bound: Frontier | None) -> None:
        """Go on from `bound`."""
        self._trip("open")
        self.opened.append(bound)
        self._drawn = dict(bound or {})
        self._begun = bound is not None
        loader.create(self.collection, SCHEMA, ["partition", "offset"])

    def probe(self) -> Probe:
        """How many words there are."""
        self._trip("probe")
        with self._lock:
            frontier = {partition: len(words) for partition, words in self._words.items()}
        return Probe(frontier, self.now_ms if self.now_ms is not None else 2**62)

    def read_into(self, tick: TickTransaction, up_to: Frontier) -> Frontier | None:
        """The words below `upto` that were not drawn before."""
        with self._lock:
            rows = [
                {"partition": str(partition), "offset": offset, "word": words[offset]}
                for partition, words in self._words.items()
                for offset in range(self._drawn.get(partition, 0), up_to.get(partition, 0))
            ]
        if not self._begun:
            tick.begin(self.collection)
        inserts = pa.Table.from_pylist(rows, schema=SCHEMA)
        tick.change(self.collection, deletes=SCHEMA.empty_table(), inserts=inserts)
        tick.put_state("words", sum(up_to.values()))
        self._trip("read_into")
        self._reached = dict(up_to)
        return self._reached

    def collections(self) -> Sequence[str]:
        """Its one collection."""
        return [self.collection]

    def committed(self, frontier: Frontier | None) -> None:
        """What was drawn is durable."""
        self._begun = True
        self._drawn = dict(frontier or {})
        self.confirmed.append(frontier)
        self._trip("committed")

    def resync(self, parts: Sequence[str]) -> None:
        """Note that it was asked."""
        self.asked.append(tuple(parts))

    def status(self) -> Mapping[str, Any]:
        """How far it has come."""
        return {"kind": self.kind, "phase": "following"}

    def ownership_verified(self) -> None:
        """Count it."""
        self.proofs += 1

    def is_loaded(self) -> bool:
        """There is nothing but the stream."""
        return True

    def waits_for(self) -> str:
        """For whatever it was told to."""
        return self.waiting

    def check(self) -> None:
        """As `Source` has it."""

    def drop_removed(self, memory: StateStore, destroy: Callable[[Sequence[str]], None]) -> None:
        """As `Source` has it."""

    def drop(self, memory: StateStore) -> None:
        """As `Source` has it."""
        self.dropped = True

    def close(self) -> None:
        """Nothing is held."""

    def _trip(self, step: str) -> None:
        waiting = self._failures.get(step)
        if waiting:
            raise waiting.pop(0)
