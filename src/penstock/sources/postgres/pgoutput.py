"""Bulk decoder of the `pgoutput` replication stream.

    bytes ──► Decoder ──► Chunk ──► gather ──► one Arrow array
              scans       offsets   copies     per column
              frames      of tuples values

The socket delivers frames of the wire protocol, cut at any byte. The decoder scans complete frames.
It records where the tuples of each row message begin, and when each transaction committed. Small
transactions are the worst case, so no Python code runs per row, transaction or keepalive. It runs
only for rare messages, which become marks. Origin messages occur once per transaction of a
subscriber; they are checked and skipped.

The scan checks every length against its frame. Recorded offsets are therefore valid, and damaged
bytes cause an error and never an invalid read. The decoder supports protocol version 1: a
transaction is sent as a whole after its commit, and tuples are text or binary.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.data.jit import Bytes, Int32s, Int64s
from penstock.errors import InternalError, TransientError
from penstock.sources.postgres import pgoutput_kernels as kernels

__all__ = [
    "Chunk",
    "Decoder",
    "Frame",
    "LogicalMessage",
    "Mark",
    "Relation",
    "RelationColumn",
    "Truncate",
    "TupleColumn",
    "TypeName",
    "gather",
]

CAPACITY: Final = 4 << 20
"""Size of a buffer in bytes. Larger buffers do not fit in the processor caches."""

SPARE: Final = 64 << 10
"""Free space below which a buffer counts as full, in bytes: many small reads cost more."""


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """Column in the row messages of a table."""

    name: str
    type_oid: int
    typmod: int
    key: bool
    """True if the column is part of the replica identity. With FULL, all columns are."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Layout of the row messages of a table from here on."""

    oid: int
    namespace: str
    name: str
    replica_identity: str
    """`d` the primary key, `n` nothing, `f` all columns, `i` an index."""

    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class TypeName:
    """Name of a type that is not built in, sent before the first use of the type."""

    oid: int
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Truncate:
    """Tables truncated by one statement."""

    relations: tuple[int, ...]
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """Message written with `pg_logical_emit_message`."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


Mark: TypeAlias = Relation | TypeName | Truncate | LogicalMessage


@dataclass(frozen=True, slots=True)
class Frame:
    """Frame that carries no change: its type and its body."""

    kind: bytes
    body: bytes


@dataclass(slots=True, repr=False)
class Chunk:
    """Part of the stream, as complete messages. The chunk owns its buffer."""

    buffer: Bytes

    kind: Bytes
    """Operation by row message, in stream order: `I`, `U` or `D`."""

    relation: npt.NDArray[np.uint32]
    """Oid of the table, by row message."""

    old_kind: Bytes
    """Kind of the old tuple, by row message: `K` a key, `O` a complete row, 0 none."""

    old_at: Int64s
    """Offset of the old tuple in the buffer, by row message, or -1."""

    new_at: Int64s
    """Offset of the new tuple in the buffer, by row message, or -1."""

    transaction: Int32s
    """Transaction by row message, as an index into the arrays below."""

    commit_lsn: Int64s
    """Start of the commit record, by transaction with a message in this chunk. Ascending.

    The first transaction may have begun in an earlier chunk. The last may continue in a later one.
    """

    end_lsn: Int64s
    """End of the commit record, by transaction; 0 until the Commit message is received."""

    xid: npt.NDArray[np.uint32]
    committed_us: Int64s
    """Commit time by transaction, in microseconds since 1970."""

    marks: list[tuple[int, Mark]]
    """Rare messages, each with the index of the row message that follows it."""

    mark_transaction: Int32s
    """Transaction by mark, or -1 if the mark is outside a transaction."""

    wal_end: int
    """Position below which every committed transaction has been sent, in this chunk or earlier.

    It is the greatest position in keepalive, Begin and Commit messages.
    """

    reply_requested: bool
    """True if a keepalive requested a reply."""

    # Not `__len__`, because a chunk that holds only keepalives would then be false.
    @property
    def row_count(self) -> int:
        """Return the number of row messages."""
        return len(self.kind)

    def __repr__(self) -> str:
        # The text is short and contains no user data.
        return f"<Chunk: {self.row_count} rows, {len(self.commit_lsn)} transactions>"


@dataclass(frozen=True, slots=True)
class TupleColumn:
    """One column of many tuples."""

    values: pa.Array
    """Values as the server sent them, as binary; null for NULL and for unchanged values."""

    unchanged: npt.NDArray[np.bool_]
    """True where the value was omitted because it is large (TOAST) and did not change."""

    binary: bool
    """True if the values are in binary format, False if in text format."""


class Decoder:
    """Incremental decoder: takes bytes and returns chunks. Does no I/O.

    The caller repeats these calls:

        into = decoder.space()           free space for bytes, at least one
        decoder.filled(n)                n bytes were written there
        other = decoder.scan()           scan them, up to a frame that is no change
        chunk = decoder.take()           the messages scanned since the last call
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        """Create a decoder with buffers of `capacity` bytes, and larger ones for larger kernels."""
        self._capacity = capacity
        self._spare = min(SPARE, capacity // 4)
        self._buffer: Bytes = np.empty(capacity, np.uint8)
        self._end = 0
        self._state = kernels.new_state()
        self._arrays = kernels.ScanArrays.for_bytes(capacity)

    @property
    def unscanned(self) -> int:
        """Return the number of buffered bytes that are not scanned yet."""
        return self._end - int(self._state[kernels.AT])

    @property
    def scanned(self) -> int:
        """Return the number of scanned bytes, which `take` would return."""
        return int(self._state[kernels.AT])

    @property
    def full(self) -> bool:
        """Return whether a chunk should be taken before more bytes are read."""
        room = len(self._buffer) - self._end
        return int(self._state[kernels.AT]) > 0 and (
            room < self._spare or bool(self._state[kernels.CROWDED])
        )

    def space(self) -> memoryview:
        """Return the free space of the buffer, for the next bytes."""
        if self._end == len(self._buffer):
            at = int(self._state[kernels.AT])
            # Scanned bytes that are not taken cannot be dropped, so a larger buffer is needed.
            wanted = max(int(self._state[kernels.WANTED]) + self._spare, 2 * (self._end - at))
            self._move(np.empty(at + wanted, np.uint8), keep=0)
        return self._buffer.data[self._end :]

    def filled(self, count: int) -> None:
        """Record that `count` bytes were written to the space that `space` returned."""
        self._end += count

    def scan(self) -> Frame | None:
        """Scan the buffered bytes, up to a frame that carries no change, and return that frame.

        Raises:
            TransientError: the bytes are not valid pgoutput messages.
        """
        status = kernels.scan(self._buffer, self._end, self._state, *self._arrays)
        if status == kernels.MORE:
            return None
        at = int(self._state[kernels.AT])
        if status == kernels.OTHER:
            body = at + 5
            end = at + int(self._state[kernels.WANTED])
            self._state[kernels.AT] = end
            return Frame(self._buffer[at : at + 1].tobytes(), self._buffer[body:end].tobytes())
        # Include the bytes up to the message type, and no user data.
        data = self._buffer[at : min(at + 31, self._end)].tobytes()
        which = f", {data[30:]!r}" if status == kernels.UNKNOWN else ""
        raise damaged(f"{kernels.REASONS[status]}{which}", data)

    def take(self) -> Chunk | None:
        """Return the messages scanned since the last chunk, or None if no frame was scanned."""
        state, arrays = self._state, self._arrays
        scanned = int(state[kernels.AT])
        if scanned == 0:
            return None
        rows, transactions = int(state[kernels.ROWS]), int(state[kernels.TRANSACTIONS])
        marks = int(state[kernels.MARKS])
        decoded_marks = [
            (int(arrays.mark_row[mark]), _mark(self._buffer[at : arrays.mark_end[mark]].tobytes()))
            for mark, at in enumerate(arrays.mark_at[:marks].tolist())
        ]
        chunk = Chunk(
            buffer=self._give(scanned),
            kind=arrays.kind[:rows].copy(),
            relation=arrays.relation[:rows].copy(),
            old_kind=arrays.old_kind[:rows].copy(),
            old_at=arrays.old_at[:rows].copy(),
            new_at=arrays.new_at[:rows].copy(),
            transaction=arrays.transaction[:rows].copy(),
            commit_lsn=arrays.commit_lsn[:transactions].copy(),
            end_lsn=arrays.end_lsn[:transactions].copy(),
            xid=arrays.xid[:transactions].copy(),
            committed_us=arrays.committed_us[:transactions].copy(),
            marks=decoded_marks,
            mark_transaction=arrays.mark_transaction[:marks].copy(),
            wal_end=int(state[kernels.WAL_END]),
            reply_requested=bool(state[kernels.REPLY]),
        )
        kernels.begin_chunk(state)
        return chunk

    def _give(self, scanned: int) -> Bytes:
        """Return the scanned part of the buffer, and move remaining bytes to the next buffer."""
        whole = self._buffer
        if scanned < self._capacity // 4 and len(whole) == self._capacity:
            given = whole[:scanned].copy()
            self._move(whole, keep=scanned)
            return given
        # An incomplete frame may be larger than a buffer of the usual size.
        wanted = int(self._state[kernels.WANTED]) + self._spare
        room = self._capacity
        if self._end > scanned and wanted > room:
            room = max(wanted, self._end - scanned)
        self._move(np.empty(max(room, self._end - scanned), np.uint8), keep=scanned)
        return whole[:scanned]

    def _move(self, buffer: Bytes, keep: int) -> None:
        rest = self._end - keep
        buffer[:rest] = self._buffer[keep : self._end]
        self._buffer, self._end = buffer, rest
        if keep:
            self._state[kernels.AT] = 0


def gather(chunk: Chunk, at: Int64s, columns: int) -> list[TupleColumn]:
    """Return the values of the tuples at offsets `at`, each with `columns` columns.

    An offset of -1 stands for a tuple of NULLs.
    """
    count = len(at)
    at = np.ascontiguousarray(at, np.int64)
    sizes = np.zeros(columns, np.int64)
    seen = np.zeros((columns, 256), np.bool_)
    wrong = kernels.measure(chunk.buffer, at, columns, sizes, seen)
    if wrong >= 0:
        raise InternalError(
            f"there is no tuple of {columns} columns at {int(at[wrong])}",
            detail="Tuples are looked up where the scan saw them, with the columns of the "
            "Relation message before them.",
        )
    total = int(sizes.sum())
    large = total > np.iinfo(np.int32).max
    bases = np.cumsum(sizes) - sizes
    values = np.empty(total, np.uint8)
    offsets = np.zeros((columns, count + 1), np.int64 if large else np.int32)
    valid = np.zeros((columns, (count + 7) // 8), np.uint8)
    unchanged = np.zeros((columns, count), np.bool_)
    kernels.copy(chunk.buffer, at, columns, bases, values, offsets, valid, unchanged)
    held = pa.py_buffer(values)
    gathered = []
    for column in range(columns):
        text, binary = seen[column, ord("t")], seen[column, ord("b")]
        if text and binary:
            raise damaged(f"column {column} is sent both as text and as binary", b"")
        whole = not (seen[column, ord("n")] or seen[column, ord("u")])
        array = pa.Array.from_buffers(
            pa.large_binary() if large else pa.binary(),
            count,
            [
                None if whole else pa.py_buffer(valid[column]),
                pa.py_buffer(offsets[column]),
                held.slice(int(bases[column]), int(sizes[column])),
            ],
            0 if whole else -1,
        )
        gathered.append(TupleColumn(array, unchanged[column], bool(binary)))
    return gathered


def damaged(reason: str, data: bytes) -> TransientError:
    """Return the error for a message that violates the protocol."""
    return TransientError(
        f"replication stream is invalid: {reason}",
        detail=f"The bytes are {data.hex(' ')}." if data else "",
        hint="The stream is read again from the durable position. If the error repeats, report it.",
    )


class _Reader:
    """Sequential reader of the fields of one rare message."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.at = 1

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.body):
            raise damaged(f"message {self.body[:1]!r} is too short", self.body[:64])
        taken = self.body[self.at : self.at + count]
        self.at += count
        return taken

    def unsigned(self, count: int) -> int:
        return int.from_bytes(self.take(count))

    def signed(self, count: int) -> int:
        return int.from_bytes(self.take(count), signed=True)

    def string(self) -> str:
        end = self.body.find(0, self.at)
        text = self.take(end - self.at)
        self.at += 1
        return text.decode(errors="replace")

    def end(self) -> None:
        if self.at != len(self.body):
            raise damaged(f"message {self.body[:1]!r} is too long", self.body[:64])


def _mark(body: bytes) -> Mark:
    reader = _Reader(body)
    mark: Mark
    match body[:1]:
        case b"R":
            mark = Relation(
                oid=reader.unsigned(4),
                namespace=reader.string() or "pg_catalog",
                name=reader.string(),
                replica_identity=reader.take(1).decode("latin-1"),
                columns=tuple(_column(reader) for _ in range(reader.unsigned(2))),
            )
        case b"Y":
            mark = TypeName(reader.unsigned(4), reader.string() or "pg_catalog", reader.string())
        case b"T":
            count, options = reader.unsigned(4), reader.unsigned(1)
            if count > len(body) // 4:
                raise damaged("message b'T' is too short", body[:64])
            relations = tuple(reader.unsigned(4) for _ in range(count))
            mark = Truncate(relations, bool(options & 1), bool(options & 2))
        case _:
            flags, lsn, prefix = reader.unsigned(1), reader.unsigned(8), reader.string()
            mark = LogicalMessage(bool(flags & 1), lsn, prefix, reader.take(reader.signed(4)))
    reader.end()
    return mark


def _column(reader: _Reader) -> RelationColumn:
    flags, name = reader.unsigned(1), reader.string()
    return RelationColumn(name, reader.unsigned(4), reader.signed(4), bool(flags & 1))
