"""Conflicts between a binding and an existing table.

Validate reports them as constraints and Apply as errors. Both use these functions, so they agree.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.protocol.specs import CollectionSpec
from penstock.sdk.bindings import Field, FieldKind
from penstock.sdk.errors import Refused
from penstock.sdk.sql.dialect import Dialect, Table

__all__ = [
    "ExistingTable",
    "TableMismatch",
    "array_item_reason",
    "key_mismatch",
    "missing_documents",
]


class TableMismatch(Refused):
    """An existing table cannot be altered to store the documents of a binding."""


@dataclass(frozen=True, slots=True)
class ExistingTable:
    """Existing table, with the record of the last Apply."""

    table: Table
    filled: bool
    """True if the table has rows that can be loaded."""

    applied: Mapping[str, FieldKind] = field(default_factory=dict[str, FieldKind])
    """Kinds of the fields that were selected last; empty if the table was not bound."""

    adopted: bool = False
    """True if the connector did not create the table."""


def key_mismatch(table: Table, key: Sequence[Collection[str]]) -> str:
    """Return how the key of a table differs; empty if it is equal. Each part has alternatives."""
    if len(table.key) == len(key) and all(
        name in names for name, names in zip(table.key, key, strict=True)
    ):
        return ""
    expected = ", ".join(next(iter(names)) for names in key)
    actual = ", ".join(table.key) or "none"
    return f'table "{".".join(table.path)}" has the key ({actual}), not ({expected})'


def missing_documents(dialect: Dialect, existing: ExistingTable, document: Field | None) -> str:
    """Return why existing rows have no complete documents; empty if they have."""
    if document is None or not existing.filled:
        return ""
    name = dialect.column_name(document.name)
    has_column = dialect.with_names(existing.table, [name]).column(name) is not None
    if has_column and (not existing.applied or document.name in existing.applied):
        return ""
    return f'table "{".".join(existing.table.path)}" has rows without a document in "{name}"'


def array_item_reason(collection: CollectionSpec, ptr: str) -> str:
    """Return why documents cannot be assembled from a location; empty if they can."""
    tokens = ptr.split("/")
    for depth, token in enumerate(tokens[2:], 2):
        outer = "/".join(tokens[:depth])
        inferred = [
            projection.inference.types
            for projection in collection.projections
            if projection.ptr == outer
        ]
        only_objects = inferred and all(types and "array" not in types for types in inferred)
        if re.fullmatch(r"0|[1-9][0-9]*", token) and not only_objects:
            return (
                f'location "{ptr}" may be an item of an array, and documents cannot be assembled '
                "from array items"
            )
    return ""
