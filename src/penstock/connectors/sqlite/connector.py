"""SQLite connector: configuration, Validate, Apply and Open."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic import Field as Setting

from penstock import documentation_url
from penstock.connectors.sqlite.dialect import SqliteDialect, is_decimal
from penstock.connectors.sqlite.session import SqliteSession
from penstock.connectors.sqlite.transactor import SqliteTransactor
from penstock.sdk.bindings import Binding, Field
from penstock.sdk.connector import OpenRequest
from penstock.sdk.errors import Refused
from penstock.sdk.sql.applied_spec import check_applied
from penstock.sdk.sql.connector import SqlConnector, SqlResource
from penstock.sdk.sql.dialect import Dialect
from penstock.sdk.sql.fence import install_fence
from penstock.sdk.sql.session import Session

__all__ = ["SqliteConnector", "SqliteEndpoint"]


class SqliteEndpoint(BaseModel):
    """Configuration of the file."""

    model_config = ConfigDict(extra="forbid")

    path: Path = Setting(description="SQLite file; created if it does not exist")
    decimals: Literal["text", "real"] = Setting(
        default="text",
        description="storage of decimals: text is exact, real compares as a number",
    )

    @field_validator("path")
    @classmethod
    def _a_file(cls, path: Path) -> Path:
        if str(path) in (".", ":memory:"):
            raise ValueError("path must be a file, such as /var/lib/target.db")
        return path


class SqliteConnector(SqlConnector[SqliteEndpoint, SqlResource]):
    """Connector that stores documents in the tables of a SQLite file."""

    name = "sqlite"
    documentation_url = documentation_url("reference/connectors.md#sqlite")
    endpoint = SqliteEndpoint
    resource = SqlResource
    dialect = SqliteDialect()

    def session(
        self, endpoint: SqliteEndpoint, *, touch: bool
    ) -> AbstractContextManager[SqliteSession]:
        """Return a connection to the file."""
        return closing(SqliteSession(endpoint.path, create=touch, decimals=endpoint.decimals))

    def dialect_for(self, session: Session, fields: Sequence[Field]) -> SqliteDialect:
        """Return the dialect with the setting for decimals."""
        return SqliteDialect(session.decimals if isinstance(session, SqliteSession) else "text")

    def remarks(self, dialect: Dialect, binding: Binding[SqlResource]) -> Sequence[str]:
        """Return a warning for each decimal that is stored as text."""
        return [
            f'column "{field.name}" of table "{binding}" stores decimals as text, and SQLite '
            "compares text by its characters: set decimals: real, or cast it in queries"
            for field in binding.fields
            if is_decimal(field) and dialect.column_type(field) == "TEXT"
        ]

    def path(self, endpoint: SqliteEndpoint, resource: SqlResource) -> tuple[str, ...]:
        """Return the path of the table of a resource."""
        return (resource.table,)

    def check_adoption(self, session: Session, path: tuple[str, ...]) -> None:
        """Reject a table that converts values or considers different keys equal."""
        [name] = path
        strict = session.query(
            "SELECT strict FROM pragma_table_list WHERE schema = 'main' AND lower(name) = lower(?)",
            [name],
        )
        if strict != [(1,)]:
            raise Refused(
                f'table "{name}" cannot be adopted: it is not STRICT',
                detail="SQLite would convert values to the types of their columns.",
                hint="Create the table again as STRICT, or use another one.",
            )
        collated = session.query(
            "SELECT k.name, k.coll FROM pragma_index_list(?) AS i, pragma_index_xinfo(i.name) AS k "
            "WHERE i.origin = 'pk' AND k.key AND k.coll <> 'BINARY'",
            [name],
        )
        for column, collation in collated:
            raise Refused(
                f'table "{name}" cannot be adopted: collation of key column "{column}" is '
                f"{collation}",
                detail="Different keys would be the same row.",
                hint="Create the table again without COLLATE, or use another one.",
            )

    def open(self, request: OpenRequest[SqliteEndpoint, SqlResource]) -> SqliteTransactor:
        """Return the writer of a key range, and fence all previous writers of its keys."""
        session = SqliteSession(
            request.endpoint.path,
            cancelled=request.cancelled,
            decimals=request.endpoint.decimals,
        )
        try:
            with session.transaction():
                last = self.last_applied(session, request.endpoint, request.materialization)
                check_applied(last, request.materialization, request.version)
                fence = install_fence(
                    session, self.dialect, request.materialization, request.key_range
                )
            dialect = SqliteDialect(request.endpoint.decimals)
            recreations = self.recreations(session, request, last)
            return SqliteTransactor(session, dialect, [*request.bindings], fence, recreations)
        except BaseException:
            session.close()
            raise
