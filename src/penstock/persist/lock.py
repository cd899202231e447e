"""The writer's lock of a storage location.

The holder is the writer recorded in the log. Taking the lock begins an epoch, which
fences all earlier ones. A writer holds the lock until it releases it. Otherwise the
process of the holder decides who may take it:

    the holder's process       the same id                any other id
    is dead, on this host      takes it                   takes it
    runs, on this host         only with `take_over`      is rejected
    is on another host         takes it                   is rejected, until it is released
"""

import socket
from dataclasses import dataclass

from penstock.durable import identify, is_alive, is_dead, start_ticks
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
    "may_be_alive",
    "owner_of",
    "release",
    "take_lock",
]


@dataclass(frozen=True, slots=True)
class LockHandoff:
    """A writer's lock in transit between processes, with its staging id."""

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
    """Begin an epoch as `writer`, which readers reach at `address`.

    The lock is held on behalf of process `pid` of this host, by default of this one.

    Raises:
        LockHeld: another id is writing; or, without `take_over`, another process of this host.
        Fenced: a live process with the same id has begun an epoch since epoch `after`.
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
            _check_no_newer_owner(where, state, after)
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
    """Release the lock of a dead writer, and return that writer, or None if there was none.

    A writer that is alive after all is fenced: it loses its work, never data. With
    `holder`, release only if that id holds the lock.
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
    """Return the holder of the lock of a storage location, or None."""
    blob = open_store(url, Settings())
    try:
        return Machine(blob, Settings()).load().writer
    finally:
        blob.close()


def may_be_alive(held: Writer) -> bool:
    """Return whether a writer's process may be alive: it is, or it runs on another host."""
    if held.boot:
        return not is_dead(held.process)
    # Older releases recorded only the pid.
    return held.host != socket.gethostname() or start_ticks(held.pid) is not None


def check_writer_id(writer: str) -> None:
    """Check that an id is printable and short."""
    if not writer or not writer.isprintable() or len(writer) > 200:
        raise UsageError(
            f"writer id {writer!r} is not a short printable name",
            hint="Use 1 to 200 printable characters that do not change, such as the host name.",
        )


def _check_no_newer_owner(url: str, state: State, after: int) -> None:
    """Reject taking the lock back from a newer process with the same id."""
    if (other := state.writer) is not None and may_be_alive(other):
        raise Fenced(
            f'writer of location "{url}" was fenced',
            detail=f"It wrote in epoch {after}. After it released its lock, epoch "
            f'{state.epoch} was begun by "{other.id}", process {other.pid} on host '
            f'"{other.host}".',
            hint="Only one writer may run. Stop one of the two processes.",
        )
