"""A lake: a folder of storage locations, each with its own log and writer.

A user's location is either a lake or one of its storage locations. A storage
location is recognised by the mark that its first writer left there.
"""

from datetime import datetime

from penstock.clock import SYSTEM_CLOCK
from penstock.durable import PASSED, children, join, open_blob
from penstock.errors import UsageError
from penstock.persist.client import Client, open
from penstock.persist.collection import Collection
from penstock.persist.errors import CollectionMissing
from penstock.persist.settings import Settings
from penstock.persist.state import CollectionState
from penstock.progress.time import parse_time

__all__ = [
    "find_collection",
    "find_generation",
    "is_storage_location",
    "storage_locations",
    "storage_locations_below",
    "time_of",
]


def storage_locations(url: str) -> list[str]:
    """Return the storage locations at `url`, sorted: itself, or those directly below it.

    Raises:
        UsageError: there are none.
    """
    if is_storage_location(url):
        return [url]
    found = storage_locations_below(url)
    if not found:
        raise UsageError(
            f'location "{url}" holds no storage location',
            detail="Neither it nor a folder directly below it was ever opened for writing.",
            hint="Check the address. A writer creates a location when it first opens it.",
        )
    return found


def storage_locations_below(url: str) -> list[str]:
    """Return the storage locations directly below `url`, sorted."""
    below = (join(url, name) for name in children(url))
    return [each for each in below if is_storage_location(each)]


def is_storage_location(url: str) -> bool:
    """Return whether `url` was ever opened for writing."""
    try:
        blob = open_blob(url)
    except UsageError:
        return False  # A folder that does not exist.
    try:
        return blob.get(PASSED) is not None
    finally:
        blob.close()


def find_collection(
    location: str, name: str, *, hold: bool, settings: Settings
) -> tuple[Client, Collection]:
    """Return the collection of that name in a lake, and a client that the caller closes.

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

    `current` has the name now. The earliest time is the since of the oldest retained collection.
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
