"""Arguments that several verbs take, and what they mean."""

from datetime import datetime
from typing import Annotated

import typer

from penstock import persist
from penstock.errors import UsageError
from penstock.persist.lake import storage_locations
from penstock.persist.state import CollectionState

__all__ = ["SETTINGS", "AsJson", "Hold", "Location", "Name", "open_collection", "time_of"]

Location = Annotated[
    str,
    typer.Argument(
        metavar="LOCATION",
        help="URL of a lake or a storage location: file:./data, s3://bucket/prefix.",
    ),
]
Name = Annotated[str, typer.Argument(metavar="COLLECTION", help="Name of the collection.")]
Hold = Annotated[
    bool,
    typer.Option(
        "--hold/--no-hold",
        help="Keep history from being compacted away while reading; --no-hold leaves no trace "
        "and needs only permission to read.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

SETTINGS = persist.Settings(patience_ms=60_000)
"""Someone is waiting at a terminal: a store that stays away is an error after a minute."""


def open_collection(
    location: str, name: str, *, hold: bool
) -> tuple[persist.Client, persist.Collection]:
    """The collection of that name, wherever in the lake it is."""
    known: list[str] = []
    for url in storage_locations(location):
        client = persist.open(url, hold=hold, settings=SETTINGS)
        names = client.collections()
        if name in names:
            return client, client.collection(name)
        client.close()
        known += names
    raise persist.CollectionMissing(name, where=location, known=sorted(known))


def time_of(text: str, collection: CollectionState) -> int:
    """The time that a word on the command line means for a collection."""
    if text == "earliest":
        return collection.since
    if text == "latest":
        return max(collection.upper - 1, collection.since)
    if text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise UsageError(
            f'"{text}" is not a time',
            hint="Give milliseconds since the epoch, RFC 3339 with a zone such as "
            "2026-11-15T12:00:00Z, earliest or latest.",
        )
    return int(moment.timestamp() * 1_000)
