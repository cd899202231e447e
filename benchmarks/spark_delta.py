"""Reading an earlier version: Delta Lake beside a collection, in one session.

Delta Lake asks for an older PySpark than Penstock prefers, so this runs in an
environment of its own, `.venv-delta`, and both sides in it. `spark.py` starts
it and takes over its figure.

    make bench-spark
    .venv-delta/bin/python benchmarks/spark_delta.py --quick
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measure import Figure, Measured, in_turn, main, medians
from pyspark.sql import DataFrame, SparkSession  # noqa: TID251 - a second spark.py.
from spark import check_same, timed
from workload import COLLECTION, append, made_quiet, rows_of

import penstock.persist as persist
import penstock.spark as ps

PARTITIONS: Final = "spark.databricks.delta.snapshotPartitions"
"""Into how many tasks Delta Lake cuts the reading of its own log; 50 unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Where to work, how much of it, and in which session."""

    folder: Path
    quick: bool
    spark: SparkSession

    @property
    def appends(self) -> int:
        """How many there are."""
        return 20 if self.quick else 200

    @property
    def size(self) -> int:
        """How many rows an append has."""
        return 5_000 if self.quick else 50_000

    @property
    def as_of(self) -> int:
        """The number of the append that reads go back to, counted from 0: the 150th of 200."""
        return self.appends * 3 // 4 - 1

    @property
    def retain(self) -> int:
        """How many appends since stays behind, so that the one read is still told apart."""
        return self.appends * 3 // 10

    def batches(self) -> Iterator[pa.Table]:
        """The rows of each append."""
        for number in range(self.appends):
            ids = np.arange(number * self.size, (number + 1) * self.size)
            yield rows_of(ids, np.zeros(self.size, np.int64))


def vs_delta_time_travel(bench: Bench) -> Measured:
    """The table as of the 150th of 200 appends, with Delta Lake over the same with Penstock.

    Both sides hold what appends with default settings leave: Delta Lake its
    files and a checkpoint every so often, Penstock what upkeep made of them,
    since 60 appends behind the last. `raw` also has Delta Lake told how few
    cores there are, which its log is otherwise read without knowing.
    """
    delta, url = str(bench.folder / "delta"), f"file:{bench.folder / 'penstock'}"
    source = str(bench.folder / "append.parquet")
    for batch in bench.batches():
        pq.write_table(batch, source)
        bench.spark.read.parquet(source).write.format("delta").mode("append").save(delta)
    with persist.open(url, writer="bench") as client:
        inserts = (_as_updates(batch, at) for at, batch in enumerate(bench.batches()))
        made_quiet(client, append(client, inserts, retain=bench.retain))

    def ours() -> DataFrame:
        return ps.read(bench.spark, url, COLLECTION, bench.as_of)

    def theirs() -> DataFrame:
        # The first append made version 0.
        return bench.spark.read.format("delta").option("versionAsOf", bench.as_of).load(delta)

    def told() -> float:
        bench.spark.conf.set(PARTITIONS, str(bench.spark.sparkContext.defaultParallelism))
        took = timed(theirs)
        bench.spark.conf.unset(PARTITIONS)
        return took

    rows = check_same(ours(), theirs())
    timed(ours), timed(theirs), told()
    turns = 2 if bench.quick else 11
    ours_s, theirs_s = medians(in_turn(turns, lambda: timed(ours), lambda: timed(theirs)))
    ours_again_s, told_s = medians(in_turn(turns, lambda: timed(ours), told))
    return Measured(
        theirs_s / ours_s,
        f"Penstock {ours_s:.2f} s, Delta Lake {theirs_s:.2f} s ({told_s:.2f} s if told how many "
        f"cores there are), {rows:,} rows",
        {
            "ours_s": ours_s,
            "theirs_s": theirs_s,
            "told_cores": {"ours_s": round(ours_again_s, 3), "theirs_s": round(told_s, 3)},
            "rows": rows,
            "pyspark": version("pyspark"),
            "delta_spark": version("delta-spark"),
        },
    )


FIGURES: Final = {
    "vs_delta_time_travel": Figure(vs_delta_time_travel, "≥ 1.5", lambda found: found >= 1.5)
}


def _as_updates(rows: pa.Table, time: int) -> pa.Table:
    return rows.append_column("mz_timestamp", pa.repeat(time, rows.num_rows)).append_column(
        "mz_diff", pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows)
    )


@contextmanager
def prepared(folder: Path, quick: bool) -> Iterator[Bench]:
    """A bench with a session that knows Delta Lake, as its own manual sets one up."""
    spark_line = ".".join(version("pyspark").split(".")[:2])
    package = f"io.delta:delta-spark_{spark_line}_2.13:{version('delta-spark')}"
    spark = ps.session(
        config={
            "spark.jars.packages": package,
            "spark.jars.ivy": str(Path(sys.prefix) / "ivy"),
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        }
    )
    try:
        yield Bench(folder, quick, spark)
    finally:
        spark.stop()


if __name__ == "__main__":
    main((__doc__ or "").partition("\n")[0], FIGURES, prepared)
