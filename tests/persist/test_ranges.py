"""A merge by ranges equals a merge at once, for all rows.

Rows are compared bit by bit, which distinguishes -0.0 from 0.0 and the NaN values.
"""

import struct
from collections import Counter
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import DIFF, TIME, advance, sort_rows, stored_schema
from penstock.data.arrow import with_integer_times
from penstock.persist.merge.merger import distinct, summed
from penstock.persist.merge.ranges import bounds, cut, range_boundaries, sample

OTHER_NAN = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]

floats = st.sampled_from([0.0, -0.0, float("nan"), OTHER_NAN, float("inf"), -1.5, 1.5])
integers = st.integers(-2, 2)
naturals = st.integers(0, 3)
texts = st.sampled_from(["", "a", "b", "ab", "ä", "\x00"])
blobs = st.sampled_from([b"", b"a", b"\xff", b"a\x00"])

VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    pa.int8(): integers,
    pa.int64(): integers,
    pa.uint64(): st.sampled_from([0, 1, 2**64 - 1]),
    pa.float16(): st.sampled_from([0.0, -0.0, float("nan"), 1.5]),
    pa.float32(): floats,
    pa.float64(): floats,
    pa.decimal128(5, 2): st.sampled_from([Decimal("0.00"), Decimal("-1.50"), Decimal("3.10")]),
    pa.decimal256(50, 1): st.sampled_from([Decimal("0.0"), Decimal("-1.5"), Decimal("1e40")]),
    pa.date32(): naturals,
    pa.time32("ms"): naturals,
    pa.time64("ns"): naturals,
    pa.timestamp("ns"): integers,
    pa.timestamp("us", "Europe/Berlin"): integers,
    pa.duration("us"): integers,
    pa.string(): texts,
    pa.large_string(): texts,
    pa.binary(): blobs,
    pa.large_binary(): blobs,
    pa.binary(2): st.sampled_from([b"aa", b"\x00b"]),
    pa.list_(pa.float64()): st.lists(floats, max_size=2),
    pa.list_(pa.int32(), 2): st.lists(integers, min_size=2, max_size=2),
    pa.struct([("x", pa.int32()), ("y", pa.float32())]): st.fixed_dictionaries(
        {"x": st.none() | integers, "y": st.none() | floats}
    ),
    pa.map_(pa.string(), pa.int8()): st.lists(
        st.tuples(texts, integers), max_size=2, unique_by=lambda pair: pair[0]
    ),
}
"""Types with few values each, which make many rows equal."""


@st.composite
def cases(choose: st.DrawFn) -> tuple[list[pa.Table], tuple[str, ...]]:
    """Draw tables of updates with one schema, and its key."""
    kinds = choose(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=3))
    schema = pa.schema([(f".c{i}", kind) for i, kind in enumerate(kinds)])
    plain = [field.name for field in schema if not pa.types.is_nested(field.type)]
    key = tuple(choose(st.lists(st.sampled_from(plain), unique=True))) if plain else ()
    row = st.tuples(
        *(st.none() | VALUES[kind] for kind in kinds),
        st.integers(0, 3),
        st.sampled_from([-1, 1, 1, 2]),
    )
    row_lists = choose(st.lists(st.lists(row, max_size=8), min_size=1, max_size=5))
    return [table(rows, schema) for rows in row_lists], key


def table(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    stored = stored_schema(schema)
    columns = list(zip(*rows, strict=True)) or [()] * len(stored)
    arrays = [pa.array(list(c), f.type) for c, f in zip(columns, stored, strict=True)]
    return pa.table(arrays, schema=stored)


def exactly(rows: pa.Table) -> Counter[tuple[str, ...]]:
    """Return the multiset of the rows, bit by bit."""
    columns = [column.cast(with_integer_times(column.type)).to_pylist() for column in rows.columns]
    return Counter(tuple(map(bits, row)) for row in zip(*columns, strict=True))


def bits(value: Any) -> str:
    match value:
        case float():
            return struct.pack(">d", value).hex()
        case dict():
            return f"{{{','.join(f'{name}:{bits(inner)}' for name, inner in value.items())}}}"
        case list() | tuple():
            return f"[{','.join(map(bits, value))}]"
        case _:
            return repr(value)


def split_ranges(tables: list[pa.Table], starts: pa.Table, key: tuple[str, ...]) -> list[pa.Table]:
    """Return the rows of each range from all tables."""
    cuts = [cut(each, starts, key) for each in tables]
    return [pa.concat_tables(parts) for parts in zip(*cuts, strict=True)]


def row_texts(bound: pa.Table) -> list[tuple[str, ...]]:
    """Return bounds as text, equal for values that sort as equal: 0.0 and -0.0, all NaN."""
    columns = [column.cast(with_integer_times(column.type)).to_pylist() for column in bound.columns]
    return [
        tuple("0.0" if isinstance(v, float) and v == 0 else repr(v) for v in row)
        for row in zip(*columns, strict=True)
    ]


@given(cases(), st.data())
def test_cut_keeps_every_row_and_shares_no_key_between_ranges(case, data):
    tables, key = case
    every = pa.concat_tables(tables)
    chosen = data.draw(st.lists(st.integers(0, max(every.num_rows - 1, 0)), max_size=4))
    starts = bounds(every, key).take(pa.array(chosen if every.num_rows else [], pa.int64()))
    ranges = split_ranges(tables, starts, key)
    assert len(ranges) == starts.num_rows + 1
    assert exactly(pa.concat_tables(ranges)) == exactly(every)
    keys = [set(row_texts(bounds(each, key))) for each in ranges]
    assert sum(map(len, keys)) == len(set().union(*keys))


@given(cases(), st.data())
def test_cut_ranges_are_in_order_of_merged_rows(case, data):
    tables, key = case
    every = pa.concat_tables(tables)
    chosen = data.draw(st.lists(st.integers(0, max(every.num_rows - 1, 0)), max_size=4))
    starts = bounds(every, key).take(pa.array(chosen if every.num_rows else [], pa.int64()))
    ranges = [sort_rows(each, key) for each in split_ranges(tables, starts, key)]
    in_order = row_texts(bounds(sort_rows(every, key), key))
    assert [row for each in ranges for row in row_texts(bounds(each, key))] == in_order


@given(cases(), st.integers(0, 3), st.integers(1, 6), st.integers(1, 4))
def test_merge_by_ranges_equals_merge_at_once(case, since, ranges, rows):
    tables, key = case
    at_once = summed(pa.concat_tables(tables), key, since=since)
    tables = [advance(each, since) for each in tables]
    samples = [sample(each, key, rows) for each in tables]
    starts = range_boundaries(samples, [each.num_rows for each in tables], ranges)
    assert starts.num_rows < ranges
    merged = [summed(each, key, since=since) for each in split_ranges(tables, starts, key)]
    assert exactly(pa.concat_tables(merged)) == exactly(at_once)
    settled = [each for each in merged if since in each.column(TIME).to_pylist()]
    flags = [distinct(each, key, since=since) for each in settled]
    assert distinct(at_once, key, since=since) == (bool(flags) and all(flags))


def test_cut_keeps_insert_and_delete_of_a_row_in_one_range():
    schema = pa.schema([("a", pa.int64())])
    updates = table([(1, 0, -1), (1, 0, 1), (2, 0, 1)], schema)
    for start in range(3):
        starts = bounds(updates, ()).slice(start, 1)
        merged = [summed(each, (), since=0) for each in cut(updates, starts, ())]
        assert [row for each in merged for row in each.column("a").to_pylist()] == [2]


def test_cut_puts_row_equal_to_boundary_into_the_range_it_starts():
    schema = pa.schema([("k", pa.float64()), ("v", pa.string())])
    rows = [(-0.0, "x", 0, 1), (0.0, "y", 5, 1), (float("nan"), "z", 0, 1), (None, "n", 0, 1)]
    updates = table(rows, schema)
    starts = bounds(updates, ("k",)).take([1, 2, 3])
    values = [each.column("v").to_pylist() for each in cut(updates, starts, ("k",))]
    assert values == [[], ["x", "y"], ["z"], ["n"]]


def test_cut_by_unordered_key_type_uses_time():
    schema = pa.schema([("k", pa.float16())])
    updates = table([(1.0, 7, 1), (2.0, 5, 1), (1.0, 6, 1)], schema)
    assert bounds(updates, ("k",)).to_pydict() == {"c0": [7, 5, 6]}
    starts = bounds(updates, ("k",)).slice(2)
    assert [each.column(TIME).to_pylist() for each in cut(updates, starts, ("k",))] == [[5], [6, 7]]


def test_range_boundaries_make_ranges_of_similar_size():
    schema = pa.schema([("k", pa.int64())])
    many = table([(i, 0, 1) for i in range(10_000)], schema)
    few = table([(100_000 + i, 0, 1) for i in range(100)], schema)
    samples = [sample(each, ("k",), 64) for each in (many, few)]
    starts = range_boundaries(samples, [many.num_rows, few.num_rows], 8)
    sizes = [each.num_rows for each in split_ranges([many, few], starts, ("k",))]
    assert len(sizes) == 8
    assert all(abs(size - 10_100 / 8) <= 2 * 10_000 / 64 for size in sizes)


def test_range_boundaries_of_single_key_make_one_range():
    schema = pa.schema([("k", pa.int64())])
    same = table([(7, 0, 1)] * 100, schema)
    starts = range_boundaries([sample(same, ("k",), 10)], [100], 4)
    assert [each.num_rows for each in cut(same, starts, ("k",)) if each.num_rows] == [100]


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_sample_of_few_rows_returns_all_rows(rows):
    schema = pa.schema([("k", pa.int64())])
    few = table([(i, 0, 1) for i in range(rows)], schema)
    assert sample(few, ("k",), 5).num_rows == rows
    assert range_boundaries([sample(few, ("k",), 5)], [rows], 3).num_rows <= min(rows, 2)


def test_bounds_exclude_diff_and_nested_columns():
    schema = pa.schema([("a", pa.int64()), ("b", pa.list_(pa.int64()))])
    updates = table([(1, [2], 3, 9)], schema)
    assert updates.column(DIFF).to_pylist() == [9]
    assert bounds(updates, ()).to_pydict() == {"c0": [1], "c1": [3]}
    assert bounds(updates, ("a",)).to_pydict() == {"c0": [1]}
