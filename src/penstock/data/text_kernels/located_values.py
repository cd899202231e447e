"""Locations of column values in the bytes of records.

A value has a kind, its first byte and its end. Locating values and converting them are separate
steps. Two functions locate values, a fast one and a complete one for the records that the fast one
skips. Only one function converts each type. Both locators must find the same values.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.data.text_kernels.byte_column import ByteColumn

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
    "InvalidValue",
    "LocatedValues",
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


class InvalidValue(Exception):
    """Error for an invalid record or value; the text is the reason."""


@dataclass(frozen=True, slots=True)
class LocatedValues:
    """Values of several columns; each array has one row for each column."""

    data: npt.NDArray[np.uint8]
    kinds: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @classmethod
    def missing(cls, records: ByteColumn, columns: int) -> "LocatedValues":
        """Return values that are all missing."""
        shape = (columns, len(records))
        kinds = np.zeros(shape, np.uint8)
        return cls(records.data, kinds, np.zeros(shape, np.int64), np.zeros(shape, np.int64))

    def put(self, row: int, values: "list[tuple[int, int, int]]") -> None:
        """Set kind, start and end of the values of one record, one for each column."""
        for column, (kind, start, end) in enumerate(values):
            self.kinds[column, row] = kind
            self.starts[column, row] = start
            self.ends[column, row] = end

    def __getitem__(self, place: tuple[int, int]) -> tuple[int, bytes]:
        """Return the kind and the bytes of a value, given column and row."""
        start, end = self.starts[place], self.ends[place]
        return int(self.kinds[place]), self.data[start:end].tobytes()
