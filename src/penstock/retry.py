"""What may be asked again, and after how long.

One function maps an error to what to do about it; one generator gives the
pauses between attempts. No other place invents a policy.
"""

import random
from collections.abc import Iterator
from enum import Enum, auto

from penstock.errors import (
    DeterminateError,
    DurabilityLost,
    IndeterminateError,
    StoreRefused,
)

__all__ = ["Policy", "pauses_ms", "policy_of"]


class Policy(Enum):
    """What to do about an error."""

    RETRY = auto()
    """It is about the moment: ask again, with the same bytes."""

    SURFACE = auto()
    """It will not get better by asking: tell the caller, once."""


def policy_of(error: BaseException) -> Policy:
    """The one table from a kind of failure to what is done about it."""
    match error:
        case StoreRefused() | DurabilityLost():
            return Policy.SURFACE
        case DeterminateError() | IndeterminateError():
            return Policy.RETRY
        case _:
            return Policy.SURFACE


def pauses_ms(chance: random.Random, *, first_ms: int = 20, cap_ms: int = 5_000) -> Iterator[int]:
    """Pauses that double up to `cap_ms`, each shortened by up to half at random.

    The chance keeps many clients of one store from coming back in step.
    """
    pause = first_ms
    while True:
        yield pause - chance.randrange(pause // 2 + 1)
        pause = min(pause * 2, cap_ms)
