"""Packing of Arrow columns.

Each column becomes elements of one of three kinds, which can measure and write themselves. There
are two passes. The first sums the lengths over the columns of a row and gives the start of each
tuple. In the second, every column writes its elements after the elements of the previous column.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.data.jit import compiled
from penstock.data.packed.cells import Cells, as_binary, present_rows, raw_values
from penstock.data.packed.elements import (
    BYTES,
    DOUBLE,
    FALSE,
    FLOAT,
    NEGATIVE,
    POSITIVE,
    TEXT,
    UUIDS,
    ZERO,
    PackedError,
)

__all__ = ["pack"]

_0: Final = np.uint64(0)
_LOW: Final = np.uint64(0xFF)


def pack(columns: Sequence[pa.Array]) -> pa.Array:
    """Return one packed tuple for each row: binary, or large_binary beyond 2 GiB.

    Raises:
        PackedError: the columns differ in length, or have a type without a packed form.
    """
    if not columns:
        raise PackedError("no columns to pack", hint="Give at least one column.")
    rows = len(columns[0])
    for number, column in enumerate(columns):
        if len(column) != rows:
            raise PackedError(
                f"column {number} has {len(column)} rows and column 0 has {rows}",
                hint="Give columns of one length.",
            )
    elements = [_elements(column, number) for number, column in enumerate(columns)]
    offsets = np.zeros(rows + 1, np.int64)
    for column_elements in elements:
        column_elements.measure(offsets[1:])
    np.cumsum(offsets, out=offsets)
    out = np.empty(offsets[-1], np.uint8)
    cursor = offsets[:-1].copy()
    for column_elements in elements:
        column_elements.write(out, cursor)
    return as_binary(out, offsets)


@dataclass(frozen=True, slots=True)
class _Integers:
    """Integers of up to 128 bits."""

    negative: npt.NDArray[np.bool_]
    high: npt.NDArray[np.uint64]
    low: npt.NDArray[np.uint64]
    """The absolute value is `high << 64 | low`."""

    present: npt.NDArray[np.bool_]

    def measure(self, sizes: npt.NDArray[np.int64]) -> None:
        _measure_integers(self.high, self.low, self.present, sizes)

    def write(self, out: npt.NDArray[np.uint8], cursor: npt.NDArray[np.int64]) -> None:
        _write_integers(self.negative, self.high, self.low, self.present, out, cursor)


@dataclass(frozen=True, slots=True)
class _Strings:
    """Text or bytes, terminated by 00."""

    code: int
    cells: Cells
    present: npt.NDArray[np.bool_]

    def measure(self, sizes: npt.NDArray[np.int64]) -> None:
        _measure_strings(self.cells.data, self.cells.offsets, self.present, sizes)

    def write(self, out: npt.NDArray[np.uint8], cursor: npt.NDArray[np.int64]) -> None:
        held = self.cells
        _write_strings(self.code, held.data, held.offsets, self.present, out, cursor)


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Encoded elements of one width."""

    encoded: npt.NDArray[np.uint8]
    """One row of bytes for each element, with its type code first."""

    present: npt.NDArray[np.bool_]

    def measure(self, sizes: npt.NDArray[np.int64]) -> None:
        sizes += np.where(self.present, self.encoded.shape[1], 1)

    def write(self, out: npt.NDArray[np.uint8], cursor: npt.NDArray[np.int64]) -> None:
        _write_fixed(self.encoded, self.present, out, cursor)


def _elements(column: pa.Array, number: int) -> _Integers | _Strings | _Fixed:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _elements(column.dictionary_decode(), number)
    present = present_rows(column)
    if pa.types.is_null(kind):
        return _Fixed(np.zeros((len(column), 1), np.uint8), present)
    if pa.types.is_boolean(kind):
        return _Fixed(
            raw_values(column, np.bool_).view(np.uint8)[:, None] + np.uint8(FALSE), present
        )
    if pa.types.is_signed_integer(kind):
        signed = raw_values(column, kind.to_pandas_dtype()).astype(np.int64)
        low = np.abs(signed).view(np.uint64)  # abs() of the minimum is itself, as unsigned 2 ** 63.
        return _Integers(signed < 0, np.zeros_like(low), low, present)
    if pa.types.is_unsigned_integer(kind):
        low = raw_values(column, kind.to_pandas_dtype()).astype(np.uint64)
        return _Integers(np.zeros(len(low), np.bool_), np.zeros_like(low), low, present)
    if pa.types.is_decimal128(kind) and kind.scale == 0:
        return _decimals(raw_values(column, np.uint64).reshape(-1, 2), present)
    if pa.types.is_float64(kind):
        return _Fixed(_floats(raw_values(column, np.uint64), DOUBLE), present)
    if pa.types.is_float32(kind):
        return _Fixed(_floats(raw_values(column, np.uint32), FLOAT), present)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _Strings(TEXT, Cells.of(column), present)
    if isinstance(kind, pa.UuidType):
        return _Fixed(
            _with_code(raw_values(column.storage, np.uint8).reshape(-1, 16), UUIDS), present
        )
    if (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    ):
        return _Strings(BYTES, Cells.of(column), present)
    raise PackedError(
        f"column {number} is of type {kind}, which has no packed form",
        detail="Types with a packed form are null, bool, integers, decimal128 of scale 0, float32,"
        " float64, text, bytes and uuid.",
        hint="Cast the column first, for example a timestamp or a decimal to text.",
    )


def _decimals(words: npt.NDArray[np.uint64], present: npt.NDArray[np.bool_]) -> _Integers:
    low, high = words[:, 0], words[:, 1]
    negative = high >> np.uint64(63) == 1
    low_of_negative = ~low + np.uint64(1)
    high_of_negative = ~high + (low_of_negative == 0)
    return _Integers(
        negative,
        np.where(negative, high_of_negative, high),
        np.where(negative, low_of_negative, low),
        present,
    )


def _floats(bits: npt.NDArray[Any], code: int) -> npt.NDArray[np.uint8]:
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    ordered = np.where(bits & top, ~bits, bits ^ top)
    swapped = ordered.astype(ordered.dtype.newbyteorder(">"))
    return _with_code(swapped.view(np.uint8).reshape(len(bits), bits.itemsize), code)


def _with_code(values: npt.NDArray[np.uint8], code: int) -> npt.NDArray[np.uint8]:
    encoded = np.empty((len(values), values.shape[1] + 1), np.uint8)
    encoded[:, 0] = code
    encoded[:, 1:] = values
    return encoded


@compiled
def _bytes_of(word):  # type: ignore[no-untyped-def]
    """Return the number of bytes of a word without leading zeros; 0 for zero."""
    size = 0
    for k in range(8):
        size += word >> np.uint64(8 * k) != _0
    return size


@compiled
def _measure_integers(high, low, present, sizes):  # type: ignore[no-untyped-def]
    for i in range(len(present)):
        size = 1
        if present[i]:
            size += _bytes_of(low[i])
            if high[i]:
                size = 10 + _bytes_of(high[i])
        sizes[i] += size


@compiled
def _write_integers(negative, high, low, present, out, cursor):  # type: ignore[no-untyped-def]
    for i in range(len(present)):
        at = cursor[i]
        if not present[i]:
            out[at] = 0
            cursor[i] = at + 1
            continue
        flip = _LOW if negative[i] else _0
        if high[i]:
            size = _bytes_of(high[i])
            out[at] = NEGATIVE if negative[i] else POSITIVE
            out[at + 1] = np.uint64(size + 8) ^ flip
            at += 2
            for k in range(size):
                out[at + k] = ((high[i] >> np.uint64(8 * (size - 1 - k))) ^ flip) & _LOW
            at += size
            size = 8
        else:
            size = _bytes_of(low[i])
            out[at] = ZERO - size if negative[i] else ZERO + size
            at += 1
        for k in range(size):
            out[at + k] = ((low[i] >> np.uint64(8 * (size - 1 - k))) ^ flip) & _LOW
        cursor[i] = at + size


@compiled
def _measure_strings(data, offsets, present, sizes):  # type: ignore[no-untyped-def]
    for i in range(len(present)):
        size = 1
        if present[i]:
            size = 2 + offsets[i + 1] - offsets[i]
            for k in range(offsets[i], offsets[i + 1]):
                size += data[k] == 0
        sizes[i] += size


@compiled
def _write_strings(code, data, offsets, present, out, cursor):  # type: ignore[no-untyped-def]
    for i in range(len(present)):
        at = cursor[i]
        if present[i]:
            out[at] = code
            at += 1
            for k in range(offsets[i], offsets[i + 1]):
                out[at] = data[k]
                at += 1
                if data[k] == 0:
                    out[at] = 0xFF
                    at += 1
        out[at] = 0
        cursor[i] = at + 1


@compiled
def _write_fixed(encoded, present, out, cursor):  # type: ignore[no-untyped-def]
    width = encoded.shape[1]
    for i in range(len(present)):
        at = cursor[i]
        if present[i]:
            for k in range(width):
                out[at + k] = encoded[i, k]
            cursor[i] = at + width
        else:
            out[at] = 0
            cursor[i] = at + 1
