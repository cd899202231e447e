"""Failpoints: named steps where a test can kill, suspend or fail the process.

Each durable step hits its failpoint. A hit has no effect unless a test has armed the failpoint,
in its own process with `arm`, or in the environment of a child process:

    PENSTOCK_FAILPOINTS="log.create.done=kill@3,blob.put.begin=error"

`kill` ends the process with SIGKILL, `stop` suspends it with SIGSTOP, `error` raises an
`IndeterminateError`. `@3` selects the third hit. A `begin` failpoint lies before the step, a
`done` failpoint between the step and its answer, so the two cover every case of a lost answer.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final

from penstock.errors import IndeterminateError, UsageError

__all__ = ["Action", "Failpoint", "arm", "armed", "disarm", "hit"]


class Failpoint(StrEnum):
    """All failpoints. At least one test fires each of them."""

    LOG_CREATE_BEGIN = "log.create.begin"
    """Before a log entry is created."""

    LOG_CREATE_DONE = "log.create.done"
    """After a log entry was created, before its writer knows."""

    BLOB_PUT_BEGIN = "blob.put.begin"
    """Before the object of a batch is written."""

    BLOB_PUT_DONE = "blob.put.done"
    """After the object of a batch was written."""

    ROLLUP_BEGIN = "rollup.begin"
    """Before a rollup is written."""

    ROLLUP_DONE = "rollup.done"
    """After a rollup was written."""

    FLOOR_BEGIN = "floor.begin"
    """Before the floor of the log is raised."""

    FLOOR_DONE = "floor.done"
    """After the floor of the log was raised, before entries below it are deleted."""

    TRUNCATE_DONE = "truncate.done"
    """After entries below the floor were deleted."""

    MERGE_BUILT = "merge.built"
    """After the result of a merge was written, before it is linked."""

    MERGE_DONE = "merge.done"
    """After the result of a merge was linked."""

    COLLECT_BEGIN = "collect.begin"
    """Before unlinked files are deleted."""

    COLLECT_DONE = "collect.done"
    """After unlinked files were deleted."""

    SINCE_INTENDED = "since.intended"
    """After the intent to advance since was recorded, before holds are counted again."""

    SINCE_SETTLED = "since.settled"
    """After since was advanced."""

    HOLD_PLACED = "hold.placed"
    """After a hold was placed, before it is checked."""

    HOLD_COUNTED = "hold.counted"
    """After a hold was checked to be effective."""

    EPOCH_TAKEN = "epoch.taken"
    """After a writer took its epoch."""

    RELEASE_DONE = "release.done"
    """After a writer released its lock."""

    SLOT_INTENDED = "slot.intended"
    """After the name of a replication slot was recorded, before it is created."""

    SLOT_CREATED = "slot.created"
    """After a replication slot was created."""

    COPY_DONE = "copy.done"
    """After the files of an initial snapshot were written, before they are linked."""

    REPLACEMENT_CREATED = "replacement.created"
    """After the new collection of a replaced table was created."""

    REPLACEMENT_READ = "replacement.read"
    """After the new collection of a replaced table was read from the source."""

    TICK_BEGIN = "tick.begin"
    """Before the entry of a tick is committed."""

    TICK_DONE = "tick.done"
    """After the entry of a tick was committed, before the source knows."""

    CONFIRM_DONE = "confirm.done"
    """After a position was confirmed to the source's server."""

    APPLY_DONE = "apply.done"
    """After a connector applied a spec, before the recovery log records it."""

    PLAN_DONE = "plan.done"
    """After a transaction was planned in the recovery log, before its first Store."""

    STORE_DONE = "store.done"
    """After the connector answered StartedCommit, before the recovery log has the commit."""

    RESOURCE_DROPPED = "resource.dropped"
    """After a connector dropped a table that it creates again."""

    RECOVERY_DONE = "recovery.done"
    """After a transaction was committed in the recovery log, before Acknowledge."""

    ACKNOWLEDGE_DONE = "acknowledge.done"
    """After a transaction was acknowledged by the connector."""

    SLOT_DROPPED = "slot.dropped"
    """After the slot of a dropped source was dropped."""

    TARGET_DELETED = "target.deleted"
    """After the resources of a dropped materialization were deleted."""

    HOLD_DROPPED = "hold.dropped"
    """After the holds of a dropped materialization were dropped."""

    DROP_DONE = "drop.done"
    """After a task was dropped, before the catalog forgets it."""

    NAMES_TAKEN = "names.taken"
    """After the names of new objects were taken in the catalog."""


class Action(StrEnum):
    """Effect of a failpoint on the process that hits it."""

    KILL = "kill"
    STOP = "stop"
    ERROR = "error"


_lock = threading.Lock()
_armed: dict[Failpoint, tuple[Action, int, bool]] = {}
_hits: dict[Failpoint, int] = {}
_any_armed = False


def hit(point: Failpoint) -> None:
    """Fire `point` if it is armed for this hit; otherwise do nothing."""
    if _any_armed:
        _hit_armed(point)


def arm(point: Failpoint, action: Action, *, at_hit: int = 1, repeat: bool = False) -> None:
    """Run `action` at hit number `at_hit` of `point`; with `repeat`, at each later hit too."""
    global _any_armed
    with _lock:
        _armed[point] = (action, at_hit, repeat)
        _hits[point] = 0
        _any_armed = True


def disarm() -> None:
    """Disarm all failpoints."""
    global _any_armed
    with _lock:
        _armed.clear()
        _hits.clear()
        _any_armed = False


@contextmanager
def armed(
    point: Failpoint, action: Action, *, at_hit: int = 1, repeat: bool = False
) -> Iterator[None]:
    """Arm `point` inside a `with` block, and disarm all failpoints at its end."""
    arm(point, action, at_hit=at_hit, repeat=repeat)
    try:
        yield
    finally:
        disarm()


def _hit_armed(point: Failpoint) -> None:
    with _lock:
        if point not in _armed:
            return
        action, at_hit, repeat = _armed[point]
        _hits[point] += 1
        if _hits[point] < at_hit or (_hits[point] > at_hit and not repeat):
            return
    match action:
        case Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Action.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Action.ERROR:
            raise IndeterminateError(f'failpoint "{point}" fired')


def _arm_from_environment(text: str) -> None:
    for assignment in filter(None, text.split(",")):
        name, _, effect = assignment.partition("=")
        action, _, hit_number = effect.partition("@")
        try:
            arm(Failpoint(name), Action(action), at_hit=int(hit_number or 1))
        except ValueError as error:
            raise UsageError(
                f'failpoint "{assignment}" in environment variable {ENVIRONMENT} is invalid',
                hint="Write NAME=ACTION or NAME=ACTION@N, where NAME is one of "
                f"{', '.join(Failpoint)}, and ACTION is one of {', '.join(Action)}.",
            ) from error


ENVIRONMENT: Final = "PENSTOCK_FAILPOINTS"
_arm_from_environment(os.environ.get(ENVIRONMENT, ""))
