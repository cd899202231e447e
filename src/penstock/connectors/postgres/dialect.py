"""Postgres' SQL.

A field whose schema says `x-postgres-type`, as collections that were read from
Postgres do, gets that type, if the endpoint has it. Any other gets

    boolean                     BOOLEAN
    integer                     BIGINT            NUMERIC, if the schema allows more than 64 bits
    number                      DOUBLE PRECISION
    base 64                     BYTEA
    string                      TEXT
      date, time, date-time     DATE, TIME, TIMESTAMPTZ
      uuid                      UUID
      integer, number           NUMERIC
    object, array, document     JSON

Strings in a key are TEXT whatever their format: two texts of one moment are two keys,
and would be one row. JSON rather than JSONB, which orders keys, drops all but the
last of equal ones, and takes no NUL: a document is loaded as it was stored.

Names have at most 63 bytes; longer ones are cut, and end in a hash of the whole.
"""

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

from penstock.sdk.bindings import Field, FieldKind
from penstock.sdk.errors import Refused
from penstock.sdk.sql.dialect import Alteration, Column, Dialect, Fit, Table

__all__ = ["ANNOTATION", "EndpointType", "PostgresDialect", "literal", "moment", "shortened"]

ANNOTATION: Final = "x-postgres-type"
NAME_BYTES: Final = 63
INT64: Final = range(-(2**63), 2**63)

_TYPES: Final = {
    FieldKind.BOOLEAN: "BOOLEAN",
    FieldKind.INTEGER: "BIGINT",
    FieldKind.NUMBER: "DOUBLE PRECISION",
    FieldKind.STRING: "TEXT",
    FieldKind.BYTES: "BYTEA",
    FieldKind.JSON: "JSON",
}
_FORMATS: Final = {
    "date": "DATE",
    "time": "TIME",
    "date-time": "TIMESTAMPTZ",
    "uuid": "UUID",
    "integer": "NUMERIC",
    "number": "NUMERIC",
}
_CANONICAL: Final = {
    "TIME": "time without time zone",
    "TIMESTAMPTZ": "timestamp with time zone",
}
_SYSTEM_COLUMNS: Final = frozenset({"ctid", "xmin", "cmin", "xmax", "cmax", "tableoid"})

_DIGITS: Final = {"smallint": 5, "integer": 10, "bigint": 19}
_BY_CAST: Final = frozenset(
    {"smallint", "integer", "bigint", "numeric", "real", "double precision", "boolean", "date"}
    | {"time without time zone", "uuid", "character varying", "json", "jsonb"}
)
"""Types whose `::text` is what a string field would hold."""


@dataclass(frozen=True, slots=True)
class EndpointType:
    """A type that the endpoint has."""

    name: str
    """As the endpoint prints it."""

    base: str
    """What it is a domain over; else the same."""


@dataclass(frozen=True)
class PostgresDialect(Dialect):
    """How Postgres is spoken to."""

    types: Mapping[str, EndpointType] = field(default_factory=dict[str, EndpointType])
    """By what annotations say, the types that the endpoint has."""

    def quoted(self, name: str) -> str:
        """A name; Postgres takes any but those with a NUL."""
        if "\0" in name:
            raise Refused(
                f"name {json.dumps(name)} has a NUL in it, which no name in Postgres can have",
                hint="Exclude the field, or call the table otherwise.",
            )
        return super().quoted(name)

    def column_name(self, field: str) -> str:
        """What the column of a field is called."""
        if field in _SYSTEM_COLUMNS or not field:
            return f"{field}_{_hash(field)}"
        return shortened(field)

    def kept_type(self, field: Field) -> EndpointType | None:
        """The endpoint's own type that the field's values are the text of, if it says so."""
        found = self.types.get(annotated(field))
        if found is None:
            return None
        if field.kind is FieldKind.BYTES and found.base != "bytea":
            return None
        if field.kind is FieldKind.JSON and found.base not in ("json", "jsonb"):
            return None
        return found

    def column_type(self, field: Field) -> str:
        """What the column of a field is declared as."""
        if kept := self.kept_type(field):
            return kept.name
        if field.kind is FieldKind.STRING and not field.is_key:
            return _FORMATS.get(field.format, "TEXT")
        if field.kind is FieldKind.INTEGER and not _in_64_bits(field.annotations):
            return "NUMERIC"
        return _TYPES[field.kind]

    def fit(self, column: Column, field: Field, was: FieldKind | None = None) -> Fit:
        """Whether a column that is there can take the values of a field."""
        wanted = self.column_type(field)
        wanted = _CANONICAL.get(wanted, wanted if self.kept_type(field) else wanted.lower())
        if column.type == wanted or (column.type, wanted) in {
            ("numeric", "bigint"),
            ("character varying", "text"),
            ("jsonb", "json"),
        }:
            return Fit.COMPATIBLE
        if _widens(column.type, wanted, key=column.in_key):
            return Fit.MIGRATABLE
        return Fit.INCOMPATIBLE

    def literal(self, field: Field, value: Any) -> str | None:
        """Return the literal of a JSON value as the column of a field holds it."""
        match field.kind, value:
            case FieldKind.BOOLEAN, bool():
                return "true" if value else "false"
            case FieldKind.INTEGER, int():
                return literal(str(value))
            case FieldKind.NUMBER, int() | float():
                return literal(repr(value)) if math.isfinite(value) else None
            case FieldKind.BYTES, str():
                return literal("\\x" + base64.b64decode(value).hex())
            case FieldKind.STRING, str() if "\0" not in value:
                return literal(value)
            case _:
                return None

    def alter(self, alteration: Alteration) -> Sequence[str]:
        """In place; the table is written anew, where Postgres must."""
        before = alteration.before
        statements = [self.add_column(before, each) for each in alteration.added()]
        # Rows that are there keep it; rows to come must not get it.
        statements += [
            _alter(self, before, f"ALTER COLUMN {self.quoted(each.name)} DROP DEFAULT")
            for each in alteration.added()
            if each.default
        ]
        for column in before.columns:
            if column.name in alteration.migrated:
                field = alteration.migrated[column.name]
                statements.append(self._migrate(before, column, field))
        statements += [
            _alter(self, before, f"ALTER COLUMN {self.quoted(each.name)} DROP NOT NULL")
            for each in alteration.loosened()
        ]
        if before.key and not alteration.after.key:
            # Its columns stay not null.
            statements.append(
                _alter(self, before, f"DROP CONSTRAINT {self.quoted(before.key_name)}")
            )
        return statements

    def _migrate(self, table: Table, column: Column, field: Field) -> str:
        wanted, name = self.column_type(field), self.quoted(column.name)
        value = f"{name}::{wanted}"
        if wanted == "TEXT" and column.type == "timestamp with time zone":
            value = moment(name)
        elif wanted == "TEXT" and column.type == "bytea":
            value = f"translate(encode({name}, 'base64'), E'\\n', '')"
        return _alter(self, table, f"ALTER COLUMN {name} TYPE {wanted} USING {value}")


def annotated(field: Field) -> str:
    """The type that the schema says a field has in Postgres; empty, if it does not."""
    found = field.annotations.get(ANNOTATION)
    return found if isinstance(found, str) else ""


def shortened(name: str) -> str:
    """A name that Postgres does not cut."""
    if len(name.encode()) <= NAME_BYTES:
        return name
    tail = f"_{_hash(name)}"
    return name.encode()[: NAME_BYTES - len(tail)].decode(errors="ignore") + tail


def literal(text: str) -> str:
    """Text in a statement, while `standard_conforming_strings` is on."""
    return "'" + text.replace("'", "''") + "'"


def moment(column: str) -> str:
    """SQL of a moment as RFC 3339 writes it, with as many digits as it has; infinities by name."""
    whole = f"to_char({column}, 'YYYY-MM-DD\"T\"HH24:MI:SS')"
    fraction = f"rtrim(rtrim(to_char({column}, '.US'), '0'), '.')"
    return (
        f"CASE WHEN {column} >= '0001-01-01 00:00:00+00' AND {column} < '10000-01-01 00:00:00+00' "
        f"THEN {whole} || {fraction} || 'Z' ELSE {column}::text END"
    )


def _alter(dialect: Dialect, table: Table, how: str) -> str:
    return f"ALTER TABLE {dialect.quoted_path(table.path)} {how}"


def _hash(name: str) -> str:
    return xxhash.xxh64_hexdigest(name.encode())[:8]


def _in_64_bits(annotations: Mapping[str, Any]) -> bool:
    bounds = (annotations.get(each) for each in ("minimum", "maximum"))
    return all(
        int(each) in INT64
        for each in bounds
        if isinstance(each, int | float) and abs(each) != float("inf")
    )


def _widens(before: str, after: str, *, key: bool) -> bool:
    """Whether every value of one type is one of the other, too."""
    old, old_size = _parted(before)
    new, new_size = _parted(after)
    match old, new:
        case _, "text":
            return old == "character varying" or (not key and _has_text(old))
        case (("smallint" | "integer" | "bigint"), ("integer" | "bigint")):
            return _DIGITS[old] <= _DIGITS[new]
        case (("smallint" | "integer" | "bigint"), "numeric"):
            return not new_size or _whole_digits(new_size) >= _DIGITS[old]
        case "numeric", "numeric":
            if not new_size or not old_size:
                return not new_size
            return _whole_digits(new_size) >= _whole_digits(old_size) and (
                _fraction(new_size) >= _fraction(old_size)
            )
        case "real", "double precision":
            return not key
        case _:
            wider = not new_size or (old_size != () and old_size <= new_size)
            return old == new and old in _SIZED and wider


_SIZED: Final = frozenset(
    {"character varying", "bit varying", "time without time zone", "time with time zone"}
    | {"timestamp without time zone", "timestamp with time zone"}
)
"""Types of which more, or any, in the parentheses only lets more in."""


def _has_text(kind: str) -> bool:
    return kind in _BY_CAST or kind in ("timestamp with time zone", "bytea")


def _parted(kind: str) -> tuple[str, tuple[int, ...]]:
    """`timestamp(3) with time zone` is `timestamp with time zone` and `(3,)`."""
    found = re.search(r"\((-?\d+)(?:,(-?\d+))?\)", kind)
    if found is None:
        return kind, ()
    return kind.replace(found[0], ""), tuple(int(each) for each in found.groups() if each)


def _whole_digits(size: tuple[int, ...]) -> int:
    return size[0] - _fraction(size)


def _fraction(size: tuple[int, ...]) -> int:
    return size[1] if len(size) > 1 else 0
