"""Prerequisites of each table: properties and privileges."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from penstock.errors import Problem, similar
from penstock.pgclient import Connection
from penstock.sources.postgres.catalog import PgTable
from penstock.sources.postgres.config import PostgresConfig, TableSpec
from penstock.sources.postgres.names import TableName, identifier, identifiers
from penstock.sources.postgres.publication import Publication

__all__ = [
    "FIRST_USER_OID",
    "VIA_ROOT_SINCE",
    "missing_problems",
    "privilege_problems",
    "stream_problems",
    "unpublished_problems",
]

FIRST_USER_OID: Final = 16384
"""Lowest oid of a user table. Lower oids belong to system tables."""

VIA_ROOT_SINCE: Final = 13_00_00
"""First server version that sends changes of partitioned tables under the root's name."""


def missing_problems(connection: Connection, names: Sequence[TableName]) -> Iterator[Problem]:
    """Yield a problem for each table that does not exist, with similar names."""
    if not names:
        return
    rows = connection.query(
        """
        SELECT n.nspname, c.relname FROM pg_catalog.pg_class c
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE c.relkind IN ('r', 'p') AND c.oid >= 16384 LIMIT 10000
        """
    )
    existing: dict[str, list[str]] = {}
    for schema, table in rows:
        existing.setdefault(str(table), []).append(str(TableName(str(schema), str(table))))
    for name in names:
        candidates = [name.name] if name.name in existing else similar(name.name, existing)
        close = [full for table in candidates for full in existing[table]][:3]
        yield Problem(
            f"table {name} does not exist",
            hint=f"Did you mean {' or '.join(close)}?"
            if close
            else f"Create the table, or remove it from tables; \\dt {name.schema}.* of psql lists "
            "the tables of the schema.",
        )


def unpublished_problems(
    config: PostgresConfig,
    publication: Publication | None,
    described: Mapping[TableName, PgTable],
    version: int,
) -> Iterator[Problem]:
    """Yield configured tables that the publication does not send, or not under their names.

    Without a publication, yield the tables that the server cannot send.
    """
    name = identifier(config.publication)
    published = {table.table_name: table for table in described.values() if table.published}
    if config.tables is None and publication is not None and not published:
        yield Problem(
            f'publication "{config.publication}" has no tables',
            hint=f"Run: ALTER PUBLICATION {name} ADD TABLE …; with the tables to replicate.",
        )
    for table in [described[spec.name] for spec in config.tables or () if spec.name in described]:
        root = next((name for name in table.ancestors if name in published), None)
        if unsent := _UNSENT.get(table.kind) or _UNSENT.get(table.persistence):
            kind, hint = unsent
            yield Problem(
                f"{table.table_name} is {kind}, whose changes the server does not send",
                hint=hint.format(table=table.table_name),
            )
        elif table.oid < FIRST_USER_OID:
            yield Problem(
                f"{table.table_name} is a system table, whose changes the server does not send",
                hint="Remove it from tables.",
            )
        elif table.kind == "p" and version < VIA_ROOT_SINCE:
            yield Problem(
                f"{table.table_name} is a partitioned table, and before version "
                f"{VIA_ROOT_SINCE // 10_000} a server sends partitions under their own names only",
                hint="List its partitions under tables instead.",
            )
        elif publication is None or table.published:
            continue
        elif any(table.table_name in leaf.ancestors for leaf in published.values()):
            yield Problem(
                f'publication "{config.publication}" sends the partitions of '
                f"{table.table_name} under their own names",
                hint=f"Run: ALTER PUBLICATION {name} SET (publish_via_partition_root = true); or "
                "list the partitions under tables instead.",
            )
        elif root is not None:
            yield Problem(
                f'publication "{config.publication}" sends partition {table.table_name} under '
                f"the name of table {root}",
                hint=f"List {root} under tables instead.",
            )
        else:
            via = (
                f" ALTER PUBLICATION {name} SET (publish_via_partition_root = true);"
                if table.kind == "p" and not publication.via_root
                else ""
            )
            yield Problem(
                f'table {table.table_name} is not in publication "{config.publication}"',
                hint=f"Run: ALTER PUBLICATION {name} ADD TABLE {table.table_name};{via}",
            )


def stream_problems(spec: TableSpec, table: PgTable, config: PostgresConfig) -> Iterator[Problem]:
    """Yield reasons why messages of a published table are incomplete."""
    yield from _columns(spec, table)
    yield from _identity(spec, table)
    yield from _leaves(table)
    yield from _narrowed(table, config)


def privilege_problems(
    connection: Connection, user: str, tables: Sequence[tuple[TableSpec, PgTable]]
) -> Iterator[Problem]:
    """Yield privileges that the initial snapshot needs and `user` does not have."""
    oids = "{" + ",".join(str(table.oid) for _, table in tables) + "}"
    rows = connection.query(
        """
        SELECT c.oid, pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE'),
          pg_catalog.has_table_privilege(c.oid, 'SELECT'),
          pg_catalog.row_security_active(c.oid),
          (SELECT pg_catalog.json_agg(a.attname) FROM pg_catalog.pg_attribute a
           WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
             AND pg_catalog.has_column_privilege(c.oid, a.attnum, 'SELECT'))
        FROM pg_catalog.pg_class c WHERE c.oid = ANY ($1::oid[])
        """,
        [oids],
    )
    privileges = {int(row[0] or 0): row[1:] for row in rows}
    role = identifier(user)
    schemas: set[str] = set()
    for spec, table in tables:
        if table.oid not in privileges:
            continue
        usage, select, hidden, readable = privileges[table.oid]
        if usage != "t" and table.schema not in schemas:
            schemas.add(table.schema)
            yield Problem(
                f'role "{user}" may not use schema "{table.schema}"',
                hint=f"Run: GRANT USAGE ON SCHEMA {identifier(table.schema)} TO {role};",
            )
        readable_columns = set(msgspec.json.decode(readable or "[]", type=list[str]))
        needed = [column for column in table.streamed if column not in spec.exclude]
        # The WHERE clause of the initial snapshot contains the row filter.
        needed += [column for column in table.filter_columns if column not in needed]
        if select != "t" and not readable_columns.issuperset(needed):
            columns = f" ({identifiers(needed)})" if readable_columns or spec.exclude else ""
            yield Problem(
                f'role "{user}" may not read table {table.table_name}',
                hint=f"Run: GRANT SELECT{columns} ON {table.table_name} TO {role};",
            )
        if hidden == "t":
            yield Problem(
                f'row level security hides rows of table {table.table_name} from role "{user}"',
                detail="The stream sends all rows, so the initial snapshot must read all of them.",
                hint=f"Run: ALTER ROLE {role} BYPASSRLS;",
            )


def _columns(spec: TableSpec, table: PgTable) -> Iterator[Problem]:
    existing = [column.name for column in table.columns]
    for option, names in (("exclude", spec.exclude), ("text", spec.text)):
        for name in names:
            if name in existing:
                continue
            close = similar(name, existing)
            yield Problem(
                f'column "{name}" of table {table.table_name}, named under {option}, does not '
                "exist",
                hint=f'Did you mean "{close[0]}"?'
                if close
                else f"The columns of the table are {identifiers(existing)}.",
            )
    if table.streamed and all(name in spec.exclude for name in table.streamed):
        yield Problem(
            f"all columns of table {table.table_name} are excluded",
            hint="Remove the table from tables instead.",
        )


def _identity(spec: TableSpec, table: PgTable) -> Iterator[Problem]:
    name = table.table_name
    if table.replica_identity == "f":
        return
    if not table.identity:
        reason = {
            "n": "The replica identity is NOTHING.",
            "i": "The index of the replica identity does not exist.",
        }.get(table.replica_identity, "The table has no primary key.")
        if table.replica_identity == "d" and table.primary_key:
            reason = "The primary key is deferrable."
        add = "" if table.primary_key else ", or give it a primary key"
        yield Problem(
            f"table {name} has no replica identity, so updates and deletes do not identify a row",
            detail=f"{reason} While the table is published, the server rejects them.",
            hint=f"Run: ALTER TABLE {name} REPLICA IDENTITY FULL;"
            if table.replica_identity == "d" or not table.primary_key
            else f"Run: ALTER TABLE {name} REPLICA IDENTITY DEFAULT; or FULL in place of DEFAULT"
            f"{add}.",
        )
        return
    if excluded := [column for column in table.identity if column in spec.exclude]:
        yield Problem(
            f"column {identifiers(excluded)} of table {name} is excluded and is part of its "
            "replica identity",
            detail="Without the column, an update or delete does not identify a row.",
            hint=f"Include the column, or run: ALTER TABLE {name} REPLICA IDENTITY FULL;",
        )


def _leaves(table: PgTable) -> Iterator[Problem]:
    """Yield partitions that are not replicated like the root.

    The content of a message depends on the partition; its Relation message depends on the root.
    """
    is_full = table.replica_identity == "f"
    for leaf in table.leaves:
        if leaf.kind == "f":
            yield Problem(
                f"partition {leaf.table_name} of table {table.table_name} is a foreign table, "
                "whose changes the server does not send",
                hint=f"Run: ALTER TABLE {table.table_name} DETACH PARTITION {leaf.table_name}; "
                "or list the other partitions under tables instead.",
            )
        elif is_full != (leaf.replica_identity == "f") or (
            not is_full and set(leaf.identity) != set(table.identity)
        ):
            identity = "DEFAULT" if table.replica_identity == "d" else "FULL"
            both = (
                ""
                if is_full or identity == "DEFAULT"
                else f" ALTER TABLE {table.table_name} REPLICA IDENTITY FULL;"
            )
            yield Problem(
                f"partition {leaf.table_name} and table {table.table_name} have different replica "
                "identities",
                detail="The stream describes changes of a partition by the replica identity of the "
                "table.",
                hint=f"Run: ALTER TABLE {leaf.table_name} REPLICA IDENTITY {identity};{both}",
            )


def _narrowed(table: PgTable, config: PostgresConfig) -> Iterator[Problem]:
    """Yield row filters and column lists that make the server reject updates and deletes."""
    name, publication = table.table_name, identifier(config.publication)
    outside = [column for column in table.filter_columns if column not in table.identity]
    if outside and table.identity:
        yield Problem(
            f'the row filter of table {name} in publication "{config.publication}" uses '
            f"columns {identifiers(outside)}, which are not in its replica identity",
            detail="The server rejects updates and deletes of the table.",
            hint=f"Run: ALTER TABLE {name} REPLICA IDENTITY FULL;",
        )
    if table.published_columns is None:
        return
    needed = (
        [column.name for column in table.columns if not column.generated]
        if table.replica_identity == "f"
        else list(table.identity)
    )
    unsent = [column for column in needed if column not in table.published_columns]
    if unsent:
        listed = identifiers([*table.published_columns, *unsent])
        where = f" WHERE ({table.row_filter})" if table.row_filter else ""
        yield Problem(
            f'the column list of table {name} in publication "{config.publication}" leaves out '
            f"{identifiers(unsent)} of its replica identity",
            detail="The server rejects updates and deletes of the table.",
            hint=f"Run: ALTER PUBLICATION {publication} DROP TABLE {name}; "
            f"ALTER PUBLICATION {publication} ADD TABLE {name} ({listed}){where};",
        )


_UNSENT: Final = {
    "v": ("a view", "List the tables that it is defined on."),
    "m": ("a materialized view", "List the tables that it is defined on."),
    "f": ("a foreign table", "Replicate the table from its own server."),
    "S": ("a sequence", "Remove it from tables."),
    "i": ("an index", "List its table."),
    "I": ("an index", "List its table."),
    "c": ("a composite type", "Remove it from tables."),
    "t": ("a temporary table", "Remove it from tables."),
    "u": ("an unlogged table", "Run: ALTER TABLE {table} SET LOGGED;"),
}
