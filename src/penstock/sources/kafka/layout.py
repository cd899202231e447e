"""What records become: the columns of a collection, and where each of them comes from.

    none      a row for each record: its value, and its place (partition, offset)
    upsert    a row for each key: the key's columns and the value's
    debezium  a row for each row of a table: what it is after the last event that speaks of it

Besides them a row has what else of its record is asked for. Records that cannot be taken
have columns of their own, and so has what waits for its transaction.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import pyarrow as pa

from penstock.errors import UsageError
from penstock.sources.kafka.formats.format import Format

__all__ = ["ASIDE", "DATA", "ERRORS", "ERRORS_SCHEMA", "META", "Envelope", "Layout"]

Envelope: TypeAlias = Literal["none", "upsert", "debezium"]

DATA: Final = "data"
ERRORS: Final = "errors"
ASIDE: Final = "aside"
"""What goes to the collection, what cannot be taken, and what waits."""

META: Final[Mapping[str, pa.DataType]] = {
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    "key": pa.binary(),
}
"""What can be had of a record besides its value."""

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
"""What is told of a record that cannot be taken."""

_PARTITION: Final = "_partition"
_OFFSET: Final = "_offset"


@dataclass(frozen=True, slots=True)
class Layout:
    """What records become: the columns of a collection, and where each comes from."""

    envelope: Envelope
    value: Format
    """Of Debezium, what decodes its events."""

    key: Format | None = None
    """How keys are decoded, if their columns are wanted."""

    include: Mapping[str, str] = field(default_factory=dict)
    """By what of a record besides its value, the column that has it."""

    named: tuple[str, ...] = ()
    """The columns that tell rows apart, if the file names them."""

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
        """The columns of the collection."""
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
        """What is kept of an event that waits for its transaction."""
        return pa.schema(
            [
                pa.field("transaction", pa.string(), nullable=False),
                pa.field("total_order", pa.int64(), nullable=False),
                # Its place among the transaction's events of the topic; none if it is of none.
                pa.field("order", pa.int64()),
                pa.field("partition", pa.int32(), nullable=False),
                pa.field("offset", pa.int64(), nullable=False),
                pa.field("gone", pa.bool_(), nullable=False),
                pa.field("row", pa.struct(list(self.schema)), nullable=False),
            ]
        )

    @property
    def key_columns(self) -> tuple[str, ...]:
        """What tells rows apart, unless the file says otherwise."""
        if self.named and self.envelope != "upsert":
            return self.named
        if self.key is not None and self.envelope == "upsert":
            return tuple(self.key.schema.names)
        return (self.column_of("partition"), self.column_of("offset"))

    def column_of(self, what: Literal["partition", "offset"]) -> str:
        """The column that has the place of a record."""
        return self.include.get(what, _PARTITION if what == "partition" else _OFFSET)

    def _place(self) -> list[pa.Field]:
        """Of rows that are records: their place, in which their order is kept."""
        if self.envelope != "none":
            return []
        return [
            pa.field(name, META[what], nullable=False)
            for what, name in (("partition", _PARTITION), ("offset", _OFFSET))
            if what not in self.include
        ]
