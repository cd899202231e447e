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
    LOG_CREATE_DONE = "log.create.done"
    BLOB_PUT_BEGIN = "blob.put.begin"
    BLOB_PUT_DONE = "blob.put.done"
    ROLLUP_BEGIN = "rollup.begin"
    ROLLUP_DONE = "rollup.done"
    FLOOR_BEGIN = "floor.begin"
    FLOOR_DONE = "floor.done"
    TRUNCATE_DONE = "truncate.done"
    MERGE_BUILT = "merge.built"
    MERGE_DONE = "merge.done"
    COLLECT_BEGIN = "collect.begin"
    COLLECT_DONE = "collect.done"
    SINCE_INTENDED = "since.intended"
    SINCE_SETTLED = "since.settled"
    HOLD_PLACED = "hold.placed"
    HOLD_COUNTED = "hold.counted"
    EPOCH_TAKEN = "epoch.taken"
    RELEASE_DONE = "release.done"
    SLOT_INTENDED = "slot.intended"
    SLOT_CREATED = "slot.created"
    COPY_DONE = "copy.done"
    REPLACEMENT_CREATED = "replacement.created"
    REPLACEMENT_READ = "replacement.read"
    TICK_BEGIN = "tick.begin"
    TICK_DONE = "tick.done"
    CONFIRM_DONE = "confirm.done"
    APPLY_DONE = "apply.done"
    PLAN_DONE = "plan.done"
    STORE_DONE = "store.done"
    RESOURCE_DROPPED = "resource.dropped"
    RECOVERY_DONE = "recovery.done"
    ACKNOWLEDGE_DONE = "acknowledge.done"
    SLOT_DROPPED = "slot.dropped"
    TARGET_DELETED = "target.deleted"
    HOLD_DROPPED = "hold.dropped"
    DROP_DONE = "drop.done"
    NAMES_TAKEN = "names.taken"


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
