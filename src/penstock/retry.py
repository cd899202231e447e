"""Error policies: the reaction to each error, and the backoff between attempts.

`policy_of` is the only function that maps an error to a policy. A store repeats a call. Only the
supervisor acts on the other policies.
"""

import random
from collections.abc import Iterator
from enum import Enum, auto

from penstock.errors import (
    Corruption,
    DeterminateError,
    DurabilityLost,
    Fenced,
    IndeterminateError,
    PenstockError,
    StoreError,
    StoreRefused,
    TransientError,
)

__all__ = ["Policy", "pauses_ms", "policy_of"]


class Policy(Enum):
    """Reaction to an error."""

    REPEAT = auto()
    """Repeat the call with the same bytes. If the call keeps failing, restart the task."""

    RESUME = auto()
    """Run the loop of the task again, from its durable position."""

    RESTART = auto()
    """Open the storage location of the task again, and build a new loop."""

    STOP = auto()
    """Stop the task until a person intervenes."""

    REPORT = auto()
    """Report a bug. Restart the task if tasks are restarted, else end the process."""

    EXIT = auto()
    """End the process: a newer owner exists."""


def policy_of(error: BaseException) -> Policy:
    """Return the policy for an error."""
    match error:
        case Fenced():
            return Policy.EXIT
        case TransientError():
            return Policy.RESUME
        case Corruption():
            return Policy.STOP
        case StoreRefused() | DurabilityLost():
            return Policy.RESTART
        case DeterminateError() | IndeterminateError():
            return Policy.REPEAT
        case StoreError():
            return Policy.RESTART
        case PenstockError():
            return Policy.STOP
        case _:
            return Policy.REPORT


def pauses_ms(rng: random.Random, *, first_ms: int = 20, cap_ms: int = 5_000) -> Iterator[int]:
    """Yield pauses that double up to `cap_ms`, each shortened at random by up to half.

    The random part prevents many clients of one store from retrying at the same time.
    """
    pause = first_ms
    while True:
        yield pause - rng.randrange(pause // 2 + 1)
        pause = min(pause * 2, cap_ms)
