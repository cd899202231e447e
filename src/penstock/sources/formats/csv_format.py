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
from penstock.errors import UsageError
from penstock.sources.formats.column_types import Column, columns_of
from penstock.sources.formats.format import Bad, Decoded, blanked, chunks_of
from penstock.sources.formats.json_scanner import not_utf8
from penstock.sources.formats.text_values import read_column
from penstock.sources.formats.values import DOUBLED, NOTHING, PLAIN, QUOTED, Cells, Records

__all__ = ["CsvFormat"]


class _Why(IntEnum):
    """Reasons to reject a line; for `COUNT`, `fields` holds the number of fields."""

    NOTHING = 0
    LINES = 1
    UNCLOSED = 2
    AFTER_QUOTE = 3
    STRAY_QUOTE = 4
    COUNT = 5


_REASONS = {
    _Why.LINES: "it has more than one line",
    _Why.UNCLOSED: "a quoted field has no end",
    _Why.AFTER_QUOTE: "something follows the closing quote of a field",
    _Why.STRAY_QUOTE: "a quote stands inside a field that is not quoted",
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
                hint="Give one ASCII character that is neither a double quote nor an end of line.",
            )
        schema = pa.schema([(column.name, column.arrow) for column in self.columns])
        object.__setattr__(self, "schema", schema)

    @classmethod
    def of(cls, said: Mapping[str, Any] | Sequence[str], *, delimiter: str = ",") -> Self:
        """Create the format from type names by column, or from column names, which are text.

        Raises:
            UsageError: a type name, a column name or the delimiter is invalid.
        """
        if not isinstance(said, Mapping):
            if twice := sorted({name for name in said if list(said).count(name) > 1}):
                raise UsageError(
                    f'csv format names column "{twice[0]}" twice', hint="Give each its own name."
                )
            said = dict.fromkeys(said, "text")
        return cls(columns_of(said, what="csv format"), delimiter)

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
        records = Records.of(chunk)
        cells = Cells.empty(records, len(self.columns))
        whys = np.zeros(len(records), np.uint8)
        fields = np.zeros(len(records), np.int64)
        _split(
            records.data, records.offsets, records.present, ord(self.delimiter),
            cells.kinds, cells.starts, cells.ends, whys, fields,
        )  # fmt: skip
        bad = not_utf8(chunk)
        for row in np.flatnonzero(whys).tolist():
            why = _Why(int(whys[row]))
            bad.setdefault(
                row,
                _REASONS[why]
                if why in _REASONS
                else f"it has {fields[row]} fields and not {len(self.columns)}",
            )
        if bad:
            cells.kinds[:, np.fromiter(bad, np.int64)] = NOTHING
        read = []
        for at, column in enumerate(self.columns):
            array, reasons = read_column(cells, at, column)
            read.append(array)
            for row, reason in reasons.items():
                bad.setdefault(row, reason)
        return read, bad


_LINES = int(_Why.LINES)
_UNCLOSED = int(_Why.UNCLOSED)
_AFTER_QUOTE = int(_Why.AFTER_QUOTE)
_STRAY_QUOTE = int(_Why.STRAY_QUOTE)
_COUNT = int(_Why.COUNT)


@compiled
def _split(data, offsets, present, delimiter, kinds, starts, ends, whys, fields):  # type: ignore[no-untyped-def]
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
        why = 0
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
                    why = _UNCLOSED
                    break
                at += 1
                if at < end and data[at] != delimiter:
                    why = _AFTER_QUOTE
                    break
            else:
                while at < end and data[at] != delimiter:
                    if data[at] == 34:
                        why = _STRAY_QUOTE
                        break
                    if data[at] == 10 or data[at] == 13:
                        why = _LINES
                        break
                    at += 1
                if why:
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
        if not why and count != columns:
            why = _COUNT
        whys[row] = why
        fields[row] = count
