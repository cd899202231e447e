"""Candidate tables of a database and their problems, for use before a source exists.

Nothing is changed, so a role with read access suffices.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from penstock.errors import Problem
from penstock.pgclient import Connection
from penstock.sources.postgres.catalog import PgTable, describe
from penstock.sources.postgres.config import PostgresConfig, TableSpec
from penstock.sources.postgres.names import TableName
from penstock.sources.postgres.preflight import (
    OLDEST_VERSION,
    VIA_ROOT_SINCE,
    check,
    may_create_publication,
    privilege_problems,
    selected_tables,
    stream_problems,
    unpublished_problems,
)
from penstock.sources.postgres.publication import Publication, find_publication
from penstock.sources.postgres.table_schema import build_table
from penstock.sources.source import CollectionOutline

__all__ = ["Candidate", "Discovery", "discover", "outline_tables"]


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
class Discovery:
    """Candidate tables of a database, and problems of its server."""

    database: str
    tables: tuple[Candidate, ...]
    problems: tuple[Problem, ...]
    """Missing prerequisites of the server or the role, for the tables that can be tracked."""


def discover(connection: Connection, config: PostgresConfig) -> Discovery:
    """Return the tables that the publication of `config` could send, ignoring `config.tables`."""
    database, role = (str(value) for value in connection.query(_DATABASE_AND_ROLE)[0])
    config = replace(config, tables=None)
    if connection.server_version < OLDEST_VERSION:
        return Discovery(database, (), tuple(check(connection, config)))
    publication = find_publication(connection, config.publication)
    oids = _user_table_oids(connection)
    tables = [
        (table, tuple(_table_problems(table, config, publication, connection.server_version)))
        for table in describe(connection, config.publication, oids)
        if table.oid in oids
    ]
    trackable = [(TableSpec(table.table_name), table) for table, problems in tables if not problems]
    if trackable:
        config = replace(config, tables=tuple(spec for spec, _ in trackable))
    # If no table can be tracked, do not propose to create a publication.
    made = not trackable or may_create_publication(connection, config)
    problems = [
        *check(connection, config, made=made),
        *privilege_problems(connection, role, trackable),
    ]
    return Discovery(
        database,
        tuple(_candidate(config, *table_and_problems) for table_and_problems in tables),
        tuple(dict.fromkeys(problems)),
    )


def outline_tables(
    connection: Connection, config: PostgresConfig, source: str
) -> list[CollectionOutline]:
    """Return the collections that `source` would create from the tables of `config`."""
    outlines = []
    for spec, described in selected_tables(connection, config):
        table = build_table(source, described, spec)
        omitted = _omitted(config, spec, described)
        outlines.append(
            CollectionOutline(table.collection, table.schema, table.key_columns, omitted)
        )
    return outlines


def _candidate(config: PostgresConfig, table: PgTable, problems: tuple[Problem, ...]) -> Candidate:
    omitted = _omitted(config, TableSpec(table.table_name), table)
    columns = tuple(column.name for column in table.columns if column.name not in omitted)
    return Candidate(table.table_name, _has_key(table), problems, columns, omitted)


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


def _user_table_oids(connection: Connection) -> set[int]:
    """Return the oids of user tables, without tables of extensions.

    Partitions are replaced by their root where the server version supports that.
    """
    kinds = (
        "NOT c.relispartition" if connection.server_version >= VIA_ROOT_SINCE else "c.relkind = 'r'"
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


def _table_problems(
    table: PgTable, config: PostgresConfig, publication: Publication | None, version: int
) -> Iterator[Problem]:
    spec = TableSpec(table.table_name)
    alone = replace(config, tables=(spec,))
    yield from unpublished_problems(alone, publication, {spec.name: table}, version)
    yield from stream_problems(spec, table, config)


def _has_key(table: PgTable) -> bool:
    tracked = build_table("", table, TableSpec(table.table_name))
    return bool(tracked.key_columns) and not any(
        pa.types.is_floating(tracked.schema.field(name).type) for name in tracked.key_columns
    )


_DATABASE_AND_ROLE = "SELECT pg_catalog.current_database(), current_user"
