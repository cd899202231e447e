"""numeric(p, s) as 128-bit decimals.

A numeric column with declared precision and scale contains values with exactly `s` digits
after the point. Arrow decimals have the same form. Values with another number of digits,
NaN and infinities have no representation and are rejected.
"""

from typing import Final

import numpy as np
import pyarrow as pa

from penstock.data.jit import compiled
from penstock.sources.postgres.types.cells import (
    READ,
    Cells,
    Why,
    accept,
    bits_of,
    numbers,
    strings,
)

__all__ = ["parse_decimals", "print_decimals", "receive_decimals"]

_MALFORMED: Final = int(Why.MALFORMED)
_NOT_FINITE: Final = int(Why.NOT_FINITE)
_SCALE: Final = int(Why.SCALE)
_WORD: Final = (1 << 64) - 1
_LOW: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)
_TENS: Final = 10 ** np.arange(10, dtype=np.uint64)


def parse_decimals(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Parse decimal digits with `kind.scale` digits after the point."""
    return _decimals(_parse, values, kind)


def receive_decimals(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Decode base-10000 digits that follow their count, weight, sign and scale."""
    return _decimals(_receive, values, kind)


def print_decimals(values: pa.Array) -> pa.Array:
    """Print decimal digits, never with an exponent."""
    present, bitmap = bits_of(values)
    words = np.frombuffer(values.buffers()[1], np.uint64, 2 * len(values), 16 * values.offset)
    words.flags.writeable = False
    out = np.empty(42 * len(values), np.uint8)
    offsets = np.empty(len(values) + 1, np.int64)
    _print(words, present, values.type.scale, out, offsets)
    return strings(pa.string(), out, offsets, bitmap)


def _decimals(kernel, values: pa.Array, kind: pa.DataType) -> pa.Array:  # type: ignore[no-untyped-def]
    cells = Cells.of(values)
    words = np.empty(2 * len(cells), np.uint64)
    end = 10**kind.precision
    over = np.uint64(end >> 64), np.uint64(end & _WORD)
    accept(kernel(cells.data, cells.offsets, cells.present, kind.scale, over[0], over[1], words))
    return numbers(kind, words, cells)


@compiled
def _times(high, low, factor, addend):  # type: ignore[no-untyped-def]
    """Return `(high, low) * factor + addend` and the overflow.

    `factor` and `addend` are below 2 ** 32.
    """
    a = (low & _LOW) * factor + addend
    b = (low >> _32) * factor + (a >> _32)
    c = (high & _LOW) * factor + (b >> _32)
    d = (high >> _32) * factor + (c >> _32)
    return (d << _32) | (c & _LOW), (b << _32) | (a & _LOW), d >> _32


@compiled
def _stored(high, low, negative, over_high, over_low, words, i):  # type: ignore[no-untyped-def]
    """Store the number if it is within the precision. Return whether it is."""
    if high > over_high or (high == over_high and low >= over_low):
        return False
    if negative:
        low = np.uint64(0) - low
        high = ~high + np.uint64(1 if low == np.uint64(0) else 0)
    words[2 * i] = low
    words[2 * i + 1] = high
    return True


@compiled
def _parse(data, offsets, present, scale, over_high, over_low, words):  # type: ignore[no-untyped-def]
    for i in range(len(present)):
        words[2 * i] = np.uint64(0)
        words[2 * i + 1] = np.uint64(0)
        if not present[i]:
            continue
        at, end = offsets[i], offsets[i + 1]
        negative = at < end and data[at] == 45
        if negative:
            at += 1
        if at == end:
            return i, _MALFORMED
        if data[at] == 78 or data[at] == 73:  # NaN, Infinity
            return i, _NOT_FINITE
        point = end - scale - 1 if scale else end
        if point - at < 1 or point - at > 39:
            return i, _SCALE
        if data[at] == 48 and point - at > 1:
            return i, _MALFORMED
        if scale and data[point] != 46:
            return i, _SCALE
        high, low, carry = np.uint64(0), np.uint64(0), np.uint64(0)
        chunk, width = np.uint64(0), 0
        small = end - at <= 19
        for k in range(at, end):
            if k == point:
                continue
            digit = np.uint64(data[k]) - np.uint64(48)  # Bytes below "0" wrap to far above 9.
            if digit > np.uint64(9):
                return i, _SCALE if data[k] == 46 else _MALFORMED
            chunk = chunk * np.uint64(10) + digit
            width += 1
            if width == 9 and not small:
                high, low, carry = _times(high, low, _TENS[9], chunk)
                if carry:
                    return i, _SCALE
                chunk, width = np.uint64(0), 0
        if small:
            low = chunk
        elif width:
            high, low, carry = _times(high, low, _TENS[width], chunk)
            if carry:
                return i, _SCALE
        if negative and low == 0 and high == 0:
            return i, _MALFORMED
        if not _stored(high, low, negative, over_high, over_low, words, i):
            return i, _SCALE
    return READ


@compiled
def _short(data, at):  # type: ignore[no-untyped-def]
    return (np.int64(data[at]) << 8) | np.int64(data[at + 1])


@compiled
def _receive(data, offsets, present, scale, over_high, over_low, words):  # type: ignore[no-untyped-def]
    for i in range(len(present)):
        words[2 * i] = np.uint64(0)
        words[2 * i + 1] = np.uint64(0)
        if not present[i]:
            continue
        at, end = offsets[i], offsets[i + 1]
        if end - at < 8:
            return i, _MALFORMED
        count, weight = _short(data, at), _short(data, at + 2)
        sign, told = _short(data, at + 4), _short(data, at + 6)
        if end - at != 8 + 2 * count:
            return i, _MALFORMED
        if sign & 0x8000:
            return i, _NOT_FINITE
        if told != scale:
            return i, _SCALE
        if sign != 0 and sign != 0x4000:
            return i, _MALFORMED
        if count == 0:
            continue
        if weight >= 0x8000:
            weight -= 0x10000
        high, low, carry = np.uint64(0), np.uint64(0), np.uint64(0)
        for k in range(count - 1):
            group = np.uint64(_short(data, at + 8 + 2 * k))
            high, low, carry = _times(high, low, np.uint64(10000), group)
            if group > 9999 or carry:
                return i, _SCALE
        # Scale the last base-10000 digit to units of the last decimal place of the column.
        last = np.uint64(_short(data, at + 6 + 2 * count))
        shift = 4 * (weight - count + 1) + scale
        if last > 9999 or shift < -3:
            return i, _SCALE
        if shift < 0:
            unit = _TENS[-shift]
            if last % unit:
                return i, _SCALE
            high, low, carry = _times(high, low, _TENS[4 + shift], last // unit)
        else:
            high, low, carry = _times(high, low, np.uint64(10000), last)
            while shift > 0 and not carry:
                step = min(shift, 9)
                high, low, carry = _times(high, low, _TENS[step], np.uint64(0))
                shift -= step
        if carry or not _stored(high, low, sign != 0, over_high, over_low, words, i):
            return i, _SCALE
    return READ


@compiled
def _print(words, present, scale, out, bounds):  # type: ignore[no-untyped-def]
    digits = np.empty(48, np.uint8)
    ten9 = _TENS[9]
    to = 0
    for i in range(len(present)):
        bounds[i] = to
        if not present[i]:
            continue
        low, high = words[2 * i], words[2 * i + 1]
        if high >> np.uint64(63):
            out[to] = 45
            to += 1
            low = np.uint64(0) - low
            high = ~high + np.uint64(1 if low == np.uint64(0) else 0)
        count = 0
        while high or low:
            # Nine digits at a time, from the last, by long division of four 32-bit halves.
            a = high >> _32
            b = ((a % ten9) << _32) | (high & _LOW)
            c = ((b % ten9) << _32) | (low >> _32)
            d = ((c % ten9) << _32) | (low & _LOW)
            high = ((a // ten9) << _32) | (b // ten9)
            low = ((c // ten9) << _32) | (d // ten9)
            rest = d % ten9
            for _ in range(9):
                digits[count] = 48 + rest % np.uint64(10)
                rest //= np.uint64(10)
                count += 1
        while count > scale + 1 and digits[count - 1] == 48:
            count -= 1
        while count < scale + 1:
            digits[count] = 48
            count += 1
        for k in range(count - 1, -1, -1):
            out[to] = digits[k]
            to += 1
            if k == scale and scale:
                out[to] = 46
                to += 1
    bounds[len(present)] = to
