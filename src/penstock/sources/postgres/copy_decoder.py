"""Bulk decoder of `COPY … TO STDOUT (FORMAT binary)`.

The stream has a header, then rows. A row is a count of fields, and for each field a length and that
many bytes; a length of -1 is NULL. A count of -1 ends the stream. Input can end anywhere in a row,
so an incomplete row is buffered until its remaining bytes arrive.
"""

from typing import Final

import numpy as np
import pyarrow as pa

from penstock.data.jit import Bytes, compiled
from penstock.errors import TransientError
from penstock.sources.postgres.pgoutput_kernels import int16, int32

__all__ = ["CopyDecoder"]

SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
FIXED: Final = len(SIGNATURE) + 8


class CopyDecoder:
    """Incremental decoder: takes bytes of a binary COPY and returns columns."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._rest: Bytes = np.empty(0, np.uint8)
        self._begun = False
        self.finished = False
        """True after the end marker of the stream."""

    def decode(self, data: Bytes) -> list[pa.Array] | None:
        """Return the complete rows so far, as one binary array per column; None if there are none.

        Raises:
            TransientError: the bytes are not a binary COPY with the expected number of columns.
        """
        buffer = np.concatenate([self._rest, data]) if len(self._rest) else data
        start = 0
        if not self._begun:
            if len(buffer) < FIXED:
                self._rest = buffer.copy()
                return None
            start = self._header(buffer)
            if start > len(buffer):
                self._rest = buffer.copy()
                return None
            self._begun = True
        sizes = np.zeros(self._columns, np.int64)
        nulls = np.zeros(self._columns, np.bool_)
        rows, end, finished = _measure(buffer, start, self._columns, sizes, nulls)
        if rows < 0:
            raise TransientError(
                "copy of a table cannot be understood",
                detail=f"At byte {end} a row does not have {self._columns} fields.",
                hint="It is read again. If it happens again, please report it.",
            )
        self.finished = self.finished or bool(finished)
        self._rest = buffer[end:].copy()
        return self._arrays(buffer, start, rows, sizes, nulls) if rows else None

    def _header(self, buffer: Bytes) -> int:
        if buffer[: len(SIGNATURE)].tobytes() != SIGNATURE:
            raise TransientError(
                "copy of a table cannot be understood",
                detail="It does not begin as a binary copy does.",
                hint="It is read again. If it happens again, please report it.",
            )
        extension = int(int32(buffer, len(SIGNATURE) + 4))
        return FIXED + extension

    def _arrays(
        self, buffer: Bytes, start: int, rows: int, sizes: "np.ndarray", nulls: "np.ndarray"
    ) -> list[pa.Array]:
        large = int(sizes.max(initial=0)) > np.iinfo(np.int32).max
        bases = np.cumsum(sizes) - sizes
        values = np.empty(int(sizes.sum()), np.uint8)
        offsets = np.zeros((self._columns, rows + 1), np.int64 if large else np.int32)
        valid = np.zeros((self._columns, (rows + 7) // 8), np.uint8)
        _fill(buffer, start, rows, self._columns, bases, values, offsets, valid)
        held = pa.py_buffer(values)
        return [
            pa.Array.from_buffers(
                pa.large_binary() if large else pa.binary(),
                rows,
                [
                    pa.py_buffer(valid[column]) if nulls[column] else None,
                    pa.py_buffer(offsets[column]),
                    held.slice(int(bases[column]), int(sizes[column])),
                ],
                -1 if nulls[column] else 0,
            )
            for column in range(self._columns)
        ]


@compiled
def _measure(buffer, start, columns, sizes, nulls):  # type: ignore[no-untyped-def]
    """Return the number of complete rows, the offset of their end, and whether the stream ended.

    Also add up the bytes and the presence of NULLs per column. A row count of -1 means damaged
    data.
    """
    end = len(buffer)
    at = start
    rows = 0
    lengths = np.empty(columns, np.int64)
    while at + 2 <= end:
        count = int16(buffer, at)
        if count == 0xFFFF:
            return rows, at + 2, True
        if count != columns:
            return -1, at, False
        p = at + 2
        whole = True
        for column in range(columns):
            if p + 4 > end:
                whole = False
                break
            length = int32(buffer, p)
            p += 4
            lengths[column] = length
            if length < -1:
                return -1, at, False
            if length > 0:
                if length > end - p:
                    whole = False
                    break
                p += length
        if not whole:
            break
        for column in range(columns):
            if lengths[column] < 0:
                nulls[column] = True
            else:
                sizes[column] += lengths[column]
        rows += 1
        at = p
    return rows, at, False


@compiled
def _fill(buffer, start, rows, columns, bases, values, offsets, valid):  # type: ignore[no-untyped-def]
    """Copy the values of each column next to each other, in Arrow layout."""
    into = bases.copy()
    p = start
    for row in range(rows):
        p += 2
        for column in range(columns):
            length = int32(buffer, p)
            p += 4
            if length >= 0:
                to = into[column]
                for byte in range(length):
                    values[to + byte] = buffer[p + byte]
                into[column] = to + length
                p += length
                valid[column, row >> 3] |= np.uint8(1 << (row & 7))
            offsets[column, row + 1] = into[column] - bases[column]
