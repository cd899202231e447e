"""Compiled kernels that read one element of each row.

A kernel receives the bytes, a cursor for each row and the ends of the rows. It writes a mask of
the elements that are not null and their values, and advances the cursors. It returns the first
row with an element of another type, or -1. A kernel never reads beyond the end of a row. Its
caller finds out the reason for a rejected element.
"""

from math import ldexp
from typing import Final

import numpy as np

from penstock.data.jit import compiled, compiled_when_large
from penstock.data.packed.elements import DOUBLE, FALSE, NEGATIVE, NULL, POSITIVE, TRUE, ZERO

__all__ = ["read_bools", "read_doubles", "read_fixed", "read_integers", "read_strings"]

_0: Final = np.uint64(0)
_8: Final = np.uint64(8)
_TOP: Final = np.uint64(1 << 63)
_EXACT: Final = np.uint64(1 << 53)
"""Above this, a double does not represent every integer."""


@compiled_when_large
def read_fixed(data, cursor, ends, present, code, held):  # type: ignore[no-untyped-def]
    width = held.shape[1]
    for i in range(len(present)):
        at = cursor[i]
        if at >= ends[i]:
            return i
        present[i] = data[at] != NULL
        if not present[i]:
            held[i, :] = 0
            cursor[i] = at + 1
            continue
        if data[at] != code or ends[i] - at <= width:
            return i
        for k in range(width):
            held[i, k] = data[at + 1 + k]
        cursor[i] = at + 1 + width
    return -1


@compiled_when_large
def read_bools(data, cursor, ends, present, held):  # type: ignore[no-untyped-def]
    for i in range(len(present)):
        at = cursor[i]
        if at >= ends[i]:
            return i
        code = data[at]
        if code not in (NULL, FALSE, TRUE):
            return i
        present[i] = code != NULL
        held[i] = code == TRUE
        cursor[i] = at + 1
    return -1


@compiled_when_large
def read_strings(data, cursor, ends, present, code, held, offsets):  # type: ignore[no-untyped-def]
    to = 0
    for i in range(len(present)):
        at, end = cursor[i], ends[i]
        offsets[i] = to
        if at >= end:
            return i
        present[i] = data[at] != NULL
        if present[i]:
            if data[at] != code:
                return i
            at += 1
            while at < end:
                if data[at] == 0:
                    if at + 1 == end or data[at + 1] != 0xFF:
                        break
                    held[to] = 0
                    at += 2
                else:
                    held[to] = data[at]
                    at += 1
                to += 1
            if at >= end:
                return i
        cursor[i] = at + 1
    offsets[len(present)] = to
    return -1


@compiled_when_large
def _integer_at(data, at, end):  # type: ignore[no-untyped-def]
    """Return start and end of the bytes of an integer, and the mask that inverts them.

    The start is after leading zeros. A start of -1 means that the element is not an integer.
    """
    code = data[at]
    flip = np.uint8(0xFF if code < ZERO else 0)
    if code < NEGATIVE or code > POSITIVE:
        return -1, 0, flip
    if code in (NEGATIVE, POSITIVE):
        if end - at < 2:
            return -1, 0, flip
        size = np.int64(data[at + 1] ^ flip)
        start = at + 2
    else:
        size = np.int64(ZERO - code if code < ZERO else code - ZERO)
        start = at + 1
    if end - start < size:
        return -1, 0, flip
    end = start + size
    while start < end and data[start] == flip:
        start += 1
    return start, end, flip


@compiled_when_large
def read_integers(  # type: ignore[no-untyped-def]
    data, cursor, ends, present, least_high, least_low, most_high, most_low, words
):
    for i in range(len(present)):
        at = cursor[i]
        if at >= ends[i]:
            return i
        present[i] = data[at] != NULL
        if not present[i]:
            words[i, 0] = words[i, 1] = _0
            cursor[i] = at + 1
            continue
        start, end, flip = _integer_at(data, at, ends[i])
        if start < 0 or end - start > 16:
            return i
        high, low = _0, _0
        for k in range(start, end):
            if end - k > 8:
                high = (high << _8) | np.uint64(data[k] ^ flip)
            else:
                low = (low << _8) | np.uint64(data[k] ^ flip)
        bound_high = least_high if flip else most_high
        bound_low = least_low if flip else most_low
        if high > bound_high or (high == bound_high and low > bound_low):
            return i
        if flip:
            low = _0 - low
            high = ~high + np.uint64(low == _0)
        words[i, 0] = low
        words[i, 1] = high
        cursor[i] = end
    return -1


@compiled
def read_doubles(data, cursor, ends, present, bits, floats):  # type: ignore[no-untyped-def]
    for i in range(len(present)):
        at = cursor[i]
        if at >= ends[i]:
            return i
        present[i] = data[at] != NULL
        if not present[i]:
            bits[i] = _0
            cursor[i] = at + 1
            continue
        word = _0
        if data[at] == DOUBLE:
            if ends[i] - at < 9:
                return i
            for k in range(at + 1, at + 9):
                word = (word << _8) | np.uint64(data[k])
            bits[i] = word ^ _TOP if word & _TOP else ~word
            cursor[i] = at + 9
            continue
        start, end, flip = _integer_at(data, at, ends[i])
        if start < 0:
            return i
        # The first of eight bytes is not zero, so they fill the mantissa. The other bytes must
        # be zero.
        for k in range(start, min(end, start + 8)):
            word = (word << _8) | np.uint64(data[k] ^ flip)
        for k in range(start + 8, end):
            if data[k] != flip:
                return i
        if word and word // (word & (_0 - word)) >= _EXACT:
            return i
        value = ldexp(float(word), 8 * max(end - start - 8, 0))
        if value == np.inf:
            return i
        floats[i] = -value if flip and word else value
        cursor[i] = end
    return -1
