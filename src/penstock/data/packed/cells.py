"""Buffers of Arrow columns as numpy arrays, for compiled code."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.data.packed.elements import PackedError

__all__ = ["MOST_BYTES", "Cells", "as_binary", "packed_cells", "present_rows", "raw_values"]

MOST_BYTES: Final = (1 << 31) - 1
"""Maximum size of the data of a binary or string column with 32-bit offsets."""


@dataclass(frozen=True, slots=True)
class Cells:
    """Binary values, one for each row."""

    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    """Row i is `data[offsets[i]:offsets[i + 1]]`."""

    @classmethod
    def of(cls, values: pa.Array) -> "Cells":
        """Return the values of a text, binary or fixed-size binary column."""
        kind, rows = values.type, len(values)
        data = values.buffers()[-1]
        held = np.zeros(0, np.uint8) if not data else np.frombuffer(data, np.uint8)
        if pa.types.is_fixed_size_binary(kind):
            starts = np.arange(values.offset, values.offset + rows + 1, dtype=np.int64)
            return cls(_frozen(held), _frozen(starts * kind.byte_width))
        large = pa.types.is_large_binary(kind) or pa.types.is_large_string(kind)
        if not rows:
            return cls(_frozen(held), _frozen(np.zeros(1, np.int64)))
        bounds = np.frombuffer(
            values.buffers()[1],
            np.int64 if large else np.int32,
            rows + 1,
            values.offset * (8 if large else 4),
        )
        return cls(_frozen(held), _frozen(bounds.astype(np.int64)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> bytes:
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()


def packed_cells(packed: pa.Array) -> Cells:
    """Return the packed tuples of a column, one in each row.

    Raises:
        PackedError: the column is not binary, or contains nulls.
    """
    if not (pa.types.is_binary(packed.type) or pa.types.is_large_binary(packed.type)):
        raise PackedError(
            f"column of type {packed.type} does not hold packed tuples",
            hint="Give a column of type binary or large_binary.",
        )
    if packed.null_count:
        row = int(np.argmin(present_rows(packed)))
        raise PackedError(
            f"row {row} is null, not a packed tuple", hint="Drop nulls before unpacking."
        )
    return Cells.of(packed)


def present_rows(values: pa.Array) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows that are not null."""
    if pa.types.is_null(values.type):
        return _frozen(np.zeros(len(values), np.bool_))
    if not values.null_count:
        return _frozen(np.ones(len(values), np.bool_))
    return _frozen(_bits(values.buffers()[0], values.offset, len(values)))


def raw_values(values: pa.Array, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return the values of a fixed-width column. Values of null rows are arbitrary."""
    if pa.types.is_boolean(values.type):
        return _bits(values.buffers()[1], values.offset, len(values))
    if not len(values):
        return np.zeros(0, dtype)
    width = values.type.byte_width
    kind = np.dtype(dtype)
    count = width // kind.itemsize * len(values)
    return _frozen(np.frombuffer(values.buffers()[1], kind, count, values.offset * width))


def as_binary(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> pa.Array:
    """Return a binary column; large_binary, if the data exceeds 2 GiB."""
    kind, bounds = pa.large_binary(), offsets
    if offsets[-1] <= MOST_BYTES:
        kind, bounds = pa.binary(), offsets.astype(np.int32)
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(data[: offsets[-1]])]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers)


def _bits(buffer: pa.Buffer | None, offset: int, rows: int) -> npt.NDArray[np.bool_]:
    if buffer is None:
        return np.zeros(rows, np.bool_)
    packed = np.frombuffer(buffer, np.uint8)[offset // 8 : (offset + rows + 7) // 8]
    bits = np.unpackbits(packed, count=offset % 8 + rows, bitorder="little")
    return bits[offset % 8 :].view(np.bool_)


def _frozen(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    # Kernels are compiled for each kind of array, so all arrays have one kind.
    aligned = np.require(values, requirements=["C", "A"])
    aligned.flags.writeable = False
    return aligned
