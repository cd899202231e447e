"""Deadlines for waits on a peer: a database, a broker, a store, a connector.

A peer that hangs keeps its connections open and sends nothing. Every wait on one therefore has a
bound, and ends early when the process receives a stop signal:

    answer      silence after which a peer is checked, and declared lost if it does not answer
    stop        time from the stop signal to the exit of the process, finished or not
    stop grace  time left to a wait that has begun before the stop signal

A request whose deadline has passed has an unknown outcome. The rules for durable state apply to
it as they do to a lost connection.
"""

import math
import os
from typing import Final

from penstock.errors import UsageError

__all__ = ["STOP_GRACE_S", "STOP_TIMEOUT_S", "answer_timeout_s", "stop_timeout_s"]

ANSWER_TIMEOUT: Final = "PENSTOCK_ANSWER_TIMEOUT"
STOP_TIMEOUT: Final = "PENSTOCK_STOP_TIMEOUT"

ANSWER_TIMEOUT_S: Final = 10.0
STOP_TIMEOUT_S: Final = 15.0

STOP_GRACE_S: Final = 2.0
"""Time left to a peer for an answer that is due when the stop signal arrives."""


def answer_timeout_s() -> float:
    """Return the silence, in seconds, after which a peer is checked.

    Raises:
        UsageError: the environment variable does not hold a positive number.
    """
    return _seconds(ANSWER_TIMEOUT, ANSWER_TIMEOUT_S)


def stop_timeout_s() -> float:
    """Return the time, in seconds, from the stop signal to the exit of the process.

    Raises:
        UsageError: the environment variable does not hold a positive number.
    """
    return _seconds(STOP_TIMEOUT, STOP_TIMEOUT_S)


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(
            f'environment variable {variable} is invalid: "{text}"',
            hint=f"Give it a positive number of seconds, such as {default:g}, or unset it.",
        )
    return seconds
