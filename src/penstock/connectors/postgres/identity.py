"""Identity of the endpoint that a stream has opened.

A fence row proves only for the table that Open updated that no newer stream has opened. A table,
database or server that replaced it, empty or restored from a backup, has other rows. The statement
of a commit that updates the fence row therefore compares

    (system identifier, oid of the database, oid of the fence table)

with the values at Open.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from penstock.connectors.postgres.session import PostgresSession
from penstock.sdk.errors import Refused

__all__ = ["EndpointIdentity"]

_SYSTEM: Final = "(SELECT system_identifier FROM pg_control_system())"
_DATABASE: Final = "(SELECT oid FROM pg_database WHERE datname = current_database())"
_TABLE: Final = "to_regclass(?)::oid"


@dataclass(frozen=True, slots=True)
class EndpointIdentity:
    """Server, database and fence table of one stream."""

    path: str
    """Quoted name of the fence table."""

    system: int | None
    """System identifier; None if this role may not read it."""

    database: int
    table: int | None
    """Oid of the fence table; None if it does not exist."""

    @classmethod
    def read(cls, session: PostgresSession, path: str) -> Self:
        """Return the identity of the endpoint that `session` is connected to."""
        [(readable,)] = session.query(
            "SELECT has_function_privilege('pg_control_system()', 'EXECUTE')"
        )
        system = _SYSTEM if readable else "NULL::bigint"
        [row] = session.query(f"SELECT {system}, {_DATABASE}, {_TABLE}", [path])
        return cls(path, *row)

    def condition(self) -> tuple[str, Sequence[Any]]:
        """Return an SQL condition that holds in this endpoint alone, and its parameters."""
        text = f"{_DATABASE} = ? AND {_TABLE} = ?"
        parameters = [self.database, self.path, self.table]
        if self.system is None:
            return text, parameters
        return f"{text} AND {_SYSTEM} = ?", [*parameters, self.system]

    def check(self, session: PostgresSession) -> None:
        """Compare the endpoint that `session` is connected to with this one.

        Raises:
            Refused: the endpoint is another one.
        """
        now, place = EndpointIdentity.read(session, self.path), str(session.server)
        if now.system is not None and self.system is not None and now.system != self.system:
            change = f"{place} was replaced by a database of another server"
            detail = f"The system identifier is {now.system}, and was {self.system}."
        elif now.database != self.database:
            change = f"{place} was dropped and created again"
            detail = f"The oid of the database is {now.database}, and was {self.database}."
        elif now.table is None:
            change, detail = (
                f"table {self.path} of {place} was dropped",
                "The table contained the checkpoints.",
            )
        elif now.table != self.table:
            change = f"table {self.path} of {place} was dropped and created again"
            detail = f"The oid of the table is {now.table}, and was {self.table}."
        else:
            return
        raise Refused(
            f"{change} while a stream was open",
            detail=f"{detail} The transaction is rolled back and not acknowledged.",
            hint="Restore the database and start again; or raise the backfill of each binding by "
            "one, to write all rows again.",
        )
