"""Columns in a configuration file: a name and the name of a type.

boolean                 bool
smallint, int, bigint   int16, int32, int64
double                  double
numeric(p, s)           decimal128(p, s), at most 38 digits
text                    string
bytes                   binary, in text as base64
date                    date32
timestamp               timestamp[us]
timestamptz             timestamp[us, UTC]
json                    string, any value as the JSON text that was written
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from penstock.data.schema import check_row_schema
from penstock.errors import UsageError

__all__ = ["Column", "check_columns", "parse_columns"]

_TYPES: Final = {
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "text": pa.string(),
    "bytes": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "json": pa.string(),
}
_ALIASES: Final = {
    "bool": "boolean",
    "integer": "int",
    "int2": "smallint",
    "int4": "int",
    "int8": "bigint",
    "double precision": "double",
    "float8": "double",
    "string": "text",
    "binary": "bytes",
    "bytea": "bytes",
}
"""Aliases of type names."""

_NUMERIC: Final = re.compile(r"(?:numeric|decimal)\s*\(\s*(\d{1,2})\s*(?:,\s*(\d{1,2})\s*)?\)")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of decoded records."""

    name: str
    type_name: str
    """Type name without parameters: one of the names above, such as `numeric`."""

    arrow: pa.DataType

    @classmethod
    def parse(cls, name: str, type_text: Any) -> "Column":
        """Parse a type name.

        Raises:
            UsageError: the type does not exist.
        """
        text = type_text.strip().lower() if isinstance(type_text, str) else ""
        text = re.sub(r"\s+", " ", text)
        type_name = _ALIASES.get(text, text)
        if type_name in _TYPES:
            return cls(name, type_name, _TYPES[type_name])
        if digits := _NUMERIC.fullmatch(type_name):
            precision, scale = int(digits[1]), int(digits[2] or 0)
            if 1 <= precision <= 38 and scale <= precision:
                return cls(name, "numeric", pa.decimal128(precision, scale))
        raise UsageError(
            f'column "{name}" has a type that does not exist: {str(type_text)[:40]!r}',
            hint=f"Use one of {', '.join(_TYPES)}, or numeric(p, s) with at most 38 digits.",
        )

    @property
    def type_text(self) -> str:
        """Type name with its parameters."""
        if self.type_name != "numeric":
            return self.type_name
        return f"numeric({self.arrow.precision},{self.arrow.scale})"


def parse_columns(type_names: Mapping[str, Any], *, owner: str) -> tuple[Column, ...]:
    """Return the columns of a mapping from column names to type names, in its order.

    Raises:
        UsageError: a type name or a column name is invalid.
    """
    columns = tuple(Column.parse(name, type_text) for name, type_text in type_names.items())
    check_columns(pa.schema([(c.name, c.arrow) for c in columns]), owner=owner)
    return columns


def check_columns(schema: pa.Schema, *, owner: str) -> pa.Schema:
    """Return `schema`, checked: a collection can have it, and readers can name its columns.

    Raises:
        UsageError: the schema is invalid.
    """
    if not schema.names:
        raise UsageError(f"{owner} has no columns", hint="Add at least one.")
    if "" in schema.names:
        raise UsageError(f"{owner} has a column without a name", hint="Name the column.")
    by_lower: dict[str, str] = {}
    for name in schema.names:
        if (other := by_lower.get(name.lower())) is not None:
            raise UsageError(
                f'{owner} has the columns "{other}" and "{name}"',
                detail="Spark compares column names without regard to case.",
                hint="Remove or rename one of them.",
            )
        by_lower[name.lower()] = name
    return check_row_schema(schema, (), collection=owner)
