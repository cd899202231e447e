"""Small, large and sharded transactions as Spark jobs."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.materialize.lake import Endpoint, Table, materializing, once
from tests.materialize.test_documents import COLUMNS, SUMMED, Log, table

from penstock.engine.storage_access.spark import find_native_root
from penstock.errors import DefiniteError, UsageError
from penstock.materialize.spark import LARGE_BYTES, SparkRunner


def jobs_of(spark: SparkSession, large_bytes: int) -> SparkRunner:
    return SparkRunner(spark, lambda url: find_native_root(spark, url), large_bytes=large_bytes)


@pytest.mark.parametrize("large_bytes", [0, LARGE_BYTES], ids=["large", "small"])
@pytest.mark.parametrize("shards", [1, 2])
def test_materialization_on_spark_keeps_endpoint_equal_to_collection(
    spark: SparkSession, tmp_path: Path, shards: int, large_bytes: int
) -> None:
    lake, endpoint = f"file:{tmp_path / 'lake'}", Endpoint("sqlite", tmp_path)
    jobs = jobs_of(spark, large_bytes)
    upstream = Table(f"{lake}/shop", random.Random(3))
    upstream.change(60)
    with materializing(lake, endpoint, tmp_path, shards=shards, jobs=jobs) as materialization:
        once(materialization)
        assert endpoint.rows() == upstream.contents()
        upstream.change(60)
        once(materialization)
        assert endpoint.rows() == upstream.contents()
    upstream.change(60)
    with materializing(
        lake, endpoint, tmp_path, shards=shards, jobs=jobs, backfill=1
    ) as materialization:
        once(materialization)
        assert endpoint.rows() == upstream.contents()
        assert materialization.status().documents >= len(upstream.contents())
    upstream.client.close()


SEQ = "json_extract(flow_document, '$.seq')"
FOLDED = {
    **SUMMED,
    "properties": {**SUMMED["properties"], "name": {"type": "string", "minLength": 1}},
}
"""Schema with a constraint that types do not prove, so documents are folded."""


@pytest.mark.parametrize("schema", [SUMMED, FOLDED], ids=["native", "folded"])
@pytest.mark.parametrize("shards", [1, 2])
def test_documents_and_rows_are_equal_for_large_and_small_transactions(
    spark: SparkSession, tmp_path: Path, shards: int, schema: Any
) -> None:
    lake = f"file:{tmp_path / 'lake'}"
    log = Log(lake, "shop.t", COLUMNS)
    rows = log.client.create_or_load("shop.r", schema=pa.schema([("a", pa.string())]))
    collections = {
        "shop.t": {"key": ["/id"], "schema": schema, "order": ["seq"]},
        "shop.r": {"key": "row"},
    }
    bindings = [
        {"collection": "shop.r", "resource": {"table": "r"}},
        {"collection": "shop.t", "resource": {"table": "t"}},
    ]
    found = []
    chance = random.Random(11)
    seq = 0

    def change() -> None:
        nonlocal seq
        for _ in range(3):
            log.add(*((seq + at, chance.randrange(5), at, f"n{at}", at) for at in range(20)))
            seq += 20
        upper = rows.upper
        updates = [({"a": "xy"[at % 2]}, upper + at, 1) for at in range(7)]
        rows.compare_and_append(updates, upper, log.collection.upper)

    change()
    for name in ("large", "small"):
        (tmp_path / name).mkdir()
    for _ in range(2):
        held = []
        for name, large_bytes in (("large", 0), ("small", LARGE_BYTES)):
            endpoint = Endpoint("sqlite", tmp_path / name)
            with materializing(
                lake,
                endpoint,
                tmp_path / name,
                shards=shards,
                jobs=jobs_of(spark, large_bytes),
                bindings=bindings,
                collections=collections,
                name=name,
            ) as materialization:
                once(materialization)
            held.append(
                (
                    table(endpoint, f"id, {SEQ}, amount, name, least"),
                    table(endpoint, "a, mz_count", "r"),
                )
            )
        assert held[0] == held[1]
        found.append(held[0])
        change()
    assert len(found[0][0]) == 5
    assert sum(row[2] for row in found[1][0]) == 2 * 3 * sum(range(20))
    assert found[1][1] == [("x", 8), ("y", 6)]
    log.client.close()


def test_retraction_of_reduced_document_on_spark_raises_definite_error(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = f"file:{tmp_path / 'lake'}"
    log = Log(lake, "shop.t", COLUMNS)
    log.add((0, 1, 5, "first", 3))
    log.add((0, 1, 5, "first", 3), diff=-1)
    collections = {"shop.t": {"key": ["/id"], "schema": SUMMED, "order": ["seq"]}}
    endpoint = Endpoint("sqlite", tmp_path)
    with materializing(
        lake, endpoint, tmp_path, jobs=jobs_of(spark, 0), collections=collections
    ) as materialization:
        once(materialization)
        assert endpoint.rows() == [], "a row inserted and deleted at once is never stored"
        log.add((0, 1, 5, "first", 3), diff=-1)
        with pytest.raises(DefiniteError, match="has deleted rows"):
            once(materialization)
    log.client.close()


def test_more_shards_than_spark_task_slots_raises_usage_error(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = f"file:{tmp_path / 'lake'}"
    upstream = Table(f"{lake}/shop", random.Random(3))
    upstream.change()
    with (
        materializing(
            lake,
            Endpoint("sqlite", tmp_path),
            tmp_path,
            shards=1_000,
            jobs=jobs_of(spark, LARGE_BYTES),
        ) as materialization,
        pytest.raises(UsageError, match="1000 shards"),
    ):
        once(materialization)
    upstream.client.close()
