"""The contract between a source and the ingest loop.

A source uses its own time. It reports the current upstream frontier (`probe`) and reads
all changes below a frontier into a `TickTransaction` (`read_into`). The loop commits that
transaction atomically: rows, the source's state for its next start, tables that begin,
grow, fail or recover. Then it calls `committed`, and only then may the source confirm
its position upstream.

    open ─► probe ─► read_into ─► (the loop commits the tick) ─► committed ─► probe …

A source knows nothing of the timeline, of storage or of Spark. `penstock.sources.context`
has the parameters that the loop passes.

`Source` is everything that a source must have. The other protocols are optional: a source
that has the method of a protocol has the capability.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from penstock.errors import DefiniteError
from penstock.progress import Frontier
from penstock.sources.context import SnapshotLoader, Split, StateStore, TickTransaction

__all__ = [
    "Checkable",
    "CollectionOutline",
    "ComparisonFailed",
    "Droppable",
    "OwnershipObserver",
    "Probe",
    "Resyncable",
    "SnapshotProgress",
    "Source",
    "Split",
    "Stoppable",
    "TableSelection",
    "WaitReporter",
]


class Source(Protocol):
    """An upstream system that changes and reports its frontier."""

    kind: str
    """Selects the form of the remap."""

    def open(
        self, state: StateStore, loader: SnapshotLoader, bound: Frontier[Any] | None, /
    ) -> None:
        """Connect and prepare to resume from `bound`; None at the first start.

        Raises:
            TransientError: a later attempt may succeed.
            DefiniteError: a person must act.
        """
        ...

    def probe(self) -> "Probe":
        """Return an upstream frontier at or above the one at the time of the call."""
        ...

    def read_into(self, tick: TickTransaction, up_to: Frontier[Any]) -> Frontier[Any] | None:
        """Read all changes below `up_to`, or somewhat more, into `tick`.

        Return the frontier that was read up to, or None while an initial snapshot is in
        progress and nothing may become visible.
        """
        ...

    def collections(self) -> Sequence[str]:
        """Return the visible collections. Every tick advances all of them."""
        ...

    def committed(self, frontier: Frontier[Any] | None) -> None:
        """Handle the commit of the tick that was read last."""
        ...

    def status(self) -> Mapping[str, Any]:
        """Return phase, row counts, lag and the current wait."""
        ...

    def close(self) -> None:
        """Close all connections. Nothing durable changes."""
        ...


@dataclass(frozen=True, slots=True)
class Probe:
    """Upstream frontier and upstream clock."""

    frontier: Frontier[Any]
    """Frontier to read up to next: the upstream frontier, or a chunk of the backlog."""

    now_ms: int
    reached: Frontier[Any] | None = None
    """Upstream frontier, if `frontier` is only a chunk."""

    @property
    def more(self) -> bool:
        """Return whether the source is catching up in chunks."""
        return self.reached is not None

    @property
    def end(self) -> Frontier[Any]:
        """Return the upstream frontier."""
        return self.frontier if self.reached is None else self.reached


@runtime_checkable
class Stoppable(Protocol):
    """A source that waits for upstream, and can cancel its waits."""

    def use_stop(self, stop: threading.Event, /) -> None:
        """Make every wait raise a TransientError when `stop` is set. Called once."""
        ...


@runtime_checkable
class WaitReporter(Protocol):
    """A source that reports its current wait."""

    def waits_for(self) -> str:
        """Return what `open` or `read_into` waits for, or "". Called by another thread."""
        ...


@runtime_checkable
class SnapshotProgress(Protocol):
    """A source whose initial snapshots may take several ticks."""

    def is_loaded(self) -> bool:
        """Return whether all initial snapshots are complete and visible."""
        ...


@runtime_checkable
class OwnershipObserver(Protocol):
    """A source that confirms its position upstream also during a long operation."""

    def ownership_verified(self) -> None:
        """Handle the proof, during a long operation, that this process is still the writer.

        Called by another thread.
        """
        ...


@runtime_checkable
class Resyncable(Protocol):
    """A source that can compare its collections with upstream."""

    def resync(self, parts: Sequence[str], /) -> None:
        """Compare these parts with upstream at the next tick, and repair them; none means all.

        Raises:
            UsageError: a part does not exist.
        """
        ...


@runtime_checkable
class Checkable(Protocol):
    """A source that can check upstream before its first start."""

    def check(self, *, started: bool) -> Sequence["CollectionOutline"]:
        """Return the collections that the source would create, as far as they are known.

        Called on a source that is not open. Changes nothing upstream. If the source has
        been `started`, only the connection is checked and nothing is returned.

        Raises:
            DefiniteError: the source cannot start; lists each problem with its remedy.
            TransientError: upstream cannot be reached.
        """
        ...


@runtime_checkable
class TableSelection(Protocol):
    """A source of several tables or topics, of which the file may remove some."""

    def drop_removed(self, state: StateStore, destroy: Callable[[Sequence[str]], None], /) -> None:
        """Drop the parts that the file no longer names, after `destroy` of their collections.

        Called on a source that is not open. Idempotent.
        """
        ...


@runtime_checkable
class Droppable(Protocol):
    """A source that creates objects upstream."""

    def drop(self, state: StateStore, /) -> None:
        """Drop everything that was created upstream.

        Called on a source that is not open. Idempotent: a missing object is no error.

        Raises:
            TransientError: upstream cannot be reached.
        """
        ...


@dataclass(frozen=True, slots=True)
class CollectionOutline:
    """A collection that a source would create, known before the source starts."""

    name: str
    schema: pa.Schema
    key: tuple[str, ...]
    omitted: Mapping[str, str] = field(default_factory=dict[str, str])
    """Upstream columns that the collection does not have, each with the reason."""


class ComparisonFailed(DefiniteError):
    """A comparison that was carried out and failed; the request for it is not repeated."""
