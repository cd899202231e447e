"""Connections to one server: its identity, slot, publication and position.

The identity of the server is checked on every connection and at every probe. The server
behind an address may have been restored, or replaced by a promoted standby (hazard B5).
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
"""First server version that reports the progress of a COPY."""

BINARY_SINCE: Final = 14_00_00
"""First server version that streams values in binary format."""

NOT_LET_IN: Final = "28"
"""SQLSTATE class of a rejected login."""

CODED: Final = 100
"""Maximum number of login attempts that request the SQLSTATE; each attempt costs memory."""

GIVE_UP_S: Final = 5.0
"""Seconds to wait for the cancellation of a slot creation."""

SILENT_MS: Final = 2_000
"""Silence after which the wait for an answer is reported, in milliseconds."""

NUDGE_MS: Final = 200
"""Milliseconds to wait for a flush of the WAL before a heartbeat causes one."""


class SetBack(OtherHistory):
    """The history of the known server was rewound: it was restored, or a standby was promoted."""


@dataclass(eq=False, slots=True)
class Export:
    """An exported snapshot, valid while its connection stays idle in its transaction."""

    connection: Connection
    """Connection without a slot: a temporary slot would retain WAL during the whole snapshot."""

    consistent_point: int
    """LSN such that the snapshot contains exactly the commits below it."""

    snapshot: str

    def close(self) -> None:
        """Release the snapshot."""
        self.connection.close()


class ExportUnderWay:
    """Export of a snapshot in a background thread.

    A slot is created only after all running transactions have ended, which may take hours.
    The thread prevents this wait from blocking anything else.
    """

    def __init__(self, create: Callable[[threading.Event], Export], name: str) -> None:
        self._create = create
        self._stop = threading.Event()
        self._export: Export | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"export {name}", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Return whether the export has succeeded or failed."""
        return not self._thread.is_alive()

    def result(self) -> Export:
        """Return the finished export, or raise its error."""
        if self._error is not None:
            raise self._error
        if self._export is None:
            raise InternalError("a snapshot was asked for before it was exported")
        return self._export

    def give_up(self) -> None:
        """Cancel the export, and release its snapshot."""
        self._stop.set()
        self._thread.join(GIVE_UP_S)
        if self._export is not None:
            self._export.close()

    def _run(self) -> None:
        try:
            export = self._create(self._stop)
        except Exception as error:  # noqa: BLE001 - raised by result()
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
        """Description of the current wait for the server, or an empty string."""

        self.connect_timeout_s: float | None = None
        """Upper bound of the time to connect, in seconds, in addition to the file's setting."""

        self.stop = threading.Event()
        """Event that cancels waits for a slot. The owner may replace it."""

    @property
    def control(self) -> Connection:
        """Return the connection for queries."""
        if self._control is None:
            raise InternalError(f'postgres source "{self._name}" is not connected')
        return self._control

    @property
    def identity(self) -> Identity:
        """Return the identity of the server."""
        if self._identity is None:
            raise InternalError(f'postgres source "{self._name}" is not connected')
        return self._identity

    @property
    def slot(self) -> str:
        """Return the name of our slot."""
        return self._slot

    def open(self, *, first: bool = False) -> None:
        """Connect, and read the identity of the server.

        Raises:
            NotReady: on the `first` connection, access is denied; its problems have hints.
        """
        self.close()
        try:
            coded = first and self._tried < CODED
            self._tried += 1
            self._control = self._connect(replication=False, coded=coded)
        except TransientError as error:
            if first and error.sqlstate.startswith(NOT_LET_IN):
                # A login that succeeded before may succeed again; this one has never succeeded.
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
                # Without the REPLICATION privilege, the connection fails with this fact alone. The
                # checks report the remedy, together with all other missing prerequisites.
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
        """Verify that this is the `known` server, with all commits below `durable`.

        Raises:
            OtherHistory: this is another server.
            SetBack: this is the known server, but some of these commits are missing.
        """
        match judge(known, self.identity, Lsn(durable)):
            case Same() | ForkedAfter():
                return
            case OtherServer() as verdict:
                raise OtherHistory(location=self._location, source=self._name, reason=str(verdict))
            case (ForkedBefore() | Behind()) as verdict:
                raise SetBack(location=self._location, source=self._name, reason=str(verdict))

    def check(self, *, make: bool = True) -> None:
        """Check all prerequisites on the server before anything else is created.

        With `make`, create the publication. Without, check that it could be created.

        Raises:
            NotReady: prerequisites are missing; each problem has a hint.
        """
        if make:
            create_publication(self.control, self._config, made_for=self._as_maker)
        could = not make and (self._made_it() or may_create_publication(self.control, self._config))
        require(check(self.control, self._config, made=could), where=self._config.where)

    def probe(self, *, durable: int) -> Probe:
        """Return the position of the server, after a check of its identity.

        Raises:
            SetBack: the server is below `durable`.
        """
        found = probe(self.control)
        self._must_be_same(found.system_id, found.timeline)
        if found.flush_lsn.position < durable and found.insert_lsn.position < durable:
            verdict = Behind(found.insert_lsn, Lsn(durable))
            raise SetBack(location=self._location, source=self._name, reason=str(verdict))
        return found

    def is_answering(self) -> bool:
        """Return whether no answer is long overdue. Safe from another thread."""
        now = self._clock.boot_ms()
        connections = filter(None, (self._control, self._streaming))
        silent_since_ms = (connection.silent_since_ms for connection in connections)
        return all(since is None or now - since < SILENT_MS for since in silent_since_ms)

    def new_slot(self) -> str:
        """Choose and return a name for the slot to create."""
        self._slot = self._another_name()
        return self._slot

    def _another_name(self) -> str:
        return slot_name(self._name, self.another())

    def another(self) -> str:
        """Return a unique name."""
        return f"{self._chance.getrandbits(48):012x}"

    def create_slot(self) -> Export:
        """Create the slot, and export the snapshot of its consistent point."""
        return self._create(self._slot, self.stop, temporary=False)

    def export(self) -> Export:
        """Export a snapshot with the consistent point of a temporary slot."""
        return self._create(self._another_name(), self.stop, temporary=True)

    def begin_export(self) -> ExportUnderWay:
        """Start to export a snapshot, without waiting for running transactions."""
        name = self._another_name()
        return ExportUnderWay(lambda stop: self._create(name, stop, temporary=True), name)

    def take_slot(self, name: str, *, durable: int) -> None:
        """Resume with the slot, which must contain all commits at `durable` or later.

        Raises:
            SlotLost: the slot does not exist.
            SlotInvalidated: the server invalidated the slot.
            SlotPassed: another reader advanced the slot.
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
        """Drop a slot of ours, if it exists."""
        drop_slot(self.control, name, nonce=name.rsplit("_", 1)[1], clock=self._clock)

    def publish_named(self) -> None:
        """Add the tables that the file names to a publication that this source created."""
        if not self._lists_tables():
            return
        named = {spec.name for spec in self._config.tables or ()}
        there = published_tables(self.control, self._config.publication)
        for name in sorted(named.difference(each.table_name for each in there), key=str):
            if find_oids(self.control, [name]):
                alter_publication(self.control, self._config.publication, "ADD", name)

    def unpublish(self, names: Sequence[TableName], *, slots: Collection[str]) -> None:
        """Remove tables from our publication, unless other slots of Penstock may need them.

        `slots` are the slots of this source.
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
        """Drop the publication, if Penstock created it and no slot of Penstock remains.

        Another source may have created it: the last source to be dropped removes it.
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
        """Return whether this source created the publication and it lists tables by name."""
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
        """Drop a former slot of ours, unless it is `shared` and another reader uses it."""
        state = inspect_slot(self.control, name)
        if state is not None and not (shared and state.active_pid is not None):
            self.drop_slot(name)

    def slot_state(self) -> SlotState | None:
        """Return the state of the slot on the server."""
        return inspect_slot(self.control, self._slot)

    def free_slot(self) -> SlotState | None:
        """Terminate any reader of the slot, and return its state."""
        terminate_holder(self.control, self._slot, clock=self._clock)
        return self.slot_state()

    def pass_slot(self, lsn: Lsn) -> None:
        """Advance the slot, which has no reader, to `lsn`. Changes below are not needed."""
        state = self.slot_state()
        if state is not None and state.confirmed_flush is not None and state.confirmed_flush < lsn:
            pass_slot(self.control, self._slot, lsn)

    def stream(self, start: Lsn, *, binary: bool) -> ReplicationStream:
        """Return the changes of the slot from `start`; `binary` requests binary values."""
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
            # The slot existed shortly before. The next start determines the cause.
            raise TransientError(
                f'stream of postgres source "{self._name}" could not be begun: {error}',
                detail=error.detail,
                hint=error.hint,
            ) from error

    def being_copied(self) -> dict[int, int]:
        """Return the rows read so far by running snapshot connections, by table oid."""
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
        """Cause a WAL flush if the stream is idle because the server has not flushed up to `bound`.

        The records of an open transaction are not flushed until some transaction commits. This
        heartbeat commits an empty transaction.
        """
        now = self._clock.boot_ms()
        if now - self._nudged_ms < NUDGE_MS:
            return
        self._nudged_ms = now
        if probe(self.control).flush_lsn.position < bound:
            self.control.query("SELECT pg_catalog.txid_current()")

    def close(self) -> None:
        """Close the connections."""
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
        """Return a replication connection to the server that is already connected."""
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
        # A separate connection, because other threads may use the control connection.
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
        """Import a snapshot and export it again: the session that exported it can then end."""
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
