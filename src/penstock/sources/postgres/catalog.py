"""Tables, columns and types of a server and their publication, read from its catalog.

One query reads all tables, so all descriptions are of the same time. A second query reads the types
of their columns. Only rows stored in a table itself (`ONLY` in SQL) belong to it: a table that
inherits from it is a separate table. Partitions belong to their root if the publication sends their
changes under the name of the root.

The stream omits generated columns unless the publication includes them. The columns in the stream
are therefore `streamed`, not `columns`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.pgclient import Connection
from penstock.sources.postgres.catalog_types import PgColumn, PgType
from penstock.sources.postgres.names import TableName
from penstock.sources.postgres.publication import membership

__all__ = [
    "PgColumn",
    "PgLeaf",
    "PgTable",
    "PgType",
    "describe",
    "find_oids",
    "is_streamed",
    "published_tables",
    "read_types",
]


@dataclass(frozen=True, slots=True)
class PgLeaf:
    """Leaf partition of a table that is published under the name of its root.

    The columns of a leaf have the names and types of the columns of the root. Their numbers and
    their order can differ.
    """

    oid: int
    schema: str
    name: str
    kind: str
    """pg_class.relkind: `r`, or `f` for a foreign table, whose changes are never sent."""

    replica_identity: str
    identity: tuple[str, ...]
    selectable: bool
    """True if the role may read the leaf by its own name; a privilege on the root does not imply
    it."""

    pages: int
    estimated_rows: int
    bytes: int

    @property
    def table_name(self) -> TableName:
        """Return the schema and name of the leaf."""
        return TableName(self.schema, self.name)


@dataclass(frozen=True, slots=True)
class PgTable:
    """Table, with the way the publication sends it."""

    oid: int
    schema: str
    name: str
    kind: str
    """pg_class.relkind: `r` for a table, `p` for the root of partitions."""

    persistence: str
    """pg_class.relpersistence: `p`ermanent, `u`nlogged, `t`emporary."""

    replica_identity: str
    """pg_class.relreplident: `d`efault, `n`othing, `f`ull, `i`ndex."""

    columns: tuple[PgColumn, ...]
    """All columns that are not dropped, generated columns included, in the order of their
    numbers."""

    primary_key: tuple[str, ...]
    identity: tuple[str, ...]
    """Columns that identify an old row in the stream: all for FULL, none for NOTHING."""

    published: bool
    published_columns: tuple[str, ...] | None
    """Column list of the publication; None if it has no list for this table."""

    streamed: tuple[str, ...]
    """Columns in messages, in message order."""

    row_filter: str | None
    """Row filter (WHERE) of the publication, as SQL over the columns of the table."""

    filter_columns: tuple[str, ...]
    """Columns that the row filter uses."""

    leaves: tuple[PgLeaf, ...]
    """Partitions that hold the rows of a root; empty for other tables."""

    ancestors: tuple[TableName, ...]
    """Ancestors of a partition, from its parent up to the root."""

    pages: int
    """Number of pages, including the pages of the leaves."""

    estimated_rows: int
    """Row count as of the last ANALYZE or VACUUM; -1 if neither has run."""

    bytes: int

    @property
    def table_name(self) -> TableName:
        """Return the schema and name of the table."""
        return TableName(self.schema, self.name)

    def column(self, name: str) -> PgColumn:
        """Return the column named `name`."""
        return next(column for column in self.columns if column.name == name)


def published_tables(connection: Connection, publication: str) -> tuple[PgTable, ...]:
    """Return the tables that the publication sends under their own name, by schema and name."""
    return tuple(table for table in describe(connection, publication, ()) if table.published)


def describe(connection: Connection, publication: str, oids: Iterable[int]) -> tuple[PgTable, ...]:
    """Return the published tables, and the tables with `oids` even if they are not published."""
    listed = "{" + ",".join(str(oid) for oid in oids) + "}"
    rows = connection.query(_tables(connection.server_version), [publication, listed])
    values = [msgspec.json.decode(row[0] or "") for row in rows]
    types = read_types(connection, {column[2] for value in values for column in value["columns"]})
    return tuple(_table(value, types) for value in values)


def find_oids(connection: Connection, names: Sequence[TableName]) -> dict[TableName, int]:
    """Return the oids of the relations with these names, of any kind; omit missing relations."""
    encoded = msgspec.json.encode([[name.schema, name.name] for name in names]).decode()
    rows = connection.query(
        """
        SELECT n.nspname, c.relname, c.oid
        FROM pg_catalog.json_array_elements($1::json) w (name)
        JOIN pg_catalog.pg_namespace n ON n.nspname = w.name ->> 0
        JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w.name ->> 1
        """,
        [encoded],
    )
    return {TableName(str(schema), str(name)): int(oid or 0) for schema, name, oid in rows}


def read_types(connection: Connection, oids: Iterable[int]) -> Mapping[int, PgType]:
    """Return the types with these oids, each with its element and base types."""
    listed = "{" + ",".join(str(oid) for oid in sorted(oids)) + "}"
    rows = connection.query(
        """
        WITH RECURSIVE used (oid) AS (
          SELECT pg_catalog.unnest($1::oid[])
          UNION
          SELECT part.oid FROM used u JOIN pg_catalog.pg_type t ON t.oid = u.oid
          CROSS JOIN LATERAL (VALUES (t.typbasetype), (t.typelem)) part (oid)
          WHERE part.oid <> 0
        )
        SELECT t.oid, pg_catalog.format_type(t.oid, NULL), t.typtype, t.typcategory,
               -- Some types that are no arrays have elements too, such as point and name.
               CASE WHEN e.typarray = t.oid THEN e.oid END,
               nullif(t.typbasetype, 0), t.typtypmod
        FROM used u JOIN pg_catalog.pg_type t ON t.oid = u.oid
        LEFT JOIN pg_catalog.pg_type e ON e.oid = t.typelem
        """,
        [listed],
    )
    raw = {int(row[0] or 0): row for row in rows}
    made: dict[int, PgType] = {}

    def make(oid: int) -> PgType:
        if oid not in made:
            _, name, kind, category, element, base, typmod = raw[oid]
            made[oid] = PgType(
                oid,
                str(name),
                str(kind),
                str(category),
                element=None if element is None else make(int(element)),
                base=None if base is None else make(int(base)),
                typmod=int(typmod or -1),
            )
        return made[oid]

    return {oid: make(oid) for oid in raw}


def _table(value: Mapping[str, Any], types: Mapping[int, PgType]) -> PgTable:
    columns = tuple(_column(column, types) for column in value["columns"])
    if value["kind"] == "p":
        columns = tuple(_with_missing_of_leaves(column, value["leaves"]) for column in columns)
    names = {column.number: column.name for column in columns}
    generated = {column[1]: column[6] for column in value["columns"]}
    listed = value["list"]
    leaves = tuple(_leaf(leaf) for leaf in value["leaves"])
    size = {"pages": value["pages"], "bytes": value["bytes"], "estimated_rows": value["rows"]}
    if value["kind"] == "p":
        size = {
            "pages": sum(leaf.pages for leaf in leaves),
            "bytes": sum(leaf.bytes for leaf in leaves),
            "estimated_rows": sum(max(leaf.estimated_rows, 0) for leaf in leaves)
            if all(leaf.estimated_rows >= 0 for leaf in leaves)
            else -1,
        }
    return PgTable(
        oid=value["oid"],
        schema=value["schema"],
        name=value["name"],
        kind=value["kind"],
        persistence=value["persistence"],
        replica_identity=value["replica_identity"],
        columns=columns,
        primary_key=tuple(value["primary_key"]),
        identity=_identity(value, tuple(generated)),
        published=value["published"],
        published_columns=None if listed is None else tuple(names[n] for n in sorted(listed)),
        streamed=tuple(
            column.name
            for column in columns
            if is_streamed(
                column.number,
                generated[column.name],
                listed=listed,
                generated_too=value["generated_too"],
            )
        ),
        row_filter=value["filter"],
        filter_columns=tuple(names[n] for n in sorted(value["filter_columns"])),
        leaves=leaves,
        ancestors=tuple(TableName(*name) for name in value["ancestors"]),
        **size,
    )


def _column(value: Sequence[Any], types: Mapping[int, PgType]) -> PgColumn:
    number, name, type_oid, typmod, dimensions, nullable, generated, has_missing, missing = value
    return PgColumn(
        name=name,
        number=number,
        type=types[type_oid],
        typmod=typmod,
        dimensions=dimensions,
        nullable=nullable,
        generated=generated != "",
        missing=missing,
        has_missing=has_missing,
    )


def _with_missing_of_leaves(column: PgColumn, leaves: Sequence[Mapping[str, Any]]) -> PgColumn:
    """Return a column of a root with the missing value on which all leaves agree.

    A root stores no rows, so only its leaves have the value of rows older than the column. If the
    leaves differ, the column has no known missing value.
    """
    values = [leaf["missing"].get(column.name) for leaf in leaves]
    if not values or values[0] is None or any(value != values[0] for value in values):
        return replace(column, missing=None, has_missing=False)
    return replace(column, missing=values[0], has_missing=True)


def is_streamed(
    number: int, generated: str, *, listed: Sequence[int] | None, generated_too: bool
) -> bool:
    """Return whether messages carry a column.

    A column list alone decides if there is one: before version 18 a list cannot name a generated
    column. A virtual column has no stored values to send.
    """
    if generated == "v":
        return False
    if listed is not None:
        return number in listed
    return generated == "" or generated_too


def _leaf(value: Mapping[str, Any]) -> PgLeaf:
    return PgLeaf(
        oid=value["oid"],
        schema=value["schema"],
        name=value["name"],
        kind=value["kind"],
        replica_identity=value["replica_identity"],
        identity=_identity(value, ()),
        selectable=value["selectable"],
        pages=value["pages"],
        estimated_rows=value["rows"],
        bytes=value["bytes"],
    )


def _identity(value: Mapping[str, Any], columns: tuple[str, ...]) -> tuple[str, ...]:
    match value["replica_identity"]:
        case "f":
            return columns
        case "d" if value["primary_key_immediate"]:
            return tuple(value["primary_key"])
        case "i":
            return tuple(value["identity_index"])
        case _:
            return ()


def _tables(version: int) -> str:
    since_15 = version >= 150000
    prattrs = "m.prattrs::pg_catalog.int2[]" if since_15 else "NULL::pg_catalog.int2[]"
    filter_text = "pg_catalog.pg_get_expr(m.prqual, m.prrelid)" if since_15 else "NULL::text"
    # The node tree of the filter contains the column numbers; the SQL text would have to be parsed.
    filter_columns = (
        "(SELECT json_agg(DISTINCT v[1]::int)"
        " FROM pg_catalog.regexp_matches(m.prqual::text, ':varattno (\\d+)', 'g') v)"
        if since_15
        else "NULL::json"
    )
    generated_too = "pub.pubgencols = 's'" if version >= 180000 else "false"
    return f"""
    WITH RECURSIVE {membership(version)},
    described AS (
      SELECT c.oid, r.published, n.nspname, c.relname, c.relkind,
        {_DESCRIPTION},
        json_build_object(
          'persistence', c.relpersistence,
          'published', r.published,
          'columns', coalesce((
            SELECT json_agg(json_build_array(a.attnum, a.attname, a.atttypid::int8, a.atttypmod,
                       a.attndims, NOT a.attnotnull, a.attgenerated, a.atthasmissing,
                       {MISSING}) ORDER BY a.attnum)
            FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped), '[]'),
          'list', to_json(m.attrs),
          'filter', m.filter,
          'filter_columns', coalesce(m.filter_columns, '[]'),
          'generated_too', coalesce((SELECT {generated_too} FROM pub), false)
        ) AS more
      FROM relation r
      JOIN pg_catalog.pg_class c ON c.oid = r.oid
      JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
      LEFT JOIN LATERAL (
        SELECT {prattrs} AS attrs, {filter_text} AS filter, {filter_columns} AS filter_columns
        FROM pub JOIN pg_catalog.pg_publication_rel m ON m.prpubid = pub.oid AND m.prrelid = c.oid
      ) m ON true
    )
    SELECT d.base::jsonb || d.more::jsonb || jsonb_build_object(
      'leaves', coalesce((
        SELECT jsonb_agg(l.leaf ORDER BY l.nspname, l.relname) FROM (
          SELECT n.nspname, c.relname, {_DESCRIPTION.replace("AS base", "AS leaf")}
          FROM tree t
          JOIN pg_catalog.pg_class c ON c.oid = t.oid AND c.relkind <> 'p'
          JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
          WHERE t.root = d.oid AND d.relkind = 'p' AND d.published
        ) l), '[]'),
      'ancestors', coalesce((
        WITH RECURSIVE up (oid, level) AS (
          SELECT i.inhparent, 1 FROM pg_catalog.pg_inherits i
          JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition
          WHERE i.inhrelid = d.oid
          UNION ALL
          SELECT i.inhparent, up.level + 1 FROM up
          JOIN pg_catalog.pg_inherits i ON i.inhrelid = up.oid
        )
        SELECT jsonb_agg(jsonb_build_array(n.nspname, c.relname) ORDER BY up.level)
        FROM up JOIN pg_catalog.pg_class c ON c.oid = up.oid
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace), '[]')
    )
    FROM described d ORDER BY d.nspname, d.relname
    """


MISSING = """CASE WHEN a.atthasmissing AND a.atttypid = 'pg_catalog.box'::regtype
  -- Boxes in an array stand between semicolons, so a comma of one is not quoted.
  THEN btrim(a.attmissingval::text, '{}')
  WHEN a.atthasmissing THEN (a.attmissingval::text::text[])[1] END"""
"""SQL for the value of column `a` in rows older than the column, as text.

`attmissingval` is an array with one value.
"""

_DESCRIPTION = f"""
  json_build_object(
    'oid', c.oid::int8, 'schema', n.nspname, 'name', c.relname, 'kind', c.relkind,
    'replica_identity', c.relreplident,
    'selectable', pg_catalog.has_schema_privilege(n.oid, 'USAGE')
                  AND pg_catalog.has_table_privilege(c.oid, 'SELECT'),
    'primary_key', coalesce((SELECT json_agg(a.attname ORDER BY k.position)
      FROM pg_catalog.pg_index i
      CROSS JOIN LATERAL unnest(i.indkey::pg_catalog.int2[]) WITH ORDINALITY k (number, position)
      JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number
      WHERE i.indrelid = c.oid AND i.indisprimary AND k.position <= i.indnkeyatts), '[]'),
    'primary_key_immediate', coalesce((SELECT i.indimmediate FROM pg_catalog.pg_index i
      WHERE i.indrelid = c.oid AND i.indisprimary), false),
    'identity_index', coalesce((SELECT json_agg(a.attname ORDER BY k.position)
      FROM pg_catalog.pg_index i
      CROSS JOIN LATERAL unnest(i.indkey::pg_catalog.int2[]) WITH ORDINALITY k (number, position)
      JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number
      WHERE i.indrelid = c.oid AND i.indisreplident AND k.position <= i.indnkeyatts), '[]'),
    'missing', coalesce((SELECT json_object_agg(a.attname, {MISSING})
      FROM pg_catalog.pg_attribute a
      WHERE a.attrelid = c.oid AND a.atthasmissing AND NOT a.attisdropped), '{{}}'),
    'pages', CASE WHEN c.relkind IN ('r', 'm', 't') THEN pg_catalog.pg_relation_size(c.oid)
      / pg_catalog.current_setting('block_size')::int8 ELSE 0 END,
    'rows', CASE WHEN c.reltuples > 0 OR c.relpages > 0 THEN c.reltuples::int8 ELSE -1 END,
    'bytes', CASE WHEN c.relkind IN ('r', 'm', 't') THEN pg_catalog.pg_table_size(c.oid) ELSE 0 END
  ) AS base"""
