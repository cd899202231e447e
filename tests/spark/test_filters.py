"""Filter pushdown: a filter returns the same rows with and without it."""

import math
from contextlib import contextmanager
from datetime import UTC, date, datetime
from unittest import mock

import pyarrow as pa
import pytest
from tests.persist.shop import by_hand

import penstock.spark as ps
from penstock import persist
from penstock.errors import InternalError, UsageError
from penstock.persist import batch
from penstock.persist.scan import spark as door

SCHEMA = pa.schema(
    [
        ("k", pa.int64()),
        ("x", pa.float64()),
        ("at", pa.timestamp("ms", "UTC")),
        ("day", pa.date32()),
        ("mz_key0", pa.int64()),
        ("in", pa.struct([("x", pa.float64())])),
    ]
)

FILTERS = [
    "x > 5",
    "x >= 2",
    "x = double('NaN')",
    "x = 0.0D",
    "x >= 0.0D",
    "at < timestamp'2020-01-01 00:00:00.000500Z'",
    "day = date'1500-01-01'",
    "`in`.x > 5",
    "`in`.x = 0.0D",
]


def row(k, x):
    began = datetime(2020, 1, 1, tzinfo=UTC)
    old = date(1500, 1, 1)
    return {"k": k, "x": x, "at": began, "day": old, "mz_key0": k, "in": {"x": x}}


def written(url):
    with persist.open(url, writer="w", settings=by_hand(inline_bytes=0)) as client:
        table = client.create_or_load("rows", schema=SCHEMA, key_columns=["k"])
        first = [row(1, 1.0), row(2, math.nan), row(3, -0.0)]
        table.compare_and_append([(each, 1, 1) for each in first], 0, 2)
        table.allow_compaction(1).result()
        client.compact()
        table.compare_and_append([(row(1, 1.0), 2, -1), (row(4, 4.0), 2, 1)], 2, 3)
    return url


@contextmanager
def set_to(spark, name, value):
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.set(name, before)


def shown(spark, url, *, pushed):
    """Return the keys that pass each filter, as of both times."""
    found = {}
    with set_to(spark, "spark.sql.parquet.filterPushdown", pushed):
        for as_of in (1, 2):
            frame = ps.read(spark, url, "rows", as_of)
            for each in FILTERS:
                found[as_of, each] = sorted(row["k"] for row in frame.where(each).collect())
    return found


def test_pushed_filter_returns_same_rows_as_unpushed_filter(spark, tmp_path):
    url = written(f"file:{tmp_path / 'data'}")
    with set_to(spark, "spark.sql.parquet.datetimeRebaseModeInRead", "LEGACY"):
        found = shown(spark, url, pushed="true")
    assert found == shown(spark, url, pushed="false")
    assert found[2, "x >= 0.0D"] == [2, 3, 4]
    assert found[1, "day = date'1500-01-01'"] == [1, 2, 3]


def test_planted_float_statistics_make_pushed_filter_lose_rows(spark, tmp_path):
    with mock.patch.object(batch, "_ordered_alike", return_value=True):
        url = written(f"file:{tmp_path / 'data'}")
    assert shown(spark, url, pushed="true") != shown(spark, url, pushed="false")


def test_session_with_regex_column_names_is_rejected(spark, tmp_path):
    url = written(f"file:{tmp_path / 'data'}")
    with set_to(spark, door.REGEX_NAMES, "true"), pytest.raises(UsageError, match="quotedRegex"):
        ps.read(spark, url, "rows")


def test_read_with_negative_multiplicity_raises_internal_error(spark, tmp_path):
    url = written(f"file:{tmp_path / 'data'}")
    with persist.open(url, writer="w", settings=by_hand(inline_bytes=0)) as client:
        table = client.collection("rows")
        table.compare_and_append([(row(4, 4.0), 3, -3)], 3, 4)
    with pytest.raises(InternalError, match="less than none"):
        ps.read(spark, url, "rows")
