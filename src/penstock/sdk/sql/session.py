"""A connection to an SQL endpoint, as little of one as the shared parts need."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from penstock.sdk.sql.dialect import Table

__all__ = ["Session"]


class Session(Protocol):
    """Runs statements."""

    def query(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of a statement that has some; written with `?` for values."""
        ...

    def run(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement; how many rows it touched."""
        ...

    def transaction(self) -> AbstractContextManager[None]:
        """All of what is run within, or nothing."""
        ...

    def table(self, path: Sequence[str]) -> Table | None:
        """The table of that name as it is, if it is there."""
        ...

    def close(self) -> None:
        """Let go; what is not committed is rolled back."""
        ...
