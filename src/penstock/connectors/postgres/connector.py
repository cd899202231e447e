"""The Postgres connector: tables in schemas, with the fence beside them.

Before an Open raises the fence it ends the sessions of older streams (`older_sessions.py`),
rather than wait for what they hold.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Self

from psycopg import errors
from pydantic import BaseModel, ConfigDict, SecretStr, model_validator
from pydantic import Field as Setting

from penstock import documentation_url
from penstock.connectors.postgres.dialect import PostgresDialect, annotated, shortened
from penstock.connectors.postgres.identity import EndpointIdentity
from penstock.connectors.postgres.older_sessions import SessionNames, end_older, in_the_way
from penstock.connectors.postgres.session import PostgresSession, Where
from penstock.connectors.postgres.transactor import PostgresTransactor
from penstock.errors import PenstockError
from penstock.sdk.bindings import Field
from penstock.sdk.connector import OpenRequest
from penstock.sdk.sql import fence
from penstock.sdk.sql.applied_spec import check_applied
from penstock.sdk.sql.connector import SqlConnector, SqlResource
from penstock.sdk.sql.session import Session

__all__ = ["PostgresConnector", "PostgresEndpoint", "PostgresResource"]

_Name = Annotated[str, Setting(min_length=1)]


class PostgresEndpoint(BaseModel):
    """Which database, and who we are there."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    url: SecretStr | None = Setting(
        default=None, description="where to connect: postgresql://user:password@host:5432/database"
    )
    host: str | None = Setting(default=None, description="instead of a url: the server")
    port: int | None = Setting(default=None, ge=1, le=65535, description="its port")
    user: str | None = Setting(default=None, description="the role to connect as")
    password: SecretStr | None = Setting(default=None, description="its password")
    database: str | None = Setting(default=None, description="the database")
    sslmode: str | None = Setting(default=None, description="libpq's, such as verify-full")
    sslrootcert: str | None = Setting(default=None, description="a file: who must have signed")
    sslcert: str | None = Setting(default=None, description="a file: our own certificate")
    sslkey: str | None = Setting(default=None, description="a file: its key")
    in_schema: _Name = Setting(
        default="public",
        alias="schema",
        description="where tables go unless they say otherwise, and checkpoints",
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        others = self.model_fields_set - {"url", "in_schema", "schema"}
        if (self.url is None) == (self.host is None) or (self.url is not None and others):
            raise ValueError("it needs either a url, or a host with user and database")
        return self

    def where(self) -> Where:
        """How to connect.

        Raises:
            Refused: libpq cannot read it.
        """
        if self.url is not None:
            return Where.of(self.url.get_secret_value(), {})
        given = {
            "host": self.host,
            "port": self.port,
            "user": self.user,
            "password": self.password and self.password.get_secret_value(),
            "dbname": self.database,
            "sslmode": self.sslmode,
            "sslrootcert": self.sslrootcert,
            "sslcert": self.sslcert,
            "sslkey": self.sslkey,
        }
        return Where.of("", {name: str(value) for name, value in given.items() if value})


class PostgresResource(SqlResource):
    """Where in the database a collection goes."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    in_schema: _Name | None = Setting(
        default=None,
        alias="schema",
        description="the schema of the table; it is made if it is not there",
    )


class PostgresConnector(SqlConnector[PostgresEndpoint, PostgresResource]):
    """Documents in the tables of a Postgres database."""

    name = "postgres"
    documentation_url = documentation_url("reference/connectors.md#postgres")
    endpoint = PostgresEndpoint
    resource = PostgresResource
    dialect = PostgresDialect()

    @contextmanager
    def session(self, endpoint: PostgresEndpoint, *, touch: bool) -> Iterator[PostgresSession]:
        """A connection to the database; one that may not touch it can only read."""
        session = PostgresSession(endpoint.where(), touch=touch, turn=endpoint.in_schema)
        try:
            yield session
        finally:
            session.close()

    def path(self, endpoint: PostgresEndpoint, resource: PostgresResource) -> tuple[str, ...]:
        """What the table of a resource is called."""
        return shortened(resource.in_schema or endpoint.in_schema), shortened(resource.table)

    def own_table(self, endpoint: PostgresEndpoint, table: str) -> tuple[str, ...]:
        """What a table of our own is called."""
        return shortened(endpoint.in_schema), table

    def dialect_for(self, session: Session, fields: Sequence[Field]) -> PostgresDialect:
        """One that knows which of the types that fields say they have are here."""
        assert isinstance(session, PostgresSession)
        said = {annotated(each) for each in fields} - {""}
        found = {each: session.endpoint_type(each) for each in sorted(said)}
        return PostgresDialect({name: kind for name, kind in found.items() if kind})

    def create_schemas(
        self, session: Session, endpoint: PostgresEndpoint, paths: Sequence[tuple[str, ...]]
    ) -> Sequence[str]:
        """The schemas that are not there."""
        assert isinstance(session, PostgresSession)
        names = sorted({schema for schema, _ in paths})
        there = session.schemas(names)
        return [f"CREATE SCHEMA {self.dialect.quoted(name)}" for name in names if name not in there]

    def open(self, request: OpenRequest[PostgresEndpoint, PostgresResource]) -> PostgresTransactor:
        """The writer of a range of keys; whoever wrote any of them before is fenced off."""
        endpoint, key_range = request.endpoint, request.key_range
        names = SessionNames(endpoint.in_schema, request.materialization)
        session = PostgresSession(
            endpoint.where(),
            name=names.of(key_range),
            turn=names.prefix,
            gave_up=request.cancelled,
        )
        try:
            last = self.last_applied(session, endpoint, request.materialization)
            check_applied(last, request.materialization, request.version)
            checkpoints = self.own_table(endpoint, fence.TABLE)
            left = end_older(session, names, key_range)
            try:
                with session.transaction():
                    held = fence.install_fence(
                        session, self.dialect, request.materialization, key_range, checkpoints
                    )
                    # The fence row keeps the table locked meanwhile.
                    identity = EndpointIdentity.read(session, self.dialect.quoted_path(checkpoints))
            except PenstockError as error:
                if isinstance(error.__cause__, errors.LockNotAvailable):
                    raise in_the_way(session, request.materialization, checkpoints, left) from None
                raise
            dialect = self.dialect_for(
                session, [each for binding in request.bindings for each in binding.fields]
            )
            session.see_operators([dialect.quoted_path(each.path) for each in request.bindings])
            recreations = self.recreations(session, request, last)
            return PostgresTransactor(
                session,
                dialect,
                [*request.bindings],
                held,
                identity,
                checkpoints,
                names,
                recreations,
            )
        except BaseException:
            session.close()
            raise
