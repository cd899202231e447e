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

from penstock.clock import Clock
from penstock.errors import DefiniteError, InternalError, TransientError
from penstock.failpoints import Failpoint, pass_by
from penstock.sources.postgres import notes
from penstock.sources.postgres.catalog import PgTable, describe, published_tables
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.cures import Cure, Follow, GiveUp, Join, Resync, cures
from penstock.sources.postgres.drift import compare
from penstock.sources.postgres.errors import SlotInvalidated, SlotLost, SlotPassed
from penstock.sources.postgres.feedback import Feedback
from penstock.sources.postgres.fingerprint import Fingerprint, fingerprint
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.pgoutput import Relation
from penstock.sources.postgres.reading import Following, Phase, Reading
from penstock.sources.postgres.snapshot import pieces
from penstock.sources.postgres.stream import ReplicationStream
from penstock.sources.postgres.tables import Table, defaults_of, follow
from penstock.sources.postgres.tail import AnotherHistory, Seen, Tail
from penstock.sources.postgres.upstream import Export, SetBack, Upstream
from penstock.sources.source import Frontier, Load, Loader, Memory, Probe, Tick
from penstock.telemetry import fields, logger

__all__ = ["PostgresSource"]

log = logger("sources.postgres")

LOST: Final = (SlotLost, SlotInvalidated, SlotPassed, SetBack)
"""Changes that were not read yet will never come."""

WHOLE: Final = ()
"""The one partition of a Postgres source."""


@dataclass(slots=True)
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
        self._asked: set[str] | None = None
        self._probed: Probe | None = None

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
        self._probed = Probe({WHOLE: reached}, found.now_ms)
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
        reading = Reading(tick, self._tables, learn=self._learn, order=self._order)
        if self._lost is not None:
            for oid, following in self._tables.items():
                if following.phase == Phase.LIVE:
                    reading.odd[oid] = self._lost.reason
        self._read(reading, upto[WHOLE])
        bound = upto[WHOLE]
        for name in self._stale:
            tick.throw_away(name)
        self._stale = []
        self._keep_copies(tick)
        bound = self._cure(tick, reading, bound)
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
        behind = (self._probed.frontier[WHOLE] if self._probed else 0) - self._drawn
        return {
            "kind": self.kind,
            "server": self._config.where,
            "phase": "copying" if self._copies else "following",
            "lsn": str(Lsn(self._drawn)),
            "lag_bytes": max(0, behind),
            "slot": self._upstream.slot,
            "slot_bytes": None if slot is None else slot.retained_bytes,
            "waits_for": self._upstream.waits_for
            or (f"the first copy of {copying[0].following.table.name}" if copying else ""),
            "tables": [self._table_status(each) for each in self._tables.values()],
        }

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
        self._stale = [each.pending for each in unfinished]
        if self._lost is not None and self._lost.slot == (known.slot and known.slot.name):
            self._start_over(known, self._lost, unfinished)
        else:
            self._memory.write_down(notes.identity(self._upstream.identity))
        self._drawn = self._durable
        if unfinished:
            self._copy_anew(unfinished)
        self._begin_stream(known.last if self._lost is None else None)

    def _judge(self, known: notes.Notes) -> notes.Lost | None:
        """Whether the server has all that comes after what is durable here, and if not, why."""
        slot, identity = known.slot, known.identity
        assert slot is not None
        assert identity is not None
        if known.lost is not None and not slot.created:
            return notes.Lost(slot.name, known.lost.reason)
        # What was streamed says nothing about the slot that came after a loss.
        self._durable = known.streamed if known.lost is None else slot.consistent_point
        try:
            self._upstream.recognise(identity, durable=self._durable)
            if known.lost is not None and known.lost.slot == slot.name:
                return known.lost
            self._upstream.take_slot(slot.name, durable=self._durable)
        except LOST as error:
            return notes.Lost(slot.name, f"{error}: {error.detail}")
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
        self._upstream.retire_slot(lost.slot)
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
                self._upstream.retire_slot(known.slot.replaces)

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
        self._feedback = Feedback(self._stream, self._clock, durable=Lsn(min(start, self._durable)))
        self._feedback.start()

    # One tick.

    def _read(self, reading: Reading, bound: int) -> None:
        if self._tail is None:
            raise InternalError(f'source "{self.name}" was drawn from while it was closed')
        try:
            self._tail.upto(bound, reading, waiting=lambda: self._upstream.nudge(bound))
        except AnotherHistory as error:
            raise self._loses(error) from error

    def _keep_copies(self, tick: Tick) -> None:
        """Link the files of copies that are finished."""
        for copy in [each for each in self._copies if each.load.done()]:
            following = copy.following
            tick.keep_copy(following.table.collection, copy.load.result())
            following.phase, following.rows = Phase.LOADED, copy.load.rows()
            pass_by(Failpoint.COPY_DONE)
            self._forget_copy(copy)

    def _reveal(self, reading: Reading, bound: int) -> None:
        """Let loaded tables be seen, all of them together."""
        waiting = [
            each for each in self._tables.values() if each.phase in (Phase.LOADING, Phase.LOADED)
        ]
        if any(each.phase == Phase.LOADING or each.snapshot_lsn > bound for each in waiting):
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
                bound = max(bound, self.probe().frontier[WHOLE])
                self._read(reading, bound)
                again = self._look()
                if again == after:
                    break
                after = again
            wanted = self._wanted(before, after, reading)
        self._fingerprint = after
        resyncs = [cure for cure in wanted if isinstance(cure, Resync)]
        for cure in wanted:
            self._obey(tick, reading, cure)
        if resyncs:
            bound = self._resync(tick, reading, resyncs)
        return bound

    def _wanted(self, before: Fingerprint, after: Fingerprint, reading: Reading) -> list[Cure]:
        live = {
            oid: each.table for oid, each in self._tables.items() if each.phase != Phase.ERRORED
        }
        wanted = cures(compare(before, after), live, reading.truncated_by)
        # Messages of an odd table were passed over, so its description alone is not enough.
        enough = {cure.oid for cure in wanted if isinstance(cure, GiveUp | Resync)}
        odd = {oid: why for oid, why in reading.odd.items() if oid in live and oid not in enough}
        wanted = [cure for cure in wanted if cure.oid not in odd]
        wanted += [Resync(oid, reason) for oid, reason in odd.items()]
        named = {cure.oid for cure in wanted}
        wanted += [
            Resync(oid, "it was asked for")
            for oid, each in self._tables.items()
            if self._asked is not None
            and (not self._asked or each.table.name in self._asked)
            and oid not in named
        ]
        return wanted

    def resync(self, tables: Sequence[str]) -> None:
        """At the next tick, compare these tables with their collections; all, if none is named."""
        known = {each.table.name for each in self._tables.values()}
        for name in tables:
            if name not in known:
                raise DefiniteError(
                    f'source "{self.name}" does not follow a table "{name}"',
                    hint=f"It follows {', '.join(sorted(known))}.",
                )
        self._asked = set(tables)

    def _obey(self, tick: Tick, reading: Reading, cure: Cure) -> None:
        match cure:
            case GiveUp(oid=oid, error=error):
                log.warning("table is in error", extra=fields(source=self.name, error=str(error)))
                reading.fail(self._tables[oid], error)
            case Follow(oid=oid):
                self._follow_on(tick, reading, self._tables[oid])
            case Resync(oid=oid, reason=reason):
                log.info(
                    "table is compared",
                    extra=fields(
                        source=self.name, table=self._tables[oid].table.name, reason=reason
                    ),
                )
            case Join(oid=oid, name=name):
                self._join(oid, name)

    def _follow_on(self, tick: Tick, reading: Reading, following: Following) -> None:
        """The catalogue has something new to say of a table; what is stored grows with it."""
        described = self._described(following.table.oid)
        if described is None:
            return  # Gone since; the next look sees it.
        self._regrow(tick, reading, following, self._follow(described))

    def _regrow(self, tick: Tick, reading: Reading, following: Following, table: Table) -> None:
        before = following.table
        if table.schema.equals(before.schema, check_metadata=False):
            following.table = replace(table, collection=before.collection)
            return
        names = [column.name for column in before.columns]
        if [column.name for column in table.columns][: len(names)] != names:
            reading.fail(following, _misfit(before, "its columns are others than before"))
            return
        if following.phase != Phase.LIVE:
            self._reload(tick, following, table)
            return
        reading.flush(following)
        following.table = table
        tick.grow(table.collection, table.schema, defaults_of(table.columns[len(names) :]))

    def _reload(self, tick: Tick, following: Following, table: Table) -> None:
        """A table changed while it was being copied: begin its copy again."""
        log.info(
            "table changed while it was being copied; copying again",
            extra=fields(source=self.name, table=table.name),
        )
        for copy in [each for each in self._copies if each.following is following]:
            copy.load.abandon()
            self._forget_copy(copy)
        tick.throw_away(following.pending)
        self._loader.unmake(table.collection)
        following.table, following.phase = table, Phase.LOADING
        self._copy_anew([following])

    def _forget_copy(self, copy: _Copy) -> None:
        self._copies.remove(copy)
        if all(each.export is not copy.export for each in self._copies):
            copy.export.close()

    def _learn(
        self, reading: Reading, tick: Tick, following: Following, relation: Relation
    ) -> bool:
        """Messages have more columns; whether the catalogue knows them."""
        described = self._described(following.table.oid)
        if described is None:
            return False
        table = self._follow(described)
        if [column.name for column in table.wire] != [column.name for column in relation.columns]:
            return False
        self._regrow(tick, reading, following, table)
        return following.phase == Phase.LIVE

    def _join(self, oid: int, name: str) -> None:
        if self._config.tables is not None:
            log.warning(
                "table is published and not followed",
                extra=fields(source=self.name, table=name),
            )
            return
        described = self._described(oid)
        if described is None:
            return
        following = Following(self._follow(described), Phase.LOADING)
        taken = {each.table.collection for each in self._tables.values()}
        if following.table.collection in taken:
            log.warning(
                "table has the name of another that was followed; it is not followed",
                extra=fields(source=self.name, table=name),
            )
            return
        self._tables[oid] = following
        self._copy_anew([following])

    def _resync(self, tick: Tick, reading: Reading, wanted: Sequence[Resync]) -> int:
        """Make collections equal to their tables, as of one snapshot, at which the tick is cut."""
        export = self._upstream.export()
        try:
            self._read(reading, export.consistent_point)
            for cure in wanted:
                following = self._tables[cure.oid]
                if following.phase in (Phase.LOADING, Phase.LOADED):
                    described = self._described(cure.oid)
                    if described is not None:
                        self._reload(tick, following, self._follow(described))
                    continue
                self._compare(tick, reading, following, export)
        finally:
            export.close()
        self._asked = None
        return export.consistent_point

    def _compare(self, tick: Tick, reading: Reading, following: Following, export: Export) -> None:
        described = self._described(following.table.oid)
        if described is None:
            return
        table = self._follow(described)
        errored = following.phase == Phase.ERRORED
        if errored:
            following.phase = Phase.LIVE
        self._regrow(tick, reading, following, table)
        if following.phase != Phase.LIVE:
            return
        reading.flush(following)
        reading.odd.pop(table.oid, None)
        parts = pieces(
            self._config.parameters,
            table,
            export.snapshot,
            tasks=1,
            server_version=self._upstream.control.server_version,
        )
        rows = chain.from_iterable(piece.read() for piece in parts)
        differing = tick.compare(table.collection, rows)
        if errored:
            tick.recover(table.collection)
            following.error = ""
        log.info(
            "table was compared",
            extra=fields(source=self.name, table=table.name, differing=differing),
        )

    # What the catalogue says.

    def _look(self) -> Fingerprint:
        return fingerprint(self._upstream.control, self._config.publication, self._tables)

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


def _misfit(table: Table, reason: str) -> DefiniteError:
    return DefiniteError(
        f'table "{table.name}" cannot be followed any more: {reason}',
        detail=f'Collection "{table.collection}" keeps what it held before.',
        hint="Follow it under another source, with a new collection.",
    )
