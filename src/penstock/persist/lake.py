"""A lake: a folder of storage locations, each with its own log and writer.

What a user calls a location may be a lake or one of its storage locations. A
storage location is recognised by what its first writer left there.
"""

from penstock.durable import Blob, SteadyBlob, children, join, open_blob
from penstock.durable.probe import PASSED
from penstock.errors import UsageError
from penstock.persist.settings import Settings

__all__ = [
    "check_not_a_lake",
    "is_storage_location",
    "open_store",
    "storage_locations",
    "storage_locations_below",
]


def open_store(url: str, settings: Settings, *, writing: bool = False) -> SteadyBlob:
    """The store of one storage location, asked again as patiently as `settings` say."""
    return SteadyBlob(
        open_blob(url, writing=writing),
        settings.clock,
        settings.chance,
        patience_ms=settings.patience_ms,
        stop=settings.stop,
    )


def storage_locations(url: str) -> list[str]:
    """The storage locations at `url`: itself, or those directly below it, in order.

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
            hint="Check the address; a writer makes a location when it first opens it.",
        )
    return found


def storage_locations_below(url: str) -> list[str]:
    """The storage locations directly below `url`, in order."""
    below = (join(url, name) for name in children(url))
    return [each for each in below if is_storage_location(each)]


def is_storage_location(url: str) -> bool:
    """Whether `url` was ever opened for writing."""
    try:
        blob = open_blob(url)
    except UsageError:
        return False  # A folder that does not exist.
    try:
        return blob.get(PASSED) is not None
    finally:
        blob.close()


def check_not_a_lake(url: str, blob: Blob) -> None:
    """Refuse to make a storage location of a lake. `blob` is the store at `url`.

    Asks only for a mark if `url` was written to before.

    Raises:
        UsageError: a folder directly below `url` is a storage location, and `url` is none.
    """
    if blob.get(PASSED) is not None:
        return
    for name in children(url):
        if blob.get(f"{name}/{PASSED}") is not None:
            raise UsageError(
                f'location "{url}" is a lake and cannot be written to itself',
                detail=f'Its folder "{name}" is a storage location.',
                hint=f"Open one of its storage locations, for example {join(url, name)}.",
            )
