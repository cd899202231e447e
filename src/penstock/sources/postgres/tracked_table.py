"""One tracked table: its schema, its state, and the changes buffered in the current tick."""

from dataclasses import dataclass, field

from penstock.errors import DefiniteError
from penstock.sources.postgres.old_rows import Changes
from penstock.sources.postgres.pgoutput import Relation
from penstock.sources.postgres.table_schema import Table
from penstock.sources.postgres.table_state import TableEvent, TableState, next_state

__all__ = ["TrackedTable"]


@dataclass(slots=True)
class TrackedTable:
    """A tracked table and its state."""

    table: Table
    state: TableState
    """Current state; only `apply` changes it."""

    snapshot_lsn: int = 0
    """Consistent point of the snapshot, which excludes commits at or after this LSN."""

    attempt: str = ""
    """Unique name of the current snapshot attempt."""

    truncate_order: int = -1
    """Stream order of the last TRUNCATE among the pending changes, or -1."""

    rows: int = 0
    error: DefiniteError | None = None
    """Error of the table, in a state with an error."""

    relation: Relation | None = None
    """Last Relation message that was accepted for this table."""

    buffered: list[Changes] = field(default_factory=list)
    buffered_bytes: int = 0
    row_bytes: int = 0
    """Estimated bytes per row, from the last lookups."""

    @property
    def pending(self) -> str:
        """Return the side-state name of the pending changes, unique per snapshot attempt."""
        return f"{self.table.oid}-{self.attempt}"

    def apply(self, event: TableEvent, error: DefiniteError | None = None) -> None:
        """Change the state. `error` is stored unless the table is errored already.

        Raises:
            InternalError: the event is impossible in this state.
        """
        before, self.state = self.state, next_state(self.state, event)
        if self.state is TableState.REMOVED or not self.state.stored.has_error:
            self.error = None
        elif error is not None and not before.is_errored:
            self.error = error

    def drop_buffered(self) -> None:
        """Discard the buffered changes."""
        self.buffered, self.buffered_bytes = [], 0
