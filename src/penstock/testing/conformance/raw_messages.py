"""Messages put together by hand.

What `protocol.wire` writes is always well made. A connector must also bear what is
not, and slices that point into an arena in any order.
"""

from collections.abc import Sequence
from typing import Final

__all__ = [
    "checkpoint",
    "field",
    "load",
    "message",
    "open_request",
    "store",
]

OPEN: Final = 1
LOAD: Final = 2
FLUSH: Final = 3
STORE: Final = 4
START_COMMIT: Final = 5
ACKNOWLEDGE: Final = 6

Slice = tuple[int, int]


def varint(value: int) -> bytes:
    """A number, seven bits a byte."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, content: bytes | int) -> bytes:
    """A field that holds bytes, or a number."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def message(number: int, content: bytes = b"") -> bytes:
    """A TransactionRequest of which this field is set."""
    return field(number, content)


def load(binding: int, arena: bytes, keys: Sequence[Slice]) -> bytes:
    """A Load whose keys are these parts of the arena."""
    return message(LOAD, field(1, binding) + field(2, arena) + _slices(3, keys))


def store(
    binding: int,
    arena: bytes,
    keys: Sequence[Slice],
    values: Sequence[Slice],
    docs: Sequence[Slice],
    exists: Sequence[bool],
    deletes: Sequence[bool] = (),
) -> bytes:
    """A Store whose columns are these parts of the arena, and as long as they are."""
    return message(
        STORE,
        field(1, binding)
        + field(2, arena)
        + _slices(3, keys)
        + _slices(4, values)
        + _slices(5, docs)
        + field(6, bytes(exists))
        + (field(100, bytes(deletes)) if deletes else b""),
    )


def open_request(spec: bytes, version: str, begin: int, end: int) -> bytes:
    """An Open of an encoded MaterializationSpec, whatever the rest is."""
    return message(
        OPEN,
        field(1, spec)
        + (field(2, version.encode()) if version else b"")
        + _fixed32(3, begin)
        + _fixed32(4, end)
        + field(5, b"{}"),
    )


def checkpoint(number: int) -> bytes:
    """The runtime checkpoint of transaction `number`.

    To a connector it is any bytes. These parse as what a runtime sends, for one that
    looks, and are not text, for one that thinks they are.
    """
    source = field(1, b"conformance") + field(2, field(1, number))
    intent = field(1, b"intent") + field(2, b"\xff\x00\xfe" + varint(number))
    return field(1, source) + field(2, intent)


def _slices(number: int, slices: Sequence[Slice]) -> bytes:
    return b"".join(field(number, field(1, begin) + field(2, end)) for begin, end in slices)


def _fixed32(number: int, value: int) -> bytes:
    return varint(number << 3 | 5) + value.to_bytes(4, "little")
