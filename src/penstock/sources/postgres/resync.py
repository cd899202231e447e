"""Resync: tables compared with their collections as of one snapshot, and repaired in the same tick.

The tick is cut exactly at the consistent point of a temporary slot. The collection as of that point
is compared with the slot's snapshot, and only the differences are committed. A table that cannot be
represented by its collection is loaded into a new collection instead, if a user requested that.
"""

from collections.abc import Sequence

from penstock.errors import DefiniteError
from penstock.sources.context import TickTransaction
from penstock.sources.postgres.catalog import PgTable
from penstock.sources.postgres.drift_actions import schema_error
from penstock.sources.postgres.server import SourceServer
from penstock.sources.postgres.snapshot_export import SnapshotExport
from penstock.sources.postgres.stream_session import StreamSession
from penstock.sources.postgres.table_schema import SchemaMismatch
from penstock.sources.postgres.table_set import TableSet
from penstock.sources.postgres.table_state import TableEvent
from penstock.sources.postgres.tick_reader import TickReader
from penstock.sources.postgres.tracked_table import TrackedTable
from penstock.telemetry import fields, logger

__all__ = ["TableResync"]

log = logger("sources.postgres")


class TableResync:
    """Comparison of tables with their collections in one tick."""

    def __init__(
        self,
        tick: TickTransaction,
        reader: TickReader,
        table_set: TableSet,
        stream: StreamSession,
        server: SourceServer,
    ) -> None:
        self._tick = tick
        self._reader = reader
        self._table_set = table_set
        self._stream = stream
        self._server = server

    def run(self, tables: Sequence[TrackedTable]) -> tuple[int, set[int]]:
        """Make collections equal to their tables, as of a snapshot that becomes the tick's end.

        Return the end and the oids of the compared tables. The set is empty if another change was
        detected, because its action is not known yet.
        """
        table_set, reader = self._table_set, self._reader
        export = self._server.export()
        try:
            self._stream.read(reader, export.consistent_point)
            oids = {tracked.table.oid for tracked in tables}
            # SUBTLE: messages read up to the snapshot may belong to other tables, and the creation
            # of a slot can take long. So these changes are judged like all others.
            if not oids >= {*reader.skipped} or table_set.inspect() != table_set.fingerprint:
                return export.consistent_point, set()
            compared = [tracked for tracked in tables if self._resync(tracked, export)]
        finally:
            export.close()
        return export.consistent_point, {tracked.table.oid for tracked in compared}

    def _resync(self, tracked: TrackedTable, export: SnapshotExport) -> bool:
        """Resync one table; return False if the table was changed during it."""
        table_set, reader = self._table_set, self._reader
        described = table_set.describe(tracked.table.oid)
        if described is None:
            return False  # Dropped since; the next inspection detects it.
        fitted = table_set.fit(tracked, described)
        if isinstance(fitted, SchemaMismatch):
            if not tracked.state.is_errored:
                error = schema_error(tracked.table, fitted, location=table_set.location)
                reader.mark_errored(tracked, error)
            elif fitted.replaceable:
                return self._replace(tracked, described, export)
            return True
        if not tracked.state.is_visible:
            reader.restart_snapshot(tracked, fitted)
            return True
        reader.adopt(tracked, fitted)
        return self._compare(tracked, export)

    def _compare(self, tracked: TrackedTable, export: SnapshotExport) -> bool:
        """Compare a visible collection, and repair it."""
        table_set, reader, table = self._table_set, self._reader, tracked.table
        splits = table_set.snapshots.splits_of(table, export)
        table_set.comparison = f"the comparison of {table.name} with its collection"
        try:
            with self._tick.compare(
                table.collection, splits, size=table.described.bytes
            ) as write_differences:
                if not table_set.is_unchanged(table.oid):
                    return False
                differing = write_differences()
        except DefiniteError as error:
            if not table_set.is_unchanged(table.oid):
                return False
            reader.mark_errored(tracked, error)
            return True
        finally:
            table_set.comparison = ""
        reader.end_skip(tracked)
        if tracked.state.is_errored:
            self._tick.recover(table.collection)
            tracked.apply(TableEvent.RECOVERED)
        log.info(
            "table was compared",
            extra=fields(source=table_set.name, table=table.name, differing=differing),
        )
        return True

    def _replace(self, tracked: TrackedTable, described: PgTable, export: SnapshotExport) -> bool:
        """Load an errored table into a new collection."""
        table_set, reader = self._table_set, self._reader
        table = table_set.build(described)
        splits = table_set.snapshots.splits_of(table, export)
        table_set.comparison = f"the snapshot of {table.name} for its new collection"
        try:
            table_set.snapshots.check(table)
            with self._tick.replace(
                table.collection, table.schema, table.key_columns, splits, size=described.bytes
            ) as switch:
                if not table_set.is_unchanged(table.oid):
                    return False
                rows = switch()
        except DefiniteError as error:
            if not table_set.is_unchanged(table.oid):
                return False
            log.warning(
                "table stays in error", extra=fields(source=table_set.name, error=str(error))
            )
            reader.end_skip(tracked)
            return True
        finally:
            table_set.comparison = ""
        reader.end_skip(tracked)
        tracked.table, tracked.relation, tracked.rows = table, None, rows
        tracked.apply(TableEvent.RECOVERED)
        log.info(
            "table was copied into a new collection",
            extra=fields(source=table_set.name, table=table.name, rows=rows),
        )
        return True
