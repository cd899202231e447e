"""Tracked tables of a source, and their descriptions in the catalog.

The table set decides which tables are tracked, and which schema a table has after a catalog
change. It neither reads the stream nor writes a tick: `tick_reader.py` does both, and
`drift_repair.py` acts on catalog changes that the stream does not report.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.errors import DefiniteError, InternalError, UsageError
from penstock.sources.postgres.catalog import PgTable, describe, published_tables
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.drift_actions import schema_error
from penstock.sources.postgres.errors import TableMissing, TableUntrackable
from penstock.sources.postgres.fingerprint import Fingerprint, read_fingerprint
from penstock.sources.postgres.pgoutput import Relation
from penstock.sources.postgres.server import SourceServer
from penstock.sources.postgres.snapshot_export import SnapshotExport
from penstock.sources.postgres.snapshot_tracker import SnapshotTracker
from penstock.sources.postgres.table_schema import (
    SchemaMismatch,
    Table,
    build_table,
    evolve_table,
    matches_relation,
)
from penstock.sources.postgres.table_state import Phase, TableEvent, TableState
from penstock.sources.postgres.tracked_table import TrackedTable
from penstock.telemetry import fields, logger

__all__ = ["TableSet", "check_collections"]

log = logger("sources.postgres")


class TableSet:
    """All tables of one source."""

    def __init__(
        self, name: str, config: PostgresConfig, server: SourceServer, *, location: str, tasks: int
    ) -> None:
        """Create an empty set of tables; `start` or `resume` fills it."""
        self.name = name
        self.location = location
        self._config = config
        self._server = server
        self.snapshots = SnapshotTracker(config, server, tasks=tasks)
        self.tables: dict[int, TrackedTable] = {}
        self.fingerprint: Fingerprint | None = None
        """Catalog state of the last drift check."""

        self.resync_request: set[str] | None = None
        """Tables to compare at the next tick: empty for all, None for no request."""

        self.comparison = ""
        """Comparison in progress, for display."""

        self.removed_oids: set[int] = set()
        """Oids of tables that another table replaced or that are no longer published."""

    # Start.

    def read_first_fingerprint(self) -> Fingerprint:
        """Read the fingerprint that the first tick compares with.

        SUBTLE: it is read before the snapshot is exported. A COPY reads a table that is rewritten
        after the export as empty, so the first tick must detect the rewrite.
        """
        self.tables = {}
        self.fingerprint = self.inspect()
        return self.fingerprint

    def start(self, export: SnapshotExport) -> None:
        """Track every selected table from a snapshot on."""
        self.tables = {
            described.oid: TrackedTable(
                self.build(described),
                TableState.LOADING,
                export.consistent_point,
                attempt=self._server.unique_name(),
            )
            for described in self._read_selected()
        }
        self.select_trackable(self.tables.values())

    def resume(self, tables: Sequence[TrackedTable], last: Fingerprint | None) -> None:
        """Resume tracking the tables of an earlier run.

        Raises:
            UsageError: the options of a table in the file have changed since it was first
                tracked, or two tables have the same collection.
        """
        check_collections(self.name, self.location, [tracked.table for tracked in tables])
        for tracked in tables:
            if not tracked.state.is_errored:
                self._check_spec(tracked.table)
        self.tables = {tracked.table.oid: tracked for tracked in tables}
        self.fingerprint = last

    def select_trackable(self, tables: Iterable[TrackedTable]) -> list[TrackedTable]:
        """Return the tables that a collection can hold, and mark the others untrackable."""
        trackable = []
        for tracked in tables:
            try:
                self.snapshots.check(tracked.table)
            except TableUntrackable as error:
                log.warning(
                    "table cannot be tracked",
                    extra=fields(
                        source=self.name,
                        table=tracked.table.name,
                        error=str(error),
                        detail=error.detail,
                    ),
                )
                tracked.apply(TableEvent.COLLECTION_REJECTED, error)
            else:
                trackable.append(tracked)
        return trackable

    def _check_spec(self, table: Table) -> None:
        name, spec = table.described.table_name, self._config.spec_of(table.described.table_name)
        subject = f'table "{name}" of source "{self.name}"'
        if spec is None:
            raise UsageError(
                f"{subject} is tracked, but missing in the file",
                hint="Add it to tables again. To stop tracking it, drop it from the publication.",
            )
        for option, requested, tracked in (
            ("exclude", spec.exclude, table.spec.exclude),
            ("text", spec.text, table.spec.text),
        ):
            if {*requested} != {*tracked}:
                raise UsageError(
                    f"{subject} is tracked with {option}: [{', '.join(tracked)}], but the file has "
                    f"{option}: [{', '.join(requested)}]",
                    detail="The option decides the columns of the collection, which are fixed.",
                    hint="Restore the option. To select other columns, add the table to another "
                    "source.",
                )

    # Status.

    @property
    def pending_names(self) -> set[str]:
        """Return the names of the pending changes of tables that are not visible yet."""
        return {
            tracked.pending
            for tracked in self.tables.values()
            if tracked.state.phase in (Phase.LOADING, Phase.LOADED)
        }

    @property
    def visible_collections(self) -> list[str]:
        """Return the collections of visible tables."""
        return [
            tracked.table.collection for tracked in self.tables.values() if tracked.state.is_visible
        ]

    @property
    def tracks_any(self) -> bool:
        """Return whether a collection can hold at least one of the tables."""
        return any(tracked.state.has_collection for tracked in self.tables.values())

    @property
    def is_loaded(self) -> bool:
        """Return whether every table is either visible or errored."""
        return all(
            tracked.state.phase in (Phase.LIVE, Phase.ERRORED) for tracked in self.tables.values()
        )

    def current_wait(self) -> str:
        """Return the operation in progress, or an empty string; safe from another thread."""
        loading = self.snapshots.current_table()
        return self.comparison or (f"the initial snapshot of {loading.name}" if loading else "")

    def status(self) -> list[Mapping[str, Any]]:
        """Return the status of each table, for display."""
        self.snapshots.update_row_counts()
        return [
            {
                "name": tracked.table.name,
                "collection": tracked.table.collection,
                "phase": str(tracked.state.phase),
                "rows": tracked.rows,
                "estimated_rows": tracked.table.described.estimated_rows,
                "bytes": tracked.table.described.bytes,
                "error": None if tracked.error is None else str(tracked.error),
                "error_detail": "" if tracked.error is None else tracked.error.detail,
                "error_hint": "" if tracked.error is None else tracked.error.hint,
            }
            for tracked in self.tables.values()
        ]

    # Addition and removal of tables.

    def add_named_tables(self) -> None:
        """Add tables that were published before and are newly named in the file."""
        for described in self._read_selected():
            if described.oid not in self.tables:
                self.add(described.oid, str(described.table_name))

    def add(self, oid: int, name: str) -> None:
        """Track a published table that the file selects, and start its snapshot."""
        if oid in self.tables:
            if not self.tables[oid].state.is_errored:
                return  # The table was stored, but not the tick that added it.
            log.warning(
                "table is published again; to follow it again, resync it",
                extra=fields(source=self.name, table=name),
            )
            return
        described = self.describe(oid)
        if described is None:
            return
        if self._config.spec_of(described.table_name) is None:
            log.warning(
                "table is published and not followed",
                extra=fields(source=self.name, table=name),
            )
            return
        tracked = TrackedTable(self.build(described), TableState.LOADING)
        if tracked.table.collection in {other.table.collection for other in self.tables.values()}:
            log.warning(
                "table has the name of another that was followed; to take its place, resync it",
                extra=fields(source=self.name, table=name),
            )
            return
        self.tables[oid] = tracked
        if self.select_trackable([tracked]):
            self.snapshots.restart([tracked])

    def review_untrackable(self, before: Fingerprint, after: Fingerprint) -> None:
        """Remove untrackable tables that are no longer published, and retry changed ones."""
        untrackable = [
            oid for oid, tracked in self.tables.items() if tracked.state is TableState.UNTRACKABLE
        ]
        for oid in untrackable:
            mark = after.tables.get(oid)
            is_published = mark is not None and mark.published
            if is_published and mark == before.tables.get(oid):
                continue
            self.tables.pop(oid).apply(TableEvent.REMOVED)
            self.removed_oids.add(oid)
            if mark is not None and is_published:
                self.add(oid, str(mark.name))

    # Requests for a resync.

    def request_resync(self, tables: Sequence[str]) -> None:
        """Request a comparison of these tables at the next tick; of all tables if none is named.

        Raises:
            UsageError: a named table does not exist.
            DefiniteError: a named table cannot be tracked as it is now.
        """
        by_name = {tracked.table.name: tracked for tracked in self.tables.values()}
        for name in tables:
            if name not in by_name:
                raise UsageError(
                    f'source "{self.name}" does not follow a table "{name}"',
                    hint=f"It follows {', '.join(sorted(by_name))}.",
                )
        for name, tracked in by_name.items():
            if tables and name not in tables:
                continue
            if tracked.state is TableState.UNTRACKABLE:
                if tables and tracked.error is not None:
                    raise tracked.error
            elif tracked.state.is_errored:
                try:
                    self._reattach(tracked)
                except DefiniteError as error:
                    if tables:
                        raise
                    log.warning(
                        "table stays in error", extra=fields(source=self.name, error=str(error))
                    )
        self.resync_request = set(tables)

    def _reattach(self, tracked: TrackedTable) -> None:
        """Check that an errored table can be tracked or loaded again.

        If the table was dropped, a published table of the same name replaces it.
        """
        table = tracked.table
        described = self.describe(table.oid)
        if described is None:
            published = published_tables(self._server.control, self._config.publication)
            described = next(
                (
                    other
                    for other in published
                    if other.table_name == table.described.table_name
                    and other.oid not in self.tables
                ),
                None,
            )
        if described is None:
            raise TableMissing(
                location=self.location,
                source=self.name,
                table=table.described.table_name,
                publication=self._config.publication,
                dropped=True,
            )
        fitted = self.fit(tracked, described)
        if isinstance(fitted, SchemaMismatch) and not fitted.replaceable:
            raise schema_error(table, fitted, location=self.location)
        if described.oid != table.oid:
            del self.tables[table.oid]
            self.removed_oids.add(table.oid)
            tracked.table = replace(table, oid=described.oid)
            self.tables[described.oid] = tracked

    # Catalog access.

    def inspect(self) -> Fingerprint:
        """Return the fingerprint of the catalog now."""
        return read_fingerprint(
            self._server.control, self._config.publication, self.tables, last=self.fingerprint
        )

    def is_unchanged(self, oid: int) -> bool:
        """Return whether nothing happened to a table since the last drift check."""
        # SUBTLE: a COPY that starts after a rewrite, with a snapshot from before it, reads the
        # table as empty. So nothing may have happened to the table since.
        known = self.fingerprint
        return known is not None and self.inspect().tables.get(oid) == known.tables.get(oid)

    def describe(self, oid: int) -> PgTable | None:
        """Return the catalog description of a table; None if the table does not exist."""
        tables = describe(self._server.control, self._config.publication, [oid])
        return next((described for described in tables if described.oid == oid), None)

    def fit(self, tracked: TrackedTable, described: PgTable) -> Table | SchemaMismatch:
        """Return the table as it is tracked from now on, or the schema mismatch."""
        table = tracked.table
        if described.table_name != table.described.table_name:
            return SchemaMismatch(f"it is now {described.table_name}")
        if not described.published:
            return SchemaMismatch("it is not published")
        if described.replica_identity != "f" and not described.identity:
            return SchemaMismatch("it has no replica identity")
        if not tracked.state.is_visible:
            return build_table(self.name, described, table.spec, collection=table.collection)
        return evolve_table(table, described, accepted=tracked.state.is_errored)

    def fit_relation(self, tracked: TrackedTable, relation: Relation) -> Table | None:
        """Return the table for the columns of a Relation message.

        Return None if the catalog has other columns, or the stored rows do not fit them.
        """
        described = self.describe(tracked.table.oid)
        if described is None:
            return None
        fitted = self.fit(tracked, described)
        if isinstance(fitted, SchemaMismatch) or not matches_relation(fitted, relation):
            return None
        numbers = tracked.table.numbers
        if tracked.state.is_visible and fitted.numbers != {**fitted.numbers, **numbers}:
            return None  # A column was dropped or replaced: rows may hold any value.
        return fitted

    def build(self, described: PgTable) -> Table:
        """Return a table with a new collection."""
        spec = self._config.spec_of(described.table_name)
        if spec is None:
            raise InternalError(f'table "{described.table_name}" is not selected')
        return build_table(self.name, described, spec)

    def _read_selected(self) -> list[PgTable]:
        published = published_tables(self._server.control, self._config.publication)
        return [
            described
            for described in published
            if self._config.spec_of(described.table_name) is not None
        ]


def check_collections(source: str, location: str, tables: Sequence[Table]) -> None:
    """Reject state of an earlier version, which allowed two tables to share a collection.

    Raises:
        UsageError: two of the tables have the same collection.
    """
    owners: dict[str, Table] = {}
    for table in tables:
        other = owners.setdefault(table.collection, table)
        if other is not table:
            raise UsageError(
                f'tables {other.name} and {table.name} of source "{source}" share the collection '
                f'"{table.collection}"',
                detail="The collection holds rows of both tables. An earlier version did not quote "
                "names with dots.",
                hint=f"Drop the source (penstock drop {location} {source}) and start it again: "
                "each table then has its own collection.",
            )
