"""SQLite's SQL.

Tables are STRICT, so that no value is made into another one for the sake of its
column: `ANY` keeps what it is given.

    boolean          INTEGER   0, 1
    integer          ANY       beyond 64 bits as text; a key alone is INTEGER PRIMARY KEY
    number           ANY       NaN as text
    string, JSON     TEXT
    decimal          TEXT      ANY with `decimals: real`: a double, NaN as text
    base 64          BLOB      the bytes
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
"""Kinds whose values cannot be told from integers or from text by their column."""


@dataclass(frozen=True)
class SqliteDialect(Dialect):
    """How SQLite is spoken to."""

    decimals: Literal["text", "real"] = "text"
    """How decimals are stored, whose values are exact text."""

    boolean_type = "INTEGER"
    true = "1"
    # Tables that take the place of others, temporary ones, which hide others, and SQLite's own.
    reserved = ("flow_migrating_", "flow_load_", "sqlite_")

    def folded(self, name: str) -> str:
        """Names are compared without the case of ASCII's letters."""
        return name.encode().lower().decode()

    def column_type(self, field: Field) -> str:
        """What the column of a field is declared as."""
        return "ANY" if self.stores_real(field) else _TYPES[field.kind]

    def stores_real(self, field: Field) -> bool:
        """Return whether values of a field are decimals that are stored as doubles."""
        return self.decimals == "real" and is_decimal(field)

    def fit(self, column: Column, field: Field, was: FieldKind | None = None) -> Fit:
        """Whether a column that is there can take the values of a field."""
        wanted = self.column_type(field)
        if was not in (None, field.kind) and {was, field.kind} & _ALIKE:
            return Fit.INCOMPATIBLE
        if was is FieldKind.STRING and field.kind is was and column.type != wanted:
            return Fit.INCOMPATIBLE  # Doubles do not say which decimals they were.
        if column.type == wanted or (column.type, field.kind) == ("INTEGER", FieldKind.INTEGER):
            return Fit.COMPATIBLE
        if not column.in_key and (column.type, field.kind) == ("ANY", FieldKind.STRING):
            return Fit.MIGRATABLE
        return Fit.INCOMPATIBLE

    def literal(self, field: Field, value: Any) -> str | None:
        """Return the literal of a JSON value as the column of a field holds it."""
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
        """A strict table; a key of one integer is its row id."""
        if len(table.key) == 1:
            [key] = table.key
            columns = [
                Column(each.name, "INTEGER", each.nullable, each.in_key)
                if each.name == key and each.type == "ANY"
                else each
                for each in table.columns
            ]
            table = Table(table.path, tuple(columns))
        return super().create_table(table) + " STRICT"

    def replaces(self, alteration: Alteration) -> bool:
        """Unless columns are only added: SQLite can alter none."""
        before, after = alteration.before, alteration.after
        return any(each != after.column(each.name) for each in before.columns)

    def alter(self, alteration: Alteration) -> Sequence[str]:
        """In place, if columns are only added; else by way of another table.

        What is attached to the table, such as an index, is made
        again as it was.
        """
        before, after = alteration.before, alteration.after
        if not self.replaces(alteration):
            return [self.add_column(before, each) for each in alteration.added()]
        path, other = self.quoted_path(before.path), (f"flow_migrating_{before.path[-1]}",)
        names = [self.quoted(each.name) for each in before.columns]
        values = [
            as_text(name) if _becomes_text(alteration, each) else name
            for name, each in zip(names, before.columns, strict=True)
        ]
        chosen = f"SELECT {', '.join(values)} FROM {path}"
        return [
            self.create_table(Table(other, after.columns)),
            f"INSERT INTO {self.quoted_path(other)} ({', '.join(names)}) {chosen}",
            f"DROP TABLE {path}",
            f"ALTER TABLE {self.quoted_path(other)} RENAME TO {path}",
            *before.attached,
        ]


def is_decimal(field: Field) -> bool:
    """Return whether the text of a field is a decimal; keys stay exact."""
    if field.kind is not FieldKind.STRING or field.is_key:
        return False
    upstream = str(field.annotations.get("x-postgres-type", ""))
    return re.fullmatch(r"numeric(\(.*\))?", upstream) is not None or field.format == "number"


def _becomes_text(alteration: Alteration, column: Column) -> bool:
    found = alteration.after.column(column.name)
    return column.name in alteration.migrated and found is not None and found.type == "TEXT"


def as_text(column: str) -> str:
    """A value as text from which it can be read again, exactly."""
    return (
        f"CASE typeof({column}) WHEN 'real' THEN flow_text({column}) "
        f"ELSE CAST({column} AS TEXT) END"
    )
