"""A first copy read by Spark's tasks is the table, in threads and in processes of its own."""

import threading

import pyarrow as pa
import pytest
import yaml

import penstock.ingest
from penstock import persist
from penstock.errors import PenstockError
from penstock.ingest.loading import Loader
from penstock.ingest.spark import tasks_of
from penstock.persist.find import find_collection
from penstock.persist.merging.spark import SparkMerges
from penstock.sources.postgres import snapshot as copying


@pytest.fixture
def pipeline(database, tmp_path):
    """A file that follows a table of some pages."""
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


def test_pieces_are_read_by_tasks(database, pipeline, tmp_path, spark, monkeypatch):
    monkeypatch.setattr(copying, "PAGES_WORTH_A_TASK", 4)
    penstock.ingest.run(pipeline, once=True, many=tasks_of(spark), spark_bytes=0)
    assert stored(tmp_path) == sorted(database.sql("SELECT * FROM item"))


def test_pieces_are_read_by_executors_that_are_processes(database, pipeline, tmp_path, cluster):
    cluster.run("ingested", file=str(pipeline))
    assert stored(tmp_path) == sorted(database.sql("SELECT * FROM item"))


def test_tables_are_compared_and_emptied_by_tasks(database, pipeline, tmp_path, spark, monkeypatch):
    monkeypatch.setattr(copying, "PAGES_WORTH_A_TASK", 4)
    opened = persist.open
    small = persist.Settings(merge_bytes=1)
    monkeypatch.setattr(persist, "open", lambda *a, **named: opened(*a, settings=small, **named))
    differing, jobs = SparkMerges.difference, []

    def watched(merges, *given, **named):
        made = differing(merges, *given, **named)
        jobs.append(0 if made is None else made.rows)
        return made

    monkeypatch.setattr(SparkMerges, "difference", watched)

    def follow() -> None:
        penstock.ingest.run(pipeline, once=True, many=tasks_of(spark), spark_bytes=0)

    follow()
    # A rewrite without a message: the table is compared.
    database.sql("ALTER TABLE item ALTER price TYPE numeric(10, 2) USING price + id % 2")
    follow()
    assert jobs == [5000]
    assert stored(tmp_path) == sorted(database.sql("SELECT * FROM item"))
    database.sql(
        "BEGIN; DELETE FROM item WHERE id = 1; TRUNCATE item; INSERT INTO item VALUES (7); COMMIT"
    )
    follow()
    assert jobs == [5000, 4999]
    assert stored(tmp_path) == [(7, None, None)]


class Broken:
    """A piece that cannot be read."""

    def read(self):
        raise PenstockError("broken piece")


def test_a_piece_that_cannot_be_read_is_told_and_nothing_is_linked(spark, tmp_path):
    with persist.open(f"file:{tmp_path}/x", writer="w") as client:
        loader = Loader(client, "src", many=tasks_of(spark), spark_bytes=0)
        loader.make("src.t", pa.schema([("a", pa.int64())]), ["a"])
        load = loader.load("src.t", [Broken()], size=1)
        for _ in range(600):
            if load.done():
                break
            threading.Event().wait(0.1)
        with pytest.raises(Exception, match="broken piece"):
            load.result()
        load.abandon()
        loader.close()
        assert client.collection("src.t").state.batches == ()
