"""Which reductions Spark can do by itself, and by which aggregates.

The rows of a collection are documents whose properties are its columns. Natively none of
them is written, read or validated. So the types of the columns alone must make it certain
that every row matches the schema, and that an aggregate of a column is what folding the
documents would leave there:

    lastWriteWins    what the row has that is last in the fold order
    firstWriteWins   what the first one has
    sum              integers, each as often as its row is there
    minimize         integers, booleans and text; what is text only in a document, as a
    maximize         decimal or a time is, is compared as text there, and not here

Where anything is in doubt, documents are folded.

The fold order is that of the columns named for it, then of all others, nulls first. Rows
at one place in it are equal, so neither files nor times show in what comes of them.
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
"""The metadata of a decimal column whose values are integers in documents too, not text."""

TOTAL: Final = pa.decimal128(38, 0)
"""It holds an integer of 64 bits as often as 64 bits can count."""


class Aggregate(StrEnum):
    """What becomes of a column."""

    FIRST = "first"
    LAST = "last"
    SUM = "sum"
    MINIMUM = "minimum"
    MAXIMUM = "maximum"


@dataclass(frozen=True, slots=True)
class NativePlan:
    """How the rows of each key become one."""

    key: tuple[str, ...]
    order: tuple[str, ...]
    """The fold order, in which one row is the first and one the last."""
    aggregates: Mapping[str, Aggregate]
    """Of every column that is not of the key."""
    columns: pa.Schema
    """What comes out; sums are wider than what was summed."""


def native_plan(
    schema: Any, columns: pa.Schema, key: Sequence[str], order: Sequence[str]
) -> NativePlan | None:
    """The plan, or None if documents must be folded.

    Args:
        schema: a JSON schema with `reduce` annotations.
        columns: of the collection, without time and diff.
        key: columns that tell documents apart.
        order: columns that documents of one key are ordered by.

    Raises:
        UsageError: the schema has what we cannot follow; says where.
    """
    compiled, root = Schema(schema), {} if schema is True else schema
    types = {field.name: _types(field) for field in columns}
    if (
        compiled.deletes
        or compiled.varies
        or not all(types.values())
        or not _Proof(compiled.references, types).of_rows(root)
    ):
        return None
    by = fold_order(columns, key, order)
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
            aggregates[name] = _at_the_end(aggregate, columns.field(name), by)
        elif _is_itself(columns.field(name).type):
            aggregates[name] = aggregate
        else:
            return None
    sums = [name for name, each in aggregates.items() if each is Aggregate.SUM]
    for name in sums:
        field = pa.field(name, TOTAL, nullable=False, metadata=INTEGER)
        columns = columns.set(columns.get_field_index(name), field)
    return NativePlan(tuple(key), by, aggregates, columns)


def fold_order(columns: pa.Schema, key: Sequence[str], order: Sequence[str]) -> tuple[str, ...]:
    """What to sort the rows of a key by, ascending and nulls first."""
    rest = (name for name in columns.names if name not in key)
    return tuple(dict.fromkeys([*order, *rest]))


_AGGREGATES: Final = {
    "lastWriteWins": Aggregate.LAST,
    "firstWriteWins": Aggregate.FIRST,
    "sum": Aggregate.SUM,
    "minimize": Aggregate.MINIMUM,
    "maximize": Aggregate.MAXIMUM,
}


def _at_the_end(aggregate: Aggregate, field: pa.Field, order: Sequence[str]) -> Aggregate:
    """Of what is ordered by before all else, the last value is the greatest: cheaper to find."""
    if field.name != order[0]:
        return aggregate
    if aggregate is Aggregate.LAST:
        return Aggregate.MAXIMUM
    return aggregate if field.nullable else Aggregate.MINIMUM


def _types(field: pa.Field) -> frozenset[str]:
    """The JSON types that values of a column have; none if it cannot be aggregated.

    Those that can are ordered by Spark as they are by Arrow.
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


def _is_itself(kind: pa.DataType) -> bool:
    """Whether values of a column compare as those in documents do."""
    return bool(pa.types.is_boolean(kind) or pa.types.is_signed_integer(kind) or _is_text(kind))


def _with_types(root: dict[str, Any], types: Mapping[str, frozenset[str]]) -> dict[str, Any]:
    """The schema, and what else is known of rows: that every column is there, and its type."""
    properties = {name: {"type": sorted(each)} for name, each in types.items()}
    known = {"type": "object", "required": list(types), "properties": properties}
    return {**root, "allOf": [*root.get("allOf", ()), known]}


_NO_ASSERTIONS: Final = frozenset(
    (
        *("$anchor", "$comment", "$defs", "$id", "$ref", "$schema", "allOf", "contentEncoding"),
        *("contentMediaType", "default", "definitions", "deprecated", "description", "examples"),
        *("format", "readOnly", "reduce", "title", "type", "writeOnly"),
    )
)
"""They assert nothing, or what a proof looks into."""

_OF_OBJECTS: Final = frozenset(("additionalProperties", "properties", "required"))


@dataclass(frozen=True, slots=True)
class _Proof:
    """That whatever has these types matches a schema."""

    references: References
    types: Mapping[str, frozenset[str]]

    def of_rows(self, schema: Any, seen: tuple[int, ...] = ()) -> bool:
        """Whether every row does, as a document."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return schema is True
        rest = schema.get("additionalProperties", True)
        inner = schema.get("properties", {})
        return (
            _says_only(schema, _NO_ASSERTIONS | _OF_OBJECTS)
            and _admits(schema, {"object"})
            and self.types.keys() >= set(schema.get("required", ()))
            and all(self._of(types, inner.get(name, rest)) for name, types in self.types.items())
            and all(self.of_rows(each, (*seen, id(schema))) for each in self._beside(schema))
        )

    def _of(self, types: frozenset[str], schema: Any, seen: tuple[int, ...] = ()) -> bool:
        """Whether every scalar of `types` does."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return schema is True
        return (
            _says_only(schema, _NO_ASSERTIONS)
            and _admits(schema, types)
            and all(self._of(types, each, (*seen, id(schema))) for each in self._beside(schema))
        )

    def _beside(self, schema: dict[str, Any]) -> list[Any]:
        """What `schema` applies to the same value."""
        target = [self.references.target(schema)] if "$ref" in schema else []
        return [*schema.get("allOf", ()), *target]


def _says_only(schema: dict[str, Any], keywords: frozenset[str]) -> bool:
    return all(each in keywords or each.startswith(("x-", "X-")) for each in schema)


def _admits(schema: dict[str, Any], types: frozenset[str] | set[str]) -> bool:
    if "type" not in schema:
        return True
    named = {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
    return types <= (named | {"integer"} if "number" in named else named)
