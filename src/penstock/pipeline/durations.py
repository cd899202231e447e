"""Lengths of time as people write them: 250ms, 1s, 5m, 24h, 7d."""

import re
from typing import Final

from penstock.errors import UsageError

__all__ = ["milliseconds"]

_UNITS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"([0-9]+)\s*(ms|s|m|h|d)")


def milliseconds(text: object) -> int:
    """The milliseconds in `text`.

    Raises:
        UsageError: it is not a number followed by a unit.
    """
    written = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    if written is None:
        raise UsageError(
            f"{text!r} is not a length of time",
            hint="Write a whole number and a unit, such as 250ms, 1s, 5m, 24h or 7d.",
        )
    return int(written[1]) * _UNITS[written[2]]
