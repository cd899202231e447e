"""Candidate tables of a database and obstacles to replication, for use before a source exists.

Nothing is changed, so a role with read access suffices.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from penstock.errors import Problem
from penstock.sources.postgres.catalog import PgTable, describe
from penstock.sources.postgres.checks import (
    OLDEST,
    check,
    may_create_publication,
    selected_tables,
)
from penstock.sources.postgres.config import PostgresConfig, TableSpec
from penstock.sources.postgres.connect import Connection
from penstock.sources.postgres.names import TableName
from penstock.sources.postgres.publication import Publication, find_publication
from penstock.sources.postgres.table_checks import ROOTS_SINCE, reading, sending, uncovered
from penstock.sources.postgres.tables import follow
from penstock.sources.source import CollectionOutline

__all__ = ["Candidate", "Described", "look", "outline_tables"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Table that could be tracked."""

    name: TableName
    keyed: bool
    """True if the table has a primary key that identifies its rows for readers."""

    problems: tuple[Problem, ...]
    """Reasons why the table cannot be tracked as it is."""

    columns: tuple[str, ...]
    """Columns that the collection would have."""

    omitted: Mapping[str, str]
    """Columns that the collection would not have, each with the reason."""


@dataclass(frozen=True, slots=True)
class Described:
    """Candidate tables of a database, and problems of its server."""

    database: str
    tables: tuple[Candidate, ...]
    problems: tuple[Problem, ...]
    """Missing prerequisites of the server or the role, for the tables that can be tracked."""


def look(connection: Connection, config: PostgresConfig) -> Described:
    """Return the tables that the publication of `config` could send, ignoring `config.tables`."""
    database, role = (str(each) for each in connection.query(_WHO)[0])
    config = replace(config, tables=None)
    if connection.server_version < OLDEST:
        return Described(database, (), tuple(check(connection, config)))
    publication = find_publication(connection, config.publication)
    oids = _oids(connection)
    tables = [
        (table, tuple(_in_the_way(table, config, publication, connection.server_version)))
        for table in describe(connection, config.publication, oids)
        if table.oid in oids
    ]
    good = [(TableSpec(table.table_name), table) for table, problems in tables if not problems]
    if good:
        config = replace(config, tables=tuple(spec for spec, _ in good))
    # If no table can be tracked, do not propose to create a publication.
    made = not good or may_create_publication(connection, config)
    lacking = [*check(connection, config, made=made), *reading(connection, role, good)]
    return Described(
        database,
        tuple(_candidate(config, table, problems) for table, problems in tables),
        tuple(dict.fromkeys(lacking)),
    )


def outline_tables(
    connection: Connection, config: PostgresConfig, source: str
) -> list[CollectionOutline]:
    """Return the collections that `source` would create from the tables of `config`."""
    outlines = []
    for spec, described in selected_tables(connection, config):
        table = follow(source, described, spec)
        omitted = _omitted(config, spec, described)
        outlines.append(
            CollectionOutline(table.collection, table.schema, table.key_columns, omitted)
        )
    return outlines


def _candidate(config: PostgresConfig, table: PgTable, problems: tuple[Problem, ...]) -> Candidate:
    omitted = _omitted(config, TableSpec(table.table_name), table)
    columns = tuple(column.name for column in table.columns if column.name not in omitted)
    return Candidate(table.table_name, _keyed(table), problems, columns, omitted)


def _omitted(config: PostgresConfig, spec: TableSpec, table: PgTable) -> dict[str, str]:
    """Return the columns that the collection of a table does not have, with the reasons."""
    reasons = {}
    for column in table.columns:
        if column.name in spec.exclude:
            reasons[column.name] = "it is excluded in the pipeline file"
        elif column.name in table.streamed:
            continue
        elif table.published_columns is not None:
            reasons[column.name] = (
                f'the column list of publication "{config.publication}" does not have it'
            )
        elif column.generated:
            reasons[column.name] = (
                f'it is a generated column, which publication "{config.publication}" does not send'
            )
    return reasons


def _oids(connection: Connection) -> set[int]:
    """Return the oids of user tables, without tables of extensions.

    Partitions are replaced by their root where the server version supports that.
    """
    kinds = (
        "NOT c.relispartition" if connection.server_version >= ROOTS_SINCE else "c.relkind = 'r'"
    )
    rows = connection.query(
        f"""
        SELECT c.oid FROM pg_catalog.pg_class c
        WHERE c.relkind IN ('r', 'p') AND c.relpersistence IN ('p', 'u') AND c.oid >= 16384
          AND {kinds} AND NOT EXISTS (
            SELECT 1 FROM pg_catalog.pg_depend d
            WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = c.oid
              AND d.deptype = 'e')
        """
    )
    return {int(oid or 0) for (oid,) in rows}


def _in_the_way(
    table: PgTable, config: PostgresConfig, publication: Publication | None, version: int
) -> Iterator[Problem]:
    spec = TableSpec(table.table_name)
    alone = replace(config, tables=(spec,))
    yield from uncovered(alone, publication, {spec.name: table}, version)
    yield from sending(spec, table, config)


def _keyed(table: PgTable) -> bool:
    followed = follow("", table, TableSpec(table.table_name))
    return bool(followed.key_columns) and not any(
        pa.types.is_floating(followed.schema.field(name).type) for name in followed.key_columns
    )


_WHO = "SELECT pg_catalog.current_database(), current_user"
