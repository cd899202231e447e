"""Replication stream of one source: the connection, its reader, and feedback to the server.

CLOSED      no connection
STREAMING   transactions are read and confirmed
HALTED      the stream cannot continue, and no remaining table needs it; the slot is advanced
without reading
"""

from collections.abc import Iterable
from enum import Enum, auto

from penstock.clock import Clock
from penstock.errors import InternalError
from penstock.failpoints import Failpoint, hit
from penstock.sources.postgres.feedback import Feedback
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.pgoutput import Relation
from penstock.sources.postgres.replication_stream import ReplicationStream
from penstock.sources.postgres.server import SourceServer
from penstock.sources.postgres.stream_reader import (
    StreamHandler,
    StreamReader,
    StreamTransaction,
    TextFormatRequired,
)
from penstock.sources.postgres.table_schema import Table

__all__ = ["SessionState", "StreamSession"]


class SessionState(Enum):
    """State of the replication stream. Not durable."""

    CLOSED = auto()
    STREAMING = auto()
    HALTED = auto()


class StreamSession:
    """Replication stream of one source, across reconnects."""

    def __init__(self, name: str, server: SourceServer, clock: Clock) -> None:
        self._name = name
        self._server = server
        self._clock = clock
        self._stream: ReplicationStream | None = None
        self._reader: StreamReader | None = None
        self._feedback: Feedback | None = None
        self._is_binary = False
        self._text_required = False
        """True if a column arrived in a binary format that Penstock cannot decode."""

        self._confirmed_transactions = 0
        self.state = SessionState.CLOSED
        self.durable = 0
        """LSN below which all commits are durable in the lake."""

        self.reached = 0
        """Server position at the last probe, as an LSN."""

        self.now_ms = 0
        """Clock of the server at the last probe."""

        self.relations: dict[int, Relation] = {}
        """Last Relation message of the connection, by table oid."""

    @property
    def last(self) -> StreamTransaction | None:
        """Return the last transaction that was read."""
        return None if self._reader is None else self._reader.last

    def probe(self) -> int:
        """Return the position of the server: all commits before the call are below it.

        Raises:
            HistoryRewound: the history of the server was rewound below the durable position.
        """
        probed = self._server.probe(durable=self.durable)
        self.reached, self.now_ms = max(probed.insert_lsn.position, self.durable), probed.now_ms
        return self.reached

    def lag_ms(self) -> int:
        """Return the age of the last transaction read, in ms, by the server's clock."""
        last = self.last
        return 0 if last is None else max(0, self.now_ms - last.committed_us // 1_000)

    def start(self, tables: Iterable[Table], last: StreamTransaction | None) -> None:
        """Start the stream at the durable position.

        If `last`, the last durable transaction, was not confirmed, the server must resend it.
        """
        # SUBTLE: an earlier reader of ours may still be connected and may confirm. It is
        # terminated before the confirmed LSN decides whether the last transaction is resent.
        slot = self._server.free_slot()
        start = self.durable
        confirmed = None if slot is None else slot.confirmed_flush
        if last is not None and confirmed is not None and confirmed <= Lsn(last.commit_lsn):
            start = last.commit_lsn
        else:
            last = None
        self._is_binary = self._can_read_binary(tables)
        self._stream = self._server.stream(Lsn(start), binary=self._is_binary)
        self._reader = StreamReader(self._stream, durable=self.durable, last=last)
        self._confirmed_transactions = 0
        self.relations = {}
        self._feedback = Feedback(self._stream, self._clock, durable=Lsn(min(start, self.durable)))
        self._feedback.start()
        self.state = SessionState.STREAMING

    def ensure_format(self, tables: Iterable[Table]) -> None:
        """Restart the stream in text format if a column of `tables` requires it."""
        tables = [*tables]
        if self._is_binary and not self._can_read_binary(tables):
            last = self.last
            self.close()
            self.start(tables, last)

    def read(self, handler: StreamHandler, bound: int) -> None:
        """Pass on all transactions that committed below `bound`.

        Raises:
            TransactionMismatch: the history of the server has diverged.
        """
        if self._reader is None:
            raise InternalError(f'stream of source "{self._name}" is read while it is closed')
        try:
            while not self._reader.read_up_to(bound, handler):
                self._server.send_heartbeat(bound)
        except TextFormatRequired:
            self._text_required = True
            raise

    def halt(self) -> None:
        """Record that the stream cannot continue, and that no table needs it."""
        self.state = SessionState.HALTED

    def confirm(self) -> None:
        """Confirm the durable position to the server."""
        if self.state is SessionState.HALTED:
            self._server.advance_slot(Lsn(self.durable))
            return
        reader, feedback = self._reader, self._feedback
        if reader is None or feedback is None:
            raise InternalError(f'source "{self._name}" received a commit while it was closed')
        has_moved = reader.transactions != self._confirmed_transactions
        self._confirmed_transactions = reader.transactions
        # SUBTLE: under traffic, the confirmed LSN excludes the last transaction. After a
        # reconnect the server sends this transaction again, which verifies the server's
        # history (hazard B5). When idle, everything is confirmed, and the slot retains no WAL.
        last = reader.last
        lsn = last.commit_lsn if has_moved and last is not None else self.durable
        feedback.durable(Lsn(min(lsn, self.durable)))
        hit(Failpoint.CONFIRM_DONE)

    def ownership_verified(self) -> None:
        """Record during a long tick that this process is still the writer: feedback continues."""
        feedback = self._feedback
        if feedback is not None:
            feedback.ownership_verified()

    def close(self) -> None:
        """Close the stream. Durable state does not change."""
        if self._feedback is not None:
            self._feedback.stop()
        if self._stream is not None:
            self._stream.close()
        self._feedback = self._reader = self._stream = None
        self.state = SessionState.CLOSED

    def _can_read_binary(self, tables: Iterable[Table]) -> bool:
        """Return whether all columns have types whose binary format can be decoded.

        A column stored as text excludes binary: its type may change without notice.
        """
        return not self._text_required and all(
            not table.spec.text
            and all(column.type.as_sent or column.position is None for column in table.columns)
            for table in tables
        )
