"""Arrow types as Spark types.

Spark has fewer types than Arrow. Every stored type maps to one Spark type that distinguishes all
its values, so rows that differ in a collection differ in Spark:

    unsigned integers      the next larger signed one; uint64 is decimal(20, 0)
    float16                float
    time                   bigint, in its own unit since midnight
    timestamp[ns]          bigint, nanoseconds since the epoch
    duration               bigint, in its own unit
    decimal beyond 38      text
    null                   int, always null

Spark's Parquet reader returns most of these types itself. Python tasks read columns of the other
types (see `is_native`).
"""

from collections.abc import Callable

import pyarrow as pa

__all__ = ["is_native", "to_spark", "to_spark_schema", "to_spark_type"]


def to_spark_schema(schema: pa.Schema) -> pa.Schema:
    """Return `schema` with Spark types."""
    return pa.schema([pa.field(f.name, to_spark_type(f.type), f.nullable) for f in schema])


def to_spark(rows: pa.Table) -> pa.Table:
    """Return `rows` with Spark types."""
    # Arrow casts time32 to int64 only through int32.
    intermediate = [
        pa.field(f.name, _leaves(f.type, _time32_as_int32), f.nullable) for f in rows.schema
    ]
    return rows.cast(pa.schema(intermediate)).cast(to_spark_schema(rows.schema))


def to_spark_type(kind: pa.DataType) -> pa.DataType:
    """Return the Spark type of values of `kind`, as an Arrow type."""
    return _leaves(kind, _leaf)


def is_native(schema: pa.Schema) -> bool:
    """Return whether Spark's Parquet reader returns these columns with their Spark types."""
    return all(_native(field.type) for field in schema)


def _leaves(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([(inner.name, _leaves(inner.type, leaf)) for inner in kind])
    if pa.types.is_map(kind):
        return pa.map_(_leaves(kind.key_type, leaf), _leaves(kind.item_type, leaf))
    if pa.types.is_nested(kind):
        return pa.list_(_leaves(kind.value_type, leaf))
    return leaf(kind)


def _time32_as_int32(kind: pa.DataType) -> pa.DataType:
    return pa.int32() if pa.types.is_time32(kind) else kind


def _leaf(kind: pa.DataType) -> pa.DataType:
    known = _SMALL.get(kind)
    if known is not None:
        return known
    if pa.types.is_decimal(kind):
        return pa.string() if kind.precision > 38 else pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_duration(kind) or pa.types.is_time(kind):
        return pa.int64()
    if pa.types.is_timestamp(kind):
        if kind.unit == "ns":
            return pa.int64()
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    return kind


_SMALL = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.null(): pa.int32(),
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
}


def _native(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return _native(kind.key_type) and _native(kind.item_type)
    if pa.types.is_nested(kind):
        return all(_native(kind.field(i).type) for i in range(kind.num_fields))
    return not (pa.types.is_float16(kind) or (pa.types.is_decimal(kind) and kind.precision > 38))
