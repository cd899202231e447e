"""Postgres source: initial snapshot, then every transaction, exactly once.

All tables share one slot and one stream. The slot is read from the start. Messages of
tables whose snapshot is in progress are stored as pending changes. All tables become
visible together, at a tick after the consistent point of every snapshot (hazard B2).
Before a tick is sealed, a catalog fingerprint detects changes that cause no message. The
same tick repairs them (`drift_actions.py`).

    open         check identity, slot and tables; start snapshots; start the stream
    read_into    read up to the bound; add finished snapshots; detect and repair drift

The server may be unable to send the next changes, because the slot is lost or the server's
history has diverged. The source then stores this fact first and creates a new slot. At
the next tick it compares and repairs every table (hazards B4, B5).
"""

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from penstock.clock import Clock
from penstock.deadlines import answer_timeout_s
from penstock.errors import DefiniteError, InternalError, TransientError
from penstock.failpoints import Failpoint, hit
from penstock.progress import SINGLE_PARTITION, Frontier
from penstock.sources.context import SnapshotLoader, StateStore, TickTransaction
from penstock.sources.postgres import state
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.discovery import outline_tables
from penstock.sources.postgres.drift_repair import DriftRepair
from penstock.sources.postgres.errors import HistoryRewound, SlotInvalidated, SlotLost, SlotPassed
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.server import SourceServer
from penstock.sources.postgres.slots import SlotState
from penstock.sources.postgres.stream_reader import StreamTransaction, TransactionMismatch
from penstock.sources.postgres.stream_session import SessionState, StreamSession
from penstock.sources.postgres.table_set import TableSet
from penstock.sources.postgres.table_state import Phase, TableEvent, TableState
from penstock.sources.postgres.tick_reader import TickReader
from penstock.sources.postgres.tracked_table import TrackedTable
from penstock.sources.source import CollectionOutline, Probe
from penstock.telemetry import fields, logger

__all__ = ["PostgresSource"]

log = logger("sources.postgres")

LOST: Final = (SlotLost, SlotInvalidated, SlotPassed, HistoryRewound)
"""Errors after which unread changes can never be read."""

NO_SUCH_OBJECT: Final = "42704"
"""SQLSTATE for a change from a time when the publication did not exist."""

CHUNK_BYTES: Final = 256 << 20
"""Maximum bytes of WAL read in one tick during catch-up."""


class PostgresSource:
    """Source for one database of a Postgres server."""

    kind = "postgres"

    def __init__(
        self,
        name: str,
        config: PostgresConfig,
        *,
        location: str,
        clock: Clock,
        rng: random.Random,
        tasks: int,
    ) -> None:
        self.name = name
        self._config = config
        self._upstream = SourceServer(name, config, location=location, clock=clock, rng=rng)
        self._state_store: StateStore
        self._tables = TableSet(name, config, self._upstream, location=location, tasks=tasks)
        self._stream = StreamSession(name, self._upstream, clock)
        self._bound = 0
        """Upper bound of the remap binding, as an LSN."""

        self._read_to = 0
        """End of the last tick, as an LSN."""

        self._lost: state.LostStream | None = None
        """Reason to resync every table at the next tick, if any."""

        self._order = 0
        self._swept = False
        """True once unneeded side rows of earlier processes have been removed."""

        self._warned = False

    # Interface to the ingest loop.

    def open(
        self, state_store: StateStore, loader: SnapshotLoader, bound: Frontier[tuple[()]] | None
    ) -> None:
        """Connect, and prepare to resume from `bound`."""
        self._state_store = state_store
        self._tables.snapshots.open(state_store, loader)
        known = state.read_state(state_store)
        self._bound = bound[SINGLE_PARTITION] if bound is not None else 0
        first = known.slot is None or not (known.slot.created or known.tables)
        self._upstream.open(first=first)
        if first:
            self._start_first(known)
        else:
            self._resume(known)

    def use_stop(self, stop: threading.Event) -> None:
        """Cancel waits for the server when `stop` is set."""
        self._upstream.stop = stop

    def probe(self) -> Probe:
        """Return the server position and clock, and the position to read up to next.

        The next position is at most `CHUNK_BYTES` of WAL ahead of the last tick. All commits
        before the call are below the server position.
        """
        try:
            reached = self._stream.probe()
        except HistoryRewound as error:
            raise self._record_loss(error) from error
        chunk_end = min(reached, self._read_to + CHUNK_BYTES)
        return Probe(
            _frontier(chunk_end),
            self._stream.now_ms,
            _frontier(reached) if chunk_end < reached else None,
        )

    def collections(self) -> Sequence[str]:
        """Return the published collections."""
        return self._tables.visible_collections

    def read_into(
        self, tick: TickTransaction, up_to: Frontier[tuple[()]]
    ) -> Frontier[tuple[()]] | None:
        """Read all commits below `up_to` into `tick`, and repair drift."""
        table_set, stream = self._tables, self._stream
        # Between two ticks, restart only the stream: snapshots continue.
        stream.ensure_format(tracked.table for tracked in table_set.tables.values())
        reader = TickReader(tick, table_set, relations=stream.relations, order=self._order)
        repair = DriftRepair(
            tick, reader, table_set, stream, config=self._config, server=self._upstream
        )
        if self._lost is not None:
            for tracked in table_set.tables.values():
                if tracked.state is TableState.LIVE:
                    reader.skip_until_resync(tracked, self._lost.reason)
        if not self._swept:
            # Compare with the side rows that exist. A process that stopped between its tick and
            # this cleanup has stored the new names and left side rows under the old names.
            tick.retain_side_rows(table_set.pending_names)
            self._swept = True
        try:
            bound = self._read(repair, up_to[SINGLE_PARTITION])
        except (HistoryRewound, TransactionMismatch) as error:
            raise self._record_loss(error) from error
        reader.make_tables_visible(bound)
        reader.finish()
        self._check_skipped(reader)
        self._order, self._read_to = reader.order, bound
        self._put_state(tick, bound)
        # After a failover, the new timeline may be below the bound. The remap binding then
        # stays unchanged until the server has passed it.
        self._bound = max(self._bound, bound)
        is_readable = table_set.visible_collections or not table_set.tracks_any
        return _frontier(self._bound) if is_readable else None

    def _read(self, repair: DriftRepair, bound: int) -> int:
        """Read up to `bound` and repair drift; return the end of the tick."""
        if self._stream.state is SessionState.HALTED:
            if self._tables.resync_request is None:
                return bound  # No remaining table can have changed.
            raise self._record_loss(DefiniteError("publication was missing for some time"))
        try:
            return repair.run(bound)
        except DefiniteError as error:
            if error.sqlstate != NO_SUCH_OBJECT:
                raise
            # The change is from a time without a publication: the stream cannot continue.
            if not repair.mark_errored_without_publication():
                raise self._record_loss(error) from error
            self._stream.halt()
            return self._read_to

    def _check_skipped(self, reader: TickReader) -> None:
        """Check that no message of an intact table was skipped without a resync."""
        skipped = [
            tracked.table.name
            for oid, tracked in self._tables.tables.items()
            if oid in reader.skipped and not tracked.state.is_errored
        ]
        if skipped:
            raise InternalError(
                f'messages of {len(skipped)} tables of source "{self.name}" were skipped',
                detail=f"The tables are {', '.join(skipped)}.",
            )

    def committed(self, frontier: Frontier[tuple[()]] | None) -> None:
        """Record that the last tick is durable, and confirm it to the server."""
        self._stream.durable, self._lost = self._read_to, None
        self._stream.confirm()

    def status(self) -> Mapping[str, Any]:
        """Return the status, for display."""
        slot = self._upstream.slot_state()
        lag_bytes = max(0, self._stream.reached - self._read_to)
        return {
            "kind": self.kind,
            "server": self._config.where,
            "phase": "copying" if self._tables.snapshots.is_active else "following",
            "lsn": str(Lsn(self._read_to)),
            "lag_bytes": lag_bytes,
            "lag_ms": self._stream.lag_ms() if lag_bytes else 0,
            "slot": self._upstream.slot,
            "slot_bytes": None if slot is None else slot.retained_bytes,
            "slot_warning": self._warn_of_slot(slot),
            "waits_for": self.waits_for(),
            "tables": self._tables.status(),
        }

    def resync(self, tables: Sequence[str]) -> None:
        """Schedule a resync of these tables at the next tick; of all tables if none is named.

        Raises:
            UsageError: a table does not exist.
            DefiniteError: a named table cannot be tracked in its current form.
        """
        self._tables.request_resync(tables)

    def ownership_verified(self) -> None:
        """Record during a long tick that this process is still the writer: feedback continues."""
        self._stream.ownership_verified()

    def is_loaded(self) -> bool:
        """Return whether no initial snapshot is in progress."""
        return self._tables.is_loaded

    def waits_for(self) -> str:
        """Return a description of the current wait, or an empty string."""
        if not self._upstream.is_answering():
            return f"an answer from {self._config.where}"
        return self._upstream.waits_for or self._tables.current_wait()

    def _warn_of_slot(self, slot: SlotState | None) -> str:
        """Return a warning if the slot retains more WAL than the limit; log it once."""
        limit = self._config.slot_warning
        held = 0 if slot is None else slot.retained_bytes
        if slot is None or held <= limit:
            self._warned = False
            return ""
        left = "" if slot.safe_wal_size is None else f"; it is lost after {slot.safe_wal_size} more"
        warning = f"slot holds back {held} bytes of WAL, over {limit}{left}"
        if not self._warned:
            log.warning("slot holds back much", extra=fields(source=self.name, warning=warning))
            self._warned = True
        return warning

    def check(self, *, started: bool) -> Sequence[CollectionOutline]:
        """Check the prerequisites on the server; if `started`, only the connection.

        A server that does not respond is reported after the answer deadline.
        """
        self._upstream.connect_timeout_s = answer_timeout_s()
        self._upstream.open(first=not started)
        try:
            if started:
                return ()
            self._upstream.check(make=False)
            return outline_tables(self._upstream.control, self._config, self.name)
        finally:
            self._upstream.close()

    def drop_removed(
        self, state_store: StateStore, destroy: Callable[[Sequence[str]], None]
    ) -> None:
        """Drop tables that the file no longer names: publication, then collections, then state."""
        known = state.read_state(state_store)
        removed = [
            tracked
            for tracked in known.tables
            if self._config.spec_of(tracked.table.described.table_name) is None
        ]
        if not removed:
            return
        self._upstream.open()
        try:
            names = [tracked.table.described.table_name for tracked in removed]
            self._upstream.publication.remove_tables(
                self._upstream.control, names, slots=_slots(known)
            )
        finally:
            self._upstream.close()
        destroy([tracked.table.collection for tracked in removed if tracked.state.has_collection])
        for tracked in removed:
            tracked.apply(TableEvent.REMOVED)
        state_store.put(state.tables(removed))

    def drop(self, state_store: StateStore) -> None:
        """Drop the slots of the source.

        Also drop the publication, if Penstock created it and no other slot of Penstock remains.
        """
        known = state.read_state(state_store)
        self._upstream.open()
        try:
            for name in _slots(known):
                self._upstream.retire_slot(name, shared=False)
            self._upstream.publication.drop(self._upstream.control)
        finally:
            self._upstream.close()

    def close(self) -> None:
        """Close the connections. Durable state does not change."""
        self._stream.close()
        self._tables.snapshots.close()
        self._upstream.close()

    # Start.

    def _start_first(self, known: state.StoredState) -> None:
        """Create a slot, and start the initial snapshots as of its consistent point."""
        self._upstream.check()
        self._drop_intended_slot(known)
        self._state_store.put(state.slot_intended(self._upstream.new_slot()))
        hit(Failpoint.SLOT_INTENDED)
        first = self._tables.read_first_fingerprint()
        export = self._upstream.create_slot()
        hit(Failpoint.SLOT_CREATED)
        self._tables.start(export)
        self._stream.durable = self._read_to = export.consistent_point
        self._lost = None
        self._state_store.put(
            {
                **state.slot_created(self._upstream.slot, export.consistent_point),
                **state.identity(self._upstream.identity),
                **state.fingerprint(first),
                **state.tables(self._tables.tables.values()),
                **state.streamed(export.consistent_point, None),
            }
        )
        tables = self._tables.tables.values()
        tracked = [table for table in tables if table.state.has_collection]
        self._tables.snapshots.start(tracked, export)
        self._start_stream(None)

    def _resume(self, known: state.StoredState) -> None:
        """Resume with the slot or a new one, and restart only unfinished snapshots."""
        self._tables.resume(known.tables, known.fingerprint)
        self._order = known.order
        self._lost = self._find_loss(known)
        phases = [Phase.LOADING] if self._lost is None else [Phase.LOADING, Phase.LOADED]
        tables = self._tables.tables.values()
        unfinished = [tracked for tracked in tables if tracked.state.phase in phases]
        if self._lost is not None and self._lost.slot == (known.slot and known.slot.name):
            self._replace_slot(known, self._lost, unfinished)
        else:
            self._state_store.put(state.identity(self._upstream.identity))
        self._read_to = self._stream.durable
        if unfinished := self._tables.select_trackable(unfinished):
            self._tables.snapshots.restart(unfinished)
        self._start_stream(known.last if self._lost is None else None)
        if self._config.tables is not None:
            self._upstream.publication.add_configured_tables(self._upstream.control)
            self._tables.add_named_tables()

    def _find_loss(self, known: state.StoredState) -> state.LostStream | None:
        """Return why the server cannot send all changes after the durable position, or None."""
        slot, identity = known.slot, known.identity
        assert slot is not None
        assert identity is not None
        if known.lost is not None and not slot.created:
            return state.LostStream(slot.name, known.lost.reason, known.lost.shared)
        # The streamed position belongs to the slot before the loss, not to its replacement.
        self._stream.durable = known.streamed if known.lost is None else slot.consistent_point
        try:
            self._upstream.verify_identity(identity, durable=self._stream.durable)
            if known.lost is not None and known.lost.slot == slot.name:
                return known.lost
            self._upstream.resume_slot(slot.name, durable=self._stream.durable)
        except LOST as error:
            shared = isinstance(error, SlotPassed)
            return state.LostStream(slot.name, f"{error}: {error.detail}", shared)
        return known.lost

    def _replace_slot(
        self, known: state.StoredState, lost: state.LostStream, unfinished: Sequence[TrackedTable]
    ) -> None:
        """Create a new slot. It has no durable progress until every table has been compared."""
        log.warning(
            "changes are lost; all tables will be compared",
            extra=fields(source=self.name, reason=lost.reason),
        )
        self._drop_intended_slot(known)
        slot = self._upstream.new_slot()
        self._state_store.put({**state.slot_intended(slot, replaces=lost.slot), **state.lost(lost)})
        hit(Failpoint.SLOT_INTENDED)
        self._upstream.retire_slot(lost.slot, shared=lost.shared)
        export = self._upstream.create_slot()
        export.close()
        hit(Failpoint.SLOT_CREATED)
        for tracked in unfinished:
            tracked.apply(TableEvent.SNAPSHOT_STARTED)
        self._stream.durable = export.consistent_point
        self._state_store.put(
            {
                **state.slot_created(slot, export.consistent_point),
                **state.identity(self._upstream.identity),
                **state.tables(unfinished),
            }
        )

    def _drop_intended_slot(self, known: state.StoredState) -> None:
        """Drop a slot whose creation was intended but not recorded; it may exist unowned."""
        if known.slot is not None and not known.slot.created:
            self._upstream.drop_slot(known.slot.name)
            if known.slot.replaces:
                shared = known.lost is None or known.lost.shared
                self._upstream.retire_slot(known.slot.replaces, shared=shared)

    def _record_loss(self, error: DefiniteError) -> TransientError:
        """Store that changes are lost. Return the error to raise, which causes a restart."""
        lost = state.LostStream(self._upstream.slot, f"{error}: {error.detail}")
        self._state_store.put(state.lost(lost))
        return TransientError(str(error), detail=error.detail, hint="All tables are compared.")

    def _start_stream(self, last: StreamTransaction | None) -> None:
        self._stream.start((tracked.table for tracked in self._tables.tables.values()), last)

    # Durable state.

    def _put_state(self, tick: TickTransaction, bound: int) -> None:
        values: dict[str, Any] = {
            **state.streamed(bound, self._stream.last),
            **state.tables(self._tables.tables.values()),
            **state.order(self._order),
            **state.lost(None),
        }
        if self._tables.fingerprint is not None:
            values |= state.fingerprint(self._tables.fingerprint)
        for oid in self._tables.removed_oids - self._tables.tables.keys():
            tick.put_state(state.table_key(oid), None)
        for name, value in values.items():
            tick.put_state(name, value)


def _frontier(lsn: int) -> Frontier[tuple[()]]:
    return Frontier({SINGLE_PARTITION: lsn})


def _slots(known: state.StoredState) -> list[str]:
    """Return the recorded slots of the source: the current one and one it replaces."""
    slot = known.slot
    return [] if slot is None else [*filter(None, (slot.name, slot.replaces))]
