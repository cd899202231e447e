"""Columns as a pipeline's file names them: a name, and a word for its type.

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

__all__ = ["Column", "columns_of", "fit_for_collections"]

_WORDS: Final = {
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
_OTHERWISE: Final = {
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
"""What others call the same."""

_NUMERIC: Final = re.compile(r"(?:numeric|decimal)\s*\(\s*(\d{1,2})\s*(?:,\s*(\d{1,2})\s*)?\)")


@dataclass(frozen=True, slots=True)
class Column:
    """A column that records have."""

    name: str
    word: str
    """Its type, as a file says it: one of the words above, `numeric` for all of that kind."""

    arrow: pa.DataType

    @classmethod
    def parse(cls, name: str, said: Any) -> "Column":
        """Read the word for a type.

        Raises:
            UsageError: there is no such type.
        """
        word = re.sub(r"\s+", " ", said.strip().lower()) if isinstance(said, str) else ""
        word = _OTHERWISE.get(word, word)
        if word in _WORDS:
            return cls(name, word, _WORDS[word])
        if digits := _NUMERIC.fullmatch(word):
            precision, scale = int(digits[1]), int(digits[2] or 0)
            if 1 <= precision <= 38 and scale <= precision:
                return cls(name, "numeric", pa.decimal128(precision, scale))
        raise UsageError(
            f'column "{name}" has a type that does not exist: {str(said)[:40]!r}',
            hint=f"Use one of {', '.join(_WORDS)}, or numeric(p, s) with at most 38 digits.",
        )

    @property
    def said(self) -> str:
        """The type as a file says it, in full."""
        if self.word != "numeric":
            return self.word
        return f"numeric({self.arrow.precision},{self.arrow.scale})"


def columns_of(said: Mapping[str, Any], *, what: str) -> tuple[Column, ...]:
    """The columns of a mapping from names to words, in its order.

    Raises:
        UsageError: a word or a name is not as it must be.
    """
    columns = tuple(Column.parse(name, word) for name, word in said.items())
    fit_for_collections(pa.schema([(c.name, c.arrow) for c in columns]), what=what)
    return columns


def fit_for_collections(schema: pa.Schema, *, what: str) -> pa.Schema:
    """`schema`, if a collection can have it and everything that reads one can name its columns.

    Raises:
        UsageError: it cannot.
    """
    if not schema.names:
        raise UsageError(f"{what} has no columns", hint="Give it at least one.")
    if "" in schema.names:
        raise UsageError(f"{what} has a column without a name", hint="Give it one.")
    by_lower: dict[str, str] = {}
    for name in schema.names:
        if (other := by_lower.get(name.lower())) is not None:
            raise UsageError(
                f'{what} has the columns "{other}" and "{name}"',
                detail="Spark tells columns apart by their names without regard to case.",
                hint="Leave one of them out, or rename it.",
            )
        by_lower[name.lower()] = name
    return check_row_schema(schema, (), collection=what)
