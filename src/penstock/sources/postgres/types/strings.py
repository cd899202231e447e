"""Text, bytea and uuid."""

from typing import Final

import numpy as np
import pyarrow as pa

from penstock.data.jit import compiled
from penstock.sources.postgres.types.cells import (
    READ,
    Cells,
    Refused,
    Why,
    accept,
    strings,
)

__all__ = ["parse_bytes", "parse_strings", "print_bytes", "receive_bytes", "receive_uuids"]

_MALFORMED: Final = int(Why.MALFORMED)
_DIGITS: Final = np.frombuffer(b"0123456789abcdef", np.uint8)
_NIBBLES: Final = np.array(
    [b"0123456789abcdef".find(bytes([byte])) for byte in range(256)], np.int16
)
"""Value of each byte as a hexadecimal digit; -1 if it is no digit."""


def parse_strings(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast the bytes unchanged; they must be UTF-8."""
    try:
        return values.cast(kind)
    except pa.ArrowInvalid:
        for row, cell in enumerate(values.cast(pa.large_binary()).to_pylist()):
            if cell is not None and not _readable(cell):
                raise Refused(row, Why.ENCODING) from None
        raise


def receive_bytes(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast the bytes unchanged."""
    return values.cast(kind)


def parse_bytes(values: pa.Array, kind: pa.DataType) -> pa.Array:
    r"""Parse hexadecimal digits after `\x`."""
    cells = Cells.of(values)
    out = np.empty(int(cells.offsets[-1] - cells.offsets[0]) // 2, np.uint8)
    offsets = np.empty(len(cells) + 1, np.int64)
    accept(_from_hex(cells.data, cells.offsets, cells.present, out, offsets))
    return strings(kind, out, offsets, cells.bitmap)


def print_bytes(values: pa.Array) -> pa.Array:
    r"""Print hexadecimal digits after `\x`."""
    cells = Cells.of(values)
    size = 2 * int(cells.offsets[-1] - cells.offsets[0]) + 2 * len(cells)
    out = np.empty(size, np.uint8)
    offsets = np.empty(len(cells) + 1, np.int64)
    _to_hex(cells.data, cells.offsets, cells.present, out, offsets)
    return strings(pa.string(), out, offsets, cells.bitmap)


def receive_uuids(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert sixteen bytes to the server's text form."""
    cells = Cells.of(values)
    out = np.empty(36 * len(cells), np.uint8)
    offsets = np.empty(len(cells) + 1, np.int64)
    accept(_uuids(cells.data, cells.offsets, cells.present, out, offsets))
    return strings(kind, out, offsets, cells.bitmap)


def _readable(cell: bytes) -> bool:
    try:
        cell.decode()
    except UnicodeDecodeError:
        return False
    return True


@compiled
def _from_hex(data, offsets, present, out, bounds):  # type: ignore[no-untyped-def]
    to = 0
    for i in range(len(present)):
        bounds[i] = to
        if not present[i]:
            continue
        at, end = offsets[i], offsets[i + 1]
        if end - at < 2 or (end - at) % 2 or data[at] != 92 or data[at + 1] != 120:
            return i, _MALFORMED
        for k in range(at + 2, end, 2):
            byte = (_NIBBLES[data[k]] << 4) | _NIBBLES[data[k + 1]]
            if byte < 0:
                return i, _MALFORMED
            out[to] = byte
            to += 1
    bounds[len(present)] = to
    return READ


@compiled
def _to_hex(data, offsets, present, out, bounds):  # type: ignore[no-untyped-def]
    to = 0
    for i in range(len(present)):
        bounds[i] = to
        if not present[i]:
            continue
        out[to] = 92
        out[to + 1] = 120
        to += 2
        for k in range(offsets[i], offsets[i + 1]):
            out[to] = _DIGITS[data[k] >> 4]
            out[to + 1] = _DIGITS[data[k] & 15]
            to += 2
    bounds[len(present)] = to


@compiled
def _uuids(data, offsets, present, out, bounds):  # type: ignore[no-untyped-def]
    to = 0
    for i in range(len(present)):
        bounds[i] = to
        if not present[i]:
            continue
        at = offsets[i]
        if offsets[i + 1] - at != 16:
            return i, _MALFORMED
        for k in range(16):
            if k == 4 or k == 6 or k == 8 or k == 10:
                out[to] = 45
                to += 1
            out[to] = _DIGITS[data[at + k] >> 4]
            out[to + 1] = _DIGITS[data[at + k] & 15]
            to += 2
    bounds[len(present)] = to
    return READ
