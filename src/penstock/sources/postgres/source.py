"""Postgres source: initial snapshot, then every transaction, exactly once.

All tables share one slot and one stream. The slot is read from the start. Messages of
tables whose snapshot is in progress are stored as pending changes. All tables become
visible together, at a tick after the consistent point of every snapshot (hazard B2).
Before a tick is sealed, a catalog fingerprint detects changes that cause no message. The
same tick repairs them (`cures.py`).

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
from penstock.sources.postgres import notes
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.describing import outline_tables
from penstock.sources.postgres.errors import SlotInvalidated, SlotLost, SlotPassed
from penstock.sources.postgres.feedback import Feedback
from penstock.sources.postgres.followed import Followed
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.pgoutput import Relation
from penstock.sources.postgres.reading import Following, Phase, Reading
from penstock.sources.postgres.slots import SlotState
from penstock.sources.postgres.stream import ReplicationStream
from penstock.sources.postgres.tail import AnotherHistory, Seen, Tail, TextWanted
from penstock.sources.postgres.upstream import SetBack, Upstream
from penstock.sources.source import (
    CollectionOutline,
    Frontier,
    Probe,
    SnapshotLoader,
    StateStore,
    TickTransaction,
)
from penstock.telemetry import fields, logger

__all__ = ["PostgresSource"]

log = logger("sources.postgres")

LOST: Final = (SlotLost, SlotInvalidated, SlotPassed, SetBack)
"""Errors after which unread changes can never be read."""

NO_SUCH_OBJECT: Final = "42704"
"""SQLSTATE for a change from a time when the publication did not exist."""

BITE_BYTES: Final = 256 << 20
"""Maximum bytes of WAL read in one tick during catch-up."""

WHOLE: Final = ()
"""Key of the only partition of a Postgres source."""


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
        chance: random.Random,
        tasks: int,
    ) -> None:
        self.name = name
        self._config = config
        self._clock = clock
        self._location = location
        self._upstream = Upstream(name, config, location=location, clock=clock, chance=chance)
        self._memory: StateStore
        self._followed = Followed(
            name,
            config,
            self._upstream,
            location=location,
            tasks=tasks,
            read=self._read,
            reached=lambda: self.probe().end[WHOLE],
        )
        self._tail: Tail | None = None
        self._binary = False
        self._text_wanted = False
        """True if a column arrived in a binary format that Penstock cannot decode."""

        self._stream: ReplicationStream | None = None
        self._feedback: Feedback | None = None
        self._bound = 0
        """Upper bound of the remap binding, as an LSN."""

        self._durable = 0
        """LSN below which all commits are durable in the lake."""

        self._drawn = 0
        self._lost: notes.Lost | None = None
        """Reason to resync every table at the next tick, if any."""

        self._order = 0
        self._transactions = 0
        self._swept = False
        """True once unneeded side rows of earlier processes have been removed."""

        self._warned = False
        self._relations: dict[int, Relation] = {}
        """Last Relation message of the connection, by table oid."""

        self._deaf = False
        """True if the stream cannot continue and no remaining table needs it."""

        self._probed: Probe | None = None
        self._reached = 0
        """Server position at the last probe, as an LSN."""

    # Interface to the ingest loop.

    def open(self, memory: StateStore, loader: SnapshotLoader, bound: Frontier | None) -> None:
        """Connect, and prepare to resume from `bound`."""
        self._memory = memory
        self._followed.copies.open(memory, loader)
        known = notes.recall(memory)
        self._bound = bound[WHOLE] if bound else 0
        first = known.slot is None or not (known.slot.created or known.tables)
        self._upstream.open(first=first)
        if first:
            self._start_afresh(known)
        else:
            self._start_again(known)

    def use_stop(self, stop: threading.Event) -> None:
        """Cancel waits for the server when `stop` is set."""
        self._upstream.stop = stop

    def probe(self) -> Probe:
        """Return the server position and clock, and the position to read up to next.

        The next position is at most `BITE_BYTES` of WAL ahead of the last tick. All commits
        before the call are below the server position.
        """
        try:
            found = self._upstream.probe(durable=self._durable)
        except SetBack as error:
            raise self._loses(error) from error
        reached = max(found.insert_lsn.position, self._durable)
        self._reached = reached
        bite = min(reached, self._drawn + BITE_BYTES)
        self._probed = Probe(
            {WHOLE: bite}, found.now_ms, {WHOLE: reached} if bite < reached else None
        )
        return self._probed

    def collections(self) -> Sequence[str]:
        """Return the published collections."""
        return self._followed.seen

    def read_into(self, tick: TickTransaction, up_to: Frontier) -> Frontier | None:
        """Read all commits below `up_to` into `tick`, and repair drift."""
        followed = self._followed
        if self._binary and not self._reads_binary():
            # Between two ticks, restart only the stream: snapshots continue.
            last = None if self._tail is None else self._tail.last
            self._end_stream()
            self._begin_stream(last)
        reading = Reading(
            tick,
            followed.tables,
            relations=self._relations,
            learn=followed.learn,
            order=self._order,
        )
        if self._lost is not None:
            for oid, following in followed.tables.items():
                if following.phase == Phase.LIVE:
                    reading.odd[oid] = self._lost.reason
        if not self._swept:
            # Compare with the side rows that exist. A process that stopped between its tick and
            # this cleanup has stored the new names and left side rows under the old names.
            tick.retain_side_rows(followed.pending)
            self._swept = True
        try:
            bound = self._read_and_cure(tick, reading, up_to[WHOLE])
        except DefiniteError as error:
            if error.sqlstate != NO_SUCH_OBJECT:
                raise
            bound = self._without_publication(tick, reading, error)
        followed.reveal(reading, bound)
        reading.finish()
        if passed_over := [each for each in reading.odd if self._heeds(each)]:
            raise InternalError(
                f'messages of {len(passed_over)} tables of source "{self.name}" were passed over'
            )
        self._order, self._drawn = reading.order, bound
        self._write_notes(tick, bound)
        # After a failover, the new timeline may be below the bound. The remap binding then
        # stays unchanged until the server has passed it.
        self._bound = max(self._bound, bound)
        return {WHOLE: self._bound} if followed.seen or not followed.tracks_any else None

    def _heeds(self, oid: int) -> bool:
        following = self._followed.tables.get(oid)
        return following is not None and following.phase != Phase.ERRORED

    def committed(self, frontier: Frontier | None) -> None:
        """Record that the last tick is durable, and confirm it to the server."""
        self._durable, self._lost = self._drawn, None
        if self._deaf:
            self._upstream.pass_slot(Lsn(self._durable))
            return
        tail, feedback = self._tail, self._feedback
        if tail is None or feedback is None:
            raise InternalError(f'source "{self.name}" was told of a tick while it was closed')
        moved = tail.transactions != self._transactions
        self._transactions = tail.transactions
        # SUBTLE: under traffic, the confirmed LSN excludes the last transaction. After a
        # reconnect the server sends this transaction again, which verifies the server's
        # history (hazard B5). When idle, everything is confirmed, and the slot retains no WAL.
        last = tail.last.commit_lsn if moved and tail.last is not None else self._durable
        feedback.durable(Lsn(min(last, self._durable)))
        hit(Failpoint.CONFIRM_DONE)

    def status(self) -> Mapping[str, Any]:
        """Return the status, for display."""
        slot = self._upstream.slot_state()
        behind = max(0, self._reached - self._drawn)
        return {
            "kind": self.kind,
            "server": self._config.where,
            "phase": "copying" if self._followed.copies.under_way else "following",
            "lsn": str(Lsn(self._drawn)),
            "lag_bytes": behind,
            "lag_ms": self._lag_ms() if behind else 0,
            "slot": self._upstream.slot,
            "slot_bytes": None if slot is None else slot.retained_bytes,
            "slot_warning": self._warn_of_slot(slot),
            "waits_for": self.waits_for(),
            "tables": self._followed.status(),
        }

    def resync(self, tables: Sequence[str]) -> None:
        """Schedule a resync of these tables at the next tick; of all tables if none is named.

        Raises:
            UsageError: a table does not exist.
            DefiniteError: a named table cannot be tracked in its current form.
        """
        self._followed.ask_for_resync(tables)

    def ownership_verified(self) -> None:
        """Record during a long tick that this process is still the writer: feedback continues."""
        feedback = self._feedback
        if feedback is not None:
            feedback.ownership_verified()

    def is_loaded(self) -> bool:
        """Return whether no initial snapshot is in progress."""
        return self._followed.is_loaded

    def waits_for(self) -> str:
        """Return a description of the current wait, or an empty string."""
        if not self._upstream.is_answering():
            return f"an answer from {self._config.where}"
        return self._upstream.waits_for or self._followed.waits_for()

    def _lag_ms(self) -> int:
        """Return the age of the last transaction read, in ms, by the server's clock."""
        last = None if self._tail is None else self._tail.last
        if last is None or self._probed is None:
            return 0
        return max(0, self._probed.now_ms - last.committed_us // 1_000)

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

    def drop_removed(self, memory: StateStore, destroy: Callable[[Sequence[str]], None]) -> None:
        """Drop tables that the file no longer names: publication, then collections, then state."""
        known = notes.recall(memory)
        gone = [
            each
            for each in known.tables
            if self._config.spec_of(each.table.described.table_name) is None
        ]
        if not gone:
            return
        self._upstream.open()
        try:
            names = [each.table.described.table_name for each in gone]
            self._upstream.unpublish(names, slots=_slots(known))
        finally:
            self._upstream.close()
        destroy([each.table.collection for each in gone if each.has_collection])
        memory.put({notes.table_note(each.table.oid): None for each in gone})

    def drop(self, memory: StateStore) -> None:
        """Drop the slots of the source.

        Also drop the publication, if Penstock created it and no other slot of Penstock remains.
        """
        known = notes.recall(memory)
        self._upstream.open()
        try:
            for name in _slots(known):
                self._upstream.retire_slot(name, shared=False)
            self._upstream.drop_publication()
        finally:
            self._upstream.close()

    def close(self) -> None:
        """Close the connections. Durable state does not change."""
        self._end_stream()
        self._followed.copies.close()
        self._upstream.close()

    def _end_stream(self) -> None:
        if self._feedback is not None:
            self._feedback.stop()
        if self._stream is not None:
            self._stream.close()
        self._feedback = self._tail = self._stream = None

    # Start.

    def _start_afresh(self, known: notes.Notes) -> None:
        """Create a slot, and start the initial snapshots as of its consistent point."""
        self._upstream.check()
        self._drop_intended(known)
        self._memory.put(notes.intention(self._upstream.new_slot()))
        hit(Failpoint.SLOT_INTENDED)
        first = self._followed.take_fingerprint()
        export = self._upstream.create_slot()
        hit(Failpoint.SLOT_CREATED)
        self._followed.begin(export)
        self._durable = self._drawn = export.consistent_point
        self._lost = None
        self._memory.put(
            {
                **notes.slot_created(self._upstream.slot, export.consistent_point),
                **notes.identity(self._upstream.identity),
                **notes.fingerprint(first),
                **notes.tables(self._followed.tables.values()),
                **notes.streamed(export.consistent_point, None),
            }
        )
        tracked = [each for each in self._followed.tables.values() if each.has_collection]
        self._followed.copies.begin(tracked, export)
        self._begin_stream(None)

    def _start_again(self, known: notes.Notes) -> None:
        """Resume with the slot or a new one, and restart only unfinished snapshots."""
        self._followed.go_on(known.tables, known.fingerprint)
        self._order = known.order
        self._lost = self._judge(known)
        again = [Phase.LOADING] if self._lost is None else [Phase.LOADING, Phase.LOADED]
        unfinished = [each for each in self._followed.tables.values() if each.phase in again]
        if self._lost is not None and self._lost.slot == (known.slot and known.slot.name):
            self._start_over(known, self._lost, unfinished)
        else:
            self._memory.put(notes.identity(self._upstream.identity))
        self._drawn = self._durable
        if unfinished := self._followed.trackable(unfinished):
            self._followed.copies.begin_anew(unfinished)
        self._begin_stream(known.last if self._lost is None else None)
        if self._config.tables is not None:
            self._upstream.publish_named()
            self._followed.join_named()

    def _judge(self, known: notes.Notes) -> notes.Lost | None:
        """Return why the server cannot send all changes after the durable position, or None."""
        slot, identity = known.slot, known.identity
        assert slot is not None
        assert identity is not None
        if known.lost is not None and not slot.created:
            return notes.Lost(slot.name, known.lost.reason, known.lost.shared)
        # The streamed position belongs to the slot before the loss, not to its replacement.
        self._durable = known.streamed if known.lost is None else slot.consistent_point
        try:
            self._upstream.recognise(identity, durable=self._durable)
            if known.lost is not None and known.lost.slot == slot.name:
                return known.lost
            self._upstream.take_slot(slot.name, durable=self._durable)
        except LOST as error:
            shared = isinstance(error, SlotPassed)
            return notes.Lost(slot.name, f"{error}: {error.detail}", shared)
        return known.lost

    def _start_over(
        self, known: notes.Notes, lost: notes.Lost, unfinished: Sequence[Following]
    ) -> None:
        """Create a new slot. It has no durable progress until every table has been compared."""
        log.warning(
            "changes are lost; all tables will be compared",
            extra=fields(source=self.name, reason=lost.reason),
        )
        self._drop_intended(known)
        slot = self._upstream.new_slot()
        self._memory.put({**notes.intention(slot, replaces=lost.slot), **notes.lost(lost)})
        hit(Failpoint.SLOT_INTENDED)
        self._upstream.retire_slot(lost.slot, shared=lost.shared)
        export = self._upstream.create_slot()
        export.close()
        hit(Failpoint.SLOT_CREATED)
        for following in unfinished:
            following.phase = Phase.LOADING
        self._durable = export.consistent_point
        self._memory.put(
            {
                **notes.slot_created(slot, export.consistent_point),
                **notes.identity(self._upstream.identity),
                **notes.tables(unfinished),
            }
        )

    def _drop_intended(self, known: notes.Notes) -> None:
        """Drop a slot whose creation was intended but not recorded; it may exist unowned."""
        if known.slot is not None and not known.slot.created:
            self._upstream.drop_slot(known.slot.name)
            if known.slot.replaces:
                shared = known.lost is None or known.lost.shared
                self._upstream.retire_slot(known.slot.replaces, shared=shared)

    def _loses(self, error: DefiniteError) -> TransientError:
        """Store that changes are lost. Return the error to raise, which causes a restart."""
        lost = notes.Lost(self._upstream.slot, f"{error}: {error.detail}")
        self._memory.put(notes.lost(lost))
        return TransientError(str(error), detail=error.detail, hint="All tables are compared.")

    def _begin_stream(self, last: Seen | None) -> None:
        # SUBTLE: an earlier reader of ours may still be connected and may confirm. It is
        # terminated before the confirmed LSN decides whether the last transaction is resent.
        slot = self._upstream.free_slot()
        start = self._durable
        confirmed = None if slot is None else slot.confirmed_flush
        if last is not None and confirmed is not None and confirmed <= Lsn(last.commit_lsn):
            start = last.commit_lsn
        else:
            last = None
        self._binary = self._reads_binary()
        self._stream = self._upstream.stream(Lsn(start), binary=self._binary)
        self._tail = Tail(self._stream, durable=self._durable, last=last)
        self._transactions = 0
        self._relations, self._deaf = {}, False
        self._feedback = Feedback(self._stream, self._clock, durable=Lsn(min(start, self._durable)))
        self._feedback.start()

    def _reads_binary(self) -> bool:
        """Return whether all columns have types whose binary format can be decoded.

        A column stored as text excludes binary: its type may change without notice.
        """
        tables = [following.table for following in self._followed.tables.values()]
        return not self._text_wanted and all(
            not table.spec.text
            and all(each.type.as_sent or each.position is None for each in table.columns)
            for table in tables
        )

    # One tick.

    def _read_and_cure(self, tick: TickTransaction, reading: Reading, bound: int) -> int:
        if self._deaf:
            if not self._followed.asked:
                return bound  # No remaining table can have changed.
            raise self._loses(DefiniteError("the publication was not there for a while"))
        self._read(reading, bound)
        return self._followed.cure(tick, reading, bound)

    def _without_publication(
        self, tick: TickTransaction, reading: Reading, error: DefiniteError
    ) -> int:
        """Handle a change from a time without a publication: the stream cannot continue."""
        if not self._followed.give_up_without_publication(tick, reading):
            raise self._loses(error) from error
        self._deaf = True
        return self._drawn

    def _read(self, reading: Reading, bound: int) -> None:
        if self._tail is None:
            raise InternalError(f'source "{self.name}" was drawn from while it was closed')
        try:
            self._tail.up_to(bound, reading, waiting=lambda: self._upstream.nudge(bound))
        except AnotherHistory as error:
            raise self._loses(error) from error
        except TextWanted:
            self._text_wanted = True
            raise

    # Durable state.

    def _write_notes(self, tick: TickTransaction, bound: int) -> None:
        last = None if self._tail is None else self._tail.last
        written: dict[str, Any] = {
            **notes.streamed(bound, last),
            **notes.tables(self._followed.tables.values()),
            **notes.order(self._order),
            **notes.lost(None),
        }
        if self._followed.fingerprint is not None:
            written |= notes.fingerprint(self._followed.fingerprint)
        for oid in self._followed.forgotten:
            tick.put_state(f"table/{oid}", None)
        for name, value in written.items():
            tick.put_state(name, value)


def _slots(known: notes.Notes) -> list[str]:
    """Return the recorded slots of the source: the current one and one it replaces."""
    slot = known.slot
    return [] if slot is None else [*filter(None, (slot.name, slot.replaces))]
