"""Times of the timeline: bounds, parsing and formatting.

A time is an `int`, milliseconds since the epoch, 64 bits at rest. Users write it as that number,
as RFC 3339 with a zone, as a relative time (`10 minutes ago`), or in Python as an aware
`datetime`.

    parse_time(format_time(t), now) == t
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from penstock.errors import UsageError

__all__ = [
    "MAX_TIME",
    "MIN_TIME",
    "TIME_FORMS",
    "check_time",
    "describe_time",
    "format_time",
    "parse_time",
]

MIN_TIME: Final = 0
MAX_TIME: Final = 2**63 - 1
"""The greatest upper. No update has this time, because intervals exclude their upper."""

TIME_FORMS: Final = (
    "milliseconds since the epoch, RFC 3339 with a zone such as 2026-11-15T12:00:00Z, a relative "
    "time such as 10 minutes ago, earliest or latest"
)

_CALENDAR_MS: Final = 100_000_000_000
"""Smaller times are logical times of a program, not times of 1970 to 1973."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_NUMBER: Final = re.compile(r"[0-9]{1,30}")
_RELATIVE: Final = re.compile(
    r"(\d{1,15})\s*(ms|milliseconds?|s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?|weeks?)"
    r"\s+ago",
    re.ASCII | re.IGNORECASE,
)
_UNITS_MS: Final = {
    "ms": 1,
    "millisecond": 1,
    "s": 1_000,
    "sec": 1_000,
    "second": 1_000,
    "m": 60_000,
    "min": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
    "week": 604_800_000,
}


def check_time(value: object) -> int:
    """Return `value` if it is a time.

    Raises:
        UsageError: it is not an integer, or does not fit into 64 bits.
    """
    # A bool is an int in Python, but True does not mean the first millisecond of 1970.
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(
            f"time {value!r} is a {type(value).__name__}, not an integer",
            hint="Give times as whole milliseconds since the epoch.",
        )
    if not MIN_TIME <= value <= MAX_TIME:
        raise UsageError(
            f"time {value} is out of range",
            detail=f"Times are from {MIN_TIME} to {MAX_TIME} milliseconds since the epoch.",
        )
    return value


def parse_time(value: str | datetime, now_ms: int) -> int:
    """Return the time that `value` denotes. A relative time counts back from `now_ms`.

    Fractions of a millisecond are dropped, so the result is at or before `value`.

    Raises:
        UsageError: `value` is not a time, or has no zone.
    """
    if isinstance(value, datetime):
        moment: datetime | None = value
    else:
        text = value.strip()
        if _NUMBER.fullmatch(text):
            return int(text)
        if text.lower() == "now":
            return now_ms
        if relative := _RELATIVE.fullmatch(text):
            unit = relative[2].lower()
            unit_ms = _UNITS_MS.get(unit) or _UNITS_MS[unit.removesuffix("s")]
            return now_ms - int(relative[1]) * unit_ms
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            moment = None
    if moment is None or moment.tzinfo is None:
        defect = "is not a time" if moment is None else "has no time zone"
        raise UsageError(f'"{value}" {defect}', hint=f"Give {TIME_FORMS}.")
    return (moment - _EPOCH) // _MILLISECOND


def format_time(time_ms: int) -> str:
    """Return a time in RFC 3339 with milliseconds, or its number beyond the year 9999."""
    try:
        return (
            (_EPOCH + time_ms * _MILLISECOND)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
        )
    except OverflowError:
        return str(time_ms)


def describe_time(time_ms: int) -> str:
    """Return a time as a number, followed by RFC 3339 unless it is a logical time."""
    text = format_time(time_ms)
    if time_ms < _CALENDAR_MS or text == str(time_ms):
        return str(time_ms)
    return f"{time_ms} ({text})"
