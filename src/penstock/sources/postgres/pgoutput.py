"""The stream of changes as `pgoutput` writes it, taken apart in bulk.

    bytes ──► Decoder ──► Chunk ──► gather ──► a column of values each
              walks       where     copies     as Arrow arrays
              frames      they are

Bytes come from the socket as frames of the wire protocol, cut anywhere. The
decoder walks whole frames, and notes for each row message where its tuples
begin, and for each transaction when it committed. Small transactions are the
hard case, so nothing here runs Python once a row, a transaction or a
keepalive: only for the rare messages, which become marks. Origins, which
come once for each transaction of a subscriber, are checked and passed over.

The walk checks every length against its frame before it is believed, so that
what was noted can be gathered without looking twice, and damaged bytes are an
error and never a wild read. This is protocol version 1, where a transaction
is sent whole once it has committed; tuples are text or binary.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.data.jit import Bytes, Int32s, Int64s
from penstock.errors import InternalError, TransientError
from penstock.sources.postgres import frames

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
"""Bytes of a buffer. Larger ones no longer fit the processor's caches."""

SPARE: Final = 64 << 10
"""A buffer with less room than this is full: reading in small pieces costs more."""


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column, as messages about its table hold it."""

    name: str
    type_oid: int
    typmod: int
    key: bool
    """Whether it is of the replica identity. With FULL, all are."""


@dataclass(frozen=True, slots=True)
class Relation:
    """What the messages about a table hold from here on."""

    oid: int
    namespace: str
    name: str
    replica_identity: str
    """`d` the primary key, `n` nothing, `f` all columns, `i` an index."""

    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class TypeName:
    """The name of a type that is not built in; comes before its first use."""

    oid: int
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Truncate:
    """Tables that were emptied together."""

    relations: tuple[int, ...]
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """What somebody wrote with `pg_logical_emit_message`."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


Mark: TypeAlias = Relation | TypeName | Truncate | LogicalMessage


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that carries no change: its type, and what is in it."""

    kind: bytes
    body: bytes


@dataclass(slots=True, repr=False)
class Chunk:
    """Some of the stream, as whole messages. The buffer is its own."""

    buffer: Bytes

    kind: Bytes
    """By row message, in the order of the stream: `I`, `U` or `D`."""

    relation: npt.NDArray[np.uint32]
    """By row message: the oid of its table."""

    old_kind: Bytes
    """By row message: what the old tuple is: `K` a key, `O` a whole row, 0 nothing."""

    old_at: Int64s
    """By row message: where the old tuple begins in the buffer, or -1."""

    new_at: Int64s
    """By row message: where the new tuple begins in the buffer, or -1."""

    transaction: Int32s
    """By row message: its transaction, an index into what follows."""

    commit_lsn: Int64s
    """By transaction with a message in here: where its commit record begins. Rises.

    The first may have begun in an earlier chunk, the last may go on in a later one.
    """

    end_lsn: Int64s
    """By transaction: where its commit record ends; 0 while that has not come."""

    xid: npt.NDArray[np.uint32]
    committed_us: Int64s
    """By transaction: when it committed, in microseconds since 1970."""

    marks: list[tuple[int, Mark]]
    """Rare messages, each with the row message before which it came."""

    mark_transaction: Int32s
    """By mark: its transaction, or -1 if it is in none."""

    wal_end: int
    """Every transaction that committed below this has been sent, here or earlier.

    It is the greatest of the positions that keepalives, begins and commits tell.
    """

    reply_requested: bool
    """Whether a keepalive asked for an answer."""

    # Not __len__, by which a chunk with keepalives alone would count as nothing.
    @property
    def row_count(self) -> int:
        """How many row messages there are."""
        return len(self.kind)

    def __repr__(self) -> str:
        # Short, and without anybody's data.
        return f"<Chunk: {self.row_count} rows, {len(self.commit_lsn)} transactions>"


@dataclass(frozen=True, slots=True)
class TupleColumn:
    """One column of many tuples."""

    values: pa.Array
    """What the server sent, as binary; null where NULL, and where unchanged."""

    unchanged: npt.NDArray[np.bool_]
    """Where the value was left out because it is large and did not change."""

    binary: bool
    """Whether the values are in binary rather than text format."""


class Decoder:
    """Takes bytes as they come, and gives chunks. Does no I/O.

    into = decoder.space()           room for bytes, at least one
    decoder.filled(n)                so many came
    other = decoder.walk()           understand them, up to a frame that is no change
    chunk = decoder.take()           what was understood since the last time
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        """With buffers of `capacity` bytes; a larger frame gets a larger one."""
        self._capacity = capacity
        self._spare = min(SPARE, capacity // 4)
        self._buffer: Bytes = np.empty(capacity, np.uint8)
        self._end = 0
        self._state = frames.new_state()
        self._notes = frames.Notes.for_bytes(capacity)

    @property
    def unwalked(self) -> int:
        """How many bytes there are that were not understood yet."""
        return self._end - int(self._state[frames.AT])

    @property
    def walked(self) -> int:
        """How many bytes there are that `take` would give."""
        return int(self._state[frames.AT])

    @property
    def full(self) -> bool:
        """Whether a chunk should be taken before more is read."""
        room = len(self._buffer) - self._end
        return int(self._state[frames.AT]) > 0 and (
            room < self._spare or bool(self._state[frames.CROWDED])
        )

    @property
    def in_transaction(self) -> bool:
        """Whether the last transaction seen has not ended yet."""
        return bool(self._state[frames.IN_TRANSACTION])

    def space(self) -> memoryview:
        """Where the next bytes go."""
        if self._end == len(self._buffer):
            at = int(self._state[frames.AT])
            # Nothing taken can be given up, so there must be more room.
            wanted = max(int(self._state[frames.WANTED]) + self._spare, 2 * (self._end - at))
            self._move(np.empty(at + wanted, np.uint8), keep=0)
        return self._buffer.data[self._end :]

    def filled(self, count: int) -> None:
        """`count` bytes were put where `space` said."""
        self._end += count

    def walk(self) -> Frame | None:
        """Understand what is there, up to a frame that carries no change.

        Raises:
            TransientError: the bytes are not what pgoutput writes.
        """
        status = frames.walk(self._buffer, self._end, self._state, *self._notes)
        if status == frames.MORE:
            return None
        at = int(self._state[frames.AT])
        if status == frames.OTHER:
            body = at + 5
            end = at + int(self._state[frames.WANTED])
            self._state[frames.AT] = end
            return Frame(self._buffer[at : at + 1].tobytes(), self._buffer[body:end].tobytes())
        # As far as the type of a message, and not into anybody's data.
        found = self._buffer[at : min(at + 31, self._end)].tobytes()
        which = f", {found[30:]!r}" if status == frames.UNKNOWN else ""
        raise damaged(f"{frames.REASONS[status]}{which}", found)

    def take(self) -> Chunk | None:
        """What was understood since the last chunk, or None if that is nothing."""
        state, notes = self._state, self._notes
        walked = int(state[frames.AT])
        if walked == 0:
            return None
        rows, transactions = int(state[frames.ROWS]), int(state[frames.TRANSACTIONS])
        marks = int(state[frames.MARKS])
        told = [
            (int(notes.mark_row[mark]), _mark(self._buffer[at : notes.mark_end[mark]].tobytes()))
            for mark, at in enumerate(notes.mark_at[:marks].tolist())
        ]
        chunk = Chunk(
            buffer=self._give(walked),
            kind=notes.kind[:rows].copy(),
            relation=notes.relation[:rows].copy(),
            old_kind=notes.old_kind[:rows].copy(),
            old_at=notes.old_at[:rows].copy(),
            new_at=notes.new_at[:rows].copy(),
            transaction=notes.transaction[:rows].copy(),
            commit_lsn=notes.commit_lsn[:transactions].copy(),
            end_lsn=notes.end_lsn[:transactions].copy(),
            xid=notes.xid[:transactions].copy(),
            committed_us=notes.committed_us[:transactions].copy(),
            marks=told,
            mark_transaction=notes.mark_transaction[:marks].copy(),
            wal_end=int(state[frames.WAL_END]),
            reply_requested=bool(state[frames.REPLY]),
        )
        frames.begin_chunk(state)
        return chunk

    def _give(self, walked: int) -> Bytes:
        """The buffer as far as it was walked. The rest begins the next one."""
        whole = self._buffer
        if walked < self._capacity // 4 and len(whole) == self._capacity:
            given = whole[:walked].copy()
            self._move(whole, keep=walked)
            return given
        # A frame that is only begun may be larger than an ordinary buffer.
        wanted = int(self._state[frames.WANTED]) + self._spare
        room = self._capacity
        if self._end > walked and wanted > room:
            room = max(wanted, self._end - walked)
        self._move(np.empty(max(room, self._end - walked), np.uint8), keep=walked)
        return whole[:walked]

    def _move(self, buffer: Bytes, keep: int) -> None:
        rest = self._end - keep
        buffer[:rest] = self._buffer[keep : self._end]
        self._buffer, self._end = buffer, rest
        if keep:
            self._state[frames.AT] = 0


def gather(chunk: Chunk, at: Int64s, columns: int) -> list[TupleColumn]:
    """The values of the tuples that begin `at`, each of `columns` columns.

    A position of -1 stands for a tuple of NULLs.
    """
    count = len(at)
    at = np.ascontiguousarray(at, np.int64)
    sizes = np.zeros(columns, np.int64)
    seen = np.zeros((columns, 256), np.bool_)
    wrong = frames.measure(chunk.buffer, at, columns, sizes, seen)
    if wrong >= 0:
        raise InternalError(
            f"there is no tuple of {columns} columns at {int(at[wrong])}",
            detail="Tuples are looked up where the walk saw them, with the columns of the "
            "Relation message before them.",
        )
    total = int(sizes.sum())
    large = total > np.iinfo(np.int32).max
    bases = np.cumsum(sizes) - sizes
    values = np.empty(total, np.uint8)
    offsets = np.zeros((columns, count + 1), np.int64 if large else np.int32)
    valid = np.zeros((columns, (count + 7) // 8), np.uint8)
    unchanged = np.zeros((columns, count), np.bool_)
    frames.copy(chunk.buffer, at, columns, bases, values, offsets, valid, unchanged)
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


def damaged(reason: str, found: bytes) -> TransientError:
    """That the server sent something it should not."""
    return TransientError(
        f"replication stream cannot be understood: {reason}",
        detail=f"The bytes are {found.hex(' ')}." if found else "",
        hint="It is read again from what is durable. If it happens again, please report it.",
    )


class _Reader:
    """Reads the fields of one rare message, one after the other."""

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
