"""Initial snapshots of tables in progress, each as of an exported snapshot.

A table passes through three states:

    awaited     its snapshot is being exported
    read        its splits are read, in this process or by Spark tasks
    linked      its files are linked by the tick in progress
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import DefiniteError, UsageError
from penstock.failpoints import Failpoint, hit
from penstock.sources.context import SnapshotLoad, SnapshotLoader, StateStore, TickTransaction
from penstock.sources.postgres import state
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.errors import TableUntrackable
from penstock.sources.postgres.server import SourceServer
from penstock.sources.postgres.snapshot import splits
from penstock.sources.postgres.snapshot_export import PendingExport, SnapshotExport
from penstock.sources.postgres.table_schema import Table
from penstock.sources.postgres.table_state import TableEvent
from penstock.sources.postgres.tracked_table import TrackedTable
from penstock.sources.source import Split

__all__ = ["SnapshotTracker"]


@dataclass(eq=False, slots=True)
class _Snapshot:
    """Initial snapshot in progress."""

    tracked: TrackedTable
    load: SnapshotLoad
    export: SnapshotExport


@dataclass(eq=False, slots=True)
class _AwaitedExport:
    """Tables that wait for the export of their snapshot."""

    tables: list[TrackedTable]
    export: PendingExport


class SnapshotTracker:
    """Initial snapshots of all tables of one source."""

    def __init__(self, config: PostgresConfig, upstream: SourceServer, *, tasks: int) -> None:
        self._config = config
        self._upstream = upstream
        self._tasks = config.snapshot_tasks or tasks
        self._state_store: StateStore
        self._loader: SnapshotLoader
        self._snapshots: list[_Snapshot] = []
        self._awaited: list[_AwaitedExport] = []

    def open(self, state_store: StateStore, loader: SnapshotLoader) -> None:
        """Set the state store and the snapshot loader; call this before any snapshot."""
        self._state_store, self._loader = state_store, loader

    def close(self) -> None:
        """Abandon all snapshots and release their connections to the server."""
        for snapshot in self._snapshots:
            snapshot.load.abandon()
            snapshot.export.close()
        for awaited in self._awaited:
            awaited.export.cancel()
        self._snapshots, self._awaited = [], []

    def check(self, table: Table) -> None:
        """Check that a collection can hold the table.

        Raises:
            TableUntrackable: no collection can hold it.
        """
        try:
            self._loader.check(table.collection, table.schema, table.key_columns)
        except UsageError as error:
            raise TableUntrackable(
                source=table.source, table=table.described.table_name, cause=error
            ) from error

    @property
    def is_active(self) -> bool:
        """Return whether any snapshot is not yet linked by a tick."""
        return bool(self._snapshots or self._awaited)

    def current_table(self) -> Table | None:
        """Return a table whose snapshot is being read, if any; safe to call from another thread."""
        return next(
            (
                snapshot.tracked.table
                for snapshot in tuple(self._snapshots)
                if not snapshot.load.done()
            ),
            None,
        )

    def splits_of(self, table: Table, export: SnapshotExport) -> Sequence[Split]:
        """Return the splits of a table as of a snapshot, which can be read in parallel."""
        return splits(
            self._config.parameters,
            table,
            export.snapshot,
            tasks=self._tasks,
            server_version=self._upstream.control.server_version,
        )

    def start(self, tables: Sequence[TrackedTable], export: SnapshotExport) -> None:
        """Start the initial snapshot of the tables as of an exported snapshot."""
        self._create_collections(tables)
        self._start(tables, export)

    def restart(self, unfinished: Sequence[TrackedTable]) -> None:
        """Start the initial snapshot of the tables as of a new snapshot, once it is exported.

        Changes are stored as pending from now on. Pending changes that committed before the new
        snapshot, and pending changes of an earlier attempt, are not applied.
        """
        for tracked in unfinished:
            tracked.attempt, tracked.truncate_order = self._upstream.unique_name(), -1
            # The new snapshot contains the changes that could not be decoded, or reads past them.
            tracked.apply(TableEvent.SNAPSHOT_STARTED)
        # This write precedes all pending changes of the new attempt. It also prevents that a
        # snapshot of an earlier attempt is taken for complete.
        self._state_store.put(state.tables(unfinished))
        self._create_collections(unfinished)
        self._awaited.append(_AwaitedExport([*unfinished], self._upstream.begin_export()))

    def start_exported(self) -> None:
        """Start the initial snapshots whose export has finished."""
        for awaited in [awaited for awaited in self._awaited if awaited.export.done()]:
            self._awaited.remove(awaited)
            export = awaited.export.result()
            for tracked in awaited.tables:
                tracked.snapshot_lsn = export.consistent_point
            self._start(awaited.tables, export)

    def update_row_counts(self) -> None:
        """Update the number of rows read by each snapshot in progress."""
        running = [snapshot for snapshot in self._snapshots if not snapshot.load.done()]
        counts = self._upstream.count_snapshot_rows() if running else {}
        for snapshot in running:
            tracked = snapshot.tracked
            rows = snapshot.load.rows() + counts.get(tracked.table.oid, 0)
            # For a short time, a split that has just ended is in neither of the two counts.
            tracked.rows = max(tracked.rows, rows)

    def finished(self) -> list[_Snapshot]:
        """Return the snapshots that are finished and not yet linked."""
        return [snapshot for snapshot in self._snapshots if snapshot.load.done()]

    def link(
        self, tick: TickTransaction, finished: Sequence[_Snapshot]
    ) -> dict[int, DefiniteError]:
        """Link the files of those snapshots in `finished` that have not been abandoned since.

        Return the errors of snapshots that failed, by table oid.
        """
        errors = {}
        for snapshot in [snapshot for snapshot in finished if snapshot in self._snapshots]:
            tracked = snapshot.tracked
            try:
                tick.link_snapshot(tracked.table.collection, snapshot.load.result())
            except DefiniteError as error:
                errors[tracked.table.oid] = error
            else:
                tracked.apply(TableEvent.SNAPSHOT_LINKED)
                tracked.rows = snapshot.load.rows()
                hit(Failpoint.COPY_DONE)
            self._remove(snapshot)
        return errors

    def abandon(self, tracked: TrackedTable) -> None:
        """Stop the initial snapshot of a table, in any state."""
        for snapshot in [s for s in self._snapshots if s.tracked is tracked]:
            snapshot.load.abandon()
            self._remove(snapshot)
        for awaited in self._awaited:
            awaited.tables = [table for table in awaited.tables if table is not tracked]

    def _create_collections(self, tables: Sequence[TrackedTable]) -> None:
        for table in (tracked.table for tracked in tables):
            # Files of an earlier attempt may exist. They were never visible to readers.
            self._loader.drop_collection(table.collection)
            self._loader.create(table.collection, table.schema, table.key_columns)

    def _start(self, tables: Sequence[TrackedTable], export: SnapshotExport) -> None:
        for tracked in tables:
            table = tracked.table
            tracked.rows = 0
            splits = self.splits_of(table, export)
            load = self._loader.load(table.collection, splits, size=table.described.bytes)
            self._snapshots.append(_Snapshot(tracked, load, export))
        if not tables:
            export.close()

    def _remove(self, snapshot: _Snapshot) -> None:
        self._snapshots.remove(snapshot)
        if all(other.export is not snapshot.export for other in self._snapshots):
            snapshot.export.close()
