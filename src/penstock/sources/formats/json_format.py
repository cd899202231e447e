"""JSON format: one object for each record, whose members are columns.

Members without a column are ignored, and missing members are null. Without configured columns there
is one, `data`, which holds the document as it was written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa

from penstock.sources.formats.column_types import Column, columns_of
from penstock.sources.formats.format import Bad, Decoded, blanked, chunks_of
from penstock.sources.formats.json_scanner import find
from penstock.sources.formats.text_values import raw_text, read_column
from penstock.sources.formats.values import NOTHING

__all__ = ["DATA", "JsonFormat"]

DATA: Final = "data"
"""Column of an undivided document."""


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """Records that are JSON documents."""

    columns: tuple[Column, ...] | None = None
    """Columns of the object; None for the document as one column."""

    schema: pa.Schema = field(init=False)

    def __post_init__(self) -> None:
        fields = [(DATA, pa.string())]
        if self.columns is not None:
            fields = [(column.name, column.arrow) for column in self.columns]
        object.__setattr__(self, "schema", pa.schema(fields))

    @classmethod
    def of(cls, said: Mapping[str, Any] | None = None) -> Self:
        """Create the format from type names by column, or without columns.

        Raises:
            UsageError: a type name or a column name is invalid.
        """
        return cls(None if said is None else columns_of(said, what="json format"))

    def decode(self, values: pa.ChunkedArray) -> Decoded:
        """Decode values into rows of `schema`."""
        return self._decode(values, by_walk=True)

    def decode_plainly(self, values: pa.ChunkedArray) -> Decoded:
        """Decode without compiled code: slow, and used by tests for comparison."""
        return self._decode(values, by_walk=False)

    def _decode(self, values: pa.ChunkedArray, *, by_walk: bool) -> Decoded:
        tables: list[pa.Table] = []
        bad: list[Bad] = []
        for first, chunk in chunks_of(values):
            columns, reasons = self._columns(chunk, by_walk=by_walk)
            tables.append(blanked(columns, self.schema, reasons))
            bad += [Bad(first + row, reasons[row]) for row in sorted(reasons)]
        rows = pa.concat_tables(tables) if tables else self.schema.empty_table()
        return Decoded(rows, tuple(bad))

    def _columns(
        self, chunk: pa.Array, *, by_walk: bool
    ) -> tuple[Sequence[pa.Array], dict[int, str]]:
        if self.columns is None:
            cells, bad = find(chunk, None, by_walk=by_walk)
            return [raw_text(cells, 0, cells.ends[0] > 0)], bad
        cells, bad = find(chunk, [column.name for column in self.columns], by_walk=by_walk)
        if bad:
            # The scan may have found some cells before it rejected the record.
            cells.kinds[:, np.fromiter(bad, np.int64)] = NOTHING
        read = []
        for at, column in enumerate(self.columns):
            array, reasons = read_column(cells, at, column)
            read.append(array)
            for row, reason in reasons.items():
                bad.setdefault(row, reason)
        return read, bad
