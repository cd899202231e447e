"""Relations with the remap bindings of a source.

    shop_progress    as of t: one row per partition, with its last binding at or before t;
                     as changes: one row per partition and binding
    shop_remap       the remap collection itself; its multiplicities are offsets

Progress is a view of the remap, so the two cannot differ.
"""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock import persist
from penstock.data import DIFF, TIME
from penstock.data.remap_form import RemapForm
from penstock.errors import UsageError
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
from penstock.progress import Frontier
from penstock.reclock import (
    accumulate,
    progress_as_of,
    progress_changes,
)
from penstock.sources.registry import remap_form

__all__ = [
    "PROGRESS_KEY",
    "ProgressFollower",
    "ProgressView",
    "find_progress_view",
    "progress_views_in",
    "source_states",
]

PROGRESS_KEY = "progress"
"""State key of the name of a source's progress relation."""


ATTEMPTS = 10
"""Maximum number of reads of a state that is compacted between two steps."""


@dataclass(frozen=True, slots=True)
class ProgressView:
    """The remap bindings of one source under one name."""

    name: str
    remap: Collection
    form: RemapForm
    derived: bool
    """True for the progress relation, false for the remap itself."""

    @property
    def schema(self) -> pa.Schema:
        """Return the schema of the rows."""
        if self.derived:
            return self.form.progress
        return self.form.remap.append(pa.field(DIFF, pa.int64(), False))

    def time_of(self, text: str) -> int:
        """Return the time that `text` denotes; `earliest` is the time of the first binding.

        The since of the remap may be 0, where no binding exists yet.
        """
        upper = self.remap.upper
        if text != "earliest" or not upper:
            return time_of(text, self.remap.state)
        first = pc.min(self._updates(upper).column(TIME)).as_py()
        return self.remap.since if first is None else int(first)

    def as_of(self, time: int) -> pa.Table:
        """Return the rows as of a time.

        Raises:
            SinceError, NotYetComplete: as for any collection.
        """
        contents = self.remap.snapshot(time).arrow()
        if self.derived:
            return progress_as_of(self.form, self._updates(time + 1), time)
        return contents.drop_columns([TIME])

    def changes(self, lower: int, upper: int) -> pa.Table:
        """Return the changes in `[lower, upper)`: columns, `mz_timestamp` and `mz_diff`.

        Raises:
            SinceError, NotYetComplete: as for any collection.
        """
        check_changes(self.remap.state, lower, upper)
        updates = self._updates(upper)
        rows = progress_changes(self.form, updates) if self.derived else updates
        times = rows.column(TIME).to_numpy()
        return rows.filter(pa.array((times >= lower) & (times < upper)))

    def _updates(self, upper: int) -> pa.Table:
        """Return the updates of the remap below a time; earlier times are advanced to since."""
        tables: list[pa.Table] = []
        with self._listening() as listener:
            while listener.frontier < min(upper, self.remap.upper) or not tables:
                changes = listener.next_changes(timeout_ms=0)
                if changes is None:
                    break
                tables.append(changes.arrow())
        rows = pa.concat_tables(tables)
        return rows.filter(pa.array(rows.column(TIME).to_numpy() < upper))

    def _listening(self) -> Listener:
        """Return a listener from since on, which may advance until it is held."""
        while True:
            since = self.remap.since
            try:
                return self.remap.listen(since, snapshot=True)
            except SinceError:
                if self.remap.since == since:
                    raise


class ProgressFollower:
    """Turns the updates of a remap listener into rows of progress."""

    def __init__(self, bindings: ProgressView, as_of: int) -> None:
        """Start from the contents as of a time; -1 is before all times."""
        self._bindings = bindings
        self._frontier: Frontier[Any] = Frontier()
        if as_of >= 0:
            contents = bindings.remap.snapshot(as_of).arrow()
            self._frontier = accumulate(bindings.form, contents)
        self._as_of = as_of

    def to_progress(self, changes: Changes | Snapshot) -> pa.Table:
        """Return the rows of progress for one result of the listener."""
        form = self._bindings.form
        if isinstance(changes, Snapshot):
            rows = self._bindings.as_of(self._as_of)
            ones = pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows)
            return rows.append_column(pa.field(DIFF, pa.int64(), False), ones)
        rows = progress_changes(form, changes.arrow(), before=self._frontier)
        self._frontier = accumulate(form, changes.arrow(), before=self._frontier)
        return rows


def progress_views_in(client: Client) -> list[ProgressView]:
    """Return all progress and remap relations of a storage location."""
    views = []
    for source, state in source_states(client).items():
        progress = state.get(PROGRESS_KEY)
        if progress is not None:
            remap = client.collection(f"{source}_remap")
            try:
                form = remap_form(progress["kind"])
            except UsageError:
                continue  # The package of the source is not installed here.
            views.append(ProgressView(progress["name"], remap, form, derived=True))
            views.append(ProgressView(remap.name, remap, form, derived=False))
    return views


def source_states(client: Client) -> dict[str, dict[str, Any]]:
    """Return the stored state of each source of a storage location."""
    states = {}
    for name in client.collections(hidden=True):
        if is_hidden(name) and name.endswith("/state"):
            states[name.removesuffix("/state")] = _newest(client.collection(name))
    return {source: state for source, state in states.items() if state is not None}


def _newest(collection: Collection) -> dict[str, Any] | None:
    """Return the current contents of a state collection, which its writer keeps compacting."""
    for attempt in range(ATTEMPTS):
        if not collection.upper:
            return None
        try:
            contents = collection.snapshot(collection.upper - 1)
            return {update.data[0]: update.data[1] for update in contents}
        except SinceError:
            # The writer advanced between reading the upper and the snapshot.
            if attempt == ATTEMPTS - 1:
                raise
    return None


def find_progress_view(
    location: str, name: str, *, hold: bool, settings: Settings
) -> tuple[Client, ProgressView] | None:
    """Find a relation by name in a lake; return it with a client that the caller closes."""
    for url in storage_locations(location):
        client = persist.open(url, hold=hold, settings=settings)
        for view in progress_views_in(client):
            if view.name == name:
                return client, view
        client.close()
    return None
