"""Fixtures for tests that run on every SQL connector, each with its own endpoint."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.connectors import built_in
from penstock.servers.postgres import Database, PostgresServer
from tests.connectors.connector_client import ConnectorClient, Sql

_numbers = itertools.count()


@pytest.fixture(scope="module")
def lent(postgres_server: PostgresServer) -> Iterator[Database]:
    """Yield a database for all tests of a module. Each test has its own schema."""
    database = postgres_server.create_database(f"lent{next(_numbers)}")
    yield database
    database.drop()


@pytest.fixture(params=["sqlite", "postgres"])
def sql(request: pytest.FixtureRequest, tmp_path: Path) -> Sql:
    if request.param == "sqlite":
        endpoint = {"path": str(tmp_path / "sink.db")}
    else:
        database: Database = request.getfixturevalue("lent")
        schema = f"sink{next(_numbers)}"
        database.sql(f"CREATE SCHEMA {schema}")
        endpoint = {"url": database.url(), "schema": schema}
    return Sql(ConnectorClient(built_in(request.param), endpoint))
