"""Staged DataFrames for several collections, as the pipeline writes them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.serializers import FramedSerializer
from pyspark.sql import SparkSession
from tests.faults.inspect import litter

import penstock.spark as ps
from penstock import persist
from penstock.errors import TransientError, UsageError
from penstock.persist.append.spark import collected, share_of, stage, written_by
from penstock.persist.append.task import gathered
from penstock.persist.checksum_walk import verify
from penstock.persist.paths import marker_key
from penstock.persist.store import open_store

NUMBERS = pa.schema([("id", pa.int64())])


@pytest.fixture
def url(tmp_path) -> str:
    return f"file:{tmp_path / 'data'}"


def test_two_staged_frames_are_appended_atomically(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    with persist.open(url, writer="pipeline") as client:
        evens = client.create_or_load("evens", schema=NUMBERS)
        odds = client.create_or_load("odds", schema=NUMBERS)
        with client.staging() as staging:
            even = stage(spark.range(0, 1_000, 2), evens, staging, time=5)
            odd = stage(spark.range(1, 1_000, 2), odds, staging, time=5)
            late = client.append_all(
                [persist.AppendTo(evens, even, 0, 6), persist.AppendTo(odds, odd, 3, 6)]
            )
            assert late == persist.UpperMismatch("odds", 0)
            assert evens.upper == odds.upper == 0
            done = client.append_all(
                [persist.AppendTo(evens, even, 0, 6), persist.AppendTo(odds, odd, 0, 6)]
            )
            assert done == persist.Appended(6)
        assert not list(tmp_path.rglob("*.proof"))
        both = ps.read_all(spark, url, ["evens", "odds"])
        assert [frame.count() for frame in both.values()] == [500, 500]
        client.run_maintenance()  # The staging id is used, closed and swept.
        assert even.batch is not None
        with pytest.raises(UsageError, match="is not in use here"):
            client.share_staged(even.batch)
    blob = open_store(url, persist.Settings())
    assert verify(blob).sound
    blob.close()


def test_staged_frame_keeps_its_times_and_diffs(spark: SparkSession, url: str) -> None:
    frame = spark.createDataFrame(
        [(1, 3, 1), (1, 4, -1), (2, 4, 2)], "id long, mz_timestamp long, mz_diff long"
    )
    with persist.open(url, writer="pipeline") as client:
        target = client.create_or_load("numbers", schema=NUMBERS)
        with client.staging() as staging:
            rows = stage(frame, target, staging)
            with pytest.raises(UsageError, match="lies below"):
                target.compare_and_append(rows, 4, 5)
            target.compare_and_append(rows, 0, 5)
        assert [u.data["id"] for u in target.snapshot(3)] == [1]
        assert [(u.data["id"], u.diff) for u in target.snapshot(4)] == [(2, 2)]
    assert ps.read(spark, url, "numbers").collect() == [(2,), (2,)]


def test_staged_rows_that_are_never_appended_are_swept(spark: SparkSession, url: str) -> None:
    with persist.open(url, writer="pipeline") as client:
        target = client.create_or_load("numbers", schema=NUMBERS)
        with client.staging() as staging:
            stage(spark.range(100), target, staging, time=1)
            client.compact()  # Staged files stay while the staging id is open.
            assert len(litter(url)) > 0
        client.compact()
        assert not litter(url)


def test_stage_without_shared_storage_raises_and_writes_nothing(
    spark: SparkSession, url: str
) -> None:
    frame = spark.range(100)
    with persist.open(url, writer="pipeline") as client:
        target = client.create_or_load("numbers", schema=NUMBERS)
        with client.staging() as staging:
            never = marker_key(staging, "never-left")
            share = share_of(frame.schema, target, staging, time=1, marker=never)
            with pytest.raises(UsageError, match="is not shared between the driver and host") as e:
                gathered(written_by(frame, share))
            assert never in e.value.detail
        assert not litter(url)


def test_truncated_result_stream_of_spark_raises_transient_error(
    spark: SparkSession, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FramedSerializer.load_stream

    def broken_off(self: FramedSerializer, stream: Any) -> Iterator[Any]:
        yield from list(whole(self, stream))[:-1]

    frame = spark.range(0, 1_000, 1, 4)
    assert len(collected(frame)) == 1_000
    with persist.open(url, writer="pipeline") as client:
        target = client.create_or_load("numbers", schema=NUMBERS)
        with client.staging() as staging:
            monkeypatch.setattr(FramedSerializer, "load_stream", broken_off)
            with pytest.raises(TransientError, match="before all results"):
                collected(frame)
            with pytest.raises(TransientError, match="before all results"):
                stage(frame, target, staging, time=1)
