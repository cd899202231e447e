"""Text of one value in any valid notation, for values that the compiled kernels leave out.

Each function returns the value in the form of its column buffer, and raises `InvalidValue` with
the reason, as the end of a message. Functions and kernels give the same value where both give one.
"""

import math
import re
from datetime import date
from typing import Final

from penstock.data.text_kernels.located_values import InvalidValue

__all__ = [
    "parse_boolean",
    "parse_date",
    "parse_decimal",
    "parse_double",
    "parse_integer",
    "parse_timestamp",
]

_MAX_EXPONENT_DIGITS: Final = 9
"""Limit of the digits of an exponent; a longer one exceeds every column type."""

_WORD: Final = (1 << 64) - 1
_DAY: Final = 86_400_000_000
_EPOCH: Final = date(1970, 1, 1).toordinal()
_NUMBER: Final = re.compile(r"([+-]?)(?=\.?[0-9])([0-9]*)(?:\.([0-9]*))?(?:[eE]([+-]?)([0-9]+))?")
_DATE: Final = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")
_TIMESTAMP: Final = re.compile(
    _DATE.pattern + r"[Tt ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,]([0-9]+))?)?"
    r"(?:([Zz])|([+-])([0-9]{2})(?::?([0-9]{2}))?)?"
)
_NOT_FINITE: Final = ("NaN", "Infinity", "-Infinity")


def parse_boolean(text: str) -> bool:
    """Parse `true`, `t`, `false` or `f`, in any case."""
    if text.lower() not in ("true", "t", "false", "f"):
        raise InvalidValue
    return text[0] in "tT"


def parse_integer(text: str, *, bits: int) -> int:
    """Parse a number without fraction that fits into `bits` bits."""
    number = _scaled_integer(text, 0, "it has digits after the point")
    if not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise InvalidValue(": it is too large")
    return number


def parse_decimal(text: str, *, precision: int, scale: int) -> tuple[int, int]:
    """Return the low and the high word of a decimal."""
    number = _scaled_integer(text, scale, f"it has more than {scale} digits after the point")
    if abs(number) >= 10**precision:
        raise InvalidValue(": it is too large")
    low, high = number & _WORD, number >> 64
    return low - (1 << 64) if low >> 63 else low, high


def _scaled_integer(text: str, scale: int, fraction_reason: str) -> int:
    """Return the number times ten to `scale`, if that is an integer of at most 40 digits."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise InvalidValue
    sign, before, after, exponent_sign, power = match.groups(default="")
    digits = (before + after).lstrip("0")
    significant = digits.rstrip("0")
    if not significant:
        return 0
    is_huge = len(power.lstrip("0")) > _MAX_EXPONENT_DIGITS
    exponent = 10**_MAX_EXPONENT_DIGITS if is_huge else int(power or "0")
    if exponent_sign == "-":
        exponent = -exponent
    shift = exponent - len(after) + len(digits) - len(significant) + scale
    if shift < 0:
        raise InvalidValue(f": {fraction_reason}")
    if len(significant) + shift > 40:
        raise InvalidValue(": it is too large")
    number: int = int(sign + significant) * 10**shift
    return number


def parse_double(text: str) -> float:
    """Parse a number, rounded to the nearest double, `NaN` or an infinity."""
    if text not in _NOT_FINITE and not _NUMBER.fullmatch(text):
        raise InvalidValue
    number = float(text)
    if math.isinf(number) and text not in _NOT_FINITE:
        raise InvalidValue(": it is too large")
    return number


def parse_date(text: str) -> int:
    """Return the days since 1970 of a date such as 2026-01-31."""
    match = _DATE.fullmatch(text)
    if match is None:
        raise InvalidValue
    return _day_number(*match.groups())


def _day_number(year: str, month: str, day: str) -> int:
    try:
        return date(int(year), int(month), int(day)).toordinal() - _EPOCH
    except ValueError:
        raise InvalidValue(": the day does not exist") from None


def parse_timestamp(text: str, *, zoned: bool) -> int:
    """Return the microseconds since 1970; with `zoned`, the text must have a time zone."""
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise InvalidValue
    year, month, day, hours, minutes, seconds, after, utc, sign, zone_hours, zone_minutes = (
        match.groups(default="")
    )
    if bool(utc or sign) != zoned:
        raise InvalidValue(
            ": it has no time zone" if zoned else ": it has a time zone, which needs timestamptz"
        )
    fraction = after.rstrip("0")
    if len(fraction) > 6:
        raise InvalidValue(": it is finer than a microsecond")
    hour, minute, second = int(hours), int(minutes), int(seconds or "0")
    offset_hours, offset_minutes = int(zone_hours or "0"), int(zone_minutes or "0")
    if max(hour, offset_hours) > 23 or max(minute, offset_minutes, second) > 59:
        raise InvalidValue(": the time does not exist")
    utc_offset = 60 * offset_hours + offset_minutes
    minute += 60 * hour - (-utc_offset if sign == "-" else utc_offset)
    micros = (60 * minute + second) * 1_000_000 + int(fraction.ljust(6, "0"))
    return _day_number(year, month, day) * _DAY + micros
