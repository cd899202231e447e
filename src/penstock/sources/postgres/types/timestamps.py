"""date, timestamp and timestamptz.

Values are days or microseconds since 1970. As in the server, the least and the greatest
integer represent the two infinities, and no finite time may use them. A timestamp from
the year 294247 on does not fit and is rejected. Years before 1 AD are printed with `BC`;
there is no year 0.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.data.jit import compiled
from penstock.data.text_kernels.calendar import days_since_epoch
from penstock.sources.postgres.types.cells import (
    READ,
    Cells,
    Refused,
    Why,
    accept,
    bits_of,
    numbers,
    strings,
)
from penstock.sources.postgres.types.numbers import received

__all__ = [
    "parse_dates",
    "parse_timestamps",
    "print_dates",
    "print_timestamps",
    "receive_dates",
    "receive_timestamps",
]

_MALFORMED: Final = int(Why.MALFORMED)
_BEYOND: Final = int(Why.BEYOND)
_DAY: Final = 86_400_000_000
_DAYS_TO_2000: Final = 10_957
_LEAST_DAY: Final = -(1 << 31)
_MOST_DAY: Final = (1 << 31) - 1
_LEAST: Final = -(1 << 63)
_MOST: Final = (1 << 63) - 1


def parse_dates(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Parse `2011-11-11`, with optional ` BC`, or an infinity."""
    cells = Cells.of(values)
    out = np.empty(len(cells), np.int32)
    accept(_parse_dates(cells.data, cells.offsets, cells.present, out))
    return numbers(kind, out, cells)


def parse_timestamps(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Parse `2011-11-11 11:11:11.5`, with `+00` if zoned, optional ` BC`, or an infinity."""
    cells = Cells.of(values)
    out = np.empty(len(cells), np.int64)
    zoned = kind.tz is not None
    accept(_parse_timestamps(cells.data, cells.offsets, cells.present, zoned, out))
    return numbers(kind, out, cells)


def receive_dates(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Decode days since 2000."""
    cells = Cells.of(values)
    days = _since_1970(cells, 4, _DAYS_TO_2000, _LEAST_DAY, _MOST_DAY)
    return numbers(kind, days.astype(np.int32), cells)


def receive_timestamps(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Decode microseconds since 2000."""
    cells = Cells.of(values)
    microseconds = _since_1970(cells, 8, _DAYS_TO_2000 * _DAY, _LEAST, _MOST)
    return numbers(kind, microseconds, cells)


def print_dates(values: pa.Array) -> pa.Array:
    """Print dates like the server in ISO style."""
    present, bitmap = bits_of(values)
    days = np.frombuffer(values.buffers()[1], np.int32, len(values), 4 * values.offset)
    wide = days.astype(np.int64)
    wide[days == _LEAST_DAY] = _LEAST
    wide[days == _MOST_DAY] = _MOST
    return _printed(wide, present, bitmap, dated=True, zoned=False)


def print_timestamps(values: pa.Array) -> pa.Array:
    """Print timestamps like the server in ISO style and UTC."""
    present, bitmap = bits_of(values)
    microseconds = np.frombuffer(values.buffers()[1], np.int64, len(values), 8 * values.offset)
    zoned = values.type.tz is not None
    return _printed(microseconds.copy(), present, bitmap, dated=False, zoned=zoned)


def _since_1970(
    cells: Cells, width: int, shift: int, least: int, most: int
) -> npt.NDArray[np.int64]:
    values = received(cells, width)
    late = (values >= most - shift) & (values != most)
    if late.any():
        raise Refused(int(np.argmax(late)), Why.BEYOND)
    fixed = (values == most) | (values == least) | ~cells.present
    return np.where(fixed, values, values + np.where(fixed, 0, shift))


def _printed(
    values: npt.NDArray[np.int64],
    present: npt.NDArray[np.bool_],
    bitmap: pa.Buffer | None,
    *,
    dated: bool,
    zoned: bool,
) -> pa.Array:
    out = np.empty(40 * len(values), np.uint8)
    offsets = np.empty(len(values) + 1, np.int64)
    _print(values, present, dated, zoned, out, offsets)
    return strings(pa.string(), out, offsets, bitmap)


@compiled
def _two(data, at):  # type: ignore[no-untyped-def]
    """Return the value of two digits, or 100 if they are not digits."""
    tens, ones = np.int64(data[at]) - 48, np.int64(data[at + 1]) - 48
    if tens < 0 or tens > 9 or ones < 0 or ones > 9:
        return 100
    return 10 * tens + ones


@compiled
def _infinity(data, at, end):  # type: ignore[no-untyped-def]
    """Return 1 or -1 for an infinity, else 0."""
    sign = 1
    if at < end and data[at] == 45:
        sign, at = -1, at + 1
    if end - at != 8:
        return 0
    for k, each in enumerate((105, 110, 102, 105, 110, 105, 116, 121)):
        if data[at + k] != each:
            return 0
    return sign


@compiled
def _before_christ(data, at, end):  # type: ignore[no-untyped-def]
    return end - at > 3 and data[end - 1] == 67 and data[end - 2] == 66 and data[end - 3] == 32


@compiled
def _day(data, at, end, before_christ):  # type: ignore[no-untyped-def]
    """Return the day number of the date at `at`, and its end; the end is -1 if malformed."""
    start = at
    year = np.int64(0)
    while at < end and at < start + 8:
        digit = np.int64(data[at]) - 48
        if digit < 0 or digit > 9:
            break
        year = 10 * year + digit
        at += 1
    width = at - start
    if width < 4 or width > 7 or year == 0 or (width > 4 and data[start] == 48) or end - at < 6:
        return 0, -1
    month, day = _two(data, at + 1), _two(data, at + 4)
    if data[at] != 45 or data[at + 3] != 45:
        return 0, -1
    days, exists = days_since_epoch(1 - year if before_christ else year, month, day)
    return (days, at + 6) if exists else (0, -1)


@compiled
def _parse_dates(data, offsets, present, out):  # type: ignore[no-untyped-def]
    for i in range(len(present)):
        out[i] = 0
        if not present[i]:
            continue
        at, end = offsets[i], offsets[i + 1]
        sign = _infinity(data, at, end)
        if sign:
            out[i] = _MOST_DAY if sign > 0 else _LEAST_DAY
            continue
        before_christ = _before_christ(data, at, end)
        if before_christ:
            end -= 3
        days, at = _day(data, at, end, before_christ)
        if at != end:
            return i, _MALFORMED
        if days <= _LEAST_DAY or days >= _MOST_DAY:
            return i, _BEYOND
        out[i] = days
    return READ


@compiled
def _parse_timestamps(data, offsets, present, zoned, out):  # type: ignore[no-untyped-def]
    for i in range(len(present)):
        out[i] = 0
        if not present[i]:
            continue
        at, end = offsets[i], offsets[i + 1]
        sign = _infinity(data, at, end)
        if sign:
            out[i] = _MOST if sign > 0 else _LEAST
            continue
        before_christ = _before_christ(data, at, end)
        if before_christ:
            end -= 3
        if zoned:
            end -= 3
            if end < at or data[end] != 43 or data[end + 1] != 48 or data[end + 2] != 48:
                return i, _MALFORMED
        days, at = _day(data, at, end, before_christ)
        if at < 0 or end - at < 9 or data[at] != 32 or data[at + 3] != 58 or data[at + 6] != 58:
            return i, _MALFORMED
        hours, minutes, seconds = _two(data, at + 1), _two(data, at + 4), _two(data, at + 7)
        if hours > 23 or minutes > 59 or seconds > 59:
            return i, _MALFORMED
        at += 9
        fraction = np.int64(0)
        if at < end:
            width = end - at - 1
            if data[at] != 46 or width < 1 or width > 6 or data[end - 1] == 48:
                return i, _MALFORMED
            for k in range(at + 1, end):
                digit = np.int64(data[k]) - 48
                if digit < 0 or digit > 9:
                    return i, _MALFORMED
                fraction = 10 * fraction + digit
            for _ in range(6 - width):
                fraction *= 10
        within = ((60 * hours + minutes) * 60 + seconds) * 1_000_000 + fraction
        if days > _MOST // _DAY or (days == _MOST // _DAY and within >= _MOST % _DAY):
            return i, _BEYOND
        out[i] = days * _DAY + within
    return READ


@compiled
def _put_two(out, to, number):  # type: ignore[no-untyped-def]
    out[to] = 48 + number // 10
    out[to + 1] = 48 + number % 10
    return to + 2


@compiled
def _print(values, present, dated, zoned, out, bounds):  # type: ignore[no-untyped-def]
    """Print days if `dated`, else microseconds."""
    to = 0
    for i in range(len(present)):
        bounds[i] = to
        if not present[i]:
            continue
        value = values[i]
        if value in (_MOST, _LEAST):
            if value == _LEAST:
                out[to] = 45
                to += 1
            for each in (105, 110, 102, 105, 110, 105, 116, 121):
                out[to] = each
                to += 1
            continue
        days, within = (value, 0) if dated else (value // _DAY, value % _DAY)
        days += 719468
        era = days // 146097
        of_era = days - 146097 * era
        years = (of_era - of_era // 1460 + of_era // 36524 - of_era // 146096) // 365
        of_year = of_era - (365 * years + years // 4 - years // 100)
        month = (5 * of_year + 2) // 153
        day = of_year - (153 * month + 2) // 5 + 1
        month = month + 3 if month < 10 else month - 9
        year = 400 * era + years + (1 if month <= 2 else 0)
        shown = year if year > 0 else 1 - year
        width = 4
        while shown >= 10**width:
            width += 1
        for k in range(width - 1, -1, -1):
            out[to + k] = 48 + shown % 10
            shown //= 10
        to += width
        out[to] = 45
        to = _put_two(out, to + 1, month)
        out[to] = 45
        to = _put_two(out, to + 1, day)
        if not dated:
            seconds, fraction = within // 1_000_000, within % 1_000_000
            out[to] = 32
            to = _put_two(out, to + 1, seconds // 3600)
            out[to] = 58
            to = _put_two(out, to + 1, seconds // 60 % 60)
            out[to] = 58
            to = _put_two(out, to + 1, seconds % 60)
            if fraction:
                out[to] = 46
                to += 1
                for k in range(5, -1, -1):
                    out[to + k] = 48 + fraction % 10
                    fraction //= 10
                to += 6
                while out[to - 1] == 48:
                    to -= 1
            if zoned:
                out[to] = 43
                to = _put_two(out, to + 1, 0)
        if year <= 0:
            out[to] = 32
            out[to + 1] = 66
            out[to + 2] = 67
            to += 3
    bounds[len(present)] = to
