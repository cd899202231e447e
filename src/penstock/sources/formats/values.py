"""Cells: locations of column values in the bytes of records.

A cell is one column of one record: the kind of its value, its first byte and its end. Locating
cells and reading them are separate steps. Two functions locate cells, a fast one and a complete one
for the records that the fast one skips. Only one function reads each type. Both locators must find
the same cells.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = [
    "ARRAY",
    "DOUBLED",
    "ESCAPED",
    "FALSE",
    "INTEGER",
    "KIND_NAMES",
    "NOTHING",
    "NUMBER",
    "OBJECT",
    "PLAIN",
    "QUOTED",
    "STRING",
    "TRUE",
    "Cells",
    "Records",
    "Unfit",
]

NOTHING: Final = 0
"""The column is missing or null."""

TRUE: Final = 1
FALSE: Final = 2
INTEGER: Final = 3
"""JSON number without point or exponent."""

NUMBER: Final = 4
"""Any other JSON number."""

STRING: Final = 5
"""JSON string, including its quotes."""

ESCAPED: Final = 6
"""JSON string with at least one backslash, including its quotes."""

ARRAY: Final = 7
OBJECT: Final = 8
PLAIN: Final = 9
"""Text without quotes."""

QUOTED: Final = 10
"""Quoted text, including its quotes."""

DOUBLED: Final = 11
"""Quoted text with at least one doubled quote, including its quotes."""

KIND_NAMES: Final = {
    NOTHING: "null",
    TRUE: "a boolean",
    FALSE: "a boolean",
    INTEGER: "a number",
    NUMBER: "a number",
    STRING: "text",
    ESCAPED: "text",
    ARRAY: "an array",
    OBJECT: "an object",
    PLAIN: "text",
    QUOTED: "text",
    DOUBLED: "text",
}


class Unfit(Exception):
    """Error for an invalid record or value; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Records:
    """Bytes of several records."""

    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    """Record i is `data[offsets[i]:offsets[i + 1]]`."""

    present: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, values: pa.Array) -> "Records":
        """Return the records of a binary or string array."""
        _, offsets, data = values.buffers()
        bounds = np.zeros(1, np.int64)
        if len(values) and offsets is not None:
            bounds = np.frombuffer(offsets, np.int32, len(values) + 1, 4 * values.offset).astype(
                np.int64
            )
        held = np.frombuffer(data, np.uint8) if data is not None and data.size else _NO_BYTES
        held.flags.writeable = False  # One array type: kernels compile once for each.
        present = np.ones(len(values), np.bool_)
        if values.null_count:
            present = values.is_valid().to_numpy(zero_copy_only=False)
        return cls(held, bounds, present)

    def __len__(self) -> int:
        return len(self.present)

    def __getitem__(self, row: int) -> bytes:
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of several columns; each array has one row for each column."""

    data: npt.NDArray[np.uint8]
    kinds: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, records: Records, columns: int) -> "Cells":
        """Return cells that are all missing."""
        shape = (columns, len(records))
        kinds = np.zeros(shape, np.uint8)
        return cls(records.data, kinds, np.zeros(shape, np.int64), np.zeros(shape, np.int64))

    def put(self, row: int, found: "list[tuple[int, int, int]]") -> None:
        """Set the cells of one record, one for each column."""
        for column, (kind, start, end) in enumerate(found):
            self.kinds[column, row] = kind
            self.starts[column, row] = start
            self.ends[column, row] = end

    def __getitem__(self, cell: tuple[int, int]) -> tuple[int, bytes]:
        """Return the kind and the bytes of a cell, given column and row."""
        start, end = self.starts[cell], self.ends[cell]
        return int(self.kinds[cell]), self.data[start:end].tobytes()


_NO_BYTES: Final[Any] = np.zeros(0, np.uint8)
