"""From a table as it is to the table that is wanted, as statements."""

from collections.abc import Sequence
from typing import Any

from penstock.sdk.bindings import Binding
from penstock.sdk.errors import Refused
from penstock.sdk.sql.dialect import Column, Dialect, Fit, Table

__all__ = ["changes"]


def changes(
    dialect: Dialect,
    binding: Binding[Any],
    existing: Table | None,
    extra: Sequence[Column] = (),
) -> Sequence[str]:
    """What makes the table fit, with columns that no field has; nothing, if it does.

    A column is never dropped: what is not selected any more is kept, and may be null
    from now on.

    Raises:
        Refused: it cannot be made to fit.
    """
    wanted = dialect.table(binding)
    if existing is None:
        return [dialect.create_table(Table(wanted.path, (*wanted.columns, *extra)))]
    if not binding.delta_updates and existing.key != wanted.key:
        raise Refused(
            f'table "{binding}" has the key ({", ".join(existing.key) or "none"}), '
            f"not ({', '.join(wanted.key)})",
            hint="Drop it, or name another one.",
        )
    statements: list[str] = []
    by_column = {dialect.column_name(each.name): each for each in binding.fields}
    for column in wanted.columns:
        field = by_column[column.name]
        found = existing.column(column.name)
        if found is None:
            statements.append(dialect.add_column(existing, column))
            continue
        match dialect.fit(found, field):
            case Fit.INCOMPATIBLE:
                raise Refused(
                    f'column "{column.name}" of table "{binding}" is {found.type}, '
                    f"not {column.type}",
                    hint="Drop the table, or name another one.",
                )
            case Fit.MIGRATABLE:
                statements += dialect.migrate(existing, found, field)
            case Fit.COMPATIBLE:
                pass
        if column.nullable and not found.nullable:
            statements += dialect.drop_not_null(existing, found)
    statements += [
        dialect.add_column(existing, column)
        for column in extra
        if existing.column(column.name) is None
    ]
    for found in existing.columns:
        if found.name not in by_column and not found.nullable and not found.in_key:
            statements += dialect.drop_not_null(existing, found)
    return statements
