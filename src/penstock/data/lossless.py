"""Python values as Arrow columns: exact, or rejected.

Arrow truncates 1.5 to 1 in a column of integers, turns 1e300 into infinity in a column of 32-bit
floats, and drops microseconds that the unit of a column does not have. The caller would not
notice, and a retraction of the original value would not cancel the stored one. Here such a value
is an error.
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
    """Return a column of `field` with exactly these values. Errors name `what`.

    Raises:
        UsageError: a value does not fit the type, or is null in a column that is not null.
    """
    try:
        array = pa.array(values, field.type)
        stored = array.cast(with_integer_times(field.type)).to_pylist()
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"{what} does not fit {field.type}", detail=str(error), hint="Convert the value first."
        ) from error
    if isinstance(array, pa.ChunkedArray):
        raise UsageError(f"{what} is too large", hint="Write fewer rows at once.")
    plain = not pa.types.is_nested(field.type) and list(map(type, values)) == list(
        map(type, stored)
    )
    for value, result in zip(values, stored, strict=True) if not plain or values != stored else ():
        if not _same(value, result, field.type):
            raise UsageError(
                f"{what} does not fit {field.type} exactly",
                detail=f"A value of type {type(value).__name__} would be stored as {result!r:.80}.",
                hint="Convert the value first.",
            )
    if contains_forbidden_nulls(array, field):
        raise UsageError(f"{what} holds a null", detail="The column is declared not null.")
    return array


def contains_forbidden_nulls(column: pa.Array | pa.ChunkedArray, field: pa.Field) -> bool:
    """Return whether a column has nulls where `field`, or a field in it, is declared not null."""
    if not field.nullable and column.null_count:
        return True
    if not _declares_not_null(field.type):
        return False
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    inner = [field.type.field(i) for i in range(field.type.num_fields)]
    for chunk in chunks:
        values = chunk.drop_null()
        if pa.types.is_map(field.type):
            values = values.cast(pa.list_(inner[0]))
        values = values.flatten()
        parts = values if pa.types.is_struct(field.type) else [values]
        if any(contains_forbidden_nulls(p, f) for p, f in zip(parts, inner, strict=True)):
            return True
    return False


def _declares_not_null(kind: pa.DataType) -> bool:
    inner = [kind.field(i) for i in range(kind.num_fields)]
    return any(not field.nullable or _declares_not_null(field.type) for field in inner)


def _same(value: Any, stored: Any, kind: pa.DataType) -> bool:
    """Return whether `stored`, with integers for temporal values, equals `value`."""
    if value is None or stored is None:
        return value is stored
    if pa.types.is_temporal(kind):
        return bool(_nanoseconds(value, kind) == stored * _unit(kind))
    if pa.types.is_struct(kind):
        named = dict(value)
        return set(named) <= set(stored) and all(
            _same(named.get(inner.name), stored[inner.name], inner.type) for inner in kind
        )
    if pa.types.is_map(kind):
        pairs = list(value.items() if isinstance(value, dict) else value)
        return len(pairs) == len(stored) and all(
            _same(k, stored_k, kind.key_type) and _same(v, stored_v, kind.item_type)
            for (k, v), (stored_k, stored_v) in zip(pairs, stored, strict=True)
        )
    if pa.types.is_nested(kind):
        items = list(value)
        return len(items) == len(stored) and all(
            _same(item, stored_item, kind.value_type)
            for item, stored_item in zip(items, stored, strict=True)
        )
    if isinstance(value, bool) or isinstance(stored, bool):
        return type(value) is type(stored) and value == stored
    if isinstance(value, float) and pa.types.is_floating(kind) and math.isfinite(value):
        return math.isfinite(stored)  # Rounded to the precision of the column, as usual for floats.
    if isinstance(value, float):
        return isinstance(stored, float) and (
            value == stored if not math.isnan(value) else math.isnan(stored)
        )
    return bool(value == stored)


def _nanoseconds(value: Any, kind: pa.DataType) -> int | None:
    """Return the distance of a temporal value from zero; None, if it is not of this kind."""
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
