"""The server as the source knows it: who it is, its slot, how far it has come.

Every connection is checked before it is believed, the first as well as each
later one, and each probe too: the server behind an address may have been
restored, or another one promoted in its place (hazard B5).
"""

import math
import random
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.clock import Clock
from penstock.errors import InternalError, Problem, SourceError, TransientError
from penstock.sources.postgres.catalog import find_oids, published_tables
from penstock.sources.postgres.checks import (
    check,
    create_publication,
    may_create_publication,
    require,
)
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.connect import Connection, connect, quote_literal
from penstock.sources.postgres.errors import (
    NotReady,
    OtherHistory,
    SlotInvalidated,
    SlotLost,
    SlotPassed,
)
from penstock.sources.postgres.identity import (
    Behind,
    ForkedAfter,
    ForkedBefore,
    Identity,
    OtherServer,
    Probe,
    Same,
    identify,
    judge,
    probe,
)
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.names import TableName, identifier
from penstock.sources.postgres.publication import (
    Maker,
    alter_publication,
    find_publication,
    made_for,
    may_drop,
)
from penstock.sources.postgres.slots import (
    Blocker,
    SlotState,
    create_slot,
    drop_slot,
    inspect_slot,
    our_slots,
    pass_slot,
    slot_name,
    terminate_holder,
)
from penstock.sources.postgres.snapshot import copies_of, take_up
from penstock.sources.postgres.stream import ReplicationStream
from penstock.telemetry import fields, logger

__all__ = ["Export", "SetBack", "Upstream"]

log = logger("sources.postgres")

COPY_PROGRESS_SINCE: Final = 14_00_00
"""The first version that tells how far a COPY has come."""

BINARY_SINCE: Final = 14_00_00
"""The first version that streams values in binary."""

NOT_LET_IN: Final = "28"
"""The class of codes of a server that refuses a login."""

CODED: Final = 100
"""So often a server that we never followed is asked why it refuses; each time costs memory."""

GIVE_UP_S: Final = 5.0
"""So long we wait for a server to hear that a slot is not wanted any more."""

SILENT_MS: Final = 2_000
"""Silence after which the wait for an answer is reported."""

NUDGE_MS: Final = 200
"""How long a flush may be waited for before the server is given a reason for one."""


class SetBack(OtherHistory):
    """The server we know, without some of what we hold: restored, or taken over by a standby."""


@dataclass(eq=False, slots=True)
class Export:
    """A snapshot that others can take up, as long as its connection does nothing else."""

    connection: Connection
    """One that holds no slot: a temporary one would keep the server's log as long as we copy."""

    consistent_point: int
    """The snapshot holds what committed below this, and nothing else."""

    snapshot: str

    def close(self) -> None:
        """Let go of the snapshot."""
        self.connection.close()


class ExportUnderWay:
    """A snapshot that is being exported, in a thread of its own.

    A slot is made only once every transaction that was running has ended, which may
    take hours; nothing else waits for that.
    """

    def __init__(self, create: Callable[[threading.Event], Export], name: str) -> None:
        self._create = create
        self._stop = threading.Event()
        self._export: Export | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"export {name}", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether it is there, or has failed."""
        return not self._thread.is_alive()

    def result(self) -> Export:
        """The export, once it is done."""
        if self._error is not None:
            raise self._error
        if self._export is None:
            raise InternalError("a snapshot was asked for before it was exported")
        return self._export

    def give_up(self) -> None:
        """Nobody wants it any more."""
        self._stop.set()
        self._thread.join(GIVE_UP_S)
        if self._export is not None:
            self._export.close()

    def _run(self) -> None:
        try:
            export = self._create(self._stop)
        except Exception as error:  # noqa: BLE001 - told to whoever asks for the result
            self._error = error
            return
        self._export = export
        if self._stop.is_set():
            export.close()


class Upstream:
    """One database of one server."""

    def __init__(
        self,
        name: str,
        config: PostgresConfig,
        *,
        location: str,
        clock: Clock,
        chance: random.Random,
    ) -> None:
        self._name = name
        self._config = config
        self._location = location
        self._clock = clock
        self._chance = chance
        self._control: Connection | None = None
        self._streaming: Connection | None = None
        self._identity: Identity | None = None
        self._slot = ""
        self._nudged_ms = 0
        self._tried = 0
        self.waits_for = ""
        """What the server keeps us waiting for, if it does."""

        self.connect_timeout_s: float | None = None
        """Upper bound of the time to connect, in addition to what the file asks for."""

        self.stop = threading.Event()
        """Set to give up waiting for a slot; whoever owns us may put their own here."""

    @property
    def control(self) -> Connection:
        """The connection for questions."""
        if self._control is None:
            raise InternalError(f'postgres source "{self._name}" is not connected')
        return self._control

    @property
    def identity(self) -> Identity:
        """Who the server is."""
        if self._identity is None:
            raise InternalError(f'postgres source "{self._name}" is not connected')
        return self._identity

    @property
    def slot(self) -> str:
        """The name of our slot."""
        return self._slot

    def open(self, *, first: bool = False) -> None:
        """Connect, and learn who is there.

        Raises:
            NotReady: it is the `first` time, and we may not; it tells what to do.
        """
        self.close()
        try:
            coded = first and self._tried < CODED
            self._tried += 1
            self._control = self._connect(replication=False, coded=coded)
        except TransientError as error:
            if first and error.sqlstate.startswith(NOT_LET_IN):
                # One that was let in before may be let in again; this one never was.
                problem = Problem(
                    "it does not let us in",
                    detail=error.detail,
                    hint="Check user and password, and that its pg_hba.conf has a line for them.",
                )
                raise NotReady(where=self._config.where, problems=[problem]) from error
            raise
        try:
            with self._connect(replication=True) as connection:
                self._identity = identify(connection)
        except TransientError:
            if first:
                # A role that may not replicate is told as much here, and nothing else; the
                # checks say what would help, with whatever else is missing.
                require(check(self._control, self._config), where=self._config.where)
            raise
        found = probe(self._control)
        if found.standby:
            raise TransientError(
                f'postgres source "{self._name}" is connected to a standby',
                hint="Connect to the primary; what runs keeps trying, until the server is promoted "
                "or another answers.",
            )
        self._must_be_same(found.system_id, found.timeline)

    def recognise(self, known: Identity, *, durable: int) -> None:
        """It must be the server that was `known`, with all that committed below `durable`.

        Raises:
            OtherHistory: it is another server.
            SetBack: it is that server, without some of it.
        """
        match judge(known, self.identity, Lsn(durable)):
            case Same() | ForkedAfter():
                return
            case OtherServer() as verdict:
                raise OtherHistory(location=self._location, source=self._name, reason=str(verdict))
            case (ForkedBefore() | Behind()) as verdict:
                raise SetBack(location=self._location, source=self._name, reason=str(verdict))

    def check(self, *, make: bool = True) -> None:
        """Before anything is made: all that must be so on the server.

        The publication is made, or with `make` not it is looked whether it could be.

        Raises:
            NotReady: it is not so; it tells what to do about each problem.
        """
        if make:
            create_publication(self.control, self._config, made_for=self._as_maker)
        could = not make and (self._made_it() or may_create_publication(self.control, self._config))
        require(check(self.control, self._config, made=could), where=self._config.where)

    def probe(self, *, durable: int) -> Probe:
        """How far the server has come; it must still be the same one."""
        found = probe(self.control)
        self._must_be_same(found.system_id, found.timeline)
        if found.flush_lsn.position < durable and found.insert_lsn.position < durable:
            verdict = Behind(found.insert_lsn, Lsn(durable))
            raise SetBack(location=self._location, source=self._name, reason=str(verdict))
        return found

    def is_answering(self) -> bool:
        """Return whether no answer has been due for long. Safe from another thread."""
        now = self._clock.boot_ms()
        connections = filter(None, (self._control, self._streaming))
        silent_since_ms = (connection.silent_since_ms for connection in connections)
        return all(since is None or now - since < SILENT_MS for since in silent_since_ms)

    def new_slot(self) -> str:
        """A name for a slot that is about to be created."""
        self._slot = self._another_name()
        return self._slot

    def _another_name(self) -> str:
        return slot_name(self._name, self.another())

    def another(self) -> str:
        """A name that nothing else has."""
        return f"{self._chance.getrandbits(48):012x}"

    def create_slot(self) -> Export:
        """Create the slot, and export the snapshot of its consistent point."""
        return self._create(self._slot, self.stop, temporary=False)

    def export(self) -> Export:
        """A snapshot of its own, with the consistent point of a slot that ends with it."""
        return self._create(self._another_name(), self.stop, temporary=True)

    def begin_export(self) -> ExportUnderWay:
        """Begin to export a snapshot, without waiting for what the server waits for."""
        name = self._another_name()
        return ExportUnderWay(lambda stop: self._create(name, stop, temporary=True), name)

    def take_slot(self, name: str, *, durable: int) -> None:
        """Go on with the slot, which must hold all that committed at `durable` or later.

        Raises:
            SlotLost: it does not exist.
            SlotInvalidated: the server gave it up.
            SlotPassed: it was read by somebody else.
        """
        self._slot = name
        state = inspect_slot(self.control, name)
        source, resume = self._name, Lsn(durable)
        if state is None:
            raise SlotLost(location=self._location, source=source, slot=name, resume_from=resume)
        if state.lost:
            raise SlotInvalidated(
                location=self._location,
                source=source,
                slot=name,
                reason=state.invalidation_reason or "wal_removed",
                resume_from=resume,
            )
        if state.confirmed_flush is not None and state.confirmed_flush > resume:
            raise SlotPassed(
                location=self._location,
                source=source,
                slot=name,
                confirmed=state.confirmed_flush,
                resume_from=resume,
            )

    def drop_slot(self, name: str) -> None:
        """Remove a slot of ours, if it is there."""
        drop_slot(self.control, name, nonce=name.rsplit("_", 1)[1], clock=self._clock)

    def publish_named(self) -> None:
        """Put into a publication that we made what the file names by now."""
        if not self._lists_tables():
            return
        named = {spec.name for spec in self._config.tables or ()}
        there = published_tables(self.control, self._config.publication)
        for name in sorted(named.difference(each.table_name for each in there), key=str):
            if find_oids(self.control, [name]):
                alter_publication(self.control, self._config.publication, "ADD", name)

    def unpublish(self, names: Sequence[TableName], *, slots: Collection[str]) -> None:
        """Take tables out of a publication that we made, unless others of ours may need them.

        `slots` are those of this source.
        """
        if not self._lists_tables():
            return
        if others := self._slots_but(slots):
            self._keeps(
                "what is left out stays published, as other slots of ours may need it", others
            )
            return
        there = published_tables(self.control, self._config.publication)
        for name in sorted({*names}.intersection(each.table_name for each in there), key=str):
            alter_publication(self.control, self._config.publication, "DROP", name)

    def drop_publication(self) -> None:
        """Drop the publication, if one of ours made it and no slot of ours is there any more.

        It need not be this source that made it: the last to go takes it away.
        """
        publication = self._config.publication
        if made_for(self.control, publication) is None:
            return
        if others := self._slots_but(()):
            self._keeps("the publication stays, as other slots of ours may need it", others)
        elif not self._made_it() and not may_drop(self.control, publication):
            self._keeps("the publication stays, as it belongs to another role", ())
        else:
            self.control.execute(f"DROP PUBLICATION {identifier(publication)}")

    @property
    def _as_maker(self) -> Maker:
        return Maker.of(self._name, self._location)

    def _made_it(self) -> bool:
        maker = made_for(self.control, self._config.publication)
        return maker is not None and maker.is_also(self._as_maker)

    def _lists_tables(self) -> bool:
        """Whether we made the publication, and it names tables that can come and go."""
        found = find_publication(self.control, self._config.publication)
        return found is not None and not found.all_tables and self._made_it()

    def _slots_but(self, known: Collection[str]) -> list[str]:
        return [each.name for each in our_slots(self.control) if each.name not in known]

    def _keeps(self, why: str, slots: Sequence[str]) -> None:
        log.warning(
            why,
            extra=fields(
                source=self._name, publication=self._config.publication, slots=",".join(slots)
            ),
        )

    def retire_slot(self, name: str, *, shared: bool) -> None:
        """Remove a slot that was ours; if it is `shared` and in use, it is theirs now."""
        state = inspect_slot(self.control, name)
        if state is not None and not (shared and state.active_pid is not None):
            self.drop_slot(name)

    def slot_state(self) -> SlotState | None:
        """The slot, as the server has it."""
        return inspect_slot(self.control, self._slot)

    def free_slot(self) -> SlotState | None:
        """End whoever else reads from the slot; what it is then."""
        terminate_holder(self.control, self._slot, clock=self._clock)
        return self.slot_state()

    def pass_slot(self, lsn: Lsn) -> None:
        """Nothing below `lsn` will be asked of the slot, which nobody reads."""
        state = self.slot_state()
        if state is not None and state.confirmed_flush is not None and state.confirmed_flush < lsn:
            pass_slot(self.control, self._slot, lsn)

    def stream(self, start: Lsn, *, binary: bool) -> ReplicationStream:
        """The changes of the slot, from `start` on; values in binary, if that is wanted."""
        connection = self._streaming = self._connect_checked()
        try:
            return ReplicationStream(
                connection,
                slot=self._slot,
                start=start,
                publications=[self._config.publication],
                binary=binary and connection.server_version >= BINARY_SINCE,
                clock=self._clock,
            )
        except SourceError as error:
            connection.close()
            # It was there a moment ago. Why it is not now is found out at the next start.
            raise TransientError(
                f'stream of postgres source "{self._name}" could not be begun: {error}',
                detail=error.detail,
                hint=error.hint,
            ) from error

    def being_copied(self) -> dict[int, int]:
        """By table, how many rows connections of ours have copied that are still at it."""
        if self.control.server_version < COPY_PROGRESS_SINCE:
            return {}
        rows = self.control.query(
            "SELECT pg_catalog.split_part(a.application_name, ' ', 3),"
            " pg_catalog.sum(p.tuples_processed)"
            " FROM pg_catalog.pg_stat_progress_copy p"
            " JOIN pg_catalog.pg_stat_activity a USING (pid)"
            f" WHERE a.datname = pg_catalog.current_database()"
            f" AND a.application_name LIKE {quote_literal(copies_of('%'))} GROUP BY 1"
        )
        return {int(oid or 0): int(count or 0) for oid, count in rows}

    def nudge(self, bound: int) -> None:
        """Nothing comes. If that is because the server has not flushed, give it a reason to.

        What a transaction that is still open has written is not flushed until
        somebody commits; a commit of our own, of nothing, is somebody's.
        """
        now = self._clock.boot_ms()
        if now - self._nudged_ms < NUDGE_MS:
            return
        self._nudged_ms = now
        if probe(self.control).flush_lsn.position < bound:
            self.control.query("SELECT pg_catalog.txid_current()")

    def close(self) -> None:
        """Let go of the server."""
        if self._control is not None:
            self._control.close()
        self._control = self._streaming = None

    def _connect(self, *, replication: bool, coded: bool = False) -> Connection:
        parameters = dict(self._config.parameters)
        if self.connect_timeout_s is not None:
            given_s = float(parameters.get("connect_timeout") or 0) or math.inf
            parameters["connect_timeout"] = str(min(given_s, self.connect_timeout_s))
        return connect(
            parameters,
            replication=replication,
            coded=coded,
            application_name=f"penstock {self._name}",
            stop=self.stop,
        )

    def _connect_checked(self) -> Connection:
        """A connection for replication, to whom we are connected already."""
        connection = self._connect(replication=True)
        try:
            found = identify(connection)
            self._must_be_same(found.system_id, found.timeline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _must_be_same(self, system_id: int, timeline: int) -> None:
        if (system_id, timeline) != (self.identity.system_id, self.identity.timeline):
            raise TransientError(
                f'postgres source "{self._name}" was moved to another timeline or server',
                hint="It is connected again, and checked.",
            )

    def _create(self, name: str, stop: threading.Event, *, temporary: bool) -> Export:
        connection = self._connect_checked()
        # Its own, because others may ask the control connection meanwhile.
        watcher = self._connect(replication=False)
        try:
            created = create_slot(
                connection,
                name,
                temporary=temporary,
                watcher=watcher,
                waiting=self._waiting_for,
                stop=stop,
            )
            if created.snapshot is None:
                raise InternalError(f'slot "{name}" was created without a snapshot')
            return self._exported(created.snapshot, created.consistent_point.position)
        finally:
            self.waits_for = ""
            watcher.close()
            connection.close()

    def _exported(self, snapshot: str, consistent_point: int) -> Export:
        """Take a snapshot up and export it again, so that whoever exported it can go."""
        connection = self._connect(replication=False)
        try:
            connection.execute("SET idle_in_transaction_session_timeout = 0")
            connection.execute("BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ")
            take_up(connection, snapshot, "of a new slot")
            [(exported,)] = connection.query("SELECT pg_catalog.pg_export_snapshot()")
        except BaseException:
            connection.close()
            raise
        return Export(connection, consistent_point, str(exported))

    def _waiting_for(self, blockers: list[Blocker]) -> None:
        if blockers:
            self.waits_for = f"{blockers[0]} to end, so that a slot can be created"
