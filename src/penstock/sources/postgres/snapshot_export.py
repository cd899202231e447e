"""Exported snapshots: the state of the database at the consistent point of a slot.

Creation of a slot exports a snapshot, which ends with the session that created the slot. Another
session therefore imports the snapshot and exports it again. That session has no slot: a temporary
slot would retain WAL during the whole snapshot.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.errors import InternalError
from penstock.pgclient import Connection
from penstock.sources.postgres.snapshot import import_snapshot

__all__ = ["PendingExport", "SnapshotExport", "export_again"]

CANCEL_TIMEOUT_S: Final = 5.0
"""Longest wait for the cancellation of a slot creation."""


@dataclass(eq=False, slots=True)
class SnapshotExport:
    """Exported snapshot, valid while its connection stays idle in its transaction."""

    connection: Connection
    consistent_point: int
    """LSN such that the snapshot contains exactly the commits below it."""

    snapshot: str

    def close(self) -> None:
        """Release the snapshot."""
        self.connection.close()


class PendingExport:
    """SnapshotExport of a snapshot in a background thread.

    A slot is created only after all running transactions have ended, which may take hours.
    The thread prevents this wait from blocking anything else.
    """

    def __init__(self, create: Callable[[threading.Event], SnapshotExport], name: str) -> None:
        self._create = create
        self._stop = threading.Event()
        self._export: SnapshotExport | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"export {name}", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Return whether the export has succeeded or failed."""
        return not self._thread.is_alive()

    def result(self) -> SnapshotExport:
        """Return the finished export, or raise its error."""
        if self._error is not None:
            raise self._error
        if self._export is None:
            raise InternalError("snapshot was requested before its export ended")
        return self._export

    def cancel(self) -> None:
        """Cancel the export, and release its snapshot."""
        self._stop.set()
        self._thread.join(CANCEL_TIMEOUT_S)
        if self._export is not None:
            self._export.close()

    def _run(self) -> None:
        try:
            export = self._create(self._stop)
        except Exception as error:  # noqa: BLE001 - raised by result()
            self._error = error
            return
        self._export = export
        if self._stop.is_set():
            export.close()


def export_again(connection: Connection, snapshot: str, consistent_point: int) -> SnapshotExport:
    """Import a snapshot into `connection`, and export it from there. Close it on failure."""
    try:
        connection.execute("SET idle_in_transaction_session_timeout = 0")
        connection.execute("BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ")
        import_snapshot(connection, snapshot, "of a new slot")
        [(exported,)] = connection.query("SELECT pg_catalog.pg_export_snapshot()")
    except BaseException:
        connection.close()
        raise
    return SnapshotExport(connection, consistent_point, str(exported))
