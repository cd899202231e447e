"""Initial snapshots of tables in progress, each as of an exported snapshot.

A table passes through three states:

    awaited     its snapshot is being exported
    copied      its splits are read, in this process or by Spark tasks
    kept        its files are linked by the tick in progress
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import DefiniteError, UsageError
from penstock.failpoints import Failpoint, hit
from penstock.sources.postgres import notes
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.errors import TableUntrackable
from penstock.sources.postgres.reading import Following, Phase, Reading
from penstock.sources.postgres.snapshot import splits
from penstock.sources.postgres.tables import Table
from penstock.sources.postgres.upstream import Export, ExportUnderWay, Upstream
from penstock.sources.source import SnapshotLoad, SnapshotLoader, Split, StateStore, TickTransaction

__all__ = ["FirstCopies"]


@dataclass(eq=False, slots=True)
class _Copy:
    """Initial snapshot in progress."""

    following: Following
    load: SnapshotLoad
    export: Export


@dataclass(eq=False, slots=True)
class _Awaited:
    """Tables that wait for the export of their snapshot."""

    tables: list[Following]
    export: ExportUnderWay


class FirstCopies:
    """Initial snapshots of all tables of one source."""

    def __init__(self, config: PostgresConfig, upstream: Upstream, *, tasks: int) -> None:
        self._config = config
        self._upstream = upstream
        self._tasks = config.snapshot_tasks or tasks
        self._memory: StateStore
        self._loader: SnapshotLoader
        self._copies: list[_Copy] = []
        self._awaited: list[_Awaited] = []

    def open(self, memory: StateStore, loader: SnapshotLoader) -> None:
        """Set the state store and the snapshot loader; call this before any snapshot."""
        self._memory, self._loader = memory, loader

    def close(self) -> None:
        """Abandon all snapshots and release their connections to the server."""
        for copy in self._copies:
            copy.load.abandon()
            copy.export.close()
        for awaited in self._awaited:
            awaited.export.give_up()
        self._copies, self._awaited = [], []

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
    def under_way(self) -> bool:
        """Return whether any snapshot is not yet linked by a tick."""
        return bool(self._copies or self._awaited)

    def running(self) -> Table | None:
        """Return a table whose snapshot is being read, if any; safe to call from another thread."""
        return next(
            (each.following.table for each in tuple(self._copies) if not each.load.done()), None
        )

    def pieces_of(self, table: Table, export: Export) -> Sequence[Split]:
        """Return the splits of a table as of a snapshot, which can be read in parallel."""
        return splits(
            self._config.parameters,
            table,
            export.snapshot,
            tasks=self._tasks,
            server_version=self._upstream.control.server_version,
        )

    def begin(self, tables: Sequence[Following], export: Export) -> None:
        """Start the initial snapshot of the tables as of an exported snapshot."""
        self._make_collections(tables)
        self._begin(tables, export)

    def begin_anew(self, unfinished: Sequence[Following]) -> None:
        """Start the initial snapshot of the tables as of a new snapshot, once it is exported.

        Changes are stored as pending from now on. Pending changes that committed before the new
        snapshot, and pending changes of an earlier attempt, are not applied.
        """
        for following in unfinished:
            following.attempt, following.truncate_order = self._upstream.another(), -1
            # The new snapshot contains the changes that could not be decoded, or reads past them.
            following.error, following.failure = "", None
        # This write precedes all pending changes of the new attempt. It also prevents that a
        # snapshot of an earlier attempt is taken for complete.
        self._memory.put(notes.tables(unfinished))
        self._make_collections(unfinished)
        self._awaited.append(_Awaited([*unfinished], self._upstream.begin_export()))

    def begin_exported(self) -> None:
        """Start the initial snapshots whose export has finished."""
        for awaited in [each for each in self._awaited if each.export.done()]:
            self._awaited.remove(awaited)
            export = awaited.export.result()
            for following in awaited.tables:
                following.snapshot_lsn = export.consistent_point
            self._begin(awaited.tables, export)

    def count(self) -> None:
        """Update the number of rows read by each snapshot in progress."""
        copying = [copy for copy in self._copies if not copy.load.done()]
        running = self._upstream.being_copied() if copying else {}
        for copy in copying:
            following = copy.following
            rows = copy.load.rows() + running.get(following.table.oid, 0)
            # For a short time, a split that has just ended is in neither of the two counts.
            following.rows = max(following.rows, rows)

    def done(self) -> list[_Copy]:
        """Return the snapshots that are finished and not yet linked."""
        return [each for each in self._copies if each.load.done()]

    def keep(self, tick: TickTransaction, reading: Reading, done: Sequence[_Copy]) -> None:
        """Link the files of the snapshots in `done` that the drift check has not abandoned.

        `done` is the list of snapshots that were finished before the drift check.
        """
        for copy in [each for each in done if each in self._copies]:
            following = copy.following
            try:
                tick.link_snapshot(following.table.collection, copy.load.result())
            except DefiniteError as error:
                reading.broken[following.table.oid] = error
            else:
                following.phase, following.rows = Phase.LOADED, copy.load.rows()
                hit(Failpoint.COPY_DONE)
            self._forget(copy)

    def abandon(self, following: Following) -> None:
        """Stop the initial snapshot of a table, in any state."""
        for copy in [each for each in self._copies if each.following is following]:
            copy.load.abandon()
            self._forget(copy)
        for awaited in self._awaited:
            awaited.tables = [each for each in awaited.tables if each is not following]

    def _make_collections(self, tables: Sequence[Following]) -> None:
        for table in (each.table for each in tables):
            # Files of an earlier attempt may exist. They were never visible to readers.
            self._loader.drop_collection(table.collection)
            self._loader.create(table.collection, table.schema, table.key_columns)

    def _begin(self, tables: Sequence[Following], export: Export) -> None:
        for following in tables:
            table = following.table
            following.rows = 0
            parts = self.pieces_of(table, export)
            load = self._loader.load(table.collection, parts, size=table.described.bytes)
            self._copies.append(_Copy(following, load, export))
        if not tables:
            export.close()

    def _forget(self, copy: _Copy) -> None:
        self._copies.remove(copy)
        if all(each.export is not copy.export for each in self._copies):
            copy.export.close()
