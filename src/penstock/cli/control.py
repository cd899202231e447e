"""A running owner, asked to do something; or the lock, taken to do it here."""

import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import SETTINGS
from penstock.durable import join, normal
from penstock.durable.process import is_dead
from penstock.errors import UsageError
from penstock.persist.lake import is_storage_location
from penstock.persist.lock import may_be_alive
from penstock.persist.machine import Machine
from penstock.persist.requests import OwnerDied, send_request
from penstock.persist.state import State, Writer
from penstock.persist.store import open_store

if TYPE_CHECKING:
    from penstock.catalog.objects import Object

__all__ = ["AlreadyDropped", "Place", "Wait", "asked", "here", "place_of"]

Wait = Annotated[int, typer.Option(metavar="SECONDS", help="How long to wait for the answer.")]


class AlreadyDropped(UsageError):
    """A source or a materialization was there, and was dropped."""

    def __init__(self, location: str, name: str) -> None:
        super().__init__(
            f'"{name}" of location "{location}" was dropped already',
            hint="To make it anew, start it: penstock up FILE",
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a source or a materialization is."""

    url: str
    """Its storage location."""

    lake: str | None
    """That which it is in; None if there is only the storage location."""

    name: str

    def known(self) -> "list[Object]":
        """What the catalog of its lake knows of everything."""
        # Not above: it brings the pipeline's file along, and most verbs do not need it.
        from penstock.catalog.objects import known_objects

        return [] if self.lake is None else known_objects(self.lake)


def place_of(location: str, name: str) -> Place:
    """Where a source or a materialization is, in a lake or in a storage location of its own.

    Raises:
        UsageError: there is none of that name.
        AlreadyDropped: there was one.
    """
    if is_storage_location(location):
        url = location
        lake, _, folder = normal(location).rpartition("/")
        alone = folder != name or lake.endswith((":", "/"))
        place = Place(url, None if alone else lake, name)
    else:
        place = Place(join(location, name), location, name)
    state = _state(place.url) if is_storage_location(place.url) else None
    if not _is_there(place, state):
        if state is not None and not state.names and place.lake is not None:
            raise AlreadyDropped(location, name)
        raise UsageError(
            f'location "{location}" has no source or materialization "{name}"',
            hint=f"See what there is: penstock status {location}",
        )
    return place


def _is_there(place: Place, state: State | None) -> bool:
    from penstock.pipeline.file import CATALOG

    if place.name == CATALOG:
        return False
    return (state is not None and f"{place.name}/state" in state.names) or any(
        each.name == place.name and each.type in ("source", "materialization")
        for each in place.known()
    )


def owner_of_task(url: str) -> Writer | None:
    """Return the process that runs the task of a storage location, if one may.

    Other holders of a lock answer no requests, nor does a dead process.
    """
    if not is_storage_location(url):
        return None
    state = _state(url)
    is_task = any(name.endswith("/state") for name in state.names)
    owner = state.writer
    return owner if is_task and owner is not None and may_be_alive(owner) else None


def _state(url: str) -> State:
    blob = open_store(url, SETTINGS)
    try:
        return Machine(blob, SETTINGS).load()
    finally:
        blob.close()


def asked(
    url: str, verb: str, tables: Sequence[str] = (), *, keep_target: bool = False, wait: int
) -> Mapping[str, Any] | None:
    """Return the answer of the process that runs the task of `url`; None if none runs it.

    An owner that dies before it answers is noticed if it is of this host.

    Raises:
        UsageError: the request cannot be carried out, or nobody answers.
    """
    while (owner := owner_of_task(url)) is not None:
        try:
            return _ask(owner, url, verb, tables, keep_target=keep_target, wait=wait)
        except OwnerDied:
            print(f"process {owner.pid}, the owner of {url}, has died", file=sys.stderr)
    return None


def _ask(
    owner: Writer, url: str, verb: str, tables: Sequence[str], *, keep_target: bool, wait: int
) -> Mapping[str, Any]:
    blob = open_store(url, SETTINGS)
    try:
        with _ended_by_signals():
            said = send_request(
                blob,
                verb,
                tables,
                keep_target=keep_target,
                clock=SETTINGS.clock,
                rng=random.Random(),
                patience_ms=wait * 1_000,
                owner_is_dead=lambda: is_dead(owner.process),
            )
    finally:
        blob.close()
    if not said["done"]:
        raise UsageError(said["error"], detail=said["detail"], hint=said["hint"])
    return said


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this as an exception does, so that the request is withdrawn."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    # What is ignored, as by nohup, stays so.
    changed = [each for each, was in before.items() if was is not signal.SIG_IGN]
    for each in changed:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in changed:
            signal.signal(each, before[each])


def here(verb: str) -> str:
    """A writer's id for what is done by this process itself."""
    # SUBTLE: two runs under one id would take the lock from each other.
    return f"penstock-{verb}-{socket.gethostname()}-{os.getpid()}"
