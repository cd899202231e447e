"""Schema of one tracked table: the columns of its messages and of its collection.

A Relation message lists columns by position, without their catalog numbers. Such a list
is readable only if it equals the catalog's list, or a prefix of it, by position, name and
type. A new catalog description is matched with the stored columns by number. Matching by
name would confuse two swapped columns (hazard B3).

    wire        columns of the messages: every published column
    columns     stored columns: without those excluded in the file, in the order of their
                discovery, with dropped columns as nulls

Columns of a collection are never dropped and keep their values. The type of a column may
widen. If the table's type narrows, values are cast to the wider stored type.
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
"""SQL expression for a dropped column in a snapshot."""

OURS: Final = (TIME, DIFF, PROGRESSED)
"""Reserved column names: readers receive update metadata under them."""

DECIMALS: Final = (1700, 1231)
"""Type oids whose storage depends on precision and scale: numeric and its array."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A column of the collection."""

    shape: PgColumn
    """Name, stored type, and number in the table (0 if dropped). The stored type may be wider
    than the table's type."""

    learned: bool = False
    """True if the column was added after the collection was created."""


@dataclass(frozen=True, slots=True)
class Column:
    """A stored column and the conversion of its values."""

    name: str
    position: int | None
    """Position in messages, or None if the column was dropped: it is then null in every row."""

    type: ColumnType
    default: str | None = None
    """Value in rows older than the column, as text."""

    def field(self) -> pa.Field:
        """Return the Arrow field of the collection."""
        return pa.field(self.name, self.type.arrow, metadata={LABEL: self.type.label.encode()})

    def default_scalar(self) -> pa.Scalar:
        """Return the value in rows older than the column, as an Arrow scalar."""
        if self.default is None:
            return pa.scalar(None, self.type.arrow)
        return self.type.from_text(pa.array([self.default.encode()], pa.binary()))[0]

    def default_value(self) -> Any:
        """Return the same as a Python value; times as integers, as Python has no infinite times."""
        value = pa.array([self.default_scalar()], self.type.arrow)
        return value.cast(with_integer_times(self.type.arrow))[0].as_py()


@dataclass(frozen=True, slots=True)
class _Wider(ColumnType):
    """Type of a column that is stored in a wider or equivalent type."""

    narrow: ColumnType = field(kw_only=True)

    def from_text(self, values: pa.Array) -> pa.Array:
        return self.narrow.from_text(values).cast(self.arrow)

    def from_copy(self, values: pa.Array) -> pa.Array:
        return self.narrow.from_copy(values).cast(self.arrow)


@dataclass(frozen=True, slots=True)
class Table:
    """A table, as its messages and its collection represent it."""

    oid: int
    name: str
    """Qualified name, quoted where SQL needs it."""

    source: str
    """Name of the source."""

    collection: str
    described: PgTable
    spec: TableSpec
    kept: tuple[Kept, ...]
    key_columns: tuple[str, ...]
    """Key of the collection: the table's primary key at creation of the collection. Empty if a
    key column is not stored or is an array."""

    columns: tuple[Column, ...]
    key: tuple[str, ...]
    """Columns that identify an old row if a message does not contain the complete row."""

    @property
    def wire(self) -> tuple[PgColumn, ...]:
        """Return the columns of the messages."""
        return _streamed(self.described)

    @property
    def schema(self) -> pa.Schema:
        """Return the schema of the collection."""
        return pa.schema([column.field() for column in self.columns])

    @property
    def numbers(self) -> Mapping[str, int]:
        """Return the number in the table of each stored column, by name; 0 if dropped."""
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
    """Return the table for a catalog description and a collection with the columns `kept`.

    A table that is already tracked keeps the name of its `collection`.
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
        # A partition may have a different identity than its root: its Relation messages give it.
        key=described.primary_key if described.replica_identity == "f" else described.identity,
    )


@dataclass(frozen=True, slots=True)
class Misfit:
    """A schema mismatch: the existing collection cannot represent the new catalog description."""

    reason: str
    accepted: str | None = None
    """Consequence of continuing at the user's request; None if that is impossible."""

    replaceable: bool = False
    """True if a resync may load the table into a new collection."""


def refit(before: Table, described: PgTable, *, asked: bool = False) -> Table | Misfit:
    """Return the table for a new catalog description, or the schema mismatch.

    Columns are matched by number. A dropped column is a mismatch, unless it was added after
    the collection was created: such a column is then null again, as before. With `asked`,
    a user has accepted the reported consequence, and columns are matched by name.
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
        # A column of this name was dropped, and has been added again.
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
    """Return whether messages with this layout are readable as rows of `table`.

    They may omit the last columns: after a reconnect, messages may be older than the columns.
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
    """Return the non-null values of `columns` in rows older than the columns, by name."""
    return {each.name: each.default_value() for each in columns if each.default is not None}


def _fitted(shape: PgColumn, found: PgColumn, *, text: bool) -> PgColumn | None:
    """Return the column to store for `found` in place of `shape`, or None if impossible."""
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
    """Return a mismatch if an excluded column was renamed to a name that is not excluded."""
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
    """Return the type name, with precision and scale if the collection depends on them."""
    arrow = column_type(column, text=False).arrow
    digits = f"({arrow.precision},{arrow.scale})" if pa.types.is_decimal(arrow) else ""
    return f"{column.type.name}{digits}"


def _streamed(described: PgTable) -> tuple[PgColumn, ...]:
    return tuple(described.column(name) for name in described.streamed)
