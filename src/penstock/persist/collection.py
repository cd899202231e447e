"""One named collection: its writing end and its reading end.

Handed out by a `Client`; any number of these may stand for one collection. It
checks and queues what is written, and reads through what the client shares.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.data import check_row_schema, evolve
from penstock.data.schema import default_row
from penstock.errors import UsageError
from penstock.persist.errors import CollectionMissing
from penstock.persist.intake import (
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
from penstock.persist.state import (
    Alter,
    CollectionState,
    Destroy,
    Operation,
    SchemaVersion,
    State,
    columns_of,
)
from penstock.persist.write import Allowed, Allowing, Append, Appended, Piece, UpperMismatch

if TYPE_CHECKING:
    from penstock.persist.client import Client

__all__ = ["AppendTo", "Collection"]


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
        return self._submit(Piece(self.id, upper=check_frontier(upper)))

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
        if not isinstance(schema, pa.Schema):
            raise UsageError(
                f'schema for collection "{self.name}" is a {type(schema).__name__}',
                hint="Give a pyarrow schema.",
            )
        values = dict(defaults or {})
        try:
            given = _stream_of(default_row(schema, values)) if values else b""
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f'a default does not fit its column of collection "{self.name}"',
                detail=str(error),
            ) from error

        def plan(state: State) -> list[Operation]:
            found = state.collections.get(self.id)
            if found is None:
                raise CollectionMissing(self.name, where=self.client.url, known=sorted(state.names))
            newest = found.schemas[-1]
            if newest.codecs:
                raise UsageError(
                    f'collection "{self.name}" holds keys and values',
                    hint="Its codecs have versions; only the schema of rows can be altered.",
                )
            wanted = check_row_schema(schema, newest.key, collection=self.name)
            if wanted.equals(columns_of(newest)):
                return []
            evolve(columns_of(newest), wanted, values, collection=self.name)
            version = SchemaVersion(
                version=newest.version + 1,
                since=found.upper,
                columns=wanted.serialize().to_pybytes(),
                key=newest.key,
                defaults=given,
            )
            return [Alter(self.id, version)]

        self.client.committer.run(plan, lambda _before, _after: None, touches=[self.id])

    def snapshot(self, as_of: int) -> Snapshot:
        """The contents as of a time.

        Raises:
            SinceError: the time lies below since.
            NotYetComplete: it lies at or past upper.
        """
        return self.client.reader.snapshot(self.state, check_as_of(as_of))

    def listen(self, as_of: int, *, snapshot: bool = False) -> Listener:
        """Every change after `as_of`, as it becomes complete; first the contents then, if asked.

        An `as_of` of -1 begins before the first time there is.
        """
        checked = as_of if as_of == -1 else check_as_of(as_of)
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

    def _submit(self, piece: Piece) -> "Future[Any]":
        return self.client.committer.submit(Append([piece]))

    def piece(
        self,
        updates: Updates,
        *,
        expected: int | None = None,
        upper: int | None = None,
        time: int | None = None,
    ) -> Piece:
        """The updates in stored form, checked as far as can be without knowing upper."""
        state = self.state
        if (
            expected is not None
            and upper is not None
            and check_frontier(upper) < check_frontier(expected)
        ):
            raise UsageError(
                f'upper of collection "{self.name}" cannot go from {expected} back to {upper}',
                hint="Let the new upper be at or past the expected one.",
            )
        newest = len(state.schemas) - 1
        piece = Piece(self.id, expected=expected, upper=upper, schema=newest)
        schema = state.schemas[newest]
        if isinstance(updates, Staged):
            put_staged(piece, updates.batch)
        elif isinstance(updates, pa.Table | pa.RecordBatch):
            rows = table_of(updates, columns_of(schema), time=time, collection=self.name)
            put_table(piece, rows)
        elif time is not None:
            raise UsageError(
                f'updates for collection "{self.name}" have times of their own',
                hint="Leave out time=…; it is for Arrow tables.",
            )
        elif schema.codecs:
            codecs = self.client.reader.batches.codecs.get(self.id)
            if codecs is None:
                raise UsageError(
                    f'collection "{self.name}" was opened without its codecs',
                    hint="Open it with create_or_load and the codecs of its keys and values.",
                )
            put_pairs(piece, updates, codecs, columns_of(schema), collection=self.name)
        else:
            put_rows(piece, updates, columns_of(schema), collection=self.name)
        if piece.beyond and expected is not None and upper is not None:
            if piece.lower < expected:
                raise UsageError(
                    f'update of collection "{self.name}" at {piece.lower} lies below {expected}',
                    hint="Updates must lie at or past the expected upper.",
                )
            if piece.beyond > upper:
                raise UsageError(
                    f'update of collection "{self.name}" at {piece.beyond - 1} is beyond {upper}',
                    hint="Updates must lie below the new upper.",
                )
        if isinstance(updates, Staged) and updates.batch is not None:
            self.client.share_staged(updates.batch)
        return piece


@dataclass(frozen=True, slots=True)
class AppendTo:
    """One collection's share of an atomic `append_all`."""

    collection: "Collection"
    updates: Updates
    expected_upper: int
    new_upper: int


def _stream_of(row: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as stream:
        stream.write_batch(row)
    data: bytes = sink.getvalue().to_pybytes()
    return data
