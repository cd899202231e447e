"""Stored state of a Postgres source, read at its next start.

    slot          its name, first as an intention; later with its consistent point
    identity      the server and its timeline
    streamed      durable position of the stream, and the last transaction below it
    lost          reason why the stream cannot be resumed from the durable position
    table/OID     a tracked table and its phase
    fingerprint   catalog state when the last tick was sealed
    order         position in the stream of the next pending change

Values are plain JSON. Each function returns the keys it sets. The caller can then write them in the
same log entry as the tick they belong to.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.errors import DefiniteError
from penstock.sources.context import StateStore
from penstock.sources.postgres.catalog import PgTable
from penstock.sources.postgres.config import TableSpec
from penstock.sources.postgres.fingerprint import Fingerprint
from penstock.sources.postgres.identity import Identity
from penstock.sources.postgres.stream_reader import StreamTransaction
from penstock.sources.postgres.table_schema import StoredColumn, build_table
from penstock.sources.postgres.table_state import Phase, StoredForm, TableState
from penstock.sources.postgres.tracked_table import TrackedTable

__all__ = [
    "LostStream",
    "Slot",
    "StoredState",
    "fingerprint",
    "identity",
    "lost",
    "order",
    "read_state",
    "slot_created",
    "slot_intended",
    "streamed",
    "table_key",
    "tables",
]

StateValues = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Slot:
    """Replication slot, created or intended."""

    name: str
    consistent_point: int = 0
    """Consistent point of the slot; 0 until the slot is known to be created."""

    replaces: str = ""
    """Slot that this one replaces, to be dropped."""

    @property
    def created(self) -> bool:
        """Return whether the creation of the slot is recorded."""
        return self.consistent_point > 0


@dataclass(frozen=True, slots=True)
class LostStream:
    """Record of lost changes: every table must be compared, in one tick."""

    slot: str
    """Slot that failed. While it is still the current slot, a new slot must be created first."""

    reason: str
    shared: bool = False
    """True if another reader consumes the slot."""


@dataclass(frozen=True, slots=True)
class StoredState:
    """All stored state of a source."""

    slot: Slot | None
    identity: Identity | None
    streamed: int
    last: StreamTransaction | None
    lost: LostStream | None
    tables: tuple[TrackedTable, ...]
    fingerprint: Fingerprint | None
    order: int


@dataclass(frozen=True, slots=True)
class _StoredTable:
    source: str
    described: PgTable
    spec: TableSpec
    phase: Phase
    snapshot_lsn: int
    seen: bool
    error: str
    error_detail: str = ""
    error_hint: str = ""
    attempt: str = ""
    kept: tuple[StoredColumn, ...] | None = None
    key_columns: tuple[str, ...] | None = None
    collection: str = ""
    """Collection name; empty in the state of versions that did not quote names."""
    has_collection: bool = True
    truncate_order: int = -1


def table_key(oid: int) -> str:
    """Return the state key of a table."""
    return f"table/{oid}"


def read_state(state_store: StateStore) -> StoredState:
    """Read the stored state."""
    streamed = state_store.get("streamed") or {"lsn": 0, "last": None}
    table_values = [
        state_store.get(name) for name in state_store.names() if name.startswith("table/")
    ]
    return StoredState(
        slot=_from_json(state_store.get("slot"), Slot),
        identity=_from_json(state_store.get("identity"), Identity),
        streamed=streamed["lsn"],
        last=_from_json(streamed["last"], StreamTransaction),
        lost=_from_json(state_store.get("lost"), LostStream),
        tables=tuple(_to_tracked(_from_json(value, _StoredTable)) for value in table_values),
        fingerprint=_from_json(state_store.get("fingerprint"), Fingerprint),
        order=state_store.get("order") or 0,
    )


def slot_intended(slot: str, *, replaces: str = "") -> StateValues:
    """Return the state of a slot that is about to be created, in place of `replaces`."""
    return {"slot": _to_json(Slot(slot, replaces=replaces))}


def lost(loss: LostStream | None) -> StateValues:
    """Return the state for a stream that cannot be resumed; None clears that state."""
    return {"lost": None if loss is None else _to_json(loss)}


def slot_created(slot: str, consistent_point: int) -> StateValues:
    """Return the state of a slot that exists."""
    return {"slot": _to_json(Slot(slot, consistent_point))}


def identity(server: Identity) -> StateValues:
    """Return the state for the identity of the server."""
    return {"identity": _to_json(server)}


def streamed(lsn: int, last: StreamTransaction | None) -> StateValues:
    """Return the state for the durable position `lsn`, with the last transaction below it."""
    return {"streamed": {"lsn": lsn, "last": None if last is None else _to_json(last)}}


def fingerprint(last: Fingerprint) -> StateValues:
    """Return the state for the fingerprint of the catalog."""
    return {"fingerprint": _to_json(last)}


def order(position: int) -> StateValues:
    """Return the state for the position of the next pending change."""
    return {"order": position}


def tables(tracked_tables: Iterable[TrackedTable]) -> StateValues:
    """Return the state of the tables; None deletes the state of a removed table."""
    return {
        table_key(tracked.table.oid): None
        if tracked.state is TableState.REMOVED
        else _to_json(_to_stored(tracked))
        for tracked in tracked_tables
    }


def _to_stored(tracked: TrackedTable) -> _StoredTable:
    table, form, error = tracked.table, tracked.state.stored, tracked.error
    return _StoredTable(
        source=table.source,
        described=table.described,
        spec=table.spec,
        phase=form.phase,
        snapshot_lsn=tracked.snapshot_lsn,
        seen=form.seen,
        error="" if error is None else str(error),
        error_detail="" if error is None else error.detail,
        error_hint="" if error is None else error.hint,
        attempt=tracked.attempt,
        kept=table.stored,
        key_columns=table.key_columns,
        collection=table.collection,
        has_collection=form.has_collection,
        truncate_order=tracked.truncate_order,
    )


def _to_tracked(stored: _StoredTable) -> TrackedTable:
    described = stored.described
    collection = stored.collection or f"{stored.source}.{described.schema}.{described.name}"
    has_error = stored.phase == Phase.ERRORED or bool(stored.error)
    form = StoredForm(stored.phase, stored.seen, stored.has_collection, has_error)
    return TrackedTable(
        build_table(
            stored.source,
            described,
            stored.spec,
            stored.kept,
            stored.key_columns,
            collection=collection,
        ),
        TableState.from_stored(form),
        stored.snapshot_lsn,
        stored.attempt,
        stored.truncate_order,
        error=DefiniteError(stored.error, detail=stored.error_detail, hint=stored.error_hint)
        if form.has_error
        else None,
    )


def _to_json(value: Any) -> Any:
    # The round trip through JSON makes the stored value equal to the value read back.
    return msgspec.json.decode(msgspec.json.encode(value))


def _from_json(value: Any, kind: Any) -> Any:
    if value is None:
        return None
    return msgspec.json.decode(msgspec.json.encode(value), type=kind)
