"""Progress and remap collections of a source, read through Spark."""

import threading

import pytest
from pyspark.errors import PySparkException

import penstock.spark as ps
from penstock import persist
from penstock.errors import UsageError
from penstock.ingest.loop import IngestLoop
from penstock.testing.clocks import ManualClock
from penstock.testing.sources import ScriptedSource

START = 1_700_000_000_000


@pytest.fixture
def lake(tmp_path):
    """Return a lake whose source has two remap bindings."""
    source, clock = ScriptedSource("kafka"), ManualClock(START)
    source.append(0, "one", "two")
    with persist.open(f"file:{tmp_path}/src", writer="w") as client:
        ingest = IngestLoop(
            "src",
            source,
            client,
            tick_ms=1_000,
            retain_ms=3_600_000,
            clock=clock,
        )
        for words in (["three"], []):
            stop = threading.Event()
            real = source.committed

            def committed(frontier, real=real, stop=stop):
                real(frontier)
                stop.set()

            source.committed = committed
            ingest.run(stop)
            source.committed = real
            source.append(1, *words)
    return f"file:{tmp_path}"


def test_read_of_progress_and_remap_returns_dataframes(spark, lake):
    progress = ps.read(spark, lake, "src_progress").collect()
    assert [(row["partition"], row["offset"]) for row in progress] == [(0, 2), (1, 1)]
    remap = ps.read(spark, lake, "src_remap").collect()
    assert [(row["partition"], row["mz_diff"]) for row in remap] == [(0, 2), (1, 1)]
    both = ps.read_all(spark, lake, ["src_progress", "words"])
    assert both["words"].count() == 3


def test_format_reads_progress_and_remap(spark, lake):
    reader = spark.read.format("penstock").option("location", lake)
    progress = reader.load("src_progress").collect()
    assert [(row["partition"], row["offset"]) for row in progress] == [(0, 2), (1, 1)]
    remap = reader.load("src_remap").collect()
    assert [(row["partition"], row["mz_diff"]) for row in remap] == [(0, 2), (1, 1)]


def test_user_collection_may_have_the_name_of_a_binding_collection(spark, lake):
    ps.append(spark.range(3), lake, "my_remap")
    assert spark.read.format("penstock").option("location", lake).load("my_remap").count() == 3
    with pytest.raises(PySparkException, match='"other_remap" does not exist'):
        spark.read.format("penstock").option("location", lake).load("other_remap")


def test_changes_of_progress_return_one_row_per_remap_binding(spark, lake):
    changes = ps.changes(spark, lake, "src_progress", "earliest", "latest").collect()
    assert [(row["partition"], row["offset"], row["mz_diff"]) for row in changes] == [
        (0, 2, 1),
        (1, 1, 1),
    ]
    first, second = (row["mz_timestamp"] for row in changes)
    assert START <= first < second
    with pytest.raises(persist.SinceError):
        ps.changes(spark, lake, "src_progress", 1, "latest")
    with pytest.raises(persist.NotYetComplete):
        ps.changes(spark, lake, "src_progress", "earliest", second + 10_000_000)


@pytest.mark.parametrize("name", ["src_progress", "src_remap", "mz_objects"])
def test_append_to_a_taken_name_is_rejected_and_creates_nothing(spark, lake, name):
    before = ps.read(spark, lake, "src_progress").collect()
    with pytest.raises(UsageError, match=f'"{name}"'):
        ps.append(spark.range(1), lake, name)
    assert ps.read(spark, lake, "src_progress").collect() == before
    write = spark.range(1).write.format("penstock").mode("append").option("location", lake)
    with pytest.raises(PySparkException, match=name):
        write.save(name)
    ps.append(spark.range(1), lake, "fine")
    assert ps.read(spark, lake, "fine").count() == 1
    with persist.open(f"{lake}/user", hold=False) as client:
        assert client.collections() == ["fine"]
