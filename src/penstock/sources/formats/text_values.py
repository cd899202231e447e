"""Conversion of cells to values of a column's type, without loss or not at all.

Compiled code parses the usual notation. This module parses the other cells one by one, and returns
the reason for each invalid one. Both give the same value where both give one. Only numbers in a
double column are rounded, to the nearest double.
"""

import binascii
import json
import math
import re
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.sources.formats.column_types import Column
from penstock.sources.formats.format import shortened
from penstock.sources.formats.json_scanner import find
from penstock.sources.formats.text_kernels import (
    copy_texts,
    read_booleans,
    read_dates,
    read_decimals,
    read_doubles,
    read_integers,
    read_timestamps,
)
from penstock.sources.formats.values import (
    DOUBLED,
    ESCAPED,
    FALSE,
    INTEGER,
    KIND_NAMES,
    NOTHING,
    NUMBER,
    PLAIN,
    QUOTED,
    STRING,
    TRUE,
    Cells,
    Unfit,
)

__all__ = ["raw_text", "read_column"]

_FIELDS: Final = (PLAIN, QUOTED, DOUBLED)
_TEXTS: Final = (STRING, ESCAPED, *_FIELDS)
_NUMBERS: Final = (INTEGER, NUMBER, *_FIELDS)
_TAKES: Final = {
    "boolean": (TRUE, FALSE, *_FIELDS),
    "smallint": _NUMBERS,
    "int": _NUMBERS,
    "bigint": _NUMBERS,
    "double": _NUMBERS,
    # Decimals in JSON are often written as text, because many readers would round them.
    "numeric": (*_NUMBERS, STRING, ESCAPED),
    "text": _TEXTS,
    "bytes": _TEXTS,
    "date": _TEXTS,
    "timestamp": _TEXTS,
    "timestamptz": _TEXTS,
}
"""Kinds of cells that hold values of a type; all values in CSV are text."""

_LONGEST: Final = 9
"""Limit of the digits of an exponent; a longer one exceeds every column type."""

_WORD: Final = (1 << 64) - 1
_DAY: Final = 86_400_000_000
_EPOCH: Final = date(1970, 1, 1).toordinal()
_NUMBER: Final = re.compile(r"([+-]?)(?=\.?[0-9])([0-9]*)(?:\.([0-9]*))?(?:[eE]([+-]?)([0-9]+))?")
_DATE: Final = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")
_MOMENT: Final = re.compile(
    _DATE.pattern + r"[Tt ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,]([0-9]+))?)?"
    r"(?:([Zz])|([+-])([0-9]{2})(?::?([0-9]{2}))?)?"
)
_NO_NUMBERS: Final = ("NaN", "Infinity", "-Infinity")

Reasons = dict[int, str]
Kinds = npt.NDArray[np.uint8]


def read_column(cells: Cells, at: int, column: Column) -> tuple[pa.Array, Reasons]:
    """Return the values of the column with index `at`, and the reason for each bad row."""
    kinds = cells.kinds[at]
    if column.word == "json":
        return _read_json(cells, at, column)
    fits = np.zeros(256, np.bool_)
    fits[[NOTHING, *_TAKES[column.word]]] = True
    bad = {
        row: f'column "{column.name}" is {column.said}, but the record has '
        f"{KIND_NAMES[int(kinds[row])]} there"
        for row in np.flatnonzero(~fits[kinds]).tolist()
    }
    if bad:
        kinds = np.where(fits[kinds], kinds, np.uint8(NOTHING))
    if column.word == "text":
        return _texts(cells, at, kinds), bad
    if column.word == "bytes":
        return _read_bytes(_texts(cells, at, kinds), column, bad)
    return _read_fixed(cells, at, kinds, column, bad)


def raw_text(cells: Cells, at: int, present: npt.NDArray[np.bool_]) -> pa.Array:
    """Return the text of the cells, as written."""
    return _texts(cells, at, np.where(present, np.uint8(PLAIN), np.uint8(NOTHING)))


def _texts(cells: Cells, at: int, kinds: Kinds) -> pa.Array:
    starts, ends = cells.starts[at], cells.ends[at]
    there = kinds != NOTHING
    out = np.empty(int(np.sum((ends - starts)[there])), np.uint8)
    offsets = np.zeros(len(kinds) + 1, np.int32)
    copy_texts(cells.data, kinds, starts, ends, out, offsets)
    buffers = [_bitmap(there), pa.py_buffer(offsets), pa.py_buffer(out[: offsets[-1]])]
    return pa.Array.from_buffers(pa.string(), len(kinds), buffers)


def _read_json(cells: Cells, at: int, column: Column) -> tuple[pa.Array, Reasons]:
    kinds = cells.kinds[at]
    if not np.isin(kinds, _FIELDS).any():
        return raw_text(cells, at, kinds != NOTHING), {}
    texts = _texts(cells, at, kinds)
    found, bad = find(texts.cast(pa.binary()), None)
    good = kinds != NOTHING
    good[list(bad)] = False
    reasons = {row: f'column "{column.name}" is json: {reason}' for row, reason in bad.items()}
    return raw_text(found, 0, good), reasons


def _read_bytes(texts: pa.Array, column: Column, bad: Reasons) -> tuple[pa.Array, Reasons]:
    found: list[bytes | None] = []
    for row, text in enumerate(texts.to_pylist()):
        try:
            found.append(None if text is None else binascii.a2b_base64(text, strict_mode=True))
        except ValueError:
            bad[row] = f'column "{column.name}" is bytes, but its text is not base64'
            found.append(None)
    return pa.array(found, pa.binary()), bad


def _read_fixed(
    cells: Cells, at: int, kinds: Kinds, column: Column, bad: Reasons
) -> tuple[pa.Array, Reasons]:
    """Return a column of a fixed-width type."""
    starts, ends, data = cells.starts[at], cells.ends[at], cells.data
    left = np.zeros(len(kinds), np.bool_)
    there = kinds != NOTHING
    out: npt.NDArray[Any]
    one: Callable[[str], Any]
    match column.word:
        case "boolean":
            out, one = np.zeros(len(kinds), np.uint8), _boolean
            read_booleans(data, kinds, starts, ends, out, left)
        case "smallint" | "int" | "bigint":
            bits = column.arrow.bit_width
            out, one = np.zeros(len(kinds), np.int64), partial(_integer, bits=bits)
            read_integers(data, kinds, starts, ends, bits, out, left)
        case "double":
            out, one = np.zeros(len(kinds), np.float64), _double
            read_doubles(data, kinds, starts, ends, out, left)
            _read_longer_doubles(cells, at, kinds, out, left)
        case "numeric":
            scale, precision = column.arrow.scale, column.arrow.precision
            out = np.zeros((len(kinds), 2), np.int64)
            one = partial(_decimal, precision=precision, scale=scale)
            over = np.uint64(10 ** min(precision, 18))
            read_decimals(data, kinds, starts, ends, scale, over, out, left)
        case "date":
            out, one = np.zeros(len(kinds), np.int32), _date
            read_dates(data, kinds, starts, ends, out, left)
        case _:
            zoned = column.word == "timestamptz"
            out, one = np.zeros(len(kinds), np.int64), partial(_moment, zoned=zoned)
            read_timestamps(data, kinds, starts, ends, zoned, out, left)
    for row in np.flatnonzero(left).tolist():
        text = _said(*cells[at, row])
        try:
            out[row] = one(text)
        except Unfit as unfit:
            bad[row] = f'column "{column.name}" is {column.said}, not "{shortened(text)}"{unfit}'
            there[row] = False
    if column.word == "boolean":
        out = np.packbits(out, bitorder="little")
    elif pa.types.is_integer(column.arrow):
        out = out.astype(column.arrow.to_pandas_dtype())
    buffers = [_bitmap(there), pa.py_buffer(np.ascontiguousarray(out))]
    return pa.Array.from_buffers(column.arrow, len(kinds), buffers), bad


def _read_longer_doubles(
    cells: Cells, at: int, kinds: Kinds, out: npt.NDArray[Any], left: npt.NDArray[np.bool_]
) -> None:
    """Parse all remaining cells at once; if one is invalid, change nothing."""
    rows = np.flatnonzero(left)
    if not len(rows):
        return
    texts = _texts(cells, at, np.where(left, kinds, np.uint8(NOTHING)))
    try:
        found = pc.cast(texts.drop_null(), pa.float64()).to_numpy()
    except pa.ArrowInvalid:
        return
    if np.isfinite(found).all():
        out[rows] = found
        left[:] = False


def _bitmap(there: npt.NDArray[np.bool_]) -> pa.Buffer | None:
    return None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))


def _said(kind: int, written: bytes) -> str:
    """Return the text of a cell without quotes and escapes."""
    if kind in (STRING, ESCAPED):
        said: str = json.loads(written)
        return said
    if kind in (QUOTED, DOUBLED):
        written = written[1:-1].replace(b'""', b'"')
    return written.decode()


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "t", "false", "f"):
        raise Unfit
    return text[0] in "tT"


def _integer(text: str, *, bits: int) -> int:
    number = _whole(text, 0, "it has digits after the point")
    if not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise Unfit(": it is too large")
    return number


def _decimal(text: str, *, precision: int, scale: int) -> tuple[int, int]:
    number = _whole(text, scale, f"it has more than {scale} digits after the point")
    if abs(number) >= 10**precision:
        raise Unfit(": it is too large")
    low, high = number & _WORD, number >> 64
    return low - (1 << 64) if low >> 63 else low, high


def _whole(text: str, scale: int, otherwise: str) -> int:
    """Return the number times ten to `scale`, if that is an integer of at most 40 digits."""
    parts = _NUMBER.fullmatch(text)
    if parts is None:
        raise Unfit
    sign, before, after, below, power = parts.groups(default="")
    digits = (before + after).lstrip("0")
    kept = digits.rstrip("0")
    if not kept:
        return 0
    exponent = 10**_LONGEST if len(power.lstrip("0")) > _LONGEST else int(power or "0")
    shift = (-exponent if below == "-" else exponent) - len(after) + len(digits) - len(kept) + scale
    if shift < 0:
        raise Unfit(f": {otherwise}")
    if len(kept) + shift > 40:
        raise Unfit(": it is too large")
    number: int = int(sign + kept) * 10**shift
    return number


def _double(text: str) -> float:
    if text not in _NO_NUMBERS and not _NUMBER.fullmatch(text):
        raise Unfit
    number = float(text)
    if math.isinf(number) and text not in _NO_NUMBERS:
        raise Unfit(": it is too large")
    return number


def _date(text: str) -> int:
    parts = _DATE.fullmatch(text)
    if parts is None:
        raise Unfit
    return _day(*parts.groups())


def _day(year: str, month: str, day: str) -> int:
    try:
        return date(int(year), int(month), int(day)).toordinal() - _EPOCH
    except ValueError:
        raise Unfit(": there is no such day") from None


def _moment(text: str, *, zoned: bool) -> int:
    parts = _MOMENT.fullmatch(text)
    if parts is None:
        raise Unfit
    year, month, day, hours, minutes, seconds, after, utc, sign, zone_hours, zone_minutes = (
        parts.groups(default="")
    )
    if bool(utc or sign) != zoned:
        raise Unfit(": it says no zone" if zoned else ": it says a zone, so make it timestamptz")
    fraction = after.rstrip("0")
    if len(fraction) > 6:
        raise Unfit(": it is finer than a microsecond")
    hour, minute, second = int(hours), int(minutes), int(seconds or "0")
    ahead_hours, ahead_minutes = int(zone_hours or "0"), int(zone_minutes or "0")
    if max(hour, ahead_hours) > 23 or max(minute, ahead_minutes, second) > 59:
        raise Unfit(": there is no such time")
    ahead = 60 * ahead_hours + ahead_minutes
    minute += 60 * hour - (-ahead if sign == "-" else ahead)
    micros = (60 * minute + second) * 1_000_000 + int(fraction.ljust(6, "0"))
    return _day(year, month, day) * _DAY + micros
