"""What an SQL endpoint asks of fields, of a new table and of one that is there.

new table        key                       location required
                 whole document            location required; recommended, if delta updates;
                                           optional, if the resource says document: false
                 one scalar type           location recommended
                 one other type            optional
                 several types, only null  forbidden
                 column of another field   forbidden; of the key, unsatisfiable
                 item of an array, if the  the same
                 resource says document:
                 false

a table that     field with a column       required, if the column can take it or be
is there                                   migrated to; else unsatisfiable, and why
                 key, if it is another     unsatisfiable, and which it is
                 whole document, if there  unsatisfiable
                 are rows without one
                 other field               as in a new table, but never required: the
                                           column would be new, and null in every row
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.protocol.specs import Constraint, ConstraintType
from penstock.sdk.bindings import Field
from penstock.sdk.connector import Asked
from penstock.sdk.sql.conflicts import Standing, other_key, within_array, without_documents
from penstock.sdk.sql.dialect import Column, Dialect, Fit, Table

__all__ = ["constraints", "recreation_reason"]


def constraints(
    dialect: Dialect,
    asked: Asked[Any],
    standing: Standing | None,
    *,
    delta_updates: bool,
    document: bool = True,
    extra: Sequence[Column] = (),
) -> Mapping[str, Constraint]:
    """For each field, what is asked of it; `extra` are columns that no field has."""
    found = {each.name: _new(each, delta_updates, document) for each in asked.fields}
    applied = standing.applied if standing is not None else {}
    # Whoever has a column already, or must have one, has it before others.
    fields = sorted(asked.fields, key=lambda it: (it.name not in applied, not it.is_key))
    if standing is not None:
        names = [dialect.column_name(each.name) for each in reversed(fields)]
        table = dialect.spelled(standing.table, names)
        found |= _of_columns(dialect, fields, table, standing)
        if not delta_updates:
            found |= _of_key(dialect, asked, table, standing)
            found |= _of_documents(dialect, fields, standing, required=document)
    if not delta_updates and not document:
        found |= _of_arrays(asked)
    return found | _of_same_columns(dialect, fields, extra)


def recreation_reason(
    found: Mapping[str, Constraint], of_new_table: Mapping[str, Constraint]
) -> str:
    """Return why only a new table satisfies the constraints; empty if the one there does."""
    reasons = [
        each.reason
        for name, each in found.items()
        if each.type is ConstraintType.UNSATISFIABLE
        and of_new_table[name].type is not ConstraintType.UNSATISFIABLE
    ]
    return "; ".join(dict.fromkeys(reasons))


def _new(field: Field, delta_updates: bool, document: bool) -> Constraint:
    if field.is_key:
        return Constraint(ConstraintType.LOCATION_REQUIRED, "it is part of the key")
    if field.ptr == "":
        if not document:
            return Constraint(ConstraintType.FIELD_OPTIONAL, "documents are put together again")
        if delta_updates:
            return Constraint(ConstraintType.LOCATION_RECOMMENDED, "it is the whole document")
        return Constraint(
            ConstraintType.LOCATION_REQUIRED, "the whole document is what is loaded and reduced"
        )
    if field.inference.single_scalar:
        return Constraint(ConstraintType.LOCATION_RECOMMENDED, "it is of one scalar type")
    if field.inference.single_type is not None:
        return Constraint(ConstraintType.FIELD_OPTIONAL, "it is kept as JSON")
    return Constraint(
        ConstraintType.FIELD_FORBIDDEN, f"a column cannot be of {_types(field) or 'no type'}"
    )


def _of_columns(
    dialect: Dialect, fields: Sequence[Field], table: Table, standing: Standing
) -> dict[str, Constraint]:
    found = {}
    for each in fields:
        column = table.column(dialect.column_name(each.name))
        needed = each.name in standing.applied or each.is_key
        if column is None:
            continue
        if dialect.fit(column, each, standing.applied.get(each.name)) is not Fit.INCOMPATIBLE:
            if needed:
                found[each.name] = Constraint(
                    ConstraintType.FIELD_REQUIRED, f'column "{column.name}" is there'
                )
        elif needed:
            found[each.name] = Constraint(
                ConstraintType.UNSATISFIABLE,
                f'column "{column.name}" is {column.type}, which cannot take '
                f"{_types(each)}{_remedy(standing)}",
            )
        else:
            found[each.name] = Constraint(
                ConstraintType.FIELD_FORBIDDEN,
                f'column "{column.name}" is there, and is {column.type}',
            )
    return found


def _of_key(
    dialect: Dialect, asked: Asked[Any], table: Table, standing: Standing
) -> dict[str, Constraint]:
    keys = [each for each in asked.fields if each.is_key]
    names = {each.name: dialect.column_name(each.name) for each in keys}
    wanted = [
        [names[each.name] for each in keys if each.ptr == ptr] for ptr in asked.collection.key_ptrs
    ]
    if why := other_key(table, wanted):
        conflict = Constraint(ConstraintType.UNSATISFIABLE, f"{why}{_remedy(standing)}")
        return {each.name: conflict for each in keys}
    return {
        name: Constraint(ConstraintType.FIELD_OPTIONAL, "the key has a column by another name")
        for name, column in names.items()
        if column not in table.key and name not in standing.applied
    }


def _of_documents(
    dialect: Dialect, fields: Sequence[Field], standing: Standing, *, required: bool
) -> dict[str, Constraint]:
    whole = [each for each in fields if each.ptr == ""]
    found = {each.name: without_documents(dialect, standing, each) for each in whole}
    kind = ConstraintType.FIELD_FORBIDDEN
    if required and all(found.values()):
        kind = ConstraintType.UNSATISFIABLE
    return {
        name: Constraint(kind, f"{why}; say document: false, empty it, or name another one")
        for name, why in found.items()
        if why
    }


def _of_arrays(asked: Asked[Any]) -> dict[str, Constraint]:
    return {
        each.name: Constraint(
            ConstraintType.UNSATISFIABLE if each.is_key else ConstraintType.FIELD_FORBIDDEN,
            f"{why}; say document: true, or select what is around it",
        )
        for each in asked.fields
        if (why := within_array(asked.collection, each.ptr))
    }


def _of_same_columns(
    dialect: Dialect, fields: Sequence[Field], extra: Sequence[Column]
) -> dict[str, Constraint]:
    found = {}
    taken: dict[str, Field | None] = {dialect.folded(each.name): None for each in extra}
    for each in fields:
        column = dialect.column_name(each.name)
        folded = dialect.folded(column)
        if folded not in taken:
            taken[folded] = each
            continue
        other = taken[folded]
        lost = each.is_key and (other is None or other.ptr != each.ptr)
        whose = f'that of field "{other.name}"' if other is not None else "one of our own"
        found[each.name] = Constraint(
            ConstraintType.UNSATISFIABLE if lost else ConstraintType.FIELD_FORBIDDEN,
            f'its column "{column}" would be {whose}',
        )
    return found


def _remedy(standing: Standing) -> str:
    """Return the remedy for a table that a backfill may not drop."""
    return "; drop the table, or name another one" if standing.taken_over else ""


def _types(field: Field) -> str:
    return " or ".join(field.inference.types)
