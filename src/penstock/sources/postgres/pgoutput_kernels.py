"""Compiled part of `pgoutput`: only loops over bytes.

    frame      type, length, body         a body of type `d` is
    `w`        start, end, time, message  a message of pgoutput, or
    `k`        end, time, reply           a keepalive
    tuple      count, then for each column  `n` NULL, `u` unchanged,
                                            `t` or `b` with a length and bytes

Numbers are big-endian. Compiled code has no bounds checks. A byte is therefore read only after a
check that its offset is below the given end.
"""

from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from penstock.data.jit import Bytes, Int32s, Int64s, compiled

__all__ = ["ScanArrays", "begin_chunk", "copy", "measure", "new_state", "scan", "strip"]

# Scan state, kept between calls and from chunk to chunk.
AT: Final = 0  # offset of the first byte that is not scanned
WANTED: Final = 1  # length of the frame at AT, if known; else 0
ROWS: Final = 2
TRANSACTIONS: Final = 3
MARKS: Final = 4
IN_TRANSACTION: Final = 5
INDEX: Final = 6  # index of the transaction in the chunk, or -1
COMMIT_LSN: Final = 7
XID: Final = 8
COMMITTED_US: Final = 9
WAL_END: Final = 10
REPLY: Final = 11
CROWDED: Final = 12  # 1 if the arrays of this chunk are full

# Results of a scan.
MORE: Final = 0
OTHER: Final = 1
REASONS: Final = {
    2: "a frame has an impossible length",
    3: "a frame holds neither a message nor a keepalive",
    4: "a message has an unknown type",
    5: "a message is cut short",
    6: "a message is longer than its content",
    7: "a tuple does not end with its message",
    8: "a change is outside of a transaction",
    9: "a transaction begins inside another",
    10: "a transaction ends that did not begin",
    11: "a message holds a tuple of an unknown kind",
}
BAD_LENGTH: Final = 2
NO_MESSAGE: Final = 3
UNKNOWN: Final = 4
SHORT: Final = 5
LONG: Final = 6
BAD_TUPLE: Final = 7
OUTSIDE: Final = 8
NESTED: Final = 9
NOT_BEGUN: Final = 10
BAD_KIND: Final = 11

LONGEST: Final = 1 << 30
"""Longest possible frame: the server builds each frame in one memory allocation."""

SMALLEST: Final = 36
"""Smallest size of a recorded message, frame included."""

EPOCH_US: Final = 946_684_800_000_000
"""Microseconds from 1970 (Unix epoch) to 2000 (Postgres epoch)."""


class ScanArrays(NamedTuple):
    """Output arrays of a scan; see `Chunk`."""

    kind: Bytes
    relation: npt.NDArray[np.uint32]
    old_kind: Bytes
    old_at: Int64s
    new_at: Int64s
    transaction: Int32s
    commit_lsn: Int64s
    end_lsn: Int64s
    xid: npt.NDArray[np.uint32]
    committed_us: Int64s
    mark_at: Int64s
    mark_end: Int64s
    mark_row: Int64s
    mark_transaction: Int32s

    @classmethod
    def for_bytes(cls, capacity: int) -> Self:
        """Return arrays large enough for all messages in `capacity` bytes."""
        room = capacity // SMALLEST + 1
        return cls(
            kind=np.empty(room, np.uint8),
            relation=np.empty(room, np.uint32),
            old_kind=np.empty(room, np.uint8),
            old_at=np.empty(room, np.int64),
            new_at=np.empty(room, np.int64),
            transaction=np.empty(room, np.int32),
            commit_lsn=np.empty(room, np.int64),
            end_lsn=np.empty(room, np.int64),
            xid=np.empty(room, np.uint32),
            committed_us=np.empty(room, np.int64),
            mark_at=np.empty(room, np.int64),
            mark_end=np.empty(room, np.int64),
            mark_row=np.empty(room, np.int64),
            mark_transaction=np.empty(room, np.int32),
        )


def new_state() -> Int64s:
    """Return the scan state before the first byte."""
    state = np.zeros(13, np.int64)
    state[INDEX] = -1
    return state


def begin_chunk(state: Int64s) -> None:
    """Reset the state for a new chunk, which may start inside a transaction."""
    state[ROWS] = state[TRANSACTIONS] = state[MARKS] = state[REPLY] = state[CROWDED] = 0
    state[INDEX] = -1


@compiled
def int16(buffer, at):  # type: ignore[no-untyped-def]
    return np.int64(buffer[at]) << 8 | np.int64(buffer[at + 1])


@compiled
def int32(buffer, at):  # type: ignore[no-untyped-def]
    """Return a signed number: a length of 2^31 or more must be negative."""
    number = (
        np.int64(buffer[at]) << 24
        | np.int64(buffer[at + 1]) << 16
        | np.int64(buffer[at + 2]) << 8
        | np.int64(buffer[at + 3])
    )
    return number - (number >> 31 << 32)


@compiled
def int64(buffer, at):  # type: ignore[no-untyped-def]
    return int32(buffer, at) << 32 | (int32(buffer, at + 4) & 0xFFFF_FFFF)


@compiled
def tuple_end(buffer, at, end):  # type: ignore[no-untyped-def]
    """Return the end of the tuple that begins at `at`, or -1 if it does not end by `end`."""
    if at + 2 > end:
        return -1
    count = int16(buffer, at)
    at += 2
    for _ in range(count):
        if at >= end:
            return -1
        kind = buffer[at]
        at += 1
        if kind == 116 or kind == 98:  # t, b
            if at + 4 > end:
                return -1
            length = int32(buffer, at)
            at += 4
            if length < 0 or length > end - at:
                return -1
            at += length
        elif kind != 110 and kind != 117:  # n, u
            return -1
    return at


@compiled
def scan(  # type: ignore[no-untyped-def]
    buffer,
    end,
    state,
    kind,
    relation,
    old_kind,
    old_at,
    new_at,
    transaction,
    commit_lsn,
    end_lsn,
    xid,
    committed_us,
    mark_at,
    mark_end,
    mark_row,
    mark_transaction,
):
    """Scan complete frames in `[state[AT], end)` and record their messages; return the result."""
    at = state[AT]
    rows = state[ROWS]
    transactions = state[TRANSACTIONS]
    marks = state[MARKS]
    inside = state[IN_TRANSACTION]
    index = state[INDEX]
    wal_end = state[WAL_END]
    room = min(len(kind), len(commit_lsn), len(mark_at))
    status = MORE
    state[WANTED] = 0
    while at + 5 <= end:
        length = int32(buffer, at + 1)
        if length < 4 or length > LONGEST:
            status = BAD_LENGTH
            break
        stop = at + 1 + length
        if stop > end:
            state[WANTED] = length + 1
            break
        if buffer[at] != 100:  # d
            state[WANTED] = length + 1
            status = OTHER
            break
        if max(rows, transactions, marks) + 1 > room:
            state[CROWDED] = 1
            break
        p = at + 5
        if p >= stop:
            status = NO_MESSAGE
            break
        if buffer[p] == 107:  # k: end, time, reply
            if stop - p != 18:
                status = SHORT if stop - p < 18 else LONG
                break
            wal_end = max(wal_end, int64(buffer, p + 1))
            if buffer[p + 17] != 0:
                state[REPLY] = 1
            at = stop
            continue
        if buffer[p] != 119:  # w: start, end, time, message
            status = NO_MESSAGE
            break
        p += 25
        if p >= stop:
            status = SHORT
            break
        message = buffer[p]
        size = stop - p
        if message == 66:  # Begin: final lsn, time, xid
            if size != 21:
                status = SHORT if size < 21 else LONG
                break
            if inside:
                status = NESTED
                break
            inside = 1
            state[COMMIT_LSN] = int64(buffer, p + 1)
            state[COMMITTED_US] = int64(buffer, p + 9) + EPOCH_US
            state[XID] = int32(buffer, p + 17) & 0xFFFF_FFFF
            wal_end = max(wal_end, state[COMMIT_LSN])
            index = -1
        elif not inside and message in (67, 73, 85, 68, 82, 89, 84, 79):  # CIUDRYTO
            status = NOT_BEGUN if message == 67 else OUTSIDE
            break
        if inside and index < 0:
            index = transactions
            commit_lsn[index] = state[COMMIT_LSN]
            end_lsn[index] = 0
            xid[index] = state[XID]
            committed_us[index] = state[COMMITTED_US]
            transactions += 1
        if message == 73 or message == 85 or message == 68:  # Insert, Update, Delete
            if size < 6:
                status = SHORT
                break
            table = int32(buffer, p + 1) & 0xFFFF_FFFF
            p += 5
            part = buffer[p]
            old, old_begins, new_begins = 0, -1, -1
            if message != 73 and (part == 75 or part == 79):  # K, O
                old, old_begins = part, p + 1
                p = tuple_end(buffer, p + 1, stop)
                if p < 0:
                    status = BAD_TUPLE
                    break
                if message == 85:
                    if p >= stop:
                        status = SHORT
                        break
                    part = buffer[p]
            if message != 68:
                if part != 78:  # N
                    status = BAD_KIND
                    break
                new_begins = p + 1
                p = tuple_end(buffer, p + 1, stop)
            elif old == 0:
                status = BAD_KIND
                break
            if p != stop:
                status = BAD_TUPLE
                break
            kind[rows] = message
            relation[rows] = table
            old_kind[rows] = old
            old_at[rows] = old_begins
            new_at[rows] = new_begins
            transaction[rows] = index
            rows += 1
        elif message == 67:  # Commit: flags, commit lsn, end lsn, time
            if size != 26:
                status = SHORT if size < 26 else LONG
                break
            if int64(buffer, p + 2) != state[COMMIT_LSN]:
                status = NOT_BEGUN
                break
            end_lsn[index] = int64(buffer, p + 10)
            wal_end = max(wal_end, end_lsn[index])
            inside = 0
            index = -1
        elif message in (82, 89, 84, 77):  # Relation, Type, Truncate, Message
            mark_at[marks] = p
            mark_end[marks] = stop
            mark_row[marks] = rows
            outside = message == 77 and (size < 2 or buffer[p + 1] & 1 == 0)
            mark_transaction[marks] = -1 if outside else index
            marks += 1
        elif message == 79:  # Origin: commit lsn, name
            if size < 10 or buffer[stop - 1] != 0:
                status = SHORT
                break
        elif message != 66:
            status = UNKNOWN
            break
        at = stop
    state[AT] = at
    state[ROWS] = rows
    state[TRANSACTIONS] = transactions
    state[MARKS] = marks
    state[IN_TRANSACTION] = inside
    state[INDEX] = index
    state[WAL_END] = wal_end
    return status


@compiled
def measure(buffer, at, columns, sizes, seen):  # type: ignore[no-untyped-def]
    """Add up the bytes of each column; return the first row without a valid tuple, or -1."""
    end = len(buffer)
    for row in range(len(at)):
        p = at[row]
        if p == -1:
            for column in range(columns):
                seen[column, 110] = True
            continue
        if p < 0 or p + 2 > end or int16(buffer, p) != columns:
            return row
        p += 2
        for column in range(columns):
            if p >= end:
                return row
            kind = buffer[p]
            seen[column, kind] = True
            p += 1
            if kind == 116 or kind == 98:
                if p + 4 > end:
                    return row
                length = int32(buffer, p)
                p += 4
                if length < 0 or length > end - p:
                    return row
                sizes[column] += length
                p += length
    return -1


@compiled
def copy(buffer, at, columns, bases, values, offsets, valid, unchanged):  # type: ignore[no-untyped-def]
    """Copy the values of each column next to each other, in Arrow layout."""
    into = bases.copy()
    for row in range(len(at)):
        p = at[row]
        if p >= 0:
            p += 2
            for column in range(columns):
                kind = buffer[p]
                p += 1
                if kind == 116 or kind == 98:
                    length = int32(buffer, p)
                    p += 4
                    to = into[column]
                    for byte in range(length):
                        values[to + byte] = buffer[p + byte]
                    into[column] = to + length
                    p += length
                    valid[column, row >> 3] |= np.uint8(1 << (row & 7))
                elif kind == 117:
                    unchanged[column, row] = True
        for column in range(columns):
            offsets[column, row + 1] = into[column] - bases[column]


@compiled
def strip(buffer, start, end, into):  # type: ignore[no-untyped-def]
    """Move the bodies of complete `d` frames in `[start, end)` together, starting at `into`.

    Return the offset of the first frame that was not moved, the end of the bodies, and the length
    of that frame: 0 if not known, -1 if impossible.
    """
    at = start
    wanted = 0
    while at + 5 <= end:
        length = int32(buffer, at + 1)
        if length < 4 or length > LONGEST:
            return at, into, -1
        wanted = length + 1
        if at + wanted > end or buffer[at] != 100:
            break
        for byte in range(length - 4):
            buffer[into + byte] = buffer[at + 5 + byte]
        into += length - 4
        at += wanted
        wanted = 0
    return at, into, wanted
