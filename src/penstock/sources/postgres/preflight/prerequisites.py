"""Check of all prerequisites of a source.

A check reports all problems together, so they can be fixed in one go. It changes nothing, so a role
that may only read and replicate can run it.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from penstock.errors import Problem
from penstock.pgclient import Connection
from penstock.sources.postgres.catalog import PgTable, find_oids
from penstock.sources.postgres.config import PostgresConfig, TableSpec
from penstock.sources.postgres.errors import NotReady
from penstock.sources.postgres.names import TableName
from penstock.sources.postgres.preflight.publication_setup import (
    describe_tables,
    publication_problems,
)
from penstock.sources.postgres.preflight.server_settings import ServerSettings
from penstock.sources.postgres.preflight.tables import (
    FIRST_USER_OID,
    missing_problems,
    privilege_problems,
    stream_problems,
    unpublished_problems,
)
from penstock.sources.postgres.publication import Publication, find_publication

__all__ = ["OLDEST_VERSION", "check", "require", "selected_tables"]

OLDEST_VERSION: Final = 12_00_00


def check(
    connection: Connection,
    config: PostgresConfig,
    *,
    slot: str | None = None,
    made: bool = False,
) -> list[Problem]:
    """Return all problems that prevent replication, over a plain connection as the source's role.

    `slot` is the existing slot of the source, if it has one. `made` is true if Penstock will create
    the publication, or created it and may alter it.
    """
    version = connection.server_version
    if version < OLDEST_VERSION:
        return [
            Problem(
                f"the server has version {version // 10_000}",
                hint=f"Upgrade the server to version {OLDEST_VERSION // 10_000} or later.",
            )
        ]
    settings = ServerSettings.read(connection, slot)
    publication = find_publication(connection, config.publication)
    names = [spec.name for spec in config.tables or ()]
    oids = find_oids(connection, names)
    described = describe_tables(connection, config, oids, publication)
    tables = _select(config, publication, described)
    return [
        *settings.problems(),
        *(() if made else publication_problems(config, publication, version, described)),
        *missing_problems(connection, [name for name in names if name not in oids]),
        *unpublished_problems(config, None if made else publication, described, version),
        *(problem for spec, table in tables for problem in stream_problems(spec, table, config)),
        *privilege_problems(connection, settings.role, tables),
    ]


def require(problems: Sequence[Problem], *, where: str) -> None:
    """Raise an error if there are problems.

    Raises:
        NotReady: there is at least one problem; the error lists all of them.
    """
    if problems:
        raise NotReady(where=where, problems=problems)


def selected_tables(
    connection: Connection, config: PostgresConfig
) -> list[tuple[TableSpec, PgTable]]:
    """Return the tables that a source with this config would replicate."""
    publication = find_publication(connection, config.publication)
    oids = find_oids(connection, [spec.name for spec in config.tables or ()])
    described = describe_tables(connection, config, oids, publication)
    return _select(config, publication, described)


def _select(
    config: PostgresConfig,
    publication: Publication | None,
    described: Mapping[TableName, PgTable],
) -> list[tuple[TableSpec, PgTable]]:
    return [
        (spec, table)
        for name, table in described.items()
        if (table.published or publication is None or _can_be_published(table, described))
        and (spec := config.spec_of(name)) is not None
    ]


def _can_be_published(table: PgTable, described: Mapping[TableName, PgTable]) -> bool:
    """Return whether an unpublished table can be added to the publication.

    It must be a permanent user table, and neither ancestor nor partition of a published table.
    """
    published_tables = [other for other in described.values() if other.published]
    return (
        table.kind in ("r", "p")
        and table.oid >= FIRST_USER_OID
        and table.persistence == "p"
        and not any(
            other.table_name in table.ancestors or table.table_name in other.ancestors
            for other in published_tables
        )
    )
