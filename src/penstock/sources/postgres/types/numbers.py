"""Booleans, integers and floats.

The server prints a float with the fewest digits that parse to the same number, so text is
exact in both directions. NaN has many bit patterns but one text form. Penstock stores one
pattern: otherwise a row from the snapshot could differ from the same row in the stream.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data.jit import compiled
from penstock.sources.postgres.types.cells import (
    READ,
    Cells,
    Refused,
    Why,
    accept,
    numbers,
    strings,
)

__all__ = [
    "parse_bools",
    "parse_floats",
    "parse_integers",
    "parse_oids",
    "print_bools",
    "print_floats",
    "print_integers",
    "receive_bools",
    "receive_floats",
    "receive_integers",
    "receive_oids",
    "received",
]

_MALFORMED: Final = int(Why.MALFORMED)


def parse_bools(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Parse `t` and `f`."""
    return _bools(values, kind, ord("t"), ord("f"))


def receive_bools(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Decode one byte, 1 or 0."""
    return _bools(values, kind, 1, 0)


def print_bools(values: pa.Array) -> pa.Array:
    """Print `t` and `f`."""
    return pc.if_else(values, "t", "f")


def parse_integers(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Parse digits, with a minus sign below zero."""
    info = np.iinfo(kind.to_pandas_dtype())
    return _integers(values, kind, int(info.max), signed=True)


def parse_oids(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Parse the digits of an unsigned 32-bit number."""
    return _integers(values, kind, (1 << 32) - 1, signed=False)


def receive_integers(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Decode big-endian two's complement."""
    cells = Cells.of(values)
    found = received(cells, kind.bit_width // 8)
    return numbers(kind, found.astype(kind.to_pandas_dtype()), cells)


def receive_oids(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Decode four big-endian bytes as an unsigned number."""
    cells = Cells.of(values)
    return numbers(kind, received(cells, 4) & 0xFFFFFFFF, cells)


def print_integers(values: pa.Array) -> pa.Array:
    """Print decimal digits."""
    return values.cast(pa.string())


def parse_floats(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Parse digits that denote exactly one float, `NaN` or an infinity."""
    cells = Cells.of(values)
    text = strings(pa.string(), *_compact(cells))
    try:
        found = text.cast(kind)
    except pa.ArrowInvalid:
        for row in range(len(cells)):
            try:
                text[row].cast(kind)
            except pa.ArrowInvalid:
                raise Refused(row, Why.MALFORMED) from None
        raise
    floats = np.frombuffer(found.buffers()[1], kind.to_pandas_dtype(), len(found), 0)
    # A number too large for the type would be parsed as an infinity.
    for at in np.flatnonzero(np.isinf(floats) & cells.present).tolist():
        if cells[at].lstrip(b"-") != b"Infinity":
            raise Refused(at, Why.MALFORMED)
    return numbers(kind, _one_nan(floats, cells), cells)


def receive_floats(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Decode big-endian IEEE 754."""
    cells = Cells.of(values)
    width = kind.bit_width // 8
    bits = received(cells, width).astype(np.int32 if width == 4 else np.int64)
    return numbers(kind, _one_nan(bits.view(kind.to_pandas_dtype()), cells), cells)


def print_floats(values: pa.Array) -> pa.Array:
    """Print the fewest digits that identify the number, in the server's format."""
    single = pa.types.is_float32(values.type)
    digits = Cells.of(values.cast(pa.string()))
    out = np.empty(32 * len(digits), np.uint8)
    offsets = np.empty(len(digits) + 1, np.int64)
    accept(
        _laid_out(digits.data, digits.offsets, digits.present, 6 if single else 15, out, offsets)
    )
    printed = strings(pa.string(), out, offsets, digits.bitmap)
    return _off_midpoints(values, printed, single=single)


def received(cells: Cells, width: int) -> npt.NDArray[np.int64]:
    """Return signed big-endian numbers of `width` bytes; zero where null."""
    out = np.empty(len(cells), np.int64)
    accept(_receive(cells.data, cells.offsets, cells.present, width, out))
    return out


def _bools(values: pa.Array, kind: pa.DataType, true: int, false: int) -> pa.Array:
    cells = Cells.of(values)
    out = np.empty(len(cells), np.bool_)
    accept(_read_bools(cells.data, cells.offsets, cells.present, true, false, out))
    return numbers(kind, np.packbits(out, bitorder="little"), cells)


def _integers(values: pa.Array, kind: pa.DataType, highest: int, *, signed: bool) -> pa.Array:
    cells = Cells.of(values)
    out = np.empty(len(cells), np.int64)
    lowest = np.uint64(highest + 1 if signed else 0)
    accept(
        _read_integers(cells.data, cells.offsets, cells.present, np.uint64(highest), lowest, out)
    )
    return numbers(kind, out.astype(kind.to_pandas_dtype(), copy=False), cells)


def _compact(
    cells: Cells,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], pa.Buffer | None]:
    first, last = cells.offsets[0], cells.offsets[-1]
    return cells.data[first:last], cells.offsets - first, cells.bitmap


def _one_nan(floats: npt.NDArray[Any], cells: Cells) -> npt.NDArray[Any]:
    """Return the numbers with a single NaN bit pattern, and zero where null."""
    nans = np.isnan(floats)
    if not nans.any() and cells.bitmap is None:
        return floats
    kept = np.where(nans, floats.dtype.type(np.nan), floats)
    kept[~cells.present] = 0
    return kept


@compiled
def _receive(data, offsets, present, width, out):  # type: ignore[no-untyped-def]
    for i in range(len(present)):
        if not present[i]:
            out[i] = 0
            continue
        at = offsets[i]
        if offsets[i + 1] - at != width:
            return i, _MALFORMED
        value = np.int64(np.int8(data[at]))
        for k in range(at + 1, at + width):
            value = (value << 8) | np.int64(data[k])
        out[i] = value
    return READ


@compiled
def _read_bools(data, offsets, present, true, false, out):  # type: ignore[no-untyped-def]
    for i in range(len(present)):
        out[i] = False
        if not present[i]:
            continue
        at = offsets[i]
        if offsets[i + 1] - at != 1 or (data[at] != true and data[at] != false):
            return i, _MALFORMED
        out[i] = data[at] == true
    return READ


@compiled
def _read_integers(data, offsets, present, highest, lowest, out):  # type: ignore[no-untyped-def]
    """Parse integers from `-lowest` to `highest`."""
    for i in range(len(present)):
        if not present[i]:
            out[i] = 0
            continue
        at, end = offsets[i], offsets[i + 1]
        negative = at < end and data[at] == 45
        if negative:
            at += 1
        width = end - at
        if width < 1 or width > 19 or (data[at] == 48 and (width > 1 or negative)):
            return i, _MALFORMED
        value = np.uint64(0)
        for k in range(at, end):
            digit = np.uint64(data[k]) - np.uint64(48)  # Bytes below "0" wrap to far above 9.
            if digit > np.uint64(9):
                return i, _MALFORMED
            value = value * np.uint64(10) + digit
        if value > (lowest if negative else highest):
            return i, _MALFORMED
        out[i] = np.int64(np.uint64(0) - value) if negative else np.int64(value)
    return READ


@compiled
def _laid_out(data, offsets, present, fixed_below, out, bounds):  # type: ignore[no-untyped-def]
    """Format digits like Postgres: without exponent from 1e-04 to below 10 ** `fixed_below`."""
    digits = np.empty(40, np.uint8)
    to = 0
    for i in range(len(present)):
        bounds[i] = to
        if not present[i]:
            continue
        at, end = offsets[i], offsets[i + 1]
        if data[at] == 45:
            out[to] = 45
            to += 1
            at += 1
        if data[at] == 110:  # nan
            for each in (78, 97, 78):
                out[to] = each
                to += 1
            continue
        if data[at] == 105:  # inf
            for each in (73, 110, 102, 105, 110, 105, 116, 121):
                out[to] = each
                to += 1
            continue
        count, exponent, seen_point, told = 0, np.int64(0), False, np.int64(0)
        while at < end and data[at] != 101:
            if data[at] == 46:
                seen_point = True
            else:
                if count or data[at] != 48:
                    if count == 40:
                        return i, _MALFORMED
                    digits[count] = data[at]
                    count += 1
                    if not seen_point:
                        exponent += 1
                elif seen_point:
                    exponent -= 1
            at += 1
        if at < end:
            at += 1
            down = data[at] == 45
            if data[at] == 45 or data[at] == 43:
                at += 1
            while at < end:
                told = told * 10 + (np.int64(data[at]) - 48)
                at += 1
            exponent += -told if down else told
        while count and digits[count - 1] == 48:
            count -= 1
        if count == 0:
            out[to] = 48
            to += 1
            continue
        exponent -= 1  # Exponent of the first digit.
        if -4 <= exponent < fixed_below:
            if exponent < 0:
                out[to] = 48
                out[to + 1] = 46
                to += 2
                for _ in range(-exponent - 1):
                    out[to] = 48
                    to += 1
                for k in range(count):
                    out[to] = digits[k]
                    to += 1
            else:
                for k in range(max(np.int64(count), exponent + 1)):
                    if k == exponent + 1:
                        out[to] = 46
                        to += 1
                    out[to] = digits[k] if k < count else 48
                    to += 1
            continue
        for k in range(count):
            if k == 1:
                out[to] = 46
                to += 1
            out[to] = digits[k]
            to += 1
        out[to] = 101
        out[to + 1] = 45 if exponent < 0 else 43
        to += 2
        exponent = abs(exponent)
        if exponent >= 100:
            out[to] = 48 + exponent // 100
            to += 1
        out[to] = 48 + exponent // 10 % 10
        out[to + 1] = 48 + exponent % 10
        to += 2
    bounds[len(present)] = to
    return READ


def _off_midpoints(values: pa.Array, printed: pa.Array, *, single: bool) -> pa.Array:
    """Replace texts that lie exactly midway between two adjacent floats.

    The server avoids such texts, because parsing them requires rounding half to even. A
    midpoint with few digits is an integer with more bits than a float's significand. Its
    powers of five must fit into these bits, which bounds the range to search.
    """
    first, last = (2.0**24, 1e21) if single else (2.0**53, 1e42)
    suspects = pc.and_(pc.greater_equal(pc.abs(values), first), pc.less(pc.abs(values), last))
    if not pc.any(suspects).as_py():
        return printed
    texts = printed.to_pylist()
    for row in np.flatnonzero(pc.fill_null(suspects, False).to_numpy(zero_copy_only=False)):
        texts[row] = _off_midpoint(values[row].as_py(), texts[row], single=single)
    return pa.array(texts, pa.string())


def _off_midpoint(value: float, text: str, *, single: bool) -> str:
    bits = 24 if single else 53
    exact = abs(int(value))
    step = 1 << (exact.bit_length() - bits)
    upper = 2 * exact + step  # Twice the midpoints, which may be half-integers.
    lower = 2 * exact - (step // 2 if exact == step << (bits - 1) else step)
    mantissa, _, exponent = text.lstrip("-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = len(whole + fraction)
    told = int(whole + fraction) * 10 ** (int(exponent) - len(fraction))
    if 2 * told not in (lower, upper):
        return text
    while True:
        unit = 10 ** max(int(exponent) + 1 - digits, 0)
        below = exact // unit * unit
        inside = [c for c in (below, below + unit) if lower < 2 * c < upper]
        if inside:
            best = str(min(inside, key=lambda c: abs(c - exact)))
            shown = best.rstrip("0")
            shown = shown[0] + ("." + shown[1:] if len(shown) > 1 else "")
            return f"{'-' if value < 0 else ''}{shown}e+{len(best) - 1:02}"
        digits += 1
