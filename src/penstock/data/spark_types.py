"""What Spark shows of our columns, since it has fewer types than Arrow.

Every stored type has one Spark type that tells all its values apart, so that
rows that differ here differ there:

    unsigned integers      the next larger signed one; uint64 is decimal(20, 0)
    float16                float
    time                   bigint, in its own unit since midnight
    timestamp[ns]          bigint, nanoseconds since the epoch
    duration               bigint, in its own unit
    decimal beyond 38      text
    null                   int, always null

Spark's own Parquet reader gives most of these by itself; the others have to
be read by us (see `is_native`).
"""

from collections.abc import Callable

import pyarrow as pa

__all__ = ["is_native", "to_spark", "to_spark_schema", "to_spark_type"]


def to_spark_schema(schema: pa.Schema) -> pa.Schema:
    """`schema` in types that Spark has."""
    return pa.schema([pa.field(f.name, to_spark_type(f.type), f.nullable) for f in schema])


def to_spark(rows: pa.Table) -> pa.Table:
    """`rows` in types that Spark has."""
    # Arrow knows no way from time32 to int64 but by int32.
    halfway = [pa.field(f.name, _leaves(f.type, _halfway), f.nullable) for f in rows.schema]
    return rows.cast(pa.schema(halfway)).cast(to_spark_schema(rows.schema))


def to_spark_type(kind: pa.DataType) -> pa.DataType:
    """The type under which Spark shows values of `kind`."""
    return _leaves(kind, _leaf)


def is_native(schema: pa.Schema) -> bool:
    """Whether Spark's own Parquet reader shows these columns so."""
    return all(_native(field.type) for field in schema)


def _leaves(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """`kind`, with each type in it that holds no other made another by `leaf`."""
    if pa.types.is_struct(kind):
        return pa.struct([(inner.name, _leaves(inner.type, leaf)) for inner in kind])
    if pa.types.is_map(kind):
        return pa.map_(_leaves(kind.key_type, leaf), _leaves(kind.item_type, leaf))
    if pa.types.is_nested(kind):
        return pa.list_(_leaves(kind.value_type, leaf))
    return leaf(kind)


def _halfway(kind: pa.DataType) -> pa.DataType:
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
