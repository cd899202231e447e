"""Dates of the Gregorian calendar as days since 1970, in compiled code."""

import numpy as np

from penstock.data.jit import compiled

__all__ = ["days_since_epoch", "two_digits"]


@compiled
def two_digits(data, at):  # type: ignore[no-untyped-def]
    """Return the number of the two digits at `at`, or -1 if they are not digits."""
    tens, ones = np.int64(data[at]) - 48, np.int64(data[at + 1]) - 48
    if tens < 0 or tens > 9 or ones < 0 or ones > 9:
        return np.int64(-1)
    return 10 * tens + ones


@compiled
def days_since_epoch(year, month, day):  # type: ignore[no-untyped-def]
    """Return the days from 1970-01-01 to a date, and whether the date exists.

    Year 0 is 1 BC, as in ISO 8601.
    """
    if month < 1 or month > 12 or day < 1:
        return np.int64(0), False
    length = 31
    if month == 4 or month == 6 or month == 9 or month == 11:
        length = 30
    elif month == 2:
        length = 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    if day > length:
        return np.int64(0), False
    # Years start in March in this calculation, which makes the leap day the last day.
    if month <= 2:
        year -= 1
        month += 12
    era = year // 400
    of_era = year - 400 * era
    of_year = (153 * (month - 3) + 2) // 5 + day - 1
    return 146097 * era + 365 * of_era + of_era // 4 - of_era // 100 + of_year - 719468, True
