"""Laws of updates as Arrow tables."""

import io
import math
import struct
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import (
    DIFF,
    TIME,
    advance,
    consolidate,
    from_ipc,
    sort_rows,
    stored_schema,
    to_ipc,
)
from penstock.errors import UsageError
from penstock.progress import MAX_DIFF, MIN_DIFF

COLUMNS = pa.schema(
    [
        ("text", pa.string()),
        ("real", pa.float64()),
        ("whole", pa.int64()),
        ("list", pa.list_(pa.float64())),
        ("pair", pa.struct([("a", pa.int32()), ("b", pa.string())])),
        ("nothing", pa.null()),
    ]
)
SCHEMA = stored_schema(COLUMNS)

NANS = [struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000000 + n))[0] for n in range(2)]

reals = st.sampled_from([0.0, -0.0, 1.5, math.inf, *NANS])
tame = st.sampled_from([0.0, -0.0, 1.5, math.inf, NANS[0]])
rows = st.fixed_dictionaries(
    {
        "text": st.sampled_from([None, "", "a", "ä"]),
        "real": st.one_of(st.none(), reals),
        "whole": st.sampled_from([None, 0, -1, 2**62]),
        "list": st.one_of(st.none(), st.lists(st.one_of(st.none(), reals), max_size=2)),
        "pair": st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {"a": st.sampled_from([None, 1]), "b": st.sampled_from([None, "x"])}
            ),
        ),
        "nothing": st.none(),
    }
)
updates = st.lists(st.tuples(rows, st.integers(0, 3), st.integers(-2, 2)), max_size=12)
# Few different rows, to get equal ones.
crowded = st.lists(rows, min_size=1, max_size=3).flatmap(
    lambda few: st.lists(
        st.tuples(st.sampled_from(few), st.integers(0, 2), st.integers(-2, 2)), max_size=12
    )
)


def table(given: list[tuple[dict[str, Any], int, int]]) -> pa.Table:
    return pa.Table.from_pylist(
        [row | {TIME: time, DIFF: diff} for row, time, diff in given], schema=SCHEMA
    )


def bits(value: Any) -> Any:
    """Return a value that is equal for two inputs if and only if they are, bit by bit."""
    match value:
        case float():
            return struct.pack("<d", value)
        case list():
            return ("list", *map(bits, value))
        case dict():
            return tuple((name, bits(inner)) for name, inner in value.items())
        case _:
            return value


def sums(updates: pa.Table) -> Counter[Any]:
    """Return the multiset that updates stand for, by row and time."""
    total: Counter[Any] = Counter()
    for row in updates.to_pylist():
        time, diff = row.pop(TIME), row.pop(DIFF)
        total[bits(row), time] += diff
    return Counter({key: count for key, count in total.items() if count})


@given(crowded | updates)
def test_consolidate_keeps_sums_and_has_each_row_once(given):
    consolidated = consolidate(table(given))
    assert consolidated.schema == SCHEMA
    assert sums(consolidated) == sums(table(given))
    assert consolidated.num_rows == len(sums(consolidated))
    assert 0 not in consolidated.column(DIFF).to_pylist()


@given(crowded)
def test_consolidate_is_idempotent(given):
    once = consolidate(table(given))
    assert sums(consolidate(once)) == sums(once)
    assert consolidate(once).num_rows == once.num_rows


@given(crowded, st.integers(0, 12))
def test_consolidate_of_any_split_has_same_sums(given, split):
    whole = table(given)
    parts = [consolidate(whole.slice(0, split)), consolidate(whole.slice(split))]
    assert sums(consolidate(pa.concat_tables(parts))) == sums(whole)


@given(crowded, st.integers(0, 4), st.integers(0, 4))
def test_advance_keeps_contents_from_since(given, since, as_of):
    as_of = max(since, as_of)
    whole = table(given)
    moved = consolidate(advance(whole, since))
    assert sums(contents_as_of(moved, as_of)) == sums(contents_as_of(whole, as_of))


def contents_as_of(whole: pa.Table, as_of: int) -> pa.Table:
    times = whole.column(TIME).to_pylist()
    return advance(whole.filter(pa.array([time <= as_of for time in times], pa.bool_())), as_of)


@given(updates)
def test_from_ipc_reverses_to_ipc_bit_by_bit(given):
    if given:
        back = from_ipc(to_ipc(table(given)), SCHEMA)
        assert [bits(row) for row in back.to_pylist()] == [
            bits(row) for row in table(given).to_pylist()
        ]


@given(crowded)
def test_sort_rows_orders_by_key_then_time(given):
    ordered = sort_rows(table(given), ("whole",))
    assert sums(ordered) == sums(table(given))
    known = [(row["whole"], row[TIME]) for row in ordered.to_pylist() if row["whole"] is not None]
    assert known == sorted(known)


def test_consolidate_distinguishes_nested_nans():
    schema = stored_schema(pa.schema([("c", pa.list_(pa.float64()))]))
    given = pa.table([[[NANS[0]], [NANS[1]]], [1, 1], [1, -1]], schema=schema)
    assert consolidate(given).num_rows == 2


@pytest.mark.parametrize(
    "kind",
    [
        pa.bool_(),
        pa.int8(),
        pa.uint64(),
        pa.float16(),
        pa.float32(),
        pa.decimal128(38, 10),
        pa.decimal256(76, 10),
        pa.date32(),
        pa.time32("ms"),
        pa.time64("ns"),
        pa.timestamp("ns"),
        pa.timestamp("us", "UTC"),
        pa.duration("ns"),
        pa.binary(),
        pa.binary(3),
        pa.large_string(),
        pa.large_binary(),
        pa.list_(pa.timestamp("ns")),
        pa.list_(pa.int8(), 1),
        pa.map_(pa.string(), pa.int64()),
        pa.struct([("x", pa.list_(pa.string()))]),
    ],
    ids=str,
)
def test_consolidate_cancels_rows_of_each_type(kind):
    schema = stored_schema(pa.schema([("c", kind)]))
    value = pa.array([1], pa.int64())
    if pa.types.is_nested(kind):
        made = {
            "list<item: timestamp[ns]>": [[1]],
            "fixed_size_list<item: int8>[1]": [[1]],
            "map<string, int64>": [[("a", 1)]],
        }.get(str(kind), [{"x": ["a"]}])
        value = pa.array(made, kind)
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or kind == pa.binary(3):
        value = pa.array([b"abc"], kind)
    elif pa.types.is_large_string(kind):
        value = pa.array(["abc"], kind)
    elif pa.types.is_date32(kind) or pa.types.is_time32(kind):
        value = value.cast(pa.int32()).cast(kind)
    elif pa.types.is_float16(kind):
        value = value.cast(pa.float32()).cast(kind)
    else:
        value = value.cast(kind)
    one = pa.table([value, pa.array([1]), pa.array([1])], schema=schema)
    gone = pa.table([value, pa.array([1]), pa.array([-1])], schema=schema)
    null = pa.table([pa.nulls(1, kind), pa.array([1]), pa.array([1])], schema=schema)
    assert consolidate(pa.concat_tables([one, gone])).num_rows == 0
    both = consolidate(pa.concat_tables([one, null, one, null]))
    assert both.column(DIFF).to_pylist() == [2, 2]
    assert sort_rows(both, ()).num_rows == 2
    assert from_ipc(to_ipc(both), schema).equals(both.combine_chunks())


HOSTILE = ["a", ".a", "a.b", "", ".", "[0]", ".a[0]", "c0", "c1", "diff", "row", "row_min", "__row"]


@given(
    st.lists(st.sampled_from(HOSTILE) | st.text(max_size=3), min_size=1, max_size=4, unique=True),
    st.data(),
)
def test_consolidate_with_any_column_names_merges_only_equal_rows(names, data):
    columns = pa.schema([(name, pa.int64()) for name in names])
    one = st.tuples(*[st.integers(0, 1) for _ in names], st.integers(0, 1), st.integers(-2, 2))
    given = data.draw(st.lists(one, max_size=8))
    whole = pa.table(
        [[row[i] for row in given] for i in range(len(names) + 2)], schema=stored_schema(columns)
    )
    assert sums(consolidate(whole)) == sums(whole)
    assert consolidate(whole).num_rows == len(sums(whole))
    by_last = sort_rows(whole, (names[-1],))
    assert sums(by_last) == sums(whole)
    assert by_last.column(names[-1]).to_pylist() == sorted(whole.column(names[-1]).to_pylist())
    assert through_parquet(whole).equals(whole)


def through_parquet(whole: pa.Table) -> pa.Table:
    file = io.BytesIO()
    pq.write_table(whole, file)
    return pq.read_table(pa.BufferReader(file.getvalue()), use_threads=False)


far = st.sampled_from([MIN_DIFF, -(2**62), -1, 1, 2**62, MAX_DIFF])


@given(st.lists(st.tuples(st.sampled_from("ab"), far), max_size=6))
def test_consolidate_sums_exactly_or_raises_usage_error(given):
    schema = stored_schema(pa.schema([("c", pa.string())]))
    whole = pa.table(
        [[c for c, _ in given], [1] * len(given), [d for _, d in given]], schema=schema
    )
    # In order of first appearance.
    totals = Counter[str]()
    for c, diff in given:
        totals[c] += diff
    outside = [total for total in totals.values() if not MIN_DIFF <= total <= MAX_DIFF]
    if outside:
        with pytest.raises(UsageError) as caught:
            consolidate(whole)
        assert str(caught.value) == f"sum of diffs {outside[0]} does not fit into 64 bits"
    else:
        consolidated = consolidate(whole)
        assert consolidated.schema == schema
        assert list(zip(*(c.to_pylist() for c in consolidated.columns), strict=True)) == [
            (c, 1, total) for c, total in totals.items() if total
        ]
