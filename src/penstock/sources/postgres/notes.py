"""What a Postgres source writes down for its next start.

    slot          its name, first as an intention; later with its consistent point
    identity      which server, and which of its timelines
    streamed      how far the stream is durable, and the last transaction of it
    lost          that what was streamed is not enough to go on from, and why
    table/OID     a table that is followed, and where it is in its life
    fingerprint   what the catalogue said when the last tick was sealed
    order         the place in the stream of the next message that is kept aside

Values are plain JSON. Each function gives the names it writes, so that they can
be put into the entry of the tick that they belong to.
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
    """The slot, once it is intended."""

    name: str
    consistent_point: int = 0
    """0 until it is known to have been created."""

    replaces: str = ""
    """A slot that is to go, as this one takes its place."""

    @property
    def created(self) -> bool:
        """Whether its creation was written down."""
        return self.consistent_point > 0


@dataclass(frozen=True, slots=True)
class Lost:
    """Some changes will never come; every table must be compared, in one tick."""

    slot: str
    """The slot that failed us. While it is still ours, a new one must be made first."""

    reason: str
    shared: bool = False
    """Whether somebody else reads from it."""


@dataclass(frozen=True, slots=True)
class Notes:
    """All that was written down."""

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
    """Empty in the state of versions that did not quote names."""
    has_collection: bool = True
    truncate_order: int = -1


def table_note(oid: int) -> str:
    """Under which name a table is written down."""
    return f"table/{oid}"


def recall(memory: StateStore) -> Notes:
    """What was written down."""
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
    """A slot of this name is about to be created, in the place of another."""
    return {"slot": _plain(Slot(slot, replaces=replaces))}


def lost(found: Lost | None) -> Written:
    """What was streamed is not enough to go on from; None: it is again."""
    return {"lost": None if found is None else _plain(found)}


def slot_created(slot: str, consistent_point: int) -> Written:
    """The slot is there."""
    return {"slot": _plain(Slot(slot, consistent_point))}


def identity(found: Identity) -> Written:
    """Which server it is."""
    return {"identity": _plain(found)}


def streamed(lsn: int, last: Seen | None) -> Written:
    """What committed below `lsn` is durable; `last` was the last of it."""
    return {"streamed": {"lsn": lsn, "last": None if last is None else _plain(last)}}


def fingerprint(found: Fingerprint) -> Written:
    """What the catalogue said."""
    return {"fingerprint": _plain(found)}


def order(place: int) -> Written:
    """The next place in the stream."""
    return {"order": place}


def tables(followed: Iterable[Following]) -> Written:
    """The tables, and where they are in their lives."""
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
    # Through JSON, so that what is remembered is what will be read back.
    return msgspec.json.decode(msgspec.json.encode(value))


def _read(value: Any, kind: Any) -> Any:
    if value is None:
        return None
    return msgspec.json.decode(msgspec.json.encode(value), type=kind)
