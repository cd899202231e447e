"""Check that Spark tasks write to the same storage as the driver.

A folder of the same name may exist on every host and be a different one on each. Objects
that Spark tasks write there are durable, but invisible to every reader of the log.
Therefore the driver places a marker object with a random name under the staging id. A Spark
task that does not find the marker through its own store writes nothing. Executors that join
during a job are checked in the same way.

The driver removes the marker when the job is over. If the driver dies earlier, a sweep
finds the marker under a closed staging id, like any other file that is not linked.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from penstock.errors import PenstockError, UsageError
from penstock.persist.paths import marker_key
from penstock.persist.scan.task import SETTINGS, store_of

__all__ = ["check_shared_storage", "marker_placed", "place_marker", "remove_marker"]


@contextmanager
def marker_placed(url: str, staging: str) -> Iterator[str]:
    """Yield the key of a marker that Spark tasks find in the block if they see the location."""
    marker = place_marker(url, staging)
    try:
        yield marker
    finally:
        remove_marker(url, marker)


def place_marker(url: str, staging: str) -> str:
    """Place a marker under `staging`, an open staging id, and return its key."""
    marker = marker_key(staging, f"{SETTINGS.chance.getrandbits(128):032x}")
    store_of(url).create(marker, b"")
    return marker


def remove_marker(url: str, marker: str) -> None:
    """Remove the marker after the job; if that fails, a sweep deletes it later."""
    with suppress(PenstockError):
        store_of(url).delete(marker)


def check_shared_storage(url: str, marker: str) -> None:
    """Check, in a Spark task, that the driver will find the task's objects.

    Raises:
        UsageError: this host has another location under the same name.
    """
    try:
        if store_of(url).get(marker) is not None:
            return
        detail = f'The driver left object "{marker}" there, and it is not seen on this host.'
    except UsageError as error:
        detail = f"On this host, {error}."
    raise UsageError(
        f'location "{url}" is not shared between the driver and host "{socket.gethostname()}"',
        detail=detail,
        hint="Put it on storage that all executors share, or use s3://. If it is shared, another "
        "writer has taken over; write again.",
    )
