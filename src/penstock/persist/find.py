"""Collections by name in a lake, and what words for times mean for them."""

from datetime import datetime

from penstock.errors import UsageError
from penstock.persist.client import Client, open
from penstock.persist.collection import Collection
from penstock.persist.errors import CollectionMissing
from penstock.persist.lake import storage_locations
from penstock.persist.settings import Settings
from penstock.persist.state import CollectionState

__all__ = ["find_collection", "find_generation", "time_of"]


def find_collection(
    location: str, name: str, *, hold: bool, settings: Settings
) -> tuple[Client, Collection]:
    """The collection of that name, wherever in the lake it is, and a client to be closed.

    Raises:
        CollectionMissing: no storage location has it.
    """
    known: list[str] = []
    for url in storage_locations(location):
        client = open(url, hold=hold, settings=settings)
        state = client.state
        if name in state.names:
            return client, client.collection(name)
        client.close()
        known += state.listed()
    raise CollectionMissing(name, where=location, known=sorted(known))


def find_generation(current: Collection, word: str) -> tuple[Collection, int]:
    """Return the collection that a read of a name as of a time uses, and the time.

    `current` has the name now. The earliest time is that of the oldest one retained.
    """
    client, name = current.client, current.name
    oldest = client.state.generations(name)[0]
    as_of = oldest.since if word == "earliest" else time_of(word, current.state)
    return client.collection(name, as_of=as_of), as_of


def time_of(text: str, collection: CollectionState) -> int:
    """The time that a word means for a collection."""
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
