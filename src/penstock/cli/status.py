"""`penstock status`: what is there, how far it has come, what holds it back."""

import sys
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock import persist
from penstock.cli.options import SETTINGS, AsJson, Location
from penstock.cli.rows import encode_line
from penstock.durable import Blob
from penstock.ingest.relations import notes_in
from penstock.persist.errors import shown_ms
from penstock.persist.holds import Hold, list_holds
from penstock.persist.lake import open_store, storage_locations
from penstock.persist.machine import Machine
from penstock.persist.readable import error_as_of
from penstock.persist.state import END, CollectionState, State

__all__ = ["status"]

WIDE: Final = 240


def status(
    location: Location,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show hidden collections, which sources keep.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show writers, collections with since and upper, holds, and what each waits for."""
    urls = storage_locations(location)
    found = [_looked_at(url, SETTINGS, hidden=everything) for url in urls]
    if as_json:
        print(encode_line({"location": location, "storage_locations": found}))
        return
    # What reads a pipe has no width, and names cut off would be of no use to it.
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else WIDE)
    with console.capture() as shown:  # By itself it would exit with 1 when its reader goes away.
        for each in found:
            _show(console, each)
    print(shown.get(), end="")


def _looked_at(url: str, settings: persist.Settings, *, hidden: bool) -> dict[str, Any]:
    blob = open_store(url, settings)
    try:
        state = Machine(blob, settings).load()
        holds = _holds(blob, state, settings.clock.now_ms())
    finally:
        blob.close()
    writer = state.writer
    return {
        "location": blob.name,
        "id": state.location,
        "epoch": state.epoch,
        "entries": state.seqno,
        "writer": None
        if writer is None
        else {
            "id": writer.id,
            "host": writer.host,
            "pid": writer.pid,
            "since": shown_ms(writer.taken_ms),
        },
        "collections": [
            _collection(state.collections[state.names[name]], holds)
            for name in state.listed(hidden=hidden)
        ],
        "sources": _sources(url, settings),
        "holds": holds,
        "garbage_files": len(state.garbage),
    }


def _collection(collection: CollectionState, holds: list[dict[str, Any]]) -> dict[str, Any]:
    back = sorted(
        hold["owner"]
        for hold in holds
        if hold["sinces"].get(collection.name, END) < collection.allowed
    )
    return {
        "name": collection.name,
        "since": collection.since,
        "upper": collection.upper,
        "allowed": collection.allowed,
        "held_back_by": back if collection.allowed > collection.since else [],
        "schema_version": collection.schemas[-1].version,
        "batches": len(collection.batches),
        "updates": sum(batch.rows for batch in collection.batches),
        "bytes": sum(batch.size for batch in collection.batches),
        "unsealed": any(batch.upper > collection.upper for batch in collection.batches),
        "error": _error(collection),
    }


def _sources(url: str, settings: persist.Settings) -> list[dict[str, Any]]:
    """What the sources of a storage location said of themselves last."""
    with persist.open(url, hold=False, settings=settings) as client:
        return [
            {"source": source, **told["status"]}
            for source, told in notes_in(client).items()
            if "status" in told
        ]


def _error(collection: CollectionState) -> dict[str, Any] | None:
    """The error that a reader of the latest time meets, or will."""
    span = error_as_of(collection, max(collection.upper - 1, 0))
    if span is None and collection.errors and collection.errors[-1].upper == END:
        span = collection.errors[-1]
    if span is None:
        return None
    error = span.error
    return {
        "since": span.lower,
        "kind": error.kind,
        "message": error.message,
        "detail": error.detail,
        "hint": error.hint,
    }


def _holds(blob: Blob, state: State, now_ms: int) -> list[dict[str, Any]]:
    found = []
    for id, (_, hold) in sorted(list_holds(blob).items()):
        if id not in state.expired:
            found.append(_hold(hold, state, now_ms))
    return found


def _hold(hold: Hold, state: State, now_ms: int) -> dict[str, Any]:
    return {
        "owner": hold.owner,
        "id": hold.id,
        "kind": "durable" if hold.lease_ms is None else "leased",
        "token": hold.token,
        "age_ms": max(0, now_ms - hold.placed_ms),
        "unchanged_ms": max(0, now_ms - hold.written_ms),
        "sinces": {
            state.collections[id].name: since
            for id, since in sorted(hold.sinces.items())
            if id in state.collections
        },
    }


def _show(console: Console, found: dict[str, Any]) -> None:
    held = "no writer"
    if (writer := found["writer"]) is not None:
        held = f'written by "{writer["id"]}", process {writer["pid"]} on {writer["host"]}'
        held += f" since {writer['since']}"
    console.print(
        f"{found['location']}: epoch {found['epoch']}, {held}, {found['entries']} entries"
    )
    if found["collections"]:
        table = Table(
            "collection", "since", "upper", "batches", "updates", "bytes", "waits for", "error"
        )
        for each in found["collections"]:
            waits = [f"hold of {owner}" for owner in each["held_back_by"]]
            waits += ["a seal"] if each["unsealed"] else []
            table.add_row(
                each["name"],
                _time(each["since"]),
                _time(each["upper"]),
                *(str(each[column]) for column in ("batches", "updates", "bytes")),
                ", ".join(waits),
                "" if (error := each["error"]) is None else _told(error),
            )
        console.print(table)
    if found["sources"]:
        table = Table("source", "phase", "at", "rows", "behind", "slot holds", "waits for")
        for each in found["sources"]:
            held = each.get("slot_bytes")
            table.add_row(
                each["source"],
                each.get("phase", ""),
                each.get("lsn", ""),
                str(each.get("rows", "")),
                f"{each.get('lag_bytes', 0)} bytes",
                "" if held is None else f"{held} bytes",
                escape(each.get("waits_for") or ""),
            )
        console.print(table)
    if found["holds"]:
        table = Table("hold", "kind", "age", "unchanged", "keeps")
        for each in found["holds"]:
            keeps = ", ".join(f"{name} from {since}" for name, since in each["sinces"].items())
            table.add_row(
                each["owner"],
                each["kind"],
                f"{each['age_ms'] // 1_000} s",
                f"{each['unchanged_ms'] // 1_000} s",
                keeps,
            )
        console.print(table)


def _told(error: dict[str, Any]) -> str:
    return escape(f"since {error['since']}: {error['message']}")


def _time(moment: int) -> str:
    return "closed" if moment == END else str(moment)
