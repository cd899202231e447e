"""Spark Connect client in a separate process, which stores its results as JSON.

python -m tests.spark.connect_process <folder>
"""

import gc
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from tests.persist.shop import by_hand

import penstock.spark as ps
from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.engine.dataframe_lifetime import spark as dataframe_lifetime
from penstock.engine.java import find_java, launcher_home
from penstock.errors import PenstockError, UsageError
from penstock.ingest.spark import tasks_of

SCHEMA = pa.schema([("k", pa.string()), ("x", pa.float64())])


def held_scans(limit: int) -> int:
    """Return the number of held scans after the client threads have released their plans."""
    deadline = SYSTEM_CLOCK.boot_ms() + 30_000
    while True:
        gc.collect()
        dataframe_lifetime._WATCH.check()
        held = len(ps.READINGS.statistics())
        if held <= limit or SYSTEM_CLOCK.boot_ms() > deadline:
            return held
        SYSTEM_CLOCK.wait(threading.Event(), 100)


def run_client(spark: Any, lake: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    frame = spark.range(0, 100, 1, 2).selectExpr("id", "cast(id as string) as name")
    time = ps.append(frame, lake, "mine", key=["id"])
    results["appended"] = ps.read(spark, lake, "mine").count()
    results["changes"] = ps.changes(spark, lake, "mine", 0, time + 1).count()
    settings = by_hand(inline_bytes=0, young_ms=3_600_000)
    with persist.open(f"{lake}/other", writer="w", settings=settings) as client:
        table = client.create_or_load("rows", schema=SCHEMA, key_columns=["k"])
        table.write([({"k": k, "x": -0.0}, 0, 1) for k in ("a", "b", None)]).result()
        table.seal(1).result()
        table.write([({"k": None, "x": -0.0}, 1, -1), ({"k": "b", "x": 0.0}, 1, 1)]).result()
        table.seal(2).result()
    rows = ps.read(spark, lake, "rows")
    results["rows"] = sorted(map(str, rows.collect()))
    derived = rows.where("k = 'a'")
    del rows
    results["kept"] = held_scans(1)
    del derived
    results["kept later"] = held_scans(0)
    rows = ps.read(spark, lake, "rows")
    try:
        tasks_of(spark)
    except UsageError as error:
        results["tasks"] = repr(error)
    for file in Path(lake.removeprefix("file:"), "other").rglob("*.parquet"):
        file.unlink()
    try:
        rows.collect()
    except PenstockError as error:
        results["lost"] = repr(error)
    return results


def main(folder: str) -> None:
    os.environ |= {"JAVA_HOME": str(launcher_home(find_java())), "PYSPARK_PYTHON": sys.executable}
    builder: Any = SparkSession.builder
    spark = builder.remote("local[2]").getOrCreate()
    try:
        results = run_client(spark, f"file:{folder}/lake")
    finally:
        spark.stop()
    Path(folder, "found.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
