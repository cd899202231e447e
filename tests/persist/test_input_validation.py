"""What callers hand in is stored as it is, or refused before anything is queued."""

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
def test_a_value_that_would_be_changed_is_refused_by_its_column(kind, value):
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
def test_a_value_that_fits_is_stored_as_it_is(kind, value):
    assert stored(kind, value).to_pylist() == [value]
    assert stored(kind, None).to_pylist() == [None]


def test_times_may_be_given_as_the_integers_they_are_stored_as():
    assert stored(pa.timestamp("ns"), 7).cast(pa.int64()).to_pylist() == [7]


def test_a_null_in_a_not_null_column_is_refused():
    columns = pa.schema([pa.field("b", pa.int64(), nullable=False)])
    with pytest.raises(UsageError, match='of a row for collection "x" holds a null'):
        put_rows(CollectionAppend(1), [({}, 1, 1)], columns, collection="x")


def test_names_of_any_kind_that_are_no_columns_are_refused():
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
def test_a_table_may_not_hold_nulls_inside_what_is_not_null(kind, good, bad):
    columns = pa.schema([("b", kind)])
    for values in (good, good * 2):
        fine = pa.table([pa.array(values, kind)], schema=columns)
        assert table_of(fine, columns, time=1, collection="x").num_rows == len(values)
    # Sliced, because a slice does not begin where its buffers do.
    hollow = pa.table([pa.array([*good, *bad], kind)], schema=columns).slice(len(good))
    with pytest.raises(UsageError, match='column "b" for collection "x" holds nulls'):
        table_of(hollow, columns, time=1, collection="x")


@dataclass(frozen=True)
class Own:
    """A codec of someone's own, that gives back just what it is told to."""

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
def test_what_a_codec_makes_must_fit_its_column_before_anything_is_queued(kind, given):
    columns = pa.schema([("key", pa.int64()), ("value", kind)])
    piece = CollectionAppend(1)
    with pytest.raises(UsageError, match='what codec "own" made of a value'):
        put_pairs(piece, [((1, 1), 1, 1)], (INT64, Own(kind, given)), columns, collection="x")
    assert piece.updates is None


def test_times_and_diffs_come_along():
    piece = CollectionAppend(1)
    updates = [({"b": 1}, 5, 2), ({}, 3, -1)]
    put_rows(piece, updates, pa.schema([("b", pa.int8())]), collection="x")
    assert piece.updates.to_pylist() == [{"b": 1, TIME: 5, DIFF: 2}, {"b": None, TIME: 3, DIFF: -1}]
    assert (piece.lower, piece.beyond) == (3, 6)
