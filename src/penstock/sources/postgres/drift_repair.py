"""Repair of catalog changes that the stream does not report, within one tick.

    read the stream to the bound ─► fingerprint ─► actions ─► resync ─► (again) ─► seal the tick

A resync moves the end of the tick to the consistent point of its snapshot. Changes that are
detected on the way are judged like all others, up to `COMPARE_ATTEMPTS` times.
"""

from typing import Final

from penstock.errors import InternalError
from penstock.sources.context import TickTransaction
from penstock.sources.postgres.catalog import PgTable
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.drift import compare
from penstock.sources.postgres.drift_actions import (
    AddTable,
    DriftAction,
    DriftContext,
    EvolveSchema,
    MarkErrored,
    Resync,
    choose_actions,
    schema_error,
)
from penstock.sources.postgres.errors import ComparisonRaced
from penstock.sources.postgres.fingerprint import Fingerprint, TableMark
from penstock.sources.postgres.resync import TableResync
from penstock.sources.postgres.server import SourceServer
from penstock.sources.postgres.stream_session import StreamSession
from penstock.sources.postgres.table_schema import SchemaMismatch
from penstock.sources.postgres.table_set import TableSet
from penstock.sources.postgres.tick_reader import TickReader
from penstock.telemetry import fields, logger

__all__ = ["DriftRepair"]

log = logger("sources.postgres")

COMPARE_ATTEMPTS: Final = 4
"""Number of comparisons in one tick after which a table that is altered in each is errored."""


class DriftRepair:
    """Detection and repair of drift in one tick."""

    def __init__(
        self,
        tick: TickTransaction,
        reader: TickReader,
        table_set: TableSet,
        stream: StreamSession,
        *,
        config: PostgresConfig,
        server: SourceServer,
    ) -> None:
        self._tick = tick
        self._reader = reader
        self._table_set = table_set
        self._stream = stream
        self._config = config
        self._resync = TableResync(tick, reader, table_set, stream, server)

    def run(self, bound: int) -> int:
        """Read up to `bound`, repair drift, and link finished snapshots; return the tick's end."""
        self._stream.read(self._reader, bound)
        snapshots = self._table_set.snapshots
        snapshots.start_exported()
        # A snapshot that finishes during the repair may have read a table after its rewrite.
        finished = snapshots.finished()
        bound = self._repair(bound)
        self._reader.errors |= snapshots.link(self._tick, finished)
        return bound

    def mark_errored_without_publication(self) -> bool:
        """Mark all tables errored if the publication is missing; return False if it exists."""
        table_set = self._table_set
        after = table_set.inspect()
        if table_set.fingerprint is None or after.publication is not None:
            return False
        for action in self._due_actions(table_set.fingerprint, after):
            self._apply(action)
        table_set.fingerprint, table_set.resync_request = after, None
        return True

    def _repair(self, bound: int) -> int:
        tables, compared = self._table_set.tables, set[int]()
        for _ in range(COMPARE_ATTEMPTS):
            bound, actions = self._stable_actions(bound, compared)
            for action in actions:
                self._apply(action)
            to_compare = [tables[action.oid] for action in actions if isinstance(action, Resync)]
            if not to_compare:
                break
            bound, oids = self._resync.run(to_compare)
            compared |= oids
            if len(oids) == len(to_compare):
                break
        else:
            for oid in [oid for oid in self._reader.skipped if oid not in compared]:
                error = ComparisonRaced(
                    location=self._table_set.location,
                    source=self._table_set.name,
                    table=tables[oid].table.described.table_name,
                    attempts=COMPARE_ATTEMPTS,
                )
                self._reader.mark_errored(tables[oid], error)
        self._table_set.resync_request = None
        return bound

    def _stable_actions(self, bound: int, compared: set[int]) -> tuple[int, list[DriftAction]]:
        """Return the position up to which the stream was read, and the actions to apply.

        A table in `compared` is compared again only if a mismatch was found since.
        """
        table_set = self._table_set
        before = table_set.fingerprint
        if before is None:
            raise InternalError(f'source "{table_set.name}" has no fingerprint')
        after = table_set.inspect()
        actions = self._new_actions(before, after, compared)
        if actions:
            # The message that explains a change may be in the stream beyond the bound.
            while True:
                bound = max(bound, self._stream.probe())
                self._stream.read(self._reader, bound)
                last, after = after, table_set.inspect()
                if last == after:
                    break
            actions = self._new_actions(before, after, compared)
        table_set.review_untrackable(before, after)
        table_set.fingerprint = after
        return bound, actions

    def _new_actions(
        self, before: Fingerprint, after: Fingerprint, compared: set[int]
    ) -> list[DriftAction]:
        return [
            action
            for action in self._due_actions(before, after)
            if not isinstance(action, Resync)
            or action.oid not in compared
            or action.oid in self._reader.skipped
        ]

    def _due_actions(self, before: Fingerprint, after: Fingerprint) -> list[DriftAction]:
        tables, request = self._table_set.tables, self._table_set.resync_request
        intact = {
            oid: tracked.table for oid, tracked in tables.items() if not tracked.state.is_errored
        }
        context = DriftContext(
            self._table_set.location,
            self._config.publication,
            intact,
            {oid for oid in intact if not tables[oid].state.is_visible},
            self._reader.truncated_by,
        )
        actions = {action.oid: action for action in choose_actions(compare(before, after), context)}
        reasons: dict[int, str] = {
            # The columns were learned from the stream, and changed back before this inspection.
            oid: "its columns changed for a while"
            for oid, table in intact.items()
            if oid not in actions and not _has_same_columns(table.described, after.tables.get(oid))
        }
        # Messages of a mismatched table were skipped, so a new description alone does not suffice.
        reasons |= {oid: reason for oid, reason in self._reader.skipped.items() if oid in intact}
        if request is not None:
            reasons |= {
                oid: "it was asked for"
                for oid, tracked in tables.items()
                if tracked.state.is_visible and (not request or tracked.table.name in request)
            }
        for oid, reason in reasons.items():
            if not isinstance(actions.get(oid), MarkErrored | Resync):
                actions[oid] = Resync(oid, reason)
        return [actions[oid] for oid in sorted(actions)]

    def _apply(self, action: DriftAction) -> None:
        table_set, reader = self._table_set, self._reader
        match action:
            case MarkErrored(oid=oid, error=error):
                reader.mark_errored(table_set.tables[oid], error)
            case EvolveSchema(oid=oid):
                tracked, described = table_set.tables[oid], table_set.describe(oid)
                if described is None:
                    return  # Dropped since; the next inspection detects it.
                fitted = table_set.fit(tracked, described)
                if isinstance(fitted, SchemaMismatch):
                    error = schema_error(tracked.table, fitted, location=table_set.location)
                    reader.mark_errored(tracked, error)
                else:
                    reader.adopt(tracked, fitted)
            case Resync(oid=oid, reason=reason):
                tracked = table_set.tables[oid]
                reader.skip_until_resync(tracked, reason)
                log.info(
                    "table is compared",
                    extra=fields(source=table_set.name, table=tracked.table.name, reason=reason),
                )
            case AddTable(oid=oid, name=name):
                table_set.add(oid, name)


def _has_same_columns(described: PgTable, mark: TableMark | None) -> bool:
    """Return whether a description has the same columns as a fingerprint."""
    return mark is None or [
        (column.number, column.name, column.type.oid, column.typmod) for column in described.columns
    ] == [(column.number, column.name, column.type, column.typmod) for column in mark.columns]
