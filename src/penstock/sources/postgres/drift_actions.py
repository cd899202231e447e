"""Actions for changes that the stream does not report. Pure functions.

    MarkErrored     the table cannot be tracked any more: it is errored from here on
    Resync          its rows may differ from the rows in the stream: compare and repair
    EvolveSchema    its messages change; the stored rows are valid under the new schema,
                    or the table is errored from here on (`table_schema.evolve_table`)
    AddTable        it is new, and the source tracks all published tables

A table may change in several ways between two inspections. The most severe action wins. Each action
ends either in a collection equal to its table or in an error with the reason (hazard B3), never in
a silent difference.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from penstock.errors import DefiniteError
from penstock.sources.postgres.changes import (
    Change,
    ColumnListChanged,
    ColumnsChanged,
    FilterChanged,
    IdentityChanged,
    KeyChanged,
    LeavesChanged,
    OperationsChanged,
    PublicationAltered,
    PublicationDropped,
    PublicationReplaced,
    Renamed,
    Republished,
    Rewritten,
    TableAdded,
    TableDropped,
    TableUnpublished,
    TypeChanged,
)
from penstock.sources.postgres.drift import is_explained
from penstock.sources.postgres.errors import PublicationMissing, SchemaChanged, TableMissing
from penstock.sources.postgres.names import identifier
from penstock.sources.postgres.publication import OPERATIONS
from penstock.sources.postgres.table_schema import SchemaMismatch, Table

__all__ = [
    "AddTable",
    "DriftAction",
    "DriftContext",
    "EvolveSchema",
    "MarkErrored",
    "Resync",
    "choose_actions",
    "schema_error",
]


@dataclass(frozen=True, slots=True)
class MarkErrored:
    """Action that marks the table errored from here on."""

    oid: int
    error: DefiniteError


@dataclass(frozen=True, slots=True)
class Resync:
    """Action that compares the table with its collection and repairs the collection."""

    oid: int
    reason: str


@dataclass(frozen=True, slots=True)
class EvolveSchema:
    """Action that adopts the catalog's new description of the table, if it fits the stored rows."""

    oid: int


@dataclass(frozen=True, slots=True)
class AddTable:
    """Action that adds a table that is published and not tracked yet."""

    oid: int
    name: str


DriftAction: TypeAlias = MarkErrored | Resync | EvolveSchema | AddTable


@dataclass(frozen=True, slots=True)
class DriftContext:
    """State on which actions depend, in addition to the changes."""

    location: str
    publication: str
    tables: Mapping[int, Table]
    """Tracked tables that are not errored, by oid."""

    unseen: Collection[int]
    """Tables whose initial snapshot is not visible yet, and can still be repeated."""

    truncated: Mapping[int, Collection[int]]
    """Transactions that truncated a table according to the stream, by table."""


def choose_actions(changes: Iterable[Change], context: DriftContext) -> list[DriftAction]:
    """Return the most severe action for each table that needs one, ordered by oid."""
    actions: dict[int, DriftAction] = {}
    for change in changes:
        for action in _actions_of_change(change, context):
            if action.oid not in actions or _severity(action) > _severity(actions[action.oid]):
                actions[action.oid] = action
    return [actions[oid] for oid in sorted(actions)]


def schema_error(table: Table, mismatch: SchemaMismatch, *, location: str) -> SchemaChanged:
    """Return the error of a table that cannot be tracked with its present schema."""
    return SchemaChanged(
        location=location,
        source=table.source,
        table=table.described.table_name,
        reason=mismatch.reason,
        accepted=mismatch.accepted,
        replaceable=mismatch.replaceable,
    )


def _severity(action: DriftAction) -> int:
    return (AddTable, EvolveSchema, Resync, MarkErrored).index(type(action))


def _actions_of_change(change: Change, context: DriftContext) -> list[DriftAction]:
    tables = context.tables
    match change:
        case PublicationDropped():
            return [
                MarkErrored(oid, _publication_missing(table, context))
                for oid, table in tables.items()
            ]
        case OperationsChanged(after=after):
            missing = [name for name in OPERATIONS if name not in after]
            if missing:
                reason = f"its publication no longer sends {missing[0]}"
                return [_mark_errored(table, context, reason) for table in tables.values()]
            return [Resync(oid, "the publication sends more than it did") for oid in tables]
        case PublicationReplaced() | PublicationAltered():
            return [Resync(oid, "the publication was altered") for oid in tables]
        case TableAdded(table=oid, name=name):
            return [] if oid in tables else [AddTable(oid, str(name))]
        case _:
            table = tables.get(change.table)
            return [] if table is None else _actions_of_table_change(change, table, context)


def _actions_of_table_change(
    change: Change, table: Table, context: DriftContext
) -> list[DriftAction]:
    oid, unseen = table.oid, table.oid in context.unseen
    match change:
        case TableDropped():
            return [MarkErrored(oid, _table_missing(table, context, dropped=True))]
        case TableUnpublished():
            return [MarkErrored(oid, _table_missing(table, context, dropped=False))]
        case Renamed(after=after):
            return [_mark_errored(table, context, f"it is now {after}")]
        case Republished():
            return [Resync(oid, "it was out of the publication for a while")]
        case Rewritten():
            # SUBTLE: a COPY reads a table that was truncated after its snapshot as empty. That is
            # harmless only if the TRUNCATE is among the pending changes, which then begin there. A
            # rewrite that is harmless by itself may be a TRUNCATE not yet received.
            if unseen:
                is_reported = change.xid in context.truncated.get(oid, ())
            else:
                is_reported = is_explained(change, context.truncated)
            return [] if is_reported else [Resync(oid, "it was rewritten")]
        case LeavesChanged(rewritten=rewritten):
            is_reported = all(is_explained(leaf, context.truncated, root=oid) for leaf in rewritten)
            born = all(leaf.born for leaf in change.attached)
            if is_reported and born and not change.detached and not (unseen and rewritten):
                return [EvolveSchema(oid)]
            return [Resync(oid, "its partitions changed")]
        case FilterChanged():
            return [Resync(oid, "the publication has another filter for it")]
        case TypeChanged(type=kind):
            return [Resync(oid, f'values of type "{kind}" print otherwise')]
        case ColumnsChanged():
            return _actions_of_column_change(change, table)
        case ColumnListChanged(before=before, after=after):
            if set(before) - set(after) - set(table.spec.exclude):
                return [EvolveSchema(oid)]
            return [Resync(oid, "the publication sends more of its columns")]
        case IdentityChanged(after=(identity, columns)):
            if identity != "f" and not columns:
                return [_mark_errored(table, context, "it has no replica identity")]
            return [EvolveSchema(oid)]
        case KeyChanged(before=before, after=after):
            if before is None or not table.key_columns:
                return [EvolveSchema(oid)]
            if unseen:
                return [Resync(oid, "its primary key was changed")]
            reason = "its primary key was " + (
                "dropped and added" if before == after else "changed"
            )
            accepted = "Rows with equal keys may have existed." if before == after else None
            return [_mark_errored(table, context, reason, accepted, replaceable=before != after)]
        case (
            PublicationDropped()
            | OperationsChanged()
            | PublicationReplaced()
            | PublicationAltered()
            | TableAdded()
        ):
            return []
        case unhandled:
            assert_never(unhandled)


def _actions_of_column_change(change: ColumnsChanged, table: Table) -> list[DriftAction]:
    remaining = change.ignoring(table.spec.exclude)
    if remaining is None:
        return [EvolveSchema(table.oid)]
    learned = {column.shape.name for column in table.stored if column.learned}
    if remaining.dropped and learned.issuperset(remaining.dropped):
        # These columns are NULL from here on. Any other dropped column is a schema mismatch.
        return [Resync(table.oid, f'column "{remaining.dropped[0]}" was dropped')]
    dropped = {column.shape.name for column in table.stored if not column.shape.number}
    if any(c.name in dropped and c.default is not None for c in remaining.appended):
        # Older rows are stored with NULL, from the time when the column of this name was dropped.
        return [Resync(table.oid, f'column "{remaining.appended[0].name}" was added again')]
    if any(not column.known for column in remaining.appended):
        return [Resync(table.oid, "a column was added whose values in older rows are not known")]
    return [EvolveSchema(table.oid)]


def _mark_errored(
    table: Table,
    context: DriftContext,
    reason: str,
    accepted: str | None = None,
    *,
    replaceable: bool = False,
) -> MarkErrored:
    mismatch = SchemaMismatch(reason, accepted, replaceable)
    error = schema_error(table, mismatch, location=context.location)
    return MarkErrored(table.oid, error)


def _table_missing(table: Table, context: DriftContext, *, dropped: bool) -> TableMissing:
    return TableMissing(
        location=context.location,
        source=table.source,
        table=table.described.table_name,
        publication=context.publication,
        dropped=dropped,
    )


def _publication_missing(table: Table, context: DriftContext) -> PublicationMissing:
    listed = ", ".join(table.name for table in context.tables.values())
    return PublicationMissing(
        location=context.location,
        source=table.source,
        publication=context.publication,
        statement=f"CREATE PUBLICATION {identifier(context.publication)} FOR TABLE {listed};",
    )
