"""How one SQL is written: names, types, and the statements that differ.

A dialect says things; it does not do them. What is the same everywhere is written
once, in the files beside this one, by way of these.
"""

import enum
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.sdk.bindings import Binding, Field, FieldKind
from penstock.sdk.errors import Refused

__all__ = ["Alteration", "Column", "Dialect", "Fit", "Table"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column as it is, or as it should be."""

    name: str
    type: str
    nullable: bool
    in_key: bool = False
    default: str = ""
    """Of a column that is added: the literal that rows get that are there; empty for null."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table as it is, or as it should be."""

    path: tuple[str, ...]
    columns: tuple[Column, ...]
    key_name: str = ""
    """What its primary key is called, where that must be known to drop it."""

    attached: tuple[str, ...] = ()
    """What makes its indexes and the like again, where it must be replaced to be altered."""

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of its primary key; none, if it has no such."""
        return tuple(each.name for each in self.columns if each.in_key)

    def column(self, name: str) -> Column | None:
        """The column of that name."""
        return next((each for each in self.columns if each.name == name), None)


class Fit(enum.Enum):
    """Whether a column can take the values of a field."""

    COMPATIBLE = "compatible"
    MIGRATABLE = "migratable"
    """Once its type was changed, which keeps what is in it."""

    INCOMPATIBLE = "incompatible"


@dataclass(frozen=True, slots=True)
class Alteration:
    """A table that is there, and what it is to be."""

    before: Table
    after: Table
    """Columns that it has, as they will be, and then those that are added."""

    migrated: Mapping[str, Field]
    """By column whose type changes: the field whose values it will take."""

    def added(self) -> Sequence[Column]:
        """The columns that it does not have yet."""
        return [each for each in self.after.columns if self.before.column(each.name) is None]

    def loosened(self) -> Sequence[Column]:
        """The columns that may be null from now on."""
        return [
            each
            for each in self.before.columns
            if not each.nullable and (found := self.after.column(each.name)) and found.nullable
        ]


class Dialect(ABC):
    """How one endpoint's SQL is written."""

    boolean_type: str = "BOOLEAN"
    true: str = "TRUE"
    reserved: tuple[str, ...] = ()
    """What names of tables cannot begin with, as `folded`."""

    def quoted(self, name: str) -> str:
        """A name, whatever is in it."""
        return '"' + name.replace('"', '""') + '"'

    def quoted_path(self, path: Sequence[str]) -> str:
        """A name within a schema."""
        return ".".join(self.quoted(each) for each in path)

    def column_name(self, field: str) -> str:
        """What the column of a field is called."""
        return field

    def folded(self, name: str) -> str:
        """What two names have in common if the endpoint cannot tell them apart."""
        return name

    def spelled(self, table: Table, names: Iterable[str]) -> Table:
        """A table whose columns are called as in `names`, where nobody can tell them apart."""
        by_folded = {self.folded(each): each for each in names}
        columns = (
            replace(each, name=by_folded.get(self.folded(each.name), each.name))
            for each in table.columns
        )
        return replace(table, columns=tuple(columns))

    @abstractmethod
    def column_type(self, field: Field) -> str:
        """What the column of a field is declared as."""

    @abstractmethod
    def fit(self, column: Column, field: Field, was: FieldKind | None = None) -> Fit:
        """Whether a column that is there can take the values of a field.

        `was` is what values of the field are there, if that is known.
        """

    def table(self, binding: Binding[Any], extra: Sequence[Column] = ()) -> Table:
        """The table that a binding wants, with columns that no field has.

        Raises:
            Refused: two would be one column.
        """
        taken = {self.folded(each.name): "" for each in extra}
        for each in binding.fields:
            other = taken.setdefault(self.folded(self.column_name(each.name)), each.name)
            if not other:
                raise Refused(
                    f'field "{each.name}" of table "{binding}" has the name of a column of our own',
                    hint="Exclude it.",
                )
            if other != each.name:
                raise Refused(
                    f'fields "{other}" and "{each.name}" of table "{binding}" '
                    "would be the same column",
                    hint="Exclude one of them.",
                )
        return Table(
            binding.path,
            (
                *(
                    Column(
                        self.column_name(each.name),
                        self.column_type(each),
                        nullable=each.nullable and not each.is_key,
                        in_key=each.is_key and not binding.delta_updates,
                    )
                    for each in binding.fields
                ),
                *extra,
            ),
        )

    # Statements.

    def create_table(self, table: Table) -> str:
        """Make a table, with its key."""
        columns = [
            f"    {self.quoted(each.name)} {each.type}{'' if each.nullable else ' NOT NULL'}"
            f"{_default(each)}"
            for each in table.columns
        ]
        if table.key:
            columns.append(f"    PRIMARY KEY ({', '.join(map(self.quoted, table.key))})")
        body = ",\n".join(columns)
        return f"CREATE TABLE {self.quoted_path(table.path)} (\n{body}\n)"

    def add_column(self, table: Table, column: Column) -> str:
        """Add a column, which has its default in the rows that are there."""
        return (
            f"ALTER TABLE {self.quoted_path(table.path)} "
            f"ADD COLUMN {self.quoted(column.name)} {column.type}{_default(column)}"
        )

    def default_literal(self, field: Field) -> str | None:
        """Return the literal of a field's default, empty for null; None if there is none."""
        text = field.inference.default_json
        value = json.loads(text) if text else None
        return "" if value is None else self.literal(field, value)

    @abstractmethod
    def literal(self, field: Field, value: Any) -> str | None:
        """Return the literal of a JSON value as the column of a field holds it, if there is one."""

    def replaces(self, alteration: "Alteration") -> bool:
        """Whether it takes another table in its place, which loses what we do not know of."""
        return False

    @abstractmethod
    def alter(self, alteration: "Alteration") -> Sequence[str]:
        """Make a table what it is to be, and keep what is in it."""

    def drop_table(self, path: Sequence[str]) -> str:
        """Remove a table."""
        return f"DROP TABLE IF EXISTS {self.quoted_path(path)}"


def _default(column: Column) -> str:
    return f" DEFAULT {column.default}" if column.default else ""
