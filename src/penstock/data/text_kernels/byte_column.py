"""Bytes of a column as input of compiled kernels, and Arrow columns from their output."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import InternalError

__all__ = ["ByteColumn", "fixed_width_array", "text_array", "validity_of"]

MAX_BYTES: Final = (1 << 31) - 1
"""Maximum bytes in a text column: the range of its 32-bit offsets."""


@dataclass(frozen=True, slots=True)
class ByteColumn:
    """Bytes of a column, one value for each row."""

    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    """Row i is `data[offsets[i]:offsets[i + 1]]`."""

    present: npt.NDArray[np.bool_]
    """False where the row is null."""

    bitmap: pa.Buffer | None
    """`present` as an Arrow validity bitmap; None if no row is null."""

    @classmethod
    def of(cls, values: pa.Array) -> "ByteColumn":
        """Return the bytes of a binary or string array, large or not."""
        type_ = values.type
        is_large = pa.types.is_large_binary(type_) or pa.types.is_large_string(type_)
        if not (is_large or pa.types.is_binary(type_) or pa.types.is_string(type_)):
            raise InternalError(f"a column of {type_} has no bytes to read")
        _, offsets, data = values.buffers()
        present, bitmap = validity_of(values)
        bounds = np.zeros(1, np.int64)
        if offsets is not None and offsets.size:
            bounds = np.frombuffer(
                offsets,
                np.int64 if is_large else np.int32,
                len(values) + 1,
                values.offset * (8 if is_large else 4),
            ).astype(np.int64)
        bytes_ = np.frombuffer(data, np.uint8) if data is not None and data.size else _NO_BYTES
        bytes_.flags.writeable = False  # One array type for all kernels, else each compiles twice.
        return cls(bytes_, bounds, present, bitmap)

    def __len__(self) -> int:
        return len(self.present)

    def __getitem__(self, row: int) -> bytes:
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()


_NO_BYTES: Final = np.zeros(0, np.uint8)


def validity_of(values: pa.Array) -> tuple[npt.NDArray[np.bool_], pa.Buffer | None]:
    """Return the non-null mask with a byte per row, and as a bitmap with offset 0."""
    validity = values.buffers()[0]
    if validity is None or not values.null_count:
        return np.ones(len(values), np.bool_), None
    packed = np.frombuffer(validity, np.uint8)
    bits = np.unpackbits(packed, count=values.offset + len(values), bitorder="little")
    present = bits[values.offset :].astype(np.bool_)
    return present, pa.py_buffer(np.packbits(present, bitorder="little"))


def fixed_width_array(type_: pa.DataType, values: npt.NDArray[Any], column: ByteColumn) -> pa.Array:
    """Return a fixed-width column that is null where `column` is null."""
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(type_, len(column), [column.bitmap, data])


def text_array(
    type_: pa.DataType,
    data: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    bitmap: pa.Buffer | None,
) -> pa.Array:
    """Return a column of text or bytes."""
    if offsets[-1] > MAX_BYTES:
        raise InternalError(
            f"{offsets[-1]} bytes are too many for one column of {type_}",
            hint="Read fewer rows at once.",
        )
    buffers = [bitmap, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data[: offsets[-1]])]
    return pa.Array.from_buffers(type_, len(offsets) - 1, buffers)
