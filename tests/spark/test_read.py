"""Reads of a lake from Spark: times, columns, plans and holds."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.persist.shop import by_hand

import penstock.spark as ps
from penstock import persist
from penstock.data import Codec
from penstock.durable import open_blob
from penstock.engine.dataframe_lifetime import spark as dataframe_lifetime
from penstock.errors import UsageError
from penstock.persist import INT64, TEXT, NotYetComplete, SinceError
from penstock.persist.errors import CollectionMissing
from penstock.persist.holds import list_holds
from penstock.persist.state import files_of

SCHEMA = pa.schema([("account", pa.string()), ("amount", pa.int64())])

Write = Callable[..., None]


@contextmanager
def opened(url: str, **changed: Any) -> Iterator[persist.Client]:
    chosen = {"inline_bytes": 0, "fan_in": 2, "young_ms": 3_600_000, **changed}
    with persist.open(url, writer="w", settings=by_hand(**chosen)) as client:
        yield client


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'lake'}"


def pay(table: persist.Collection, time: int, *rows: tuple[str, int, int]) -> None:
    table.write([({"account": a, "amount": n}, time, diff) for a, n, diff in rows]).result()
    table.seal(time + 1).result()


@pytest.fixture
def bank(lake: str) -> str:
    """Return a lake with two storage locations whose contents balance at every time."""
    for name, ahead in (("assets", 2), ("debts", 0)):
        with opened(f"{lake}/{name}") as client:
            table = client.create_or_load(f"bank.{name}", schema=SCHEMA, key_columns=["account"])
            for time in range(6 + ahead):
                gone = [("a", time - 1, -1)] if time else []
                pay(table, time, ("a", time, 1), *gone)
            table.allow_compaction(2).result()
            client.compact()
    return lake


# Times.


def test_read_all_from_several_locations_uses_one_time(spark, bank):
    from pyspark.sql import functions as F  # noqa: N812

    both = ps.read_all(spark, bank, ["bank.assets", "bank.debts"])
    assert list(both) == ["bank.assets", "bank.debts"]
    assets, debts = both.values()
    # The latest common time is the latest time of the slower collection.
    assert [tuple(row) for row in debts.collect()] == [("a", 5)]
    joined = assets.join(debts.withColumnRenamed("amount", "owed"), "account")
    assert joined.where(F.col("amount") != F.col("owed")).count() == 0
    assert joined.count() == 1
    at_three = ps.read_all(spark, bank, ["bank.assets", "bank.debts"], 3)
    assert [each.first()["amount"] for each in at_three.values()] == [3, 3]
    earliest = ps.read_all(spark, bank, ["bank.debts", "bank.assets"], "earliest")
    assert [each.first()["amount"] for each in earliest.values()] == [2, 2]


def test_read_below_since_or_beyond_upper_is_rejected(spark, bank):
    with pytest.raises(SinceError, match="as of 1") as past:
        ps.read(spark, bank, "bank.assets", 1)
    assert "since is 2" in past.value.detail
    assert past.value.hint == "Read as of 2 or later."
    with pytest.raises(NotYetComplete, match="as of 6") as future:
        ps.read_all(spark, bank, ["bank.assets", "bank.debts"], 6)
    assert "upper is 6" in future.value.detail
    with pytest.raises(SinceError):
        ps.changes(spark, bank, "bank.assets", 2, 4)
    with pytest.raises(NotYetComplete):
        ps.changes(spark, bank, "bank.debts", 3, 7)
    with pytest.raises(UsageError, match="not a time"):
        ps.read(spark, bank, "bank.assets", "yesterday")
    with pytest.raises(UsageError, match="no collection"):
        ps.read_all(spark, bank, [])


def test_read_of_unsealed_collection_raises_not_yet_complete(spark, lake):
    with opened(f"{lake}/one") as client:
        client.create_or_load("empty", schema=SCHEMA)
    with pytest.raises(NotYetComplete, match="as of 0"):
        ps.read(spark, lake, "empty")


def test_read_of_nonexistent_collection_lists_existing_collections(spark, bank):
    with pytest.raises(CollectionMissing, match=r"bank\.depts") as raised:
        ps.read(spark, bank, "bank.depts")
    assert raised.value.detail == 'Collections there: "bank.assets", "bank.debts".'


def test_read_of_memory_location_raises_usage_error(spark):
    with pytest.raises(UsageError):
        ps.read(spark, "memory:", "rows")


def test_changes_consolidate_to_the_difference_of_contents(spark, bank):
    changes = ps.changes(spark, bank, "bank.assets", 3, 6)
    assert changes.columns == ["account", "amount", "mz_timestamp", "mz_diff"]
    summed = sorted(map(tuple, changes.groupBy("amount").sum("mz_diff").collect()))
    assert [(amount, n) for amount, n in summed if n] == [(2, -1), (5, 1)]


# Columns.


def test_columns_that_differ_only_in_case_need_case_sensitive_session(spark, lake):
    with opened(f"{lake}/one") as client:
        table = client.create_or_load("c", schema=pa.schema([("a", pa.int64()), ("A", pa.int64())]))
        table.write([({"a": 1, "A": 2}, 0, 1)]).result()
        table.seal(1).result()
    with pytest.raises(UsageError, match="differ only in case"):
        ps.read(spark, lake, "c")
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        assert [tuple(row) for row in ps.read(spark, lake, "c").collect()] == [(1, 2)]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


class Doubled:
    """Codec of integers whose second version stores twice the number."""

    name = "doubled"
    stored_as = pa.int64()

    def __init__(self, version: int) -> None:
        self.version = version

    def encode(self, value: Any) -> Any:
        return value * self.version

    def decode(self, stored: Any, version: int) -> Any:
        return stored // version


def test_read_of_key_value_collection_returns_stored_values(spark, lake):
    with opened(f"{lake}/one") as client:
        pairs = client.create_or_load("pairs", key=TEXT, value=INT64)
        pairs.write([(("a", 1), 0, 1), (("b", 2), 0, 2)]).result()
        pairs.seal(1).result()
    frame = ps.read(spark, lake, "pairs")
    assert frame.columns == ["key", "value"]
    assert sorted(map(tuple, frame.collect())) == [("a", 1), ("b", 2), ("b", 2)]


def test_read_of_several_codec_versions_raises_usage_error(spark, lake):
    old: Codec = Doubled(1)
    new: Codec = Doubled(2)
    with opened(f"{lake}/one") as client:
        pairs = client.create_or_load("pairs", key=TEXT, value=old)
        pairs.write([(("a", 1), 0, 1)]).result()
        pairs.seal(1).result()
    with opened(f"{lake}/one") as client:
        pairs = client.create_or_load("pairs", key=TEXT, value=new)
        pairs.write([(("a", 1), 1, -1)]).result()
        pairs.seal(2).result()
    with pytest.raises(UsageError, match="several versions of a codec"):
        ps.read(spark, lake, "pairs").collect()


# Plans.


def explained(frame: Any) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


def test_read_of_base_pushes_filters_and_columns_and_does_not_shuffle(spark, bank):
    base = ps.read(spark, bank, "bank.assets", 2)
    plan = explained(base.where("amount > 1").select("account"))
    assert "PushedFilters: [IsNotNull(amount), GreaterThan(amount,1)]" in plan
    assert "ReadSchema: struct<account:string,amount:bigint>" in plan
    assert "mz_diff" not in plan
    assert "Exchange" not in plan
    assert "ReadSchema: struct<account:string>" in explained(base.select("account"))


def test_read_plans_only_files_of_batches_within_its_times(spark, lake):
    with opened(f"{lake}/one") as client:
        table = client.create_or_load("rows", schema=SCHEMA)
        for time in range(3):
            pay(table, time, ("a", time, 1))
        files = [key for batch in table.state.batches for key in files_of(batch)]
    assert len(files) == 3

    def names(frame: Any) -> list[str]:
        return sorted(Path(each).name for each in frame.inputFiles())

    def expected(*chosen: int) -> list[str]:
        return sorted(Path(files[i]).name for i in chosen)

    assert names(ps.read(spark, lake, "rows", 0)) == expected(0)
    assert names(ps.read(spark, lake, "rows", 1)) == expected(0, 1)
    assert names(ps.changes(spark, lake, "rows", 1, 2)) == expected(1)


# Holds.


def let_go(spark: Any, lake: str) -> None:
    """Collect garbage in Python and Java until unreferenced holds are released."""
    for _ in range(20):
        gc.collect()
        spark._jvm.System.gc()
        dataframe_lifetime._WATCH.check()
        if not any(url.startswith(lake) for url in ps.READINGS.statistics()):
            return
    raise AssertionError(ps.READINGS.statistics())


def test_files_of_frame_are_held_until_its_last_reference_is_released(spark, bank):
    let_go(spark, bank)
    url = f"{bank}/assets"
    folder = Path(url.removeprefix("file:"))
    frame = ps.read(spark, bank, "bank.assets", 4)
    derived = frame.where("amount > 0")
    files = {Path(each.removeprefix("file:")) for each in frame.inputFiles()}
    assert files
    del frame
    gc.collect()
    dataframe_lifetime._WATCH.check()
    with opened(url) as client:
        client.collection("bank.assets").allow_compaction(7).result()
        client.compact()
        assert all(file.exists() for file in files)
        assert client.collection("bank.assets").state.since <= 4
    assert [tuple(row) for row in derived.collect()] == [("a", 4)]
    assert len(list_holds(open_blob(url))) == 1
    del derived
    let_go(spark, bank)
    assert list_holds(open_blob(url)) == {}
    with opened(url) as client:
        client.compact()
        client.compact()
        assert client.collection("bank.assets").state.since == 7
        linked = {
            key for b in client.collection("bank.assets").state.batches for key in files_of(b)
        }
        kept = {str(each.relative_to(folder)) for each in folder.glob("batch/*/*")}
        assert kept == linked
    assert not any(file.exists() for file in files)


def test_read_without_hold_raises_usage_error_after_compaction(spark, bank):
    frame = ps.read(spark, bank, "bank.assets", 4, hold=False)
    url = f"{bank}/assets"
    assert list_holds(open_blob(url)) == {}
    with opened(url) as client:
        client.collection("bank.assets").allow_compaction(7).result()
        client.compact()
        client.compact()
    with pytest.raises(UsageError, match="was compacted away while it was being read"):
        frame.collect()


# Appends.


def test_append_with_other_columns_or_key_is_rejected_and_writes_nothing(spark, lake):
    frame = spark.createDataFrame([(1, None)], "id long, name string")
    ps.append(frame, lake, "mine")
    with pytest.raises(UsageError, match="do not have the columns"):
        ps.append(frame.drop("name"), lake, "mine")
    with pytest.raises(UsageError, match="another key"):
        ps.append(frame, lake, "mine", key=["id"])
    assert ps.read(spark, lake, "mine").count() == 1
