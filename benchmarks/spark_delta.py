"""Read of an earlier version: Delta Lake compared with a collection, in one session.

Delta Lake needs an older PySpark than Penstock prefers. Both sides therefore run in a separate
environment, `.venv-delta`. `spark.py` starts this script and reports its figure.

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
from workload import COLLECTION, append, rows_of, run_maintenance

import penstock.persist as persist
import penstock.spark as ps

PARTITIONS: Final = "spark.databricks.delta.snapshotPartitions"
"""Setting for the number of Spark tasks that read the log of Delta Lake; 50 by default."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Folder, size and session."""

    folder: Path
    quick: bool
    spark: SparkSession

    @property
    def appends(self) -> int:
        """Number of appends."""
        return 20 if self.quick else 200

    @property
    def size(self) -> int:
        """Rows per append."""
        return 5_000 if self.quick else 50_000

    @property
    def as_of(self) -> int:
        """Index of the append to read, from 0: the 150th of 200."""
        return self.appends * 3 // 4 - 1

    @property
    def retain(self) -> int:
        """Distance of since behind the upper, in appends; the append to read stays readable."""
        return self.appends * 3 // 10

    def batches(self) -> Iterator[pa.Table]:
        """Yield the rows of each append."""
        for number in range(self.appends):
            ids = np.arange(number * self.size, (number + 1) * self.size)
            yield rows_of(ids, np.zeros(self.size, np.int64))


def vs_delta_time_travel(bench: Bench) -> Measured:
    """Compare a read as of the 150th of 200 appends in Delta Lake with Penstock.

    Both sides are as appends with default settings leave them: Delta Lake with its files and
    periodic checkpoints, Penstock after maintenance, with since 60 appends behind. `raw` also
    has the time of Delta Lake with the number of cores configured for the read of its log.
    """
    delta, url = str(bench.folder / "delta"), f"file:{bench.folder / 'penstock'}"
    source = str(bench.folder / "append.parquet")
    for batch in bench.batches():
        pq.write_table(batch, source)
        bench.spark.read.parquet(source).write.format("delta").mode("append").save(delta)
    with persist.open(url, writer="bench") as client:
        inserts = (_as_updates(batch, number) for number, batch in enumerate(bench.batches()))
        run_maintenance(client, append(client, inserts, retain=bench.retain))

    def ours() -> DataFrame:
        return ps.read(bench.spark, url, COLLECTION, bench.as_of)

    def theirs() -> DataFrame:
        # The first append created version 0.
        return bench.spark.read.format("delta").option("versionAsOf", bench.as_of).load(delta)

    def theirs_with_cores() -> float:
        bench.spark.conf.set(PARTITIONS, str(bench.spark.sparkContext.defaultParallelism))
        took = timed(theirs)
        bench.spark.conf.unset(PARTITIONS)
        return took

    rows = check_same(ours(), theirs())
    timed(ours), timed(theirs), theirs_with_cores()
    turns = 2 if bench.quick else 11
    ours_s, theirs_s = medians(in_turn(turns, lambda: timed(ours), lambda: timed(theirs)))
    ours_again_s, with_cores_s = medians(in_turn(turns, lambda: timed(ours), theirs_with_cores))
    return Measured(
        theirs_s / ours_s,
        f"Penstock {ours_s:.2f} s, Delta Lake {theirs_s:.2f} s ({with_cores_s:.2f} s with the "
        f"number of cores configured), {rows:,} rows",
        {
            "ours_s": ours_s,
            "theirs_s": theirs_s,
            "told_cores": {"ours_s": round(ours_again_s, 3), "theirs_s": round(with_cores_s, 3)},
            "rows": rows,
            "pyspark": version("pyspark"),
            "delta_spark": version("delta-spark"),
        },
    )


FIGURES: Final = {
    "vs_delta_time_travel": Figure(vs_delta_time_travel, "≥ 1.5", lambda value: value >= 1.5)
}


def _as_updates(rows: pa.Table, time: int) -> pa.Table:
    return rows.append_column("mz_timestamp", pa.repeat(time, rows.num_rows)).append_column(
        "mz_diff", pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows)
    )


@contextmanager
def prepared(folder: Path, quick: bool) -> Iterator[Bench]:
    """Yield a bench with a session configured for Delta Lake as its manual says."""
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
