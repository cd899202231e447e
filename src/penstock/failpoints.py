"""Named places where a test may trip us.

Each durable step passes one of these by name. Nothing happens there unless a
test armed it, in its own process with `arm`, or in a child's environment:

    PENSTOCK_FAILPOINTS="log.create.done=kill@3,blob.put.begin=error"

`kill` ends the process as `kill -9` would, `stop` suspends it as SIGSTOP
would, `error` raises an in-doubt store error; `@3` means at the third pass.
A `begin` lies before the step has happened, a `done` after it happened and
before anyone was told, so the two together give every case of a lost answer.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final

from penstock.errors import IndeterminateError, UsageError

__all__ = ["Action", "Failpoint", "arm", "disarm", "pass_by", "tripped"]


class Failpoint(StrEnum):
    """Every place that can be tripped. A test trips each."""

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
    """What happens to whoever passes."""

    KILL = "kill"
    STOP = "stop"
    ERROR = "error"


_lock = threading.Lock()
_armed: dict[Failpoint, tuple[Action, int, bool]] = {}
_passes: dict[Failpoint, int] = {}
_live = False


def pass_by(point: Failpoint) -> None:
    """Go past `point`; nothing happens unless it is armed and its turn has come."""
    if _live:
        _pass_armed(point)


def arm(point: Failpoint, action: Action, *, at_pass: int = 1, repeat: bool = False) -> None:
    """Do `action` at the `at_pass`-th hit of `point`; with `repeat`, at each later hit too."""
    global _live
    with _lock:
        _armed[point] = (action, at_pass, repeat)
        _passes[point] = 0
        _live = True


def disarm() -> None:
    """Forget everything that was armed."""
    global _live
    with _lock:
        _armed.clear()
        _passes.clear()
        _live = False


@contextmanager
def tripped(
    point: Failpoint, action: Action, *, at_pass: int = 1, repeat: bool = False
) -> Iterator[None]:
    """Arm `point` for the length of a block."""
    arm(point, action, at_pass=at_pass, repeat=repeat)
    try:
        yield
    finally:
        disarm()


def _pass_armed(point: Failpoint) -> None:
    with _lock:
        if point not in _armed:
            return
        action, at_pass, repeat = _armed[point]
        _passes[point] += 1
        if _passes[point] < at_pass or (_passes[point] > at_pass and not repeat):
            return
    match action:
        case Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Action.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Action.ERROR:
            raise IndeterminateError(f'failpoint "{point}" was tripped')


def _arm_from_environment(text: str) -> None:
    for word in filter(None, text.split(",")):
        name, _, deed = word.partition("=")
        action, _, turn = deed.partition("@")
        try:
            arm(Failpoint(name), Action(action), at_pass=int(turn or 1))
        except ValueError as error:
            raise UsageError(
                f'failpoint "{word}" of PENSTOCK_FAILPOINTS cannot be armed',
                hint=f"Write NAME=ACTION or NAME=ACTION@N, with a name of {[*map(str, Failpoint)]} "
                f"and an action of {[*map(str, Action)]}.",
            ) from error


ENVIRONMENT: Final = "PENSTOCK_FAILPOINTS"
_arm_from_environment(os.environ.get(ENVIRONMENT, ""))
