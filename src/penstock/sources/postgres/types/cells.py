"""Columns of bytes, as compiled code walks them, and typed columns made of what it found.

A cell is one row's bytes: text as the server prints it, or a field of binary
COPY. Kernels take `data`, `offsets` and `present` and answer `(row, why)`:
`(-1, 0)` if they read every cell, else the first that they refuse. A kernel
that cannot keep a value as it is refuses it; none rounds or guesses.
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
"""What the offsets of a column of text reach."""


class Why(IntEnum):
    """What a kernel has against a cell."""

    NOTHING = 0
    MALFORMED = 1
    """It is not what the server prints under our settings."""

    BEYOND = 2
    """A moment further away than the column can tell."""

    NOT_FINITE = 3
    """NaN or an infinity, in a column of decimals."""

    SCALE = 4
    """More or fewer digits than were declared."""

    ENCODING = 5
    """Text that is not UTF-8."""


READ: Final = (-1, int(Why.NOTHING))


class Refused(Exception):
    """A cell cannot be kept as it is."""

    def __init__(self, row: int, why: Why) -> None:
        super().__init__(row, why)
        self.row = row
        self.why = why


@dataclass(frozen=True, slots=True)
class Cells:
    """The bytes of a column."""

    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    """Row i is `data[offsets[i]:offsets[i + 1]]`."""

    present: npt.NDArray[np.bool_]
    """False where the row is null."""

    bitmap: pa.Buffer | None
    """The same as Arrow has it; none if no row is null."""

    @classmethod
    def of(cls, values: pa.Array) -> "Cells":
        """The cells of a binary or string array, large or not."""
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
        held.flags.writeable = False  # One kind of array for kernels, or they compile twice.
        return cls(held, bounds, present, bitmap)

    def __len__(self) -> int:
        return len(self.present)

    def __getitem__(self, row: int) -> bytes:
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()


_NO_BYTES: Final = np.zeros(0, np.uint8)


def accept(answer: tuple[int, int]) -> None:
    """Go on if a kernel read every cell.

    Raises:
        Refused: it did not.
    """
    row, why = answer
    if row >= 0:
        raise Refused(int(row), Why(why))


def bits_of(values: pa.Array) -> tuple[npt.NDArray[np.bool_], pa.Buffer | None]:
    """Which rows are not null, a byte for each, and packed from the first bit on."""
    validity = values.buffers()[0]
    if validity is None or not values.null_count:
        return np.ones(len(values), np.bool_), None
    packed = np.frombuffer(validity, np.uint8)
    bits = np.unpackbits(packed, count=values.offset + len(values), bitorder="little")
    present = bits[values.offset :].astype(np.bool_)
    return present, pa.py_buffer(np.packbits(present, bitorder="little"))


def numbers(kind: pa.DataType, found: npt.NDArray[Any], cells: Cells) -> pa.Array:
    """A column of a fixed width, null where the cells are."""
    data = pa.py_buffer(np.ascontiguousarray(found))
    return pa.Array.from_buffers(kind, len(cells), [cells.bitmap, data])


def strings(
    kind: pa.DataType,
    data: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    bitmap: pa.Buffer | None,
) -> pa.Array:
    """A column of text or bytes."""
    if offsets[-1] > MOST_BYTES:
        raise InternalError(
            f"{offsets[-1]} bytes are too many for one column of {kind}",
            hint="Read fewer rows at once.",
        )
    buffers = [bitmap, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data[: offsets[-1]])]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers)
