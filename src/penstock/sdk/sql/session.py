"""Connection to an SQL endpoint, as the shared code uses it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from penstock.sdk.sql.dialect import Table

__all__ = ["Session"]


class Session(Protocol):
    """Connection that executes statements."""

    def query(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Execute a query with `?` placeholders, and return its rows."""
        ...

    def run(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        """Execute a statement, and return the number of affected rows."""
        ...

    def transaction(self) -> AbstractContextManager[None]:
        """Return a context manager that commits all statements in it, or none."""
        ...

    def table(self, path: Sequence[str]) -> Table | None:
        """Return a table; None if it does not exist."""
        ...

    def close(self) -> None:
        """Roll back the uncommitted transaction, and close the connection."""
        ...
