"""Prerequisites of each table: properties and privileges, checked before the first start."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from penstock.errors import Problem, similar
from penstock.sources.postgres.catalog import PgTable
from penstock.sources.postgres.config import PostgresConfig, TableSpec
from penstock.sources.postgres.connect import Connection
from penstock.sources.postgres.names import TableName, identifier, identifiers
from penstock.sources.postgres.publication import Publication

__all__ = ["missing", "reading", "sending", "uncovered"]

ROOTS_SINCE: Final = 130000
"""First server version that sends changes of partitioned tables under the root's name."""


def missing(connection: Connection, names: Sequence[TableName]) -> Iterator[Problem]:
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
    there: dict[str, list[str]] = {}
    for schema, table in rows:
        there.setdefault(str(table), []).append(str(TableName(str(schema), str(table))))
    for name in names:
        meant = [name.name] if name.name in there else similar(name.name, there)
        close = [full for table in meant for full in there[table]][:3]
        yield Problem(
            f"table {name} does not exist",
            hint=f"Did you mean {' or '.join(close)}?"
            if close
            else f"Create it, or leave it out of tables; \\dt {name.schema}.* of psql lists those "
            "of its schema.",
        )


def uncovered(
    config: PostgresConfig,
    publication: Publication | None,
    described: Mapping[TableName, PgTable],
    version: int,
) -> Iterator[Problem]:
    """Yield configured tables that the publication does not send, or not under their names.

    Without a publication, yield the tables that the server cannot send.
    """
    name = identifier(config.publication)
    sent = {each.table_name: each for each in described.values() if each.published}
    if config.tables is None and publication is not None and not sent:
        yield Problem(
            f'publication "{config.publication}" has no tables',
            hint=f"Run: ALTER PUBLICATION {name} ADD TABLE …; with the tables to follow.",
        )
    for table in [described[each.name] for each in config.tables or () if each.name in described]:
        root = next((each for each in table.ancestors if each in sent), None)
        if unfit := _UNFIT.get(table.kind) or _UNFIT.get(table.persistence):
            what, hint = unfit
            yield Problem(
                f"{table.table_name} is {what}, whose changes the server does not send",
                hint=hint.format(table=table.table_name),
            )
        elif table.oid < 16384:
            yield Problem(
                f"{table.table_name} is a system table, whose changes the server does not send",
                hint="Leave it out of tables.",
            )
        elif table.kind == "p" and version < ROOTS_SINCE:
            yield Problem(
                f"{table.table_name} is a partitioned table, and before version "
                f"{ROOTS_SINCE // 10000} a server sends partitions under their own names only",
                hint="Name its partitions under tables instead.",
            )
        elif publication is None or table.published:
            continue
        elif any(table.table_name in leaf.ancestors for leaf in sent.values()):
            yield Problem(
                f'publication "{config.publication}" sends the partitions of '
                f"{table.table_name} under their own names",
                hint=f"Run: ALTER PUBLICATION {name} SET (publish_via_partition_root = true); or "
                "name the partitions instead of it.",
            )
        elif root is not None:
            yield Problem(
                f'publication "{config.publication}" sends {table.table_name} under the name of '
                f"{root}, of which it is a partition",
                hint=f"Name {root} under tables instead.",
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


def sending(spec: TableSpec, table: PgTable, config: PostgresConfig) -> Iterator[Problem]:
    """Yield reasons why messages of a published table are incomplete."""
    yield from _columns(spec, table)
    yield from _identity(spec, table)
    yield from _leaves(table)
    yield from _narrowed(table, config)


def reading(
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
    found = {int(row[0] or 0): row[1:] for row in rows}
    role = identifier(user)
    schemas: set[str] = set()
    for spec, table in tables:
        if table.oid not in found:
            continue
        usage, select, hidden, readable = found[table.oid]
        if usage != "t" and table.schema not in schemas:
            schemas.add(table.schema)
            yield Problem(
                f'role "{user}" may not use schema "{table.schema}"',
                hint=f"Run: GRANT USAGE ON SCHEMA {identifier(table.schema)} TO {role};",
            )
        may = set(msgspec.json.decode(readable or "[]", type=list[str]))
        wanted = [column for column in table.streamed if column not in spec.exclude]
        # The WHERE clause of the initial snapshot contains the row filter.
        wanted += [column for column in table.filter_columns if column not in wanted]
        if select != "t" and not may.issuperset(wanted):
            columns = f" ({identifiers(wanted)})" if may or spec.exclude else ""
            yield Problem(
                f'role "{user}" may not read table {table.table_name}',
                hint=f"Run: GRANT SELECT{columns} ON {table.table_name} TO {role};",
            )
        if hidden == "t":
            yield Problem(
                f'row level security hides rows of table {table.table_name} from role "{user}"',
                detail="The stream sends all rows, and the first copy must hold all of them too.",
                hint=f"Run: ALTER ROLE {role} BYPASSRLS;",
            )


def _columns(spec: TableSpec, table: PgTable) -> Iterator[Problem]:
    there = [column.name for column in table.columns]
    for option, named in (("exclude", spec.exclude), ("text", spec.text)):
        for name in named:
            if name in there:
                continue
            close = similar(name, there)
            yield Problem(
                f'column "{name}" of table {table.table_name}, named under {option}, does not '
                "exist",
                hint=f'Did you mean "{close[0]}"?'
                if close
                else f"The table has {identifiers(there)}.",
            )
    if table.streamed and all(name in spec.exclude for name in table.streamed):
        yield Problem(
            f"all columns of table {table.table_name} are excluded",
            hint="Leave the table out of tables instead.",
        )


def _identity(spec: TableSpec, table: PgTable) -> Iterator[Problem]:
    name = table.table_name
    if table.replica_identity == "f":
        return
    if not table.identity:
        why = {
            "n": "Its replica identity is NOTHING.",
            "i": "The index of its replica identity is gone.",
        }.get(table.replica_identity, "It has no primary key.")
        if table.replica_identity == "d" and table.primary_key:
            why = "Its primary key is deferrable."
        add = "" if table.primary_key else ", or give it a primary key"
        yield Problem(
            f"table {name} has no replica identity, so updates and deletes do not say of which row",
            detail=f"{why} As long as it is published, the server refuses them.",
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
            detail="Without it we could not tell of which row an update or delete is.",
            hint=f"Leave it in, or run: ALTER TABLE {name} REPLICA IDENTITY FULL;",
        )


def _leaves(table: PgTable) -> Iterator[Problem]:
    """Yield partitions that are not replicated like the root.

    The content of a message depends on the partition; its Relation message depends on the root.
    """
    whole = table.replica_identity == "f"
    for leaf in table.leaves:
        if leaf.kind == "f":
            yield Problem(
                f"partition {leaf.table_name} of table {table.table_name} is a foreign table, "
                "whose changes the server does not send",
                hint=f"Run: ALTER TABLE {table.table_name} DETACH PARTITION {leaf.table_name}; "
                "or name the other partitions instead of the table.",
            )
        elif whole != (leaf.replica_identity == "f") or (
            not whole and set(leaf.identity) != set(table.identity)
        ):
            wanted = "FULL" if whole else "DEFAULT"
            if not whole and table.replica_identity != "d":
                wanted = "FULL"
            both = (
                ""
                if whole or wanted == "DEFAULT"
                else f" ALTER TABLE {table.table_name} REPLICA IDENTITY FULL;"
            )
            yield Problem(
                f"partition {leaf.table_name} has another replica identity than table "
                f"{table.table_name}",
                detail="Each partition has its own, and messages claim to follow the table's.",
                hint=f"Run: ALTER TABLE {leaf.table_name} REPLICA IDENTITY {wanted};{both}",
            )


def _narrowed(table: PgTable, config: PostgresConfig) -> Iterator[Problem]:
    """Yield row filters and column lists that make the server reject updates and deletes."""
    name, publication = table.table_name, identifier(config.publication)
    outside = [column for column in table.filter_columns if column not in table.identity]
    if outside and table.identity:
        yield Problem(
            f'the row filter of table {name} in publication "{config.publication}" looks at '
            f"{identifiers(outside)}, outside its replica identity",
            detail="The server refuses updates and deletes of the table.",
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
            detail="The server refuses updates and deletes of the table.",
            hint=f"Run: ALTER PUBLICATION {publication} DROP TABLE {name}; "
            f"ALTER PUBLICATION {publication} ADD TABLE {name} ({listed}){where};",
        )


_UNFIT: Final = {
    "v": ("a view", "Name the tables it is made of."),
    "m": ("a materialized view", "Name the tables it is made of."),
    "f": ("a foreign table", "Follow the table on the server where it is."),
    "S": ("a sequence", "Leave it out of tables."),
    "i": ("an index", "Name its table."),
    "I": ("an index", "Name its table."),
    "c": ("a composite type", "Leave it out of tables."),
    "t": ("a temporary table", "Leave it out of tables."),
    "u": ("an unlogged table", "Run: ALTER TABLE {table} SET LOGGED;"),
}
