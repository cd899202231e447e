"""Initial snapshots read by Spark tasks, in threads and in separate processes.

A snapshot in one process gives the same contents and errors.
"""

import os
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import yaml
from msgspec.structs import replace as replaced

import penstock.ingest
from penstock import persist
from penstock.errors import (
    DefiniteError,
    DeterminateError,
    InternalError,
    PenstockError,
    StoreRefused,
    TransientError,
)
from penstock.ingest.snapshot_loader import IngestJobs, SnapshotLoader
from penstock.ingest.spark import tasks_of
from penstock.persist.lake import find_collection
from penstock.persist.merge.spark import SparkMerges
from penstock.persist.state import Inline
from penstock.sources.postgres import snapshot as copying


@pytest.fixture
def pipeline(database, tmp_path):
    """Return a pipeline file with a table of several pages."""
    database.sql("CREATE TABLE item (id int PRIMARY KEY, name text, price numeric(10, 2))")
    database.sql("INSERT INTO item SELECT g, 'n' || g, g * 1.5 FROM generate_series(1, 5000) g")
    database.sql("CREATE PUBLICATION penstock FOR TABLE item")
    file = tmp_path / "pipeline.yaml"
    source = {"shop": {"postgres": {"url": database.url(), "snapshot_tasks": 3}}}
    lake = {"location": f"file:{tmp_path}/lake", "tick": "100ms", "sources": source}
    file.write_text(yaml.safe_dump(lake))
    return file


def stored(folder) -> list[tuple[object, ...]]:
    client, found = find_collection(
        f"file:{folder}/lake", "shop.public.item", hold=False, settings=persist.Settings()
    )
    with client:
        return sorted(tuple(each.data.values()) for each in found.snapshot(found.upper - 1))


def test_initial_snapshot_read_by_spark_tasks_equals_table(
    database, pipeline, tmp_path, spark, monkeypatch
):
    monkeypatch.setattr(copying, "PAGES_WORTH_A_TASK", 4)
    penstock.ingest.run(pipeline, once=True, jobs=tasks_of(spark), spark_bytes=0)
    assert stored(tmp_path) == sorted(database.sql("SELECT * FROM item"))


def test_initial_snapshot_read_by_executor_processes_equals_table(
    database, pipeline, tmp_path, cluster
):
    cluster.run("ingested", file=str(pipeline))
    assert stored(tmp_path) == sorted(database.sql("SELECT * FROM item"))


def test_resync_and_truncate_by_spark_tasks_equal_table(
    database, pipeline, tmp_path, spark, monkeypatch
):
    monkeypatch.setattr(copying, "PAGES_WORTH_A_TASK", 4)
    small_merges(monkeypatch)
    differing, jobs = SparkMerges.difference, []

    def watched(merges, *given, **named):
        made = differing(merges, *given, **named)
        jobs.append(0 if made is None else made.rows)
        return made

    monkeypatch.setattr(SparkMerges, "difference", watched)

    def follow() -> None:
        penstock.ingest.run(pipeline, once=True, jobs=tasks_of(spark), spark_bytes=0)

    follow()
    # A table rewrite sends no logical changes, so the table is resynced.
    database.sql("ALTER TABLE item ALTER price TYPE numeric(10, 2) USING price + id % 2")
    follow()
    assert jobs == [5000]
    assert stored(tmp_path) == sorted(database.sql("SELECT * FROM item"))
    database.sql(
        "BEGIN; DELETE FROM item WHERE id = 1; TRUNCATE item; INSERT INTO item VALUES (7); COMMIT"
    )
    follow()
    # The deleted row is counted: changes before the TRUNCATE are not resolved.
    assert jobs == [5000, 5000]
    assert stored(tmp_path) == [(7, None, None)]


def small_merges(monkeypatch) -> None:
    """Set the merge limit so low that every resync runs on Spark."""
    opened = persist.open

    def open_with_small_merges(*given, settings=None, **named):
        small = replace(settings or persist.Settings(), merge_bytes=1)
        return opened(*given, settings=small, **named)

    monkeypatch.setattr(persist, "open", open_with_small_merges)


def errors_of(pipeline, jobs: IngestJobs | None) -> dict[str, Any]:
    """Ingest once, and return the recorded error fields by table."""
    with suppress(DefiniteError):  # Raised if a table is errored.
        penstock.ingest.run(pipeline, once=True, jobs=jobs, spark_bytes=0)
    with persist.open(f"file:{pipeline.parent}/lake/shop", hold=False) as client:
        state = client.collection("shop/state")
        notes = {each.data[0]: each.data[1] for each in state.snapshot(state.upper - 1)}
    tables = [each for name, each in notes.items() if name.startswith("table/")]
    return {
        each["described"]["name"]: {
            name: told for name, told in each.items() if name.startswith("error")
        }
        for each in tables
    }


@pytest.fixture
def two(database, pipeline):
    """Return `pipeline` with one more table."""
    database.sql("CREATE TABLE other (id int PRIMARY KEY); INSERT INTO other VALUES (1)")
    database.sql("ALTER PUBLICATION penstock ADD TABLE other")
    return pipeline


NOT_A_NUMBER = "ALTER TABLE item ALTER price TYPE numeric(10, 2) USING 'NaN'"


def is_only_in_item(errors: dict[str, Any]) -> bool:
    return bool(errors["item"]["error"]) and not errors["other"]["error"]


def test_unsupported_value_in_spark_snapshot_marks_only_its_table_errored(database, two, spark):
    database.sql(NOT_A_NUMBER)
    errors = errors_of(two, tasks_of(spark))
    assert is_only_in_item(errors)
    assert errors["item"]["error_detail"]
    assert errors == errors_of(beside(two), None)


def test_unsupported_value_in_spark_resync_marks_only_its_table_errored(database, two, spark):
    pipelines = {two: tasks_of(spark), beside(two): None}
    for each, jobs in pipelines.items():
        assert not any(told["error"] for told in errors_of(each, jobs).values())
    database.sql(NOT_A_NUMBER)
    by_tasks, in_process = (errors_of(each, jobs) for each, jobs in pipelines.items())
    assert is_only_in_item(by_tasks)
    assert by_tasks == in_process


def beside(pipeline):
    """Return a copy of the pipeline file with another lake."""
    folder = pipeline.parent / "beside"
    folder.mkdir()
    told = yaml.safe_load(pipeline.read_text())
    copy = folder / pipeline.name
    copy.write_text(yaml.safe_dump({**told, "location": f"file:{folder}/lake"}))
    return copy


class Dies:
    """Split that ends the process that reads it."""

    def read(self, stop=None):
        os._exit(7)


class TroubledOnce:
    """Ingest jobs on Spark that alter the splits of the first read."""

    def __init__(self, by: IngestJobs, happens: Callable[[Any], Any]) -> None:
        self.by = by
        self.happens: Callable[[Any], Any] | None = happens

    def read(self, share, splits, watch):
        happens, self.happens = self.happens, None
        if happens is not None:
            splits = [happens(each) for each in splits]
        return self.by.read(share, splits, watch)

    def merges(self, url):
        return self.by.merges(url)


def without_server(split):
    return replace(split, parameters={**split.parameters, "port": "1"})


def without_snapshot(split):
    return replace(split, snapshot="0000FFFF-0000FFFF-1")


@pytest.mark.parametrize(
    "happens",
    [without_server, without_snapshot, lambda _: Dies()],
    ids=["server", "snapshot", "worker"],
)
def test_snapshot_interrupted_by_lost_server_or_worker_is_repeated(
    database, pipeline, tmp_path, spark, happens
):
    jobs = TroubledOnce(tasks_of(spark), happens)
    assert errors_of(pipeline, jobs)["item"]["error"] == ""
    assert jobs.happens is None
    assert stored(tmp_path) == sorted(database.sql("SELECT * FROM item"))


def test_resync_after_failed_spark_job_is_repeated(
    database, pipeline, tmp_path, spark, monkeypatch
):
    small_merges(monkeypatch)
    differing, raised = SparkMerges.difference, []

    def broken_once(merges, collection, minus, plus, staging, *, time):
        if raised:
            return differing(merges, collection, minus, plus, staging, time=time)
        minus = [replaced(each, parts=(Inline(b"not a message"),)) for each in minus]
        with pytest.raises(TransientError) as told:
            differing(merges, collection, minus, plus, staging, time=time)
        raised.append(told.value)
        raise told.value

    monkeypatch.setattr(SparkMerges, "difference", broken_once)
    errors_of(pipeline, tasks_of(spark))
    database.sql("ALTER TABLE item ALTER price TYPE numeric(10, 2) USING price + id % 2")
    errors_of(pipeline, tasks_of(spark))
    assert 'could not compare collection "shop.public.item"' in str(raised[0])
    assert raised[0].detail.startswith("pyarrow.lib.ArrowInvalid: Expected to read")
    assert stored(tmp_path) == sorted(database.sql("SELECT * FROM item"))


class Broken:
    """Split whose read raises an error."""

    def __init__(self, error: PenstockError) -> None:
        self.error = error

    def read(self, stop: threading.Event | None = None) -> Generator[pa.RecordBatch, None, None]:
        yield pa.record_batch({"a": pa.array([1], pa.int64())})
        raise self.error


def with_code(error: PenstockError) -> PenstockError:
    error.__dict__["sqlstate"] = "22P02"
    return error


def outcome(jobs: IngestJobs | None, folder, error: PenstockError) -> PenstockError:
    """Return the error of a snapshot, and assert that no batch is linked."""
    with persist.open(f"file:{folder}/x", writer="w") as client:
        loader = SnapshotLoader(client, "src", jobs=jobs, spark_bytes=0)
        loader.create("src.t", pa.schema([("a", pa.int64())]), ["a"])
        load = loader.load("src.t", [Broken(error)], size=1)
        with pytest.raises(PenstockError) as raised:
            load.result()
        load.abandon()
        loader.close()
        assert client.collection("src.t").state.batches == ()
    return raised.value


@pytest.mark.parametrize(
    "error",
    [
        PenstockError("broken piece"),
        with_code(DefiniteError("broken row", detail="It is.", hint="Mend it.")),
        TransientError("broken line", detail="It is.", hint="Wait."),
        StoreRefused("no room"),
        InternalError("broken promise"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_of_split_in_spark_task_equals_error_in_process(spark, tmp_path, error):
    for jobs in (None, tasks_of(spark)):
        told = outcome(jobs, tmp_path, error)
        assert type(told) is type(error)
        assert str(told) == str(error)
        assert (told.sqlstate, told.__dict__) == (error.sqlstate, error.__dict__)


def test_determinate_error_after_spark_retries_is_transient(spark, tmp_path):
    told = outcome(tasks_of(spark), tmp_path, DeterminateError("the store is away"))
    assert isinstance(told, TransientError)
    assert str(told) == f'Spark could not read collection "src.t" of location "file:{tmp_path}/x"'
    assert told.detail == "penstock.errors.DeterminateError: the store is away."


class Endless:
    """Split that yields rows until the task is cancelled."""

    def __init__(self, begun) -> None:
        self.begun = begun

    def read(self, stop=None):
        self.begun.touch()
        while True:
            yield pa.record_batch({"k": pa.array([1])})
            threading.Event().wait(0.05)


def test_stop_cancels_spark_jobs_of_snapshot(spark, tmp_path):
    stop, begun = threading.Event(), tmp_path / "begun"
    with persist.open(f"file:{tmp_path}/x", writer="w") as client:
        loader = SnapshotLoader(client, "src", jobs=tasks_of(spark), spark_bytes=0, stop=stop)
        loader.create("src.t", pa.schema([("k", pa.int64())]), ["k"])
        copy = loader.load("src.t", [Endless(begun)], size=1)
        while not begun.exists():
            assert not copy.done()
            stop.wait(0.05)
        stop.set()
        with pytest.raises(TransientError, match="Spark could not read collection"):
            copy.result()
        loader.close()
    assert not spark.sparkContext.statusTracker().getActiveJobsIds()
