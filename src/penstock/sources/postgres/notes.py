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
from penstock.sources.postgres.catalog import PgTable
from penstock.sources.postgres.config import TableSpec
from penstock.sources.postgres.fingerprint import Fingerprint
from penstock.sources.postgres.identity import Identity
from penstock.sources.postgres.reading import Following, Phase
from penstock.sources.postgres.tables import Kept, follow
from penstock.sources.postgres.tail import Seen
from penstock.sources.source import StateStore

__all__ = [
    "Lost",
    "Notes",
    "Slot",
    "fingerprint",
    "identity",
    "intention",
    "lost",
    "order",
    "recall",
    "slot_created",
    "streamed",
    "table_note",
    "tables",
]

Written = dict[str, Any]


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
class Lost:
    """Record of lost changes: every table must be compared, in one tick."""

    slot: str
    """Slot that failed. While it is still the current slot, a new slot must be created first."""

    reason: str
    shared: bool = False
    """True if another reader consumes the slot."""


@dataclass(frozen=True, slots=True)
class Notes:
    """All stored state of a source."""

    slot: Slot | None
    identity: Identity | None
    streamed: int
    last: Seen | None
    lost: Lost | None
    tables: tuple[Following, ...]
    fingerprint: Fingerprint | None
    order: int


@dataclass(frozen=True, slots=True)
class _TableNote:
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
    kept: tuple[Kept, ...] | None = None
    key_columns: tuple[str, ...] | None = None
    collection: str = ""
    """Collection name; empty in the state of versions that did not quote names."""
    has_collection: bool = True
    truncate_order: int = -1


def table_note(oid: int) -> str:
    """Return the state key of a table."""
    return f"table/{oid}"


def recall(memory: StateStore) -> Notes:
    """Read the stored state."""
    streamed = memory.get("streamed") or {"lsn": 0, "last": None}
    found = [memory.get(name) for name in memory.names() if name.startswith("table/")]
    return Notes(
        slot=_read(memory.get("slot"), Slot),
        identity=_read(memory.get("identity"), Identity),
        streamed=streamed["lsn"],
        last=_read(streamed["last"], Seen),
        lost=_read(memory.get("lost"), Lost),
        tables=tuple(_following(_read(each, _TableNote)) for each in found),
        fingerprint=_read(memory.get("fingerprint"), Fingerprint),
        order=memory.get("order") or 0,
    )


def intention(slot: str, *, replaces: str = "") -> Written:
    """Return the state of a slot that is about to be created, in place of `replaces`."""
    return {"slot": _plain(Slot(slot, replaces=replaces))}


def lost(found: Lost | None) -> Written:
    """Return the state for a stream that cannot be resumed; None clears that state."""
    return {"lost": None if found is None else _plain(found)}


def slot_created(slot: str, consistent_point: int) -> Written:
    """Return the state of a slot that exists."""
    return {"slot": _plain(Slot(slot, consistent_point))}


def identity(found: Identity) -> Written:
    """Return the state for the identity of the server."""
    return {"identity": _plain(found)}


def streamed(lsn: int, last: Seen | None) -> Written:
    """Return the state for the durable position `lsn`, with the last transaction below it."""
    return {"streamed": {"lsn": lsn, "last": None if last is None else _plain(last)}}


def fingerprint(found: Fingerprint) -> Written:
    """Return the state for the fingerprint of the catalog."""
    return {"fingerprint": _plain(found)}


def order(place: int) -> Written:
    """Return the state for the position of the next pending change."""
    return {"order": place}


def tables(followed: Iterable[Following]) -> Written:
    """Return the state of the tables, with their phases."""
    return {table_note(each.table.oid): _plain(_note(each)) for each in followed}


def _note(following: Following) -> _TableNote:
    table = following.table
    return _TableNote(
        source=table.source,
        described=table.described,
        spec=table.spec,
        phase=following.phase,
        snapshot_lsn=following.snapshot_lsn,
        seen=following.seen,
        error=following.error,
        error_detail=following.failure.detail if following.failure else "",
        error_hint=following.failure.hint if following.failure else "",
        attempt=following.attempt,
        kept=table.kept,
        key_columns=table.key_columns,
        collection=table.collection,
        has_collection=following.has_collection,
        truncate_order=following.truncate_order,
    )


def _following(note: _TableNote | None) -> Following:
    assert note is not None
    described = note.described
    collection = note.collection or f"{note.source}.{described.schema}.{described.name}"
    return Following(
        follow(
            note.source,
            described,
            note.spec,
            note.kept,
            note.key_columns,
            collection=collection,
        ),
        note.phase,
        note.snapshot_lsn,
        note.attempt,
        error=note.error,
        failure=DefiniteError(note.error, detail=note.error_detail, hint=note.error_hint)
        if note.error
        else None,
        seen=note.seen,
        has_collection=note.has_collection,
        truncate_order=note.truncate_order,
    )


def _plain(value: Any) -> Any:
    # The round trip through JSON makes the stored value equal to the value read back.
    return msgspec.json.decode(msgspec.json.encode(value))


def _read(value: Any, kind: Any) -> Any:
    if value is None:
        return None
    return msgspec.json.decode(msgspec.json.encode(value), type=kind)
