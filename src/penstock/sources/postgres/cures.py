"""What to do about a change that the stream did not tell of. Pure.

    give up     the table cannot be followed any more: it is in error from here on
    resync      its rows may not be what the stream told: compare, and mend
    follow      its messages change in a way that old rows have one reading in
    join        it is new, and everything that is published is to be followed

A table may change in several ways between two looks; the gravest decides. Each
ends in equality or in an error that says why (hazard B3), never in silence.
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
from penstock.sources.postgres.publication import OPERATIONS
from penstock.sources.postgres.tables import Table

__all__ = ["Cure", "Follow", "GiveUp", "Join", "Resync", "cures"]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The table is in error from here on."""

    oid: int
    error: DefiniteError


@dataclass(frozen=True, slots=True)
class Resync:
    """The table must be compared with its collection, and mended."""

    oid: int
    reason: str


@dataclass(frozen=True, slots=True)
class Follow:
    """The catalogue describes the table anew, and what is stored still fits."""

    oid: int


@dataclass(frozen=True, slots=True)
class Join:
    """A table that is published and not followed yet."""

    oid: int
    name: str


Cure: TypeAlias = GiveUp | Resync | Follow | Join


def cures(
    changes: Iterable[Change],
    tables: Mapping[int, Table],
    truncated: Mapping[int, Collection[int]],
) -> list[Cure]:
    """The gravest cure for each table that needs one, in the order of their numbers."""
    found: dict[int, Cure] = {}
    for change in changes:
        for cure in _cures(change, tables, truncated):
            if cure.oid not in found or _gravity(cure) > _gravity(found[cure.oid]):
                found[cure.oid] = cure
    return [found[oid] for oid in sorted(found)]


def _gravity(cure: Cure) -> int:
    return (Join, Follow, Resync, GiveUp).index(type(cure))


def _cures(
    change: Change, tables: Mapping[int, Table], truncated: Mapping[int, Collection[int]]
) -> list[Cure]:
    match change:
        case PublicationGone():
            return [
                GiveUp(oid, _gone(table, "the publication was dropped", "create it again"))
                for oid, table in tables.items()
            ]
        case OperationsChanged(after=after):
            missing = [name for name in OPERATIONS if name not in after]
            if missing:
                reason = f"the publication no longer sends {missing[0]}"
                return [
                    GiveUp(oid, _gone(table, reason, "let it publish all operations"))
                    for oid, table in tables.items()
                ]
            return [Resync(oid, "the publication sends more than it did") for oid in tables]
        case PublicationReplaced() | PublicationAltered():
            return [Resync(oid, "the publication was altered") for oid in tables]
        case TableAdded(table=oid, name=name):
            return [] if oid in tables else [Join(oid, str(name))]
        case _:
            table = tables.get(change.table)
            return [] if table is None else _of_table(change, table, truncated)


def _of_table(change: Change, table: Table, truncated: Mapping[int, Collection[int]]) -> list[Cure]:
    oid = table.oid
    match change:
        case TableDropped():
            return [GiveUp(oid, _gone(table, "it was dropped", "drop it here too"))]
        case TableUnpublished():
            return [GiveUp(oid, _gone(table, "it is no longer published", "publish it again"))]
        case Renamed(after=after):
            return [GiveUp(oid, _gone(table, f"it is now {after}", "rename it back"))]
        case Republished():
            return [Resync(oid, "it was out of the publication for a while")]
        case Rewritten():
            return [] if explained(change, truncated) else [Resync(oid, "it was rewritten")]
        case LeavesChanged(rewritten=rewritten):
            told = all(explained(each, truncated, root=oid) for each in rewritten)
            if told and not change.detached and all(leaf.born for leaf in change.attached):
                return [Follow(oid)]
            return [Resync(oid, "its partitions changed")]
        case FilterChanged():
            return [Resync(oid, "the publication has another filter for it")]
        case TypeChanged(type=kind):
            return [Resync(oid, f'values of type "{kind}" print otherwise')]
        case ColumnsChanged():
            return _of_columns(change, table)
        case ColumnListChanged(before=before, after=after):
            if after[: len(before)] == before:
                return [Resync(oid, "the publication sends more of its columns")]
            return [
                GiveUp(oid, _gone(table, "the publication sends other columns", "restore them"))
            ]
        case IdentityChanged(after=(identity, _)):
            if identity == "n":
                return [GiveUp(oid, _gone(table, "it has no replica identity", "give it one"))]
            return [Follow(oid)]
        case KeyChanged(before=before):
            if before is None:
                return [Follow(oid)]
            return [GiveUp(oid, _gone(table, "its primary key was changed", "resync it"))]
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
    oid, spec = table.oid, table.spec
    dropped = [name for name in change.dropped if name not in spec.exclude]
    if dropped:
        return [GiveUp(oid, _gone(table, f'column "{dropped[0]}" was dropped', "resync it"))]
    if change.renamed:
        was, now = change.renamed[0].before, change.renamed[0].after
        reason = f'column "{was}" is now "{now}"'
        return [GiveUp(oid, _gone(table, reason, "rename it back, then resync it"))]
    if any(each.name not in (*spec.exclude, *spec.text) for each in change.retyped):
        # A new type rewrites the table, or leaves every value as it was; the catalogue
        # describes it anew, and what is stored may have to grow.
        return [Follow(oid)]
    if any(not each.known for each in change.appended):
        return [Resync(oid, "a column was added whose values in older rows are not known")]
    return [Follow(oid)]


def _gone(table: Table, reason: str, remedy: str) -> DefiniteError:
    return DefiniteError(
        f'table "{table.name}" cannot be followed any more: {reason}',
        detail=f'Collection "{table.collection}" keeps what it held before.',
        hint=f"On the source, {remedy}; then run: penstock resync LOCATION SOURCE {table.name}",
    )
