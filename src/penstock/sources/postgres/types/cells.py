"""Columns of bytes as input of compiled kernels, and typed columns from their output.

A cell contains the bytes of one value: the server's text output, or a field of binary
COPY. A kernel takes `data`, `offsets` and `present`, and returns `(row, why)`: `(-1, 0)`
if it read every cell, else the first cell it rejects and the reason. A kernel rejects a
value that it cannot represent exactly. No kernel rounds or guesses.
"""

from enum import IntEnum
from typing import Final

from penstock.data.text_kernels.byte_column import ByteColumn as Cells
from penstock.data.text_kernels.byte_column import fixed_width_array as numbers
from penstock.data.text_kernels.byte_column import text_array as strings
from penstock.data.text_kernels.byte_column import validity_of as bits_of

__all__ = ["READ", "Cells", "Refused", "Why", "accept", "bits_of", "numbers", "strings"]


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


def accept(answer: tuple[int, int]) -> None:
    """Check the answer of a kernel.

    Raises:
        Refused: the kernel rejected a cell.
    """
    row, why = answer
    if row >= 0:
        raise Refused(int(row), Why(why))
