"""One table as we follow it: what its messages hold, and what its collection holds.

A Relation message lists columns by position, without the numbers that the
catalogue gives them. So the list is compatible with the one before only if it
*is* the one before, by position, name and type, perhaps with columns after it;
matching by name would take two swapped columns for each other (hazard B3).

    wire        what the messages hold: every published column
    columns     what is stored: the same without those the file excludes
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pyarrow as pa

from penstock.sources.postgres.catalog import PgColumn, PgTable
from penstock.sources.postgres.config import TableSpec
from penstock.sources.postgres.pgoutput import Relation
from penstock.sources.postgres.types import ColumnType, column_type

__all__ = [
    "LABEL",
    "Column",
    "Grown",
    "Incompatible",
    "Same",
    "Table",
    "compare_relation",
    "follow",
]

LABEL = b"penstock.label"
"""The field metadata under which a column's Postgres type is kept, for readers."""


@dataclass(frozen=True, slots=True)
class Column:
    """A stored column."""

    name: str
    position: int
    """Where it stands in messages."""

    type: ColumnType
    default: str | None = None
    """What rows that are older than the column hold in it, as text."""

    def field(self) -> pa.Field:
        """As the collection has it."""
        return pa.field(self.name, self.type.arrow, metadata={LABEL: self.type.label.encode()})

    def default_scalar(self) -> pa.Scalar:
        """What older rows hold."""
        if self.default is None:
            return pa.scalar(None, self.type.arrow)
        return self.type.from_text(pa.array([self.default.encode()], pa.binary()))[0]

    def default_value(self) -> Any:
        """The same as a plain value; times as numbers, since Python has no infinite ones."""
        value = self.default_scalar()
        return value.value if pa.types.is_temporal(value.type) else value.as_py()


@dataclass(frozen=True, slots=True)
class Table:
    """A table, as its messages and its collection have it."""

    oid: int
    name: str
    """Schema and table, as people write them."""

    collection: str
    described: PgTable
    spec: TableSpec
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    """The columns by which an old row is found where a message does not hold it whole."""

    @property
    def wire(self) -> tuple[PgColumn, ...]:
        """The columns of its messages."""
        return _streamed(self.described)

    @property
    def schema(self) -> pa.Schema:
        """The columns of its collection."""
        return pa.schema([column.field() for column in self.columns])

    @property
    def key_columns(self) -> tuple[str, ...]:
        """What identifies a row for readers: the primary key, if all of it is stored."""
        stored = {column.name for column in self.columns}
        primary = self.described.primary_key
        return tuple(primary) if primary and stored.issuperset(primary) else ()


def follow(source: str, described: PgTable, spec: TableSpec) -> Table:
    """How to follow a table that the catalogue describes."""
    columns = tuple(
        Column(
            each.name,
            position,
            column_type(each, text=each.name in spec.text),
            each.missing if each.has_missing else None,
        )
        for position, each in enumerate(_streamed(described))
        if each.name not in spec.exclude
    )
    return Table(
        oid=described.oid,
        name=str(described.table_name),
        collection=f"{source}.{described.schema}.{described.name}",
        described=described,
        spec=spec,
        columns=columns,
        # A partition may have another identity than its root; its messages say so one by one.
        key=described.primary_key if described.replica_identity == "f" else described.identity,
    )


@dataclass(frozen=True, slots=True)
class Same:
    """The messages are as they were."""


@dataclass(frozen=True, slots=True)
class Grown:
    """The messages are as they were, with more columns after them."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Incompatible:
    """The messages cannot be read as before."""

    reason: str


Compared: TypeAlias = Same | Grown | Incompatible


def compare_relation(table: Table, relation: Relation) -> Compared:
    """What a Relation message says about the messages after it."""
    before, now = table.wire, relation.columns
    if len(now) < len(before):
        kept = {column.name for column in now}
        gone = [column.name for column in before if column.name not in kept]
        return Incompatible(f"column {_quoted(gone)} was dropped")
    for was, column in zip(before, now, strict=False):
        if was.name != column.name:
            return Incompatible(f'column "{was.name}" is now "{column.name}"')
        if was.type.oid != column.type_oid and was.name not in table.spec.text:
            return Incompatible(f'column "{was.name}" has another type')
    appended = tuple(column.name for column in now[len(before) :])
    return Grown(appended) if appended else Same()


def grown(table: Table, described: PgTable) -> Table:
    """`table` with the columns that `described` has after its own."""
    fresh = follow(table.collection.split(".", 1)[0], described, table.spec)
    return replace(fresh, collection=table.collection)


def with_defaults(rows: pa.Table, columns: Sequence[Column]) -> pa.Table:
    """`rows`, which may lack the last of `columns`, with what older rows hold in them."""
    for column in columns[rows.num_columns :]:
        held = pa.repeat(column.default_scalar(), rows.num_rows)
        rows = rows.append_column(column.field(), held)
    return rows


def defaults_of(columns: Sequence[Column]) -> Mapping[str, Any]:
    """What rows that are older than `columns` hold in them, where it is not null."""
    return {each.name: each.default_value() for each in columns if each.default is not None}


def _streamed(described: PgTable) -> tuple[PgColumn, ...]:
    return tuple(described.column(name) for name in described.streamed)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
