"""The SQLite connector: one file, in WAL mode, with its fence in it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    """Which file."""

    model_config = ConfigDict(extra="forbid")

    path: Path = Setting(description="the SQLite file; it is made if it is not there")
    decimals: Literal["text", "real"] = Setting(
        default="text",
        description="how decimals are stored: text is exact, real compares as numbers",
    )

    @field_validator("path")
    @classmethod
    def _a_file(cls, path: Path) -> Path:
        if str(path) in (".", ":memory:"):
            raise ValueError("it must name a file, such as /var/lib/target.db")
        return path


class SqliteConnector(SqlConnector[SqliteEndpoint, SqlResource]):
    """Documents in the tables of one SQLite file."""

    name = "sqlite"
    documentation_url = documentation_url("reference/connectors.md#sqlite")
    endpoint = SqliteEndpoint
    resource = SqlResource
    dialect = SqliteDialect()

    @contextmanager
    def session(self, endpoint: SqliteEndpoint, *, touch: bool) -> Iterator[SqliteSession]:
        """A connection to the file."""
        session = SqliteSession(endpoint.path, create=touch, decimals=endpoint.decimals)
        try:
            yield session
        finally:
            session.close()

    def dialect_for(self, session: Session, fields: Sequence[Field]) -> SqliteDialect:
        """Return the dialect with the endpoint's choice for decimals."""
        return SqliteDialect(session.decimals if isinstance(session, SqliteSession) else "text")

    def remarks(self, dialect: Dialect, binding: Binding[SqlResource]) -> Sequence[str]:
        """Return a warning for each decimal that is stored as text."""
        return [
            f'column "{each.name}" of table "{binding}" stores decimals as text, and SQLite '
            "compares text by its characters: set decimals: real, or cast it in queries"
            for each in binding.fields
            if is_decimal(each) and dialect.column_type(each) == "TEXT"
        ]

    def path(self, endpoint: SqliteEndpoint, resource: SqlResource) -> tuple[str, ...]:
        """What the table of a resource is called."""
        return (resource.table,)

    def check_adoption(self, session: Session, path: tuple[str, ...]) -> None:
        """Refuse a table that makes values into others, or takes two keys for one."""
        [name] = path
        strict = session.query(
            "SELECT strict FROM pragma_table_list WHERE schema = 'main' AND lower(name) = lower(?)",
            [name],
        )
        if strict != [(1,)]:
            raise Refused(
                f'table "{name}" is not STRICT, and cannot be taken over',
                detail="SQLite would make values into others for the sake of their columns.",
                hint="Make it again as a STRICT table, or name another one.",
            )
        collated = session.query(
            "SELECT k.name, k.coll FROM pragma_index_list(?) AS i, pragma_index_xinfo(i.name) AS k "
            "WHERE i.origin = 'pk' AND k.key AND k.coll <> 'BINARY'",
            [name],
        )
        for column, collation in collated:
            raise Refused(
                f'key column "{column}" of table "{name}" is compared by {collation}, '
                "and cannot be taken over",
                detail="Keys that are different would be the same row.",
                hint="Make it again without COLLATE, or name another one.",
            )

    def open(self, request: OpenRequest[SqliteEndpoint, SqlResource]) -> SqliteTransactor:
        """The writer of a range of keys; whoever wrote any of them before is fenced off."""
        session = SqliteSession(
            request.endpoint.path,
            gave_up=request.cancelled,
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
