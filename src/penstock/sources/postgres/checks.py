"""Prerequisites of a Postgres source, each with the statement that establishes it.

A check reports all problems together, so they can be fixed in one go. It changes nothing, so a role
that may only read and replicate can run it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.errors import Problem, SourceError
from penstock.sources.postgres.catalog import PgTable, describe, find_oids
from penstock.sources.postgres.config import PostgresConfig, TableSpec
from penstock.sources.postgres.connect import Connection
from penstock.sources.postgres.errors import NotReady
from penstock.sources.postgres.names import TableName, identifier
from penstock.sources.postgres.publication import (
    OPERATIONS,
    Maker,
    Publication,
    comment_of,
    find_publication,
    publishable_oids,
)
from penstock.sources.postgres.slots import inspect_slot
from penstock.sources.postgres.table_checks import missing, reading, sending, uncovered

__all__ = [
    "Problem",
    "check",
    "create_publication",
    "may_create_publication",
    "publication_statement",
    "require",
    "selected_tables",
]

OLDEST: Final = 120000
THERE_ALREADY: Final = frozenset({"42710", "23505"})
"""SQLSTATE codes if another session created the publication before, or at the same time."""

FIRST_OF_USERS: Final = 16384
"""Lowest oid of a user table. Lower oids belong to system tables."""

SENDERS: Final = 2
"""WAL senders needed: one for the stream and one for the connection that creates a slot."""


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
    if version < OLDEST:
        return [
            Problem(
                f"the server is of version {version // 10000}",
                hint=f"Upgrade it to version {OLDEST // 10000} or later.",
            )
        ]
    server = _Server.ask(connection, slot)
    publication = find_publication(connection, config.publication)
    names = [spec.name for spec in config.tables or ()]
    oids = find_oids(connection, names)
    described = _described(connection, config, oids, publication)
    tables = _selected(config, publication, described)
    return [
        *_server(server),
        *(() if made else _publication(config, publication, server.version, described)),
        *missing(connection, [name for name in names if name not in oids]),
        *uncovered(config, None if made else publication, described, version),
        *(problem for spec, table in tables for problem in sending(spec, table, config)),
        *reading(connection, server.role, tables),
    ]


def selected_tables(
    connection: Connection, config: PostgresConfig
) -> list[tuple[TableSpec, PgTable]]:
    """Return the tables that a source with this config would replicate."""
    publication = find_publication(connection, config.publication)
    oids = find_oids(connection, [spec.name for spec in config.tables or ()])
    described = _described(connection, config, oids, publication)
    return _selected(config, publication, described)


def _selected(
    config: PostgresConfig,
    publication: Publication | None,
    described: Mapping[TableName, PgTable],
) -> list[tuple[TableSpec, PgTable]]:
    return [
        (spec, table)
        for name, table in described.items()
        if (table.published or publication is None or _can_join(table, described))
        and (spec := config.spec_of(name)) is not None
    ]


def _can_join(table: PgTable, described: Mapping[TableName, PgTable]) -> bool:
    """Return whether an unpublished table can be added to the publication.

    It must be a permanent user table, and neither ancestor nor partition of a published table.
    """
    sent = [each for each in described.values() if each.published]
    return (
        table.kind in ("r", "p")
        and table.oid >= FIRST_OF_USERS
        and table.persistence == "p"
        and not any(
            each.table_name in table.ancestors or table.table_name in each.ancestors
            for each in sent
        )
    )


def require(problems: Sequence[Problem], *, where: str) -> None:
    """Raise an error if there are problems.

    Raises:
        NotReady: there is at least one problem; the error lists all of them.
    """
    if problems:
        raise NotReady(where=where, problems=problems)


def publication_statement(connection: Connection, config: PostgresConfig) -> str:
    """Return the statement that creates the configured publication."""
    names = [spec.name for spec in config.tables or ()]
    oids = find_oids(connection, names)
    tables = describe(connection, config.publication, oids.values())
    return _creation(config, any(table.kind == "p" for table in tables), connection.server_version)


def create_publication(connection: Connection, config: PostgresConfig, *, made_for: Maker) -> bool:
    """Create the publication if it is missing and the role may; return whether it was created.

    Its comment names the source it was created for, so it is dropped together with that source.
    """
    if not may_create_publication(connection, config):
        return False
    comment = comment_of(config.publication, made_for)
    try:
        connection.execute(f"{publication_statement(connection, config)} {comment}")
    except SourceError as error:
        # Another session created the publication. The checks decide whether it is suitable.
        if error.sqlstate in THERE_ALREADY:
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
    described = _described(connection, config, oids, None)
    if any(uncovered(config, None, described, connection.server_version)):
        return False
    # SUBTLE: a published table without a replica identity rejects updates by its own users.
    return not any(
        problem
        for name, table in described.items()
        if (spec := config.spec_of(name)) is not None
        for problem in sending(spec, table, config)
    )


def _described(
    connection: Connection,
    config: PostgresConfig,
    oids: Mapping[TableName, int],
    publication: Publication | None,
) -> dict[TableName, PgTable]:
    """Return the configured tables; without tables and publication, all publishable tables."""
    wanted = [*oids.values()]
    if config.tables is None and publication is None:
        wanted = publishable_oids(connection)
    tables = describe(connection, config.publication, wanted)
    return {table.table_name: table for table in tables}


@dataclass(frozen=True, slots=True)
class _Server:
    """Settings of a server, and privileges of the connected role."""

    version: int
    standby: bool
    role: str
    superuser: bool
    may_replicate: bool
    wal_level: str
    max_slots: int
    slots: int
    idle_slots: tuple[str, ...]
    slots_needed: int
    max_senders: int
    senders: int
    service: str
    """Managed service that decides how to change settings: `rds`, `cloudsql`, `azure` or empty."""

    @classmethod
    def ask(cls, connection: Connection, slot: str | None) -> "_Server":
        row = connection.query(
            """
            SELECT pg_catalog.pg_is_in_recovery(), r.rolname, r.rolsuper,
              r.rolreplication OR coalesce((
                SELECT pg_catalog.pg_has_role(s.oid, 'USAGE') FROM pg_catalog.pg_roles s
                WHERE s.rolname = 'rds_replication'), false),
              pg_catalog.current_setting('wal_level'),
              pg_catalog.current_setting('max_replication_slots'),
              (SELECT count(*) FROM pg_catalog.pg_replication_slots),
              pg_catalog.current_setting('max_wal_senders'),
              (SELECT count(*) FROM pg_catalog.pg_stat_get_wal_senders()),
              (SELECT min(s.rolname) FROM pg_catalog.pg_roles s WHERE s.rolname IN
                ('rds_superuser', 'cloudsqlsuperuser', 'azure_pg_admin'))
            FROM pg_catalog.pg_roles r WHERE r.rolname = current_user
            """
        )[0]
        standby, role, superuser, replicates, wal_level, *rest = (text or "" for text in row)
        max_slots, slots, max_senders, senders, managed = rest
        idle = connection.query(
            "SELECT slot_name FROM pg_catalog.pg_replication_slots WHERE NOT active ORDER BY 1"
        )
        ours = None if slot is None else inspect_slot(connection, slot)
        return cls(
            version=connection.server_version,
            standby=standby == "t",
            role=role,
            superuser=superuser == "t",
            may_replicate=superuser == "t" or replicates == "t",
            wal_level=wal_level,
            max_slots=int(max_slots),
            slots=int(slots),
            idle_slots=tuple(str(row[0]) for row in idle),
            # One permanent slot, unless it exists already, and one temporary slot for resync.
            slots_needed=2 if ours is None else 1,
            max_senders=int(max_senders),
            # A process that holds our slot is an earlier stream of this source, and will be
            # terminated.
            senders=int(senders) - (ours is not None and ours.active_pid is not None),
            service={
                "rds_superuser": "rds",
                "cloudsqlsuperuser": "cloudsql",
                "azure_pg_admin": "azure",
            }.get(managed, ""),
        )


def _server(server: _Server) -> Iterator[Problem]:
    if server.standby:
        yield Problem(
            "the server is a standby",
            detail="It applies the log of another server and has none of its own to follow.",
            hint="Connect to the primary.",
        )
    if server.wal_level != "logical":
        yield Problem(
            f"wal_level is {server.wal_level}, and must be logical", hint=_wal_level_hint(server)
        )
    free = server.max_slots - server.slots
    if free < server.slots_needed:
        idle = f" Nobody reads from {', '.join(server.idle_slots)}." if server.idle_slots else ""
        wanted = server.slots + server.slots_needed
        yield Problem(
            f"of {server.max_slots} replication slots {free} are free, and {server.slots_needed} "
            "are needed",
            detail=f"One is for the stream and one, for a while, for comparing tables.{idle}",
            hint=_setting(server, "max_replication_slots", wanted),
        )
    if server.max_senders - server.senders < SENDERS:
        yield Problem(
            f"of {server.max_senders} WAL senders {max(0, server.max_senders - server.senders)} "
            f"are free, and {SENDERS} are needed",
            hint=_setting(server, "max_wal_senders", server.senders + SENDERS),
        )
    if not server.may_replicate:
        role = identifier(server.role)
        statement = (
            f"GRANT rds_replication TO {role};"
            if server.service == "rds"
            else f"ALTER ROLE {role} REPLICATION;"
        )
        yield Problem(f'role "{server.role}" may not replicate', hint=f"Run: {statement}")


def _wal_level_hint(server: _Server) -> str:
    match server.service:
        case "rds":
            return (
                "Set rds.logical_replication = 1 in the parameter group of the instance and "
                "reboot it."
            )
        case "cloudsql":
            return "Set the flag cloudsql.logical_decoding = on of the instance, which restarts it."
        case "azure":
            return "Set the server parameter wal_level = logical and restart the server."
        case _:
            return "Run: ALTER SYSTEM SET wal_level = 'logical'; and restart the server."


def _setting(server: _Server, name: str, value: int) -> str:
    if server.service:
        return f"Set {name} = {value} or more in the settings of the service, and restart it."
    return f"Run: ALTER SYSTEM SET {name} = {value}; and restart the server."


def _publication(
    config: PostgresConfig,
    publication: Publication | None,
    version: int,
    described: Mapping[TableName, PgTable],
) -> Iterator[Problem]:
    name = config.publication
    if publication is None:
        partitioned = any(table.kind == "p" for table in described.values())
        who = "a superuser" if config.tables is None else "the owner of the tables"
        yield Problem(
            f'publication "{name}" does not exist',
            hint=f"Run, as {who}: {_creation(config, partitioned, version)}",
        )
        return
    lacking = [each for each in OPERATIONS if each not in publication.operations]
    if lacking:
        every = ", ".join(OPERATIONS)
        yield Problem(
            f'publication "{name}" does not send every {" or ".join(lacking)}',
            hint=f"Run: ALTER PUBLICATION {identifier(name)} SET (publish = '{every}');",
        )


def _creation(config: PostgresConfig, partitioned: bool, version: int) -> str:
    name = identifier(config.publication)
    if config.tables is None:
        what = "FOR ALL TABLES"
    else:
        what = f"FOR TABLE {', '.join(str(spec.name) for spec in config.tables)}"
    via_root = version >= 130000 and (partitioned or config.tables is None)
    return f"CREATE PUBLICATION {name} {what}" + (
        " WITH (publish_via_partition_root = true);" if via_root else ";"
    )
