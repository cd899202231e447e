"""Schema evolution gives every old row exactly one form; stored values are exact."""

import io
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import (
    check_row_schema,
    conform,
    consolidate,
    evolve,
    from_ipc,
    sort_rows,
    stored_schema,
    to_ipc,
)
from penstock.data.schema import default_row
from penstock.errors import UsageError

OLD = pa.schema([("k", pa.string()), ("n", pa.int16())])

WIDENINGS = [
    (pa.int8(), pa.int64(), [-128, 127]),
    (pa.int16(), pa.int32(), [-(2**15)]),
    (pa.uint8(), pa.uint64(), [255]),
    (pa.uint8(), pa.int16(), [255]),
    (pa.uint16(), pa.int32(), [2**16 - 1]),
    (pa.uint32(), pa.int64(), [2**32 - 1]),
    (pa.float32(), pa.float64(), [-0.0, 1.5, float("inf")]),
    (pa.string(), pa.large_string(), ["ä"]),
    (pa.binary(), pa.large_binary(), [b"\0"]),
    (pa.decimal128(5, 2), pa.decimal128(9, 4), [Decimal("123.45")]),
]


@pytest.mark.parametrize(("old", "new", "values"), WIDENINGS, ids=str)
def test_widened_type_holds_every_old_value(old, new, values):
    before, after = pa.schema([("c", old)]), pa.schema([("c", new)])
    evolve(before, after, {}, collection="x")
    with pytest.raises(UsageError, match="cannot change from"):
        evolve(after, before, {}, collection="x")
    rows = pa.table([pa.array([*values, None], old)], schema=before)
    wide = conform(rows, after, {})
    assert wide.schema == after
    assert repr(wide.to_pylist()) == repr(
        [{"c": v if v is None else pa.scalar(v, old).cast(new).as_py()} for v in [*values, None]]
    )
    assert repr(conform(wide, before, {}).to_pylist()) == repr(rows.to_pylist())


@pytest.mark.parametrize(
    ("new", "defaults", "message"),
    [
        (pa.schema([("k", pa.string())]), {}, "cannot drop, rename or reorder"),
        (pa.schema([("n", pa.int16()), ("k", pa.string())]), {}, "cannot drop, rename or reorder"),
        (pa.schema([("k", pa.string()), ("n", pa.int8())]), {}, "cannot change from int16 to int8"),
        (pa.schema([("k", pa.string()), ("n", pa.float64())]), {}, "cannot change from int16"),
        (
            pa.schema([("k", pa.string()), pa.field("n", pa.int16(), nullable=False)]),
            {},
            "cannot become not null",
        ),
        (OLD.append(pa.field("m", pa.int8(), nullable=False)), {}, "no value for older rows"),
        (
            OLD.append(pa.field("m", pa.int8(), nullable=False)),
            {"m": None},
            "no value for older rows",
        ),
        (OLD, {"n": 3}, "is not a new column"),
    ],
)
def test_evolve_with_ambiguous_change_raises_usage_error(new, defaults, message):
    with pytest.raises(UsageError, match=message):
        evolve(OLD, new, defaults, collection="x")


@given(st.lists(st.tuples(st.text("ab", max_size=2), st.integers(-9, 9)), max_size=5))
def test_conform_through_any_version_is_equal(rows):
    # Through the versions between, and directly.
    middle = OLD.append(pa.field("a", pa.string()))
    wide = pa.schema([("k", pa.string()), ("n", pa.int64()), ("a", pa.string())])
    newest = wide.append(pa.field("b", pa.int64(), nullable=False))
    defaults = {"b": pa.scalar(7, pa.int64())}
    old = pa.Table.from_pylist([{"k": k, "n": n} for k, n in rows], schema=OLD)
    straight = conform(old, newest, defaults)
    assert conform(conform(old, middle, defaults), newest, defaults).equals(straight)
    assert straight.to_pylist() == [{"k": k, "n": n, "a": None, "b": 7} for k, n in rows]
    assert conform(straight, OLD, defaults).equals(old)


def test_default_row_has_only_columns_with_defaults():
    schema = OLD.append(pa.field("b", pa.int64()))
    assert default_row(schema, {"b": 7}).to_pylist() == [{"b": 7}]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int8(), 128),
        (pa.int64(), 1.5),
        (pa.int64(), "7"),
        (pa.float32(), 1e300),
        (pa.list_(pa.field("item", pa.int8(), nullable=False)), [None]),
    ],
    ids=str,
)
def test_default_row_with_unfit_value_raises_usage_error(kind, value):
    with pytest.raises(UsageError, match='the default of column "b"'):
        default_row(pa.schema([("b", kind)]), {"b": value})


@pytest.mark.parametrize(
    ("schema", "key", "message"),
    [
        (pa.schema([("a", pa.int8()), ("a", pa.int8())]), [], "names a column twice"),
        (pa.schema([("mz_diff", pa.int8())]), [], 'has a column "mz_diff"'),
        (pa.schema([("a", pa.int8())]), ["b"], 'has no key column "b"'),
        (pa.schema([("a", pa.list_(pa.int8()))]), ["a"], "is nested"),
        (pa.schema([("a", pa.dictionary(pa.int8(), pa.string()))]), [], "is encoded as"),
        (pa.schema([("a", pa.month_day_nano_interval())]), [], "cannot be stored exactly"),
        (
            pa.schema([("a", pa.struct([("b", pa.dictionary(pa.int8(), pa.string()))]))]),
            [],
            "is enc",
        ),
    ],
)
def test_check_row_schema_with_invalid_schema_raises_usage_error(schema, key, message):
    with pytest.raises(UsageError, match=message):
        check_row_schema(schema, key, collection="x")


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        (pa.string_view(), "Use string"),
        (pa.binary_view(), "Use binary"),
        (pa.binary(0), "Use binary"),
        (pa.date64(), "date32"),
        (pa.time32("s"), "time32[ms]"),
        (pa.timestamp("s"), "timestamp[ms]"),
        (pa.timestamp("s", "UTC"), "timestamp[ms, tz=UTC]"),
        (pa.decimal128(9, -3), "scale from 0"),
        (pa.decimal128(3, 9), "scale from 0"),
        (pa.struct([]), "struct with fields"),
        (pa.struct([("a", pa.int8()), ("a", pa.int8())]), "unique field names"),
        (pa.struct([pa.field("a", pa.int8(), nullable=False)]), "fields that may be null"),
        (pa.list_(pa.field("item", pa.int8(), nullable=False), 2), "items that may be null"),
        (pa.list_(pa.int8(), 0), "list<int8>"),
        (pa.list_view(pa.int8()), "text or bytes"),
        (pa.dense_union([pa.field("a", pa.int8())]), "text or bytes"),
        (pa.uuid(), "text or bytes"),
        (pa.list_(pa.struct([("a", pa.date64())])), "date32"),
        (pa.map_(pa.string(), pa.timestamp("s")), "timestamp[ms]"),
    ],
    ids=str,
)
def test_check_row_schema_with_inexact_type_suggests_replacement(kind, instead):
    with pytest.raises(UsageError, match="cannot be stored exactly") as refused:
        check_row_schema(pa.schema([("a", kind)]), [], collection="x")
    assert instead in refused.value.hint


def extremes(kind: pa.DataType) -> pa.Array:
    """Return values of a fixed-width type with the least, the greatest and other bits."""
    width = kind.bit_width
    if pa.types.is_decimal(kind):
        numbers = [10**kind.precision - 1, 1 - 10**kind.precision, 0, -1]
    else:
        numbers = [-(2 ** (width - 1)), 2 ** (width - 1) - 1, 0, -1, 1]
    data = b"".join(n.to_bytes(width // 8, "little", signed=True) for n in numbers)
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(data)])


FIXED = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64()),
    *(pa.decimal32(9, 2), pa.decimal64(18, 18), pa.decimal128(38, 0), pa.decimal256(76, 10)),
    *(pa.date32(), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
    *(pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("ns")),
    *(pa.timestamp("ms", "UTC"), pa.timestamp("ns", "+05:30"), pa.timestamp("us", "Asia/Tokyo")),
    *(pa.duration("s"), pa.duration("ms"), pa.duration("us"), pa.duration("ns")),
]
PLAIN = [
    *map(extremes, FIXED),
    pa.array([True, False, None]),
    pa.nulls(2),
    pa.array(["", "\0", None, "ä", "\U0010ffff"]),
    pa.array(["", "\0", None, "ä"], pa.large_string()),
    pa.array([b"", b"\xff\0", None]),
    pa.array([b"", b"\xff\0", None], pa.large_binary()),
    pa.array([b"\0a\xff", None], pa.binary(3)),
]


def nested(inner: pa.Array) -> list[pa.Array]:
    """Return columns of nested types that contain a column."""
    size, kind = len(inner), inner.type
    whole = pa.array([0, size], pa.int32())
    large = pa.array([0, size], pa.int64())
    keys = pa.array([str(i) for i in range(size)])
    columns = [
        pa.ListArray.from_arrays(whole, inner),
        pa.LargeListArray.from_arrays(large, inner),
        pa.FixedSizeListArray.from_arrays(inner, size),
        pa.StructArray.from_arrays([inner, inner], [".a", ""]),
        pa.MapArray.from_arrays(whole, keys, inner),
    ]
    if not inner.null_count:
        strict = pa.field("item", kind, nullable=False)
        columns += [
            pa.ListArray.from_arrays(whole, inner, type=pa.list_(strict)),
            pa.MapArray.from_arrays(whole, keys, inner, pa.map_(pa.string(), strict)),
        ]
    return columns


EVERY = [*PLAIN, *(outer for inner in PLAIN for outer in nested(inner))]
EVERY += [outer for inner in nested(PLAIN[3]) for outer in nested(inner)]


@pytest.mark.parametrize("column", EVERY, ids=lambda column: str(column.type))
def test_stored_values_of_each_type_are_equal_bit_by_bit(column):
    columns = pa.schema([("c", column.type)])
    schema = stored_schema(check_row_schema(columns, [], collection="x"))
    column = pa.concat_arrays([column, pa.nulls(1, column.type)])
    many = [1] * len(column)
    rows = pa.table([column, many, many], schema=schema)
    file = io.BytesIO()
    pq.write_table(rows, file)
    for back in (
        from_ipc(to_ipc(rows), schema),
        pq.read_table(pa.BufferReader(file.getvalue()), use_threads=False),
    ):
        assert back.schema.equals(schema)
        assert bits(back) == bits(rows)
    assert sort_rows(rows, ()).num_rows == rows.num_rows
    both = pa.concat_tables([rows, rows.set_column(2, schema.field(2), [[-1] * len(column)])])
    assert consolidate(both).num_rows == 0


def bits(rows: pa.Table) -> list[object]:
    def array_bits(array: pa.Array) -> object:
        kind = array.type
        if pa.types.is_struct(kind):
            return [array.is_valid().to_pylist(), *map(array_bits, array.flatten())]
        if pa.types.is_map(kind):
            return array_bits(array.cast(pa.list_(kind.field(0))))
        if pa.types.is_nested(kind):
            lengths = pa.compute.list_value_length(array).to_pylist()
            return [lengths, array_bits(array.flatten())]
        if kind in FIXED:
            raw = array.view(pa.binary(kind.bit_width // 8))
            return [v if ok.as_py() else None for v, ok in zip(raw, array.is_valid(), strict=True)]
        return array.to_pylist()

    return [array_bits(column.combine_chunks()) for column in rows.columns]
