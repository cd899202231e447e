"""Output schema: columns of a collection, and the part of a record that fills each of them.

    none      a row for each record: its value, and its place (partition, offset)
    upsert    a row for each key: the columns of the key and of the value
    debezium  a row for each row of a table: its contents after the last event about it

A row also has the record parts that `include` requests. Dead-lettered records have a schema of
their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import pyarrow as pa

from penstock.errors import UsageError
from penstock.sources.formats.format import Format

__all__ = [
    "DATA",
    "ERRORS",
    "ERRORS_SCHEMA",
    "RECORD_PARTS",
    "SIDE_STATE",
    "Envelope",
    "OutputSchema",
]

Envelope: TypeAlias = Literal["none", "upsert", "debezium"]

DATA: Final = "data"
ERRORS: Final = "errors"
SIDE_STATE: Final = "aside"
"""Names of the outputs: rows of the collection, dead-lettered records, and waiting events."""

RECORD_PARTS: Final[Mapping[str, pa.DataType]] = {
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    "key": pa.binary(),
}
"""Record parts that can become columns, in addition to the value."""

ERRORS_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("us", "UTC")),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("reason", pa.string(), nullable=False),
    ]
)
"""Columns of the dead-letter collection."""

_PARTITION: Final = "_partition"
_OFFSET: Final = "_offset"


@dataclass(frozen=True, slots=True)
class OutputSchema:
    """Columns of a collection, and the part of a record that fills each of them."""

    envelope: Envelope
    value: Format
    """Decoder of values; for the Debezium envelope, the decoder of its events."""

    key: Format | None = None
    """Decoder of keys, if their columns are requested."""

    include: Mapping[str, str] = field(default_factory=dict)
    """Column name by record part other than the value."""

    named: tuple[str, ...] = ()
    """Key columns, if the file names them."""

    def __post_init__(self) -> None:
        if self.envelope == "upsert" and self.key is None:
            raise UsageError(
                "envelope upsert needs the format of record keys",
                hint="Add key_format: text, or another format.",
            )
        if self.envelope == "upsert" and self.key is not None and self.named:
            keys = self.key.schema.names
            if set(self.named) != set(keys):
                raise UsageError(
                    f"envelope upsert identifies rows by the keys of records: {', '.join(keys)}",
                    hint="Remove key, or use another envelope.",
                )
        if self.envelope == "debezium" and not self.named:
            raise UsageError(
                "envelope debezium needs the key columns of the rows",
                hint="Name them: key: [id]",
            )
        if missing := [name for name in self.named if name not in self.schema.names]:
            raise UsageError(
                f'key column "{missing[0]}" does not exist',
                hint=f"Use some of these: {', '.join(self.schema.names)}.",
            )

    @property
    def schema(self) -> pa.Schema:
        """Columns of the collection."""
        keys = [] if self.key is None else [*self.key.schema]
        key_names = {column.name for column in keys}
        values = [column for column in self.value_schema if column.name not in key_names]
        included = [pa.field(name, RECORD_PARTS[part]) for part, name in self.include.items()]
        return pa.schema([*keys, *values, *included, *self._place_columns()])

    @property
    def value_schema(self) -> pa.Schema:
        """Columns of the value of a record; for the Debezium envelope, of the row in an event."""
        if self.envelope == "debezium":
            return pa.schema([*self.value.schema.field("after").type])
        return self.value.schema

    @property
    def key_columns(self) -> tuple[str, ...]:
        """Key columns of the collection, as the file or else the envelope determines them."""
        if self.named and self.envelope != "upsert":
            return self.named
        if self.key is not None and self.envelope == "upsert":
            return tuple(self.key.schema.names)
        return (self.column_of("partition"), self.column_of("offset"))

    def column_of(self, part: Literal["partition", "offset"]) -> str:
        """Return the column that holds the partition or the offset of a record."""
        return self.include.get(part, _PARTITION if part == "partition" else _OFFSET)

    def _place_columns(self) -> list[pa.Field]:
        """Return the place columns, which identify and order rows of the envelope `none`."""
        if self.envelope != "none":
            return []
        return [
            pa.field(name, RECORD_PARTS[part], nullable=False)
            for part, name in (("partition", _PARTITION), ("offset", _OFFSET))
            if part not in self.include
        ]
