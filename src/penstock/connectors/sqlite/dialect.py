"""SQLite's SQL.

Tables are STRICT, so that no value is made into another one for the sake of its
column: `ANY` keeps what it is given.

    boolean          INTEGER   0, 1
    integer          ANY       beyond 64 bits as text; a key alone is INTEGER PRIMARY KEY
    number           ANY       NaN as text
    string, JSON     TEXT
    base 64          BLOB      the bytes
"""

from collections.abc import Sequence

from penstock.sdk.bindings import Field, FieldKind
from penstock.sdk.sql.dialect import Column, Dialect, Fit, Table

__all__ = ["SqliteDialect", "as_text"]

_TYPES = {
    FieldKind.BOOLEAN: "INTEGER",
    FieldKind.INTEGER: "ANY",
    FieldKind.NUMBER: "ANY",
    FieldKind.STRING: "TEXT",
    FieldKind.BYTES: "BLOB",
    FieldKind.JSON: "TEXT",
}


class SqliteDialect(Dialect):
    """How SQLite is spoken to."""

    boolean_type = "INTEGER"

    def folded(self, name: str) -> str:
        """Names of columns are compared without case."""
        return name.lower()

    def column_type(self, field: Field) -> str:
        """What the column of a field is declared as."""
        return _TYPES[field.kind]

    def fit(self, column: Column, field: Field) -> Fit:
        """Whether a column that is there can take the values of a field."""
        wanted = self.column_type(field)
        if column.type == wanted or (column.type, field.kind) == ("INTEGER", FieldKind.INTEGER):
            return Fit.COMPATIBLE
        if not column.in_key and (column.type, wanted) in {
            ("INTEGER", "ANY"),
            ("INTEGER", "TEXT"),
            ("ANY", "TEXT"),
        }:
            return Fit.MIGRATABLE
        return Fit.INCOMPATIBLE

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

    def drop_not_null(self, table: Table, column: Column) -> Sequence[str]:
        """By way of another column, since SQLite cannot alter one."""
        return self._replaced(table, column, column.type, self.quoted(column.name))

    def migrate(self, table: Table, column: Column, field: Field) -> Sequence[str]:
        """By way of another column, since SQLite cannot alter one."""
        wanted, name = self.column_type(field), self.quoted(column.name)
        return self._replaced(table, column, wanted, as_text(name) if wanted == "TEXT" else name)

    def _replaced(self, table: Table, column: Column, kind: str, value: str) -> Sequence[str]:
        path, name = self.quoted_path(table.path), self.quoted(column.name)
        other = self.quoted(f"flow_migrating_{column.name}")
        return [
            f"ALTER TABLE {path} ADD COLUMN {other} {kind}",
            f"UPDATE {path} SET {other} = {value}",
            f"ALTER TABLE {path} DROP COLUMN {name}",
            f"ALTER TABLE {path} RENAME COLUMN {other} TO {name}",
        ]

    def drop_key(self, table: Table) -> Sequence[str]:
        """By way of another table."""
        path, other = self.quoted_path(table.path), (f"flow_migrating_{table.path[-1]}",)
        columns = [Column(each.name, each.type, each.nullable) for each in table.columns]
        names = ", ".join(self.quoted(each.name) for each in columns)
        return [
            self.create_table(Table(other, tuple(columns))),
            f"INSERT INTO {self.quoted_path(other)} ({names}) SELECT {names} FROM {path}",
            f"DROP TABLE {path}",
            f"ALTER TABLE {self.quoted_path(other)} RENAME TO {path}",
        ]


def as_text(column: str) -> str:
    """A value as text from which it can be read again, exactly."""
    return (
        f"CASE typeof({column}) WHEN 'real' THEN flow_text({column}) "
        f"ELSE CAST({column} AS TEXT) END"
    )
