"""Postgres as a source: its first copy, then every transaction, exactly once.

One slot and one stream for all tables. The slot is read from the first second;
messages about tables whose copy is under way are kept aside, and all tables
become visible together, at a tick that has passed every copy's consistent point
(hazard B2). What happens without a message is noticed by a fingerprint before a
tick is sealed, and cured there (`cures.py`).

    open    who is it, which slot, which tables; begin copies; begin the stream
    draw    read up to the bound; keep finished copies; look for drift, cure it

Where the server cannot send what comes next, because the slot is gone or its
history is not the one we followed, that is written down first; then a new slot is
made, and at the next tick every table is compared and mended (hazards B4, B5).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

import pyarrow as pa

from penstock.clock import Clock
from penstock.data import check_row_schema
from penstock.errors import DefiniteError, InternalError, TransientError, UsageError
from penstock.failpoints import Failpoint, pass_by
from penstock.sources.postgres import notes
from penstock.sources.postgres.catalog import PgTable, describe, published_tables
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.cures import (
    Cure,
    Follow,
    GiveUp,
    Join,
    Resync,
    Situation,
    cures,
    misfit,
)
from penstock.sources.postgres.drift import compare
from penstock.sources.postgres.errors import SlotInvalidated, SlotLost, SlotPassed, TableGone
from penstock.sources.postgres.feedback import Feedback
from penstock.sources.postgres.fingerprint import Fingerprint, TableMark, fingerprint
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.pgoutput import Relation
from penstock.sources.postgres.reading import Following, Phase, Reading
from penstock.sources.postgres.slots import SlotState
from penstock.sources.postgres.snapshot import pieces
from penstock.sources.postgres.stream import ReplicationStream
from penstock.sources.postgres.tables import Misfit, Table, defaults_of, follow, reads, refit
from penstock.sources.postgres.tail import AnotherHistory, Seen, Tail
from penstock.sources.postgres.upstream import Export, SetBack, Upstream
from penstock.sources.source import Frontier, Load, Loader, Memory, Probe, Tick
from penstock.telemetry import fields, logger

__all__ = ["PostgresSource"]

log = logger("sources.postgres")

LOST: Final = (SlotLost, SlotInvalidated, SlotPassed, SetBack)
"""Changes that were not read yet will never come."""

NO_SUCH_OBJECT: Final = "42704"
"""The server's code if it should send changes of a publication that was not there."""

BITE_BYTES: Final = 256 << 20
"""So much of the server's log is drawn in one tick while catching up."""

WHOLE: Final = ()
"""The one partition of a Postgres source."""


@dataclass(eq=False, slots=True)
class _Copy:
    """A first copy that is under way."""

    following: Following
    load: Load
    export: Export


class PostgresSource:
    """One database of a Postgres server."""

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
        self._tasks = config.snapshot_tasks or tasks
        self._location = location
        self._upstream = Upstream(name, config, location=location, clock=clock, chance=chance)
        self._memory: Memory
        self._loader: Loader
        self._tables: dict[int, Following] = {}
        self._copies: list[_Copy] = []
        self._fingerprint: Fingerprint | None = None
        self._tail: Tail | None = None
        self._stream: ReplicationStream | None = None
        self._feedback: Feedback | None = None
        self._bound = 0
        """How far the source is bound to our times."""

        self._durable = 0
        """What committed below this is durable here."""

        self._drawn = 0
        self._lost: notes.Lost | None = None
        """Why every table must be compared at the next tick, if it must."""

        self._order = 0
        self._transactions = 0
        self._stale: list[str] = []
        self._warned = False
        self._asked: set[str] | None = None
        self._relations: dict[int, Relation] = {}
        """What the connection told of messages, by table."""

        self._deaf = False
        """Whether the stream cannot go on, and no table is left that needs it."""

        self._forgotten: set[int] = set()
        """Tables whose place another has taken."""

        self._probed: Probe | None = None
        self._reached = 0
        """How far the server had come, as of the last probe."""

    # What the loop asks.

    def open(self, memory: Memory, loader: Loader, bound: Frontier | None) -> None:
        """Connect, and be ready to go on from `bound`."""
        self._memory, self._loader = memory, loader
        known = notes.recall(memory)
        self._bound = bound[WHOLE] if bound else 0
        self._upstream.open()
        if known.slot is None or not (known.slot.created or known.tables):
            self._start_afresh(known)
        else:
            self._start_again(known)

    def probe(self) -> Probe:
        """How far the server has come, by now at least."""
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
        """Those of the tables that are seen."""
        return [
            each.table.collection
            for each in self._tables.values()
            if each.phase == Phase.LIVE or (each.phase == Phase.ERRORED and each.seen)
        ]

    def draw(self, tick: Tick, upto: Frontier) -> Frontier | None:
        """Bring all that committed below `upto` into `tick`, and cure what drifted."""
        reading = Reading(
            tick, self._tables, relations=self._relations, learn=self._learn, order=self._order
        )
        if self._lost is not None:
            for oid, following in self._tables.items():
                if following.phase == Phase.LIVE:
                    reading.odd[oid] = self._lost.reason
        for name in self._stale:
            tick.throw_away(name)
        self._stale = []
        try:
            bound = self._read_and_cure(tick, reading, upto[WHOLE])
        except DefiniteError as error:
            if error.sqlstate != NO_SUCH_OBJECT:
                raise
            bound = self._without_publication(tick, reading, error)
        self._reveal(reading, bound)
        reading.finish()
        self._order, self._drawn = reading.order, bound
        self._write_notes(tick, bound)
        # After a failover the new timeline may stand below what was bound; then the
        # binding stays where it is until the server has passed it.
        self._bound = max(self._bound, bound)
        return {WHOLE: self._bound} if self.collections() or not self._tables else None

    def committed(self, frontier: Frontier | None) -> None:
        """What was drawn is durable; the server may forget it."""
        self._durable, self._lost = self._drawn, None
        if self._deaf:
            return  # There is nobody to tell.
        tail, feedback = self._tail, self._feedback
        if tail is None or feedback is None:
            raise InternalError(f'source "{self.name}" was told of a tick while it was closed')
        moved = tail.transactions != self._transactions
        self._transactions = tail.transactions
        # SUBTLE: while there is traffic the server is told one transaction less, so
        # that after a reconnect it sends that one again and we see that it is the
        # same (hazard B5). Idle, it is told everything, and keeps no WAL for us.
        last = tail.last.commit_lsn if moved and tail.last is not None else self._durable
        feedback.durable(Lsn(min(last, self._durable)))
        pass_by(Failpoint.CONFIRM_DONE)

    def status(self) -> Mapping[str, Any]:
        """For people."""
        copying = [copy for copy in self._copies if not copy.load.done()]
        slot = self._upstream.slot_state()
        behind = max(0, self._reached - self._drawn)
        return {
            "kind": self.kind,
            "server": self._config.where,
            "phase": "copying" if self._copies else "following",
            "lsn": str(Lsn(self._drawn)),
            "lag_bytes": behind,
            "lag_ms": self._lag_ms() if behind else 0,
            "slot": self._upstream.slot,
            "slot_bytes": None if slot is None else slot.retained_bytes,
            "slot_warning": self._warn_of_slot(slot),
            "waits_for": self._upstream.waits_for
            or (f"the first copy of {copying[0].following.table.name}" if copying else ""),
            "tables": [self._table_status(each) for each in self._tables.values()],
        }

    def _lag_ms(self) -> int:
        """How long ago the last transaction that is here committed, by the server's clock."""
        last = None if self._tail is None else self._tail.last
        if last is None or self._probed is None:
            return 0
        return max(0, self._probed.now_ms - last.committed_us // 1_000)

    def _warn_of_slot(self, slot: SlotState | None) -> str:
        """What to say of the log that the slot holds back, if it is much."""
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

    def close(self) -> None:
        """Let go of the server; nothing durable changes."""
        if self._feedback is not None:
            self._feedback.stop()
        if self._stream is not None:
            self._stream.close()
        self._feedback = self._tail = self._stream = None
        for copy in self._copies:
            copy.load.abandon()
            copy.export.close()
        self._copies = []
        self._upstream.close()

    # The first start, and every other.

    def _start_afresh(self, known: notes.Notes) -> None:
        """Make a slot, and begin to copy every table as of its consistent point."""
        self._upstream.check()
        self._drop_intended(known)
        self._memory.write_down(notes.intention(self._upstream.new_slot()))
        pass_by(Failpoint.SLOT_INTENDED)
        export = self._upstream.create_slot()
        pass_by(Failpoint.SLOT_CREATED)
        self._tables = {}
        self._fingerprint = self._look()
        described = self._chosen(published_tables(self._upstream.control, self._config.publication))
        self._tables = {
            each.oid: Following(self._follow(each), Phase.LOADING, export.consistent_point)
            for each in described
        }
        self._durable = self._drawn = export.consistent_point
        self._lost = None
        self._memory.write_down(
            {
                **notes.slot_created(self._upstream.slot, export.consistent_point),
                **notes.identity(self._upstream.identity),
                **notes.fingerprint(self._fingerprint),
                **notes.tables(self._tables.values()),
                **notes.streamed(export.consistent_point, None),
            }
        )
        self._copy([*self._tables.values()], export)
        self._begin_stream(None)

    def _start_again(self, known: notes.Notes) -> None:
        """Go on with the slot, or with a new one; repeat only copies that were not finished."""
        self._fingerprint = known.fingerprint
        self._tables = {each.table.oid: each for each in known.tables}
        self._order = known.order
        self._lost = self._judge(known)
        again = [Phase.LOADING] if self._lost is None else [Phase.LOADING, Phase.LOADED]
        unfinished = [each for each in self._tables.values() if each.phase in again]
        # Of a table that is seen, too: we may have stopped between the tick and the sweeping.
        self._stale = [
            each.pending
            for each in self._tables.values()
            if each in unfinished or each.phase == Phase.LIVE
        ]
        if self._lost is not None and self._lost.slot == (known.slot and known.slot.name):
            self._start_over(known, self._lost, unfinished)
        else:
            self._memory.write_down(notes.identity(self._upstream.identity))
        self._drawn = self._durable
        if unfinished:
            self._copy_anew(unfinished)
        self._begin_stream(known.last if self._lost is None else None)
        if self._config.tables is not None:
            self._join_named()

    def _join_named(self) -> None:
        """Begin with tables that the file names by now, and that were published all along."""
        published = published_tables(self._upstream.control, self._config.publication)
        for each in self._chosen(published):
            if each.oid not in self._tables:
                self._join(each.oid, str(each.table_name))

    def _judge(self, known: notes.Notes) -> notes.Lost | None:
        """Whether the server has all that comes after what is durable here, and if not, why."""
        slot, identity = known.slot, known.identity
        assert slot is not None
        assert identity is not None
        if known.lost is not None and not slot.created:
            return notes.Lost(slot.name, known.lost.reason, known.lost.shared)
        # What was streamed says nothing about the slot that came after a loss.
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
        """Make a new slot. Until every table has been compared, nothing else is durable of it."""
        log.warning(
            "changes are lost; all tables will be compared",
            extra=fields(source=self.name, reason=lost.reason),
        )
        self._drop_intended(known)
        slot = self._upstream.new_slot()
        self._memory.write_down({**notes.intention(slot, replaces=lost.slot), **notes.lost(lost)})
        pass_by(Failpoint.SLOT_INTENDED)
        self._upstream.retire_slot(lost.slot, shared=lost.shared)
        export = self._upstream.create_slot()
        export.close()
        pass_by(Failpoint.SLOT_CREATED)
        for following in unfinished:
            following.phase = Phase.LOADING
        self._durable = export.consistent_point
        self._memory.write_down(
            {
                **notes.slot_created(slot, export.consistent_point),
                **notes.identity(self._upstream.identity),
                **notes.tables(unfinished),
            }
        )

    def _drop_intended(self, known: notes.Notes) -> None:
        """A slot that was about to be created when we stopped may be there, and nobody's."""
        if known.slot is not None and not known.slot.created:
            self._upstream.drop_slot(known.slot.name)
            if known.slot.replaces:
                shared = known.lost is None or known.lost.shared
                self._upstream.retire_slot(known.slot.replaces, shared=shared)

    def _loses(self, error: DefiniteError) -> TransientError:
        """Write down that changes are lost; what to raise, so that we start over."""
        lost = notes.Lost(self._upstream.slot, f"{error}: {error.detail}")
        self._memory.write_down(notes.lost(lost))
        return TransientError(str(error), detail=error.detail, hint="All tables are compared.")

    def _copy_anew(self, unfinished: Sequence[Following]) -> None:
        """Begin copies as of a snapshot of their own.

        Whatever was kept aside for an earlier copy committed before this snapshot.
        """
        export = self._upstream.export()
        for following in unfinished:
            following.snapshot_lsn = export.consistent_point
        self._copy(unfinished, export)

    def _copy(self, tables: Sequence[Following], export: Export) -> None:
        for following in tables:
            table = following.table
            # There may be files of an earlier attempt, which nobody has seen.
            self._loader.unmake(table.collection)
            self._loader.make(table.collection, table.schema, table.key_columns)
            parts = pieces(
                self._config.parameters,
                table,
                export.snapshot,
                tasks=self._tasks,
                server_version=self._upstream.control.server_version,
            )
            load = self._loader.load(table.collection, parts, size=table.described.bytes)
            self._copies.append(_Copy(following, load, export))
        if not tables:
            export.close()

    def _begin_stream(self, last: Seen | None) -> None:
        # SUBTLE: an earlier reader of ours may still be there and confirm; so it is
        # ended before the slot is asked whether the last transaction will come again.
        slot = self._upstream.free_slot()
        start = self._durable
        confirmed = None if slot is None else slot.confirmed_flush
        if last is not None and confirmed is not None and confirmed <= Lsn(last.commit_lsn):
            start = last.commit_lsn
        else:
            last = None
        self._stream = self._upstream.stream(Lsn(start))
        self._tail = Tail(self._stream, durable=self._durable, last=last)
        self._transactions = 0
        self._relations, self._deaf = {}, False
        self._feedback = Feedback(self._stream, self._clock, durable=Lsn(min(start, self._durable)))
        self._feedback.start()

    # One tick.

    def _read_and_cure(self, tick: Tick, reading: Reading, bound: int) -> int:
        if self._deaf:
            if self._asked is None:
                return self._drawn
            raise self._loses(DefiniteError("the publication was not there for a while"))
        self._read(reading, bound)
        done = [each for each in self._copies if each.load.done()]
        bound = self._cure(tick, reading, bound)
        self._keep_copies(tick, reading, done)
        return bound

    def _without_publication(self, tick: Tick, reading: Reading, error: DefiniteError) -> int:
        """The stream has come to a change from when there was no publication, and cannot go on."""
        if self._fingerprint is None:
            raise error
        after = self._look()
        if after.publication is not None:
            raise self._loses(error) from error
        for cure in self._wanted(self._fingerprint, after, reading):
            self._obey(tick, reading, cure)
        self._fingerprint, self._deaf, self._asked = after, True, None
        return self._drawn

    def _read(self, reading: Reading, bound: int) -> None:
        if self._tail is None:
            raise InternalError(f'source "{self.name}" was drawn from while it was closed')
        try:
            self._tail.upto(bound, reading, waiting=lambda: self._upstream.nudge(bound))
        except AnotherHistory as error:
            raise self._loses(error) from error

    def _keep_copies(self, tick: Tick, reading: Reading, done: Sequence[_Copy]) -> None:
        """Link the files of copies that were finished when we looked for drift, and found none."""
        for copy in [each for each in done if each in self._copies]:
            following = copy.following
            try:
                tick.keep_copy(following.table.collection, copy.load.result())
            except DefiniteError as error:
                reading.broken[following.table.oid] = error
            else:
                following.phase, following.rows = Phase.LOADED, copy.load.rows()
                pass_by(Failpoint.COPY_DONE)
            self._forget_copy(copy)

    def _reveal(self, reading: Reading, bound: int) -> None:
        """Let loaded tables be seen, all of them together."""
        for oid, error in list(reading.broken.items()):
            if not self._tables[oid].seen:
                reading.fail(self._tables[oid], reading.broken.pop(oid, error))
        waiting = [each for each in self._tables.values() if not each.seen]
        if any(
            each.phase == Phase.LOADING
            or (each.phase == Phase.LOADED and each.snapshot_lsn > bound)
            for each in waiting
        ):
            return
        for following in waiting:
            reading.reveal(following)

    def _cure(self, tick: Tick, reading: Reading, bound: int) -> int:
        """Cure what changed without a message, and return how far the tick then reaches."""
        before = self._fingerprint
        if before is None:
            raise InternalError(f'source "{self.name}" has no fingerprint')
        after = self._look()
        wanted = self._wanted(before, after, reading)
        if wanted:
            # What explains a change may be in the stream past the bound.
            while True:
                bound = max(bound, self.probe().everything[WHOLE])
                self._read(reading, bound)
                again = self._look()
                if again == after:
                    break
                after = again
            wanted = self._wanted(before, after, reading)
        self._fingerprint = after
        for cure in wanted:
            self._obey(tick, reading, cure)
        resyncs = [self._tables[cure.oid] for cure in wanted if isinstance(cure, Resync)]
        if resyncs:
            bound = self._resync(tick, reading, resyncs)
        self._asked = None
        return bound

    def _wanted(self, before: Fingerprint, after: Fingerprint, reading: Reading) -> list[Cure]:
        live = {
            oid: each.table for oid, each in self._tables.items() if each.phase != Phase.ERRORED
        }
        situation = Situation(
            self._location,
            self._config.publication,
            live,
            {oid for oid in live if not self._tables[oid].seen},
            reading.truncated_by,
        )
        wanted = {cure.oid: cure for cure in cures(compare(before, after), situation)}
        compared: dict[int, str] = {
            # Learned from the stream, and undone before we looked.
            oid: "its columns changed for a while"
            for oid, table in live.items()
            if oid not in wanted and not _agree(table.described, after.tables.get(oid))
        }
        # Messages of an odd table were passed over, so its description alone is not enough.
        compared |= {oid: why for oid, why in reading.odd.items() if oid in live}
        if self._asked is not None:
            compared |= {
                oid: "it was asked for"
                for oid, each in self._tables.items()
                if each.seen and (not self._asked or each.table.name in self._asked)
            }
        for oid, reason in compared.items():
            if not isinstance(wanted.get(oid), GiveUp | Resync):
                wanted[oid] = Resync(oid, reason)
        return [wanted[oid] for oid in sorted(wanted)]

    def resync(self, tables: Sequence[str]) -> None:
        """At the next tick, compare these tables with their collections; all, if none is named.

        Raises:
            UsageError: there is no such table.
            DefiniteError: a table that was named cannot be followed as it is now.
        """
        known = {each.table.name: each for each in self._tables.values()}
        for name in tables:
            if name not in known:
                raise UsageError(
                    f'source "{self.name}" does not follow a table "{name}"',
                    hint=f"It follows {', '.join(sorted(known))}.",
                )
        for name, following in known.items():
            if following.phase != Phase.ERRORED or (tables and name not in tables):
                continue
            try:
                self._take_up(following)
            except DefiniteError as error:
                if tables:
                    raise
                log.warning(
                    "table stays in error", extra=fields(source=self.name, error=str(error))
                )
        self._asked = set(tables)

    def _take_up(self, following: Following) -> None:
        """A table in error must be such that it can be followed again.

        Another one of its name takes its place, if it was dropped.
        """
        table = following.table
        described = self._described(table.oid)
        if described is None:
            published = published_tables(self._upstream.control, self._config.publication)
            described = next(
                (
                    each
                    for each in published
                    if each.table_name == table.described.table_name
                    and each.oid not in self._tables
                ),
                None,
            )
        if described is None:
            raise TableGone(
                location=self._location,
                source=self.name,
                table=table.described.table_name,
                publication=self._config.publication,
                dropped=True,
            )
        fitted = self._fit(following, described)
        if isinstance(fitted, Misfit):
            raise misfit(table, fitted, location=self._location)
        if fitted.oid != table.oid:
            del self._tables[table.oid]
            self._forgotten.add(table.oid)
            following.table = replace(table, oid=fitted.oid)
            self._tables[fitted.oid] = following

    def _fit(self, following: Following, described: PgTable) -> Table | Misfit:
        """How to go on with a table as it is now."""
        table = following.table
        if described.table_name != table.described.table_name:
            return Misfit(f"it is now {described.table_name}")
        if not described.published:
            return Misfit("it is not published")
        if described.replica_identity != "f" and not described.identity:
            return Misfit("it has no replica identity")
        if not following.seen:
            return follow(self.name, described, table.spec)
        return refit(table, described, asked=following.phase == Phase.ERRORED)

    def _obey(self, tick: Tick, reading: Reading, cure: Cure) -> None:
        match cure:
            case GiveUp(oid=oid, error=error):
                self._give_up(reading, self._tables[oid], error)
            case Follow(oid=oid):
                following = self._tables[oid]
                described = self._described(oid)
                if described is None:
                    return  # Gone since; the next look sees it.
                self._follow_on(tick, reading, following, self._fit(following, described))
            case Resync(oid=oid, reason=reason):
                following = self._tables[oid]
                reading.pass_over(following, reason)
                log.info(
                    "table is compared",
                    extra=fields(source=self.name, table=following.table.name, reason=reason),
                )
            case Join(oid=oid, name=name):
                self._join(oid, name)

    def _give_up(self, reading: Reading, following: Following, error: DefiniteError) -> None:
        log.warning("table is in error", extra=fields(source=self.name, error=str(error)))
        self._abandon_copy(following)
        reading.compared(following)
        reading.fail(following, error)

    def _follow_on(
        self, tick: Tick, reading: Reading, following: Following, fitted: Table | Misfit
    ) -> None:
        """The catalogue has something new to say of a table; what is stored grows with it."""
        before = following.table
        if isinstance(fitted, Misfit):
            self._give_up(reading, following, misfit(before, fitted, location=self._location))
        elif fitted.schema.equals(before.schema, check_metadata=True):
            if (fitted.columns, fitted.key) != (before.columns, before.key):
                reading.flush(following)
            following.table = fitted
        elif not following.seen:
            self._reload(tick, reading, following, fitted)
        else:
            reading.flush(following)
            following.table = fitted
            added = fitted.columns[len(before.columns) :]
            tick.grow(fitted.collection, fitted.schema, defaults_of(added))

    def _reload(self, tick: Tick, reading: Reading, following: Following, table: Table) -> None:
        """A table changed while it was being copied: begin its copy again."""
        log.info(
            "table changed while it was being copied; copying again",
            extra=fields(source=self.name, table=table.name),
        )
        self._abandon_copy(following)
        reading.compared(following)
        tick.throw_away(following.pending)
        following.table, following.phase = table, Phase.LOADING
        # What was copied before goes now, so nobody may take it for complete any more.
        self._memory.write_down(notes.tables([following]))
        self._copy_anew([following])

    def _abandon_copy(self, following: Following) -> None:
        for copy in [each for each in self._copies if each.following is following]:
            copy.load.abandon()
            self._forget_copy(copy)

    def _forget_copy(self, copy: _Copy) -> None:
        self._copies.remove(copy)
        if all(each.export is not copy.export for each in self._copies):
            copy.export.close()

    def _learn(
        self, reading: Reading, tick: Tick, following: Following, relation: Relation
    ) -> bool:
        """Messages have other columns; whether the catalogue knows them, and they fit."""
        described = self._described(following.table.oid)
        if described is None:
            return False
        fitted = self._fit(following, described)
        if isinstance(fitted, Misfit) or not reads(fitted, relation):
            return False
        if following.seen and fitted.numbers != {**fitted.numbers, **following.table.numbers}:
            return False  # A column went, or another took its place: rows may hold anything.
        self._follow_on(tick, reading, following, fitted)
        return True

    def _join(self, oid: int, name: str) -> None:
        if oid in self._tables:
            log.warning(
                "table is published again; to follow it again, resync it",
                extra=fields(source=self.name, table=name),
            )
            return
        described = self._described(oid)
        if described is None:
            return
        if self._config.spec_of(described.table_name) is None:
            log.warning(
                "table is published and not followed",
                extra=fields(source=self.name, table=name),
            )
            return
        following = Following(self._follow(described), Phase.LOADING)
        try:
            check_row_schema(following.table.schema, (), collection=following.table.collection)
        except UsageError as error:
            log.warning(
                "table cannot be followed",
                extra=fields(source=self.name, table=name, error=str(error)),
            )
            return
        taken = {each.table.collection for each in self._tables.values()}
        if following.table.collection in taken:
            log.warning(
                "table has the name of another that was followed; to take its place, resync it",
                extra=fields(source=self.name, table=name),
            )
            return
        self._tables[oid] = following
        self._copy_anew([following])

    def _resync(self, tick: Tick, reading: Reading, tables: Sequence[Following]) -> int:
        """Make collections equal to their tables, as of one snapshot, at which the tick is cut."""
        left, bound = list(tables), 0
        while left:
            before = self._look()
            export = self._upstream.export()
            try:
                bound = export.consistent_point
                self._read(reading, bound)
                left = [
                    each for each in left if not self._compare(tick, reading, each, export, before)
                ]
            finally:
                export.close()
        return bound

    def _compare(
        self,
        tick: Tick,
        reading: Reading,
        following: Following,
        export: Export,
        before: Fingerprint,
    ) -> bool:
        """Compare a table as of a snapshot; whether that was possible."""
        oid = following.table.oid
        described = self._described(oid)
        if described is None:
            reading.compared(following)
            return True  # Gone since; the next look sees it.
        fitted = self._fit(following, described)
        errored = following.phase == Phase.ERRORED
        if errored and isinstance(fitted, Misfit):
            return True
        if not following.seen and isinstance(fitted, Table):
            self._reload(tick, reading, following, fitted)
            return True
        self._follow_on(tick, reading, following, fitted)
        if isinstance(fitted, Misfit):
            return True
        parts = pieces(
            self._config.parameters,
            fitted,
            export.snapshot,
            tasks=1,
            server_version=self._upstream.control.server_version,
        )
        failure: DefiniteError | None = None
        rows: list[pa.RecordBatch] = []
        try:
            rows = list(chain.from_iterable(piece.read() for piece in parts))
        except DefiniteError as error:
            failure = error
        # SUBTLE: to a snapshot from before a rewrite a table is empty, and a COPY that
        # begins after it reads that. So nothing may have happened to it since before.
        if self._look().tables.get(oid) != before.tables.get(oid):
            return False
        if failure is not None:
            self._give_up(reading, following, failure)
            return True
        differing = tick.compare(fitted.collection, rows)
        reading.compared(following)
        if errored:
            tick.recover(fitted.collection)
            following.phase, following.error, following.failure = Phase.LIVE, "", None
        log.info(
            "table was compared",
            extra=fields(source=self.name, table=fitted.name, differing=differing),
        )
        return True

    # What the catalogue says.

    def _look(self) -> Fingerprint:
        return fingerprint(
            self._upstream.control,
            self._config.publication,
            self._tables,
            last=self._fingerprint,
        )

    def _described(self, oid: int) -> PgTable | None:
        found = describe(self._upstream.control, self._config.publication, [oid])
        return next((each for each in found if each.oid == oid), None)

    def _chosen(self, published: Sequence[PgTable]) -> list[PgTable]:
        return [each for each in published if self._config.spec_of(each.table_name) is not None]

    def _follow(self, described: PgTable) -> Table:
        spec = self._config.spec_of(described.table_name)
        if spec is None:
            raise InternalError(f'table "{described.table_name}" is not to be followed')
        return follow(self.name, described, spec)

    # What is written down.

    def _write_notes(self, tick: Tick, bound: int) -> None:
        last = None if self._tail is None else self._tail.last
        written: dict[str, Any] = {
            **notes.streamed(bound, last),
            **notes.tables(self._tables.values()),
            **notes.order(self._order),
            **notes.lost(None),
        }
        if self._fingerprint is not None:
            written |= notes.fingerprint(self._fingerprint)
        for oid in self._forgotten:
            tick.remember(f"table/{oid}", None)
        for name, value in written.items():
            tick.remember(name, value)

    def _table_status(self, following: Following) -> Mapping[str, Any]:
        copy = next((each for each in self._copies if each.following is following), None)
        return {
            "name": following.table.name,
            "collection": following.table.collection,
            "phase": str(following.phase),
            "rows": copy.load.rows() if copy is not None else following.rows,
            "estimated_rows": following.table.described.estimated_rows,
            "bytes": following.table.described.bytes,
            "error": following.error or None,
        }


def _agree(described: PgTable, mark: TableMark | None) -> bool:
    """Whether a description has the columns that a fingerprint has."""
    return mark is None or [
        (column.number, column.name, column.type.oid, column.typmod) for column in described.columns
    ] == [(column.number, column.name, column.type, column.typmod) for column in mark.columns]
