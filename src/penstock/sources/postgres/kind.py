"""The kind of Postgres sources."""

import random
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.clock import Clock
from penstock.data.collection_name import compose_name
from penstock.data.remap_form import POSTGRES
from penstock.sources.kind import SourceKind
from penstock.sources.postgres.names import TableName
from penstock.sources.source import Source

if TYPE_CHECKING:
    from penstock.sources.postgres.config import PostgresConfig

__all__ = ["POSTGRES_KIND"]

TASKS: Final = 2
"""Number of splits that are read at the same time without Spark."""


def _build(name: str, config: "PostgresConfig", location: str, clock: Clock) -> Source:
    # Imported here: it loads a compiler, which readers do not need.
    from penstock.sources.postgres.source import PostgresSource

    return PostgresSource(
        name, config, location=location, clock=clock, rng=random.Random(), tasks=TASKS
    )


def _describe(section: Mapping[str, Any]) -> str:
    tables = section.get("tables")
    if tables is None:
        return "all published tables"
    return ", ".join(table["name"] if isinstance(table, dict) else str(table) for table in tables)


def _collections(name: str, config: "PostgresConfig") -> Collection[str] | None:
    if config.tables is None:
        return None
    return [compose_name(name, table.name.schema, table.name.name) for table in config.tables]


def _table_collection(text: str) -> str:
    table = TableName.parse(text)
    return compose_name(table.schema, table.name)


POSTGRES_KIND: Final = SourceKind(
    name="postgres",
    summary="A Postgres database.",
    build=_build,
    remap_forms={"postgres": POSTGRES},
    describe=_describe,
    collections=_collections,
    table_collection=_table_collection,
)
