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
    "SchemaMismatch",
    "StoredColumn",
    "Table",
    "build_table",
    "default_values",
    "evolve_table",
    "matches_relation",
]

DROPPED: Final = "NULL::pg_catalog.text"
"""SQL expression for a dropped column in a snapshot."""

RESERVED: Final = (TIME, DIFF, PROGRESSED)
"""Reserved column names: readers receive update metadata under them."""

DECIMALS: Final = (1700, 1231)
"""Type oids whose storage depends on precision and scale: numeric and its array."""


@dataclass(frozen=True, slots=True)
class StoredColumn:
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
class _WidenedType(ColumnType):
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
    stored: tuple[StoredColumn, ...]
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
        return {column.shape.name: column.shape.number for column in self.stored}


def build_table(
    source: str,
    described: PgTable,
    spec: TableSpec,
    stored: Sequence[StoredColumn] | None = None,
    key_columns: tuple[str, ...] | None = None,
    *,
    collection: str | None = None,
) -> Table:
    """Return the table for a catalog description and a collection with the columns `stored`.

    A table that is already tracked keeps the name of its `collection`.
    """
    wire = {column.number: (i, column) for i, column in enumerate(_streamed(described))}
    if stored is None:
        stored = [StoredColumn(c) for _, c in wire.values() if c.name not in spec.exclude]
    columns = []
    for name, shape in ((column.shape.name, column.shape) for column in stored):
        stored_type = column_type(shape, text=name in spec.text)
        position, sent = wire.get(shape.number, (None, None))
        if sent is None:
            columns.append(Column(name, None, replace(stored_type, select=DROPPED)))
            continue
        kind = column_type(sent, text=sent.name in spec.text)
        if (kind.arrow, kind.label) != (stored_type.arrow, stored_type.label):
            kind = _WidenedType(
                kind.column,
                stored_type.arrow,
                stored_type.label,
                kind.select,
                kind.binary,
                narrow=kind,
            )
        default = sent.missing if sent.has_missing else None
        columns.append(Column(name, position, kind, default))
    if key_columns is None:
        flat = {column.name for column in columns if not pa.types.is_nested(column.type.arrow)}
        primary = described.primary_key
        key_columns = primary if flat.issuperset(primary) else ()
    return Table(
        oid=described.oid,
        name=str(described.table_name),
        source=source,
        collection=collection or compose_name(source, described.schema, described.name),
        described=described,
        spec=spec,
        stored=tuple(stored),
        key_columns=key_columns,
        columns=tuple(columns),
        # A partition may have a different identity than its root: its Relation messages give it.
        key=described.primary_key if described.replica_identity == "f" else described.identity,
    )


@dataclass(frozen=True, slots=True)
class SchemaMismatch:
    """Reason why the existing collection cannot represent the new catalog description."""

    reason: str
    accepted: str | None = None
    """Consequence of continuing at the user's request; None if that is impossible."""

    replaceable: bool = False
    """True if a resync may load the table into a new collection."""


def evolve_table(
    before: Table, described: PgTable, *, accepted: bool = False
) -> Table | SchemaMismatch:
    """Return the table for a new catalog description, or the schema mismatch.

    Columns are matched by number. A dropped column is a mismatch, unless it was added after
    the collection was created: such a column is then null again, as before. With `accepted`,
    a user has accepted the reported consequence, and columns are matched by name.
    """
    wire = {
        column.name if accepted else column.number: column
        for column in _streamed(described)
        if column.name not in before.spec.exclude
    }
    if (exposed := _find_exposed(before, described)) is not None and not accepted:
        return exposed
    stored: list[StoredColumn] = []
    for column in before.stored:
        shape = column.shape
        sent = wire.pop(shape.name if accepted else shape.number, None)
        if sent is None:
            if not (column.learned or shape.number == 0):
                return _dropped_column(shape.name, described)
            stored.append(StoredColumn(replace(shape, number=0), learned=True))
            continue
        if sent.name != shape.name:
            return SchemaMismatch(f'column "{shape.name}" is now "{sent.name}"', replaceable=True)
        fitted = _fit_column(shape, sent, text=shape.name in before.spec.text)
        if fitted is None:
            return _type_mismatch(shape, sent)
        stored.append(StoredColumn(fitted, column.learned))
    for sent in wire.values():
        if sent.name in RESERVED:
            return SchemaMismatch(f'column "{sent.name}" was added, a name that Penstock reserves')
        namesake = next((i for i, c in enumerate(stored) if c.shape.name == sent.name), None)
        if namesake is None:
            stored.append(StoredColumn(sent, learned=True))
            continue
        # A column of this name was dropped, and has been added again.
        fitted = _fit_column(stored[namesake].shape, sent, text=sent.name in before.spec.text)
        if fitted is None:
            return _type_mismatch(stored[namesake].shape, sent)
        stored[namesake] = StoredColumn(fitted, learned=True)
    declared, primary = before.key_columns, described.primary_key
    if declared and primary != declared:
        now = f"({', '.join(primary)})" if primary else "dropped"
        reason = f"its primary key was ({', '.join(declared)}) and is now {now}"
        return SchemaMismatch(reason, replaceable=True)
    return build_table(
        before.source, described, before.spec, stored, declared, collection=before.collection
    )


def matches_relation(table: Table, relation: Relation) -> bool:
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


def default_values(columns: Sequence[Column]) -> Mapping[str, Any]:
    """Return the non-null values of `columns` in rows older than the columns, by name."""
    return {column.name: column.default_value() for column in columns if column.default is not None}


def _fit_column(shape: PgColumn, sent: PgColumn, *, text: bool) -> PgColumn | None:
    """Return the column to store for `sent` in place of `shape`, or None if impossible."""
    stored, own = column_type(shape, text=text).arrow, column_type(sent, text=text).arrow
    if widens(own, stored):
        return replace(shape, number=sent.number)
    if widens(stored, own):
        return sent
    if pa.types.is_decimal(stored) and pa.types.is_decimal(own):
        scale = max(stored.scale, own.scale)
        whole = max(stored.precision - stored.scale, own.precision - own.scale)
        if whole + scale <= 38:
            return replace(sent, typmod=((whole + scale) << 16 | scale) + 4)
    return None


def _find_exposed(before: Table, described: PgTable) -> SchemaMismatch | None:
    """Return a mismatch if an excluded column was renamed to a name that is not excluded."""
    excluded = {c.number: c for c in before.wire if c.name in before.spec.exclude}
    for column in _streamed(described):
        was = excluded.get(column.number)
        if was is not None and column.name not in before.spec.exclude:
            return SchemaMismatch(
                f'column "{was.name}", which is excluded, is now "{column.name}"',
                f'"{column.name}" would be stored.',
            )
    return None


def _dropped_column(name: str, described: PgTable) -> SchemaMismatch:
    exists = any(column.name == name for column in described.columns)
    reason = f'column "{name}" ' + ("is no longer published" if exists else "was dropped")
    return SchemaMismatch(reason, replaceable=True)


def _type_mismatch(shape: PgColumn, sent: PgColumn) -> SchemaMismatch:
    return SchemaMismatch(
        f'column "{shape.name}" was {_type_name(shape)} and is now {_type_name(sent)}, '
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
