"""Handle of one collection: writes, reads and schema changes.

A `Client` creates handles; several may refer to the same collection. A handle validates and
queues writes, and reads through the reader that the client shares.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.errors import UsageError
from penstock.persist.collection_change import Grow
from penstock.persist.errors import CollectionMissing
from penstock.persist.input_validation import (
    Staged,
    Updates,
    check_as_of,
    check_frontier,
    put_pairs,
    put_rows,
    put_staged,
    put_table,
    table_of,
)
from penstock.persist.read import Listener, Snapshot
from penstock.persist.schema_check import grown
from penstock.persist.state import (
    Alter,
    CollectionState,
    Destroy,
    Operation,
    SchemaVersion,
    State,
    columns_of,
)
from penstock.persist.write import (
    AllowCall,
    Allowed,
    AppendCall,
    Appended,
    CollectionAppend,
    UpperMismatch,
)

if TYPE_CHECKING:
    from penstock.persist.client import Client

__all__ = ["AppendTo", "Collection", "collection_append"]


class Collection:
    """Handle of one named collection.

    For keys and values, updates are `((key, value), time, diff)`. For rows, updates are one
    of: an Arrow table with the columns `mz_timestamp` and `mz_diff`; an Arrow table without
    them and one `time` for all rows; or `(row, time, diff)` with the row as a dict.
    """

    def __init__(self, client: "Client", id: int, name: str) -> None:
        self.client = client
        self.id = id
        self.name = name

    def __repr__(self) -> str:
        return f"Collection({self.name!r})"

    @property
    def state(self) -> CollectionState:
        """Newest state of the collection that this client can see."""
        found = self.client.state.collections.get(self.id)
        if found is None:
            raise UsageError(
                f'collection "{self.name}" was destroyed', hint="Make it again with create_or_load."
            )
        return found

    @property
    def since(self) -> int:
        """Lowest readable time of the collection."""
        return self.state.since

    @property
    def upper(self) -> int:
        """Exclusive upper bound of the complete times."""
        return self.state.upper

    @property
    def schema(self) -> pa.Schema:
        """User's columns in the newest schema version."""
        return columns_of(self.state.schemas[-1])

    def write(self, updates: Updates, *, time: int | None = None) -> "Future[Appended]":
        """Make updates durable, at times at or past upper.

        Readers see the updates after a seal past their times.
        """
        return self._submit(collection_append(self, updates, time=time))

    def seal(self, upper: int) -> "Future[Appended]":
        """Declare all times below `upper` permanently complete. `END` closes the collection."""
        return self._submit(CollectionAppend(self.id, upper=check_frontier(upper)))

    def compare_and_append(
        self, updates: Updates, expected_upper: int, new_upper: int, *, time: int | None = None
    ) -> Appended | UpperMismatch:
        """Write and seal in one step, if the current upper equals `expected_upper`."""
        append = collection_append(
            self, updates, expected=expected_upper, upper=new_upper, time=time
        )
        outcome: Appended | UpperMismatch = self._submit(append).result()
        return outcome

    def allow_compaction(self, since: int) -> "Future[Allowed]":
        """Permit compaction of history before `since`; `END` gives up all history.

        The permission is durable. A hold at a lower time only delays its effect.
        """
        work = AllowCall({self.id: check_frontier(since)})
        return self.client.committer.submit(work)

    def alter(self, schema: pa.Schema, *, defaults: Mapping[str, Any] | None = None) -> None:
        """Extend the schema, for readers as of the present upper and later."""

        def plan(state: State) -> list[Operation]:
            found = state.collections.get(self.id)
            if found is None:
                raise CollectionMissing(self.name, where=self.client.url, known=state.listed())
            version = grown(found, schema, dict(defaults or {}))
            return [] if version is None else [Alter(self.id, version)]

        self.client.committer.run(plan, lambda _before, _after: None, touches=[self.id])

    def snapshot(self, as_of: int | datetime) -> Snapshot:
        """Return the contents as of a time: milliseconds, or an aware datetime.

        Raises:
            SinceError: the time lies below since.
            NotYetComplete: the time lies at or past upper.
            CollectionErrored: the collection is in error as of the time.
        """
        return self.client.reader.snapshot(self.state, check_as_of(as_of))

    def lookup(self, keys: pa.Table, as_of: int) -> pa.Table:
        """Return the rows as of a time that have one of `keys`, with `mz_diff`.

        `keys` has exactly the key columns. The call reads only the row groups that may hold
        a key. It raises the same errors as `snapshot`.
        """
        return self.client.reader.lookup(self.state, keys, check_as_of(as_of))

    def written(
        self, keys: pa.Table, staged: Sequence[Staged] = (), growing: Sequence[Grow] = ()
    ) -> pa.Table:
        """Return, for the writer, the rows with these keys among all written updates.

        The result includes updates that are not sealed and the updates of `staged` files.
        `growing` are the changes that produce the schema of those files. `keys` has any
        columns of the collection. The result has the collection's columns and `mz_diff`.
        Unlike `lookup`, it ignores which times readers may see.
        """
        files = [each.batch for each in staged if each.batch is not None]
        return self.client.reader.written(self.state, keys, files, growing)

    def retained_files(self) -> AbstractContextManager[CollectionState]:
        """Yield, for the writer, the state with all written updates, and retain its files.

        Spark tasks may read the files until the block ends.
        """
        return self.client.reader.files_of(self.state)

    def parts(self, staged: Sequence[Staged] = ()) -> Iterator[pa.Table]:
        """Yield, for the writer, all written updates, sealed or not, and those in `staged` files.

        The tables follow the order of writing, hold about one part each, and are not
        consolidated.
        """
        files = [each.batch for each in staged if each.batch is not None]
        return self.client.reader.parts(self.state, files)

    def listen(self, as_of: int | datetime, *, snapshot: bool = False) -> Listener:
        """Return a listener that yields every change after `as_of` when it becomes complete.

        With `snapshot`, the listener yields the contents as of `as_of` first. An `as_of` of
        -1 starts before the first time.
        """
        checked = -1 if as_of == -1 else check_as_of(as_of)
        return Listener(
            self.client.reader, self.state, checked, snapshot=snapshot, client=self.client
        )

    def destroy(self) -> bool:
        """Remove the collection; see `Client.destroy`."""

        def plan(state: State) -> list[Operation]:
            return [Destroy(self.id)] if self.id in state.collections else []

        changed = self.client.committer.run(
            plan, lambda before, after: before is not after, touches=[self.id]
        )
        return bool(changed)

    def _submit(self, append: CollectionAppend) -> "Future[Any]":
        return self.client.committer.submit(AppendCall([append]))


@dataclass(frozen=True, slots=True)
class AppendTo:
    """Updates and uppers of one collection in an atomic `append_all`."""

    collection: "Collection"
    updates: Updates
    """Updates, or a list of tables and `Staged`."""

    expected_upper: int
    new_upper: int


def collection_append(
    collection: Collection,
    updates: Updates,
    *,
    expected: int | None = None,
    upper: int | None = None,
    time: int | None = None,
    schemas: Sequence[SchemaVersion] | None = None,
) -> CollectionAppend:
    """Return the updates in stored form, with every check that needs no current upper.

    `schemas` are the schema versions after the growth in the same log entry.

    Raises:
        UsageError: the updates do not fit the collection or the given uppers.
    """
    state = collection.state
    if (
        expected is not None
        and upper is not None
        and check_frontier(upper) < check_frontier(expected)
    ):
        raise UsageError(
            f'upper of collection "{collection.name}" cannot go from {expected} back to {upper}',
            hint="Give a new upper at or past the expected one.",
        )
    schemas = state.schemas if schemas is None else schemas
    newest = len(schemas) - 1
    append = CollectionAppend(collection.id, expected=expected, upper=upper, schema=newest)
    schema = schemas[newest]
    if isinstance(updates, Staged):
        put_staged(append, updates.batch)
    elif isinstance(updates, pa.Table | pa.RecordBatch):
        rows = table_of(updates, columns_of(schema), time=time, collection=collection.name)
        put_table(append, rows)
    elif time is not None:
        raise UsageError(
            f'updates for collection "{collection.name}" have times of their own',
            hint="Leave out time=…; it is for Arrow tables.",
        )
    elif schema.codecs:
        codecs = collection.client.reader.batches.codecs.get(collection.id)
        if codecs is None:
            raise UsageError(
                f'collection "{collection.name}" was opened without its codecs',
                hint="Open it with create_or_load and the codecs of its keys and values.",
            )
        put_pairs(append, updates, codecs, columns_of(schema), collection=collection.name)
    else:
        put_rows(append, updates, columns_of(schema), collection=collection.name)
    if append.beyond and expected is not None and upper is not None:
        if append.lower < expected:
            raise UsageError(
                f'update of collection "{collection.name}" at {append.lower} lies below {expected}',
                hint="Updates must lie at or past the expected upper.",
            )
        if append.beyond > upper:
            raise UsageError(
                f'update of collection "{collection.name}" at {append.beyond - 1} '
                f"is beyond {upper}",
                hint="Updates must lie below the new upper.",
            )
    return append
