"""Conversion of located values to a column of the configured type, without loss or not at all.

Compiled kernels parse the usual notation. The other values are parsed one by one, with the reason
for each invalid one. Only numbers in a double column are rounded, to the nearest double.
"""

import binascii
import json
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data.text_kernels.kernels import (
    copy_texts,
    read_booleans,
    read_dates,
    read_decimals,
    read_doubles,
    read_integers,
    read_timestamps,
)
from penstock.data.text_kernels.located_values import (
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
    InvalidValue,
    LocatedValues,
)
from penstock.data.text_kernels.single_value import (
    parse_boolean,
    parse_date,
    parse_decimal,
    parse_double,
    parse_integer,
    parse_timestamp,
)
from penstock.sources.formats.column_types import Column
from penstock.sources.formats.format import shortened
from penstock.sources.formats.json_scanner import locate_values

__all__ = ["raw_text", "read_column"]

_FIELDS: Final = (PLAIN, QUOTED, DOUBLED)
_TEXTS: Final = (STRING, ESCAPED, *_FIELDS)
_NUMBERS: Final = (INTEGER, NUMBER, *_FIELDS)
_KINDS_BY_TYPE: Final = {
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
"""Kinds of values that a type accepts; all values in CSV are text."""

Reasons = dict[int, str]
Kinds = npt.NDArray[np.uint8]


def read_column(values: LocatedValues, index: int, column: Column) -> tuple[pa.Array, Reasons]:
    """Return the values of the column with this index, and the reason for each bad row."""
    kinds = values.kinds[index]
    if column.type_name == "json":
        return _read_json(values, index, column)
    is_accepted = np.zeros(256, np.bool_)
    is_accepted[[NOTHING, *_KINDS_BY_TYPE[column.type_name]]] = True
    bad = {
        row: f'column "{column.name}" is {column.type_text}, but the record has '
        f"{KIND_NAMES[int(kinds[row])]} there"
        for row in np.flatnonzero(~is_accepted[kinds]).tolist()
    }
    if bad:
        kinds = np.where(is_accepted[kinds], kinds, np.uint8(NOTHING))
    if column.type_name == "text":
        return _texts(values, index, kinds), bad
    if column.type_name == "bytes":
        return _read_bytes(_texts(values, index, kinds), column, bad)
    return _read_fixed_width(values, index, kinds, column, bad)


def raw_text(values: LocatedValues, index: int, present: npt.NDArray[np.bool_]) -> pa.Array:
    """Return the text of the values, as written."""
    return _texts(values, index, np.where(present, np.uint8(PLAIN), np.uint8(NOTHING)))


def _texts(values: LocatedValues, index: int, kinds: Kinds) -> pa.Array:
    starts, ends = values.starts[index], values.ends[index]
    present = kinds != NOTHING
    out = np.empty(int(np.sum((ends - starts)[present])), np.uint8)
    offsets = np.zeros(len(kinds) + 1, np.int32)
    copy_texts(values.data, kinds, starts, ends, out, offsets)
    buffers = [_bitmap(present), pa.py_buffer(offsets), pa.py_buffer(out[: offsets[-1]])]
    return pa.Array.from_buffers(pa.string(), len(kinds), buffers)


def _read_json(values: LocatedValues, index: int, column: Column) -> tuple[pa.Array, Reasons]:
    kinds = values.kinds[index]
    if not np.isin(kinds, _FIELDS).any():
        return raw_text(values, index, kinds != NOTHING), {}
    texts = _texts(values, index, kinds)
    documents, bad = locate_values(texts.cast(pa.binary()), None)
    is_valid = kinds != NOTHING
    is_valid[list(bad)] = False
    reasons = {row: f'column "{column.name}" is json: {reason}' for row, reason in bad.items()}
    return raw_text(documents, 0, is_valid), reasons


def _read_bytes(texts: pa.Array, column: Column, bad: Reasons) -> tuple[pa.Array, Reasons]:
    decoded: list[bytes | None] = []
    for row, text in enumerate(texts.to_pylist()):
        try:
            decoded.append(None if text is None else binascii.a2b_base64(text, strict_mode=True))
        except ValueError:
            bad[row] = f'column "{column.name}" is bytes, but its text is not base64'
            decoded.append(None)
    return pa.array(decoded, pa.binary()), bad


def _read_fixed_width(
    values: LocatedValues, index: int, kinds: Kinds, column: Column, bad: Reasons
) -> tuple[pa.Array, Reasons]:
    """Return a column of a fixed-width type."""
    located = values.data, kinds, values.starts[index], values.ends[index]
    unparsed = np.zeros(len(kinds), np.bool_)
    present = kinds != NOTHING
    out: npt.NDArray[Any]
    parse: Callable[[str], Any]
    match column.type_name:
        case "boolean":
            out, parse = np.zeros(len(kinds), np.uint8), parse_boolean
            read_booleans(*located, out, unparsed)
        case "smallint" | "int" | "bigint":
            bits = column.arrow.bit_width
            out, parse = np.zeros(len(kinds), np.int64), partial(parse_integer, bits=bits)
            read_integers(*located, bits, out, unparsed)
        case "double":
            out, parse = np.zeros(len(kinds), np.float64), parse_double
            read_doubles(*located, out, unparsed)
            _read_longer_doubles(values, index, kinds, out, unparsed)
        case "numeric":
            scale, precision = column.arrow.scale, column.arrow.precision
            out = np.zeros((len(kinds), 2), np.int64)
            parse = partial(parse_decimal, precision=precision, scale=scale)
            over = np.uint64(10 ** min(precision, 18))
            read_decimals(*located, scale, over, out, unparsed)
        case "date":
            out, parse = np.zeros(len(kinds), np.int32), parse_date
            read_dates(*located, out, unparsed)
        case _:
            zoned = column.type_name == "timestamptz"
            out, parse = np.zeros(len(kinds), np.int64), partial(parse_timestamp, zoned=zoned)
            read_timestamps(*located, zoned, out, unparsed)
    for row in np.flatnonzero(unparsed).tolist():
        text = _text_of(*values[index, row])
        try:
            out[row] = parse(text)
        except InvalidValue as invalid:
            bad[row] = (
                f'column "{column.name}" is {column.type_text}, not "{shortened(text)}"{invalid}'
            )
            present[row] = False
    if column.type_name == "boolean":
        out = np.packbits(out, bitorder="little")
    elif pa.types.is_integer(column.arrow):
        out = out.astype(column.arrow.to_pandas_dtype())
    buffers = [_bitmap(present), pa.py_buffer(np.ascontiguousarray(out))]
    return pa.Array.from_buffers(column.arrow, len(kinds), buffers), bad


def _read_longer_doubles(
    values: LocatedValues,
    index: int,
    kinds: Kinds,
    out: npt.NDArray[Any],
    unparsed: npt.NDArray[np.bool_],
) -> None:
    """Parse all remaining values at once; if one is invalid, change nothing."""
    rows = np.flatnonzero(unparsed)
    if not len(rows):
        return
    texts = _texts(values, index, np.where(unparsed, kinds, np.uint8(NOTHING)))
    try:
        numbers = pc.cast(texts.drop_null(), pa.float64()).to_numpy()
    except pa.ArrowInvalid:
        return
    if np.isfinite(numbers).all():
        out[rows] = numbers
        unparsed[:] = False


def _bitmap(present: npt.NDArray[np.bool_]) -> pa.Buffer | None:
    return None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))


def _text_of(kind: int, written: bytes) -> str:
    """Return the text of a value without quotes and escapes."""
    if kind in (STRING, ESCAPED):
        text: str = json.loads(written)
        return text
    if kind in (QUOTED, DOUBLED):
        written = written[1:-1].replace(b'""', b'"')
    return written.decode()
