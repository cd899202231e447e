"""JSON format: one object for each record, whose members are columns.

Members without a column are ignored, and missing members are null. Without configured columns there
is one, `data`, which holds the document as it was written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa

from penstock.data.text_kernels.located_values import NOTHING
from penstock.sources.formats.column_reader import raw_text, read_column
from penstock.sources.formats.column_types import Column, parse_columns
from penstock.sources.formats.format import Bad, Decoded, blanked, chunks_of
from penstock.sources.formats.json_scanner import locate_values

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
    def of(cls, columns: Mapping[str, Any] | None = None) -> Self:
        """Create the format from type names by column, or without columns.

        Raises:
            UsageError: a type name or a column name is invalid.
        """
        return cls(None if columns is None else parse_columns(columns, owner="json format"))

    def decode(self, values: pa.ChunkedArray) -> Decoded:
        """Decode values into rows of `schema`."""
        return self._decode(values, use_scan=True)

    def decode_in_python(self, values: pa.ChunkedArray) -> Decoded:
        """Decode without the compiled scan: slow, for the comparison in tests."""
        return self._decode(values, use_scan=False)

    def _decode(self, values: pa.ChunkedArray, *, use_scan: bool) -> Decoded:
        tables: list[pa.Table] = []
        bad: list[Bad] = []
        for first, chunk in chunks_of(values):
            columns, reasons = self._columns(chunk, use_scan=use_scan)
            tables.append(blanked(columns, self.schema, reasons))
            bad += [Bad(first + row, reasons[row]) for row in sorted(reasons)]
        rows = pa.concat_tables(tables) if tables else self.schema.empty_table()
        return Decoded(rows, tuple(bad))

    def _columns(
        self, chunk: pa.Array, *, use_scan: bool
    ) -> tuple[Sequence[pa.Array], dict[int, str]]:
        if self.columns is None:
            located, bad = locate_values(chunk, None, use_scan=use_scan)
            return [raw_text(located, 0, located.ends[0] > 0)], bad
        names = [column.name for column in self.columns]
        located, bad = locate_values(chunk, names, use_scan=use_scan)
        if bad:
            # The scan may have located some values before it rejected the record.
            located.kinds[:, np.fromiter(bad, np.int64)] = NOTHING
        arrays = []
        for index, column in enumerate(self.columns):
            array, reasons = read_column(located, index, column)
            arrays.append(array)
            for row, reason in reasons.items():
                bad.setdefault(row, reason)
        return arrays, bad
