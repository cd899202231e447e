"""Input is stored exactly, or rejected before it is queued."""

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from penstock.data import DIFF, INT64, TIME, stored_schema
from penstock.errors import UsageError
from penstock.persist.input_validation import put_pairs, put_rows, table_of
from penstock.persist.write import CollectionAppend

STRICT = pa.list_(pa.field("item", pa.int64(), nullable=False))
STRICT_MAP = pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False))
NAIVE = datetime(2020, 1, 2, 3, 4, 5, 6)  # noqa: DTZ001
AWARE = NAIVE.replace(tzinfo=UTC)


def stored(kind: pa.DataType, value: Any) -> pa.ChunkedArray:
    piece = CollectionAppend(1)
    put_rows(piece, [({"b": value}, 1, 1)], pa.schema([("b", kind)]), collection="x")
    assert isinstance(piece.updates, pa.Table)
    assert piece.updates.schema == stored_schema(pa.schema([("b", kind)]))
    return piece.updates.column("b")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int64(), 1.5),
        (pa.int64(), 1.0),
        (pa.int64(), True),
        (pa.int64(), "1"),
        (pa.int64(), Decimal("1.5")),
        (pa.int8(), 128),
        (pa.bool_(), 1),
        (pa.float32(), 1e300),
        (pa.float64(), 2**53 + 1),
        (pa.float64(), True),
        (pa.decimal128(5, 2), Decimal("1.234")),
        (pa.string(), b"a"),
        (pa.string(), 7),
        (pa.binary(), "a"),
        (pa.timestamp("ms"), NAIVE),
        (pa.timestamp("us"), AWARE),
        (pa.timestamp("us", "UTC"), NAIVE),
        (pa.timestamp("us"), True),
        (pa.date32(), NAIVE),
        (pa.time32("ms"), NAIVE.time()),
        (pa.duration("ms"), timedelta(microseconds=1)),
        (pa.list_(pa.int64()), [1, 1.5]),
        (pa.list_(pa.timestamp("ms")), [NAIVE]),
        (pa.list_(pa.int8(), 2), [1]),
        (pa.struct([("a", pa.int8())]), {"a": 1, "typo": 2}),
        (pa.struct([("a", pa.int8())]), {"a": 1.5}),
        (pa.map_(pa.string(), pa.int64()), [("a", 1.5)]),
        (STRICT, [1, None]),
        (STRICT_MAP, [("a", None)]),
        (pa.list_(STRICT), [[None]]),
    ],
    ids=str,
)
def test_put_rows_with_inexact_value_raises_usage_error_with_column(kind, value):
    with pytest.raises(UsageError, match='column "b" of a row for collection "x"'):
        stored(kind, value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int64(), -(2**63)),
        (pa.uint64(), 2**64 - 1),
        (pa.float32(), 1.5),
        (pa.float32(), float("inf")),
        (pa.float64(), 2**53),
        (pa.float64(), -0.0),
        (pa.decimal128(5, 2), Decimal("1.2")),
        (pa.decimal128(5, 2), 7),
        (pa.string(), "ä"),
        (pa.binary(2), b"ab"),
        (pa.timestamp("us"), NAIVE),
        (pa.timestamp("ns"), datetime(1677, 9, 22)),  # noqa: DTZ001
        (pa.timestamp("us", "Asia/Tokyo"), AWARE),
        (pa.date32(), date(1, 1, 1)),
        (pa.time64("ns"), time(23, 59, 59, 999_999)),
        (pa.duration("ns"), timedelta(days=-1, microseconds=1)),
        (pa.list_(pa.timestamp("us")), [NAIVE, None]),
        (STRICT, [1]),
        (pa.struct([("a", pa.int8()), ("b", pa.list_(pa.string()))]), {"a": 1, "b": ["x"]}),
        (STRICT_MAP, [("a", 1)]),
        (pa.null(), None),
    ],
    ids=str,
)
def test_put_rows_stores_exact_value_unchanged(kind, value):
    assert stored(kind, value).to_pylist() == [value]
    assert stored(kind, None).to_pylist() == [None]


def test_put_rows_accepts_timestamp_as_integer():
    assert stored(pa.timestamp("ns"), 7).cast(pa.int64()).to_pylist() == [7]


def test_put_rows_with_null_in_not_null_column_raises_usage_error():
    columns = pa.schema([pa.field("b", pa.int64(), nullable=False)])
    with pytest.raises(UsageError, match='of a row for collection "x" holds a null'):
        put_rows(CollectionAppend(1), [({}, 1, 1)], columns, collection="x")


def test_put_rows_with_nonexistent_column_raises_usage_error():
    with pytest.raises(UsageError, match='no column "1"'):
        put_rows(
            CollectionAppend(1),
            [({1: 1, "z": 1}, 1, 1)],
            pa.schema([("b", pa.int8())]),
            collection="x",
        )


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (STRICT, [[1], None, []], [[1], None, [None]]),
        (STRICT_MAP, [[("a", 1)], None], [[("a", 1)], None, [("b", None)]]),
        (pa.large_list(STRICT), [[None, [1]]], [[None, [None]]]),
        (pa.struct([("a", STRICT)]), [{"a": None}, None], [None, {"a": [None]}]),
    ],
    ids=str,
)
def test_table_of_with_nested_null_in_not_null_type_raises_usage_error(kind, good, bad):
    columns = pa.schema([("b", kind)])
    for values in (good, good * 2):
        fine = pa.table([pa.array(values, kind)], schema=columns)
        assert table_of(fine, columns, time=1, collection="x").num_rows == len(values)
    # Sliced: the buffers of a slice start before the slice.
    hollow = pa.table([pa.array([*good, *bad], kind)], schema=columns).slice(len(good))
    with pytest.raises(UsageError, match='column "b" for collection "x" holds nulls'):
        table_of(hollow, columns, time=1, collection="x")


@dataclass(frozen=True)
class Own:
    """User-defined codec that returns a fixed stored value."""

    stored_as: pa.DataType
    given: Any
    name: str = "own"
    version: int = 1

    def encode(self, _value: Any, /) -> Any:
        return self.given

    def decode(self, stored: Any, _version: int, /) -> Any:
        return stored


@pytest.mark.parametrize(
    ("kind", "given"),
    [(pa.string(), 7), (pa.int32(), 2**40), (pa.int64(), 1.5), (pa.binary(), object)],
    ids=str,
)
def test_put_pairs_with_codec_output_of_wrong_type_raises_and_queues_nothing(kind, given):
    columns = pa.schema([("key", pa.int64()), ("value", kind)])
    piece = CollectionAppend(1)
    with pytest.raises(UsageError, match='what codec "own" made of a value'):
        put_pairs(piece, [((1, 1), 1, 1)], (INT64, Own(kind, given)), columns, collection="x")
    assert piece.updates is None


def test_put_rows_keeps_times_and_diffs():
    piece = CollectionAppend(1)
    updates = [({"b": 1}, 5, 2), ({}, 3, -1)]
    put_rows(piece, updates, pa.schema([("b", pa.int8())]), collection="x")
    assert isinstance(piece.updates, pa.Table)
    assert piece.updates.to_pylist() == [{"b": 1, TIME: 5, DIFF: 2}, {"b": None, TIME: 3, DIFF: -1}]
    assert (piece.lower, piece.beyond) == (3, 6)
