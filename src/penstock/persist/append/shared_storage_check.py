"""Proof that tasks write where the driver will link.

A folder of one name may exist on every host and yet be another on each. What
tasks write there is durable, and not to be found by anyone who reads the log.
So the driver leaves an object under the staging id, by a name nobody can have
guessed, and a task that does not find it through its own store writes nothing.
Executors that come in the middle of a job are asked as all others are.

The driver takes the object back when the job is over. Should it die before, a
sweep finds it under a closed id, like any other file that nothing links.
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
    """The key of a proof that tasks find during the block, if they see the location."""
    marker = place_marker(url, staging)
    try:
        yield marker
    finally:
        remove_marker(url, marker)


def place_marker(url: str, staging: str) -> str:
    """Leave a proof under `staging`, an open id, until it is taken back; its key."""
    marker = marker_key(staging, f"{SETTINGS.chance.getrandbits(128):032x}")
    store_of(url).create(marker, b"")
    return marker


def remove_marker(url: str, marker: str) -> None:
    """The job is over. What cannot be deleted now is swept later."""
    with suppress(PenstockError):
        store_of(url).delete(marker)


def check_shared_storage(url: str, marker: str) -> None:
    """In a task: whether what it writes will be found.

    Raises:
        UsageError: this host has another location under the name.
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
        "writer has taken over meanwhile; write again.",
    )
