"""A running owner, asked to do something; or the lock, taken to do it here."""

import os
import random
import socket
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from penstock.cli.options import SETTINGS
from penstock.durable import join
from penstock.errors import UsageError
from penstock.persist.lake import is_storage_location, open_store
from penstock.persist.machine import Machine
from penstock.persist.owners import lives
from penstock.persist.requests import ask

__all__ = ["Wait", "asked", "hears", "here", "place_of"]

Wait = Annotated[int, typer.Option(metavar="SECONDS", help="How long to wait for the answer.")]


def place_of(location: str, name: str) -> str:
    """The storage location of a source or a materialization.

    Raises:
        UsageError: there is none of that name.
    """
    url = location if is_storage_location(location) else join(location, name)
    if not is_storage_location(url):
        raise UsageError(
            f'location "{location}" has no source or materialization "{name}"',
            hint=f"See what there is: penstock status {location}",
        )
    return url


def hears(url: str) -> bool:
    """Whether a storage location is one of a task that somebody runs now.

    Others that hold a lock hear nothing, and the dead do not answer. Then the lock is
    tried for, which is told who holds it and how to release it.
    """
    blob = open_store(url, SETTINGS)
    try:
        state = Machine(blob, SETTINGS).load()
    finally:
        blob.close()
    has_notes = any(name.endswith("/state") for name in state.names)
    return has_notes and state.writer is not None and lives(state.writer)


def asked(
    url: str, verb: str, tables: Sequence[str] = (), *, keep_target: bool = False, wait: int
) -> Mapping[str, Any]:
    """What the owner answers.

    Raises:
        UsageError: it cannot be done, or nobody answers.
    """
    blob = open_store(url, SETTINGS)
    try:
        said = ask(
            blob,
            verb,
            tables,
            keep_target=keep_target,
            clock=SETTINGS.clock,
            chance=random.Random(),
            patience_ms=wait * 1_000,
        )
    finally:
        blob.close()
    if not said["done"]:
        raise UsageError(said["error"], detail=said["detail"], hint=said["hint"])
    return said


def here(verb: str) -> str:
    """A writer's id for what is done by this process itself."""
    # SUBTLE: two runs under one id would take the lock from each other.
    return f"penstock-{verb}-{socket.gethostname()}-{os.getpid()}"
