"""Retry policy: the errors that are retried, and the backoff between attempts.

`policy_of` is the only function that maps an error to a policy.
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
    """Reaction to an error of a store operation."""

    RETRY = auto()
    """The error is transient: repeat the operation with the same bytes."""

    SURFACE = auto()
    """A retry cannot succeed: raise the error to the caller, once."""


def policy_of(error: BaseException) -> Policy:
    """Return the policy for an error."""
    match error:
        case StoreRefused() | DurabilityLost():
            return Policy.SURFACE
        case DeterminateError() | IndeterminateError():
            return Policy.RETRY
        case _:
            return Policy.SURFACE


def pauses_ms(rng: random.Random, *, first_ms: int = 20, cap_ms: int = 5_000) -> Iterator[int]:
    """Yield pauses that double up to `cap_ms`, each shortened at random by up to half.

    The random part prevents many clients of one store from retrying at the same time.
    """
    pause = first_ms
    while True:
        yield pause - rng.randrange(pause // 2 + 1)
        pause = min(pause * 2, cap_ms)
