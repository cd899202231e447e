"""Collections that begin and fail, read as DataFrames, data source and streams."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import penstock.spark as ps
from penstock import persist
from penstock.datasource.follower import Follower, find_streamed
from penstock.datasource.options import StreamOptions
from penstock.datasource.read_task import updates_of
from penstock.persist import AppendTo, Begin, Client, CollectionErrored, Fail, Recover, SinceError

SETTINGS = persist.Settings(background=False, notify="")
NUMBERS = pa.schema([pa.field("n", pa.int64(), metadata={b"penstock.label": b"bigint"})])
LOST = persist.StoredError("SlotLost", "slot is gone", "It was dropped.", "Copy again.")


def numbers(*updates: tuple[int, int]) -> list[Any]:
    return [({"n": n}, time, 1) for n, time in updates]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'shop'}"


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with persist.open(url, writer="w", settings=SETTINGS) as client:
        for name in ("orders", "well"):
            made = client.create_or_load(name, schema=NUMBERS)
            append = AppendTo(made, numbers((1, 5), (2, 7)), 0, 8)
            client.append_all([append], [Begin(made, 5)])
        yield client


def fail(client: Client) -> None:
    orders, well = client.collection("orders"), client.collection("well")
    client.append_all(
        [AppendTo(orders, numbers((3, 9), (4, 10)), 8, 20), AppendTo(well, [], 8, 20)],
        [Fail(orders, 10, LOST)],
    )


def test_read_of_errored_collection_raises_from_its_error_time(
    spark: SparkSession, client: Client, url: str
) -> None:
    fail(client)
    assert sorted(row.n for row in ps.read(spark, url, "orders", 9).collect()) == [1, 2, 3]
    for as_of in (None, "latest", 10, 19):
        with pytest.raises(CollectionErrored, match="slot is gone"):
            ps.read(spark, url, "orders", as_of)
    with pytest.raises(CollectionErrored):
        ps.read_all(spark, url, ["well", "orders"])
    assert ps.read(spark, url, "well").count() == 2
    with pytest.raises(SinceError, match="as of 4") as early:
        ps.read(spark, url, "orders", 4)
    assert "begins at 5" in early.value.detail
    assert [row.n for row in ps.changes(spark, url, "orders", 8, 10).collect()] == [3]
    before = ps.READINGS.statistics().get(url, 0)
    for upper in (11, "latest"):
        with pytest.raises(CollectionErrored, match="as of 10"):
            ps.changes(spark, url, "orders", 8, upper)
    assert ps.READINGS.statistics().get(url, 0) <= before, "a failed read holds nothing"


def test_read_of_recovered_collection_returns_rows(
    spark: SparkSession, client: Client, url: str
) -> None:
    fail(client)
    orders = client.collection("orders")
    client.append_all([AppendTo(orders, numbers((5, 25)), 20, 30)], [Recover(orders, 25)])
    assert sorted(row.n for row in ps.read(spark, url, "orders").collect()) == [1, 2, 3, 4, 5]
    assert ps.changes(spark, url, "orders", 26, 30).count() == 0
    with pytest.raises(CollectionErrored):
        ps.changes(spark, url, "orders", 8, 30)


def test_data_source_of_errored_collection_raises_after_earlier_rows(
    spark: SparkSession, client: Client, url: str, tmp_path: Path
) -> None:
    reader = spark.read.format("penstock").option("location", url)
    fail(client)
    assert sorted(r.n for r in reader.option("asOf", "9").load("orders").collect()) == [1, 2, 3]
    with pytest.raises(PySparkException, match="slot is gone"):
        reader.option("asOf", "latest").load("orders").collect()

    given: list[int] = []

    def sink(batch: DataFrame, _number: int) -> None:
        given.extend(row.n for row in batch.collect())

    stream = spark.readStream.format("penstock").options(location=url, startAt="earliest")
    query = (
        stream.load("orders")
        .writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    with pytest.raises(PySparkException, match="slot is gone"):
        query.awaitTermination(120)
    assert sorted(given) == [1, 2, 3]


def follower(url: str, **options: Any) -> Follower:
    asked = StreamOptions(location=url, collection="orders", **options)
    return Follower(find_streamed(asked), asked, settings=SETTINGS)


def test_follower_of_errored_collection_stops_at_error_time(client: Client, url: str) -> None:
    following = follower(url, start_at="earliest")
    start = following.initial()
    fail(client)
    end = following.latest(start, None)
    assert end.upper == 10
    tables = [table for task in following.plan(start, end) for table in updates_of(task)]
    assert sorted(n for table in tables for n in table["n"].to_pylist()) == [1, 2, 3]
    for _ in range(2):
        with pytest.raises(CollectionErrored, match="as of 10"):
            following.latest(end, None)
    following.stop()
    # A plan that includes the error time raises the error.
    until_now = follower(url, start_at="8")
    begun = until_now.initial()
    with pytest.raises(CollectionErrored):
        until_now.plan(begun, begun.up_to(20))
    until_now.stop()


def test_waiting_follower_starts_at_the_begin_time_of_the_collection(url: str) -> None:
    with persist.open(url, writer="w", settings=SETTINGS) as client:
        orders = client.create_or_load("orders", schema=NUMBERS)
        following = follower(url, start_at="latest")
        start = following.initial()
        orders.write(numbers((1, 7), (2, 55))).result()
        client.append_all([AppendTo(orders, [], 0, 60)], [Begin(orders, 50)])
        for limit, upper, given in ((None, 60, [(1, 50), (2, 55)]), (1, 51, [(1, 50)])):
            end = following.latest(start, limit)
            assert end.upper == upper
            tables = [table for task in following.plan(start, end) for table in updates_of(task)]
            rows = [row for table in tables for row in table.to_pylist()]
            assert [(row["n"], row["mz_timestamp"]) for row in rows] == given
        following.stop()
