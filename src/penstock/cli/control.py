"""Requests to the running owner of a task, and the lock for commands that run without an owner."""

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
from penstock.durable import is_dead, join, normal
from penstock.errors import UsageError
from penstock.persist.lake import is_storage_location
from penstock.persist.lock import may_be_alive
from penstock.persist.machine import Machine
from penstock.persist.requests import OwnerDied, send_request
from penstock.persist.state import State, Writer
from penstock.persist.store import open_store

if TYPE_CHECKING:
    from penstock.catalog import Object

__all__ = [
    "AlreadyDropped",
    "TaskLocation",
    "Wait",
    "local_writer_id",
    "locate_task",
    "request_owner",
]

Wait = Annotated[
    int, typer.Option(metavar="SECONDS", help="Wait this many seconds for the response.")
]


class AlreadyDropped(UsageError):
    """Error: the source or the materialization was dropped before."""

    def __init__(self, location: str, name: str) -> None:
        super().__init__(
            f'"{name}" of location "{location}" was dropped already',
            hint="To create it again, run penstock up FILE.",
        )


@dataclass(frozen=True, slots=True)
class TaskLocation:
    """URLs of a source or a materialization."""

    url: str
    """Its storage location."""

    lake: str | None
    """URL of its lake; None for a storage location outside of a lake."""

    name: str

    def known_objects(self) -> "list[Object]":
        """Return all objects in the catalog of the lake."""
        # Imported late: it imports the models of the pipeline file, which few commands need.
        from penstock.catalog import known_objects

        return [] if self.lake is None else known_objects(self.lake)


def locate_task(location: str, name: str) -> TaskLocation:
    """Return the URLs of a source or a materialization; `location` is its lake or its own URL.

    Raises:
        UsageError: it does not exist.
        AlreadyDropped: it was dropped before.
    """
    if is_storage_location(location):
        url = location
        lake, _, folder = normal(location).rpartition("/")
        is_outside = folder != name or lake.endswith((":", "/"))
        task = TaskLocation(url, None if is_outside else lake, name)
    else:
        task = TaskLocation(join(location, name), location, name)
    state = _state(task.url) if is_storage_location(task.url) else None
    if not _exists(task, state):
        if state is not None and not state.names and task.lake is not None:
            raise AlreadyDropped(location, name)
        raise UsageError(
            f'location "{location}" has no source or materialization "{name}"',
            hint=f"List the existing ones with penstock status {location}.",
        )
    return task


def _exists(task: TaskLocation, state: State | None) -> bool:
    from penstock.pipeline import CATALOG

    if task.name == CATALOG:
        return False
    return (state is not None and f"{task.name}/state" in state.names) or any(
        obj.name == task.name and obj.type in ("source", "materialization")
        for obj in task.known_objects()
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


def request_owner(
    url: str, command: str, tables: Sequence[str] = (), *, keep_target: bool = False, wait: int
) -> Mapping[str, Any] | None:
    """Return the response of the process that runs the task of `url`; None without such a process.

    The death of an owner before its response is detected if the owner ran on this host.

    Raises:
        UsageError: the request cannot be executed, or the owner does not respond.
    """
    while (owner := owner_of_task(url)) is not None:
        try:
            return _send(owner, url, command, tables, keep_target=keep_target, wait=wait)
        except OwnerDied:
            print(f"process {owner.pid}, the owner of {url}, has died", file=sys.stderr)
    return None


def _send(
    owner: Writer, url: str, command: str, tables: Sequence[str], *, keep_target: bool, wait: int
) -> Mapping[str, Any]:
    blob = open_store(url, SETTINGS)
    try:
        with _ended_by_signals():
            response = send_request(
                blob,
                command,
                tables,
                keep_target=keep_target,
                clock=SETTINGS.clock,
                rng=random.Random(),
                patience_ms=wait * 1_000,
                owner_is_dead=lambda: is_dead(owner.process),
            )
    finally:
        blob.close()
    if not response["done"]:
        raise UsageError(response["error"], detail=response["detail"], hint=response["hint"])
    return response


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Raise SystemExit at SIGTERM and SIGHUP, so the cleanup code withdraws the request."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    # An ignored signal, as under nohup, stays ignored.
    changed = [number for number, handler in handlers.items() if handler is not signal.SIG_IGN]
    for number in changed:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, handlers[number])


def local_writer_id(command: str) -> str:
    """Return the writer id of a command that this process executes itself."""
    # SUBTLE: two runs under one id would take the lock from each other.
    return f"penstock-{command}-{socket.gethostname()}-{os.getpid()}"
