"""Postgres connector: configuration, Validate, Apply and Open.

Before an Open increments the fence, it terminates the sessions of older streams
(`older_sessions.py`), because they may hold locks.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from typing import Annotated, Self

from psycopg import errors
from pydantic import BaseModel, ConfigDict, SecretStr, model_validator
from pydantic import Field as Setting

from penstock import documentation_url
from penstock.connectors.postgres.dialect import PostgresDialect, annotated, shortened
from penstock.connectors.postgres.identity import EndpointIdentity
from penstock.connectors.postgres.older_sessions import SessionNames, end_older, fence_lock_error
from penstock.connectors.postgres.session import PostgresSession, Server
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
    """Configuration of the database."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    url: SecretStr | None = Setting(
        default=None, description="connection URL: postgresql://user:password@host:5432/database"
    )
    host: str | None = Setting(default=None, description="server, instead of a url")
    port: int | None = Setting(default=None, ge=1, le=65535, description="port of the server")
    user: str | None = Setting(default=None, description="role to connect as")
    password: SecretStr | None = Setting(default=None, description="password of the role")
    database: str | None = Setting(default=None, description="database")
    sslmode: str | None = Setting(default=None, description="sslmode of libpq, such as verify-full")
    sslrootcert: str | None = Setting(default=None, description="file with the CA certificates")
    sslcert: str | None = Setting(default=None, description="file with the client certificate")
    sslkey: str | None = Setting(
        default=None, description="file with the key of the client certificate"
    )
    in_schema: _Name = Setting(
        default="public",
        alias="schema",
        description="schema of the checkpoints, and default schema of tables",
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        others = self.model_fields_set - {"url", "in_schema", "schema"}
        if (self.url is None) == (self.host is None) or (self.url is not None and others):
            raise ValueError("endpoint needs either a url, or a host with user and database")
        return self

    def server(self) -> Server:
        """Return the connection parameters.

        Raises:
            Refused: libpq cannot parse the url.
        """
        if self.url is not None:
            return Server.parse(self.url.get_secret_value(), {})
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
        return Server.parse("", {name: str(value) for name, value in given.items() if value})


class PostgresResource(SqlResource):
    """Configuration of a table."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    in_schema: _Name | None = Setting(
        default=None,
        alias="schema",
        description="schema of the table; created if it does not exist",
    )


class PostgresConnector(SqlConnector[PostgresEndpoint, PostgresResource]):
    """Connector that stores documents in the tables of a Postgres database."""

    name = "postgres"
    documentation_url = documentation_url("reference/connectors.md#postgres")
    endpoint = PostgresEndpoint
    resource = PostgresResource
    dialect = PostgresDialect()

    def session(
        self, endpoint: PostgresEndpoint, *, touch: bool
    ) -> AbstractContextManager[PostgresSession]:
        """Return a connection to the database; read-only without `touch`."""
        return closing(PostgresSession(endpoint.server(), touch=touch, turn=endpoint.in_schema))

    def path(self, endpoint: PostgresEndpoint, resource: PostgresResource) -> tuple[str, ...]:
        """Return the path of the table of a resource."""
        return shortened(resource.in_schema or endpoint.in_schema), shortened(resource.table)

    def own_table(self, endpoint: PostgresEndpoint, table: str) -> tuple[str, ...]:
        """Return the path of a table of the connector."""
        return shortened(endpoint.in_schema), table

    def dialect_for(self, session: Session, fields: Sequence[Field]) -> PostgresDialect:
        """Return the dialect with the annotated types of the fields that the endpoint has."""
        assert isinstance(session, PostgresSession)
        names = {annotated(field) for field in fields} - {""}
        types = {name: session.endpoint_type(name) for name in sorted(names)}
        return PostgresDialect({name: kind for name, kind in types.items() if kind})

    def create_schemas(
        self, session: Session, endpoint: PostgresEndpoint, paths: Sequence[tuple[str, ...]]
    ) -> Sequence[str]:
        """Return statements that create the missing schemas."""
        assert isinstance(session, PostgresSession)
        names = sorted({schema for schema, _ in paths})
        existing = session.schemas(names)
        return [
            f"CREATE SCHEMA {self.dialect.quoted(name)}" for name in names if name not in existing
        ]

    def open(self, request: OpenRequest[PostgresEndpoint, PostgresResource]) -> PostgresTransactor:
        """Return the writer of a key range, and fence all previous writers of its keys."""
        endpoint, key_range = request.endpoint, request.key_range
        names = SessionNames(endpoint.in_schema, request.materialization)
        session = PostgresSession(
            endpoint.server(),
            name=names.of(key_range),
            turn=names.prefix,
            cancelled=request.cancelled,
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
                    # The lock on the fence row prevents a change of the table.
                    identity = EndpointIdentity.read(session, self.dialect.quoted_path(checkpoints))
            except PenstockError as error:
                if isinstance(error.__cause__, errors.LockNotAvailable):
                    raise fence_lock_error(
                        session, request.materialization, checkpoints, left
                    ) from None
                raise
            dialect = self.dialect_for(
                session, [field for binding in request.bindings for field in binding.fields]
            )
            session.add_operator_schemas(
                [dialect.quoted_path(binding.path) for binding in request.bindings]
            )
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
