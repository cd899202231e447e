"""Replacement of a table that cannot be altered for its binding.

Apply leaves such a table as it is. The transaction that stores the contents of the
collection drops the table, creates it again and records that with the applied
specification. At any time, either the old table or the new one exists.
"""

from dataclasses import dataclass

from penstock.failpoints import Failpoint, hit
from penstock.protocol.errors import RemoteProtocolError
from penstock.sdk.batches import Documents
from penstock.sdk.sql import applied_spec
from penstock.sdk.sql.dialect import Dialect, Table
from penstock.sdk.sql.session import Session

__all__ = ["Recreation"]


@dataclass(frozen=True, slots=True)
class Recreation:
    """Pending replacement of a table."""

    dialect: Dialect
    table: Table
    """The new table."""

    materialization: str
    applied: tuple[str, ...]
    """Path of the table with the applied specifications."""

    @property
    def drop(self) -> str:
        """Statement that drops the table; it fails if other objects depend on the table."""
        return self.dialect.drop_table(self.table.path)

    @property
    def create(self) -> str:
        """Statement that creates the table."""
        return self.dialect.create_table(self.table)

    def run(self, session: Session) -> None:
        """Replace the table within the transaction of the session."""
        session.run(self.drop)
        hit(Failpoint.RESOURCE_DROPPED)
        session.run(self.create)
        last = applied_spec.last_applied(session, self.dialect, self.applied, self.materialization)
        if last is not None:
            spec = last.recreated(self.table.path).spec
            applied_spec.put(session, self.dialect, self.applied, spec, last.version)

    def check_truncated(self, batch: Documents) -> None:
        """Reject documents before the Store that truncates the table.

        Raises:
            RemoteProtocolError: the batch does not truncate the table.
        """
        if not batch.empties:
            raise RemoteProtocolError(
                f'Store to table "{batch.binding}", which must be dropped and created again first',
                hint="The first Store of the binding must have empties.",
            )
