"""Where in the bytes of records the values of columns are.

A cell is one column of one record: what kind of thing stands there, and from
which byte to which. Finding cells is one step and reading them another, so
that there may be two ways to find them, one fast and one for what the fast
one leaves, and still only one way to read each. Both must find the same.
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
"""The column is missing, or null."""

TRUE: Final = 1
FALSE: Final = 2
INTEGER: Final = 3
"""A number of JSON without point or exponent."""

NUMBER: Final = 4
"""Any other number of JSON."""

STRING: Final = 5
"""Text of JSON, its quotes included."""

ESCAPED: Final = 6
"""The same, with a backslash somewhere."""

ARRAY: Final = 7
OBJECT: Final = 8
PLAIN: Final = 9
"""Text as it stands."""

QUOTED: Final = 10
"""Text between quotes, which are included."""

DOUBLED: Final = 11
"""The same, with a quote in it that stands twice."""

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
    """A record or a value in it is not as it must be; the text says why."""


@dataclass(frozen=True, slots=True)
class Records:
    """The bytes of some records."""

    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    """Record i is `data[offsets[i]:offsets[i + 1]]`."""

    present: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, values: pa.Array) -> "Records":
        """The records of an array of bytes or of text."""
        _, offsets, data = values.buffers()
        bounds = np.zeros(1, np.int64)
        if len(values) and offsets is not None:
            bounds = np.frombuffer(offsets, np.int32, len(values) + 1, 4 * values.offset).astype(
                np.int64
            )
        held = np.frombuffer(data, np.uint8) if data is not None and data.size else _NO_BYTES
        held.flags.writeable = False  # One kind of array for kernels, or they compile twice.
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
    """The cells of some columns: of each, a row of these arrays."""

    data: npt.NDArray[np.uint8]
    kinds: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, records: Records, columns: int) -> "Cells":
        """None found yet."""
        shape = (columns, len(records))
        kinds = np.zeros(shape, np.uint8)
        return cls(records.data, kinds, np.zeros(shape, np.int64), np.zeros(shape, np.int64))

    def put(self, row: int, found: "list[tuple[int, int, int]]") -> None:
        """What was found in one record, a cell for each column."""
        for column, (kind, start, end) in enumerate(found):
            self.kinds[column, row] = kind
            self.starts[column, row] = start
            self.ends[column, row] = end

    def __getitem__(self, cell: tuple[int, int]) -> tuple[int, bytes]:
        """Kind and bytes of a column in a row."""
        start, end = self.starts[cell], self.ends[cell]
        return int(self.kinds[cell]), self.data[start:end].tobytes()


_NO_BYTES: Final[Any] = np.zeros(0, np.uint8)
