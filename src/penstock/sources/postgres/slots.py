"""Replication slots: the server retains WAL that has not been read.

A slot retains WAL on the server for its owner, so slots must be attributable. The name
of a slot ends in a nonce that is stored before the slot is created. No slot with a
different nonce is ever modified (hazard B8).

Creation of a slot blocks silently until all running transactions end. The command is
therefore sent asynchronously. While it has no response, a second connection queries the
transactions that block it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import InternalError, TransientError, UsageError
from penstock.pgclient import Connection, quote_identifier
from penstock.sources.postgres.errors import SlotBusy, SlotForeign
from penstock.sources.postgres.lsn import Lsn

__all__ = [
    "Blocker",
    "CreatedSlot",
    "SlotState",
    "advance_slot",
    "blocking_transactions",
    "create_slot",
    "drop_slot",
    "inspect_slot",
    "list_slots",
    "slot_name",
    "terminate_holder",
]

PREFIX: Final = "penstock_"
MAX_BYTES: Final = 63
NONCE: Final = re.compile(r"[a-z0-9]{4,32}")


def slot_name(source: str, nonce: str) -> str:
    """Return the slot name of `source`: at most 63 bytes of `[a-z0-9_]`.

    >>> slot_name("Shop-EU", "1f3c9a")
    'penstock_shop_eu_1f3c9a'
    """
    if not NONCE.fullmatch(nonce):
        raise UsageError(
            f'nonce "{nonce}" of a replication slot is malformed',
            detail="A nonce has 4 to 32 lower-case letters and digits.",
        )
    readable = re.sub(r"[^a-z0-9_]", "_", source.lower())
    return f"{PREFIX}{readable[: MAX_BYTES - len(PREFIX) - len(nonce) - 1]}_{nonce}"


@dataclass(frozen=True, slots=True)
class CreatedSlot:
    """A slot and its consistent point."""

    name: str
    consistent_point: Lsn
    """Boundary of slot and snapshot. The slot sends transactions whose commit record starts at
    this LSN or later. The snapshot contains exactly the transactions with an earlier commit
    record."""

    snapshot: str | None
    """Id for SET TRANSACTION SNAPSHOT, valid until the next command or end of the connection."""


@dataclass(frozen=True, slots=True)
class Blocker:
    """A transaction that must end before a slot can be created."""

    xid: int
    pid: int | None
    """Server process, or None for a prepared transaction, which has no process."""

    prepared: str | None
    """Global id of a prepared transaction."""

    waited_for: bool
    """True if the server waits for this transaction now; it waits for the others later."""

    application: str | None
    user: str | None
    state: str | None
    since: str | None
    """Start time. The query text is omitted because it may contain secrets."""

    def __str__(self) -> str:
        if self.prepared is not None:
            return (
                f'prepared transaction "{self.prepared}" (xid {self.xid}); to end it: '
                f"COMMIT PREPARED '{self.prepared}'; or ROLLBACK PREPARED '{self.prepared}';"
            )
        known = [
            f"{label} {value}"
            for label, value in (
                ("application", self.application),
                ("user", self.user),
                ("state", self.state),
                ("since", self.since),
            )
            if value
        ]
        return f"server process {self.pid} ({', '.join([f'xid {self.xid}', *known])})"


def create_slot(
    replication: Connection,
    name: str,
    *,
    temporary: bool = False,
    export: bool = True,
    watcher: Connection | None = None,
    waiting: Callable[[list[Blocker]], None] = lambda blockers: None,
    report_interval_s: float = 1.0,
    stop: Event | None = None,
) -> CreatedSlot:
    """Create a logical slot on a replication connection, without a time limit.

    Every `report_interval_s` seconds without a response, `waiting` is called with the blocking
    transactions that `watcher` finds. If `stop` is set, creation is cancelled.

    A temporary slot ends with its connection. With `export`, the slot exports a snapshot,
    which ends with the connection or with the connection's next command.

    Raises:
        TransientError: creation was cancelled.
    """
    replication.send(
        _create_statement(replication.server_version, name, temporary=temporary, export=export)
    )
    rows = None
    try:
        while (rows := replication.receive(report_interval_s)) is None:
            if stop is not None and stop.is_set():
                raise TransientError(f'creation of replication slot "{name}" was cancelled')
            if watcher is not None:
                waiting(blocking_transactions(watcher, replication.backend_pid))
    finally:
        if rows is None:
            # The response will not be read, so cancel the creation: a slot would be orphaned.
            replication.cancel()
            replication.close()
    if rows is None:
        raise InternalError(f'creation of replication slot "{name}" has no result')
    created, point, snapshot, _ = rows[0]
    return CreatedSlot(created or name, Lsn.parse(point or ""), snapshot or None)


def blocking_transactions(connection: Connection, pid: int) -> list[Blocker]:
    """Return the transactions that block slot creation by server process `pid`.

    The server waits for one transaction after the other. The first item is the transaction
    it waits for now. The others have written data and may be next. The list is empty if the
    process does not wait.
    """
    rows = connection.query(
        """
        WITH waited AS (
          SELECT l.transactionid FROM pg_catalog.pg_locks l
          WHERE l.pid = $1::int AND l.locktype = 'transactionid' AND NOT l.granted
        )
        SELECT l.transactionid, l.pid, p.gid, l.transactionid::text = w.transactionid::text,
               a.application_name, a.usename, a.state, a.xact_start
        FROM pg_catalog.pg_locks l
        CROSS JOIN waited w
        LEFT JOIN pg_catalog.pg_prepared_xacts p ON p.transaction::text = l.transactionid::text
        LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
        WHERE l.locktype = 'transactionid' AND l.granted AND l.mode = 'ExclusiveLock'
          AND l.pid IS DISTINCT FROM $1::int
        ORDER BY 4 DESC, pg_catalog.age(l.transactionid) DESC
        """,
        [pid],
    )
    return [
        Blocker(
            xid=int(xid or 0),
            pid=None if holder is None else int(holder),
            prepared=prepared,
            waited_for=waited == "t",
            application=application,
            user=user,
            state=state,
            since=since,
        )
        for xid, holder, prepared, waited, application, user, state, since in rows
    ]


@dataclass(frozen=True, slots=True)
class SlotState:
    """State of a slot, as the server reports it."""

    name: str
    plugin: str | None
    database: str | None
    temporary: bool
    two_phase: bool
    active_pid: int | None
    """Server process that holds the slot for a reader."""

    confirmed_flush: Lsn | None
    """LSN that the reader has confirmed. Earlier changes cannot be read again."""

    restart_lsn: Lsn | None
    """Start of the WAL that the server retains for the slot."""

    retained_bytes: int
    """Size of the retained WAL, in bytes."""

    wal_status: str | None
    """`reserved`, `extended`, `unreserved` or `lost`; None before version 13."""

    safe_wal_size: int | None
    """Bytes of WAL that can be written before the slot is lost; None without a limit."""

    invalidation_reason: str | None

    @property
    def lost(self) -> bool:
        """Return whether the server has removed WAL that the slot needs."""
        return self.wal_status == "lost" or self.invalidation_reason is not None


def inspect_slot(connection: Connection, name: str) -> SlotState | None:
    """Return the state of slot `name`, or None if it does not exist."""
    states = _read_slots(connection, "s.slot_name = $1", [name])
    return states[0] if states else None


def list_slots(connection: Connection, source: str | None = None) -> list[SlotState]:
    """Return the slots in this database that Penstock created, for `source` or for any source.

    The selection is by name only and does not prove ownership: another lake may read the
    same database.
    """
    prefix = PREFIX if source is None else slot_name(source, "0000").removesuffix("0000")
    return [
        slot
        for slot in _read_slots(connection, "s.database = pg_catalog.current_database()", [])
        if slot.name.startswith(prefix)
    ]


def drop_slot(
    connection: Connection,
    name: str,
    *,
    nonce: str,
    clock: Clock = SYSTEM_CLOCK,
    timeout_ms: int = 30_000,
) -> bool:
    """Drop a slot with our nonce, and terminate its reader. Return whether it existed.

    Raises:
        SlotForeign: the slot name does not end in the nonce.
        SlotBusy: the reader did not release the slot in time.
    """
    if not name.startswith(PREFIX) or not name.endswith(f"_{nonce}"):
        raise SlotForeign(slot=name, nonce=nonce)
    terminate_holder(connection, name, clock=clock, timeout_ms=timeout_ms)
    # One statement: a slot that is dropped concurrently causes no error.
    rows = connection.query(
        "SELECT pg_catalog.pg_drop_replication_slot(slot_name)"
        " FROM pg_catalog.pg_replication_slots WHERE slot_name = $1",
        [name],
    )
    return bool(rows)


def advance_slot(connection: Connection, name: str, lsn: Lsn) -> None:
    """Advance a slot without a reader to `lsn`, which releases older WAL."""
    connection.query("SELECT pg_catalog.pg_replication_slot_advance($1, $2)", [name, str(lsn)])


def terminate_holder(
    connection: Connection, name: str, *, clock: Clock = SYSTEM_CLOCK, timeout_ms: int = 30_000
) -> list[int]:
    """Terminate the readers of the slot, and wait until it is free. Return their process ids.

    Raises:
        SlotBusy: the slot did not become free in time.
    """
    terminated_pids: list[int] = []
    until = clock.boot_ms() + timeout_ms
    never_set = Event()
    while True:
        state = inspect_slot(connection, name)
        if state is None or state.active_pid is None:
            return terminated_pids
        if clock.boot_ms() > until:
            raise SlotBusy(slot=name, pid=state.active_pid)
        if state.active_pid not in terminated_pids:
            connection.query("SELECT pg_catalog.pg_terminate_backend($1::int)", [state.active_pid])
            terminated_pids.append(state.active_pid)
        clock.wait(never_set, 20)


def _create_statement(version: int, name: str, *, temporary: bool, export: bool) -> str:
    words = ["CREATE_REPLICATION_SLOT", quote_identifier(name)]
    words += ["TEMPORARY"] if temporary else []
    words += ["LOGICAL", "pgoutput"]
    if version >= 150000:
        words += ["(SNAPSHOT 'export')" if export else "(SNAPSHOT 'nothing')"]
    else:
        words += ["EXPORT_SNAPSHOT" if export else "NOEXPORT_SNAPSHOT"]
    return " ".join(words)


def _read_slots(
    connection: Connection, condition: str, parameters: list[object]
) -> list[SlotState]:
    version = connection.server_version
    status = "s.wal_status, s.safe_wal_size" if version >= 130000 else "NULL, NULL"
    two_phase = "s.two_phase" if version >= 140000 else "false"
    if version >= 170000:
        reason = "s.invalidation_reason"
    else:
        # Version 16 sets `conflicting` for every invalidated slot. If its WAL was removed,
        # the slot no longer has a `restart_lsn`.
        conflict = "WHEN s.conflicting AND s.restart_lsn IS NOT NULL THEN 'conflict'"
        conflict = conflict if version >= 160000 else ""
        lost = "WHEN s.wal_status = 'lost' THEN 'wal_removed'" if version >= 130000 else ""
        reason = f"CASE {conflict} {lost} END" if conflict or lost else "NULL"
    rows = connection.query(
        f"""
        SELECT s.slot_name, s.plugin, s.database, s.temporary, {two_phase}, s.active_pid,
               s.confirmed_flush_lsn, s.restart_lsn,
               coalesce(pg_catalog.pg_wal_lsn_diff(
                 CASE WHEN pg_catalog.pg_is_in_recovery()
                   THEN pg_catalog.pg_last_wal_replay_lsn()
                   ELSE pg_catalog.pg_current_wal_lsn() END, s.restart_lsn)::int8, 0),
               {status}, {reason}
        FROM pg_catalog.pg_replication_slots s WHERE {condition} ORDER BY s.slot_name
        """,
        parameters,
    )
    return [
        SlotState(
            name=name or "",
            plugin=plugin,
            database=database,
            temporary=temporary == "t",
            two_phase=two == "t",
            active_pid=None if pid is None else int(pid),
            confirmed_flush=None if confirmed is None else Lsn.parse(confirmed),
            restart_lsn=None if restart is None else Lsn.parse(restart),
            retained_bytes=max(0, int(retained or 0)),
            wal_status=status,
            safe_wal_size=None if safe is None else int(safe),
            invalidation_reason=reason,
        )
        for (
            name,
            plugin,
            database,
            temporary,
            two,
            pid,
            confirmed,
            restart,
            retained,
            status,
            safe,
            reason,
        ) in rows
    ]
