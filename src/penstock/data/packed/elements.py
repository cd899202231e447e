"""Packing and unpacking of one tuple in Python, for every type."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from penstock.errors import UsageError

__all__ = [
    "BYTES",
    "DOUBLE",
    "FALSE",
    "FLOAT",
    "NEGATIVE",
    "NULL",
    "POSITIVE",
    "TEXT",
    "TRUE",
    "UUIDS",
    "ZERO",
    "Float32",
    "Malformed",
    "PackedError",
    "Versionstamp",
    "kind_of",
    "pack_row",
    "read_element",
    "read_row",
    "unpack_row",
]

NULL: Final = 0x00
BYTES: Final = 0x01
TEXT: Final = 0x02
NESTED: Final = 0x05
NEGATIVE: Final = 0x0B
"""A negative integer. The inverted number of its bytes follows."""

ZERO: Final = 0x14
"""The integer zero, and the origin of the codes of integers of up to eight bytes."""

POSITIVE: Final = 0x1D
"""A positive integer. The number of its bytes follows."""

FLOAT: Final = 0x20
DOUBLE: Final = 0x21
FALSE: Final = 0x26
TRUE: Final = 0x27
UUIDS: Final = 0x30
VERSIONSTAMP: Final = 0x33
ESCAPE: Final = 0xFF

_DEEPEST: Final = 100
"""Maximum nesting of tuples. Without a limit, malformed bytes could exhaust the stack."""

_MOST_BYTES: Final = 255
"""Maximum size of an integer: its length is one byte."""

_QUIET: Final = 1 << 22
"""The bit of a quiet 32-bit NaN."""


class PackedError(UsageError):
    """Values that cannot be packed, or bytes that are not a packed tuple of the given types."""

    sqlstate = "22P03"


class Malformed(Exception):
    """Bytes that are not an element."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset = offset
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Float32:
    """A 32-bit float, which the encoding distinguishes from a 64-bit float."""

    value: float
    """The value, rounded to 32 bits by the constructor."""

    def __post_init__(self) -> None:
        try:
            rounded = _widened(_narrowed(self.value))
        except OverflowError:
            raise PackedError(
                f"{self.value!r} does not fit a 32-bit float", hint="Pack the value as a float."
            ) from None
        object.__setattr__(self, "value", rounded)


@dataclass(frozen=True, slots=True, order=True)
class Versionstamp:
    """A commit version of FoundationDB, with a user version."""

    transaction: bytes
    """Ten bytes, assigned by the database."""

    user: int = 0

    def __post_init__(self) -> None:
        if len(self.transaction) != 10 or not 0 <= self.user < 1 << 16:
            raise PackedError(
                f"{self!r} is not a versionstamp",
                hint="Give ten bytes and an integer from 0 to 65535.",
            )


def pack_row(values: Sequence[object]) -> bytes:
    """Encode `values` as a packed tuple.

    Values are None, bytes, str, int, float, Float32, bool, UUID, Versionstamp, and tuples and
    lists of them.

    Raises:
        PackedError: a value has no encoding.
    """
    out = bytearray()
    for element, value in enumerate(values):
        _write(value, out, element, 0)
    return bytes(out)


def unpack_row(data: bytes) -> tuple[object, ...]:
    """Decode a packed tuple. Nested lists become tuples.

    Raises:
        PackedError: `data` is not a packed tuple.
    """
    return read_row(data, "the packed tuple")


def read_row(data: bytes, what: str) -> tuple[object, ...]:
    """Decode a packed tuple. Errors name it `what`."""
    values: list[object] = []
    at = 0
    while at < len(data):
        try:
            value, at = read_element(data, at)
        except Malformed as error:
            raise PackedError(
                f"element {len(values)} of {what} is malformed",
                detail=f"{error.reason} at byte {error.offset} of {len(data)}.",
                hint="Give all bytes of the packed tuple, unchanged.",
            ) from None
        values.append(value)
    return tuple(values)


def read_element(data: bytes, at: int, depth: int = 0) -> tuple[object, int]:
    """Return the element that starts at `at`, and the start of the next one.

    Raises:
        Malformed: the bytes at `at` are not an element.
    """
    code = data[at]
    match code:
        case 0x00:
            return None, at + 1
        case 0x01 | 0x02:
            return _read_string(data, at)
        case 0x05:
            return _read_nested(data, at, depth + 1)
        case _ if NEGATIVE <= code <= POSITIVE:
            return _read_integer(data, at)
        case 0x20:
            (bits,) = struct.unpack(">I", _taken(data, at + 1, 4))
            return Float32(_widened(_restored(bits, 32))), at + 5
        case 0x21:
            (bits,) = struct.unpack(">Q", _taken(data, at + 1, 8))
            return struct.unpack(">d", struct.pack(">Q", _restored(bits, 64)))[0], at + 9
        case 0x26 | 0x27:
            return code == TRUE, at + 1
        case 0x30:
            return UUID(bytes=_taken(data, at + 1, 16)), at + 17
        case 0x33:
            stamp = _taken(data, at + 1, 12)
            return Versionstamp(stamp[:10], int.from_bytes(stamp[10:])), at + 13
        case _:
            raise Malformed(at, f"Type code {code:02x} does not exist")


def kind_of(value: object) -> str:
    """Return the name of the type of an element, for messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "a bool"
        case int():
            return "an integer"
        case float():
            return "a 64-bit float"
        case Float32():
            return "a 32-bit float"
        case str():
            return "text"
        case bytes():
            return "bytes"
        case UUID():
            return "a uuid"
        case tuple():
            return "a nested tuple"
        case _:
            return f"a {type(value).__name__}"


def _write(value: object, out: bytearray, element: int, depth: int) -> None:
    match value:
        case None:
            out += bytes([NULL, ESCAPE]) if depth else bytes([NULL])
        case bytes():
            out += bytes([BYTES]) + value.replace(b"\0", b"\0\xff") + b"\0"
        case str():
            try:
                encoded = value.encode()
            except UnicodeEncodeError:
                raise PackedError(
                    f"element {element} of the tuple contains a lone surrogate",
                    hint="Remove the surrogate, or pack the value as bytes.",
                ) from None
            out += bytes([TEXT]) + encoded.replace(b"\0", b"\0\xff") + b"\0"
        case bool():
            out.append(TRUE if value else FALSE)
        case int():
            _write_integer(value, out, element)
        case float():
            (bits,) = struct.unpack(">Q", struct.pack(">d", value))
            out += struct.pack(">BQ", DOUBLE, _ordered(bits, 64))
        case Float32():
            out += struct.pack(">BI", FLOAT, _ordered(_narrowed(value.value), 32))
        case UUID():
            out += bytes([UUIDS]) + value.bytes
        case Versionstamp():
            out += bytes([VERSIONSTAMP]) + value.transaction + value.user.to_bytes(2)
        case tuple() | list():
            if depth == _DEEPEST:
                raise PackedError(
                    f"element {element} of the tuple is nested more than {_DEEPEST} deep",
                    hint="Pack a flatter value.",
                )
            out.append(NESTED)
            for inner in value:
                _write(inner, out, element, depth + 1)
            out.append(NULL)
        case _:
            raise PackedError(
                f"element {element} of the tuple is a {type(value).__name__},"
                " which has no packed form",
                hint="Convert the value to text, bytes or a number first.",
            )


def _write_integer(value: int, out: bytearray, element: int) -> None:
    size = (value.bit_length() + 7) // 8
    if size > _MOST_BYTES:
        raise PackedError(
            f"element {element} of the tuple is an integer of {size} bytes",
            hint=f"Pack at most {_MOST_BYTES} bytes, or the number as text.",
        )
    if value >= 0:
        out += bytes([ZERO + size] if size <= 8 else [POSITIVE, size])
        out += value.to_bytes(size)
    else:
        out += bytes([ZERO - size] if size <= 8 else [NEGATIVE, size ^ 0xFF])
        out += (value + (1 << 8 * size) - 1).to_bytes(size)


def _read_string(data: bytes, at: int) -> tuple[object, int]:
    end = at + 1
    while (end := data.find(b"\0", end)) >= 0 and data[end + 1 : end + 2] == b"\xff":
        end += 2
    if end < 0:
        raise Malformed(len(data), f"The element at byte {at} does not end")
    held = data[at + 1 : end].replace(b"\0\xff", b"\0")
    if data[at] == BYTES:
        return held, end + 1
    try:
        return held.decode(), end + 1
    except UnicodeDecodeError:
        raise Malformed(at, "Text is not UTF-8") from None


def _read_nested(data: bytes, at: int, depth: int) -> tuple[object, int]:
    if depth > _DEEPEST:
        raise Malformed(at, f"Tuples are nested more than {_DEEPEST} deep")
    inner: list[object] = []
    start, at = at, at + 1
    while at < len(data):
        if data[at] != NULL:
            value, at = read_element(data, at, depth)
            inner.append(value)
        elif data[at + 1 : at + 2] == b"\xff":
            inner.append(None)
            at += 2
        else:
            return tuple(inner), at + 1
    raise Malformed(at, f"The element at byte {start} does not end")


def _read_integer(data: bytes, at: int) -> tuple[int, int]:
    code = data[at]
    negative = code < ZERO
    if code in (NEGATIVE, POSITIVE):
        (size,) = _taken(data, at + 1, 1)
        size ^= 0xFF if negative else 0
        at += 2
    else:
        size = abs(code - ZERO)
        at += 1
    value = int.from_bytes(_taken(data, at, size))
    return value - (1 << 8 * size) + 1 if negative else value, at + size


def _taken(data: bytes, at: int, size: int) -> bytes:
    if len(data) < at + size:
        raise Malformed(len(data), f"{at + size - len(data)} bytes are missing")
    return data[at : at + size]


def _ordered(bits: int, width: int) -> int:
    """Return the bits of a float, mapped to unsigned integers in the order of the floats."""
    top = 1 << (width - 1)
    return bits ^ (2 * top - 1) if bits & top else bits ^ top


def _restored(bits: int, width: int) -> int:
    top = 1 << (width - 1)
    return bits ^ top if bits & top else bits ^ (2 * top - 1)


def _narrowed(value: float) -> int:
    """Return the 32 bits of a float. A NaN keeps the upper bits of its payload."""
    if not math.isnan(value):
        return int(struct.unpack(">I", struct.pack(">f", value))[0])
    (bits,) = struct.unpack(">Q", struct.pack(">d", value))
    payload = bits >> 29 & 0x7F_FFFF
    return int(bits >> 63 << 31 | 0x7F80_0000 | (payload or _QUIET))


def _widened(bits: int) -> float:
    """Return the float of 32 bits. A conversion by struct would quiet a signalling NaN."""
    if bits & 0x7F80_0000 != 0x7F80_0000 or not bits & 0x7F_FFFF:
        return float(struct.unpack(">f", struct.pack(">I", bits))[0])
    wide = bits >> 31 << 63 | 0x7FF << 52 | (bits & 0x7F_FFFF) << 29
    return float(struct.unpack(">d", struct.pack(">Q", wide))[0])
