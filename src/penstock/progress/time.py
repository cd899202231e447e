"""Times of the timeline as users write them and as they are shown.

A time is milliseconds since the epoch. Users give it as that number, as RFC 3339 with a
zone, as a relative time (`10 minutes ago`), or in Python as an aware `datetime`.

    parse_time(format_time(t), now) == t
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from penstock.errors import UsageError

__all__ = ["TIME_FORMS", "describe_time", "format_time", "parse_time"]

TIME_FORMS: Final = (
    "milliseconds since the epoch, RFC 3339 with a zone such as 2026-11-15T12:00:00Z, a relative "
    "time such as 10 minutes ago, earliest or latest"
)

_CALENDAR_MS: Final = 100_000_000_000
"""Smaller times are taken for logical ones of a program, not for moments of 1970 to 1973."""

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


def parse_time(value: str | datetime, now_ms: int) -> int:
    """Return the time that `value` means; a relative one counts back from `now_ms`.

    A part of a millisecond is dropped, so the result is not after `value`.

    Raises:
        UsageError: it is not a time, or has no zone.
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
        why = "is not a time" if moment is None else "has no time zone"
        raise UsageError(f'"{value}" {why}', hint=f"Give {TIME_FORMS}.")
    return (moment - _EPOCH) // _MILLISECOND


def format_time(time_ms: int) -> str:
    """Return a time in RFC 3339, with milliseconds; its number, if no calendar has it."""
    try:
        return (
            (_EPOCH + time_ms * _MILLISECOND)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
        )
    except OverflowError:
        return str(time_ms)


def describe_time(time_ms: int) -> str:
    """Return a time as a number, with RFC 3339 next to it if it is a time of the calendar."""
    text = format_time(time_ms)
    if time_ms < _CALENDAR_MS or text == str(time_ms):
        return str(time_ms)
    return f"{time_ms} ({text})"
