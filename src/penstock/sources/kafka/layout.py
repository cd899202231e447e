"""Layout of a collection: its columns, and the part of a record that fills each of them.

    none      a row for each record: its value, and its place (partition, offset)
    upsert    a row for each key: the columns of the key and of the value
    debezium  a row for each row of a table: its contents after the last event about it

A row also has the record parts that `include` requests. Dead-lettered records and events that wait
for their transaction have schemas of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import pyarrow as pa

from penstock.errors import UsageError
from penstock.sources.formats.format import Format

__all__ = ["ASIDE", "DATA", "ERRORS", "ERRORS_SCHEMA", "META", "Envelope", "Layout"]

Envelope: TypeAlias = Literal["none", "upsert", "debezium"]

DATA: Final = "data"
ERRORS: Final = "errors"
ASIDE: Final = "aside"
"""Names of the outputs: rows of the collection, dead-lettered records, and waiting events."""

META: Final[Mapping[str, pa.DataType]] = {
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
class Layout:
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
                "envelope upsert needs to know what keys are",
                hint="Say how they are decoded: key_format: text, or as format says it.",
            )
        if self.envelope == "upsert" and self.key is not None and self.named:
            keys = self.key.schema.names
            if set(self.named) != set(keys):
                raise UsageError(
                    f"envelope upsert tells rows apart by the records' keys: {', '.join(keys)}",
                    hint="Leave key out, or choose another envelope.",
                )
        if self.envelope == "debezium" and not self.named:
            raise UsageError(
                "envelope debezium needs to know the key of the rows",
                hint="Name its columns: key: [id]",
            )
        if missing := [name for name in self.named if name not in self.schema.names]:
            raise UsageError(
                f'there is no column "{missing[0]}" for the key',
                hint=f"Name some of these: {', '.join(self.schema.names)}.",
            )

    @property
    def schema(self) -> pa.Schema:
        """Columns of the collection."""
        keys = [] if self.key is None else [*self.key.schema]
        taken = {each.name for each in keys}
        row = self.value.schema
        if self.envelope == "debezium":
            row = pa.schema([*row.field("after").type])
        values = [each for each in row if each.name not in taken]
        others = [pa.field(name, META[what]) for what, name in self.include.items()]
        return pa.schema([*keys, *values, *others, *self._place()])

    @property
    def aside(self) -> pa.Schema:
        """Columns of an event in side state that waits for its transaction."""
        return pa.schema(
            [
                pa.field("transaction", pa.string(), nullable=False),
                pa.field("total_order", pa.int64(), nullable=False),
                # Order among the events of the transaction in this topic; null for an event of no
                # transaction.
                pa.field("order", pa.int64()),
                pa.field("partition", pa.int32(), nullable=False),
                pa.field("offset", pa.int64(), nullable=False),
                pa.field("gone", pa.bool_(), nullable=False),
                pa.field("row", pa.struct(list(self.schema)), nullable=False),
            ]
        )

    @property
    def key_columns(self) -> tuple[str, ...]:
        """Key columns of the collection, as the file or else the envelope determines them."""
        if self.named and self.envelope != "upsert":
            return self.named
        if self.key is not None and self.envelope == "upsert":
            return tuple(self.key.schema.names)
        return (self.column_of("partition"), self.column_of("offset"))

    def column_of(self, what: Literal["partition", "offset"]) -> str:
        """Return the column that holds the partition or the offset of a record."""
        return self.include.get(what, _PARTITION if what == "partition" else _OFFSET)

    def _place(self) -> list[pa.Field]:
        """Return the place columns, which identify and order rows of the envelope `none`."""
        if self.envelope != "none":
            return []
        return [
            pa.field(name, META[what], nullable=False)
            for what, name in (("partition", _PARTITION), ("offset", _OFFSET))
            if what not in self.include
        ]
