"""Application of the replication stream to one tick, table by table.

The state of a table (`table_state.py`) decides the treatment of its messages:

    hidden      not visible yet: store messages as pending changes
    live        turn messages into deletes and inserts
    errored     ignore messages; every read of the collection fails

Messages that contain the complete old row are resolved as they arrive. Messages that
contain only the key of the old row are buffered up to `GATHER_BYTES` and resolved
together, with one lookup of the old rows. The lookup is split if the old rows are large:
a buffered delete is only a key, but its lookup returns a complete row.
"""

from dataclasses import replace
from typing import Final

import pyarrow as pa

from penstock.errors import DefiniteError, InternalError
from penstock.sources.context import TickTransaction
from penstock.sources.postgres.old_rows import Changes, concat_changes, resolve, split_changes
from penstock.sources.postgres.pending_changes import (
    decode_changes,
    encode_changes,
    encode_truncate,
    order_bounds,
)
from penstock.sources.postgres.pgoutput import Chunk, Relation, Truncate
from penstock.sources.postgres.stream_reader import Run, StreamTransaction, decode
from penstock.sources.postgres.table_schema import Table, default_values, matches_relation
from penstock.sources.postgres.table_set import TableSet
from penstock.sources.postgres.table_state import Phase, TableEvent, TableState
from penstock.sources.postgres.tracked_table import TrackedTable
from penstock.telemetry import fields, logger

__all__ = ["TickReader"]

log = logger("sources.postgres")

GATHER_BYTES: Final = 64 << 20
"""Bytes of buffered messages of a table above which they are resolved."""

FOUND_BYTES: Final = 64 << 20
"""Upper bound of the bytes of old rows per lookup, estimated from earlier lookups."""

FIRST_LOOKUP: Final = 1_000
"""Maximum number of rows per lookup while the row size is unknown."""


class TickReader:
    """Reader of the stream for one tick. Implements `StreamHandler`."""

    def __init__(
        self,
        tick: TickTransaction,
        table_set: TableSet,
        *,
        relations: dict[int, Relation],
        order: int,
    ) -> None:
        self._tick = tick
        self._table_set = table_set
        self._relations = relations
        """Last Relation message of the connection by table oid, including untracked tables."""

        self.order = order
        """Stream order of the next message that is stored as a pending change."""

        self.truncated_by: dict[int, set[int]] = {}
        """Ids of the transactions that truncated a table, by table oid."""

        self.skipped: dict[int, str] = {}
        """Reasons for a resync, by table oid. Messages of these tables are ignored."""

        self.errors: dict[int, DefiniteError] = {}
        """Errors of messages that could not be applied, by table oid.

        A schema change without a message may explain the error. If the drift check finds no
        such change, the table fails at the end of the tick.
        """

    def relation(self, relation: Relation) -> None:
        """Store the column layout of a table; it is checked at the next row message."""
        self._relations[relation.oid] = relation

    def rows(self, chunk: Chunk, run: Run) -> None:
        """Apply row changes of one table, or store them as pending changes."""
        tracked = self._table_set.tables.get(run.relation)
        if tracked is None or not self._is_active(tracked):
            return
        relation = self._relations[run.relation]
        if tracked.relation is not relation and not self._accept_relation(tracked, relation):
            return
        try:
            changes = decode(chunk, run, tracked.table, len(relation.columns))
        except DefiniteError as error:
            if tracked.state.is_visible:
                self.errors[run.relation] = error
            else:
                # SUBTLE: a TRUNCATE before the collection is visible makes the value irrelevant.
                tracked.apply(TableEvent.CHANGE_REJECTED, error)
            return
        if tracked.state is TableState.LIVE:
            self._apply_or_buffer(tracked, changes)
        else:
            rows = encode_changes(changes, run.commit_lsns(chunk), order=self.order)
            self._tick.append_side_rows(tracked.pending, rows)
            self.order += len(changes)

    def truncated(self, truncate: Truncate, transaction: StreamTransaction) -> None:
        """Truncate the collections of the tables, or store the TRUNCATE as a pending change."""
        for oid in truncate.relations:
            self.truncated_by.setdefault(oid, set()).add(transaction.xid)
            tracked = self._table_set.tables.get(oid)
            if tracked is None or tracked.state.is_errored or oid in self.skipped:
                continue
            tracked.apply(TableEvent.TRUNCATED)
            if tracked.state is TableState.LIVE:
                # Earlier changes need not be resolved, and their errors no longer matter.
                self.errors.pop(oid, None)
                tracked.drop_buffered()
                self._tick.truncate(tracked.table.collection)
            else:
                rows = encode_truncate(
                    tracked.table.schema, transaction.commit_lsn, order=self.order
                )
                self._tick.append_side_rows(tracked.pending, rows)
                tracked.truncate_order = self.order
                self.order += 1

    def skip_until_resync(self, tracked: TrackedTable, reason: str) -> None:
        """Ignore messages of the table until its resync, which includes their effects."""
        tracked.drop_buffered()
        self.skipped.setdefault(tracked.table.oid, reason)

    def end_skip(self, tracked: TrackedTable) -> None:
        """Apply messages of the table again after its resync."""
        self.skipped.pop(tracked.table.oid, None)
        self.errors.pop(tracked.table.oid, None)

    def make_tables_visible(self, bound: int) -> None:
        """Make all loaded tables visible together, unless one is not complete at `bound`."""
        tables = self._table_set.tables
        for oid in [oid for oid in self.errors if not tables[oid].state.is_visible]:
            self._fail(tables[oid], self.errors.pop(oid))
        hidden = [
            tracked
            for tracked in tables.values()
            if tracked.state.has_collection and not tracked.state.is_visible
        ]
        if all(_is_complete(tracked, bound) for tracked in hidden):
            for tracked in hidden:
                self._make_visible(tracked)

    def finish(self) -> None:
        """Resolve all buffered messages, and mark broken tables errored."""
        for tracked in self._table_set.tables.values():
            self.flush(tracked)
        for oid, error in self.errors.items():
            self._fail(self._table_set.tables[oid], error)
        self.errors = {}

    def flush(self, tracked: TrackedTable) -> None:
        """Resolve the buffered messages of one table."""
        if tracked.buffered:
            changes = concat_changes(tracked.buffered)
            tracked.drop_buffered()
            self._resolve(tracked, changes)

    def _make_visible(self, tracked: TrackedTable) -> None:
        """Make a loaded table visible at this tick, with its pending changes applied."""
        table = tracked.table
        self._tick.begin(table.collection)
        tracked.apply(TableEvent.MADE_VISIBLE)
        if tracked.error is not None:
            self._tick.fail(table.collection, tracked.error)
            self._tick.drop_side_rows(tracked.pending)
            return
        last = -1
        for rows in self._tick.side_rows(tracked.pending):
            if not rows.num_rows:
                continue
            first, after = order_bounds(rows)
            if first <= last:
                raise InternalError(f'pending changes of table "{table.name}" are out of order')
            last = after
            for changes in decode_changes(
                rows, from_lsn=tracked.snapshot_lsn, from_order=tracked.truncate_order
            ):
                if table.oid in self.errors:
                    break
                if changes is None:
                    self._tick.truncate(table.collection)
                else:
                    self._resolve(tracked, changes)
        self._tick.drop_side_rows(tracked.pending)

    def mark_errored(self, tracked: TrackedTable, error: DefiniteError) -> None:
        """Mark a table errored from this tick on, and end its snapshot and its resync."""
        log.warning(
            "table is in error", extra=fields(source=tracked.table.source, error=str(error))
        )
        self._table_set.snapshots.abandon(tracked)
        self.end_skip(tracked)
        self._fail(tracked, error)

    def adopt(self, tracked: TrackedTable, table: Table) -> None:
        """Use the new description of a table, and extend its collection if columns were added."""
        before = tracked.table
        if table.schema.equals(before.schema, check_metadata=True):
            if (table.columns, table.key) != (before.columns, before.key):
                self.flush(tracked)
            tracked.table = table
        elif not tracked.state.is_visible:
            self.restart_snapshot(tracked, table)
        else:
            self.flush(tracked)
            tracked.table = table
            added = table.columns[len(before.columns) :]
            self._tick.grow(table.collection, table.schema, default_values(added))

    def restart_snapshot(self, tracked: TrackedTable, table: Table) -> None:
        """Restart the initial snapshot of a table that changed during it."""
        log.info(
            "table changed during snapshot; restarting",
            extra=fields(source=table.source, table=table.name),
        )
        self._table_set.snapshots.abandon(tracked)
        self.end_skip(tracked)
        self._tick.drop_side_rows(tracked.pending)
        tracked.table = table
        self._table_set.snapshots.restart([tracked])

    def _fail(self, tracked: TrackedTable, error: DefiniteError) -> None:
        """Mark the table errored. A visible collection fails every read from this tick on."""
        tracked.drop_buffered()
        if tracked.state is TableState.LIVE:
            self._tick.fail(tracked.table.collection, error)
        tracked.apply(TableEvent.FAILED, error)

    def _is_active(self, tracked: TrackedTable) -> bool:
        """Return whether messages of a table are applied or stored."""
        oid = tracked.table.oid
        is_skipped = oid in self.skipped or oid in self.errors
        return tracked.state.accepts_changes and not is_skipped

    def _accept_relation(self, tracked: TrackedTable, relation: Relation) -> bool:
        """Adopt the column layout of `relation`. Return whether that is possible."""
        if not matches_relation(tracked.table, relation):
            fitted = self._table_set.fit_relation(tracked, relation)
            if fitted is None:
                self.skip_until_resync(tracked, "its messages have other columns than before")
                return False
            self.adopt(tracked, fitted)
        tracked.relation = relation
        table = tracked.table
        named = tuple(column.name for column in relation.columns if column.key)
        if relation.replica_identity in "di" and named and set(named) != set(table.key):
            # Earlier messages identify old rows by the previous key.
            self.flush(tracked)
            tracked.table = replace(tracked.table, key=named)
        return True

    def _apply_or_buffer(self, tracked: TrackedTable, changes: Changes) -> None:
        is_whole = not ((changes.kind != ord("I")) & ~changes.whole).any()
        if is_whole and not tracked.buffered and tracked.table.described.replica_identity == "f":
            self._resolve(tracked, changes)
            return
        tracked.buffered.append(changes)
        tracked.buffered_bytes += changes.new.nbytes + changes.old.nbytes
        if tracked.buffered_bytes > GATHER_BYTES:
            self.flush(tracked)

    def _resolve(self, tracked: TrackedTable, changes: Changes) -> None:
        """Apply changes to the tick, in parts whose old rows fit into memory."""

        def most() -> int:
            return FOUND_BYTES // tracked.row_bytes if tracked.row_bytes else FIRST_LOOKUP

        for part in split_changes(changes, tracked.table.key, most):
            if not self._resolve_part(tracked, part):
                return
            tracked.rows += len(part)

    def _resolve_part(self, tracked: TrackedTable, changes: Changes) -> bool:
        table = tracked.table

        def lookup(keys: pa.Table) -> pa.Table:
            rows = self._tick.lookup(table.collection, keys)
            # A few small rows do not predict small rows: reduce the estimate by half at most.
            row_bytes = 1 + rows.nbytes // keys.num_rows
            tracked.row_bytes = max(row_bytes, tracked.row_bytes // 2)
            return rows

        try:
            resolved = resolve(changes, table.key, lookup, table=table.name)
        except DefiniteError as error:
            self.errors[table.oid] = error
            return False
        self._tick.change(table.collection, deletes=resolved.deletes, inserts=resolved.inserts)
        return True


def _is_complete(tracked: TrackedTable, bound: int) -> bool:
    """Return whether a hidden table can become visible in a tick that ends at `bound`."""
    match tracked.state.phase:
        case Phase.LOADING:
            return False
        case Phase.LOADED:
            return tracked.snapshot_lsn <= bound
        case _:
            return True
