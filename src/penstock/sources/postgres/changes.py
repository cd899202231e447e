"""The changes that two fingerprints can show, one class each.

Tables go by their number in the catalogue, which a table keeps when it is
renamed; the name rides along for people.
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
    "PublicationGone",
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
class PublicationGone:
    """There is no publication of the name. The stream fails at its next change."""


@dataclass(frozen=True, slots=True)
class PublicationReplaced:
    """Another publication has the name; what was written in between was not sent."""

    before: int
    after: int


@dataclass(frozen=True, slots=True)
class OperationsChanged:
    """The publication sends other operations than before."""

    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PublicationAltered:
    """The publication was altered and sends the same operations as before.

    Perhaps it did not for a while. A new owner or a new name and back look the same.
    """


@dataclass(frozen=True, slots=True)
class TableDropped:
    """The table is gone; one of the same name would be another."""

    table: int
    name: TableName


@dataclass(frozen=True, slots=True)
class TableUnpublished:
    """The table exists and is not sent any more under its name."""

    table: int
    name: TableName


@dataclass(frozen=True, slots=True)
class TableAdded:
    """The table is published, and was not or did not exist."""

    table: int
    name: TableName


@dataclass(frozen=True, slots=True)
class Republished:
    """The table left the publication and came back; what was written in between was not sent."""

    table: int
    name: TableName


@dataclass(frozen=True, slots=True)
class Renamed:
    """The table has another name or schema. Its rows are the same."""

    table: int
    before: TableName
    after: TableName


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The table has new storage: it was truncated, or rewritten with whatever result."""

    table: int
    name: TableName
    xid: int
    """The transaction that wrote its row in the catalogue last."""

    harmless: bool = False
    """Whether it is known that the rows are those that the stream tells of."""


@dataclass(frozen=True, slots=True)
class AppendedColumn:
    """A new column, after all that were there."""

    name: str
    number: int
    type: int
    typmod: int
    default: str | None
    """What rows hold that are older than it, as text; None for null."""

    known: bool
    """Whether all older rows hold that; if not, each may hold something else."""

    streamed: bool
    """Whether messages carry it."""


@dataclass(frozen=True, slots=True)
class RenamedColumn:
    """A column under another name."""

    number: int
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class RetypedColumn:
    """A column of another type or of the same with another precision, length or the like."""

    name: str
    before: tuple[int, int]
    """Type and typmod."""

    after: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ColumnsChanged:
    """The table has other columns. One that was dropped and added again is dropped and appended."""

    table: int
    name: TableName
    appended: tuple[AppendedColumn, ...] = ()
    renamed: tuple[RenamedColumn, ...] = ()
    dropped: tuple[str, ...] = ()
    retyped: tuple[RetypedColumn, ...] = ()
    loosened: tuple[str, ...] = ()
    """Columns that may be null now."""

    tightened: tuple[str, ...] = ()
    """Columns that may not be null any more."""

    def ignoring(self, columns: Collection[str]) -> "ColumnsChanged | None":
        """The rest of it, if there is any, for whoever leaves out `columns`."""
        rest = ColumnsChanged(
            self.table,
            self.name,
            appended=tuple(each for each in self.appended if each.name not in columns),
            renamed=tuple(each for each in self.renamed if each.before not in columns),
            dropped=tuple(name for name in self.dropped if name not in columns),
            retyped=tuple(each for each in self.retyped if each.name not in columns),
            loosened=tuple(name for name in self.loosened if name not in columns),
            tightened=tuple(name for name in self.tightened if name not in columns),
        )
        return None if rest == ColumnsChanged(self.table, self.name) else rest


@dataclass(frozen=True, slots=True)
class IdentityChanged:
    """Old rows are named in another way than before, at the table or at a leaf of it."""

    table: int
    name: TableName
    before: tuple[str, tuple[str, ...]]
    """pg_class.relreplident and, but for full and nothing, the columns."""

    after: tuple[str, tuple[str, ...]]
    leaf: TableName | None = None


@dataclass(frozen=True, slots=True)
class KeyChanged:
    """The primary key is another one, though perhaps of the same columns.

    Harmless where there was none before: nothing was made of it. Otherwise rows
    of equal keys may have been there for a while.
    """

    table: int
    name: TableName
    before: tuple[str, ...] | None
    after: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class AttachedLeaf:
    """A leaf that the root has now, and had not or had lost for a while."""

    table: int
    name: TableName
    born: bool
    """Whether every row it ever held came as a row of the root, and so in the stream.

    If not, it may still be shown to be empty: `without_rows`.
    """


@dataclass(frozen=True, slots=True)
class LeavesChanged:
    """The root has other leaves, or leaves with new storage, or one that is not sent."""

    table: int
    name: TableName
    attached: tuple[AttachedLeaf, ...] = ()
    detached: tuple[TableName, ...] = ()
    """Their rows are gone from the root, and nothing was sent."""

    rewritten: tuple[Rewritten, ...] = ()


@dataclass(frozen=True, slots=True)
class FilterChanged:
    """The publication has another row filter for the table."""

    table: int
    name: TableName


@dataclass(frozen=True, slots=True)
class ColumnListChanged:
    """Messages carry other ones of the columns that were there before."""

    table: int
    name: TableName
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TypeChanged:
    """Values of a type print otherwise than before, in rows that are there already too."""

    table: int
    name: TableName
    columns: tuple[str, ...]
    type: str


Change: TypeAlias = (
    PublicationGone
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
