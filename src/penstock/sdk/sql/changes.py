"""From a table as it is to the table that is wanted, as statements."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.sdk.bindings import Binding, Field
from penstock.sdk.errors import Refused
from penstock.sdk.sql.dialect import Alteration, Column, Dialect, Fit, Table

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
    by_column = {dialect.column_name(each.name): each for each in binding.fields}
    after: list[Column] = []
    migrated: dict[str, Field] = {}
    for found in existing.columns:
        column, field = wanted.column(found.name), by_column.get(found.name)
        kept = replace(found, in_key=found.in_key and not binding.delta_updates)
        if column is None or field is None:
            after.append(kept if found.in_key else replace(kept, nullable=True))
            continue
        match dialect.fit(found, field):
            case Fit.INCOMPATIBLE:
                raise Refused(
                    f'column "{column.name}" of table "{binding}" is {found.type}, '
                    f"not {column.type}",
                    hint="Drop the table, or name another one.",
                )
            case Fit.MIGRATABLE:
                migrated[found.name] = field
                kept = replace(kept, type=column.type)
            case Fit.COMPATIBLE:
                pass
        after.append(replace(kept, nullable=found.nullable or column.nullable))
    there = {each.name for each in after}
    after += [
        replace(each, nullable=True) for each in (*wanted.columns, *extra) if each.name not in there
    ]
    changed = replace(existing, columns=tuple(after))
    return dialect.alter(Alteration(existing, changed, migrated)) if changed != existing else []
