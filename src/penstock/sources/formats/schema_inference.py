"""Inference of JSON columns from a sample; the columns are fixed from then on.

The type of a member can hold all its values in the sample:

    integers of 64 bits             bigint
    and numbers that doubles hold   double, if doubles hold the integers too
    text, booleans                  text, boolean
    anything else, or mixed         json, which keeps the text as written

A double holds a number if the nearest double is printed as that number. A member that is null in
the whole sample is also json, because its type is unknown.
"""

import json
import math
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from penstock.data.text_kernels.located_values import InvalidValue
from penstock.errors import UsageError
from penstock.sources.formats.format import chunks_of
from penstock.sources.formats.json_scanner import invalid_utf8, locate_in_python

__all__ = ["infer_columns"]

_WHOLE: Final = 1 << 53
"""Limit up to which doubles hold every integer."""

_LONGEST: Final = 400
"""Limit of digits, above which a number fits neither a double nor a bigint."""


class _Integer(str):
    __slots__ = ()


class _Number(str):
    __slots__ = ()


_DECODER: Final = json.JSONDecoder(parse_int=_Integer, parse_float=_Number)


def infer_columns(sample: pa.ChunkedArray) -> dict[str, str]:
    """Return the type name of each column of the sample, in order of first appearance.

    Records that cannot be decoded are ignored.

    Raises:
        UsageError: the sample has no objects.
    """
    kinds_by_name: dict[str, set[str]] = {}
    objects = 0
    for _, chunk in chunks_of(sample):
        bad = invalid_utf8(chunk)
        for row, value in enumerate(chunk.to_pylist()):
            if value is None or row in bad:
                continue
            try:
                locate_in_python(value, ())
            except InvalidValue:
                continue
            objects += 1
            for name, member in _DECODER.decode(value.decode()).items():
                kinds = kinds_by_name.setdefault(name, set())
                if member is not None:
                    kinds.add(_kind(member))
    if not objects:
        raise UsageError(
            "the sample of records holds no JSON object",
            hint="Name the columns, or remove columns to get one column with the document.",
        )
    return {name: _widened(kinds) for name, kinds in kinds_by_name.items()}


def _kind(member: Any) -> str:
    match member:
        case bool():
            return "boolean"
        case _Integer():
            if len(member) > 20 or not -(1 << 63) <= int(member) < 1 << 63:
                return "json"
            return "bigint" if abs(int(member)) <= _WHOLE else "large"
        case _Number():
            return "double" if _held(member) else "json"
        case str():
            return "text"
        case _:
            return "json"


def _held(number: str) -> bool:
    if len(number) > _LONGEST or math.isinf(near := float(number)):
        return False
    return Decimal(number) == Decimal(repr(near))


def _widened(kinds: set[str]) -> str:
    if kinds <= {"bigint", "large"} and kinds:
        return "bigint"
    if kinds == {"bigint", "double"}:
        return "double"
    return kinds.pop() if len(kinds) == 1 else "json"
