"""One named collection: its writing end and its reading end.

Handed out by a `Client`; any number of these may stand for one collection. It
checks and queues what is written, and reads through what the client shares.
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
    Allowed,
    Allowing,
    Append,
    Appended,
    CollectionAppend,
    UpperMismatch,
)

if TYPE_CHECKING:
    from penstock.persist.client import Client

__all__ = ["AppendTo", "Collection", "collection_append"]


class Collection:
    """One named collection: its writing end and its reading end.

    Updates are `((key, value), time, diff)` for keys and values. For rows they
    are an Arrow table with the columns `mz_timestamp` and `mz_diff`, or without
    them and one `time` for all, or `(row, time, diff)` with the row as a dict.
    """

    def __init__(self, client: "Client", id: int, name: str) -> None:
        self.client = client
        self.id = id
        self.name = name

    def __repr__(self) -> str:
        return f"Collection({self.name!r})"

    @property
    def state(self) -> CollectionState:
        """What is known of it now."""
        found = self.client.state.collections.get(self.id)
        if found is None:
            raise UsageError(
                f'collection "{self.name}" was destroyed', hint="Make it again with create_or_load."
            )
        return found

    @property
    def since(self) -> int:
        """Readable from here on."""
        return self.state.since

    @property
    def upper(self) -> int:
        """Complete below here."""
        return self.state.upper

    @property
    def schema(self) -> pa.Schema:
        """The newest version of the user's columns."""
        return columns_of(self.state.schemas[-1])

    def write(self, updates: Updates, *, time: int | None = None) -> "Future[Appended]":
        """Make updates durable, at times at or past upper. They are seen once sealed."""
        return self._submit(self.piece(updates, time=time))

    def seal(self, upper: int) -> "Future[Appended]":
        """Declare all times below `upper` complete, for ever. `END` closes the collection."""
        return self._submit(CollectionAppend(self.id, upper=check_frontier(upper)))

    def compare_and_append(
        self, updates: Updates, expected_upper: int, new_upper: int, *, time: int | None = None
    ) -> Appended | UpperMismatch:
        """Write and seal in one step, if upper is what was expected."""
        piece = self.piece(updates, expected=expected_upper, upper=new_upper, time=time)
        outcome: Appended | UpperMismatch = self._submit(piece).result()
        return outcome

    def allow_compaction(self, since: int) -> "Future[Allowed]":
        """Permit what was before `since` to be forgotten; `END` gives up all history.

        The permission is kept; a hold that lies lower only delays it.
        """
        work = Allowing({self.id: check_frontier(since)})
        return self.client.committer.submit(work)

    def alter(self, schema: pa.Schema, *, defaults: Mapping[str, Any] | None = None) -> None:
        """Let the schema grow, for readers as of the present upper and later."""

        def plan(state: State) -> list[Operation]:
            found = state.collections.get(self.id)
            if found is None:
                raise CollectionMissing(self.name, where=self.client.url, known=state.listed())
            version = grown(found, schema, dict(defaults or {}))
            return [] if version is None else [Alter(self.id, version)]

        self.client.committer.run(plan, lambda _before, _after: None, touches=[self.id])

    def snapshot(self, as_of: int | datetime) -> Snapshot:
        """The contents as of a time: milliseconds, or an aware datetime.

        Raises:
            SinceError: the time lies below since.
            NotYetComplete: it lies at or past upper.
            CollectionErrored: the collection is in error as of it.
        """
        return self.client.reader.snapshot(self.state, check_as_of(as_of))

    def lookup(self, keys: pa.Table, as_of: int) -> pa.Table:
        """The rows as of a time whose key is among `keys`: their columns, and `mz_diff`.

        `keys` has the key columns. Reads as little as that needs. Raises as `snapshot` does.
        """
        return self.client.reader.lookup(self.state, keys, check_as_of(as_of))

    def written(
        self, keys: pa.Table, staged: Sequence[Staged] = (), growing: Sequence[Grow] = ()
    ) -> pa.Table:
        """For its writer: of all that was written, sealed or not, the rows with these keys.

        Those of `staged` files too; `growing` is what will bring the schema they have.
        `keys` has any columns of its. The columns, and `mz_diff`; unlike `lookup`
        whatever readers may see.
        """
        files = [each.batch for each in staged if each.batch is not None]
        return self.client.reader.written(self.state, keys, files, growing)

    def retained_files(self) -> AbstractContextManager[CollectionState]:
        """For its writer: all that was written, for tasks to read as long as the block lasts."""
        return self.client.reader.files_of(self.state)

    def parts(self, staged: Sequence[Staged] = ()) -> Iterator[pa.Table]:
        """For its writer: all that was written, sealed or not, and those of `staged` files.

        In the order of writing, about a part at a time, nothing added up.
        """
        files = [each.batch for each in staged if each.batch is not None]
        return self.client.reader.parts(self.state, files)

    def listen(self, as_of: int | datetime, *, snapshot: bool = False) -> Listener:
        """Every change after `as_of`, as it becomes complete; first the contents then, if asked.

        An `as_of` of -1 begins before the first time there is.
        """
        checked = -1 if as_of == -1 else check_as_of(as_of)
        return Listener(
            self.client.reader, self.state, checked, snapshot=snapshot, client=self.client
        )

    def destroy(self) -> bool:
        """Remove it; see `Client.destroy`."""

        def plan(state: State) -> list[Operation]:
            return [Destroy(self.id)] if self.id in state.collections else []

        there = self.client.committer.run(
            plan, lambda before, after: before is not after, touches=[self.id]
        )
        return bool(there)

    def _submit(self, piece: CollectionAppend) -> "Future[Any]":
        return self.client.committer.submit(Append([piece]))

    def piece(
        self,
        updates: Updates,
        *,
        expected: int | None = None,
        upper: int | None = None,
        time: int | None = None,
    ) -> CollectionAppend:
        """The updates in stored form, checked as far as can be without knowing upper."""
        return collection_append(self, updates, expected=expected, upper=upper, time=time)


@dataclass(frozen=True, slots=True)
class AppendTo:
    """One collection's share of an atomic `append_all`."""

    collection: "Collection"
    updates: Updates
    """Or a list of tables and `Staged`."""

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
    """The updates in stored form, checked as far as can be without knowing upper.

    `schemas` are those that the collection will have, if it grows with them.
    """
    state = collection.state
    if (
        expected is not None
        and upper is not None
        and check_frontier(upper) < check_frontier(expected)
    ):
        raise UsageError(
            f'upper of collection "{collection.name}" cannot go from {expected} back to {upper}',
            hint="Let the new upper be at or past the expected one.",
        )
    schemas = state.schemas if schemas is None else schemas
    newest = len(schemas) - 1
    piece = CollectionAppend(collection.id, expected=expected, upper=upper, schema=newest)
    schema = schemas[newest]
    if isinstance(updates, Staged):
        put_staged(piece, updates.batch)
    elif isinstance(updates, pa.Table | pa.RecordBatch):
        rows = table_of(updates, columns_of(schema), time=time, collection=collection.name)
        put_table(piece, rows)
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
        put_pairs(piece, updates, codecs, columns_of(schema), collection=collection.name)
    else:
        put_rows(piece, updates, columns_of(schema), collection=collection.name)
    if piece.beyond and expected is not None and upper is not None:
        if piece.lower < expected:
            raise UsageError(
                f'update of collection "{collection.name}" at {piece.lower} lies below {expected}',
                hint="Updates must lie at or past the expected upper.",
            )
        if piece.beyond > upper:
            raise UsageError(
                f'update of collection "{collection.name}" at {piece.beyond - 1} is beyond {upper}',
                hint="Updates must lie below the new upper.",
            )
    return piece
