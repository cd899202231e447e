"""Changes between two fingerprints, one class each.

A table is identified by its oid, which does not change when the table is renamed. The name is only
for display.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from penstock.sources.postgres.names import TableName

__all__ = [
    "AppendedColumn",
    "AttachedLeaf",
    "Change",
    "ColumnListChanged",
    "ColumnsChanged",
    "FilterChanged",
    "IdentityChanged",
    "KeyChanged",
    "LeavesChanged",
    "OperationsChanged",
    "PublicationAltered",
    "PublicationDropped",
    "PublicationReplaced",
    "Renamed",
    "RenamedColumn",
    "Republished",
    "RetypedColumn",
    "Rewritten",
    "TableAdded",
    "TableDropped",
    "TableUnpublished",
    "TypeChanged",
]


@dataclass(frozen=True, slots=True)
class PublicationDropped:
    """Missing publication. The stream fails at its next change."""


@dataclass(frozen=True, slots=True)
class PublicationReplaced:
    """Another publication under the same name. Changes written in between were not sent."""

    before: int
    after: int


@dataclass(frozen=True, slots=True)
class OperationsChanged:
    """Change of the operations that the publication sends."""

    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PublicationAltered:
    """Alteration of the publication, which sends the same operations as before.

    It may have sent other operations for a while. A change of its owner, or a rename and a rename
    back, cannot be distinguished from that.
    """


@dataclass(frozen=True, slots=True)
class TableDropped:
    """Drop of a table. A table created under the same name is a different table."""

    table: int
    name: TableName


@dataclass(frozen=True, slots=True)
class TableUnpublished:
    """Existing table whose changes the publication no longer sends under its name."""

    table: int
    name: TableName


@dataclass(frozen=True, slots=True)
class TableAdded:
    """Published table that was not published before, or did not exist."""

    table: int
    name: TableName


@dataclass(frozen=True, slots=True)
class Republished:
    """Table that left the publication and was added again. Changes in between were not sent."""

    table: int
    name: TableName


@dataclass(frozen=True, slots=True)
class Renamed:
    """Table with another name or schema, and the same rows."""

    table: int
    before: TableName
    after: TableName


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Table with new storage: truncated, or rewritten with the same or other rows."""

    table: int
    name: TableName
    xid: int
    """Transaction that last wrote the row of the table in pg_class."""

    harmless: bool = False
    """True if the stream is known to report every difference in rows."""


@dataclass(frozen=True, slots=True)
class AppendedColumn:
    """New column, after all existing columns."""

    name: str
    number: int
    type: int
    typmod: int
    default: str | None
    """Value in rows older than the column, as text; None for NULL."""

    known: bool
    """True if all older rows hold `default`. If False, each row may hold another value."""

    streamed: bool
    """True if messages carry the column."""


@dataclass(frozen=True, slots=True)
class RenamedColumn:
    """Column with a new name."""

    number: int
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class RetypedColumn:
    """Column with another type, or with another type modifier such as precision or length."""

    name: str
    before: tuple[int, int]
    """Type oid and typmod."""

    after: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ColumnsChanged:
    """Change of the columns of a table.

    A column that was dropped and added again is in both `dropped` and `appended`.
    """

    table: int
    name: TableName
    appended: tuple[AppendedColumn, ...] = ()
    renamed: tuple[RenamedColumn, ...] = ()
    dropped: tuple[str, ...] = ()
    retyped: tuple[RetypedColumn, ...] = ()
    loosened: tuple[str, ...] = ()
    """Columns that are nullable now and were not before."""

    tightened: tuple[str, ...] = ()
    """Columns that were nullable and are not any more."""

    def ignoring(self, columns: Collection[str]) -> "ColumnsChanged | None":
        """Return the change without `columns`; None if nothing remains."""
        remaining = ColumnsChanged(
            self.table,
            self.name,
            appended=tuple(column for column in self.appended if column.name not in columns),
            renamed=tuple(column for column in self.renamed if column.before not in columns),
            dropped=tuple(name for name in self.dropped if name not in columns),
            retyped=tuple(column for column in self.retyped if column.name not in columns),
            loosened=tuple(name for name in self.loosened if name not in columns),
            tightened=tuple(name for name in self.tightened if name not in columns),
        )
        return None if remaining == ColumnsChanged(self.table, self.name) else remaining


@dataclass(frozen=True, slots=True)
class IdentityChanged:
    """Other replica identity of a table, or of one of its leaves."""

    table: int
    name: TableName
    before: tuple[str, tuple[str, ...]]
    """pg_class.relreplident and the columns; the columns are empty for FULL and NOTHING."""

    after: tuple[str, tuple[str, ...]]
    leaf: TableName | None = None


@dataclass(frozen=True, slots=True)
class KeyChanged:
    """Other primary key of a table, possibly over the same columns.

    If the table had no primary key before, nothing depends on it. Otherwise rows with equal keys
    may have existed for a while.
    """

    table: int
    name: TableName
    before: tuple[str, ...] | None
    after: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class AttachedLeaf:
    """Leaf attached to the root since the last fingerprint, or detached and attached again."""

    table: int
    name: TableName
    born: bool
    """True if every row of the leaf was inserted as a row of the root, and so is in the stream."""


@dataclass(frozen=True, slots=True)
class LeavesChanged:
    """Root with other leaves, leaves with new storage, or a leaf that is not sent."""

    table: int
    name: TableName
    attached: tuple[AttachedLeaf, ...] = ()
    detached: tuple[TableName, ...] = ()
    """Leaves whose rows no longer belong to the root; the stream contains no message about that."""

    rewritten: tuple[Rewritten, ...] = ()


@dataclass(frozen=True, slots=True)
class FilterChanged:
    """Other row filter of the publication for a table."""

    table: int
    name: TableName


@dataclass(frozen=True, slots=True)
class ColumnListChanged:
    """Other selection of columns in messages, among the columns present before and after."""

    table: int
    name: TableName
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TypeChanged:
    """Type whose values print differently than before, also in existing rows."""

    table: int
    name: TableName
    columns: tuple[str, ...]
    type: str


Change: TypeAlias = (
    PublicationDropped
    | PublicationReplaced
    | OperationsChanged
    | PublicationAltered
    | TableDropped
    | TableUnpublished
    | TableAdded
    | Republished
    | Renamed
    | Rewritten
    | ColumnsChanged
    | IdentityChanged
    | KeyChanged
    | LeavesChanged
    | FilterChanged
    | ColumnListChanged
    | TypeChanged
)
