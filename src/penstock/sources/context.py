"""Parameters of a source: what the ingest loop passes to it.

    StateStore         JSON values for the next start
    SnapshotLoader     creates collections; reads initial snapshots in parallel
    TickTransaction    all changes of one tick, committed atomically
    SideState          hidden rows of a source, part of a tick
    Split              one part of an initial snapshot
    Scan               a closed range for Spark to read

The ingest loop implements the protocols with persist and Spark. A source implements only `Scan`
and `Split`, if at all.
"""

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from penstock.errors import DefiniteError

__all__ = [
    "Scan",
    "ScanOutput",
    "SideRows",
    "SideState",
    "SnapshotLoad",
    "SnapshotLoader",
    "Split",
    "StateStore",
    "TickTransaction",
]


class StateStore(Protocol):
    """State of a source for its next start: JSON values by key."""

    def get(self, name: str) -> Any:
        """Return the value of a key, or None."""
        ...

    def names(self) -> Sequence[str]:
        """Return all keys in order."""
        ...

    def put(self, values: Mapping[str, Any]) -> None:
        """Make `values` durable now and atomically; None deletes a key."""
        ...


class SnapshotLoader(Protocol):
    """Reads splits in parallel, each directly into files of a collection."""

    def check(self, collection: str, schema: pa.Schema, key: Sequence[str]) -> None:
        """Check that `create` can create the collection.

        Raises:
            UsageError: the name or the schema cannot be stored.
        """
        ...

    def create(self, collection: str, schema: pa.Schema, key: Sequence[str]) -> None:
        """Create a collection. It is not visible before a tick begins it."""
        ...

    def drop_collection(self, collection: str) -> None:
        """Drop a collection that has never been visible."""
        ...

    def load(self, collection: str, splits: Sequence["Split"], *, size: int) -> "SnapshotLoad":
        """Start reading all splits, about `size` bytes in total."""
        ...


class Split(Protocol):
    """One part of an initial snapshot, read by one task. Picklable."""

    def read(self, stop: threading.Event | None = None) -> Generator[pa.RecordBatch, None, None]:
        """Yield the rows. A caller that does not exhaust the generator closes it.

        A wait for the server raises an error soon after `stop` is set.
        """
        ...


class SnapshotLoad(Protocol):
    """An initial snapshot of one table, being written to files."""

    def done(self) -> bool:
        """Return whether all splits are read, or one has failed."""
        ...

    def rows(self) -> int:
        """Return the number of rows in the splits that are complete."""
        ...

    def abandon(self) -> None:
        """Cancel the load and delete its files."""
        ...

    def result(self) -> Any:
        """Return the argument for `TickTransaction.link_snapshot`; raise the error of the load."""
        ...


class SideState(Protocol):
    """Hidden rows that a source stores for later ticks, by name. Part of a tick."""

    def append_side_rows(self, name: str, rows: pa.Table) -> None:
        """Store hidden rows under a name of the source."""
        ...

    def side_rows(self, name: str) -> Iterable[pa.Table]:
        """Yield the side rows of a name, this tick included, in append order."""
        ...

    def discard_side_rows(self, name: str) -> None:
        """Discard the side rows that this tick has appended under a name."""
        ...

    def drop_side_rows(self, name: str) -> None:
        """Drop all side rows of a name."""
        ...

    def retain_side_rows(self, names: Set[str]) -> None:
        """Drop side rows of earlier ticks under all other names."""
        ...


class TickTransaction(SideState, Protocol):
    """All changes of one tick. They are committed in one entry, or not at all."""

    time: int

    def change(self, collection: str, *, deletes: pa.Table, inserts: pa.Table) -> None:
        """Apply deletes and inserts at this tick."""
        ...

    def begin(self, collection: str) -> None:
        """Make the collection visible from this tick on, with all rows put into it."""
        ...

    def link_snapshot(self, collection: str, copy: Any) -> None:
        """Link the files of a complete initial snapshot. `begin` makes them visible."""
        ...

    def grow(self, collection: str, schema: pa.Schema, defaults: Mapping[str, Any]) -> None:
        """Add columns from this tick on. Older rows read `defaults` in them."""
        ...

    def fail(self, collection: str, error: DefiniteError) -> None:
        """Make every read at or above this time fail with `error`."""
        ...

    def recover(self, collection: str) -> None:
        """End the error of a collection at this time."""
        ...

    def lookup(self, collection: str, keys: pa.Table) -> pa.Table:
        """Return the rows with these keys, changes of this tick included."""
        ...

    def truncate(self, collection: str) -> None:
        """Delete all rows."""
        ...

    def compare(
        self, collection: str, splits: Sequence[Split], *, size: int
    ) -> AbstractContextManager[Callable[[], int]]:
        """Read all splits, about `size` bytes in total.

        Yield a function that writes the differences and returns the number of rows changed.
        """
        ...

    def replace(
        self,
        collection: str,
        schema: pa.Schema,
        key: Sequence[str],
        splits: Sequence[Split],
        *,
        size: int,
    ) -> AbstractContextManager[Callable[[], int]]:
        """Read all splits, about `size` bytes in total, into a new collection.

        Yield a function that moves the name to the new collection at this time and returns
        its number of rows. Changes of this tick to the old collection are dropped.
        """
        ...

    def scan(self, scan: "Scan") -> Sequence[Any]:
        """Read a range with Spark tasks, each directly into files; return their reports.

        Raises:
            TransientError: Spark failed. The tick contains nothing of the scan.
        """
        ...

    def put_state(self, name: str, value: Any) -> None:
        """Store a JSON value for the next start; None deletes the key."""
        ...


@dataclass(frozen=True, slots=True)
class SideRows:
    """Name and schema of hidden rows that a source stores for later ticks."""

    name: str
    schema: pa.Schema


class Scan(Protocol):
    """A closed range that Spark reads with one of its formats, and its processing. Picklable.

    Each Spark task prepares the rows that it reads. It also finishes them, unless rows of one
    key must be finished together: then they are shuffled first.
    """

    @property
    def format(self) -> str:
        """Return the Spark format that reads the range."""
        ...

    @property
    def options(self) -> Mapping[str, str]:
        """Return the options of the format. They may contain secrets."""
        ...

    @property
    def secrets(self) -> Collection[str]:
        """Return the option values to redact from errors."""
        ...

    @property
    def size(self) -> int:
        """Return the approximate size in bytes."""
        ...

    @property
    def into(self) -> Mapping[str, str]:
        """Return the collection of each output; there is at least one."""
        ...

    @property
    def side_rows(self) -> Mapping[str, "SideRows"]:
        """Return the side rows of each output that is hidden."""
        ...

    @property
    def by_key(self) -> bool:
        """Return whether all rows of one key must be finished by one task."""
        ...

    def prepare(self, rows: Iterable[pa.RecordBatch]) -> Iterable[pa.Table]:
        """Decode records into rows that `places` can distribute."""
        ...

    def places(self, rows: pa.Table, count: int) -> pa.Array:
        """Return, for each prepared row, the number of the task that finishes it."""
        ...

    def finish(self, rows: Iterable[pa.Table], out: "ScanOutput") -> Any:
        """Write the result of prepared rows; return a picklable report for the source."""
        ...


class ScanOutput(Protocol):
    """Output of one Spark task of a scan. It is committed with the tick, or not at all."""

    def put(self, output: str, rows: pa.Table) -> None:
        """Add rows to an output, once each, or with the multiplicity in `mz_diff`."""
        ...

    def stored(self, output: str, keys: pa.Table) -> pa.Table:
        """Return the rows with these keys as of the previous tick."""
        ...
