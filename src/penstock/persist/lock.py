"""The writer's lock of a storage location: who holds it, whether they live, who takes it.

The lock is the location's writer, as its log says, and whoever takes it begins an epoch, by which
all before are fenced. A writer keeps the lock until it releases it. Who may take it from a writer
that did not:

    the holder's process       the same id                any other id
    is dead, on this host      takes it                   takes it
    runs, on this host         only with `take_over`      is rejected
    is on another host         takes it                   is rejected, until it is released
"""

import socket
from dataclasses import dataclass

from penstock.durable.process import identify, is_alive, is_dead, start_ticks
from penstock.errors import Fenced, UsageError
from penstock.persist.errors import LockHeld
from penstock.persist.machine import Machine
from penstock.persist.settings import Settings
from penstock.persist.state import OpenStaging, Operation, State, TakeEpoch, Writer
from penstock.persist.store import open_store

__all__ = [
    "LockHandoff",
    "check_lock",
    "check_writer_id",
    "lives",
    "owner_of",
    "release",
    "take_lock",
]


@dataclass(frozen=True, slots=True)
class LockHandoff:
    """A writer's lock on its way from one process to another, with the files it waits for."""

    url: str
    writer: str
    epoch: int
    staging: str


def take_lock(
    machine: Machine,
    settings: Settings,
    writer: str,
    *,
    where: str,
    address: str,
    after: int | None,
    take_over: bool,
    pid: int | None,
) -> None:
    """Begin an epoch as `writer`, who can be woken at `address`.

    The lock is held on behalf of process `pid` of this host, by default of this one.

    Raises:
        LockHeld: another id is writing; or, without `take_over`, another process of this host.
        Fenced: a process with the same id has begun to write since epoch `after`, and lives.
    """
    process = identify(pid)
    me = Writer(
        id=writer,
        host=socket.gethostname(),
        pid=process.pid,
        taken_ms=settings.clock.now_ms(),
        address=address,
        start=process.start,
        boot=process.boot,
        machine=process.machine,
    )
    name = f"l{settings.chance.getrandbits(64):016x}"

    def plan(state: State) -> list[Operation]:
        held = state.writer
        if held is not None and held.id == writer and after not in (None, state.epoch):
            _check_nobody_lives(where, state, after)
        check_lock(held, where=where, writer=writer, take_over=take_over)
        return [TakeEpoch(me, state.location or name), OpenStaging(f"{state.epoch + 1}-0")]

    machine.take_epoch(plan)


def check_lock(held: Writer | None, *, where: str, writer: str, take_over: bool) -> None:
    """Check that `writer` may take the lock from its holder.

    Raises:
        LockHeld: it may not.
    """
    if held is None or is_dead(held.process):
        return
    other = held.process != identify() and is_alive(held.process)
    if held.id != writer or (other and not take_over):
        raise LockHeld(held, where=where, writer=writer)


def release(
    url: str, *, holder: str | None = None, settings: Settings | None = None
) -> Writer | None:
    """Give up the lock on behalf of a writer that is dead; who it was, if there was one.

    Should it live after all, it is fenced: this costs it its work, never data.
    With `holder`, only if that id has it.
    """
    settings = settings or Settings()
    blob = open_store(url, settings)
    try:
        machine = Machine(blob, settings)
        found = machine.load().writer
        if found is None or (holder is not None and found.id != holder):
            return None
        machine.take_epoch(lambda state: [TakeEpoch(None, state.location)], own=False)
        return found
    finally:
        blob.close()


def owner_of(url: str) -> Writer | None:
    """Who holds the lock of a storage location."""
    blob = open_store(url, Settings())
    try:
        return Machine(blob, Settings()).load().writer
    finally:
        blob.close()


def lives(held: Writer) -> bool:
    """Return whether a writer's process may run: it does, or is not of this host."""
    if held.boot:
        return not is_dead(held.process)
    # Older releases recorded the process number alone.
    return held.host != socket.gethostname() or start_ticks(held.pid) is not None


def check_writer_id(writer: str) -> None:
    """That an id can be told to people, and typed."""
    if not writer or not writer.isprintable() or len(writer) > 200:
        raise UsageError(
            f"writer id {writer!r} cannot be used",
            hint="Use a short printable name that outlives restarts, such as the host's.",
        )


def _check_nobody_lives(url: str, state: State, after: int) -> None:
    """Refuse to take a lock back from a newer process with the same id."""
    if (other := state.writer) is not None and lives(other):
        raise Fenced(
            f'writer of location "{url}" was fenced',
            detail=f"It wrote in epoch {after}, and while it had let go of its lock epoch "
            f'{state.epoch} has begun, of "{other.id}", process {other.pid} on host '
            f'"{other.host}".',
            hint="Only one writer may run. Stop this one, or the other.",
        )
