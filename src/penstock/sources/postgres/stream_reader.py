"""Reader of the stream up to a bound, grouped by table.

The stream is a sequence of transactions in commit order, so a bound divides it at one
place. Transactions that committed below the bound are included, and the others wait for
the next tick. Within a chunk, messages of one table between two Relation messages are
passed on together.

After a reconnect the server resends all changes that were not confirmed. Changes below
the bound of the last durable tick are skipped. If the last durable transaction was not
confirmed, the server must resend it unchanged. A server restored from a backup has a
different transaction in its place, or none (hazard B5).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import DefiniteError, TransientError
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.old_rows import Changes
from penstock.sources.postgres.pgoutput import Chunk, Relation, Truncate, gather
from penstock.sources.postgres.table_schema import Table

__all__ = [
    "Run",
    "StreamHandler",
    "StreamReader",
    "StreamTransaction",
    "TextFormatRequired",
    "TransactionMismatch",
    "decode",
]

READ_S: Final = 0.05
"""Seconds to wait for the stream before the server's position is requested."""


class TransactionMismatch(DefiniteError):
    """The server has a different transaction at the position of the last durable one."""

    def __init__(self, *, commit_lsn: Lsn, detail: str) -> None:
        super().__init__(
            f"server does not have the transaction that committed at {commit_lsn}",
            detail=f"{detail} It was restored from a copy, or another server took its place.",
            hint="Compare and repair the tables: penstock resync LOCATION SOURCE",
        )


class TextFormatRequired(TransientError):
    """A column arrived in an unsupported binary format; the stream must restart in text mode."""

    def __init__(self, table: str, column: str) -> None:
        super().__init__(
            f'column "{column}" of table "{table}" is not read in binary',
            hint="The stream restarts in text format.",
        )


@dataclass(frozen=True, slots=True)
class StreamTransaction:
    """A transaction that was received completely."""

    xid: int
    commit_lsn: int
    committed_us: int


@dataclass(frozen=True, slots=True)
class Run:
    """Row messages of one table, contiguous except for messages of other tables."""

    relation: int
    rows: npt.NDArray[np.int64]
    """Row numbers of the messages in the chunk."""

    def commit_lsns(self, chunk: Chunk) -> npt.NDArray[np.int64]:
        """Return the start of the commit record of each message's transaction, as an LSN."""
        return chunk.commit_lsn[chunk.transaction[self.rows]]


class StreamHandler(Protocol):
    """Handler of stream events, in stream order."""

    def rows(self, chunk: Chunk, run: Run) -> None:
        """Handle row changes of one table."""
        ...

    def relation(self, relation: Relation) -> None:
        """Handle the column layout of the following messages of a table."""
        ...

    def truncated(self, truncate: Truncate, transaction: StreamTransaction) -> None:
        """Handle a TRUNCATE of one or more tables."""
        ...


class Stream(Protocol):
    """Stream that a `StreamReader` reads."""

    def read(self, timeout_s: float) -> Chunk | None:
        """Return received data, or None."""
        ...

    def confirm(self, flush: Lsn, *, reply: bool = False) -> None:
        """Confirm the durable position, and optionally request the server's position."""
        ...


@dataclass(slots=True)
class _ChunkPosition:
    """A chunk, and the part of it that has been passed on."""

    chunk: Chunk
    row: int = 0
    mark: int = 0
    transaction: int = 0


class StreamReader:
    """Reader of the stream of one connection."""

    def __init__(self, stream: Stream, *, durable: int, last: StreamTransaction | None) -> None:
        """Skip commits below `durable`. If `last` is given, the server must resend it."""
        self._stream = stream
        self._read_to = durable
        self._expected = last
        self._wal_end = 0
        self._cursor: _ChunkPosition | None = None
        self.last: StreamTransaction | None = last
        """Last transaction that was passed on."""

        self.transactions = 0

    def read_up_to(self, bound: int, handler: StreamHandler) -> bool:
        """Pass on transactions that committed below `bound`; return whether all were passed on.

        Return False if a read returned no data: the caller may make the server send more, and
        then calls again.

        Raises:
            TransientError: the connection is lost.
            TransactionMismatch: the server's history has diverged.
        """
        is_position_requested = False
        while True:
            if self._cursor is not None:
                self._dispatch(self._cursor, bound, handler)
                if self._cursor.transaction < len(self._cursor.chunk.commit_lsn):
                    break  # The remaining transactions committed at or above the bound.
                self._cursor = None
            if self._expected is not None and self._wal_end > self._expected.commit_lsn:
                raise TransactionMismatch(
                    commit_lsn=Lsn(self._expected.commit_lsn), detail="It has none there."
                )
            if self._wal_end >= bound:
                break
            if not is_position_requested:
                # An idle server reports its position only on request.
                self._stream.confirm(Lsn(0), reply=True)
                is_position_requested = True
            chunk = self._stream.read(READ_S)
            if chunk is None:
                return False
            if chunk.reply_requested:
                self._stream.confirm(Lsn(0))
            self._wal_end = max(self._wal_end, chunk.wal_end)
            self._cursor = _ChunkPosition(chunk)
        self._read_to = max(self._read_to, bound)
        return True

    def _dispatch(self, cursor: _ChunkPosition, bound: int, handler: StreamHandler) -> None:
        chunk = cursor.chunk
        self._check_first(chunk)
        for until, counts in ((min(self._read_to, bound), False), (bound, True)):
            transactions = int(np.searchsorted(chunk.commit_lsn, until, side="left"))
            row = int(np.searchsorted(chunk.transaction, transactions, side="left"))
            for run in self._runs(cursor, row, transactions, handler, counts=counts):
                handler.rows(chunk, run)
            if counts and transactions > cursor.transaction:
                self._record_last(chunk, cursor.transaction, transactions)
            cursor.row, cursor.transaction = (
                max(cursor.row, row),
                max(cursor.transaction, transactions),
            )
        last = len(chunk.commit_lsn) - 1
        if cursor.transaction == last + 1 and last >= 0 and not chunk.end_lsn[last]:
            # The transaction continues in the next chunk, where it is counted again.
            self.transactions -= 1

    def _runs(
        self,
        cursor: _ChunkPosition,
        end: int,
        transactions: int,
        handler: StreamHandler,
        *,
        counts: bool,
    ) -> Iterator[Run]:
        """Yield the runs up to row `end`, and handle the marks between them in order."""
        chunk, at = cursor.chunk, cursor.row
        while cursor.mark < len(chunk.marks) and chunk.mark_transaction[cursor.mark] < transactions:
            position, mark = chunk.marks[cursor.mark]
            if counts and position > at:
                yield from _by_relation(chunk, at, position)
            at = max(at, position)
            match mark:
                case Relation():
                    # Sent once per connection, so also needed from skipped transactions.
                    handler.relation(mark)
                case Truncate() if counts:
                    handler.truncated(
                        mark, _transaction(chunk, int(chunk.mark_transaction[cursor.mark]))
                    )
            cursor.mark += 1
        if counts and end > at:
            yield from _by_relation(chunk, at, end)

    def _check_first(self, chunk: Chunk) -> None:
        """Verify that a resent last durable transaction is unchanged.

        Raises:
            TransactionMismatch: the server has a different transaction at this position, or none.
        """
        expected = self._expected
        if expected is None or not len(chunk.commit_lsn):
            return
        at = int(np.searchsorted(chunk.commit_lsn, expected.commit_lsn))
        if at == len(chunk.commit_lsn):
            return
        if chunk.commit_lsn[at] != expected.commit_lsn:
            raise TransactionMismatch(
                commit_lsn=Lsn(expected.commit_lsn), detail="It has none there."
            )
        resent = _transaction(chunk, at)
        if resent != expected:
            raise TransactionMismatch(
                commit_lsn=Lsn(expected.commit_lsn),
                detail=f"Transaction {resent.xid} is there, not {expected.xid}.",
            )
        self._expected = None

    def _record_last(self, chunk: Chunk, start: int, end: int) -> None:
        self.transactions += end - start
        self.last = _transaction(chunk, end - 1)


def _transaction(chunk: Chunk, at: int) -> StreamTransaction:
    return StreamTransaction(
        int(chunk.xid[at]), int(chunk.commit_lsn[at]), int(chunk.committed_us[at])
    )


def decode(chunk: Chunk, run: Run, table: Table, wire: int) -> Changes:
    """Return the messages of `run` as typed columns of `table`, from tuples of `wire` columns.

    Raises:
        DefiniteError: a value cannot be stored, or the server omitted it from a message and
            the stored row cannot supply it.
        TextFormatRequired: a column is in an unsupported binary format.
    """
    kind, new_at, old_at = chunk.kind[run.rows], chunk.new_at[run.rows], chunk.old_at[run.rows]
    new, unchanged = _rows(chunk, new_at[new_at >= 0], table, wire)
    old, unchanged_in_old = _rows(chunk, old_at[old_at >= 0], table, wire)
    if unchanged_in_old:
        first = next(iter(unchanged_in_old))
        raise _unchanged_value(table, first, "It is missing in the old row of a message.")
    inserted = kind[new_at >= 0] == ord("I")
    without_old = old_at[new_at >= 0] < 0
    for column, mask in unchanged.items():
        if (mask & inserted).any():
            raise _unchanged_value(
                table,
                column,
                "It is missing in an insert. A server sends this when an update of the key "
                "brings a row into the row filter of the publication.",
            )
        if column in table.key and (mask & without_old).any():
            raise _unchanged_value(
                table, column, "It is part of the key, and the message has no old key."
            )
    return Changes(
        kind=kind,
        old=old,
        old_row=_number(old_at >= 0),
        whole=chunk.old_kind[run.rows] == ord("O"),
        new=new,
        new_row=_number(new_at >= 0),
        unchanged=unchanged,
    )


def _unchanged_value(table: Table, column: str, detail: str) -> DefiniteError:
    return DefiniteError(
        f'value of column "{column}" of table {table.name} is missing in the replication stream',
        detail=f"{detail} The server did not send the value because it is large and unchanged.",
        hint=f"Run on the source: ALTER TABLE {table.name} REPLICA IDENTITY FULL; Then run: "
        f"penstock resync LOCATION {table.source} '{table.name}'",
    )


def _rows(
    chunk: Chunk, at: npt.NDArray[np.int64], table: Table, wire: int
) -> tuple[pa.Table, dict[str, npt.NDArray[np.bool_]]]:
    if len(at) == 0:
        return table.schema.empty_table(), {}
    gathered = gather(chunk, at, wire)
    arrays, unchanged = [], {}
    for column in table.columns:
        if column.position is None or column.position >= wire:
            # The column was dropped, or the messages are older than the column.
            arrays.append(pa.repeat(column.default_scalar(), len(at)))
            continue
        values = gathered[column.position]
        if not values.binary:
            arrays.append(column.type.from_text(values.values))
        elif column.type.as_sent:
            arrays.append(column.type.from_copy(values.values))
        else:
            raise TextFormatRequired(table.name, column.name)
        if values.unchanged.any():
            unchanged[column.name] = values.unchanged
    return pa.Table.from_arrays(arrays, schema=table.schema), unchanged


def _by_relation(chunk: Chunk, start: int, end: int) -> Iterator[Run]:
    relations = chunk.relation[start:end]
    for relation in np.unique(relations):
        yield Run(int(relation), start + np.flatnonzero(relations == relation))


def _number(is_present: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return np.where(is_present, np.cumsum(is_present) - 1, -1).astype(np.int64)
