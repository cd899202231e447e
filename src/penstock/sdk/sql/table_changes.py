"""From a table as it is to the table that is wanted, as statements."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.sdk.bindings import Binding, Field
from penstock.sdk.errors import Refused
from penstock.sdk.sql.conflicts import (
    Standing,
    TableMismatch,
    other_key,
    within_array,
    without_documents,
)
from penstock.sdk.sql.dialect import Alteration, Column, Dialect, Fit

__all__ = ["changes", "fillable"]


def fillable(
    dialect: Dialect, fields: Sequence[Field], standing: Standing | None
) -> Mapping[str, str]:
    """Return the literals of fields whose columns are to be added to a table, by field.

    A field is left out if its column is there already, or its default has no literal; so is
    the whole document, which has one member more in every row.
    """
    if standing is None:
        return {}
    names = [dialect.column_name(each.name) for each in fields]
    there = dialect.spelled(standing.table, names)
    return {
        each.name: literal
        for each, name in zip(fields, names, strict=True)
        if each.ptr
        and there.column(name) is None
        and (literal := dialect.default_literal(each)) is not None
    }


def changes(
    dialect: Dialect,
    binding: Binding[Any],
    standing: Standing | None,
    extra: Sequence[Column] = (),
) -> Sequence[str]:
    """What makes the table fit, with columns that no field has; nothing, if it does.

    A column is never dropped: what is not selected any more is kept, and may be null
    from now on.

    Raises:
        TableMismatch: the table that is there cannot be made to fit.
        Refused: no table would fit.
    """
    wanted = dialect.table(binding, extra)
    if binding.document is None and not binding.delta_updates:
        for each in binding.fields:
            if why := within_array(binding.collection, each.ptr):
                raise Refused(
                    f'field "{each.name}" of table "{binding}": {why}',
                    hint="Select the whole document, or what is around the field instead of it.",
                )
    if standing is None:
        return [dialect.create_table(wanted)]
    existing = dialect.spelled(standing.table, (each.name for each in wanted.columns))
    if not binding.delta_updates:
        if why := other_key(existing, [[each] for each in wanted.key]):
            raise TableMismatch(why, hint="Drop it, or name another one.")
        if why := without_documents(dialect, standing, binding.document):
            raise TableMismatch(
                why, hint="Say document: false, empty the table, or name another one."
            )
    by_column = {dialect.column_name(each.name): each for each in binding.fields}
    after: list[Column] = []
    migrated: dict[str, Field] = {}
    for found in existing.columns:
        column, field = wanted.column(found.name), by_column.get(found.name)
        kept = replace(found, in_key=found.in_key and not binding.delta_updates)
        if column is None or field is None:
            after.append(kept if found.in_key else replace(kept, nullable=True))
            continue
        match dialect.fit(found, field, standing.applied.get(field.name)):
            case Fit.INCOMPATIBLE:
                raise TableMismatch(
                    f'column "{column.name}" of table "{binding}" is {found.type}, '
                    f"not {column.type}"
                    + (" of another kind" if found.type == column.type else ""),
                    hint="Drop the table, or name another one.",
                )
            case Fit.MIGRATABLE:
                migrated[found.name] = field
                kept = replace(kept, type=column.type)
            case Fit.COMPATIBLE:
                pass
        after.append(replace(kept, nullable=found.nullable or column.nullable))
    there = {each.name for each in after}
    literals = {
        dialect.column_name(name): literal
        for name, literal in fillable(dialect, binding.fields, standing).items()
        if not binding.delta_updates
    }
    after += [
        replace(each, nullable=True, default=literals.get(each.name, ""))
        for each in wanted.columns
        if each.name not in there
    ]
    changed = replace(existing, columns=tuple(after))
    if changed == existing:
        return []
    alteration = Alteration(existing, changed, migrated)
    if standing.taken_over and dialect.replaces(alteration):
        differing = [each.name for each in existing.columns if each != changed.column(each.name)]
        raise Refused(
            f'table "{binding}" would have to be replaced to change {", ".join(differing)}, '
            "and this materialization did not make it",
            detail="What it has beside its columns, such as CHECK, UNIQUE and DEFAULT, would be "
            "lost.",
            hint="Change it yourself, so that columns may be null whose fields may be left out or "
            "are not selected; or name another table.",
        )
    return dialect.alter(alteration)
