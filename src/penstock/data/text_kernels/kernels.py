"""Kernels that parse located values in their usual notation.

Every function fills `out` for the values that it parses. It sets `unparsed` for all other values,
whether they are invalid or only unusual, and `single_value` parses those. `kinds` is NOTHING where
a value is missing.
"""

from typing import Final

import numpy as np

from penstock.data.jit import compiled
from penstock.data.text_kernels.calendar import days_since_epoch, two_digits
from penstock.data.text_kernels.located_values import (
    DOUBLED,
    ESCAPED,
    FALSE,
    NOTHING,
    QUOTED,
    STRING,
    TRUE,
)

__all__ = [
    "copy_texts",
    "read_booleans",
    "read_dates",
    "read_decimals",
    "read_doubles",
    "read_integers",
    "read_timestamps",
]

_DAY: Final = 86_400_000_000
_EXACT: Final = np.uint64(1 << 53)
_TEN: Final = np.uint64(10)
_ZERO: Final = np.uint64(0)
_LIMIT: Final = np.uint64(10**18)
_TRUE: Final = np.frombuffer(b"true", np.uint8)
_FALSE: Final = np.frombuffer(b"false", np.uint8)
_TENS: Final = 10.0 ** np.arange(23)
"""Powers of ten that doubles hold exactly."""


@compiled
def copy_texts(data, kinds, starts, ends, out, offsets):  # type: ignore[no-untyped-def]
    """Copy the text of all values, without quotes and escapes."""
    to = 0
    offsets[0] = 0
    for row in range(len(kinds)):
        kind = kinds[row]
        if kind != NOTHING:
            at, end = starts[row], ends[row]
            if kind in (STRING, ESCAPED, QUOTED, DOUBLED):
                at += 1
                end -= 1
            if kind == ESCAPED:
                to = _unescape(data, at, end, out, to)
            elif kind == DOUBLED:
                while at < end:
                    out[to] = data[at]
                    to += 1
                    at += 2 if data[at] == 34 else 1
            else:
                length = end - at
                out[to : to + length] = data[at:end]
                to += length
        offsets[row + 1] = to


@compiled
def _digit(c):  # type: ignore[no-untyped-def]
    """Return the value of a hexadecimal digit."""
    if c <= 57:
        return np.int64(c) - 48
    return (np.int64(c) | 32) - 87


@compiled
def _unit(data, at):  # type: ignore[no-untyped-def]
    """Return the number of the four hexadecimal digits at `at`."""
    return (
        (_digit(data[at]) << 12)
        | (_digit(data[at + 1]) << 8)
        | (_digit(data[at + 2]) << 4)
        | _digit(data[at + 3])
    )


@compiled
def _unescape(data, at, end, out, to):  # type: ignore[no-untyped-def]
    """Write JSON text with valid escapes to `out`, and return its end there."""
    while at < end:
        c = data[at]
        at += 1
        if c != 92:
            out[to] = c
            to += 1
            continue
        c = data[at]
        at += 1
        if c != 117:
            if c == 98:
                c = np.uint8(8)
            elif c == 102:
                c = np.uint8(12)
            elif c == 110:
                c = np.uint8(10)
            elif c == 114:
                c = np.uint8(13)
            elif c == 116:
                c = np.uint8(9)
            out[to] = c
            to += 1
            continue
        code = _unit(data, at)
        at += 4
        if 0xD800 <= code < 0xDC00:
            code = 0x10000 + ((code - 0xD800) << 10) + _unit(data, at + 2) - 0xDC00
            at += 6
        if code < 0x80:
            out[to] = code
            to += 1
        elif code < 0x800:
            out[to] = 0xC0 | (code >> 6)
            out[to + 1] = 0x80 | (code & 0x3F)
            to += 2
        elif code < 0x10000:
            out[to] = 0xE0 | (code >> 12)
            out[to + 1] = 0x80 | ((code >> 6) & 0x3F)
            out[to + 2] = 0x80 | (code & 0x3F)
            to += 3
        else:
            out[to] = 0xF0 | (code >> 18)
            out[to + 1] = 0x80 | ((code >> 12) & 0x3F)
            out[to + 2] = 0x80 | ((code >> 6) & 0x3F)
            out[to + 3] = 0x80 | (code & 0x3F)
            to += 4
    return to


@compiled
def _unquoted(kind, start, end):  # type: ignore[no-untyped-def]
    """Return the bounds of the text between the quotes, if there are quotes."""
    if kind in (STRING, QUOTED):
        return start + 1, end - 1
    return start, end


@compiled
def _number(data, at, end):  # type: ignore[no-untyped-def]
    """Return whether a number of at most 19 digits is there, its sign, digits and exponent."""
    negative = at < end and data[at] == 45
    if negative:
        at += 1
    # Fast path: most numbers consist of a few digits only.
    begin, small = at, np.int64(0)
    while at < end and 48 <= data[at] <= 57:
        small = 10 * small + np.int64(data[at]) - 48
        at += 1
    if at == end and 0 < at - begin <= 18:
        return True, negative, np.uint64(small), 0
    mantissa, width, exponent = _ZERO, 0, np.int64(0)
    at = begin
    while at < end and 48 <= data[at] <= 57:
        if width or data[at] != 48:
            width += 1
        mantissa = mantissa * _TEN + np.uint64(data[at] - 48)
        at += 1
    if at == begin or width > 19:
        return False, negative, _ZERO, 0
    if at < end and data[at] == 46:
        at += 1
        begin = at
        while at < end and 48 <= data[at] <= 57:
            if width or data[at] != 48:
                width += 1
            mantissa = mantissa * _TEN + np.uint64(data[at] - 48)
            at += 1
        if at == begin or width > 19:
            return False, negative, _ZERO, 0
        exponent = begin - at
    if at < end and (data[at] == 101 or data[at] == 69):
        at += 1
        below = at < end and data[at] == 45
        if at < end and (data[at] == 45 or data[at] == 43):
            at += 1
        if at == end or end - at > 4:
            return False, negative, _ZERO, 0
        power = np.int64(0)
        while at < end and 48 <= data[at] <= 57:
            power = 10 * power + np.int64(data[at]) - 48
            at += 1
        exponent += -power if below else power
    return at == end, negative, mantissa, exponent


@compiled
def _scale(mantissa, power):  # type: ignore[no-untyped-def]
    """Return `mantissa` times ten to `power`, and whether the result is an integer in range."""
    if mantissa == _ZERO:
        return mantissa, True
    while power < 0:
        if mantissa % _TEN != _ZERO:
            return mantissa, False
        mantissa //= _TEN
        power += 1
    while power > 0:
        if mantissa >= _LIMIT:
            return mantissa, False
        mantissa *= _TEN
        power -= 1
    return mantissa, True


@compiled
def read_integers(data, kinds, starts, ends, bits, out, unparsed):  # type: ignore[no-untyped-def]
    """Parse signed integers of `bits` bits."""
    over = np.uint64(1) << np.uint64(bits - 1)
    for row in range(len(kinds)):
        kind = kinds[row]
        if kind == NOTHING:
            continue
        at, end = _unquoted(kind, starts[row], ends[row])
        is_valid, negative, mantissa, exponent = _number(data, at, end)
        if is_valid:
            mantissa, is_valid = _scale(mantissa, exponent)
        if not is_valid or mantissa >= over:
            unparsed[row] = True
        else:
            out[row] = -np.int64(mantissa) if negative else np.int64(mantissa)


@compiled
def read_doubles(data, kinds, starts, ends, out, unparsed):  # type: ignore[no-untyped-def]
    """Parse numbers that one operation on exact doubles gives, which rounds only once."""
    for row in range(len(kinds)):
        kind = kinds[row]
        if kind == NOTHING:
            continue
        at, end = _unquoted(kind, starts[row], ends[row])
        is_valid, negative, mantissa, exponent = _number(data, at, end)
        if not is_valid or mantissa > _EXACT or exponent > 22 or exponent < -22:
            unparsed[row] = True
            continue
        number = np.float64(mantissa)
        if exponent < 0:
            number /= _TENS[-exponent]
        else:
            number *= _TENS[exponent]
        out[row] = -number if negative else number


@compiled
def read_decimals(data, kinds, starts, ends, scale, over, out, unparsed):  # type: ignore[no-untyped-def]
    """Parse numbers with `scale` digits after the point, below `over`, as two words each."""
    for row in range(len(kinds)):
        kind = kinds[row]
        if kind == NOTHING:
            continue
        at, end = _unquoted(kind, starts[row], ends[row])
        is_valid, negative, mantissa, exponent = _number(data, at, end)
        if is_valid:
            mantissa, is_valid = _scale(mantissa, exponent + scale)
        if not is_valid or mantissa >= over:
            unparsed[row] = True
        elif negative and mantissa:
            out[row, 0] = -np.int64(mantissa)
            out[row, 1] = -1
        else:
            out[row, 0] = np.int64(mantissa)


@compiled
def read_booleans(data, kinds, starts, ends, out, unparsed):  # type: ignore[no-untyped-def]
    """Parse JSON booleans, and the words `true`, `t`, `false` and `f`."""
    for row in range(len(kinds)):
        kind = kinds[row]
        if kind == TRUE:
            out[row] = 1
        elif kind != FALSE and kind != NOTHING:
            at, end = _unquoted(kind, starts[row], ends[row])
            if _is_word(data, at, end, _TRUE):
                out[row] = 1
            elif not _is_word(data, at, end, _FALSE):
                unparsed[row] = True


@compiled
def _is_word(data, at, end, word):  # type: ignore[no-untyped-def]
    """Return whether `word` or its first letter alone is there."""
    if end - at != 1 and end - at != len(word):
        return False
    i = 0
    while at + i < end and data[at + i] == word[i]:
        i += 1
    return at + i == end


@compiled
def _days(data, at):  # type: ignore[no-untyped-def]
    """Return the day in the ten characters at `at`, since 1970, and whether it is valid."""
    century, years = two_digits(data, at), two_digits(data, at + 2)
    month, day = two_digits(data, at + 5), two_digits(data, at + 8)
    year = 100 * century + years
    if century < 0 or years < 0 or year < 1 or data[at + 4] != 45 or data[at + 7] != 45:
        return np.int64(0), False
    return days_since_epoch(year, month, day)


@compiled
def read_dates(data, kinds, starts, ends, out, unparsed):  # type: ignore[no-untyped-def]
    """Parse dates such as 2026-01-31 as days since 1970."""
    for row in range(len(kinds)):
        kind = kinds[row]
        if kind == NOTHING:
            continue
        at, end = _unquoted(kind, starts[row], ends[row])
        is_valid = end - at == 10
        if is_valid:
            days, is_valid = _days(data, at)
            out[row] = days
        if not is_valid:
            unparsed[row] = True


@compiled
def _timestamp(data, at, end, zoned):  # type: ignore[no-untyped-def]
    """Return microseconds since 1970, and whether `2026-01-31T12:00:00.123456+01:00` is there."""
    invalid = np.int64(0), False
    if end - at < 19 or (data[at + 10] != 84 and data[at + 10] != 32):
        return invalid
    days, is_valid = _days(data, at)
    hours, minutes, seconds = (
        two_digits(data, at + 11),
        two_digits(data, at + 14),
        two_digits(data, at + 17),
    )
    if not is_valid or data[at + 13] != 58 or data[at + 16] != 58:
        return invalid
    if hours < 0 or hours > 23 or minutes < 0 or minutes > 59 or seconds < 0 or seconds > 59:
        return invalid
    at += 19
    fraction = np.int64(0)
    if at < end and data[at] == 46:
        width = 0
        at += 1
        while at < end and 48 <= data[at] <= 57:
            if width < 6:
                fraction = 10 * fraction + np.int64(data[at]) - 48
            width += 1
            at += 1
        if width < 1 or width > 6:
            return invalid
        for _ in range(6 - width):
            fraction *= 10
    utc_offset = np.int64(0)
    if zoned:
        if end - at == 1 and data[at] == 90:
            at += 1
        elif end - at == 6 and data[at + 3] == 58 and (data[at] == 43 or data[at] == 45):
            zone_hours, zone_minutes = two_digits(data, at + 1), two_digits(data, at + 4)
            if zone_hours < 0 or zone_hours > 23 or zone_minutes < 0 or zone_minutes > 59:
                return invalid
            utc_offset = 60 * zone_hours + zone_minutes
            if data[at] == 45:
                utc_offset = -utc_offset
            at += 6
        else:
            return invalid
    if at != end:
        return invalid
    within = ((60 * hours + minutes - utc_offset) * 60 + seconds) * 1_000_000 + fraction
    return days * _DAY + within, True


@compiled
def read_timestamps(data, kinds, starts, ends, zoned, out, unparsed):  # type: ignore[no-untyped-def]
    """Parse timestamps as microseconds since 1970; with `zoned`, from text with a time zone."""
    for row in range(len(kinds)):
        kind = kinds[row]
        if kind == NOTHING:
            continue
        at, end = _unquoted(kind, starts[row], ends[row])
        micros, is_valid = _timestamp(data, at, end, zoned)
        if is_valid:
            out[row] = micros
        else:
            unparsed[row] = True
