"""SQL dialect of one endpoint: names, types, and statements that differ between endpoints.

A dialect returns statements and does not execute them. The other modules of this package contain
the code that all endpoints share.
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
    """Existing or planned column."""

    name: str
    type: str
    nullable: bool
    in_key: bool = False
    default: str = ""
    """Literal for existing rows when the column is added; empty for null."""


@dataclass(frozen=True, slots=True)
class Table:
    """Existing or planned table."""

    path: tuple[str, ...]
    columns: tuple[Column, ...]
    key_name: str = ""
    """Name of the primary key constraint, if the endpoint needs it to drop the key."""

    attached: tuple[str, ...] = ()
    """Statements that create indexes and triggers again, if altering replaces the table."""

    @property
    def key(self) -> tuple[str, ...]:
        """Return the columns of the primary key; empty if there is none."""
        return tuple(column.name for column in self.columns if column.in_key)

    def column(self, name: str) -> Column | None:
        """Return the column with this name; None if it does not exist."""
        return next((column for column in self.columns if column.name == name), None)


class Fit(enum.Enum):
    """Compatibility of a column with the values of a field."""

    COMPATIBLE = "compatible"
    MIGRATABLE = "migratable"
    """Compatible after a change of type that preserves the values."""

    INCOMPATIBLE = "incompatible"


@dataclass(frozen=True, slots=True)
class Alteration:
    """Change of an existing table."""

    before: Table
    after: Table
    """Existing columns as they will be, then the added columns."""

    migrated: Mapping[str, Field]
    """Columns whose type changes, with their fields."""

    def added(self) -> Sequence[Column]:
        """Return the added columns."""
        return [column for column in self.after.columns if self.before.column(column.name) is None]

    def loosened(self) -> Sequence[Column]:
        """Return the columns that become nullable."""
        return [
            column
            for column in self.before.columns
            if not column.nullable and (after := self.after.column(column.name)) and after.nullable
        ]


class Dialect(ABC):
    """SQL of one endpoint."""

    boolean_type: str = "BOOLEAN"
    true: str = "TRUE"
    reserved: tuple[str, ...] = ()
    """Reserved prefixes of table names, after `folded`."""

    def quoted(self, name: str) -> str:
        """Return a name as a quoted identifier."""
        return '"' + name.replace('"', '""') + '"'

    def quoted_path(self, path: Sequence[str]) -> str:
        """Return a path of names as quoted identifiers."""
        return ".".join(self.quoted(name) for name in path)

    def column_name(self, field: str) -> str:
        """Return the column name of a field."""
        return field

    def folded(self, name: str) -> str:
        """Return a text that is equal for names that the endpoint considers equal."""
        return name

    def with_names(self, table: Table, names: Iterable[str]) -> Table:
        """Return a table whose column names are spelled as in `names`, if they are equal there."""
        by_folded = {self.folded(name): name for name in names}
        columns = (
            replace(column, name=by_folded.get(self.folded(column.name), column.name))
            for column in table.columns
        )
        return replace(table, columns=tuple(columns))

    @abstractmethod
    def column_type(self, field: Field) -> str:
        """Return the SQL type of the column of a field."""

    @abstractmethod
    def fit(self, column: Column, field: Field, was: FieldKind | None = None) -> Fit:
        """Return whether an existing column can hold the values of a field.

        `was` is the kind of the stored values, if it is known.
        """

    def table(self, binding: Binding[Any], extra: Sequence[Column] = ()) -> Table:
        """Return the table of a binding. `extra` are columns that are not fields.

        Raises:
            Refused: two fields map to the same column.
        """
        used = {self.folded(column.name): "" for column in extra}
        for field in binding.fields:
            other = used.setdefault(self.folded(self.column_name(field.name)), field.name)
            if not other:
                raise Refused(
                    f'field "{field.name}" of table "{binding}" has a reserved column name',
                    hint="Exclude the field.",
                )
            if other != field.name:
                raise Refused(
                    f'fields "{other}" and "{field.name}" of table "{binding}" '
                    "would be the same column",
                    hint="Exclude one of the fields.",
                )
        return Table(
            binding.path,
            (
                *(
                    Column(
                        self.column_name(field.name),
                        self.column_type(field),
                        nullable=field.nullable and not field.is_key,
                        in_key=field.is_key and not binding.delta_updates,
                    )
                    for field in binding.fields
                ),
                *extra,
            ),
        )

    # Statements.

    def create_table(self, table: Table) -> str:
        """Return the statement that creates a table."""
        columns = [
            f"    {self.quoted(column.name)} {column.type}{'' if column.nullable else ' NOT NULL'}"
            f"{_default(column)}"
            for column in table.columns
        ]
        if table.key:
            columns.append(f"    PRIMARY KEY ({', '.join(map(self.quoted, table.key))})")
        body = ",\n".join(columns)
        return f"CREATE TABLE {self.quoted_path(table.path)} (\n{body}\n)"

    def add_column(self, table: Table, column: Column) -> str:
        """Return the statement that adds a column, with its default in existing rows."""
        return (
            f"ALTER TABLE {self.quoted_path(table.path)} "
            f"ADD COLUMN {self.quoted(column.name)} {column.type}{_default(column)}"
        )

    def default_literal(self, field: Field) -> str | None:
        """Return the literal of the default of a field: empty for null, None if there is none."""
        text = field.inference.default_json
        value = json.loads(text) if text else None
        return "" if value is None else self.literal(field, value)

    @abstractmethod
    def literal(self, field: Field, value: Any) -> str | None:
        """Return the literal of a JSON value for the column of a field; None if there is none."""

    def replaces(self, alteration: "Alteration") -> bool:
        """Return whether the change creates a new table, which loses unknown properties."""
        return False

    @abstractmethod
    def alter(self, alteration: "Alteration") -> Sequence[str]:
        """Return the statements that change a table and preserve its rows."""

    def drop_table(self, path: Sequence[str]) -> str:
        """Return the statement that drops a table."""
        return f"DROP TABLE IF EXISTS {self.quoted_path(path)}"


def _default(column: Column) -> str:
    return f" DEFAULT {column.default}" if column.default else ""
