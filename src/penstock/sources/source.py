"""What a source is to the rest of the house.

A source speaks its own time. It says how far upstream has come (`probe`), and
brings the changes up to a frontier into a `Tick` (`draw`). Whatever it puts
there becomes durable in one step, or not at all: rows, what it remembers for its
next start, tables that begin, grow, fail or recover. It learns with
`committed` that this has happened; only then may it let upstream forget.

    open ─► probe ─► draw ─► (the tick is made durable) ─► committed ─► probe …

A source knows nothing of the timeline, of storage or of Spark. What it needs
of them it is handed: a `Tick`, a `Memory` and a `Loader`.
"""

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from penstock.errors import DefiniteError

__all__ = [
    "Aside",
    "CollectionOutline",
    "ComparisonFailed",
    "Frontier",
    "Load",
    "Loader",
    "Memory",
    "Out",
    "Piece",
    "Probe",
    "Scan",
    "Source",
    "Tick",
]

Frontier: TypeAlias = Mapping[Any, int]
"""By partition, the offset below which everything is meant. A source that is one log has
one partition, `()`."""


class ComparisonFailed(DefiniteError):
    """A comparison was carried out and failed. A request for it is answered, and not repeated."""


@dataclass(frozen=True, slots=True)
class Probe:
    """How far upstream has come, and what time it is there."""

    frontier: Frontier
    """What to draw next: all there is, or a bite of it."""

    now_ms: int
    reached: Frontier | None = None
    """All there is, if that is more than a bite."""

    @property
    def more(self) -> bool:
        """Whether the source is catching up, in bites."""
        return self.reached is not None

    @property
    def everything(self) -> Frontier:
        """How far upstream has come."""
        return self.frontier if self.reached is None else self.reached


class Memory(Protocol):
    """What a source wrote down for its next start: plain JSON values by name."""

    def recall(self, name: str) -> Any:
        """What is remembered under `name`, or None."""
        ...

    def names(self) -> Sequence[str]:
        """All names, in order."""
        ...

    def write_down(self, values: Mapping[str, Any]) -> None:
        """Make `values` durable now, in one step; None forgets a name."""
        ...


class Piece(Protocol):
    """A part of a first copy that one task reads. It can be pickled."""

    def read(self, stop: threading.Event | None = None) -> Generator[pa.RecordBatch, None, None]:
        """Yield the rows; a caller that does not read them to the end closes it.

        Waits for the server end with an error soon after `stop` is set.
        """
        ...


@dataclass(frozen=True, slots=True)
class Aside:
    """Rows that are put aside: under which name, and with which columns."""

    name: str
    schema: pa.Schema


class Out(Protocol):
    """Where a task puts what a scan gave; it becomes durable with the tick, or not at all."""

    def put(self, output: str, rows: pa.Table) -> None:
        """Rows for an output: they come, once each, or as often as `mz_diff` says."""
        ...

    def stored(self, output: str, keys: pa.Table) -> pa.Table:
        """The rows with these keys that were there before this tick."""
        ...


class Scan(Protocol):
    """A closed range that Spark reads by a format of its own, and what tasks make of it.

    It can be pickled. Each task prepares the rows that it reads; then it finishes them, or,
    if rows must meet, whichever task they meet in does.
    """

    @property
    def format(self) -> str:
        """Which format of Spark's reads it."""
        ...

    @property
    def options(self) -> Mapping[str, str]:
        """How it is read; secrets among them."""
        ...

    @property
    def secrets(self) -> Collection[str]:
        """What of the options nobody may see."""
        ...

    @property
    def size(self) -> int:
        """About how many bytes there are."""
        ...

    @property
    def into(self) -> Mapping[str, str]:
        """By output, the collection that its rows go to; there is at least one."""
        ...

    @property
    def aside(self) -> Mapping[str, "Aside"]:
        """By output, where rows go that are not to be seen: as by `Tick.put_aside`."""
        ...

    @property
    def meets(self) -> bool:
        """Whether rows with one key must be finished by one task."""
        ...

    def prepare(self, rows: Iterable[pa.RecordBatch]) -> Iterable[pa.Table]:
        """What was read, as rows that can be told apart."""
        ...

    def places(self, rows: pa.Table, count: int) -> pa.Array:
        """For each prepared row, in which of `count` tasks it is finished."""
        ...

    def finish(self, rows: Iterable[pa.Table], out: Out) -> Any:
        """Put what prepared rows come to; returns what the source is to be told, pickled."""
        ...


class Load(Protocol):
    """A first copy on its way into files."""

    def done(self) -> bool:
        """Whether all is read, or has failed."""
        ...

    def rows(self) -> int:
        """How many rows there were in the pieces that are read to the end."""
        ...

    def abandon(self) -> None:
        """It is not wanted any more."""
        ...

    def result(self) -> Any:
        """What to hand to `Tick.keep_copy`; raises what went wrong."""
        ...


class Loader(Protocol):
    """Reads pieces in parallel, each straight into files of a collection."""

    def check(self, collection: str, schema: pa.Schema, key: Sequence[str]) -> None:
        """Check that `make` can create the collection.

        Raises:
            UsageError: its name or its schema cannot be stored.
        """
        ...

    def make(self, collection: str, schema: pa.Schema, key: Sequence[str]) -> None:
        """Let there be a collection; it is not seen before it begins."""
        ...

    def unmake(self, collection: str) -> None:
        """Let there not be a collection that has not been seen yet."""
        ...

    def load(self, collection: str, pieces: Sequence[Piece], *, size: int) -> Load:
        """Begin to read all pieces; about `size` bytes in total."""
        ...


class Tick(Protocol):
    """What one tick changes. All of it becomes durable in one step, or none."""

    time: int

    def change(self, collection: str, *, gone: pa.Table, come: pa.Table) -> None:
        """Rows that go and rows that come."""
        ...

    def begin(self, collection: str) -> None:
        """From this time on the collection is seen, with all that was put into it."""
        ...

    def keep_copy(self, collection: str, copy: Any) -> None:
        """Keep the files of a finished first copy, not seen before `begin`."""
        ...

    def grow(self, collection: str, schema: pa.Schema, defaults: Mapping[str, Any]) -> None:
        """From this time on rows have more columns; older ones hold `defaults` in them."""
        ...

    def fail(self, collection: str, error: DefiniteError) -> None:
        """From this time on every reading fails with `error`."""
        ...

    def recover(self, collection: str) -> None:
        """From this time on it can be read again."""
        ...

    def lookup(self, collection: str, keys: pa.Table) -> pa.Table:
        """The rows with these keys, as of this moment of the tick."""
        ...

    def empty(self, collection: str) -> None:
        """All rows go."""
        ...

    def compare(
        self, collection: str, pieces: Sequence[Piece], *, size: int
    ) -> AbstractContextManager[Callable[[], int]]:
        """Read all pieces, about `size` bytes in total, to the end.

        In the block, what is handed out makes the contents equal to them; it returns
        how many rows have to go or come.
        """
        ...

    def replace(
        self,
        collection: str,
        schema: pa.Schema,
        key: Sequence[str],
        pieces: Sequence[Piece],
        *,
        size: int,
    ) -> AbstractContextManager[Callable[[], int]]:
        """Read all pieces, about `size` bytes in total, into a new collection.

        Yields a function that lets the name refer to the new collection from this time
        on, and returns its number of rows. What this tick brought of the old one is dropped.
        """
        ...

    def scan(self, scan: Scan) -> Sequence[Any]:
        """Read a range by Spark's tasks, each straight into files; what each of them told.

        Raises:
            TransientError: Spark failed, and nothing of it is in the tick.
        """
        ...

    def put_aside(self, name: str, rows: pa.Table) -> None:
        """Keep rows that are not to be seen, under a name of the source's own."""
        ...

    def set_aside(self, name: str) -> Iterable[pa.Table]:
        """What was put aside under that name, this tick's too, in the order of that."""
        ...

    def take_back(self, name: str) -> None:
        """Put nothing aside under that name in this tick after all; what was there stays."""
        ...

    def throw_away(self, name: str) -> None:
        """Forget what was put aside under that name."""
        ...

    def keep_aside(self, names: Set[str]) -> None:
        """Forget all that was put aside before this tick under other names."""
        ...

    def remember(self, name: str, value: Any) -> None:
        """Write down a plain JSON value for the next start; None forgets it."""
        ...


@dataclass(frozen=True, slots=True)
class CollectionOutline:
    """A collection that a source would create, known before the source starts."""

    name: str
    schema: pa.Schema
    key: tuple[str, ...]
    omitted: Mapping[str, str] = field(default_factory=dict[str, str])
    """Upstream columns that the collection does not have, each with the reason."""


class Source(Protocol):
    """Something upstream that changes, and says how far it has come."""

    kind: str
    """Which shape its remap has."""

    def stopping(self, stop: threading.Event, /) -> None:
        """Give up what is waited for, with a TransientError, when `stop` is set; said once."""
        ...

    def open(self, memory: Memory, loader: Loader, bound: Frontier | None) -> None:
        """Connect, and be ready to go on from `bound`; None at the very first start.

        Raises:
            TransientError: it may work later.
            DefiniteError: somebody must act.
        """
        ...

    def probe(self) -> Probe:
        """How far upstream has come, by now at least."""
        ...

    def draw(self, tick: Tick, upto: Frontier) -> Frontier | None:
        """Bring all changes below `upto`, or somewhat further, into `tick`.

        Returns how far it came, or None if nothing of it may be seen yet,
        because a first copy is under way.
        """
        ...

    def collections(self) -> Sequence[str]:
        """The collections that can be seen, all of which move with every tick."""
        ...

    def committed(self, frontier: Frontier | None) -> None:
        """What was drawn is durable."""
        ...

    def resync(self, parts: Sequence[str], /) -> None:
        """At the next tick compare these parts with upstream, and mend them; all, if none is named.

        Raises:
            UsageError: there is no such part.
        """
        ...

    def status(self) -> Mapping[str, Any]:
        """For people: phase, rows, lag, what is waited for."""
        ...

    def proved(self) -> None:
        """It takes long, and we are still the writer; called by another thread."""
        ...

    def waits_for(self) -> str:
        """What `open` or `draw` waits for, if anything; asked by another thread."""
        ...

    def settled(self) -> bool:
        """Whether all that was begun, such as first copies, is complete and can be seen."""
        ...

    def check(self, *, followed: bool) -> Sequence[CollectionOutline]:
        """Return the collections that the source would create, as far as they are known.

        Called on a source that is not open; changes nothing upstream. If the source is
        `followed` already, only the connection is checked and nothing is returned.

        Raises:
            DefiniteError: it could not; it tells what to do about each problem.
            TransientError: it cannot be reached.
        """
        ...

    def leave(self, memory: Memory, destroy: Callable[[Sequence[str]], None]) -> None:
        """Forget the parts that the file does not name any more, once their collections are gone.

        Asked of a source that is not open; more than once, if need be.
        """
        ...

    def drop(self, memory: Memory) -> None:
        """Take back all that was made upstream; asked of a source that is not open.

        What is gone already is no error, so that it can be done again.

        Raises:
            TransientError: upstream cannot be reached.
        """
        ...

    def close(self) -> None:
        """Let go of upstream; nothing durable changes."""
        ...
