"""First copies of tables that are under way, each as of a snapshot.

awaited     its snapshot is being exported
copied      its pieces are read, here or by tasks
kept        its files are linked by the tick that is being made
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
    """A first copy that is under way."""

    following: Following
    load: SnapshotLoad
    export: Export


@dataclass(eq=False, slots=True)
class _Awaited:
    """Tables that will be copied as of a snapshot that is not there yet."""

    tables: list[Following]
    export: ExportUnderWay


class FirstCopies:
    """All first copies of one source."""

    def __init__(self, config: PostgresConfig, upstream: Upstream, *, tasks: int) -> None:
        self._config = config
        self._upstream = upstream
        self._tasks = config.snapshot_tasks or tasks
        self._memory: StateStore
        self._loader: SnapshotLoader
        self._copies: list[_Copy] = []
        self._awaited: list[_Awaited] = []

    def open(self, memory: StateStore, loader: SnapshotLoader) -> None:
        """Be ready to begin."""
        self._memory, self._loader = memory, loader

    def close(self) -> None:
        """Let go of the server."""
        for copy in self._copies:
            copy.load.abandon()
            copy.export.close()
        for awaited in self._awaited:
            awaited.export.give_up()
        self._copies, self._awaited = [], []

    def check(self, table: Table) -> None:
        """Check that a collection can hold the table.

        Raises:
            TableUntrackable: none can.
        """
        try:
            self._loader.check(table.collection, table.schema, table.key_columns)
        except UsageError as error:
            raise TableUntrackable(
                source=table.source, table=table.described.table_name, cause=error
            ) from error

    @property
    def under_way(self) -> bool:
        """Whether there are copies that are not kept yet."""
        return bool(self._copies or self._awaited)

    def running(self) -> Table | None:
        """A table that is being copied, if any is; may be asked by another thread."""
        return next(
            (each.following.table for each in tuple(self._copies) if not each.load.done()), None
        )

    def pieces_of(self, table: Table, export: Export) -> Sequence[Split]:
        """A table as of a snapshot, in pieces that can be read at the same time."""
        return splits(
            self._config.parameters,
            table,
            export.snapshot,
            tasks=self._tasks,
            server_version=self._upstream.control.server_version,
        )

    def begin(self, tables: Sequence[Following], export: Export) -> None:
        """Copy them as of a snapshot that was exported."""
        self._make_collections(tables)
        self._begin(tables, export)

    def begin_anew(self, unfinished: Sequence[Following]) -> None:
        """Copy them as of a snapshot of their own, once the server has made one.

        Messages are kept aside from now on. Those that committed before the snapshot,
        and those that were kept for an earlier copy, are not taken up.
        """
        for following in unfinished:
            following.attempt, following.truncate_order = self._upstream.another(), -1
            # The new snapshot contains the changes that could not be decoded, or reads past them.
            following.error, following.failure = "", None
        # Before anything is kept under that name; and nobody may take what was copied
        # before for complete any more.
        self._memory.put(notes.tables(unfinished))
        self._make_collections(unfinished)
        self._awaited.append(_Awaited([*unfinished], self._upstream.begin_export()))

    def begin_exported(self) -> None:
        """Begin the copies whose snapshots are there by now."""
        for awaited in [each for each in self._awaited if each.export.done()]:
            self._awaited.remove(awaited)
            export = awaited.export.result()
            for following in awaited.tables:
                following.snapshot_lsn = export.consistent_point
            self._begin(awaited.tables, export)

    def count(self) -> None:
        """Remember how many rows each copy has come to."""
        copying = [copy for copy in self._copies if not copy.load.done()]
        running = self._upstream.being_copied() if copying else {}
        for copy in copying:
            following = copy.following
            rows = copy.load.rows() + running.get(following.table.oid, 0)
            # A piece that has just ended is in neither of the two for a moment.
            following.rows = max(following.rows, rows)

    def done(self) -> list[_Copy]:
        """The copies that are finished and not kept yet."""
        return [each for each in self._copies if each.load.done()]

    def keep(self, tick: TickTransaction, reading: Reading, done: Sequence[_Copy]) -> None:
        """Link the files of copies that were finished when we looked for drift, and found none."""
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
        """Stop the copy of a table, wherever it is."""
        for copy in [each for each in self._copies if each.following is following]:
            copy.load.abandon()
            self._forget(copy)
        for awaited in self._awaited:
            awaited.tables = [each for each in awaited.tables if each is not following]

    def _make_collections(self, tables: Sequence[Following]) -> None:
        for table in (each.table for each in tables):
            # There may be files of an earlier attempt, which nobody has seen.
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
