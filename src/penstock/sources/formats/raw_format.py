"""Text and bytes formats: records as one column."""

from dataclasses import dataclass, field

import pyarrow as pa

from penstock.sources.formats.column_types import check_columns
from penstock.sources.formats.format import Bad, Decoded, blanked, chunks_of
from penstock.sources.formats.json_scanner import invalid_utf8

__all__ = ["BytesFormat", "TextFormat"]


@dataclass(frozen=True, slots=True)
class TextFormat:
    """Records that are UTF-8 text, as one column."""

    column: str = "text"
    schema: pa.Schema = field(init=False)

    def __post_init__(self) -> None:
        schema = pa.schema([(self.column, pa.string())])
        object.__setattr__(self, "schema", check_columns(schema, owner="text format"))

    def decode(self, values: pa.ChunkedArray) -> Decoded:
        """Decode values into rows of `schema`; a record that is not UTF-8 is bad."""
        tables: list[pa.Table] = []
        bad: list[Bad] = []
        for first, chunk in chunks_of(values):
            reasons = invalid_utf8(chunk)
            good = blanked([chunk], pa.schema([("", chunk.type)]), reasons)
            tables.append(good.rename_columns(self.schema.names).cast(self.schema))
            bad += [Bad(first + row, reasons[row]) for row in sorted(reasons)]
        rows = pa.concat_tables(tables) if tables else self.schema.empty_table()
        return Decoded(rows, tuple(bad))


@dataclass(frozen=True, slots=True)
class BytesFormat:
    """Records of any content, as one column of bytes."""

    column: str = "data"
    schema: pa.Schema = field(init=False)

    def __post_init__(self) -> None:
        schema = pa.schema([(self.column, pa.binary())])
        object.__setattr__(self, "schema", check_columns(schema, owner="bytes format"))

    def decode(self, values: pa.ChunkedArray) -> Decoded:
        """Return values as rows of `schema`; no record is bad."""
        chunks = [chunk for _, chunk in chunks_of(values)]
        return Decoded(pa.table([pa.chunked_array(chunks, pa.binary())], self.schema), ())
