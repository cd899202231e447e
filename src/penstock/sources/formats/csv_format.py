"""CSV format: one line for each record, with fields in the order of the columns.

Fields may be in double quotes. They must be if they contain the delimiter, a quote (doubled) or an
end of line. A field without characters and without quotes is null. A record may end with one end of
line.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Self

import numpy as np
import pyarrow as pa

from penstock.data.jit import compiled
from penstock.data.text_kernels.byte_column import ByteColumn
from penstock.data.text_kernels.located_values import (
    DOUBLED,
    NOTHING,
    PLAIN,
    QUOTED,
    LocatedValues,
)
from penstock.errors import UsageError
from penstock.sources.formats.column_reader import read_column
from penstock.sources.formats.column_types import Column, parse_columns
from penstock.sources.formats.format import Bad, Decoded, blanked, chunks_of
from penstock.sources.formats.json_scanner import invalid_utf8

__all__ = ["CsvFormat"]


class _Defect(IntEnum):
    """Reasons to reject a line; for `COUNT`, `fields` holds the number of fields."""

    NONE = 0
    LINES = 1
    UNCLOSED = 2
    AFTER_QUOTE = 3
    STRAY_QUOTE = 4
    COUNT = 5


_REASONS = {
    _Defect.LINES: "it has more than one line",
    _Defect.UNCLOSED: "a quoted field has no end",
    _Defect.AFTER_QUOTE: "the closing quote of a field is followed by other text",
    _Defect.STRAY_QUOTE: "a field without quotes contains a quote",
}


@dataclass(frozen=True, slots=True)
class CsvFormat:
    """Records that are lines of CSV."""

    columns: tuple[Column, ...]
    delimiter: str = ","
    schema: pa.Schema = field(init=False)

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or not self.delimiter.isascii() or self.delimiter in '"\r\n':
            raise UsageError(
                f"delimiter of csv format is {self.delimiter[:10]!r}",
                hint="Use one ASCII character that is neither a double quote nor an end of line.",
            )
        schema = pa.schema([(column.name, column.arrow) for column in self.columns])
        object.__setattr__(self, "schema", schema)

    @classmethod
    def of(cls, columns: Mapping[str, Any] | Sequence[str], *, delimiter: str = ",") -> Self:
        """Create the format from type names by column, or from column names, which are text.

        Raises:
            UsageError: a type name, a column name or the delimiter is invalid.
        """
        if not isinstance(columns, Mapping):
            duplicates = {name for name in columns if list(columns).count(name) > 1}
            if duplicates:
                raise UsageError(
                    f'csv format names column "{min(duplicates)}" twice',
                    hint="Use each name once.",
                )
            columns = dict.fromkeys(columns, "text")
        return cls(parse_columns(columns, owner="csv format"), delimiter)

    def decode(self, values: pa.ChunkedArray) -> Decoded:
        """Decode values into rows of `schema`."""
        tables: list[pa.Table] = []
        bad: list[Bad] = []
        for first, chunk in chunks_of(values):
            columns, reasons = self._columns(chunk)
            tables.append(blanked(columns, self.schema, reasons))
            bad += [Bad(first + row, reasons[row]) for row in sorted(reasons)]
        rows = pa.concat_tables(tables) if tables else self.schema.empty_table()
        return Decoded(rows, tuple(bad))

    def _columns(self, chunk: pa.Array) -> tuple[list[pa.Array], dict[int, str]]:
        records = ByteColumn.of(chunk)
        values = LocatedValues.missing(records, len(self.columns))
        defects = np.zeros(len(records), np.uint8)
        fields = np.zeros(len(records), np.int64)
        _split(
            records.data, records.offsets, records.present, ord(self.delimiter),
            values.kinds, values.starts, values.ends, defects, fields,
        )  # fmt: skip
        bad = invalid_utf8(chunk)
        for row in np.flatnonzero(defects).tolist():
            defect = _Defect(int(defects[row]))
            bad.setdefault(
                row,
                _REASONS[defect]
                if defect in _REASONS
                else f"it has {fields[row]} fields and not {len(self.columns)}",
            )
        if bad:
            values.kinds[:, np.fromiter(bad, np.int64)] = NOTHING
        arrays = []
        for index, column in enumerate(self.columns):
            array, reasons = read_column(values, index, column)
            arrays.append(array)
            for row, reason in reasons.items():
                bad.setdefault(row, reason)
        return arrays, bad


_LINES = int(_Defect.LINES)
_UNCLOSED = int(_Defect.UNCLOSED)
_AFTER_QUOTE = int(_Defect.AFTER_QUOTE)
_STRAY_QUOTE = int(_Defect.STRAY_QUOTE)
_COUNT = int(_Defect.COUNT)


@compiled
def _split(data, offsets, present, delimiter, kinds, starts, ends, defects, fields):  # type: ignore[no-untyped-def]
    columns = kinds.shape[0]
    for row in range(len(present)):
        if not present[row]:
            continue
        at, end = offsets[row], offsets[row + 1]
        if end > at and data[end - 1] == 10:
            end -= 1
        if end > at and data[end - 1] == 13:
            end -= 1
        count = 0
        defect = 0
        while True:
            start = at
            if at < end and data[at] == 34:
                kind = QUOTED
                at += 1
                while at < end:
                    if data[at] == 34:
                        if at + 1 < end and data[at + 1] == 34:
                            kind = DOUBLED
                            at += 1
                        else:
                            break
                    at += 1
                if at >= end:
                    defect = _UNCLOSED
                    break
                at += 1
                if at < end and data[at] != delimiter:
                    defect = _AFTER_QUOTE
                    break
            else:
                while at < end and data[at] != delimiter:
                    if data[at] == 34:
                        defect = _STRAY_QUOTE
                        break
                    if data[at] == 10 or data[at] == 13:
                        defect = _LINES
                        break
                    at += 1
                if defect:
                    break
                kind = NOTHING if at == start else PLAIN
            if count < columns:
                kinds[count, row] = kind
                starts[count, row] = start
                ends[count, row] = at
            count += 1
            if at >= end:
                break
            at += 1
        if not defect and count != columns:
            defect = _COUNT
        defects[row] = defect
        fields[row] = count
