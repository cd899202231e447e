"""Messages encoded by hand.

`protocol.wire` writes only valid messages. A connector must also withstand invalid messages, and
accept slices that refer to an arena in any order.
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
    """Return a number as a varint: seven bits per byte."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, content: bytes | int) -> bytes:
    """Return a field with bytes or a number."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def message(number: int, content: bytes = b"") -> bytes:
    """Return a TransactionRequest with this field."""
    return field(number, content)


def load(binding: int, arena: bytes, keys: Sequence[Slice]) -> bytes:
    """Return a Load whose keys are these slices of the arena."""
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
    """Return a Store whose columns are these slices of the arena, of any lengths."""
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
    """Return an Open of an encoded MaterializationSpec, valid or not."""
    return message(
        OPEN,
        field(1, spec)
        + (field(2, version.encode()) if version else b"")
        + _fixed32(3, begin)
        + _fixed32(4, end)
        + field(5, b"{}"),
    )


def checkpoint(number: int) -> bytes:
    """Return the runtime checkpoint of transaction `number`.

    A checkpoint is opaque to a connector. These bytes parse as the checkpoint of a runtime, in case
    a connector parses them. They are not valid text, to detect a connector that treats them as
    text.
    """
    source = field(1, b"conformance") + field(2, field(1, number))
    intent = field(1, b"intent") + field(2, b"\xff\x00\xfe" + varint(number))
    return field(1, source) + field(2, intent)


def _slices(number: int, slices: Sequence[Slice]) -> bytes:
    return b"".join(field(number, field(1, begin) + field(2, end)) for begin, end in slices)


def _fixed32(number: int, value: int) -> bytes:
    return varint(number << 3 | 5) + value.to_bytes(4, "little")
