"""One table as we follow it: what its messages hold, and what its collection holds.

A Relation message lists columns by position, without the numbers that the
catalogue gives them. So a list can be read only if it *is* the catalogue's, by
position, name and type, or its beginning; and what the catalogue says anew is
matched with what is stored by number: matching by name would take two swapped
columns for each other (hazard B3).

    wire        what the messages hold: every published column
    columns     what is stored: without those the file excludes, in the order in
                which we learned of them, with those that are gone, as nulls

A collection's columns are never dropped, and hold what they held: a type may
widen, and one that narrows is read into the wider one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from penstock.data.arrow import DIFF, PROGRESSED, TIME, with_integer_times
from penstock.data.collection_name import compose_name
from penstock.data.schema import LABEL, widens
from penstock.sources.postgres.catalog import PgColumn, PgTable
from penstock.sources.postgres.config import TableSpec
from penstock.sources.postgres.pgoutput import Relation
from penstock.sources.postgres.types import ColumnType, column_type

__all__ = [
    "LABEL",
    "Column",
    "Kept",
    "Misfit",
    "Table",
    "defaults_of",
    "follow",
    "reads",
    "refit",
]

GONE: Final = "NULL::pg_catalog.text"
"""What a copy reads of a column that is gone."""

OURS: Final = (TIME, DIFF, PROGRESSED)
"""Under these names readers are told of updates."""

DECIMALS: Final = (1700, 1231)
"""Types of which what is stored depends on precision and scale: numeric and its array."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A column of the collection."""

    shape: PgColumn
    """Its name, its number in the table or 0 if it is gone, and the type that is stored, which
    may be wider than the table's."""

    learned: bool = False
    """Whether it came after the collection had begun."""


@dataclass(frozen=True, slots=True)
class Column:
    """A stored column."""

    name: str
    position: int | None
    """Where it stands in messages, or None if it is gone: then it is null in every row."""

    type: ColumnType
    default: str | None = None
    """What rows that are older than the column hold in it, as text."""

    def field(self) -> pa.Field:
        """As the collection has it."""
        return pa.field(self.name, self.type.arrow, metadata={LABEL: self.type.label.encode()})

    def default_scalar(self) -> pa.Scalar:
        """What older rows hold."""
        if self.default is None:
            return pa.scalar(None, self.type.arrow)
        return self.type.from_text(pa.array([self.default.encode()], pa.binary()))[0]

    def default_value(self) -> Any:
        """The same as a plain value; times as numbers, since Python has no infinite ones."""
        value = pa.array([self.default_scalar()], self.type.arrow)
        return value.cast(with_integer_times(self.type.arrow))[0].as_py()


@dataclass(frozen=True, slots=True)
class _Wider(ColumnType):
    """A column of which the table has a narrower type, or another of the same values."""

    narrow: ColumnType = field(kw_only=True)

    def from_text(self, values: pa.Array) -> pa.Array:
        return self.narrow.from_text(values).cast(self.arrow)

    def from_copy(self, values: pa.Array) -> pa.Array:
        return self.narrow.from_copy(values).cast(self.arrow)


@dataclass(frozen=True, slots=True)
class Table:
    """A table, as its messages and its collection have it."""

    oid: int
    name: str
    """Schema and table, as people write them."""

    source: str
    """The name of its source."""

    collection: str
    described: PgTable
    spec: TableSpec
    kept: tuple[Kept, ...]
    key_columns: tuple[str, ...]
    """What identifies a row for readers: the primary key that it had when its collection was
    made, if all of it is stored, and none of it is an array."""

    columns: tuple[Column, ...]
    key: tuple[str, ...]
    """The columns by which an old row is found where a message does not hold it whole."""

    @property
    def wire(self) -> tuple[PgColumn, ...]:
        """The columns of its messages."""
        return _streamed(self.described)

    @property
    def schema(self) -> pa.Schema:
        """The columns of its collection."""
        return pa.schema([column.field() for column in self.columns])

    @property
    def numbers(self) -> Mapping[str, int]:
        """By name of a stored column, its number in the table; 0 if it is gone."""
        return {each.shape.name: each.shape.number for each in self.kept}


def follow(
    source: str,
    described: PgTable,
    spec: TableSpec,
    kept: Sequence[Kept] | None = None,
    key_columns: tuple[str, ...] | None = None,
    *,
    collection: str | None = None,
) -> Table:
    """How to follow a table that the catalogue describes, into a collection that has `kept`.

    A table that is tracked already keeps the name of its `collection`.
    """
    positions = {each.number: (at, each) for at, each in enumerate(_streamed(described))}
    if kept is None:
        kept = [Kept(each) for _, each in positions.values() if each.name not in spec.exclude]
    columns = []
    for each in kept:
        stored = column_type(each.shape, text=each.shape.name in spec.text)
        at, found = positions.get(each.shape.number, (None, None))
        if found is None:
            columns.append(Column(each.shape.name, None, replace(stored, select=GONE)))
            continue
        own = column_type(found, text=found.name in spec.text)
        if (own.arrow, own.label) != (stored.arrow, stored.label):
            own = _Wider(own.column, stored.arrow, stored.label, own.select, own.binary, narrow=own)
        default = found.missing if found.has_missing else None
        columns.append(Column(each.shape.name, at, own, default))
    if key_columns is None:
        plain = {each.name for each in columns if not pa.types.is_nested(each.type.arrow)}
        primary = described.primary_key
        key_columns = primary if plain.issuperset(primary) else ()
    return Table(
        oid=described.oid,
        name=str(described.table_name),
        source=source,
        collection=collection or compose_name(source, described.schema, described.name),
        described=described,
        spec=spec,
        kept=tuple(kept),
        key_columns=key_columns,
        columns=tuple(columns),
        # A partition may have another identity than its root; its messages say so one by one.
        key=described.primary_key if described.replica_identity == "f" else described.identity,
    )


@dataclass(frozen=True, slots=True)
class Misfit:
    """What the catalogue says cannot be followed into the collection there is."""

    reason: str
    accepted: str | None = None
    """What it would mean to go on all the same, if somebody asked for it; None: there is no way."""

    replaceable: bool = False
    """Whether a resync may copy the table into a new collection."""


def refit(before: Table, described: PgTable, *, asked: bool = False) -> Table | Misfit:
    """How to go on with a table that the catalogue describes anew.

    Columns are matched by number. A column that is gone is a misfit, unless it came
    after the collection had begun: then it is null from now on, as it was before.
    Where somebody `asked` for it, after having been told, columns are matched by name.
    """
    wire = {
        each.name if asked else each.number: each
        for each in _streamed(described)
        if each.name not in before.spec.exclude
    }
    if (shown := _no_longer_hidden(before, described)) is not None and not asked:
        return shown
    kept: list[Kept] = []
    for each in before.kept:
        shape = each.shape
        found = wire.pop(shape.name if asked else shape.number, None)
        if found is None:
            if not (each.learned or shape.number == 0):
                return _gone(shape.name, described)
            kept.append(Kept(replace(shape, number=0), learned=True))
            continue
        if found.name != shape.name:
            return Misfit(f'column "{shape.name}" is now "{found.name}"', replaceable=True)
        fitted = _fitted(shape, found, text=shape.name in before.spec.text)
        if fitted is None:
            return _other_type(shape, found)
        kept.append(Kept(fitted, each.learned))
    for found in wire.values():
        if found.name in OURS:
            return Misfit(f'column "{found.name}" was added, a name that Penstock uses itself')
        namesake = next((at for at, each in enumerate(kept) if each.shape.name == found.name), None)
        if namesake is None:
            kept.append(Kept(found, learned=True))
            continue
        # One of that name was dropped, and is here again.
        fitted = _fitted(kept[namesake].shape, found, text=found.name in before.spec.text)
        if fitted is None:
            return _other_type(kept[namesake].shape, found)
        kept[namesake] = Kept(fitted, learned=True)
    declared, primary = before.key_columns, described.primary_key
    if declared and primary != declared:
        now = f"({', '.join(primary)})" if primary else "gone"
        reason = f"its primary key was ({', '.join(declared)}) and is now {now}"
        return Misfit(reason, replaceable=True)
    return follow(
        before.source, described, before.spec, kept, declared, collection=before.collection
    )


def reads(table: Table, relation: Relation) -> bool:
    """Whether messages after this one are as `table` has them, or lack its last columns.

    They lack them if they are older than the columns, as after a reconnect.
    """
    if len(relation.columns) > len(table.wire):
        return False
    for was, now in zip(table.wire, relation.columns, strict=False):
        if was.name != now.name:
            return False
        if was.name in table.spec.text or was.name in table.spec.exclude:
            continue
        if was.type.oid != now.type_oid:
            return False
        if was.type.oid in DECIMALS and was.typmod != now.typmod:
            return False
    return True


def defaults_of(columns: Sequence[Column]) -> Mapping[str, Any]:
    """What rows that are older than `columns` hold in them, where it is not null."""
    return {each.name: each.default_value() for each in columns if each.default is not None}


def _fitted(shape: PgColumn, found: PgColumn, *, text: bool) -> PgColumn | None:
    """What to store where `shape` is stored and the table has `found`, if there is a way."""
    stored, own = column_type(shape, text=text).arrow, column_type(found, text=text).arrow
    if widens(own, stored):
        return replace(shape, number=found.number)
    if widens(stored, own):
        return found
    if pa.types.is_decimal(stored) and pa.types.is_decimal(own):
        scale = max(stored.scale, own.scale)
        whole = max(stored.precision - stored.scale, own.precision - own.scale)
        if whole + scale <= 38:
            return replace(found, typmod=((whole + scale) << 16 | scale) + 4)
    return None


def _no_longer_hidden(before: Table, described: PgTable) -> Misfit | None:
    """A column that the file excludes, under a name that it does not."""
    hidden = {each.number: each for each in before.wire if each.name in before.spec.exclude}
    for each in _streamed(described):
        was = hidden.get(each.number)
        if was is not None and each.name not in before.spec.exclude:
            return Misfit(
                f'column "{was.name}", which is excluded, is now "{each.name}"',
                f'"{each.name}" would be stored.',
            )
    return None


def _gone(name: str, described: PgTable) -> Misfit:
    there = any(column.name == name for column in described.columns)
    reason = f'column "{name}" ' + ("is no longer published" if there else "was dropped")
    return Misfit(reason, replaceable=True)


def _other_type(shape: PgColumn, found: PgColumn) -> Misfit:
    return Misfit(
        f'column "{shape.name}" was {_type_name(shape)} and is now {_type_name(found)}, '
        "which its collection cannot hold",
        replaceable=True,
    )


def _type_name(column: PgColumn) -> str:
    """Return the name of a type, with its digits if the collection depends on them."""
    arrow = column_type(column, text=False).arrow
    digits = f"({arrow.precision},{arrow.scale})" if pa.types.is_decimal(arrow) else ""
    return f"{column.type.name}{digits}"


def _streamed(described: PgTable) -> tuple[PgColumn, ...]:
    return tuple(described.column(name) for name in described.streamed)
