"""Collections by name in a lake, and what words for times mean for them."""

from datetime import datetime

from penstock.clock import SYSTEM_CLOCK
from penstock.persist.client import Client, open
from penstock.persist.collection import Collection
from penstock.persist.errors import CollectionMissing
from penstock.persist.lake import storage_locations
from penstock.persist.settings import Settings
from penstock.persist.state import CollectionState
from penstock.progress.time import parse_time

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


def time_of(text: str | datetime, collection: CollectionState) -> int:
    """Return the time that a text or an aware datetime means for a collection.

    Raises:
        UsageError: it is not a time.
    """
    if text == "earliest":
        return collection.since
    if text == "latest":
        return max(collection.upper - 1, collection.since)
    return parse_time(text, SYSTEM_CLOCK.now_ms())
