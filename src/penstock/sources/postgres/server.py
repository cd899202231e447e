"""Identity, slot, probe and heartbeat of one server.

The identity of the server is checked on every connection and at every probe. The server
behind an address may have been restored, or replaced by a promoted standby (hazard B5).
"""

import math
import random
import threading
from typing import Final

from penstock.clock import Clock
from penstock.errors import InternalError, Problem, SourceError, TransientError
from penstock.pgclient import Connection, connect, quote_literal
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.errors import (
    HistoryRewound,
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
    compare_history,
    identify,
    probe,
)
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.preflight import (
    check,
    create_publication,
    may_create_publication,
    require,
)
from penstock.sources.postgres.replication_stream import ReplicationStream
from penstock.sources.postgres.slots import (
    Blocker,
    SlotState,
    advance_slot,
    create_slot,
    drop_slot,
    inspect_slot,
    slot_name,
    terminate_holder,
)
from penstock.sources.postgres.snapshot import application_name_of
from penstock.sources.postgres.snapshot_export import PendingExport, SnapshotExport, export_again
from penstock.sources.postgres.source_publication import SourcePublication

__all__ = ["SourceServer"]

COPY_PROGRESS_SINCE: Final = 14_00_00
"""First server version that reports the progress of a COPY."""

BINARY_SINCE: Final = 14_00_00
"""First server version that streams values in binary format."""

LOGIN_REJECTED: Final = "28"
"""SQLSTATE class of a rejected login."""

SILENT_MS: Final = 2_000
"""Silence after which the wait for an answer is reported, in milliseconds."""

HEARTBEAT_MS: Final = 200
"""Milliseconds to wait for a flush of the WAL before a heartbeat causes one."""


class SourceServer:
    """One database of one server, as a source uses it."""

    def __init__(
        self,
        name: str,
        config: PostgresConfig,
        *,
        location: str,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """Describe the server of source `name` in the lake at the normalized URL `location`."""
        self._name = name
        self._config = config
        self._location = location
        self._clock = clock
        self._rng = rng
        self._control: Connection | None = None
        self._streaming: Connection | None = None
        self._identity: Identity | None = None
        self._slot = ""
        self._heartbeat_ms = 0
        self.publication = SourcePublication(name, config, location)
        self.waits_for = ""
        """Description of the current wait for the server, or an empty string."""

        self.connect_timeout_s: float | None = None
        """Upper bound of the time to connect, in seconds, in addition to the file's setting."""

        self.stop = threading.Event()
        """Event that cancels waits for a slot. The owner may replace it."""

    # Connections and identity.

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

    def open(self, *, first: bool = False) -> None:
        """Connect, and read the identity of the server.

        Raises:
            NotReady: on the `first` connection, access is denied; its problems have hints.
        """
        self.close()
        try:
            self._control = self._connect(replication=False)
        except TransientError as error:
            if first and error.sqlstate.startswith(LOGIN_REJECTED):
                # A login that succeeded before may succeed again; this one has never succeeded.
                problem = Problem(
                    "the server rejected the login",
                    detail=error.detail,
                    hint="Check user and password, and that pg_hba.conf of the server has a line "
                    "for them.",
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
        progress = probe(self._control)
        if progress.standby:
            raise TransientError(
                f'postgres source "{self._name}" is connected to a standby',
                hint="Connect to the primary, or promote the server.",
            )
        self._check_same_server(progress.system_id, progress.timeline)

    def close(self) -> None:
        """Close the connections."""
        if self._control is not None:
            self._control.close()
        self._control = self._streaming = None

    def check(self, *, make: bool = True) -> None:
        """Check all prerequisites on the server before anything else is created.

        With `make`, create the publication. Without, check that it could be created.

        Raises:
            NotReady: prerequisites are missing; each problem has a hint.
        """
        if make:
            create_publication(self.control, self._config, creator=self.publication.creator)
        could = not make and (
            self.publication.is_created_by_source(self.control)
            or may_create_publication(self.control, self._config)
        )
        require(check(self.control, self._config, made=could), where=self._config.where)

    def verify_identity(self, known: Identity, *, durable: int) -> None:
        """Verify that this is the `known` server, with all commits below `durable`.

        Raises:
            OtherHistory: this is another server.
            HistoryRewound: this is the known server, but some of these commits are missing.
        """
        match compare_history(known, self.identity, Lsn(durable)):
            case Same() | ForkedAfter():
                return
            case OtherServer() as verdict:
                raise OtherHistory(location=self._location, source=self._name, reason=str(verdict))
            case (ForkedBefore() | Behind()) as verdict:
                raise self._history_rewound(verdict)

    def _history_rewound(self, verdict: ForkedBefore | Behind) -> HistoryRewound:
        return HistoryRewound(location=self._location, source=self._name, reason=str(verdict))

    def _check_same_server(self, system_id: int, timeline: int) -> None:
        if (system_id, timeline) != (self.identity.system_id, self.identity.timeline):
            raise TransientError(
                f'postgres source "{self._name}" reached another server or timeline',
                hint="The source connects again, and checks the server.",
            )

    def _connect(self, *, replication: bool) -> Connection:
        parameters = dict(self._config.parameters)
        if self.connect_timeout_s is not None:
            configured_s = float(parameters.get("connect_timeout") or 0) or math.inf
            parameters["connect_timeout"] = str(min(configured_s, self.connect_timeout_s))
        return connect(
            parameters,
            replication=replication,
            application_name=f"penstock {self._name}",
            stop=self.stop,
        )

    def _connect_for_replication(self) -> Connection:
        """Return a replication connection to the server that is already connected."""
        connection = self._connect(replication=True)
        try:
            identity = identify(connection)
            self._check_same_server(identity.system_id, identity.timeline)
        except BaseException:
            connection.close()
            raise
        return connection

    # Progress.

    def probe(self, *, durable: int) -> Probe:
        """Return the position of the server, after a check of its identity.

        Raises:
            HistoryRewound: the server is below `durable`.
        """
        progress = probe(self.control)
        self._check_same_server(progress.system_id, progress.timeline)
        if progress.flush_lsn.position < durable and progress.insert_lsn.position < durable:
            raise self._history_rewound(Behind(progress.insert_lsn, Lsn(durable)))
        return progress

    def send_heartbeat(self, bound: int) -> None:
        """Cause a WAL flush if the stream is idle because the server has not flushed up to `bound`.

        The records of an open transaction are not flushed until some transaction commits. This
        heartbeat commits an empty transaction.
        """
        now_ms = self._clock.boot_ms()
        if now_ms - self._heartbeat_ms < HEARTBEAT_MS:
            return
        self._heartbeat_ms = now_ms
        if probe(self.control).flush_lsn.position < bound:
            self.control.query("SELECT pg_catalog.txid_current()")

    def is_answering(self) -> bool:
        """Return whether no answer is long overdue. Safe from another thread."""
        now_ms = self._clock.boot_ms()
        connections = filter(None, (self._control, self._streaming))
        silent_since_ms = (connection.watch.silent_since_ms for connection in connections)
        return all(since is None or now_ms - since < SILENT_MS for since in silent_since_ms)

    def count_snapshot_rows(self) -> dict[int, int]:
        """Return the rows read so far by running snapshot connections, by table oid."""
        if self.control.server_version < COPY_PROGRESS_SINCE:
            return {}
        rows = self.control.query(
            "SELECT pg_catalog.split_part(a.application_name, ' ', 3),"
            " pg_catalog.sum(p.tuples_processed)"
            " FROM pg_catalog.pg_stat_progress_copy p"
            " JOIN pg_catalog.pg_stat_activity a USING (pid)"
            f" WHERE a.datname = pg_catalog.current_database()"
            f" AND a.application_name LIKE {quote_literal(application_name_of('%'))} GROUP BY 1"
        )
        return {int(oid or 0): int(count or 0) for oid, count in rows}

    # Slot and stream.

    @property
    def slot(self) -> str:
        """Return the name of the source's slot."""
        return self._slot

    def new_slot(self) -> str:
        """Choose and return a name for the slot to create."""
        self._slot = self._new_slot_name()
        return self._slot

    def unique_name(self) -> str:
        """Return a unique name."""
        return f"{self._rng.getrandbits(48):012x}"

    def create_slot(self) -> SnapshotExport:
        """Create the slot, and export the snapshot of its consistent point."""
        return self._create_slot(self._slot, self.stop, temporary=False)

    def export(self) -> SnapshotExport:
        """SnapshotExport a snapshot with the consistent point of a temporary slot."""
        return self._create_slot(self._new_slot_name(), self.stop, temporary=True)

    def begin_export(self) -> PendingExport:
        """Start to export a snapshot, without waiting for running transactions."""
        name = self._new_slot_name()
        return PendingExport(lambda stop: self._create_slot(name, stop, temporary=True), name)

    def resume_slot(self, name: str, *, durable: int) -> None:
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

    def slot_state(self) -> SlotState | None:
        """Return the state of the slot on the server."""
        return inspect_slot(self.control, self._slot)

    def free_slot(self) -> SlotState | None:
        """Terminate any reader of the slot, and return its state."""
        terminate_holder(self.control, self._slot, clock=self._clock)
        return self.slot_state()

    def advance_slot(self, lsn: Lsn) -> None:
        """Advance the slot, which has no reader, to `lsn`. Changes below are not needed."""
        state = self.slot_state()
        if state is not None and state.confirmed_flush is not None and state.confirmed_flush < lsn:
            advance_slot(self.control, self._slot, lsn)

    def drop_slot(self, name: str) -> None:
        """Drop a slot of this source, if it exists."""
        drop_slot(self.control, name, nonce=name.rsplit("_", 1)[1], clock=self._clock)

    def retire_slot(self, name: str, *, shared: bool) -> None:
        """Drop a former slot of this source, unless it is `shared` and another reader uses it."""
        state = inspect_slot(self.control, name)
        if state is not None and not (shared and state.active_pid is not None):
            self.drop_slot(name)

    def stream(self, start: Lsn, *, binary: bool) -> ReplicationStream:
        """Return the changes of the slot from `start`; `binary` requests binary values."""
        connection = self._streaming = self._connect_for_replication()
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
                f'could not start replication of postgres source "{self._name}"',
                detail=f"{error}. {error.detail}".strip(),
                hint=error.hint,
            ) from error

    def _new_slot_name(self) -> str:
        return slot_name(self._name, self.unique_name())

    def _create_slot(self, name: str, stop: threading.Event, *, temporary: bool) -> SnapshotExport:
        # A watcher of its own, because other threads may use the control connection.
        with (
            self._connect_for_replication() as replication,
            self._connect(replication=False) as watcher,
        ):
            try:
                slot = create_slot(
                    replication,
                    name,
                    temporary=temporary,
                    watcher=watcher,
                    waiting=self._report_wait,
                    stop=stop,
                )
                if slot.snapshot is None:
                    raise InternalError(f'slot "{name}" was created without a snapshot')
                connection = self._connect(replication=False)
                return export_again(connection, slot.snapshot, slot.consistent_point.position)
            finally:
                self.waits_for = ""

    def _report_wait(self, blockers: list[Blocker]) -> None:
        if blockers:
            self.waits_for = f"{blockers[0]} to end before a slot can be created"
