"""SQL of SQLite.

Tables are STRICT, so SQLite does not convert values to the type of their column. A column of type
`ANY` stores values unchanged.

    boolean          INTEGER   0, 1
    integer          ANY       beyond 64 bits as text; a key alone is INTEGER PRIMARY KEY
    number           ANY       NaN as text
    string, JSON     TEXT
    decimal          TEXT      ANY with `decimals: real`: a double, NaN as text
    base64           BLOB      the bytes
"""

import base64
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.sdk.bindings import Field, FieldKind
from penstock.sdk.sql.dialect import Alteration, Column, Dialect, Fit, Table

__all__ = ["SqliteDialect", "as_text", "is_decimal"]

_TYPES = {
    FieldKind.BOOLEAN: "INTEGER",
    FieldKind.INTEGER: "ANY",
    FieldKind.NUMBER: "ANY",
    FieldKind.STRING: "TEXT",
    FieldKind.BYTES: "BLOB",
    FieldKind.JSON: "TEXT",
}

_ALIKE = {FieldKind.BOOLEAN, FieldKind.JSON}
"""Kinds whose values look like integers or text in their column."""


@dataclass(frozen=True)
class SqliteDialect(Dialect):
    """SQL of SQLite."""

    decimals: Literal["text", "real"] = "text"
    """Storage of decimals."""

    boolean_type = "INTEGER"
    true = "1"
    # Tables that replace others, temporary tables, which hide others, and tables of SQLite.
    reserved = ("flow_migrating_", "flow_load_", "sqlite_")

    def folded(self, name: str) -> str:
        """Fold ASCII letters: SQLite ignores their case in names."""
        return name.encode().lower().decode()

    def column_type(self, field: Field) -> str:
        """Return the type of the column of a field."""
        return "ANY" if self.stores_real(field) else _TYPES[field.kind]

    def stores_real(self, field: Field) -> bool:
        """Return whether values of a field are decimals that are stored as doubles."""
        return self.decimals == "real" and is_decimal(field)

    def fit(self, column: Column, field: Field, was: FieldKind | None = None) -> Fit:
        """Return whether an existing column can hold the values of a field."""
        required = self.column_type(field)
        if was not in (None, field.kind) and {was, field.kind} & _ALIKE:
            return Fit.INCOMPATIBLE
        if was is FieldKind.STRING and field.kind is was and column.type != required:
            return Fit.INCOMPATIBLE  # A double does not determine the decimal.
        if column.type == required or (column.type, field.kind) == ("INTEGER", FieldKind.INTEGER):
            return Fit.COMPATIBLE
        if not column.in_key and (column.type, field.kind) == ("ANY", FieldKind.STRING):
            return Fit.MIGRATABLE
        return Fit.INCOMPATIBLE

    def literal(self, field: Field, value: Any) -> str | None:
        """Return the literal of a JSON value for the column of a field."""
        match field.kind, value:
            case FieldKind.BOOLEAN, bool():
                return "1" if value else "0"
            case FieldKind.INTEGER, int():
                return str(value) if -(2**63) < value < 2**63 else f"'{value}'"
            case FieldKind.NUMBER, int() | float():
                return repr(float(value)) if math.isfinite(value) else None
            case FieldKind.BYTES, str():
                return f"x'{base64.b64decode(value).hex()}'"
            case FieldKind.STRING, str() if self.stores_real(field):
                return repr(float(value)) if math.isfinite(float(value)) else None
            case FieldKind.STRING, str() if "\0" not in value:
                return "'" + value.replace("'", "''") + "'"
            case _:
                return None

    def create_table(self, table: Table) -> str:
        """Return the statement for a strict table. A single integer key is its rowid."""
        if len(table.key) == 1:
            [key] = table.key
            columns = [
                Column(column.name, "INTEGER", column.nullable, column.in_key)
                if column.name == key and column.type == "ANY"
                else column
                for column in table.columns
            ]
            table = Table(table.path, tuple(columns))
        return super().create_table(table) + " STRICT"

    def replaces(self, alteration: Alteration) -> bool:
        """Return whether an existing column changes: SQLite can only add columns."""
        before, after = alteration.before, alteration.after
        return any(column != after.column(column.name) for column in before.columns)

    def alter(self, alteration: Alteration) -> Sequence[str]:
        """Add columns in place; for other changes, create a new table and copy the rows.

        Indexes and triggers of the table are created again.
        """
        before, after = alteration.before, alteration.after
        if not self.replaces(alteration):
            return [self.add_column(before, column) for column in alteration.added()]
        path, other = self.quoted_path(before.path), (f"flow_migrating_{before.path[-1]}",)
        names = [self.quoted(column.name) for column in before.columns]
        values = [
            as_text(name) if _becomes_text(alteration, column) else name
            for name, column in zip(names, before.columns, strict=True)
        ]
        select = f"SELECT {', '.join(values)} FROM {path}"
        return [
            self.create_table(Table(other, after.columns)),
            f"INSERT INTO {self.quoted_path(other)} ({', '.join(names)}) {select}",
            f"DROP TABLE {path}",
            f"ALTER TABLE {self.quoted_path(other)} RENAME TO {path}",
            *before.attached,
        ]


def is_decimal(field: Field) -> bool:
    """Return whether the text of a field is a decimal. Keys always remain text."""
    if field.kind is not FieldKind.STRING or field.is_key:
        return False
    upstream = str(field.annotations.get("x-postgres-type", ""))
    return re.fullmatch(r"numeric(\(.*\))?", upstream) is not None or field.format == "number"


def _becomes_text(alteration: Alteration, column: Column) -> bool:
    after = alteration.after.column(column.name)
    return column.name in alteration.migrated and after is not None and after.type == "TEXT"


def as_text(column: str) -> str:
    """Return SQL that converts a value to text exactly."""
    return (
        f"CASE typeof({column}) WHEN 'real' THEN flow_text({column}) "
        f"ELSE CAST({column} AS TEXT) END"
    )
