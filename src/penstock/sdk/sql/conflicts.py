"""What stands in the way of a binding in a table that is there.

Validate tells it of fields, and Apply refuses it; both ask here, so that they agree.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.protocol.specs import CollectionSpec
from penstock.sdk.bindings import Field, FieldKind
from penstock.sdk.errors import Refused
from penstock.sdk.sql.dialect import Dialect, Table

__all__ = ["Standing", "TableMismatch", "other_key", "within_array", "without_documents"]


class TableMismatch(Refused):
    """A table that exists cannot be altered to take the documents of a binding."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A table that is there, and what is known of it."""

    table: Table
    filled: bool
    """Whether there are rows in it that could be loaded."""

    applied: Mapping[str, FieldKind] = field(default_factory=dict[str, FieldKind])
    """By field that was selected last, what its values were; none, if it was not bound."""

    taken_over: bool = False
    """Whether somebody else made it."""


def other_key(table: Table, key: Sequence[Collection[str]]) -> str:
    """Why the key of a table is not this one, of which each part may have several names."""
    if len(table.key) == len(key) and all(
        name in names for name, names in zip(table.key, key, strict=True)
    ):
        return ""
    wanted = ", ".join(next(iter(names)) for names in key)
    there = ", ".join(table.key) or "none"
    return f'table "{".".join(table.path)}" has the key ({there}), not ({wanted})'


def without_documents(dialect: Dialect, standing: Standing, document: Field | None) -> str:
    """Why rows that are there cannot be loaded as documents, which are to be kept whole."""
    if document is None or not standing.filled:
        return ""
    name = dialect.column_name(document.name)
    there = dialect.spelled(standing.table, [name]).column(name) is not None
    if there and (not standing.applied or document.name in standing.applied):
        return ""
    return f'table "{".".join(standing.table.path)}" has rows without a document in "{name}"'


def within_array(collection: CollectionSpec, ptr: str) -> str:
    """Why documents cannot be put together of a location: it may be an item of an array."""
    tokens = ptr.split("/")
    for at, token in enumerate(tokens[2:], 2):
        outer = "/".join(tokens[:at])
        found = [each.inference.types for each in collection.projections if each.ptr == outer]
        only_objects = found and all(types and "array" not in types for types in found)
        if re.fullmatch(r"0|[1-9][0-9]*", token) and not only_objects:
            return (
                f'location "{ptr}" may be an item of an array, of which documents cannot be put '
                "together again"
            )
    return ""
