"""The stream, read up to a bound, and handed out by table.

The stream is one line of transactions in the order of their commits, so a
bound cuts it at one place: transactions that committed below it are in, the
rest waits for the next tick. Within a chunk, messages of one table between two
Relation messages are handed out together.

After a reconnect the server repeats what it was not told is durable. What lies
below the bound of the last durable tick is passed over, except that the last
durable transaction must come again as it was, if the server was not told of it: one
that was restored from a copy has another in its place, or none (hazard B5).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import DefiniteError, TransientError
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.pgoutput import Chunk, Relation, Truncate, gather
from penstock.sources.postgres.resolve import Changes
from penstock.sources.postgres.tables import Table

__all__ = ["AnotherHistory", "Hearer", "Run", "Seen", "Tail", "TextWanted", "decode"]

READ_S: Final = 0.05
"""How long to wait for the stream before asking the server how far it has come."""


class AnotherHistory(DefiniteError):
    """The server has another transaction where the last durable one was."""

    def __init__(self, *, commit_lsn: Lsn, detail: str) -> None:
        super().__init__(
            f"server does not have the transaction that committed at {commit_lsn}",
            detail=f"{detail} It was restored from a copy, or another server took its place.",
            hint="The tables must be compared and mended: penstock resync LOCATION SOURCE",
        )


class TextWanted(TransientError):
    """A column came in a binary form that we do not read; the stream must be one of text."""

    def __init__(self, table: str, column: str) -> None:
        super().__init__(
            f'column "{column}" of table "{table}" is not read in binary',
            hint="The stream is opened again, for text.",
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """A transaction that the stream has shown whole."""

    xid: int
    commit_lsn: int
    committed_us: int


@dataclass(frozen=True, slots=True)
class Run:
    """Row messages of one table, next to each other but for those of other tables."""

    relation: int
    rows: npt.NDArray[np.int64]
    """Which messages of the chunk."""

    def commit_lsns(self, chunk: Chunk) -> npt.NDArray[np.int64]:
        """By message: where the commit record of its transaction begins."""
        return chunk.commit_lsn[chunk.transaction[self.rows]]


class Hearer(Protocol):
    """Takes what the stream says, in order."""

    def rows(self, chunk: Chunk, run: Run) -> None:
        """Changes of one table."""
        ...

    def relation(self, relation: Relation) -> None:
        """What messages about a table hold from here on."""
        ...

    def truncated(self, truncate: Truncate, transaction: Seen) -> None:
        """Tables were emptied."""
        ...


class Stream(Protocol):
    """What a tail reads."""

    def read(self, timeout_s: float) -> Chunk | None:
        """What came, or None."""
        ...

    def confirm(self, flush: Lsn, *, reply: bool = False) -> None:
        """Tell the server what is durable, and perhaps ask how far it has come."""
        ...


@dataclass(slots=True)
class _Rest:
    """A chunk, and how far it was handed out."""

    chunk: Chunk
    row: int = 0
    mark: int = 0
    transaction: int = 0


class Tail:
    """The stream of one connection."""

    def __init__(self, stream: Stream, *, durable: int, last: Seen | None) -> None:
        """What committed below `durable` is passed over; `last`, if given, must come again."""
        self._stream = stream
        self._drawn = durable
        self._expected = last
        self._passed = 0
        self._rest: _Rest | None = None
        self.last: Seen | None = last
        """The last transaction that was handed out."""

        self.transactions = 0

    def up_to(self, bound: int, hear: Hearer, *, waiting: Callable[[], None]) -> None:
        """Hand out everything that committed below `bound`.

        `waiting` is called each time nothing came for a while.

        Raises:
            TransientError: the stream is lost.
            AnotherHistory: the server is not the one we followed.
        """
        asked = False
        while True:
            if self._rest is not None:
                self._hand_out(self._rest, bound, hear)
                if self._rest.transaction < len(self._rest.chunk.commit_lsn):
                    break  # What is left committed at or past the bound.
                self._rest = None
            if self._expected is not None and self._passed > self._expected.commit_lsn:
                raise AnotherHistory(
                    commit_lsn=Lsn(self._expected.commit_lsn), detail="It has none there."
                )
            if self._passed >= bound:
                break
            if not asked:
                # A server with nothing to send says how far it has come only when asked.
                self._stream.confirm(Lsn(0), reply=True)
                asked = True
            chunk = self._stream.read(READ_S)
            if chunk is None:
                asked = False
                waiting()
                continue
            if chunk.reply_requested:
                self._stream.confirm(Lsn(0))
            self._passed = max(self._passed, chunk.wal_end)
            self._rest = _Rest(chunk)
        self._drawn = max(self._drawn, bound)

    def _hand_out(self, rest: _Rest, bound: int, hear: Hearer) -> None:
        chunk = rest.chunk
        self._check_first(chunk)
        for until, counts in ((min(self._drawn, bound), False), (bound, True)):
            transactions = int(np.searchsorted(chunk.commit_lsn, until, side="left"))
            row = int(np.searchsorted(chunk.transaction, transactions, side="left"))
            for run in self._runs(rest, row, transactions, hear, counts=counts):
                hear.rows(chunk, run)
            if counts and transactions > rest.transaction:
                self._note_last(chunk, rest.transaction, transactions)
            rest.row, rest.transaction = max(rest.row, row), max(rest.transaction, transactions)
        last = len(chunk.commit_lsn) - 1
        if rest.transaction == last + 1 and last >= 0 and not chunk.end_lsn[last]:
            # It goes on in the next chunk, where it is the first one again.
            self.transactions -= 1

    def _runs(
        self, rest: _Rest, end: int, transactions: int, hear: Hearer, *, counts: bool
    ) -> Iterator[Run]:
        """The runs up to row `end`; marks between them are obeyed at their place."""
        chunk, at = rest.chunk, rest.row
        while rest.mark < len(chunk.marks) and chunk.mark_transaction[rest.mark] < transactions:
            position, mark = chunk.marks[rest.mark]
            if counts and position > at:
                yield from _by_relation(chunk, at, position)
            at = max(at, position)
            match mark:
                case Relation():
                    # Told once a connection, so also where it counts for nothing else.
                    hear.relation(mark)
                case Truncate() if counts:
                    hear.truncated(mark, _seen(chunk, int(chunk.mark_transaction[rest.mark])))
            rest.mark += 1
        if counts and end > at:
            yield from _by_relation(chunk, at, end)

    def _check_first(self, chunk: Chunk) -> None:
        """The last durable transaction, if the server sends it again, must be the same one."""
        expected = self._expected
        if expected is None or not len(chunk.commit_lsn):
            return
        at = int(np.searchsorted(chunk.commit_lsn, expected.commit_lsn))
        if at == len(chunk.commit_lsn):
            return
        if chunk.commit_lsn[at] != expected.commit_lsn:
            raise AnotherHistory(commit_lsn=Lsn(expected.commit_lsn), detail="It has none there.")
        found = _seen(chunk, at)
        if found != expected:
            raise AnotherHistory(
                commit_lsn=Lsn(expected.commit_lsn),
                detail=f"Transaction {found.xid} is there, not {expected.xid}.",
            )
        self._expected = None

    def _note_last(self, chunk: Chunk, start: int, end: int) -> None:
        self.transactions += end - start
        at = end - 1
        self.last = Seen(int(chunk.xid[at]), int(chunk.commit_lsn[at]), int(chunk.committed_us[at]))


def _seen(chunk: Chunk, at: int) -> Seen:
    return Seen(int(chunk.xid[at]), int(chunk.commit_lsn[at]), int(chunk.committed_us[at]))


def decode(chunk: Chunk, run: Run, table: Table, wire: int) -> Changes:
    """Return the messages of `run` as typed columns of `table`, from tuples of `wire` columns.

    Raises:
        DefiniteError: a value cannot be stored, or the server left it out of a message and
            the stored row cannot supply it.
        TextWanted: a column is in a binary form that we do not read.
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
        old_row=_numbered(old_at >= 0),
        whole=chunk.old_kind[run.rows] == ord("O"),
        new=new,
        new_row=_numbered(new_at >= 0),
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
            # It is gone, or the messages are older than it.
            arrays.append(pa.repeat(column.default_scalar(), len(at)))
            continue
        values = gathered[column.position]
        if not values.binary:
            arrays.append(column.type.from_text(values.values))
        elif column.type.as_sent:
            arrays.append(column.type.from_copy(values.values))
        else:
            raise TextWanted(table.name, column.name)
        if values.unchanged.any():
            unchanged[column.name] = values.unchanged
    return pa.Table.from_arrays(arrays, schema=table.schema), unchanged


def _by_relation(chunk: Chunk, start: int, end: int) -> Iterator[Run]:
    relations = chunk.relation[start:end]
    for relation in np.unique(relations):
        yield Run(int(relation), start + np.flatnonzero(relations == relation))


def _numbered(there: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return np.where(there, np.cumsum(there) - 1, -1).astype(np.int64)
