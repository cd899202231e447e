"""What can change upstream without a message in the stream, as a value to compare.

The stream tells of rows. It is silent when a table is rewritten, when a column
is added, renamed or given another type, when a partition is attached or
truncated, when a table leaves the publication and comes back, when a label of
an enum is renamed (hazard B3). So each tick reads a fingerprint and compares it
with the last one (`drift.py`). Reading it takes no lock on any table, and so
never waits behind the change it is to notice.

When to read it, so that a tick sealed at a bound holds all it must:

    1.  probe a bound, and read the stream until it has passed the bound
    2.  read the fingerprint; if nothing has changed, seal at the bound
    3.  else probe again, read the stream to there, and read the fingerprint again,
        until it is the same twice; then all that explains the change has been seen

A change is visible to SQL before its locks are released, and so before any
later transaction can have touched the table. Hence what the stream has shown
of a table is never newer than what step 2 sees, and a Truncate message for a
change seen in step 2 is in the stream by the end of step 3.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.sources.postgres import fingerprint_sql
from penstock.sources.postgres.connect import Connection
from penstock.sources.postgres.names import TableName
from penstock.sources.postgres.publication import OPERATIONS, Publication

__all__ = [
    "ColumnMark",
    "Fingerprint",
    "IndexMark",
    "PartitionMark",
    "TableMark",
    "TypeMark",
    "fingerprint",
    "without_rows",
]


@dataclass(frozen=True, slots=True)
class ColumnMark:
    """A column."""

    number: int
    """Kept for life: a column that is dropped and added again has another."""

    name: str
    type: int
    typmod: int
    nullable: bool
    generated: str
    """Empty, `s` for stored or `v` for virtual."""

    row_xid: int
    """Which transaction wrote its row in pg_attribute: that of any change of its type does."""

    missing: tuple[str, ...] = ()
    """What rows older than the column hold: one value, or none for null."""


@dataclass(frozen=True, slots=True)
class IndexMark:
    """An index that is the primary key or the replica identity."""

    oid: int
    columns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartitionMark:
    """A partition at any depth below a table that is published as their root."""

    oid: int
    name: TableName
    parent: int
    kind: str
    storage: int
    """pg_class.relfilenode, another one after each rewrite or truncation."""

    row_xid: int
    replica_identity: str
    identity: tuple[str, ...]
    attached: int
    """Which transaction attached it."""

    born: bool
    """Whether it is known to have been created as this partition, and so never to have held a
    row that was not one of the root's."""

    missing: tuple[tuple[str, str], ...]
    """By column, what rows older than the column hold."""


@dataclass(frozen=True, slots=True)
class TableMark:
    """A table."""

    oid: int
    name: TableName
    kind: str
    storage: int
    """pg_class.relfilenode, another one after each rewrite or truncation; 0 of a root."""

    row_xid: int
    """Which transaction wrote its row in pg_class: after a rewrite or truncation, that one."""

    replica_identity: str
    published: bool
    tokens: frozenset[str]
    """By what it is in the publication; see `membership`."""

    key: IndexMark | None
    """The primary key."""

    index: IndexMark | None
    """What names old rows, unless it is the whole row or nothing."""

    listed: tuple[int, ...] | None
    """The publication's column list."""

    filter: str | None
    """A digest of the publication's row filter."""

    columns: tuple[ColumnMark, ...]
    partitions: tuple[PartitionMark, ...] = ()


@dataclass(frozen=True, slots=True)
class TypeMark:
    """A type that is not built in, and all that changes how its values print."""

    oid: int
    name: str
    labels: tuple[tuple[int, str], ...]
    """Of an enum: each label, with the number that it keeps when renamed."""

    attributes: tuple[tuple[int, str, int, int], ...]
    """Of a composite: number, name, type and typmod of each."""

    uses: tuple[int, ...]
    """The types it is made of."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The publication and the tables, at one moment."""

    publication: Publication | None
    tables: dict[int, TableMark] = field(default_factory=dict)
    """By oid: those that are published, and those asked for that exist."""

    types: dict[int, TypeMark] = field(default_factory=dict)
    digest: str = field(default="", compare=False)
    """Of the versions of all rows of the catalogue that went into it."""


def fingerprint(
    connection: Connection,
    publication: str,
    tables: Iterable[int],
    *,
    last: Fingerprint | None = None,
) -> Fingerprint:
    """Of the publication, what it publishes, and the tables numbered `tables`.

    `last` itself, if nothing has been written since; that is far cheaper to find out.
    """
    version = connection.server_version
    given = [publication, "{" + ",".join(str(oid) for oid in sorted(tables)) + "}"]
    # The digest comes first: should something change in between, it is the
    # digest that is out of date, and the next reading looks again.
    digest = connection.query(fingerprint_sql.digest(version), given)[0][0] or ""
    if last is not None and last.digest == digest:
        return last
    rows = connection.query(fingerprint_sql.query(version), given)
    found: dict[str, list[Any]] = {"publication": [], "table": [], "partition": [], "type": []}
    for kind, said in rows:
        found[kind or ""].append(msgspec.json.decode(said or ""))
    partitions: dict[int, list[PartitionMark]] = {}
    for root, *said in found["partition"]:
        partitions.setdefault(root, []).append(_partition(said))
    marks = (_table(said, partitions) for said in found["table"])
    types = (_type(said) for said in found["type"])
    return Fingerprint(
        publication=_publication(found["publication"][0]) if found["publication"] else None,
        tables={mark.oid: mark for mark in marks},
        types={mark.oid: mark for mark in types},
        digest=digest,
    )


def without_rows(connection: Connection, tables: Iterable[int]) -> set[int]:
    """Those of `tables` that have not held a row since they were made or truncated.

    This opens the tables, and so waits for whoever has locked one.
    """
    listed = "{" + ",".join(str(oid) for oid in tables) + "}"
    rows = connection.query(
        "SELECT oid FROM pg_catalog.unnest($1::oid[]) oid"
        " WHERE pg_catalog.pg_relation_size(oid) = 0",
        [listed],
    )
    return {int(row[0] or 0) for row in rows}


def _publication(said: list[Any]) -> Publication:
    oid, xid, everything, via_root, *operations, generated = said
    sent = tuple(name for name, on in zip(OPERATIONS, operations, strict=True) if on)
    return Publication(oid, int(xid), everything, via_root, sent, generated)


def _table(said: list[Any], partitions: dict[int, list[PartitionMark]]) -> TableMark:
    (oid, schema, name, kind, storage, xid, identity, published, *more) = said
    tokens, indexes, listed, row_filter, columns = more
    below = sorted(partitions.get(oid, ()), key=lambda mark: mark.oid)
    return TableMark(
        oid=oid,
        name=TableName(schema, name),
        kind=kind,
        storage=storage,
        row_xid=int(xid),
        replica_identity=identity,
        published=published,
        tokens=frozenset(tokens),
        key=next((_index(each) for each in indexes if each[1]), None),
        index=next((_index(each) for each in indexes if _names_rows(each, identity)), None),
        listed=None if listed is None else tuple(sorted(listed)),
        filter=row_filter,
        columns=tuple(_column(column, kind, below) for column in columns),
        partitions=tuple(below),
    )


def _column(said: list[Any], kind: str, below: list[PartitionMark]) -> ColumnMark:
    number, name, type_oid, typmod, nullable, generated, xid, missing = said
    held: tuple[str, ...] = () if missing is None else (missing,)
    if kind == "p":
        # A root has no rows; what older rows hold, its leaves know, each for itself.
        values = {
            value
            for mark in below
            for column, value in mark.missing
            if mark.kind == "r" and column == name
        }
        held = tuple(sorted(values))
    return ColumnMark(number, name, type_oid, typmod, nullable, generated, int(xid), held)


def _partition(said: list[Any]) -> PartitionMark:
    oid, schema, name, parent, kind, storage, xid, identity, indexes, attached, born, missing = said
    names: list[str] = next((each[4] for each in indexes if _names_rows(each, identity)), [])
    return PartitionMark(
        oid=oid,
        name=TableName(schema, name),
        parent=parent,
        kind=kind,
        storage=storage,
        row_xid=int(xid),
        replica_identity=identity,
        identity=tuple(names),
        attached=int(attached),
        born=born,
        missing=tuple((column, value) for column, value in missing),
    )


def _index(said: list[Any]) -> IndexMark:
    return IndexMark(said[0], tuple(said[4]))


def _names_rows(index: list[Any], identity: str) -> bool:
    _, primary, chosen, immediate, *_ = index
    return bool((identity == "d" and primary and immediate) or (identity == "i" and chosen))


def _type(said: list[Any]) -> TypeMark:
    oid, name, labels, attributes, uses = said
    return TypeMark(
        oid,
        name,
        tuple((label, text) for label, text in labels),
        tuple((number, text, part, typmod) for number, text, part, typmod in attributes),
        tuple(uses),
    )
