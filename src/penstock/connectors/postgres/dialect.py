"""SQL of Postgres.

If the schema of a field has `x-postgres-type`, as collections of Postgres sources do, and the
endpoint has that type, the column has that type. Other fields have these types:

    boolean                     BOOLEAN
    integer                     BIGINT            NUMERIC, if the schema allows more than 64 bits
    number                      DOUBLE PRECISION
    base64                      BYTEA
    string                      TEXT
      date, time, date-time     DATE, TIME, TIMESTAMPTZ
      uuid                      UUID
      integer, number           NUMERIC
    object, array, document     JSON

Strings in a key are always TEXT: two texts of the same timestamp are two keys and must not be one
row. Documents are JSON, not JSONB, to be loaded as they were stored: JSONB sorts keys, drops
duplicates and rejects NUL.

Names have at most 63 bytes. Longer names are truncated and end in a hash of the name.
"""

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

from penstock.pgclient import quote_literal
from penstock.sdk.bindings import Field, FieldKind
from penstock.sdk.errors import Refused
from penstock.sdk.sql.dialect import Alteration, Column, Dialect, Fit, Table

__all__ = [
    "ANNOTATION",
    "EndpointType",
    "PostgresDialect",
    "shortened",
    "timestamp_text",
]

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
"""Types whose `::text` equals the value of a string field."""


@dataclass(frozen=True, slots=True)
class EndpointType:
    """Type of the endpoint."""

    name: str
    """Name as printed by the endpoint."""

    base: str
    """Base type of a domain; for other types, the type."""


@dataclass(frozen=True)
class PostgresDialect(Dialect):
    """SQL of Postgres."""

    types: Mapping[str, EndpointType] = field(default_factory=dict[str, EndpointType])
    """Types of the endpoint, by annotation."""

    def quoted(self, name: str) -> str:
        """Return a name as a quoted identifier. Names with a NUL are rejected."""
        if "\0" in name:
            raise Refused(
                f"name {json.dumps(name)} contains a NUL, which Postgres does not allow",
                hint="Exclude the field, or use another table name.",
            )
        return super().quoted(name)

    def column_name(self, field: str) -> str:
        """Return the column name of a field."""
        if field in _SYSTEM_COLUMNS or not field:
            return f"{field}_{_hash(field)}"
        return shortened(field)

    def annotated_type(self, field: Field) -> EndpointType | None:
        """Return the annotated type of a field; None if the endpoint does not have it."""
        kind = self.types.get(annotated(field))
        if kind is None:
            return None
        if field.kind is FieldKind.BYTES and kind.base != "bytea":
            return None
        if field.kind is FieldKind.JSON and kind.base not in ("json", "jsonb"):
            return None
        return kind

    def column_type(self, field: Field) -> str:
        """Return the type of the column of a field."""
        if kind := self.annotated_type(field):
            return kind.name
        if field.kind is FieldKind.STRING and not field.is_key:
            return _FORMATS.get(field.format, "TEXT")
        if field.kind is FieldKind.INTEGER and not _in_64_bits(field.annotations):
            return "NUMERIC"
        return _TYPES[field.kind]

    def fit(self, column: Column, field: Field, was: FieldKind | None = None) -> Fit:
        """Return whether an existing column can hold the values of a field."""
        required = self.column_type(field)
        name = required if self.annotated_type(field) else required.lower()
        required = _CANONICAL.get(required, name)
        if column.type == required or (column.type, required) in {
            ("numeric", "bigint"),
            ("character varying", "text"),
            ("jsonb", "json"),
        }:
            return Fit.COMPATIBLE
        if _widens(column.type, required, key=column.in_key):
            return Fit.MIGRATABLE
        return Fit.INCOMPATIBLE

    def literal(self, field: Field, value: Any) -> str | None:
        """Return the literal of a JSON value for the column of a field."""
        match field.kind, value:
            case FieldKind.BOOLEAN, bool():
                return "true" if value else "false"
            case FieldKind.INTEGER, int():
                return quote_literal(str(value))
            case FieldKind.NUMBER, int() | float():
                return quote_literal(repr(value)) if math.isfinite(value) else None
            case FieldKind.BYTES, str():
                return quote_literal("\\x" + base64.b64decode(value).hex())
            case FieldKind.STRING, str() if "\0" not in value:
                return quote_literal(value)
            case _:
                return None

    def alter(self, alteration: Alteration) -> Sequence[str]:
        """Return statements that alter the table in place. Postgres may rewrite it."""
        before = alteration.before
        statements = [self.add_column(before, column) for column in alteration.added()]
        # The default applies to existing rows only.
        statements += [
            _alter(self, before, f"ALTER COLUMN {self.quoted(column.name)} DROP DEFAULT")
            for column in alteration.added()
            if column.default
        ]
        for column in before.columns:
            if column.name in alteration.migrated:
                field = alteration.migrated[column.name]
                statements.append(self._migrate(before, column, field))
        statements += [
            _alter(self, before, f"ALTER COLUMN {self.quoted(column.name)} DROP NOT NULL")
            for column in alteration.loosened()
        ]
        if before.key and not alteration.after.key:
            # The columns of the key remain NOT NULL.
            statements.append(
                _alter(self, before, f"DROP CONSTRAINT {self.quoted(before.key_name)}")
            )
        return statements

    def _migrate(self, table: Table, column: Column, field: Field) -> str:
        target, name = self.column_type(field), self.quoted(column.name)
        value = f"{name}::{target}"
        if target == "TEXT" and column.type == "timestamp with time zone":
            value = timestamp_text(name)
        elif target == "TEXT" and column.type == "bytea":
            value = f"translate(encode({name}, 'base64'), E'\\n', '')"
        return _alter(self, table, f"ALTER COLUMN {name} TYPE {target} USING {value}")


def annotated(field: Field) -> str:
    """Return the annotated Postgres type of a field; empty if there is none."""
    annotation = field.annotations.get(ANNOTATION)
    return annotation if isinstance(annotation, str) else ""


def shortened(name: str) -> str:
    """Return a name that Postgres does not truncate."""
    if len(name.encode()) <= NAME_BYTES:
        return name
    tail = f"_{_hash(name)}"
    return name.encode()[: NAME_BYTES - len(tail)].decode(errors="ignore") + tail


def timestamp_text(column: str) -> str:
    """Return SQL for a timestamp in RFC 3339, with all digits; infinities by name."""
    seconds = f"to_char({column}, 'YYYY-MM-DD\"T\"HH24:MI:SS')"
    fraction = f"rtrim(rtrim(to_char({column}, '.US'), '0'), '.')"
    return (
        f"CASE WHEN {column} >= '0001-01-01 00:00:00+00' AND {column} < '10000-01-01 00:00:00+00' "
        f"THEN {seconds} || {fraction} || 'Z' ELSE {column}::text END"
    )


def _alter(dialect: Dialect, table: Table, action: str) -> str:
    return f"ALTER TABLE {dialect.quoted_path(table.path)} {action}"


def _hash(name: str) -> str:
    return xxhash.xxh64_hexdigest(name.encode())[:8]


def _in_64_bits(annotations: Mapping[str, Any]) -> bool:
    bounds = (annotations.get(name) for name in ("minimum", "maximum"))
    return all(
        int(bound) in INT64
        for bound in bounds
        if isinstance(bound, int | float) and abs(bound) != float("inf")
    )


def _widens(before: str, after: str, *, key: bool) -> bool:
    """Return whether every value of one type is a value of the other."""
    old, old_size = _split_size(before)
    new, new_size = _split_size(after)
    match old, new:
        case _, "text":
            return old == "character varying" or (not key and _has_text(old))
        case (("smallint" | "integer" | "bigint"), ("integer" | "bigint")):
            return _DIGITS[old] <= _DIGITS[new]
        case (("smallint" | "integer" | "bigint"), "numeric"):
            return not new_size or _integer_digits(new_size) >= _DIGITS[old]
        case "numeric", "numeric":
            if not new_size or not old_size:
                return not new_size
            return _integer_digits(new_size) >= _integer_digits(old_size) and (
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
"""Types for which a larger or missing size accepts more values."""


def _has_text(kind: str) -> bool:
    return kind in _BY_CAST or kind in ("timestamp with time zone", "bytea")


def _split_size(kind: str) -> tuple[str, tuple[int, ...]]:
    """Split `timestamp(3) with time zone` into `timestamp with time zone` and `(3,)`."""
    size = re.search(r"\((-?\d+)(?:,(-?\d+))?\)", kind)
    if size is None:
        return kind, ()
    return kind.replace(size[0], ""), tuple(int(digits) for digits in size.groups() if digits)


def _integer_digits(size: tuple[int, ...]) -> int:
    return size[0] - _fraction(size)


def _fraction(size: tuple[int, ...]) -> int:
    return size[1] if len(size) > 1 else 0
