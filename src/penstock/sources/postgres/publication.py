"""Publications, and the relations that a publication sends.

The server function `pg_get_publication_tables` opens each table, and so waits behind a command that
rewrites one. A query that runs at every tick must not wait. This module therefore derives the
published relations from the catalog alone:

    publish_via_partition_root   sent are
    on                           members that are not partitions of another member
    off                          members, with partitioned ones replaced by their leaves

Members are the named tables, the tables of the named schemas, or all tables. Only permanent tables
count: unlogged and temporary tables, views and other relations are never sent.

Versions differ: partitioned tables can be published from version 13 on, schemas, column lists and
row filters from 15 on, generated columns from 18 on.
"""

import hashlib
from dataclasses import dataclass
from typing import Final, Literal, Self

from penstock.pgclient import Connection, quote_literal
from penstock.sources.postgres.names import TableName, identifier

__all__ = [
    "OPERATIONS",
    "Creator",
    "Publication",
    "alter_publication",
    "comment_statement",
    "find_publication",
    "may_drop",
    "membership",
    "publication_columns",
    "publishable_oids",
    "read_creator",
]

COMMENT_PREFIX: Final = "made by penstock for source "
LAKE_SEPARATOR: Final = " of lake "

OPERATIONS: Final = ("insert", "update", "delete", "truncate")


@dataclass(frozen=True, slots=True)
class Publication:
    """Publication, as read from the catalog."""

    oid: int
    row_xid: int
    """Transaction that wrote the publication's row; differs after ALTER, even if altered back."""

    all_tables: bool
    via_root: bool
    """True if changes of partitions are sent under the name of their root."""

    operations: tuple[str, ...]
    """Entries of `OPERATIONS` that the publication sends."""

    generated: bool = False
    """True if stored generated columns are sent for tables without a column list."""


@dataclass(frozen=True, slots=True)
class Creator:
    """Source that a publication was created for, and its lake."""

    source: str
    lake: str = ""
    """Hash of the lake's location; empty in comments of versions that did not record it."""

    @classmethod
    def of(cls, source: str, location: str) -> Self:
        """Return the creator for a source of the lake at the normalized URL `location`."""
        return cls(source, hashlib.sha256(location.encode()).hexdigest()[:12])

    @classmethod
    def parse(cls, comment: str) -> Self | None:
        """Parse the comment of a publication; None if Penstock did not create the publication."""
        if not comment.startswith(COMMENT_PREFIX):
            return None
        source, _, lake = comment.removeprefix(COMMENT_PREFIX).partition(LAKE_SEPARATOR)
        return cls(source, lake)

    def matches(self, other: "Creator") -> bool:
        """Return whether both are the same source; an empty lake matches every lake."""
        return self.source == other.source and (
            self.lake == other.lake or not (self.lake and other.lake)
        )

    def __str__(self) -> str:
        lake = f"{LAKE_SEPARATOR}{self.lake}" if self.lake else ""
        return f"{COMMENT_PREFIX}{self.source}{lake}"


def find_publication(connection: Connection, name: str) -> Publication | None:
    """Return the publication named `name`, if it exists."""
    version = connection.server_version
    rows = connection.query(
        f"SELECT {publication_columns(version)} FROM pg_catalog.pg_publication p"
        " WHERE p.pubname = $1",
        [name],
    )
    if not rows:
        return None
    oid, xid, *flags = (text or "" for text in rows[0])
    all_tables, via_root, *operations, generated = (flag == "t" for flag in flags)
    return Publication(
        int(oid),
        int(xid),
        all_tables,
        via_root,
        tuple(name for name, sent in zip(OPERATIONS, operations, strict=True) if sent),
        generated,
    )


def publishable_oids(connection: Connection) -> list[int]:
    """Return the relations that FOR ALL TABLES would publish, without partitions."""
    rows = connection.query(
        f"SELECT c.oid::int8 FROM pg_catalog.pg_class c WHERE {_PUBLISHABLE}"
        " AND NOT c.relispartition"
    )
    return [int(row[0] or 0) for row in rows]


def comment_statement(publication: str, creator: Creator) -> str:
    """Return the statement that records the creator of a publication as its comment."""
    return f"COMMENT ON PUBLICATION {identifier(publication)} IS {quote_literal(str(creator))}"


def read_creator(connection: Connection, publication: str) -> Creator | None:
    """Return the creator of a publication; None if Penstock did not create it."""
    rows = connection.query(
        "SELECT pg_catalog.obj_description(p.oid, 'pg_publication')"
        " FROM pg_catalog.pg_publication p WHERE p.pubname = $1",
        [publication],
    )
    return Creator.parse(rows[0][0] or "") if rows else None


def may_drop(connection: Connection, publication: str) -> bool:
    """Return whether the role of the connection may drop a publication."""
    rows = connection.query(
        "SELECT pg_catalog.pg_has_role(p.pubowner, 'USAGE')"
        " FROM pg_catalog.pg_publication p WHERE p.pubname = $1",
        [publication],
    )
    return bool(rows) and rows[0][0] == "t"


def alter_publication(
    connection: Connection, publication: str, action: Literal["ADD", "DROP"], table: TableName
) -> None:
    """Add a table to a publication, or remove it."""
    connection.execute(f"ALTER PUBLICATION {identifier(publication)} {action} TABLE {table}")


def publication_columns(version: int) -> str:
    """Return the columns of pg_publication, aliased `p`, that make a `Publication`."""
    via_root = "p.pubviaroot" if version >= 130000 else "false"
    generated = "p.pubgencols = 's'" if version >= 180000 else "false"
    return (
        f"p.oid::int8, p.xmin::text, p.puballtables, {via_root}, p.pubinsert, p.pubupdate,"
        f" p.pubdelete, p.pubtruncate, {generated}"
    )


def membership(version: int) -> str:
    """Return common table expressions over the publication named $1 and the tables with oids $2.

    They begin after `WITH RECURSIVE` and define

        member (oid, token)         entries of the publication, each with a token of its row
        tree (root, oid, parent)    members with all partitions below them
        published (oid)             the relations that the publication sends under their own name
        relation (oid, published)   these, and the existing relations of $2 that are not published

    A token is valid as long as the membership: a table that leaves the publication and is added
    again has another token.
    """
    via_root = "pub.pubviaroot" if version >= 130000 else "false"
    pending = " AND NOT i.inhdetachpending" if version >= 140000 else ""
    # A table that leaves a published schema and returns keeps the token part of the schema's row.
    # But its dependency on the schema is a separate row, which is written again each time.
    schemas = f"""
        UNION ALL
        SELECT c.oid, 's' || n.oid || ':' || n.xmin || ':' || coalesce((
                 SELECT d.xmin::text FROM pg_catalog.pg_depend d
                 WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = c.oid
                   AND d.objsubid = 0 AND d.refclassid = 'pg_catalog.pg_namespace'::regclass
               ), '')
        FROM pub JOIN pg_catalog.pg_publication_namespace n ON n.pnpubid = pub.oid
        JOIN pg_catalog.pg_class c ON c.relnamespace = n.pnnspid AND {_PUBLISHABLE}"""
    return f"""
      pub AS MATERIALIZED (
        SELECT p.*, p.xmin AS row_xid FROM pg_catalog.pg_publication p WHERE p.pubname = $1
      ),
      member (oid, token) AS MATERIALIZED (
        SELECT m.prrelid, 't' || m.oid || ':' || m.xmin
        FROM pub JOIN pg_catalog.pg_publication_rel m ON m.prpubid = pub.oid
        {schemas if version >= 150000 else ""}
        UNION ALL
        SELECT c.oid, 'a' || pub.oid
        FROM pub JOIN pg_catalog.pg_class c ON pub.puballtables AND {_PUBLISHABLE}
      ),
      tree (root, oid, parent, attached) AS (
        SELECT DISTINCT m.oid, m.oid, 0::oid, ''::text FROM member m
        UNION ALL
        SELECT t.root, i.inhrelid, i.inhparent, i.xmin::text
        FROM tree t
        JOIN pg_catalog.pg_class c ON c.oid = t.oid AND c.relkind = 'p'
        JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid{pending}
      ),
      published (oid) AS MATERIALIZED (
        SELECT m.oid FROM pub CROSS JOIN (SELECT DISTINCT oid FROM member) m
        WHERE {via_root}
          AND NOT EXISTS (SELECT 1 FROM tree t WHERE t.oid = m.oid AND t.root <> m.oid)
        UNION ALL
        SELECT DISTINCT t.oid
        FROM pub CROSS JOIN tree t JOIN pg_catalog.pg_class c ON c.oid = t.oid AND {_PUBLISHABLE}
        WHERE NOT {via_root} AND c.relkind = 'r'
      ),
      relation (oid, published) AS MATERIALIZED (
        SELECT p.oid, true FROM published p
        UNION ALL
        SELECT c.oid, false FROM pg_catalog.pg_class c
        WHERE c.oid = ANY ($2::oid[]) AND c.oid NOT IN (SELECT p.oid FROM published p)
      )"""


_PUBLISHABLE: Final = "c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384"
