"""Bulk encoding of Load, Store and Loaded.

Each of these messages carries one arena of bytes and, for each key, value or document, a slice of
the arena. A message has thousands of slices. As protobuf objects, they would cost more than the
store itself. Compiled code decodes these messages in two passes: the first counts the slices, the
second fills columns of offsets. Adjacent slices become an Arrow column without a copy.

    field   1 binding   2 arena   3, 4, 5 slices   6, 100 booleans   101 a boolean
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.data.jit import Bytes, Int32s, compiled_when_large
from penstock.protocol.errors import MalformedMessage

__all__ = ["ArenaMessage", "decode_arena", "encode_arena", "varint_bytes"]

OVERLAPPING_BYTES: Final = 16 << 20
SLICES: Final = (3, 4, 5)

_BINDING, _ARENA_BEGIN, _ARENA_END, _COUNTS, _EMPTIES = 0, 1, 2, 3, 8
_WORDS: Final = 9


class ArenaMessage:
    """Decoded fields of one message."""

    __slots__ = ("arena", "binding", "bools", "empties", "slices")

    def __init__(
        self,
        binding: int,
        arena: pa.Buffer,
        slices: Sequence[pa.BinaryArray],
        bools: Sequence[pa.BooleanArray],
        empties: bool,
    ) -> None:
        self.binding = binding
        self.arena = arena
        self.slices = slices
        self.bools = bools
        self.empties = empties


def decode_arena(data: bytes, begin: int, end: int, name: str) -> ArenaMessage:
    """Decode the message in `data[begin:end]`. Errors call it `name`.

    Raises:
        MalformedMessage: the bytes are not a message, or a slice is outside the arena.
    """
    octets = np.frombuffer(data, dtype=np.uint8)
    header = np.zeros(_WORDS, dtype=np.int64)
    nothing = np.empty(0, dtype=np.int32)
    no_bools = np.empty(0, dtype=np.uint8)
    if not _scan(octets, begin, end, header, False, (nothing,) * 6, (no_bools,) * 2):
        raise MalformedMessage(f"{name} is not a protobuf message")
    counts = header[_COUNTS:].copy()
    ends = tuple(np.empty(counts[index // 2], dtype=np.int32) for index in range(6))
    flags = tuple(np.empty(counts[3 + index], dtype=np.uint8) for index in range(2))
    _scan(octets, begin, end, header, True, ends, flags)
    arena = pa.py_buffer(data)[int(header[_ARENA_BEGIN]) : int(header[_ARENA_END])]
    slices = [
        _column(arena, ends[2 * index], ends[2 * index + 1], f"{name}, field {SLICES[index]}")
        for index in range(3)
    ]
    bools = [pa.array(flag.astype(np.bool_)) for flag in flags]
    return ArenaMessage(int(header[_BINDING]), arena, slices, bools, bool(header[_EMPTIES]))


def _column(arena: pa.Buffer, begins: Int32s, ends: Int32s, name: str) -> pa.BinaryArray:
    """Return the contents of the slices, without a copy if they are adjacent."""
    count = len(begins)
    if not count:
        return pa.array([], pa.binary())
    wrong = (begins < 0) | (begins > ends) | (ends > arena.size)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise MalformedMessage(
            f"{name}: slice {row} is [{begins[row]}, {ends[row]}) of an arena of {arena.size} bytes"
        )
    if count == 1 or bool((begins[1:] == ends[:-1]).all()):
        offsets = np.empty(count + 1, dtype=np.int32)
        offsets[0] = begins[0]
        offsets[1:] = ends
        content = arena
    else:
        offsets = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(ends.astype(np.int64) - begins, out=offsets[1:])
        # Slices may overlap, but a small message must not grow without bound.
        if offsets[-1] > max(arena.size, OVERLAPPING_BYTES):
            raise MalformedMessage(
                f"{name}: overlapping slices have {offsets[-1]} bytes of an arena of {arena.size}"
            )
        gathered = np.empty(offsets[-1], dtype=np.uint8)
        _gather(np.frombuffer(arena, dtype=np.uint8), begins, ends, gathered)
        offsets, content = offsets.astype(np.int32), pa.py_buffer(gathered)
    return pa.BinaryArray.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), content])


def encode_arena(
    number: int,
    binding: int,
    slices: Sequence[pa.BinaryArray],
    bools: Sequence[pa.BooleanArray | None] = (),
) -> bytes:
    """Encode field `number` of a message, with these columns in one arena."""
    contents, offsets = [], []
    arena_size = 0
    for column in slices:
        own, content = _contents(column)
        contents.append(content)
        offsets.append(own + arena_size)
        arena_size += len(content)
    flags = tuple(
        np.empty(0, dtype=np.uint8)
        if flag is None
        else np.asarray(flag.to_numpy(zero_copy_only=False), dtype=np.uint8)
        for flag in (*bools, None, None)[:2]
    )
    empty = np.zeros(1, dtype=np.int64)
    columns = (*offsets, empty, empty)[:3]
    head = varint_bytes(8) + varint_bytes(binding) if binding else b""
    if arena_size:
        head += varint_bytes(18) + varint_bytes(arena_size)
    tail_size = _size(columns, flags)
    body = len(head) + arena_size + tail_size
    outer = varint_bytes(number << 3 | 2) + varint_bytes(body)
    out = np.empty(len(outer) + body, dtype=np.uint8)
    place = 0
    for part in (outer + head, *contents):
        octets = np.frombuffer(part, dtype=np.uint8)
        out[place : place + len(octets)] = octets
        place += len(octets)
    _fill(columns, flags, out, place)
    return out.tobytes()


def _contents(column: pa.BinaryArray) -> tuple[Any, pa.Buffer]:
    """Return offsets that start at zero, and the bytes that they refer to."""
    count = len(column)
    if not count:
        return np.zeros(1, dtype=np.int64), pa.py_buffer(b"")
    _, bounds, content = column.buffers()
    own = np.frombuffer(bounds, dtype=np.int32)[column.offset : column.offset + count + 1]
    first, last = int(own[0]), int(own[-1])
    held = content[first:last] if content is not None else pa.py_buffer(b"")
    return own.astype(np.int64) - first, held


def varint_bytes(value: int) -> bytes:
    """Return a number as a protobuf varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


# Compiled code. It never reads outside `octets[begin:end]`.


@compiled_when_large
def _varint(octets: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return the varint at `at` and its end; the end is -1 if the varint is damaged."""
    value = 0
    for index in range(10):
        if at >= end:
            return 0, -1
        octet = int(octets[at])
        at += 1
        if index < 9:
            value |= (octet & 127) << (7 * index)
        if octet < 128:
            return value, at
    return 0, -1


@compiled_when_large
def _skip(octets: Bytes, wire: int, at: int, end: int) -> int:
    """Return the end of a field of this wire type; -1 if it is damaged."""
    if wire == 0:
        _, at = _varint(octets, at, end)
        return at
    if wire == 1:
        return at + 8 if at + 8 <= end else -1
    if wire == 2:
        size, at = _varint(octets, at, end)
        return at + size if at >= 0 and 0 <= size <= end - at else -1
    if wire == 5:
        return at + 4 if at + 4 <= end else -1
    return -1


@compiled_when_large
def _slice(octets: Bytes, at: int, end: int) -> tuple[int, int, int]:
    """Return begin and end of a slice, and the end of its message; -1 if it is damaged."""
    first = last = 0
    while at < end:
        tag, at = _varint(octets, at, end)
        if at < 0:
            return 0, 0, -1
        if tag in (8, 16):
            value, at = _varint(octets, at, end)
            if at < 0:
                return 0, 0, -1
            # More than 31 bits are outside any arena, which the caller reports.
            value = value if 0 <= value <= 0x7FFFFFFF else -1
            if tag == 8:
                first = value
            else:
                last = value
        else:
            at = _skip(octets, tag & 7, at, end)
            if at < 0:
                return 0, 0, -1
    return first, last, at


@compiled_when_large
def _scan(octets, begin, end, header, fill, bounds, flags):  # type: ignore[no-untyped-def]
    """Count the slices, or fill the columns; return whether the bytes are a message."""
    header[:] = 0
    at = begin
    while at < end:
        tag, at = _varint(octets, at, end)
        if at < 0:
            return False
        number, wire = tag >> 3, tag & 7
        if number == 0:
            return False
        if number == 1 and wire == 0:
            header[0], at = _varint(octets, at, end)
            if at < 0:
                return False
            header[0] &= 0xFFFFFFFF
        elif wire == 2 and (number <= 6 or number == 100) and number != 1:
            size, at = _varint(octets, at, end)
            if at < 0 or size < 0 or size > end - at:
                return False
            stop = at + size
            if number == 2:
                header[1], header[2] = at, stop
            elif number <= 5:
                row = header[number]
                if fill:
                    first, last, fine = _slice(octets, at, stop)
                    if number == 3:
                        bounds[0][row], bounds[1][row] = first, last
                    elif number == 4:
                        bounds[2][row], bounds[3][row] = first, last
                    else:
                        bounds[4][row], bounds[5][row] = first, last
                else:
                    first, last, fine = _slice(octets, at, stop)
                if fine < 0:
                    return False
                header[number] = row + 1
            else:
                which = 6 if number == 6 else 7
                while at < stop:
                    value, at = _varint(octets, at, stop)
                    if at < 0:
                        return False
                    if fill:
                        flags[which - 6][header[which]] = value != 0
                    header[which] += 1
            at = stop
        elif wire == 0 and (number == 6 or number == 100):
            value, at = _varint(octets, at, end)
            if at < 0:
                return False
            which = 6 if number == 6 else 7
            if fill:
                flags[which - 6][header[which]] = value != 0
            header[which] += 1
        elif wire == 0 and number == 101:
            value, at = _varint(octets, at, end)
            if at < 0:
                return False
            header[8] = value != 0
        else:
            at = _skip(octets, wire, at, end)
            if at < 0:
                return False
    return True


@compiled_when_large
def _gather(arena: Bytes, begins: Int32s, ends: Int32s, out: Bytes) -> None:
    place = 0
    for row in range(len(begins)):
        size = ends[row] - begins[row]
        out[place : place + size] = arena[begins[row] : ends[row]]
        place += size


@compiled_when_large
def _width(value: int) -> int:
    """Return the number of bytes of a varint."""
    width = 1
    while value > 127:
        value >>= 7
        width += 1
    return width


@compiled_when_large
def _put(out: Bytes, at: int, value: int) -> int:
    while value > 127:
        out[at] = value & 127 | 128
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


@compiled_when_large
def _slice_size(first: int, last: int) -> int:
    """Return the size of a slice. Zeros are not written."""
    size = 0
    if first:
        size += 1 + _width(first)
    if last:
        size += 1 + _width(last)
    return size


@compiled_when_large
def _size(columns, flags):  # type: ignore[no-untyped-def]
    """Return the number of bytes of slices and booleans."""
    size = 0
    for index in range(3):
        bounds = columns[index]
        for row in range(len(bounds) - 1):
            size += 2 + _slice_size(bounds[row], bounds[row + 1])
    if len(flags[0]):
        size += 1 + _width(len(flags[0])) + len(flags[0])
    if len(flags[1]):
        size += 2 + _width(len(flags[1])) + len(flags[1])
    return size


@compiled_when_large
def _fill(columns, flags, out, at):  # type: ignore[no-untyped-def]
    for index in range(3):
        bounds = columns[index]
        for row in range(len(bounds) - 1):
            first, last = bounds[row], bounds[row + 1]
            out[at] = (3 + index) << 3 | 2
            out[at + 1] = _slice_size(first, last)
            at += 2
            if first:
                out[at] = 8
                at = _put(out, at + 1, first)
            if last:
                out[at] = 16
                at = _put(out, at + 1, last)
    for which in range(2):
        if len(flags[which]):
            at = _put(out, at, (6 if which == 0 else 100) << 3 | 2)
            at = _put(out, at, len(flags[which]))
            out[at : at + len(flags[which])] = flags[which]
            at += len(flags[which])
