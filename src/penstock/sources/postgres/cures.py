"""Actions for changes that the stream does not report. Pure functions.

    GiveUp      the table cannot be tracked any more: it is errored from here on
    Resync      its rows may differ from the rows in the stream: compare and repair
    Follow      its messages change; the stored rows are valid under the new schema,
                or the table is errored from here on (`tables.refit`)
    Join        it is new, and the source tracks all published tables

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
    PublicationGone,
    PublicationReplaced,
    Renamed,
    Republished,
    Rewritten,
    TableAdded,
    TableDropped,
    TableUnpublished,
    TypeChanged,
)
from penstock.sources.postgres.drift import explained
from penstock.sources.postgres.errors import PublicationMissing, SchemaChanged, TableGone
from penstock.sources.postgres.names import identifier
from penstock.sources.postgres.publication import OPERATIONS
from penstock.sources.postgres.tables import Misfit, Table

__all__ = ["Cure", "Follow", "GiveUp", "Join", "Resync", "Situation", "cures", "misfit"]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Action that marks the table errored from here on."""

    oid: int
    error: DefiniteError


@dataclass(frozen=True, slots=True)
class Resync:
    """Action that compares the table with its collection and repairs the collection."""

    oid: int
    reason: str


@dataclass(frozen=True, slots=True)
class Follow:
    """Action that adopts the catalog's new description of the table, if it fits the stored rows."""

    oid: int


@dataclass(frozen=True, slots=True)
class Join:
    """Action that adds a table that is published and not tracked yet."""

    oid: int
    name: str


Cure: TypeAlias = GiveUp | Resync | Follow | Join


@dataclass(frozen=True, slots=True)
class Situation:
    """State on which actions depend, in addition to the changes."""

    location: str
    publication: str
    tables: Mapping[int, Table]
    """Tracked tables that are not errored, by oid."""

    unseen: Collection[int]
    """Tables whose initial snapshot is not visible yet, and can still be repeated."""

    truncated: Mapping[int, Collection[int]]
    """Transactions that truncated a table according to the stream, by table."""


def cures(changes: Iterable[Change], situation: Situation) -> list[Cure]:
    """Return the most severe action for each table that needs one, ordered by oid."""
    found: dict[int, Cure] = {}
    for change in changes:
        for cure in _cures(change, situation):
            if cure.oid not in found or _gravity(cure) > _gravity(found[cure.oid]):
                found[cure.oid] = cure
    return [found[oid] for oid in sorted(found)]


def misfit(table: Table, found: Misfit, *, location: str) -> SchemaChanged:
    """Return the error of a table that cannot be tracked with its present schema."""
    return SchemaChanged(
        location=location,
        source=table.source,
        table=table.described.table_name,
        reason=found.reason,
        accepted=found.accepted,
        replaceable=found.replaceable,
    )


def _gravity(cure: Cure) -> int:
    return (Join, Follow, Resync, GiveUp).index(type(cure))


def _cures(change: Change, situation: Situation) -> list[Cure]:
    tables = situation.tables
    match change:
        case PublicationGone():
            return [
                GiveUp(oid, _without_publication(table, situation)) for oid, table in tables.items()
            ]
        case OperationsChanged(after=after):
            missing = [name for name in OPERATIONS if name not in after]
            if missing:
                reason = f"its publication no longer sends {missing[0]}"
                return [_give_up(table, situation, reason) for table in tables.values()]
            return [Resync(oid, "the publication sends more than it did") for oid in tables]
        case PublicationReplaced() | PublicationAltered():
            return [Resync(oid, "the publication was altered") for oid in tables]
        case TableAdded(table=oid, name=name):
            return [] if oid in tables else [Join(oid, str(name))]
        case _:
            table = tables.get(change.table)
            return [] if table is None else _of_table(change, table, situation)


def _of_table(change: Change, table: Table, situation: Situation) -> list[Cure]:
    oid, unseen = table.oid, table.oid in situation.unseen
    match change:
        case TableDropped():
            return [GiveUp(oid, _gone(table, situation, dropped=True))]
        case TableUnpublished():
            return [GiveUp(oid, _gone(table, situation, dropped=False))]
        case Renamed(after=after):
            return [_give_up(table, situation, f"it is now {after}")]
        case Republished():
            return [Resync(oid, "it was out of the publication for a while")]
        case Rewritten():
            # SUBTLE: a COPY reads a table that was truncated after its snapshot as empty. That is
            # harmless only if the TRUNCATE is among the pending changes, which then begin there. A
            # rewrite that is harmless by itself may be a TRUNCATE not yet received.
            if unseen:
                told = change.xid in situation.truncated.get(oid, ())
            else:
                told = explained(change, situation.truncated)
            return [] if told else [Resync(oid, "it was rewritten")]
        case LeavesChanged(rewritten=rewritten):
            told = all(explained(each, situation.truncated, root=oid) for each in rewritten)
            born = all(leaf.born for leaf in change.attached)
            if told and born and not change.detached and not (unseen and rewritten):
                return [Follow(oid)]
            return [Resync(oid, "its partitions changed")]
        case FilterChanged():
            return [Resync(oid, "the publication has another filter for it")]
        case TypeChanged(type=kind):
            return [Resync(oid, f'values of type "{kind}" print otherwise')]
        case ColumnsChanged():
            return _of_columns(change, table)
        case ColumnListChanged(before=before, after=after):
            if set(before) - set(after) - set(table.spec.exclude):
                return [Follow(oid)]
            return [Resync(oid, "the publication sends more of its columns")]
        case IdentityChanged(after=(identity, columns)):
            if identity != "f" and not columns:
                return [_give_up(table, situation, "it has no replica identity")]
            return [Follow(oid)]
        case KeyChanged(before=before, after=after):
            if before is None or not table.key_columns:
                return [Follow(oid)]
            if unseen:
                return [Resync(oid, "its primary key was changed")]
            reason = "its primary key was " + ("made anew" if before == after else "changed")
            accepted = "Rows of equal keys may have been there." if before == after else None
            return [_give_up(table, situation, reason, accepted, replaceable=before != after)]
        case (
            PublicationGone()
            | OperationsChanged()
            | PublicationReplaced()
            | PublicationAltered()
            | TableAdded()
        ):
            return []
        case unhandled:
            assert_never(unhandled)


def _of_columns(change: ColumnsChanged, table: Table) -> list[Cure]:
    rest = change.ignoring(table.spec.exclude)
    if rest is None:
        return [Follow(table.oid)]
    learned = {each.shape.name for each in table.kept if each.learned}
    if rest.dropped and learned.issuperset(rest.dropped):
        # These columns are NULL from here on. Any other dropped column is a schema mismatch.
        return [Resync(table.oid, f'column "{rest.dropped[0]}" was dropped')]
    gone = {each.shape.name for each in table.kept if not each.shape.number}
    if any(each.name in gone and each.default is not None for each in rest.appended):
        # Older rows are stored with NULL, from the time when the column of this name was dropped.
        return [Resync(table.oid, f'column "{rest.appended[0].name}" was added again')]
    if any(not each.known for each in rest.appended):
        return [Resync(table.oid, "a column was added whose values in older rows are not known")]
    return [Follow(table.oid)]


def _give_up(
    table: Table,
    situation: Situation,
    reason: str,
    accepted: str | None = None,
    *,
    replaceable: bool = False,
) -> GiveUp:
    found = Misfit(reason, accepted, replaceable)
    error = misfit(table, found, location=situation.location)
    return GiveUp(table.oid, error)


def _gone(table: Table, situation: Situation, *, dropped: bool) -> TableGone:
    return TableGone(
        location=situation.location,
        source=table.source,
        table=table.described.table_name,
        publication=situation.publication,
        dropped=dropped,
    )


def _without_publication(table: Table, situation: Situation) -> PublicationMissing:
    listed = ", ".join(each.name for each in situation.tables.values())
    return PublicationMissing(
        location=situation.location,
        source=table.source,
        publication=situation.publication,
        statement=f"CREATE PUBLICATION {identifier(situation.publication)} FOR TABLE {listed};",
    )
