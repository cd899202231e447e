"""What users see of a source's bindings: its progress, and the remap as it is.

    shop_progress    as of t, one row a partition with its newest binding at or before t;
                     as changes, one row a partition a binding
    shop_remap       the collection itself, whose counts are offsets and are shown as such

Progress is a view: the remap holds all of it, so there is nothing to keep in step.
"""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock import persist
from penstock.data import DIFF, TIME
from penstock.persist import (
    Changes,
    Client,
    Collection,
    Listener,
    Settings,
    SinceError,
    Snapshot,
)
from penstock.persist.lake import storage_locations, time_of
from penstock.persist.readability import check_changes
from penstock.persist.state import is_hidden
from penstock.reclock import (
    Offsets,
    Shape,
    accumulated,
    progress_as_of,
    progress_changes,
    shape_of,
)

__all__ = ["NOTE", "BindingsOf", "Followed", "bindings_in", "find_bindings", "notes_in"]

NOTE = "progress"
"""Under which name a source writes down how its progress is called."""


ATTEMPTS = 10
"""So often notes are looked at again that were compacted meanwhile."""


@dataclass(frozen=True, slots=True)
class BindingsOf:
    """The bindings of one source, as users see them under one name."""

    name: str
    remap: Collection
    shape: Shape
    derived: bool
    """Whether this is the progress, and not the remap itself."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of its rows."""
        if self.derived:
            return self.shape.progress
        return self.shape.remap.append(pa.field(DIFF, pa.int64(), False))

    def time_of(self, text: str) -> int:
        """Return the time that `text` means here: `earliest` is that of the first binding.

        The remap can be read from 0 on, where no binding is yet.
        """
        upper = self.remap.upper
        if text != "earliest" or not upper:
            return time_of(text, self.remap.state)
        first = pc.min(self._updates(upper).column(TIME)).as_py()
        return self.remap.since if first is None else int(first)

    def as_of(self, time: int) -> pa.Table:
        """Its rows as of a time; raises as reading any collection does."""
        contents = self.remap.snapshot(time).arrow()
        if self.derived:
            return progress_as_of(self.shape, self._updates(time + 1), time)
        return contents.drop_columns([TIME])

    def changes(self, lower: int, upper: int) -> pa.Table:
        """What changed at times in `[lower, upper)`: columns, `mz_timestamp` and `mz_diff`.

        Raises:
            SinceError, NotYetComplete: as reading changes of any collection does.
        """
        check_changes(self.remap.state, lower, upper)
        updates = self._updates(upper)
        rows = progress_changes(self.shape, updates) if self.derived else updates
        times = rows.column(TIME).to_numpy()
        return rows.filter(pa.array((times >= lower) & (times < upper)))

    def _updates(self, upper: int) -> pa.Table:
        """The updates of remap below a time, those before since brought up to it."""
        found: list[pa.Table] = []
        with self._listening() as listener:
            while listener.frontier < min(upper, self.remap.upper) or not found:
                changes = listener.next_changes(timeout_ms=0)
                if changes is None:
                    break
                found.append(changes.arrow())
        rows = pa.concat_tables(found)
        return rows.filter(pa.array(rows.column(TIME).to_numpy() < upper))

    def _listening(self) -> Listener:
        """From since on, wherever that is by the time it is held."""
        while True:
            since = self.remap.since
            try:
                return self.remap.listen(since, snapshot=True)
            except SinceError:
                if self.remap.since == since:
                    raise


class Followed:
    """Progress, as remap is listened to."""

    def __init__(self, bindings: BindingsOf, as_of: int) -> None:
        """From the contents as of a time on; -1 is before all times."""
        self._bindings = bindings
        self._offsets: Offsets = {}
        if as_of >= 0:
            contents = bindings.remap.snapshot(as_of).arrow()
            self._offsets = accumulated(bindings.shape, contents)
        self._as_of = as_of

    def shown(self, changes: Changes | Snapshot) -> pa.Table:
        """What a listener gave, as rows of progress."""
        shape = self._bindings.shape
        if isinstance(changes, Snapshot):
            rows = self._bindings.as_of(self._as_of)
            ones = pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows)
            return rows.append_column(pa.field(DIFF, pa.int64(), False), ones)
        rows = progress_changes(shape, changes.arrow(), before=self._offsets)
        self._offsets = accumulated(shape, changes.arrow(), before=self._offsets)
        return rows


def bindings_in(client: Client) -> list[BindingsOf]:
    """All relations about bindings in a storage location."""
    found = []
    for source, told in notes_in(client).items():
        note = told.get(NOTE)
        if note is not None:
            remap, shape = client.collection(f"{source}_remap"), shape_of(note["kind"])
            found.append(BindingsOf(note["name"], remap, shape, derived=True))
            found.append(BindingsOf(remap.name, remap, shape, derived=False))
    return found


def notes_in(client: Client) -> dict[str, dict[str, Any]]:
    """By source of a storage location, what it wrote down for itself."""
    found = {}
    for name in client.collections(hidden=True):
        if is_hidden(name) and name.endswith("/state"):
            found[name.removesuffix("/state")] = _newest(client.collection(name))
    return {source: told for source, told in found.items() if told is not None}


def _newest(notes: Collection) -> dict[str, Any] | None:
    """The contents as they are now, of what its writer compacts as it goes."""
    for attempt in range(ATTEMPTS):
        if not notes.upper:
            return None
        try:
            contents = notes.snapshot(notes.upper - 1)
            return {update.data[0]: update.data[1] for update in contents}
        except SinceError:
            # It went on between the two looks.
            if attempt == ATTEMPTS - 1:
                raise
    return None


def find_bindings(
    location: str, name: str, *, hold: bool, settings: Settings
) -> tuple[Client, BindingsOf] | None:
    """The relation of that name, wherever in the lake it is, and a client to be closed."""
    for url in storage_locations(location):
        client = persist.open(url, hold=hold, settings=settings)
        for each in bindings_in(client):
            if each.name == name:
                return client, each
        client.close()
    return None
