"""Arenas and slices, read and written in bulk.

Load, Store and Loaded carry one arena of bytes, and for each key, value or document
the slice of it that it takes. A message has thousands of slices; as objects of a
protobuf library they would cost more than the store does. So these three messages
are walked by compiled code, in two passes: one counts, one fills columns of
offsets. An arena whose slices follow one another becomes an Arrow column without
copying a byte.

    field   1 binding   2 arena   3, 4, 5 slices   6, 100 booleans   101 a boolean
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.data.jit import Bytes, Int32s, compiled_when_large
from penstock.protocol.errors import MalformedMessage

__all__ = ["Walked", "varint_bytes", "walk", "write"]

OVERLAPPING_BYTES: Final = 16 << 20
SLICES: Final = (3, 4, 5)
BOOLS: Final = (6, 100)

_BINDING, _ARENA_BEGIN, _ARENA_END, _COUNTS, _EMPTIES = 0, 1, 2, 3, 8
_WORDS: Final = 9


class Walked:
    """The parts of one such message."""

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


def walk(data: bytes, begin: int, end: int, what: str) -> Walked:
    """The message called `what` that is `data[begin:end]`.

    Raises:
        MalformedMessage: the bytes are no such message, or a slice is not within the arena.
    """
    octets = np.frombuffer(data, dtype=np.uint8)
    found = np.zeros(_WORDS, dtype=np.int64)
    nothing = np.empty(0, dtype=np.int32)
    no_bools = np.empty(0, dtype=np.uint8)
    if not _walk(octets, begin, end, found, False, (nothing,) * 6, (no_bools,) * 2):
        raise MalformedMessage(f"{what} is not a protobuf message")
    counts = found[_COUNTS:].copy()
    ends = tuple(np.empty(counts[each // 2], dtype=np.int32) for each in range(6))
    flags = tuple(np.empty(counts[3 + each], dtype=np.uint8) for each in range(2))
    _walk(octets, begin, end, found, True, ends, flags)
    arena = pa.py_buffer(data)[int(found[_ARENA_BEGIN]) : int(found[_ARENA_END])]
    slices = [
        _column(arena, ends[2 * each], ends[2 * each + 1], f"{what}, field {SLICES[each]}")
        for each in range(3)
    ]
    bools = [pa.array(each.astype(np.bool_)) for each in flags]
    return Walked(int(found[_BINDING]), arena, slices, bools, bool(found[_EMPTIES]))


def _column(arena: pa.Buffer, begins: Int32s, ends: Int32s, what: str) -> pa.BinaryArray:
    """What the slices hold, without a copy where they follow one another."""
    count = len(begins)
    if not count:
        return pa.array([], pa.binary())
    wrong = (begins < 0) | (begins > ends) | (ends > arena.size)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise MalformedMessage(
            f"{what}: slice {at} is [{begins[at]}, {ends[at]}) of an arena of {arena.size} bytes"
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
                f"{what}: slices overlap, and hold {offsets[-1]} bytes of an arena of {arena.size}"
            )
        gathered = np.empty(offsets[-1], dtype=np.uint8)
        _gather(np.frombuffer(arena, dtype=np.uint8), begins, ends, gathered)
        offsets, content = offsets.astype(np.int32), pa.py_buffer(gathered)
    return pa.BinaryArray.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), content])


def write(
    number: int,
    binding: int,
    slices: Sequence[pa.BinaryArray],
    bools: Sequence[pa.BooleanArray | None] = (),
) -> bytes:
    """Field `number` of a message, holding these columns in one arena."""
    contents, offsets = [], []
    at = 0
    for column in slices:
        own, content = _contents(column)
        contents.append(content)
        offsets.append(own + at)
        at += len(content)
    flags = tuple(
        np.empty(0, dtype=np.uint8)
        if each is None
        else np.asarray(each.to_numpy(zero_copy_only=False), dtype=np.uint8)
        for each in (*bools, None, None)[:2]
    )
    empty = np.zeros(1, dtype=np.int64)
    columns = (*offsets, empty, empty)[:3]
    head = varint_bytes(8) + varint_bytes(binding) if binding else b""
    if at:
        head += varint_bytes(18) + varint_bytes(at)
    tail_size = _size(columns, flags)
    body = len(head) + at + tail_size
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
    """Offsets from zero, and the bytes they point into."""
    count = len(column)
    if not count:
        return np.zeros(1, dtype=np.int64), pa.py_buffer(b"")
    _, bounds, content = column.buffers()
    own = np.frombuffer(bounds, dtype=np.int32)[column.offset : column.offset + count + 1]
    first, last = int(own[0]), int(own[-1])
    held = content[first:last] if content is not None else pa.py_buffer(b"")
    return own.astype(np.int64) - first, held


def varint_bytes(value: int) -> bytes:
    """A number as the wire has it."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


# Compiled. None of it reads outside `octets[begin:end]`.


@compiled_when_large
def _varint(octets: Bytes, at: int, end: int) -> tuple[int, int]:
    """The number at `at`, and where it ends; -1 if it does not end in time."""
    value = 0
    for each in range(10):
        if at >= end:
            return 0, -1
        octet = int(octets[at])
        at += 1
        if each < 9:
            value |= (octet & 127) << (7 * each)
        if octet < 128:
            return value, at
    return 0, -1


@compiled_when_large
def _skip(octets: Bytes, wire: int, at: int, end: int) -> int:
    """Where a field of this wire type ends; -1 if it is damaged."""
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
    """Begin and end of a slice, and -1 if it is damaged."""
    first = last = 0
    while at < end:
        tag, at = _varint(octets, at, end)
        if at < 0:
            return 0, 0, -1
        if tag in (8, 16):
            value, at = _varint(octets, at, end)
            if at < 0:
                return 0, 0, -1
            # Wider than 31 bits cannot be within an arena; it is told as such.
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
def _walk(octets, begin, end, found, fill, bounds, flags):  # type: ignore[no-untyped-def]
    """Count the parts, or fill columns of the sizes counted; whether it is a message."""
    found[:] = 0
    at = begin
    while at < end:
        tag, at = _varint(octets, at, end)
        if at < 0:
            return False
        number, wire = tag >> 3, tag & 7
        if number == 0:
            return False
        if number == 1 and wire == 0:
            found[0], at = _varint(octets, at, end)
            if at < 0:
                return False
            found[0] &= 0xFFFFFFFF
        elif wire == 2 and (number <= 6 or number == 100) and number != 1:
            size, at = _varint(octets, at, end)
            if at < 0 or size < 0 or size > end - at:
                return False
            stop = at + size
            if number == 2:
                found[1], found[2] = at, stop
            elif number <= 5:
                row = found[number]
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
                found[number] = row + 1
            else:
                which = 6 if number == 6 else 7
                while at < stop:
                    value, at = _varint(octets, at, stop)
                    if at < 0:
                        return False
                    if fill:
                        flags[which - 6][found[which]] = value != 0
                    found[which] += 1
            at = stop
        elif wire == 0 and (number == 6 or number == 100):
            value, at = _varint(octets, at, end)
            if at < 0:
                return False
            which = 6 if number == 6 else 7
            if fill:
                flags[which - 6][found[which]] = value != 0
            found[which] += 1
        elif wire == 0 and number == 101:
            value, at = _varint(octets, at, end)
            if at < 0:
                return False
            found[8] = value != 0
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
    """How many bytes a number takes."""
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
    """Zero is not written."""
    size = 0
    if first:
        size += 1 + _width(first)
    if last:
        size += 1 + _width(last)
    return size


@compiled_when_large
def _size(columns, flags):  # type: ignore[no-untyped-def]
    """How many bytes slices and booleans take."""
    size = 0
    for each in range(3):
        bounds = columns[each]
        for row in range(len(bounds) - 1):
            size += 2 + _slice_size(bounds[row], bounds[row + 1])
    if len(flags[0]):
        size += 1 + _width(len(flags[0])) + len(flags[0])
    if len(flags[1]):
        size += 2 + _width(len(flags[1])) + len(flags[1])
    return size


@compiled_when_large
def _fill(columns, flags, out, at):  # type: ignore[no-untyped-def]
    for each in range(3):
        bounds = columns[each]
        for row in range(len(bounds) - 1):
            first, last = bounds[row], bounds[row + 1]
            out[at] = (3 + each) << 3 | 2
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
