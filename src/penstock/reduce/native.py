"""Reductions that Spark can compute with its own aggregates.

The rows of a collection are documents whose properties are its columns. The native path
encodes, decodes and validates no document. The column types alone must therefore prove that
every row matches the schema, and that the aggregate of a column equals the reduction:

    lastWriteWins    value of the last row in the fold order
    firstWriteWins   value of the first row
    sum              integers, multiplied by the diff of their rows
    minimize         integers, booleans and text. Decimals and timestamps are text in
    maximize         documents, and compare differently there

If the proof fails, documents are reduced.

The fold order is the order by the given columns, then by all others, nulls first. Rows that
are equal in it are equal, so the result does not depend on files or times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import pyarrow as pa

from penstock.reduce.annotation import Schema
from penstock.reduce.columns import columns_of
from penstock.reduce.document import show_pointer
from penstock.reduce.references import References

__all__ = ["INTEGER", "Aggregate", "NativePlan", "fold_order", "native_plan"]

INTEGER: Final = {b"penstock.json": b"integer"}
"""Field metadata of a decimal column whose values are integers in documents, not text."""

TOTAL: Final = pa.decimal128(38, 0)
"""Wide enough for the sum of 2^63 integers of 64 bits."""


class Aggregate(StrEnum):
    """Aggregate of a column."""

    FIRST = "first"
    LAST = "last"
    SUM = "sum"
    MINIMUM = "minimum"
    MAXIMUM = "maximum"


@dataclass(frozen=True, slots=True)
class NativePlan:
    """Aggregates that reduce the rows of each key to one row."""

    key: tuple[str, ...]
    order: tuple[str, ...]
    """Columns of the fold order, which is total over distinct rows."""
    aggregates: Mapping[str, Aggregate]
    """Aggregate of every column outside the key."""
    columns: pa.Schema
    """Columns of the result; sums are wider than their input."""


def native_plan(
    schema: Any, columns: pa.Schema, key: Sequence[str], order: Sequence[str]
) -> NativePlan | None:
    """Return the plan, or None if documents must be reduced.

    Args:
        schema: A JSON schema with `reduce` annotations.
        columns: Columns of the collection, without time and diff.
        key: Key columns.
        order: Columns that define the order of the documents of a key.

    Raises:
        UsageError: The schema is invalid or uses an unsupported keyword.
    """
    compiled, root = Schema(schema), {} if schema is True else schema
    types = {field.name: _types(field) for field in columns}
    if (
        compiled.deletes
        or compiled.varies
        or not all(types.values())
        or not _Proof(compiled.references, types).matches_rows(root)
    ):
        return None
    fold_columns = fold_order(columns, key, order)
    aggregates: dict[str, Aggregate] = {}
    fields = {name: show_pointer([name]) for name in columns.names}
    for name, column in columns_of(_with_types(root, types), fields).items():
        if column is None:
            return None
        aggregate = _AGGREGATES[column.strategy]
        ordered = aggregate in (Aggregate.FIRST, Aggregate.LAST)
        if name in key:
            if not ordered:
                return None
        elif ordered:
            aggregates[name] = _cheaper_aggregate(aggregate, columns.field(name), fold_columns)
        elif _compares_as_in_documents(columns.field(name).type):
            aggregates[name] = aggregate
        else:
            return None
    sums = [name for name, aggregate in aggregates.items() if aggregate is Aggregate.SUM]
    for name in sums:
        field = pa.field(name, TOTAL, nullable=False, metadata=INTEGER)
        columns = columns.set(columns.get_field_index(name), field)
    return NativePlan(tuple(key), fold_columns, aggregates, columns)


def fold_order(columns: pa.Schema, key: Sequence[str], order: Sequence[str]) -> tuple[str, ...]:
    """Return the columns to sort the rows of a key by, ascending and nulls first."""
    others = (name for name in columns.names if name not in key)
    return tuple(dict.fromkeys([*order, *others]))


_AGGREGATES: Final = {
    "lastWriteWins": Aggregate.LAST,
    "firstWriteWins": Aggregate.FIRST,
    "sum": Aggregate.SUM,
    "minimize": Aggregate.MINIMUM,
    "maximize": Aggregate.MAXIMUM,
}


def _cheaper_aggregate(aggregate: Aggregate, field: pa.Field, order: Sequence[str]) -> Aggregate:
    """Replace first and last of the leading order column by the cheaper minimum and maximum."""
    if field.name != order[0]:
        return aggregate
    if aggregate is Aggregate.LAST:
        return Aggregate.MAXIMUM
    return aggregate if field.nullable else Aggregate.MINIMUM


def _types(field: pa.Field) -> frozenset[str]:
    """Return the JSON types of a column, or an empty set if it cannot be aggregated.

    Spark and Arrow order the supported types equally.
    """
    kind = field.type
    if pa.types.is_boolean(kind):
        name = "boolean"
    elif pa.types.is_signed_integer(kind):
        name = "integer"
    elif _is_text(kind) or any(is_kind(kind) for is_kind in _TEXT_IN_DOCUMENTS):
        name = "string"
    else:
        return frozenset()
    return frozenset((name, "null") if field.nullable else (name,))


_TEXT_IN_DOCUMENTS: Final = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_date32,
    pa.types.is_decimal128,
    lambda kind: pa.types.is_timestamp(kind) and kind.unit == "us",
)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _compares_as_in_documents(kind: pa.DataType) -> bool:
    """Return whether column values compare like their documents."""
    return bool(pa.types.is_boolean(kind) or pa.types.is_signed_integer(kind) or _is_text(kind))


def _with_types(root: dict[str, Any], types: Mapping[str, frozenset[str]]) -> dict[str, Any]:
    """Add to the schema that every column is required, and its type."""
    properties = {name: {"type": sorted(column_types)} for name, column_types in types.items()}
    row_schema = {"type": "object", "required": list(types), "properties": properties}
    return {**root, "allOf": [*root.get("allOf", ()), row_schema]}


_NO_ASSERTIONS: Final = frozenset(
    (
        *("$anchor", "$comment", "$defs", "$id", "$ref", "$schema", "allOf", "contentEncoding"),
        *("contentMediaType", "default", "definitions", "deprecated", "description", "examples"),
        *("format", "readOnly", "reduce", "title", "type", "writeOnly"),
    )
)
"""Keywords without assertion, and keywords that a proof follows."""

_OF_OBJECTS: Final = frozenset(("additionalProperties", "properties", "required"))


@dataclass(frozen=True, slots=True)
class _Proof:
    """Proof that all values of the column types match a schema."""

    references: References
    types: Mapping[str, frozenset[str]]

    def matches_rows(self, schema: Any, seen: tuple[int, ...] = ()) -> bool:
        """Return whether every row matches `schema` as a document."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return schema is True
        additional = schema.get("additionalProperties", True)
        inner = schema.get("properties", {})
        return (
            _has_only(schema, _NO_ASSERTIONS | _OF_OBJECTS)
            and _accepts(schema, {"object"})
            and self.types.keys() >= set(schema.get("required", ()))
            and all(
                self._matches_scalars(types, inner.get(name, additional))
                for name, types in self.types.items()
            )
            and all(
                self.matches_rows(inner_schema, (*seen, id(schema)))
                for inner_schema in self._in_place(schema)
            )
        )

    def _matches_scalars(
        self, types: frozenset[str], schema: Any, seen: tuple[int, ...] = ()
    ) -> bool:
        """Return whether every scalar of `types` matches `schema`."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return schema is True
        return (
            _has_only(schema, _NO_ASSERTIONS)
            and _accepts(schema, types)
            and all(
                self._matches_scalars(types, inner_schema, (*seen, id(schema)))
                for inner_schema in self._in_place(schema)
            )
        )

    def _in_place(self, schema: dict[str, Any]) -> list[Any]:
        """Return the schemas that `schema` applies to the same value."""
        target = [self.references.target(schema)] if "$ref" in schema else []
        return [*schema.get("allOf", ()), *target]


def _has_only(schema: dict[str, Any], keywords: frozenset[str]) -> bool:
    return all(keyword in keywords or keyword.startswith(("x-", "X-")) for keyword in schema)


def _accepts(schema: dict[str, Any], types: frozenset[str] | set[str]) -> bool:
    if "type" not in schema:
        return True
    named = {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
    return types <= (named | {"integer"} if "number" in named else named)
