"""Catalog state that can change without a message in the stream, as a comparable value.

The stream reports changes of rows. It is silent when a table is rewritten, when a column is added,
renamed or given another type, when a partition is attached or truncated, when a table leaves the
publication and is added again, and when a label of an enum is renamed (hazard B3). Each tick
therefore reads a fingerprint and compares it with the last one (`drift.py`). The queries lock no
user table, so they never wait behind the change they are meant to detect.

The order of reads guarantees that a tick sealed at a bound is complete:

    1.  probe a bound, and read the stream until it has passed the bound
    2.  read the fingerprint; if nothing has changed, seal at the bound
    3.  else probe again, read the stream to there, and read the fingerprint again,
        until it is the same twice; then all that explains the change has been read

A change is visible to SQL before its locks are released, and so before a later transaction can
touch the table. Messages about a table are therefore never newer than the fingerprint of step 2. A
Truncate message for a change seen in step 2 is in the stream by the end of step 3.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.pgclient import Connection
from penstock.sources.postgres import fingerprint_sql
from penstock.sources.postgres.names import TableName
from penstock.sources.postgres.publication import OPERATIONS, Publication

__all__ = [
    "ColumnMark",
    "Fingerprint",
    "IndexMark",
    "PartitionMark",
    "TableMark",
    "TypeMark",
    "read_fingerprint",
]


@dataclass(frozen=True, slots=True)
class ColumnMark:
    """Fingerprint of a column."""

    number: int
    """Permanent number of the column: a column that is dropped and added again has a new number."""

    name: str
    type: int
    typmod: int
    nullable: bool
    generated: str
    """Empty, `s` for stored or `v` for virtual."""

    row_xid: int
    """Transaction that wrote the column's row in pg_attribute, as every change of its type does."""

    missing: tuple[str, ...] = ()
    """Value in rows older than the column: one value, or empty for NULL."""


@dataclass(frozen=True, slots=True)
class IndexMark:
    """Index that is the primary key or the replica identity."""

    oid: int
    columns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartitionMark:
    """Partition at any depth below a table that is published as its root."""

    oid: int
    name: TableName
    parent: int
    kind: str
    storage: int
    """pg_class.relfilenode, which changes with each rewrite or truncation."""

    row_xid: int
    replica_identity: str
    identity: tuple[str, ...]
    attached: int
    """Transaction that attached the partition."""

    born: bool
    """True if the partition is known to be created as this partition. It then never held a row
    that was not a row of the root."""

    missing: tuple[tuple[str, str], ...]
    """Value in rows older than a column, by column."""


@dataclass(frozen=True, slots=True)
class TableMark:
    """Fingerprint of a table."""

    oid: int
    name: TableName
    kind: str
    storage: int
    """pg_class.relfilenode, which changes with each rewrite or truncation; 0 for a root."""

    row_xid: int
    """Transaction that wrote the table's row in pg_class, as each rewrite or truncation does."""

    replica_identity: str
    published: bool
    tokens: frozenset[str]
    """Tokens of the table's membership in the publication; see `membership`."""

    key: IndexMark | None
    """Primary key."""

    index: IndexMark | None
    """Index that identifies old rows; None if the replica identity is FULL or NOTHING."""

    listed: tuple[int, ...] | None
    """Column list of the publication."""

    filter: str | None
    """Digest of the row filter of the publication."""

    columns: tuple[ColumnMark, ...]
    partitions: tuple[PartitionMark, ...] = ()


@dataclass(frozen=True, slots=True)
class TypeMark:
    """Type that is not built in, with everything that changes how its values print."""

    oid: int
    name: str
    labels: tuple[tuple[int, str], ...]
    """Labels of an enum, each with its oid, which does not change when the label is renamed."""

    attributes: tuple[tuple[int, str, int, int], ...]
    """Attributes of a composite type: number, name, type and typmod of each."""

    uses: tuple[int, ...]
    """Types that the type consists of."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Publication and tables as of one time."""

    publication: Publication | None
    tables: dict[int, TableMark] = field(default_factory=dict)
    """Published tables, and requested tables that exist, by oid."""

    types: dict[int, TypeMark] = field(default_factory=dict)
    digest: str = field(default="", compare=False)
    """Digest of the versions of all catalog rows that the fingerprint is read from."""


def read_fingerprint(
    connection: Connection,
    publication: str,
    tables: Iterable[int],
    *,
    last: Fingerprint | None = None,
) -> Fingerprint:
    """Return the fingerprint of the publication, its tables, and the tables with oids `tables`.

    Return `last` itself if no catalog row was written since. That check is far cheaper than a full
    read.
    """
    version = connection.server_version
    given = [publication, "{" + ",".join(str(oid) for oid in sorted(tables)) + "}"]
    # The digest is read first. If the catalog changes between the two queries, the digest is stale,
    # and the next call reads everything again.
    digest = connection.query(fingerprint_sql.digest(version), given)[0][0] or ""
    if last is not None and last.digest == digest:
        return last
    rows = connection.query(fingerprint_sql.query(version), given)
    rows_by_kind: dict[str, list[Any]] = {
        "publication": [],
        "table": [],
        "partition": [],
        "type": [],
    }
    for kind, text in rows:
        rows_by_kind[kind or ""].append(msgspec.json.decode(text or ""))
    partitions: dict[int, list[PartitionMark]] = {}
    for root, *row in rows_by_kind["partition"]:
        partitions.setdefault(root, []).append(_partition(row))
    marks = (_table(row, partitions) for row in rows_by_kind["table"])
    types = (_type(row) for row in rows_by_kind["type"])
    return Fingerprint(
        publication=_publication(rows_by_kind["publication"][0])
        if rows_by_kind["publication"]
        else None,
        tables={mark.oid: mark for mark in marks},
        types={mark.oid: mark for mark in types},
        digest=digest,
    )


def _publication(row: list[Any]) -> Publication:
    oid, xid, everything, via_root, *operations, generated = row
    sent = tuple(name for name, on in zip(OPERATIONS, operations, strict=True) if on)
    return Publication(oid, int(xid), everything, via_root, sent, generated)


def _table(row: list[Any], partitions: dict[int, list[PartitionMark]]) -> TableMark:
    (oid, schema, name, kind, storage, xid, identity, published, *more) = row
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
        key=next((_index(index) for index in indexes if index[1]), None),
        index=next((_index(index) for index in indexes if _identifies_rows(index, identity)), None),
        listed=None if listed is None else tuple(sorted(listed)),
        filter=row_filter,
        columns=tuple(_column(column, kind, below) for column in columns),
        partitions=tuple(below),
    )


def _column(row: list[Any], kind: str, below: list[PartitionMark]) -> ColumnMark:
    number, name, type_oid, typmod, nullable, generated, xid, missing = row
    missing_values: tuple[str, ...] = () if missing is None else (missing,)
    if kind == "p":
        # A root stores no rows. Each leaf has its own value for rows older than the column.
        values = {
            value
            for mark in below
            for column, value in mark.missing
            if mark.kind == "r" and column == name
        }
        missing_values = tuple(sorted(values))
    return ColumnMark(number, name, type_oid, typmod, nullable, generated, int(xid), missing_values)


def _partition(row: list[Any]) -> PartitionMark:
    oid, schema, name, parent, kind, storage, xid, identity, indexes, attached, born, missing = row
    names: list[str] = next(
        (index[4] for index in indexes if _identifies_rows(index, identity)), []
    )
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


def _index(row: list[Any]) -> IndexMark:
    return IndexMark(row[0], tuple(row[4]))


def _identifies_rows(index: list[Any], identity: str) -> bool:
    _, primary, chosen, immediate, *_ = index
    return bool((identity == "d" and primary and immediate) or (identity == "i" and chosen))


def _type(row: list[Any]) -> TypeMark:
    oid, name, labels, attributes, uses = row
    return TypeMark(
        oid,
        name,
        tuple((label, text) for label, text in labels),
        tuple((number, text, part, typmod) for number, text, part, typmod in attributes),
        tuple(uses),
    )
