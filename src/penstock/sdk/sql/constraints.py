"""What an SQL endpoint asks of fields, of a new table and of one that is there.

new table        key                       location required
                 whole document            location required; recommended, if delta updates;
                                           optional, if the resource says document: false
                 one scalar type           location recommended
                 one other type            optional
                 several types, only null  forbidden

a table that     field with a column       required, if the column can take it or be
is there                                   migrated to; else unsatisfiable, and why
                 other field               as in a new table, but never required: the
                                           column would be new, and null in every row
"""

from collections.abc import Mapping, Sequence

from penstock.protocol.specs import Constraint, ConstraintType
from penstock.sdk.bindings import Field
from penstock.sdk.sql.dialect import Dialect, Fit, Table

__all__ = ["constraints"]


def constraints(
    dialect: Dialect,
    fields: Sequence[Field],
    existing: Table | None,
    *,
    delta_updates: bool,
    document: bool = True,
    applied: frozenset[str] = frozenset(),
) -> Mapping[str, Constraint]:
    """For each field, what is asked of it; `applied` are those that were selected before."""
    found = {each.name: _new(each, delta_updates, document) for each in fields}
    if existing is None:
        return found
    for each in fields:
        column = existing.column(dialect.column_name(each.name))
        if column is None:
            found[each.name] = _added(each, found[each.name])
        elif dialect.fit(column, each) is Fit.INCOMPATIBLE:
            if each.name in applied or each.is_key:
                found[each.name] = Constraint(
                    ConstraintType.UNSATISFIABLE,
                    f'column "{column.name}" is {column.type}, which cannot take '
                    f"{_types(each)}; drop the table, or name another one",
                )
            else:
                found[each.name] = Constraint(
                    ConstraintType.FIELD_FORBIDDEN,
                    f'column "{column.name}" is there, and is {column.type}',
                )
        elif each.name in applied or each.is_key:
            found[each.name] = Constraint(
                ConstraintType.FIELD_REQUIRED, f'column "{column.name}" is there'
            )
    return found


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


def _added(field: Field, constraint: Constraint) -> Constraint:
    if constraint.type is ConstraintType.LOCATION_REQUIRED and field.is_key:
        return Constraint(
            ConstraintType.UNSATISFIABLE,
            f'the table is there, and has no column "{field.name}" in its key',
        )
    return constraint


def _types(field: Field) -> str:
    return " or ".join(field.inference.types)
