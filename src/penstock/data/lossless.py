"""Python values as Arrow columns, exactly or not at all.

Arrow cuts 1.5 down to 1 for a column of integers, makes 1e300 infinite for
one of 32-bit floats and drops the microseconds that a column has no room for.
Whoever wrote them would never learn it, and a retraction of what was meant
would not meet what is stored. Here that is an error.
"""

import math
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final

import pyarrow as pa

from penstock.data.arrow import with_integer_times
from penstock.errors import UsageError

__all__ = ["contains_forbidden_nulls", "exact_array"]

_UNITS: Final = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_MICROSECOND: Final = timedelta(microseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def exact_array(values: list[Any], field: pa.Field, *, what: str) -> pa.Array:
    """A column of `field` that holds just these values.

    Raises:
        UsageError: one of them does not fit, and would be changed.
    """
    try:
        array = pa.array(values, field.type)
        stored = array.cast(with_integer_times(field.type)).to_pylist()
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"{what} does not fit {field.type}", detail=str(error), hint="Convert it first."
        ) from error
    if isinstance(array, pa.ChunkedArray):
        raise UsageError(f"{what} is too large", hint="Write fewer rows at once.")
    plain = not pa.types.is_nested(field.type) and list(map(type, values)) == list(
        map(type, stored)
    )
    for value, kept in zip(values, stored, strict=True) if not plain or values != stored else ():
        if not _same(value, kept, field.type):
            raise UsageError(
                f"{what} does not fit {field.type} exactly",
                detail=f"A value of type {type(value).__name__} would be stored as {kept!r:.80}.",
                hint="Convert it first.",
            )
    if contains_forbidden_nulls(array, field):
        raise UsageError(f"{what} holds a null", hint="It was declared not null.")
    return array


def contains_forbidden_nulls(column: pa.Array | pa.ChunkedArray, field: pa.Field) -> bool:
    """Whether there are nulls where `field`, or a field inside it, was declared not null."""
    if not field.nullable and column.null_count:
        return True
    if not _declares(field.type):
        return False
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    inner = [field.type.field(i) for i in range(field.type.num_fields)]
    for chunk in chunks:
        there = chunk.drop_null()
        if pa.types.is_map(field.type):
            there = there.cast(pa.list_(inner[0]))
        there = there.flatten()
        parts = there if pa.types.is_struct(field.type) else [there]
        if any(contains_forbidden_nulls(p, f) for p, f in zip(parts, inner, strict=True)):
            return True
    return False


def _declares(kind: pa.DataType) -> bool:
    """Whether anything inside `kind` was declared not null."""
    inner = [kind.field(i) for i in range(kind.num_fields)]
    return any(not each.nullable or _declares(each.type) for each in inner)


def _same(value: Any, kept: Any, kind: pa.DataType) -> bool:
    """Whether `kept`, times in it as integers, is `value`."""
    if value is None or kept is None:
        return value is kept
    if pa.types.is_temporal(kind):
        return bool(_nanoseconds(value, kind) == kept * _unit(kind))
    if pa.types.is_struct(kind):
        named = dict(value)
        return set(named) <= set(kept) and all(
            _same(named.get(inner.name), kept[inner.name], inner.type) for inner in kind
        )
    if pa.types.is_map(kind):
        pairs = list(value.items() if isinstance(value, dict) else value)
        return len(pairs) == len(kept) and all(
            _same(k, kept_k, kind.key_type) and _same(v, kept_v, kind.item_type)
            for (k, v), (kept_k, kept_v) in zip(pairs, kept, strict=True)
        )
    if pa.types.is_nested(kind):
        items = list(value)
        return len(items) == len(kept) and all(
            _same(item, each, kind.value_type) for item, each in zip(items, kept, strict=True)
        )
    if isinstance(value, bool) or isinstance(kept, bool):
        return type(value) is type(kept) and value == kept
    if isinstance(value, float) and pa.types.is_floating(kind) and math.isfinite(value):
        return math.isfinite(kept)  # Rounded to the column's precision, as floats are.
    if isinstance(value, float):
        return isinstance(kept, float) and (
            value == kept if not math.isnan(value) else math.isnan(kept)
        )
    return bool(value == kept)


def _nanoseconds(value: Any, kind: pa.DataType) -> int | None:
    """How far `value` is from zero as `kind` counts, if it is a value of that kind."""
    match value:
        case bool():
            return None
        case int():
            return value * _unit(kind)
        case datetime() if pa.types.is_timestamp(kind):
            if (value.tzinfo is None) != (kind.tz is None):
                return None
            epoch = _EPOCH if kind.tz is not None else _EPOCH.replace(tzinfo=None)
            return (value - epoch) // _MICROSECOND * 1000 + getattr(value, "nanosecond", 0)
        case datetime():
            return None
        case date() if pa.types.is_date(kind):
            return (value - _EPOCH.date()).days * _unit(kind)
        case time() if pa.types.is_time(kind) and value.tzinfo is None:
            since_midnight = datetime.combine(_EPOCH, value) - _EPOCH.replace(tzinfo=None)
            return since_midnight // _MICROSECOND * 1000
        case timedelta() if pa.types.is_duration(kind):
            return value // _MICROSECOND * 1000 + getattr(value, "nanoseconds", 0) % 1000
        case _:
            return None


def _unit(kind: pa.DataType) -> int:
    return 86_400 * 10**9 if pa.types.is_date32(kind) else _UNITS[getattr(kind, "unit", "ms")]
