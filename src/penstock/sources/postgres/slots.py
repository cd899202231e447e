"""Replication slots: the server's promise to keep what we have not read.

A slot holds back the server's disk for whoever owns it, so ours can be told
from others by name: it ends in a nonce that was written down before the slot
was created, and no slot is touched whose nonce is not ours (hazard B8).

Creating one waits until every transaction that was running has ended, without
a word. So creation is sent, and while there is no answer another connection
asks whom the server is waiting for.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import InternalError, TransientError, UsageError
from penstock.sources.postgres.connect import Connection, quote_identifier
from penstock.sources.postgres.errors import SlotBusy, SlotForeign
from penstock.sources.postgres.lsn import Lsn

__all__ = [
    "Blocker",
    "CreatedSlot",
    "SlotState",
    "create_slot",
    "drop_slot",
    "inspect_slot",
    "our_slots",
    "pass_slot",
    "slot_name",
    "terminate_holder",
    "who_blocks",
]

PREFIX: Final = "penstock_"
MAX_BYTES: Final = 63
NONCE: Final = re.compile(r"[a-z0-9]{4,32}")


def slot_name(source: str, nonce: str) -> str:
    """What the slot of `source` is called: at most 63 bytes of `[a-z0-9_]`.

    >>> slot_name("Shop-EU", "1f3c9a")
    'penstock_shop_eu_1f3c9a'
    """
    if not NONCE.fullmatch(nonce):
        raise UsageError(
            f'nonce "{nonce}" of a replication slot is malformed',
            detail="It has 4 to 32 lower-case letters and digits.",
        )
    readable = re.sub(r"[^a-z0-9_]", "_", source.lower())
    return f"{PREFIX}{readable[: MAX_BYTES - len(PREFIX) - len(nonce) - 1]}_{nonce}"


@dataclass(frozen=True, slots=True)
class CreatedSlot:
    """A slot, and where it begins."""

    name: str
    consistent_point: Lsn
    """The slot sends the transactions whose commit records start here or later; the snapshot
    holds the others, and exactly those."""

    snapshot: str | None
    """For SET TRANSACTION SNAPSHOT, until the connection runs its next command or ends."""


@dataclass(frozen=True, slots=True)
class Blocker:
    """A transaction that must end before a slot can be created."""

    xid: int
    pid: int | None
    """The server process; None for a transaction that is prepared and belongs to nobody."""

    prepared: str | None
    """Its name, if it is."""

    waited_for: bool
    """Whether it is the one that is waited for now; others come after it."""

    application: str | None
    user: str | None
    state: str | None
    since: str | None
    """When it began. What it ran is left out: that may hold somebody's secrets."""

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
    patience_s: float = 1.0,
    stop: Event | None = None,
) -> CreatedSlot:
    """Create a logical slot on a replication connection, however long it takes.

    Each `patience_s` without an answer, `waiting` is told who is waited for, as
    seen by `watcher`. If `stop` is set, creation is given up.

    A temporary slot ends with its connection. With `export`, so does the
    snapshot, which also ends with the connection's next command.

    Raises:
        TransientError: it was given up.
    """
    replication.send(
        _creation(replication.server_version, name, temporary=temporary, export=export)
    )
    rows = None
    try:
        while (rows := replication.receive(patience_s)) is None:
            if stop is not None and stop.is_set():
                raise TransientError(f'creation of replication slot "{name}" was given up')
            if watcher is not None:
                waiting(who_blocks(watcher, replication.backend_pid))
    finally:
        if rows is None:
            # Nobody will read the answer, so there should be no slot either.
            replication.cancel()
            replication.close()
    if rows is None:
        raise InternalError(f'creation of replication slot "{name}" has no answer')
    created, point, snapshot, _ = rows[0]
    return CreatedSlot(created or name, Lsn.parse(point or ""), snapshot or None)


def who_blocks(connection: Connection, pid: int) -> list[Blocker]:
    """The transactions that server process `pid`, which creates a slot, must wait for.

    The server waits for one after the other: first comes the one it waits for
    now, then others that have written and may be next. None if it does not wait.
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
    """A slot, as the server has it."""

    name: str
    plugin: str | None
    database: str | None
    temporary: bool
    two_phase: bool
    active_pid: int | None
    """The server process that holds it, on behalf of a reader."""

    confirmed_flush: Lsn | None
    """What its reader has confirmed; it cannot be read again below that."""

    restart_lsn: Lsn | None
    """From where on the server keeps its log for it."""

    retained_bytes: int
    """How much log that is."""

    wal_status: str | None
    """`reserved`, `extended`, `unreserved` or `lost`; None before version 13."""

    safe_wal_size: int | None
    """How many bytes may be written until the slot is lost; None if there is no limit."""

    invalidation_reason: str | None

    @property
    def lost(self) -> bool:
        """Whether the server has removed what the slot should hold."""
        return self.wal_status == "lost" or self.invalidation_reason is not None


def inspect_slot(connection: Connection, name: str) -> SlotState | None:
    """The slot called `name`, if there is one."""
    found = _slots(connection, "s.slot_name = $1", [name])
    return found[0] if found else None


def our_slots(connection: Connection, source: str | None = None) -> list[SlotState]:
    """Slots of this database that some Penstock made, for `source` or for any.

    By name alone, which does not make them ours: another lake may follow the
    same database.
    """
    start = PREFIX if source is None else slot_name(source, "0000").removesuffix("0000")
    return [
        slot
        for slot in _slots(connection, "s.database = pg_catalog.current_database()", [])
        if slot.name.startswith(start)
    ]


def drop_slot(
    connection: Connection,
    name: str,
    *,
    nonce: str,
    clock: Clock = SYSTEM_CLOCK,
    timeout_ms: int = 30_000,
) -> bool:
    """Drop our slot, ending whoever reads from it. Whether it was there.

    Raises:
        SlotForeign: its name does not end in our nonce.
        SlotBusy: its reader did not let go of it in time.
    """
    if not name.startswith(PREFIX) or not name.endswith(f"_{nonce}"):
        raise SlotForeign(slot=name, nonce=nonce)
    terminate_holder(connection, name, clock=clock, timeout_ms=timeout_ms)
    # In one statement, so that one dropped meanwhile is not missed with an error.
    rows = connection.query(
        "SELECT pg_catalog.pg_drop_replication_slot(slot_name)"
        " FROM pg_catalog.pg_replication_slots WHERE slot_name = $1",
        [name],
    )
    return bool(rows)


def pass_slot(connection: Connection, name: str, lsn: Lsn) -> None:
    """Let the server forget what is below `lsn`, of a slot that nobody reads."""
    connection.query("SELECT pg_catalog.pg_replication_slot_advance($1, $2)", [name, str(lsn)])


def terminate_holder(
    connection: Connection, name: str, *, clock: Clock = SYSTEM_CLOCK, timeout_ms: int = 30_000
) -> list[int]:
    """End whoever reads from the slot, and wait until it is free. Which processes those were.

    Raises:
        SlotBusy: it did not become free in time.
    """
    ended: list[int] = []
    until = clock.boot_ms() + timeout_ms
    never = Event()
    while True:
        state = inspect_slot(connection, name)
        if state is None or state.active_pid is None:
            return ended
        if clock.boot_ms() > until:
            raise SlotBusy(slot=name, pid=state.active_pid)
        if state.active_pid not in ended:
            connection.query("SELECT pg_catalog.pg_terminate_backend($1::int)", [state.active_pid])
            ended.append(state.active_pid)
        clock.wait(never, 20)


def _creation(version: int, name: str, *, temporary: bool, export: bool) -> str:
    words = ["CREATE_REPLICATION_SLOT", quote_identifier(name)]
    words += ["TEMPORARY"] if temporary else []
    words += ["LOGICAL", "pgoutput"]
    if version >= 150000:
        words += ["(SNAPSHOT 'export')" if export else "(SNAPSHOT 'nothing')"]
    else:
        words += ["EXPORT_SNAPSHOT" if export else "NOEXPORT_SNAPSHOT"]
    return " ".join(words)


def _slots(connection: Connection, which: str, parameters: list[object]) -> list[SlotState]:
    version = connection.server_version
    status = "s.wal_status, s.safe_wal_size" if version >= 130000 else "NULL, NULL"
    two_phase = "s.two_phase" if version >= 140000 else "false"
    if version >= 170000:
        reason = "s.invalidation_reason"
    else:
        # Version 16 says conflicting of every slot that was given up; one whose log was
        # removed has no place to restart from any more.
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
        FROM pg_catalog.pg_replication_slots s WHERE {which} ORDER BY s.slot_name
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
