"""Columns of bytes as input of compiled kernels, and typed columns from their output.

A cell contains the bytes of one value: the server's text output, or a field of binary
COPY. A kernel takes `data`, `offsets` and `present`, and returns `(row, why)`: `(-1, 0)`
if it read every cell, else the first cell it rejects and the reason. A kernel rejects a
value that it cannot represent exactly. No kernel rounds or guesses.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import InternalError

__all__ = ["READ", "Cells", "Refused", "Why", "accept", "bits_of", "numbers", "strings"]

MOST_BYTES: Final = (1 << 31) - 1
"""Maximum bytes in a text column: the range of its 32-bit offsets."""


class Why(IntEnum):
    """Reason of a kernel to reject a cell."""

    NOTHING = 0
    MALFORMED = 1
    """Text that the server does not print under the pinned session settings."""

    BEYOND = 2
    """A timestamp outside the range of the column."""

    NOT_FINITE = 3
    """NaN or an infinity, in a decimal column."""

    SCALE = 4
    """More or fewer digits than the column declares."""

    ENCODING = 5
    """Text that is not UTF-8."""


READ: Final = (-1, int(Why.NOTHING))


class Refused(Exception):
    """A cell has no exact representation in the column."""

    def __init__(self, row: int, why: Why) -> None:
        super().__init__(row, why)
        self.row = row
        self.why = why


@dataclass(frozen=True, slots=True)
class Cells:
    """Bytes of a column."""

    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    """Row i is `data[offsets[i]:offsets[i + 1]]`."""

    present: npt.NDArray[np.bool_]
    """False where the row is null."""

    bitmap: pa.Buffer | None
    """`present` as an Arrow validity bitmap; None if no row is null."""

    @classmethod
    def of(cls, values: pa.Array) -> "Cells":
        """Return the cells of a binary or string array, large or not."""
        kind = values.type
        large = pa.types.is_large_binary(kind) or pa.types.is_large_string(kind)
        if not (large or pa.types.is_binary(kind) or pa.types.is_string(kind)):
            raise InternalError(f"a column of {kind} has no cells to read")
        _, offsets, data = values.buffers()
        present, bitmap = bits_of(values)
        width = 8 if large else 4
        if offsets is None or offsets.size == 0:
            bounds = np.zeros(1, np.int64)
        else:
            raw = np.frombuffer(offsets, np.int64 if large else np.int32, len(values) + 1,
                                values.offset * width)  # fmt: skip
            bounds = raw.astype(np.int64)
        held = np.frombuffer(data, np.uint8) if data is not None and data.size else _NO_BYTES
        held.flags.writeable = False  # One array type for all kernels, else each compiles twice.
        return cls(held, bounds, present, bitmap)

    def __len__(self) -> int:
        return len(self.present)

    def __getitem__(self, row: int) -> bytes:
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()


_NO_BYTES: Final = np.zeros(0, np.uint8)


def accept(answer: tuple[int, int]) -> None:
    """Check the answer of a kernel.

    Raises:
        Refused: the kernel rejected a cell.
    """
    row, why = answer
    if row >= 0:
        raise Refused(int(row), Why(why))


def bits_of(values: pa.Array) -> tuple[npt.NDArray[np.bool_], pa.Buffer | None]:
    """Return the non-null mask with a byte per row, and as a bitmap with offset 0."""
    validity = values.buffers()[0]
    if validity is None or not values.null_count:
        return np.ones(len(values), np.bool_), None
    packed = np.frombuffer(validity, np.uint8)
    bits = np.unpackbits(packed, count=values.offset + len(values), bitorder="little")
    present = bits[values.offset :].astype(np.bool_)
    return present, pa.py_buffer(np.packbits(present, bitorder="little"))


def numbers(kind: pa.DataType, found: npt.NDArray[Any], cells: Cells) -> pa.Array:
    """Return a fixed-width column that is null where the cells are null."""
    data = pa.py_buffer(np.ascontiguousarray(found))
    return pa.Array.from_buffers(kind, len(cells), [cells.bitmap, data])


def strings(
    kind: pa.DataType,
    data: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    bitmap: pa.Buffer | None,
) -> pa.Array:
    """Return a column of text or bytes."""
    if offsets[-1] > MOST_BYTES:
        raise InternalError(
            f"{offsets[-1]} bytes are too many for one column of {kind}",
            hint="Read fewer rows at once.",
        )
    buffers = [bitmap, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data[: offsets[-1]])]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers)
