"""Schemas grow only in ways that give every old row exactly one reading."""

from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import check_row_schema, conform, evolve
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
def test_a_wider_type_holds_every_old_value_and_gives_it_back(old, new, values):
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
    ("new", "defaults", "said"),
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
        (OLD, {"n": 3}, "is not a new column"),
    ],
)
def test_what_would_leave_an_old_row_without_one_reading_is_refused(new, defaults, said):
    with pytest.raises(UsageError, match=said):
        evolve(OLD, new, defaults, collection="x")


@given(st.lists(st.tuples(st.text("ab", max_size=2), st.integers(-9, 9)), max_size=5))
def test_old_rows_read_through_any_later_version_alike(rows):
    # By way of the versions between or straight: the reading is the same.
    middle = OLD.append(pa.field("a", pa.string()))
    wide = pa.schema([("k", pa.string()), ("n", pa.int64()), ("a", pa.string())])
    newest = wide.append(pa.field("b", pa.int64(), nullable=False))
    defaults = {"b": pa.scalar(7, pa.int64())}
    old = pa.Table.from_pylist([{"k": k, "n": n} for k, n in rows], schema=OLD)
    straight = conform(old, newest, defaults)
    assert conform(conform(old, middle, defaults), newest, defaults).equals(straight)
    assert straight.to_pylist() == [{"k": k, "n": n, "a": None, "b": 7} for k, n in rows]
    assert conform(straight, OLD, defaults).equals(old)


def test_defaults_are_one_row_of_the_columns_they_name():
    schema = OLD.append(pa.field("b", pa.int64()))
    assert default_row(schema, {"b": 7}).to_pylist() == [{"b": 7}]


@pytest.mark.parametrize(
    ("schema", "key", "said"),
    [
        (pa.schema([("a", pa.int8()), ("a", pa.int8())]), [], "names a column twice"),
        (pa.schema([("mz_diff", pa.int8())]), [], 'has a column "mz_diff"'),
        (pa.schema([("__a", pa.int8())]), [], 'has a column "__a"'),
        (pa.schema([("a", pa.int8())]), ["b"], 'has no key column "b"'),
        (pa.schema([("a", pa.list_(pa.int8()))]), ["a"], "is nested"),
        (pa.schema([("a", pa.dictionary(pa.int8(), pa.string()))]), [], "is encoded as"),
        (pa.schema([("a", pa.month_day_nano_interval())]), [], "Parquet cannot hold"),
        (
            pa.schema([("a", pa.struct([("b", pa.dictionary(pa.int8(), pa.string()))]))]),
            [],
            "is enc",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(schema, key, said):
    with pytest.raises(UsageError, match=said):
        check_row_schema(schema, key, collection="x")
