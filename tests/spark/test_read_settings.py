"""Session settings that a read requires, and its choice of join."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import penstock.spark as ps
from penstock import persist
from penstock.errors import UsageError
from penstock.persist.scan import spark as scan_spark

PAIRS = pa.schema([("k", pa.string()), ("n", pa.int64())])


def pair(k: str, n: int) -> dict[str, Any]:
    return {"k": k, "n": n}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a base of three rows and deltas that replace one of them."""
    url = f"file:{tmp_path / 'data'}"
    settings = persist.Settings(background=False, inline_bytes=0, upkeep_ms=0, settle_ms=0)
    with persist.open(url, writer="w", settings=settings) as client:
        pairs = client.create_or_load("pairs", schema=PAIRS, key_columns=["k"])
        pairs.compare_and_append([(pair(k, 1), 1, 1) for k in "abc"], 0, 2)
        pairs.allow_compaction(1).result()
        for _ in range(3):
            client.run_maintenance()
        client.compact()
        pairs.compare_and_append([(pair("b", 1), 2, -1), (pair("b", 2), 2, 1)], 2, 3)
        assert any(batch.distinct for batch in pairs.state.batches)
    return url


def test_read_as_of_a_datetime_equals_read_as_of_its_milliseconds(
    spark: SparkSession, url: str
) -> None:
    frame = ps.read(spark, url, "pairs", as_of=datetime(1970, 1, 1, 0, 0, 0, 1_999, tzinfo=UTC))
    assert sorted(map(tuple, frame.collect())) == [("a", 1), ("b", 1), ("c", 1)]
    with pytest.raises(UsageError, match="has no time zone"):
        ps.read(spark, url, "pairs", as_of=datetime(1970, 1, 1))  # noqa: DTZ001


@pytest.fixture
def by_shuffles(spark: SparkSession) -> Iterator[None]:
    """Disable automatic broadcasts: only an explicit hint broadcasts."""
    name = "spark.sql.autoBroadcastJoinThreshold"
    before = spark.conf.get(name)
    spark.conf.set(name, "-1")
    yield
    spark.conf.set(name, str(before))


@pytest.mark.parametrize(
    ("rows", "size", "broadcast"), [(10, 1 << 20, True), (10, 1, False), (1, 1 << 20, False)]
)
@pytest.mark.parametrize("local_bytes", [-1, 1 << 20])
def test_keys_are_broadcast_only_if_few_and_small(
    spark: SparkSession,
    url: str,
    by_shuffles: None,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    size: int,
    broadcast: bool,
    local_bytes: int,
) -> None:
    monkeypatch.setattr(scan_spark, "HERE_BYTES", local_bytes)
    monkeypatch.setattr(scan_spark, "BROADCAST_ROWS", rows)
    monkeypatch.setattr(scan_spark, "BROADCAST_BYTES", size)
    frame = ps.read(spark, url, "pairs")
    plan: Any = frame._jdf.queryExecution().executedPlan().toString()
    assert ("BroadcastHashJoin" in plan) == broadcast
    assert sorted(map(tuple, frame.collect())) == [("a", 1), ("b", 2), ("c", 1)]


@pytest.mark.parametrize("listed", ["", "csv,json"])
def test_session_with_other_parquet_reader_is_rejected_naming_the_setting(
    spark: SparkSession, url: str, listed: str
) -> None:
    before = ps.READINGS.statistics().get(url, 0)
    spark.conf.set(scan_spark.V1_SOURCES, listed)
    try:
        for read in (ps.read, lambda *given: ps.changes(*given, 2, 3)):
            with pytest.raises(UsageError, match="does not include parquet") as met:
                read(spark, url, "pairs")
            assert f'spark.conf.unset("{scan_spark.V1_SOURCES}")' in met.value.hint
        assert ps.READINGS.statistics().get(url, 0) == before, "a failed read holds nothing"
        for sufficient in ("Parquet , csv", max(scan_spark.PARQUET)):
            spark.conf.set(scan_spark.V1_SOURCES, sufficient)
            assert ps.read(spark, url, "pairs").count() == 3
    finally:
        spark.conf.unset(scan_spark.V1_SOURCES)
    assert ps.read(spark, url, "pairs").count() == 3
