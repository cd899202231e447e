"""Publications, and which relations one of them sends.

The server has a function for the second, `pg_get_publication_tables`, but it
opens each table, and so waits behind whoever rewrites one. What is read at
every tick must not wait; so the rule is written here, over the catalogue alone:

    publish_via_partition_root   sent are
    on                           members that are not partitions of another member
    off                          members, and of partitioned ones their leaves

Members are the tables named, those of schemas named, or all. Permanent tables
only: unlogged and temporary ones, views and the like are never sent.

Versions differ: partitioned tables can be published from 13 on, schemas,
column lists and row filters from 15 on, generated columns from 18 on.
"""

import hashlib
from dataclasses import dataclass
from typing import Final, Literal, Self

from penstock.durable import normal
from penstock.sources.postgres.connect import Connection, quote_literal
from penstock.sources.postgres.names import TableName, identifier

__all__ = [
    "OPERATIONS",
    "Maker",
    "Publication",
    "alter_publication",
    "comment_of",
    "find_publication",
    "made_for",
    "may_drop",
    "membership",
    "publication_columns",
    "publishable_oids",
]

MADE: Final = "made by penstock for source "
LAKE: Final = " of lake "

OPERATIONS: Final = ("insert", "update", "delete", "truncate")


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication, as it is now."""

    oid: int
    row_xid: int
    """Which transaction wrote its row: another one if it was altered, even if altered back."""

    all_tables: bool
    via_root: bool
    """Whether changes of partitions come under the name of their root."""

    operations: tuple[str, ...]
    """Those of `OPERATIONS` that it sends."""

    generated: bool = False
    """Whether stored generated columns are sent where there is no column list."""


@dataclass(frozen=True, slots=True)
class Maker:
    """For whom we made a publication."""

    source: str
    lake: str = ""
    """Which lake's; empty in comments that were written before lakes were told apart."""

    @classmethod
    def of(cls, source: str, location: str) -> Self:
        """The source of that name in the lake at `location`, which is told by its hash alone."""
        return cls(source, hashlib.sha256(normal(location).encode()).hexdigest()[:12])

    @classmethod
    def parse(cls, comment: str) -> Self | None:
        """Who is named in a publication's comment; None if it is not one of ours."""
        if not comment.startswith(MADE):
            return None
        source, _, lake = comment.removeprefix(MADE).partition(LAKE)
        return cls(source, lake)

    def is_also(self, other: "Maker") -> bool:
        """Whether both are the same, as far as they say."""
        return self.source == other.source and (
            self.lake == other.lake or not (self.lake and other.lake)
        )

    def __str__(self) -> str:
        return f"{MADE}{self.source}" + (f"{LAKE}{self.lake}" if self.lake else "")


def find_publication(connection: Connection, name: str) -> Publication | None:
    """The publication called `name`, if there is one."""
    version = connection.server_version
    rows = connection.query(
        f"SELECT {publication_columns(version)} FROM pg_catalog.pg_publication p"
        " WHERE p.pubname = $1",
        [name],
    )
    if not rows:
        return None
    oid, xid, *flags = (text or "" for text in rows[0])
    everything, via_root, *operations, generated = (flag == "t" for flag in flags)
    return Publication(
        int(oid),
        int(xid),
        everything,
        via_root,
        tuple(name for name, sent in zip(OPERATIONS, operations, strict=True) if sent),
        generated,
    )


def publishable_oids(connection: Connection) -> list[int]:
    """All relations that a publication of all tables would have, but for partitions of others."""
    rows = connection.query(
        f"SELECT c.oid::int8 FROM pg_catalog.pg_class c WHERE {_PUBLISHABLE}"
        " AND NOT c.relispartition"
    )
    return [int(row[0] or 0) for row in rows]


def comment_of(publication: str, maker: Maker) -> str:
    """The statement by which a publication says for which source it was made."""
    return f"COMMENT ON PUBLICATION {identifier(publication)} IS {quote_literal(str(maker))}"


def made_for(connection: Connection, publication: str) -> Maker | None:
    """For whom we made a publication; None if it is somebody else's, or not there."""
    rows = connection.query(
        "SELECT pg_catalog.obj_description(p.oid, 'pg_publication')"
        " FROM pg_catalog.pg_publication p WHERE p.pubname = $1",
        [publication],
    )
    return Maker.parse(rows[0][0] or "") if rows else None


def may_drop(connection: Connection, publication: str) -> bool:
    """Whether the role of the connection may drop a publication."""
    rows = connection.query(
        "SELECT pg_catalog.pg_has_role(p.pubowner, 'USAGE')"
        " FROM pg_catalog.pg_publication p WHERE p.pubname = $1",
        [publication],
    )
    return bool(rows) and rows[0][0] == "t"


def alter_publication(
    connection: Connection, publication: str, how: Literal["ADD", "DROP"], table: TableName
) -> None:
    """Put a table into a publication, or take it out."""
    connection.execute(f"ALTER PUBLICATION {identifier(publication)} {how} TABLE {table}")


def publication_columns(version: int) -> str:
    """The columns of pg_publication, called `p`, that make a `Publication`."""
    via_root = "p.pubviaroot" if version >= 130000 else "false"
    generated = "p.pubgencols = 's'" if version >= 180000 else "false"
    return (
        f"p.oid::int8, p.xmin::text, p.puballtables, {via_root}, p.pubinsert, p.pubupdate,"
        f" p.pubdelete, p.pubtruncate, {generated}"
    )


def membership(version: int) -> str:
    """Common table expressions over the publication named $1 and the tables numbered $2.

    They begin after `WITH RECURSIVE` and define

        member (oid, token)         what was put into the publication, and by which row
        tree (root, oid, parent)    members with all partitions below them
        published (oid)             the relations under whose names changes come
        relation (oid, published)   those, and the existing ones of $2 that are not among them

    A token lasts as long as the membership lasts: who leaves and comes back has another.
    """
    via_root = "pub.pubviaroot" if version >= 130000 else "false"
    pending = " AND NOT i.inhdetachpending" if version >= 140000 else ""
    # Who leaves a published schema and comes back keeps the schema's row, but
    # its dependency on a schema is a row of its own, written again each time.
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
