"""Statements that create a table or alter an existing one for a binding."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.sdk.bindings import Binding, Field
from penstock.sdk.errors import Refused
from penstock.sdk.sql.conflicts import (
    ExistingTable,
    TableMismatch,
    array_item_reason,
    key_mismatch,
    missing_documents,
)
from penstock.sdk.sql.dialect import Alteration, Column, Dialect, Fit

__all__ = ["change_statements", "fillable"]


def fillable(
    dialect: Dialect, fields: Sequence[Field], existing_table: ExistingTable | None
) -> Mapping[str, str]:
    """Return the default literals of columns to add to a table, by field.

    A field is omitted if its column exists, or if its default has no literal. The root document
    is omitted too, because it change_statements in every row.
    """
    if existing_table is None:
        return {}
    names = [dialect.column_name(field.name) for field in fields]
    table = dialect.with_names(existing_table.table, names)
    return {
        field.name: literal
        for field, name in zip(fields, names, strict=True)
        if field.ptr
        and table.column(name) is None
        and (literal := dialect.default_literal(field)) is not None
    }


def change_statements(
    dialect: Dialect,
    binding: Binding[Any],
    existing_table: ExistingTable | None,
    extra: Sequence[Column] = (),
) -> Sequence[str]:
    """Return the statements that create or alter the table; empty if it needs no change.

    `extra` are columns that are not fields. A column is never dropped: the column of a field that
    is no longer selected becomes nullable.

    Raises:
        TableMismatch: the existing table cannot be altered for the binding.
        Refused: the binding is impossible with any table.
    """
    target = dialect.table(binding, extra)
    if binding.document is None and not binding.delta_updates:
        for selected in binding.fields:
            if reason := array_item_reason(binding.collection, selected.ptr):
                raise Refused(
                    f'field "{selected.name}" of table "{binding}": {reason}',
                    hint="Select the complete document, or the field that contains the array.",
                )
    if existing_table is None:
        return [dialect.create_table(target)]
    existing = dialect.with_names(existing_table.table, (column.name for column in target.columns))
    if not binding.delta_updates:
        if reason := key_mismatch(existing, [[name] for name in target.key]):
            raise TableMismatch(reason, hint="Drop the table, or use another one.")
        if reason := missing_documents(dialect, existing_table, binding.document):
            raise TableMismatch(
                reason, hint="Set document: false, truncate the table, or use another one."
            )
    by_column = {dialect.column_name(field.name): field for field in binding.fields}
    after: list[Column] = []
    migrated: dict[str, Field] = {}
    for before in existing.columns:
        column, field = target.column(before.name), by_column.get(before.name)
        changed_column = replace(before, in_key=before.in_key and not binding.delta_updates)
        if column is None or field is None:
            after.append(
                changed_column if before.in_key else replace(changed_column, nullable=True)
            )
            continue
        match dialect.fit(before, field, existing_table.applied.get(field.name)):
            case Fit.INCOMPATIBLE:
                raise TableMismatch(
                    f'column "{column.name}" of table "{binding}" is {before.type}, '
                    f"not {column.type}"
                    + (" of another kind" if before.type == column.type else ""),
                    hint="Drop the table, or use another one.",
                )
            case Fit.MIGRATABLE:
                migrated[before.name] = field
                changed_column = replace(changed_column, type=column.type)
            case Fit.COMPATIBLE:
                pass
        after.append(replace(changed_column, nullable=before.nullable or column.nullable))
    present = {column.name for column in after}
    literals = {
        dialect.column_name(name): literal
        for name, literal in fillable(dialect, binding.fields, existing_table).items()
        if not binding.delta_updates
    }
    after += [
        replace(column, nullable=True, default=literals.get(column.name, ""))
        for column in target.columns
        if column.name not in present
    ]
    changed = replace(existing, columns=tuple(after))
    if changed == existing:
        return []
    alteration = Alteration(existing, changed, migrated)
    if existing_table.adopted and dialect.replaces(alteration):
        differing = [
            column.name for column in existing.columns if column != changed.column(column.name)
        ]
        raise Refused(
            f'table "{binding}" would have to be replaced to change {", ".join(differing)}, '
            "but this materialization did not create it",
            detail="The new table would not have the CHECK, UNIQUE and DEFAULT clauses of the old "
            "one.",
            hint="Alter the table yourself: columns of optional and unselected fields must be "
            "nullable. Or use another table.",
        )
    return dialect.alter(alteration)
