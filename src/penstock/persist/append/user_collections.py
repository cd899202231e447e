"""User collections: their storage location, and exclusive access to it for a job.

A lake has one storage location for all user collections, and a storage location has one
writer. Therefore jobs write in turn: a job waits while another one holds the lock. A job
takes the lock of a dead process of this host without a wait.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from penstock.data import DIFF, TIME
from penstock.durable import join
from penstock.errors import UsageError
from penstock.persist.client import Client, open
from penstock.persist.collection import Collection
from penstock.persist.errors import LockHeld
from penstock.persist.lake import is_storage_location, storage_locations_below
from penstock.persist.settings import Settings
from penstock.persist.state import END
from penstock.telemetry import fields, logger

__all__ = [
    "USER_LOCATION",
    "check_own",
    "dropped_unless_written",
    "open_for_job",
    "own_collection",
    "own_location",
    "undo",
]

log = logger("persist")

USER_LOCATION = "user"
"""Folder of a lake that holds the user collections."""

LOOK_AGAIN_MS = 500


def own_location(location: str, collection: str, *, settings: Settings) -> str:
    """Return the storage location of user collection `collection`.

    Raises:
        UsageError: another storage location of the lake has a collection with that name.
    """
    if is_storage_location(location):
        return location
    own = join(location, USER_LOCATION)
    for url in storage_locations_below(location):
        if url == own:
            continue
        with open(url, hold=False, settings=settings) as client:
            if collection in client.state.names:
                raise UsageError(
                    f'collection "{collection}" belongs to storage location "{url}"',
                    detail="Only the writer of that location may write it.",
                    hint="Write to a collection of your own, under another name.",
                )
    return own


def check_own(client: Client, name: str) -> None:
    """Check that a collection has no owner, which alone may write it.

    Raises:
        UsageError: the collection has an owner.
    """
    found = client.state.named(name)
    if found is not None and found.owner:
        raise UsageError(
            f'collection "{name}" of location "{client.url}" belongs to {found.owner}',
            detail="It alone writes there; what others add would be lost track of.",
            hint="Write to a collection of your own, under another name.",
        )


def own_collection(
    client: Client,
    name: str,
    given: pa.Schema,
    key: Sequence[str],
    *,
    take_name: Callable[[], None] = lambda: None,
) -> Collection:
    """Return the user collection with this name; create it for rows of `given` if missing.

    `take_name` is called before the creation.

    Raises:
        UsageError: the columns are invalid, or the collection has another key or is closed.
    """
    _check_columns(name, given, key)
    found = client.state.named(name)
    if found is None:
        take_name()
        columns = pa.schema([field for field in given if field.name not in (TIME, DIFF)])
        return client.create_or_load(name, schema=columns, key_columns=list(key))
    if key and tuple(key) != found.schemas[-1].key:
        has = ", ".join(found.schemas[-1].key) or "none"
        raise UsageError(
            f'collection "{name}" of location "{client.url}" has another key',
            detail=f"Its key is {has}; the requested key is {', '.join(key)}.",
            hint="Leave the key out, or write to a new collection.",
        )
    if found.upper == END:
        raise UsageError(
            f'collection "{name}" of location "{client.url}" is closed',
            hint="Nothing can be added to it any more; write to another one.",
        )
    return client.collection(name)


@contextmanager
def dropped_unless_written(client: Client, target: Collection) -> Iterator[None]:
    """Drop a collection that was never written to, if the block fails."""
    try:
        yield
    except BaseException:
        undo(client, target.name)
        raise


def undo(client: Client, name: str) -> None:
    """Drop the collection if it was never written to."""
    found = client.state.named(name)
    if found is not None and found.upper == 0 and not found.batches:
        client.destroy(name)


def _check_columns(name: str, given: pa.Schema, key: Sequence[str]) -> None:
    if isinstance(key, str):
        raise UsageError(
            f'key of collection "{name}" is a text', hint=f'Give a list of columns: ["{key}"].'
        )
    if TIME in given.names:
        raise UsageError(
            f'rows for collection "{name}" bring a column "{TIME}"',
            detail="Appended rows get the collection's next time.",
            hint="Leave the column out.",
        )
    if not set(given.names) - {DIFF}:
        raise UsageError(
            f'rows for collection "{name}" have no columns', hint="Give them at least one."
        )
    if len({each.lower() for each in given.names}) != len(given.names):
        raise UsageError(
            f'rows for collection "{name}" have columns that differ only in case',
            hint="Rename one of them.",
        )


def open_for_job(
    url: str, *, patience_ms: int, settings: Settings, pid: int | None = None
) -> Client:
    """Open a storage location for one job, as soon as no other writer holds the lock.

    The lock is held on behalf of process `pid` of this host, by default of this one.

    Raises:
        LockHeld: another writer held the lock for all of `patience_ms`.
    """
    job = f"spark-{socket.gethostname()}-{pid or os.getpid()}-{settings.chance.getrandbits(32):08x}"
    clock, never = settings.clock, threading.Event()
    deadline = clock.boot_ms() + patience_ms
    waiting = False
    while True:
        try:
            return open(url, writer=job, pid=pid, settings=settings)
        except LockHeld as held:
            if clock.boot_ms() >= deadline:
                raise
            if not waiting:
                log.info(
                    "waiting for another writer", extra=fields(location=url, writer=held.holder)
                )
                waiting = True
            clock.wait(never, LOOK_AGAIN_MS)
