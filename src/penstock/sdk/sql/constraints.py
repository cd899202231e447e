"""Constraints of SQL endpoints on fields, for new and existing tables.

new table        key                       location required
                 root document             location required; recommended with delta updates;
                                           optional with document: false
                 one scalar type           location recommended
                 one other type            optional
                 several types, only null  forbidden
                 column of another field   forbidden; for a key field, unsatisfiable
                 item of an array, with    the same
                 document: false

existing table   field with a column       required if the column fits or can be migrated;
                                           otherwise unsatisfiable
                 different key             unsatisfiable
                 root document, if rows    unsatisfiable
                 have none
                 other field               as in a new table, but never required: the
                                           column would be new, and null in every row
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.protocol.specs import Constraint, ConstraintType
from penstock.sdk.bindings import Field
from penstock.sdk.connector import RequestedBinding
from penstock.sdk.sql.conflicts import (
    ExistingTable,
    array_item_reason,
    key_mismatch,
    missing_documents,
)
from penstock.sdk.sql.dialect import Column, Dialect, Fit, Table

__all__ = ["constraints", "recreation_reason"]


def constraints(
    dialect: Dialect,
    binding: RequestedBinding[Any],
    existing: ExistingTable | None,
    *,
    delta_updates: bool,
    document: bool = True,
    extra: Sequence[Column] = (),
) -> Mapping[str, Constraint]:
    """Return the constraint of each field. `extra` are columns that are not fields."""
    result = {
        field.name: _for_new_table(field, delta_updates, document) for field in binding.fields
    }
    applied = existing.applied if existing is not None else {}
    # If several fields map to one column, existing columns and keys have precedence.
    fields = sorted(binding.fields, key=lambda field: (field.name not in applied, not field.is_key))
    if existing is not None:
        names = [dialect.column_name(field.name) for field in reversed(fields)]
        table = dialect.with_names(existing.table, names)
        result |= _for_columns(dialect, fields, table, existing)
        if not delta_updates:
            result |= _for_key(dialect, binding, table, existing)
            result |= _for_documents(dialect, fields, existing, required=document)
    if not delta_updates and not document:
        result |= _for_array_items(binding)
    return result | _for_shared_columns(dialect, fields, extra)


def recreation_reason(
    result: Mapping[str, Constraint], of_new_table: Mapping[str, Constraint]
) -> str:
    """Return why only a new table satisfies the constraints; empty if the existing one does."""
    reasons = [
        constraint.reason
        for name, constraint in result.items()
        if constraint.type is ConstraintType.UNSATISFIABLE
        and of_new_table[name].type is not ConstraintType.UNSATISFIABLE
    ]
    return "; ".join(dict.fromkeys(reasons))


def _for_new_table(field: Field, delta_updates: bool, document: bool) -> Constraint:
    if field.is_key:
        return Constraint(ConstraintType.LOCATION_REQUIRED, "the field is part of the key")
    if field.ptr == "":
        if not document:
            return Constraint(ConstraintType.FIELD_OPTIONAL, "documents are assembled from columns")
        if delta_updates:
            return Constraint(ConstraintType.LOCATION_RECOMMENDED, "the field is the root document")
        return Constraint(
            ConstraintType.LOCATION_REQUIRED, "the root document is loaded and reduced"
        )
    if field.inference.single_scalar:
        return Constraint(ConstraintType.LOCATION_RECOMMENDED, "the field has one scalar type")
    if field.inference.single_type is not None:
        return Constraint(ConstraintType.FIELD_OPTIONAL, "the field is stored as JSON")
    return Constraint(
        ConstraintType.FIELD_FORBIDDEN,
        f"no column type exists for {_types(field) or 'a field without type'}",
    )


def _for_columns(
    dialect: Dialect, fields: Sequence[Field], table: Table, existing: ExistingTable
) -> dict[str, Constraint]:
    result = {}
    for field in fields:
        column = table.column(dialect.column_name(field.name))
        needed = field.name in existing.applied or field.is_key
        if column is None:
            continue
        if dialect.fit(column, field, existing.applied.get(field.name)) is not Fit.INCOMPATIBLE:
            if needed:
                result[field.name] = Constraint(
                    ConstraintType.FIELD_REQUIRED, f'column "{column.name}" exists'
                )
        elif needed:
            result[field.name] = Constraint(
                ConstraintType.UNSATISFIABLE,
                f'column "{column.name}" is {column.type}, which cannot hold '
                f"{_types(field)}{_remedy(existing)}",
            )
        else:
            result[field.name] = Constraint(
                ConstraintType.FIELD_FORBIDDEN,
                f'column "{column.name}" exists, with type {column.type}',
            )
    return result


def _for_key(
    dialect: Dialect, binding: RequestedBinding[Any], table: Table, existing: ExistingTable
) -> dict[str, Constraint]:
    keys = [field for field in binding.fields if field.is_key]
    names = {field.name: dialect.column_name(field.name) for field in keys}
    columns = [
        [names[field.name] for field in keys if field.ptr == ptr]
        for ptr in binding.collection.key_ptrs
    ]
    if reason := key_mismatch(table, columns):
        conflict = Constraint(ConstraintType.UNSATISFIABLE, f"{reason}{_remedy(existing)}")
        return {field.name: conflict for field in keys}
    return {
        name: Constraint(ConstraintType.FIELD_OPTIONAL, "another column holds the key")
        for name, column in names.items()
        if column not in table.key and name not in existing.applied
    }


def _for_documents(
    dialect: Dialect, fields: Sequence[Field], existing: ExistingTable, *, required: bool
) -> dict[str, Constraint]:
    roots = [field for field in fields if field.ptr == ""]
    result = {field.name: missing_documents(dialect, existing, field) for field in roots}
    kind = ConstraintType.FIELD_FORBIDDEN
    if required and all(result.values()):
        kind = ConstraintType.UNSATISFIABLE
    return {
        name: Constraint(
            kind, f"{reason}; set document: false, truncate the table, or use another one"
        )
        for name, reason in result.items()
        if reason
    }


def _for_array_items(binding: RequestedBinding[Any]) -> dict[str, Constraint]:
    return {
        field.name: Constraint(
            ConstraintType.UNSATISFIABLE if field.is_key else ConstraintType.FIELD_FORBIDDEN,
            f"{reason}; set document: true, or select the field that contains the array",
        )
        for field in binding.fields
        if (reason := array_item_reason(binding.collection, field.ptr))
    }


def _for_shared_columns(
    dialect: Dialect, fields: Sequence[Field], extra: Sequence[Column]
) -> dict[str, Constraint]:
    result = {}
    used: dict[str, Field | None] = {dialect.folded(column.name): None for column in extra}
    for field in fields:
        column = dialect.column_name(field.name)
        folded = dialect.folded(column)
        if folded not in used:
            used[folded] = field
            continue
        other = used[folded]
        lost = field.is_key and (other is None or other.ptr != field.ptr)
        user = f'field "{other.name}"' if other is not None else "the connector"
        result[field.name] = Constraint(
            ConstraintType.UNSATISFIABLE if lost else ConstraintType.FIELD_FORBIDDEN,
            f'column "{column}" is used by {user}',
        )
    return result


def _remedy(existing: ExistingTable) -> str:
    """Return the remedy for a table that a backfill may not drop."""
    return "; drop the table, or use another one" if existing.adopted else ""


def _types(field: Field) -> str:
    return " or ".join(field.inference.types)
