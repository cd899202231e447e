"""One tuple at a time, in plain Python: every type, slowly and exactly."""

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
"""An integer below zero, behind the inverted number of its bytes."""

ZERO: Final = 0x14
"""The integer zero, and from which other integers of up to eight bytes are counted."""

POSITIVE: Final = 0x1D
"""An integer above zero, behind the number of its bytes."""

FLOAT: Final = 0x20
DOUBLE: Final = 0x21
FALSE: Final = 0x26
TRUE: Final = 0x27
UUIDS: Final = 0x30
VERSIONSTAMP: Final = 0x33
ESCAPE: Final = 0xFF

_DEEPEST: Final = 100
"""How far tuples may be nested, so that nobody's bytes exhaust the stack."""

_MOST_BYTES: Final = 255
"""What the length of an integer, one byte, can tell."""

_QUIET: Final = 1 << 22
"""The bit that makes a 32-bit NaN a quiet one."""


class PackedError(UsageError):
    """Values that cannot be packed, or bytes that are not the tuple they should be."""

    sqlstate = "22P03"


class Malformed(Exception):
    """Bytes that are not an element."""

    def __init__(self, at: int, why: str) -> None:
        super().__init__(at, why)
        self.at = at
        self.why = why


@dataclass(frozen=True, slots=True)
class Float32:
    """A float of 32 bits, which the encoding tells from one of 64."""

    value: float
    """Rounded to 32 bits when it is made."""

    def __post_init__(self) -> None:
        try:
            kept = _widened(_narrowed(self.value))
        except OverflowError:
            raise PackedError(
                f"{self.value!r} does not fit a float of 32 bits", hint="Pack it as a float."
            ) from None
        object.__setattr__(self, "value", kept)


@dataclass(frozen=True, slots=True, order=True)
class Versionstamp:
    """When FoundationDB committed something, and which part of it is meant."""

    transaction: bytes
    """Ten bytes that the database chose."""

    user: int = 0

    def __post_init__(self) -> None:
        if len(self.transaction) != 10 or not 0 <= self.user < 1 << 16:
            raise PackedError(
                f"{self!r} is not a versionstamp",
                hint="Give ten bytes and a number below 65536.",
            )


def pack_row(values: Sequence[object]) -> bytes:
    """The tuple of `values` as bytes.

    Takes None, bytes, str, int, float, Float32, bool, UUID, Versionstamp, and
    tuples and lists of them.

    Raises:
        PackedError: one of them has no encoding.
    """
    out = bytearray()
    for element, value in enumerate(values):
        _write(value, out, element, 0)
    return bytes(out)


def unpack_row(data: bytes) -> tuple[object, ...]:
    """The values that were packed, nested ones as tuples.

    Raises:
        PackedError: `data` is not a packed tuple.
    """
    return read_row(data, "the packed tuple")


def read_row(data: bytes, what: str) -> tuple[object, ...]:
    """The values of a tuple that an error calls `what`."""
    values: list[object] = []
    at = 0
    while at < len(data):
        try:
            value, at = read_element(data, at)
        except Malformed as error:
            raise PackedError(
                f"element {len(values)} of {what} is malformed",
                detail=f"{error.why} at byte {error.at} of {len(data)}.",
                hint="Give the bytes as they were packed, whole.",
            ) from None
        values.append(value)
    return tuple(values)


def read_element(data: bytes, at: int, depth: int = 0) -> tuple[object, int]:
    """The element that starts at `at`, and where the next one does.

    Raises:
        Malformed: there is none.
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
            raise Malformed(at, f"There is no type {code:02x}, as it stands")


def kind_of(value: object) -> str:
    """What to call an element in a message."""
    match value:
        case None:
            return "null"
        case bool():
            return "a bool"
        case int():
            return "an integer"
        case float():
            return "a float of 64 bits"
        case Float32():
            return "a float of 32 bits"
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
                    f"element {element} of the tuple has characters that are half a surrogate pair",
                    hint="Pack it as bytes, or mend the text.",
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
                hint="Convert it to text, bytes or a number first.",
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
        raise Malformed(len(data), f"What starts at byte {at} has no end")
    held = data[at + 1 : end].replace(b"\0\xff", b"\0")
    if data[at] == BYTES:
        return held, end + 1
    try:
        return held.decode(), end + 1
    except UnicodeDecodeError:
        raise Malformed(at, "Text is not UTF-8, as it stands") from None


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
    raise Malformed(at, f"What starts at byte {start} has no end")


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
    """The bits of a float, so that they compare as the number does."""
    top = 1 << (width - 1)
    return bits ^ (2 * top - 1) if bits & top else bits ^ top


def _restored(bits: int, width: int) -> int:
    top = 1 << (width - 1)
    return bits ^ top if bits & top else bits ^ (2 * top - 1)


def _narrowed(value: float) -> int:
    """The 32 bits of a float; of a NaN, the upper bits of what it carries."""
    if not math.isnan(value):
        return int(struct.unpack(">I", struct.pack(">f", value))[0])
    (bits,) = struct.unpack(">Q", struct.pack(">d", value))
    carried = bits >> 29 & 0x7F_FFFF
    return int(bits >> 63 << 31 | 0x7F80_0000 | (carried or _QUIET))


def _widened(bits: int) -> float:
    """The same number; converting a signalling NaN as such would silence it."""
    if bits & 0x7F80_0000 != 0x7F80_0000 or not bits & 0x7F_FFFF:
        return float(struct.unpack(">f", struct.pack(">I", bits))[0])
    wide = bits >> 31 << 63 | 0x7FF << 52 | (bits & 0x7F_FFFF) << 29
    return float(struct.unpack(">d", struct.pack(">Q", wide))[0])
