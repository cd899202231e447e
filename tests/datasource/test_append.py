"""`df.write.format("penstock")` on the real Spark."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import LongType, StructField, StructType

import penstock.spark as ps
from penstock import persist
from penstock.datasource.append.spark import CollectionWriter
from penstock.errors import UsageError
from penstock.persist.append.user_collections import open_for_job
from tests.faults.inspect import litter

ROWS = 1_000


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'lake'}"


def numbers(spark: SparkSession, rows: int = ROWS) -> DataFrame:
    return spark.range(0, rows, 1, 4).selectExpr("id", "id % 7 as part", "cast(id as string) name")


def write(frame: DataFrame, lake: str, mode: str = "append", **options: str) -> None:
    frame.write.format("penstock").mode(mode).options(location=lake, **options).save("mine")


def rejection(frame: DataFrame, lake: str, mode: str = "append", **options: str) -> str:
    # An error of the commit arrives as a JVM exception with our text.
    with pytest.raises((PySparkException, Py4JJavaError)) as caught:
        write(frame, lake, mode, **options)
    return str(caught.value)


def test_write_appends_rows_at_the_next_time(spark: SparkSession, lake: str) -> None:
    write(numbers(spark), lake, key="id")
    first = ps.read(spark, lake, "mine")
    write(numbers(spark, 10), lake)
    assert first.count() == ROWS  # A DataFrame stays at its time.
    both = ps.read(spark, lake, "mine")
    assert both.count() == ROWS + 10
    assert both.where("id = 3").collect() == [(3, 3, "3")] * 2
    with persist.open(f"{lake}/user", hold=False) as client:
        assert client.state.writer is None
        assert client.collection("mine").state.schemas[-1].key == ("id",)
    assert not litter(f"{lake}/user")


def test_write_with_wrong_schema_or_mode_writes_nothing(spark: SparkSession, lake: str) -> None:
    frame = numbers(spark)
    write(frame, lake)
    assert "rows do not have the columns" in rejection(frame.drop("part"), lake)
    assert 'column "part"' in rejection(frame.withColumn("part", frame.name), lake)
    assert 'does not support mode "overwrite"' in rejection(frame, lake, "overwrite")
    assert 'no option "locktimout"' in rejection(frame, lake, lockTimout="1s")
    assert "has another key" in rejection(frame, lake, key="name")
    assert ps.read(spark, lake, "mine").count() == ROWS
    write(frame, lake)  # None of the failed writes left the lock behind.


def test_null_in_required_column_fails_the_job_and_releases_the_lock(
    spark: SparkSession, lake: str
) -> None:
    with persist.open(f"{lake}/user", writer="maker") as client:
        columns = pa.schema([pa.field("id", pa.int64(), nullable=False)])
        client.create_or_load("mine", schema=columns)
    frame = spark.range(100).selectExpr("nullif(id, 50) as id")
    assert 'column "id" for collection "mine" holds nulls' in rejection(frame, lake)
    write(spark.range(10), lake)
    assert ps.read(spark, lake, "mine").count() == 10


def test_failed_job_writes_nothing_and_releases_the_lock(spark: SparkSession, lake: str) -> None:
    broken = numbers(spark).selectExpr("if(id = 999, raise_error('no'), id) as id")
    with pytest.raises((PySparkException, Py4JJavaError)):
        write(broken, lake)
    write(numbers(spark).select("id"), lake)
    with persist.open(f"{lake}/user", writer="upkeep") as client:
        client.compact()
    assert not litter(f"{lake}/user")
    assert ps.read(spark, lake, "mine").count() == ROWS


def test_write_to_source_collection_is_rejected(spark: SparkSession, lake: str) -> None:
    columns = pa.schema([("id", pa.int64())])
    with persist.open(f"{lake}/shop", writer="source") as client:
        client.create_or_load("mine", schema=columns)
    assert "belongs to storage location" in rejection(spark.range(1), lake)
    with persist.open(f"{lake}/user", writer="source") as client:
        client.create_or_load("orders", schema=columns, owner='source "shop"')
    with pytest.raises(UsageError) as caught:
        ps.append(spark.range(1), lake, "orders")
    assert 'belongs to source "shop"' in str(caught.value)


def test_concurrent_jobs_append_one_after_the_other(spark: SparkSession, lake: str) -> None:
    with persist.open(f"{lake}/user", writer="other"):
        said = rejection(spark.range(1), lake, lockTimeout="1s")
    assert 'is being written by "other"' in said
    write(spark.range(1), lake)


def test_task_without_shared_storage_fails_the_job(tmp_path: Path) -> None:
    """Drive the writer as Spark does, with a path that is another folder in the task."""
    driver, other, path = tmp_path / "driver", tmp_path / "other", tmp_path / "data"
    for folder in (driver, other):
        (folder / "user").mkdir(parents=True)
    path.symlink_to(driver)
    columns = StructType([StructField("id", LongType())])
    writer = CollectionWriter(
        columns, location=f"file:{path}", collection="mine", key=(), patience_ms=0
    )
    assert len(litter(f"file:{path}/user")) == 1
    path.unlink()
    path.symlink_to(other)
    told = writer.write(iter([pa.record_batch({"id": [1]})]))
    path.unlink()
    path.symlink_to(driver)
    with pytest.raises(UsageError, match="is not shared between the driver and host"):
        writer.commit([told])
    writer.abort([told])
    assert not [path for path in other.rglob("*") if path.is_file()]
    assert not litter(f"file:{path}/user")
    with persist.open(f"file:{path}/user", hold=False) as client:
        assert client.state.writer is None
        assert client.collections() == []


def test_lock_of_dead_job_is_released(lake: str, tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    settings = persist.Settings(background=False)
    left = open_for_job(f"{lake}/user", patience_ms=0, settings=settings, pid=dead.pid)
    with left.staging() as staging:
        handoff = left.hand_over(staging)
    next_one = open_for_job(f"{lake}/user", patience_ms=0, settings=settings)
    with (
        next_one,
        pytest.raises(persist.LockHeld),
    ):  # This job is alive.
        open_for_job(f"{lake}/user", patience_ms=0, settings=settings)
    assert handoff.writer.startswith(f"spark-{socket.gethostname()}-{dead.pid}-")
    assert str(os.getpid()) != str(dead.pid)


def test_timestamps_and_nulls_round_trip(spark: SparkSession, lake: str) -> None:
    ms = pa.time32("ms")
    columns = pa.schema([("t", ms), ("ts", pa.list_(ms)), ("nothing", pa.null())])
    with persist.open(f"{lake}/user", writer="maker") as client:
        client.create_or_load("mine", schema=columns)
    write(spark.range(3).selectExpr("id t", "array(id, null) ts", "int(null) nothing"), lake)
    rows = sorted(map(tuple, ps.read(spark, lake, "mine").collect()))
    assert rows == [(n, [n, None], None) for n in range(3)]
    large = spark.sql("select 4294967296 t, array(1L) ts, int(null) nothing")
    assert 'a value in column "t" does not fit collection "mine"' in rejection(large, lake)
    with pytest.raises(Exception, match='a value in column "t" does not fit'):
        ps.append(large, lake, "mine")
    assert ps.read(spark, lake, "mine").count() == 3
