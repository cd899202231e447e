"""Creation of the publication, and problems of an existing one."""

from collections.abc import Iterator, Mapping
from typing import Final

from penstock.errors import Problem, SourceError
from penstock.pgclient import Connection
from penstock.sources.postgres.catalog import PgTable, describe, find_oids
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.names import TableName, identifier
from penstock.sources.postgres.preflight.tables import (
    VIA_ROOT_SINCE,
    stream_problems,
    unpublished_problems,
)
from penstock.sources.postgres.publication import (
    OPERATIONS,
    Creator,
    Publication,
    comment_statement,
    find_publication,
    publishable_oids,
)

__all__ = [
    "create_publication",
    "describe_tables",
    "may_create_publication",
    "publication_problems",
    "publication_statement",
]

ALREADY_EXISTS: Final = frozenset({"42710", "23505"})
"""SQLSTATE codes if another session created the publication before, or at the same time."""


def create_publication(connection: Connection, config: PostgresConfig, *, creator: Creator) -> bool:
    """Create the publication if it is missing and the role may; return whether it was created.

    Its comment names the source it was created for, so it is dropped together with that source.
    """
    if not may_create_publication(connection, config):
        return False
    comment = comment_statement(config.publication, creator)
    try:
        connection.execute(f"{publication_statement(connection, config)} {comment}")
    except SourceError as error:
        # Another session created the publication. The checks decide whether it is suitable.
        if error.sqlstate in ALREADY_EXISTS:
            return False
        raise
    return True


def may_create_publication(connection: Connection, config: PostgresConfig) -> bool:
    """Return whether the publication is missing, the role may create it, and it would suffice."""
    if find_publication(connection, config.publication) is not None:
        return False
    names = [spec.name for spec in config.tables or ()]
    oids = find_oids(connection, names)
    # FOR ALL TABLES requires a superuser. FOR TABLE requires CREATE on the database and the
    # ownership of each table.
    allowed = connection.query(
        """
        SELECT r.rolsuper OR (
          $1::bool AND pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE')
          AND NOT EXISTS (
            SELECT 1 FROM pg_catalog.pg_class c WHERE c.oid = ANY ($2::oid[])
              AND NOT pg_catalog.pg_has_role(c.relowner, 'USAGE')))
        FROM pg_catalog.pg_roles r WHERE r.rolname = current_user
        """,
        [bool(names), "{" + ",".join(map(str, oids.values())) + "}"],
    )[0][0]
    if allowed != "t" or len(oids) < len(names):
        return False
    described = describe_tables(connection, config, oids, None)
    if any(unpublished_problems(config, None, described, connection.server_version)):
        return False
    # SUBTLE: a published table without a replica identity rejects updates by its own users.
    return not any(
        problem
        for name, table in described.items()
        if (spec := config.spec_of(name)) is not None
        for problem in stream_problems(spec, table, config)
    )


def publication_statement(connection: Connection, config: PostgresConfig) -> str:
    """Return the statement that creates the configured publication."""
    names = [spec.name for spec in config.tables or ()]
    oids = find_oids(connection, names)
    tables = describe(connection, config.publication, oids.values())
    partitioned = any(table.kind == "p" for table in tables)
    return _create_statement(config, partitioned, connection.server_version)


def publication_problems(
    config: PostgresConfig,
    publication: Publication | None,
    version: int,
    described: Mapping[TableName, PgTable],
) -> Iterator[Problem]:
    """Yield a missing publication, or operations that it does not send."""
    name = config.publication
    if publication is None:
        partitioned = any(table.kind == "p" for table in described.values())
        role = "a superuser" if config.tables is None else "the owner of the tables"
        yield Problem(
            f'publication "{name}" does not exist',
            hint=f"Run, as {role}: {_create_statement(config, partitioned, version)}",
        )
        return
    omitted = [operation for operation in OPERATIONS if operation not in publication.operations]
    if omitted:
        operations = ", ".join(OPERATIONS)
        yield Problem(
            f'publication "{name}" does not send every {" or ".join(omitted)}',
            hint=f"Run: ALTER PUBLICATION {identifier(name)} SET (publish = '{operations}');",
        )


def describe_tables(
    connection: Connection,
    config: PostgresConfig,
    oids: Mapping[TableName, int],
    publication: Publication | None,
) -> dict[TableName, PgTable]:
    """Return the configured tables; without tables and publication, all publishable tables."""
    table_oids = [*oids.values()]
    if config.tables is None and publication is None:
        table_oids = publishable_oids(connection)
    tables = describe(connection, config.publication, table_oids)
    return {table.table_name: table for table in tables}


def _create_statement(config: PostgresConfig, partitioned: bool, version: int) -> str:
    name = identifier(config.publication)
    if config.tables is None:
        tables = "FOR ALL TABLES"
    else:
        tables = f"FOR TABLE {', '.join(str(spec.name) for spec in config.tables)}"
    via_root = version >= VIA_ROOT_SINCE and (partitioned or config.tables is None)
    return f"CREATE PUBLICATION {name} {tables}" + (
        " WITH (publish_via_partition_root = true);" if via_root else ";"
    )
