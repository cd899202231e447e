"""Collections in Spark, compared with Spark on plain Parquet and with Delta Lake.

Both sides run in one session with the same settings, on the same updates, in alternating
order. Figures are ratios of medians. Times include planning: ours begins with
`penstock.spark.read`, theirs with `spark.read.parquet`, and both end when every row is in
Spark's `noop` sink. Before timing, both sides must return the same rows; a difference ends
the benchmark.

    make bench-spark
    python benchmarks/spark.py --quick --only compacted_vs_parquet

Each figure is printed as a line when it is measured; the last line is one JSON object. The
docstring of each function states the timed interval; see also benchmarks/README.md.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from measure import Figure, Measured, in_turn, main, medians
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's convention.
from workload import COLLECTION, SCHEMA, ChangingTable, append, rows_of, run_maintenance

import penstock.persist as persist
import penstock.spark as ps
from penstock.persist.state import Stored

__all__ = ["check_same", "timed"]

RETAIN: Final = 10
"""Distance of since behind the upper, in batches, if history is released as in a pipeline."""

QUIETLY: Final = persist.Settings(background=False)

DIFFERENT: Final = 3
"""Exit status if the rows of the two sides differ."""

DELTA_PYTHON: Final = Path(__file__).resolve().parent.parent / ".venv-delta" / "bin" / "python"


@dataclass
class Bench:
    """Folder, size and session; locations are created on first use."""

    folder: Path
    quick: bool
    spark: SparkSession

    batches: Final = 200

    @property
    def size(self) -> int:
        """Updates per batch."""
        return 2_500 if self.quick else 50_000

    @property
    def latest(self) -> int:
        """Time of the last batch."""
        return self.batches - 1

    def times(self, full: int, *, quick: int) -> int:
        """Return `full`, or `quick` with --quick."""
        return quick if self.quick else full

    def url(self, name: str) -> str:
        """Return the URL of a location in the folder."""
        return f"file:{self.folder / name}"

    @cached_property
    def uncompacted(self) -> str:
        """Location with all batches as written: no compaction, since at 0."""
        url = self.url("held-off")
        with persist.open(url, writer="bench", settings=QUIETLY) as client:
            append(client, ChangingTable(self.size).batches(self.batches))
        return url

    @cached_property
    def by_default(self) -> str:
        """Location as a writer with default settings leaves it, since at a fixed distance."""
        url = self.url("by-default")
        with persist.open(url, writer="bench") as client:
            table = ChangingTable(self.size)
            collection = append(client, table.batches(self.batches), retain=RETAIN)
            run_maintenance(client, collection)
        return url

    @cached_property
    def compacted(self) -> "Compacted":
        """Location with since at the last batch, compacted into one batch."""
        url = self.url("compacted")
        table = ChangingTable(self.size)
        with persist.open(url, writer="bench", settings=QUIETLY) as client:
            collection = append(client, table.batches(self.batches))
            collection.allow_compaction(self.latest).result()
            client.compact()
            merged = collection.state.batches
        assert len(merged) == 1, f"{len(merged)} batches after a full compaction"
        files = len(merged[0].parts)
        return Compacted(url, table, files, self._plain("final", table, files))

    @cached_property
    def with_deltas(self) -> "Compacted":
        """The compacted location plus one per cent of later changes, in two batches."""
        base = self.compacted
        with persist.open(base.url, writer="bench", settings=QUIETLY) as client:
            append(client, base.table.batches(self.batches // 100))
        plain = self._plain("final-later", base.table, base.files)
        return Compacted(base.url, base.table, base.files, plain)

    def files(self, url: str, *, lower: int, upper: int) -> list[str]:
        """Return the Parquet files of the batches of a location within `[lower, upper)`."""
        with persist.open(url, hold=False) as client:
            batches = client.collection(COLLECTION).state.batches
        root = url.removeprefix("file:")
        parts = [
            part
            for batch in batches
            if lower <= batch.lower and batch.upper <= upper
            for part in batch.parts
            if isinstance(part, Stored)
        ]
        return [f"{root}/{part.key}" for part in parts]

    def _plain(self, name: str, table: ChangingTable, files: int) -> str:
        """Write the rows of `table` with Spark, with the number of files and the order of ours."""
        source = self.folder / f"{name}-source.parquet"
        pq.write_table(table.rows(), source)
        target = str(self.folder / name)
        frame = self.spark.read.parquet(str(source))
        frame = frame.repartitionByRange(files, "id").sortWithinPartitions("id")
        frame.write.parquet(target)
        source.unlink()
        return target


@dataclass(frozen=True, slots=True)
class Compacted:
    """Compacted location, and the same rows as plain Parquet."""

    url: str
    table: ChangingTable
    files: int
    plain: str


def snapshot_vs_parquet(bench: Bench) -> Measured:
    """Compare a read as of the last batch, without compaction, with a manual consolidation.

    The manual consolidation reads the same files.
    """
    return _read_vs_manual(bench, bench.uncompacted)


def snapshot_default_vs_parquet(bench: Bench) -> Measured:
    """Compare a read after background maintenance with the same manual consolidation.

    Since is ten batches behind. The writer has closed before the reads begin.
    """
    return _read_vs_manual(bench, bench.by_default)


def _read_vs_manual(bench: Bench, url: str) -> Measured:
    files = bench.files(bench.uncompacted, lower=0, upper=bench.batches)
    assert len(files) == bench.batches, f"{bench.batches} batches have {len(files)} files"

    def theirs() -> DataFrame:
        updates = bench.spark.read.parquet(*files).where(F.col("mz_timestamp") <= bench.latest)
        rows = updates.groupBy(*SCHEMA.names).agg(F.sum("mz_diff").alias("multiplicity"))
        return rows.where(F.col("multiplicity") > 0).select(*SCHEMA.names)

    return _compare(bench, lambda: _read(bench, url, bench.latest), theirs, _shape(url))


def compacted_vs_parquet(bench: Bench) -> Measured:
    """Compare a read of a fully compacted collection with a scan of plain Parquet."""
    location = bench.compacted
    return _compare(
        bench,
        lambda: _read(bench, location.url, bench.latest),
        lambda: bench.spark.read.parquet(location.plain),
        _shape(location.url),
        repetitions=11,
    )


def deltas_vs_parquet(bench: Bench) -> Measured:
    """Compare the same with one per cent of later changes with a scan of the resulting rows."""
    location = bench.with_deltas
    return _compare(
        bench,
        lambda: _read(bench, location.url, bench.latest + bench.batches // 100),
        lambda: bench.spark.read.parquet(location.plain),
        _shape(location.url),
        repetitions=11,
    )


def changes_vs_parquet(bench: Bench) -> Measured:
    """Compare the updates of one per cent of the times with a scan of the files with them."""
    lower = bench.batches // 2
    upper = lower + bench.batches // 100
    url = bench.uncompacted
    files = bench.files(url, lower=lower, upper=upper)
    assert len(files) == upper - lower, f"{upper - lower} batches have {len(files)} files"
    return _compare(
        bench,
        lambda: ps.changes(bench.spark, url, COLLECTION, lower, upper),
        lambda: bench.spark.read.parquet(*files),
        {"files": len(files)},
        repetitions=21,
    )


def append_vs_write(bench: Bench) -> Measured:
    """Compare an append of 5M rows to a new collection with `write.parquet` of the same rows.

    Both sides read the rows from Parquet. Outputs are removed outside of the measured time.
    Ours syncs its files; Spark does not.
    """
    rows = 100 * bench.size
    source = bench.folder / "append-source"
    source.mkdir()
    for number in range(10):
        ids = np.arange(number * rows // 10, (number + 1) * rows // 10)
        pq.write_table(rows_of(ids, np.zeros(len(ids), np.int64)), source / f"{number}.parquet")
    frame = bench.spark.read.parquet(str(source))
    names = (f"append-{number}" for number in count())

    def ours() -> float:
        name = next(names)
        took = timed(lambda: ps.append(frame, bench.url(name), COLLECTION, key=["id"]))
        shutil.rmtree(bench.folder / name)
        return took

    def theirs() -> float:
        target = bench.folder / next(names)
        took = timed(lambda: frame.write.parquet(str(target)))
        shutil.rmtree(target)
        return took

    ps.append(frame, bench.url("append-checked"), COLLECTION, key=["id"])
    check_same(ps.read(bench.spark, bench.url("append-checked"), COLLECTION), frame)
    theirs()
    ours_s, theirs_s = medians(in_turn(bench.times(5, quick=2), ours, theirs))
    return _ratio(ours_s, theirs_s, {"rows": rows})


def vs_delta_time_travel(bench: Bench) -> Measured:
    """Compare a read of an earlier version in Delta Lake with ours; see spark_delta.py.

    Delta Lake needs an older PySpark. Both sides therefore run in a separate environment, which
    `make bench-spark` creates.
    """
    script = Path(__file__).with_name("spark_delta.py")
    if not DELTA_PYTHON.exists():
        return Measured(None, f"{DELTA_PYTHON} does not exist; `make bench-spark` creates it")
    quick = ["--quick"] if bench.quick else []
    command = [str(DELTA_PYTHON), str(script), "--dir", str(bench.folder), *quick]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == DIFFERENT:
        sys.exit(DIFFERENT)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return Measured(None, f"spark_delta.py exited with status {done.returncode}")
    output: dict[str, Any] = json.loads(lines[-1])
    name = vs_delta_time_travel.__name__
    raw = output["raw"][name]
    with_cores_s = raw["told_cores"]["theirs_s"]
    summary = (
        f"Penstock {raw['ours_s']:.2f} s, Delta Lake {raw['theirs_s']:.2f} s "
        f"({with_cores_s:.2f} s with the number of cores configured), {raw['rows']:,} rows"
    )
    return Measured(output[name], summary, raw)


FIGURES: Final = {
    "snapshot_vs_parquet": Figure(snapshot_vs_parquet, "≤ 1.05", lambda value: value <= 1.05),
    "snapshot_default_vs_parquet": Figure(
        snapshot_default_vs_parquet, "≤ 0.3", lambda value: value <= 0.3
    ),
    "compacted_vs_parquet": Figure(compacted_vs_parquet, "≤ 1.2", lambda value: value <= 1.2),
    "deltas_vs_parquet": Figure(deltas_vs_parquet, "≤ 1.4", lambda value: value <= 1.4),
    "changes_vs_parquet": Figure(changes_vs_parquet, "≤ 1.3", lambda value: value <= 1.3),
    "append_vs_write": Figure(append_vs_write, "≤ 1.3", lambda value: value <= 1.3),
    "vs_delta_time_travel": Figure(vs_delta_time_travel, "≥ 1.5", lambda value: value >= 1.5),
}


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes, with a complete scan of the DataFrame it returns."""
    begun = time.perf_counter()
    result = call()
    if isinstance(result, DataFrame):
        result.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - begun


def check_same(ours: DataFrame, theirs: DataFrame) -> int:
    """Return the number of rows of both sides, or exit if the rows differ."""
    sums = [_content(ours), _content(theirs)]
    if sums[0] != sums[1]:
        details = f"(rows, sum of hashes) {sums[0]} and {sums[1]}"
        print(f"the two sides differ: {details}", file=sys.stderr)
        sys.exit(DIFFERENT)
    return sums[0][0]


def _content(frame: DataFrame) -> tuple[int, int]:
    hashed = F.xxhash64(*sorted(frame.columns)).cast("decimal(38,0)")
    row = frame.agg(F.count(F.lit(1)).alias("rows"), F.sum(hashed).alias("sum")).collect()[0]
    return int(row["rows"]), int(row["sum"] or 0)


def _read(bench: Bench, url: str, as_of: int) -> DataFrame:
    return ps.read(bench.spark, url, COLLECTION, as_of)


def _compare(
    bench: Bench,
    ours: Callable[[], DataFrame],
    theirs: Callable[[], DataFrame],
    raw: dict[str, Any],
    *,
    repetitions: int = 5,
) -> Measured:
    """Check that both sides return the same rows, warm them up, and time them alternately."""
    rows = check_same(ours(), theirs())
    timed(ours), timed(theirs)
    turns = bench.times(repetitions, quick=2)
    ours_s, theirs_s = medians(in_turn(turns, lambda: timed(ours), lambda: timed(theirs)))
    return _ratio(ours_s, theirs_s, {"rows": rows, **raw})


def _ratio(ours_s: float, theirs_s: float, raw: dict[str, Any]) -> Measured:
    details = "".join(f", {value:,} {name}" for name, value in raw.items())
    summary = f"Penstock {ours_s:.2f} s, Parquet {theirs_s:.2f} s{details}"
    return Measured(ours_s / theirs_s, summary, {"ours_s": ours_s, "theirs_s": theirs_s, **raw})


def _shape(url: str) -> dict[str, Any]:
    """Return the batches that maintenance left in a location."""
    with persist.open(url, hold=False) as client:
        state = client.collection(COLLECTION).state
    return {
        "batches": len(state.batches),
        "stored_updates": sum(batch.rows for batch in state.batches),
        "largest_batch": max(batch.rows for batch in state.batches),
    }


@contextmanager
def prepared(folder: Path, quick: bool) -> Iterator[Bench]:
    """Yield a bench with a session as Penstock starts it."""
    spark = ps.session()
    try:
        yield Bench(folder, quick, spark)
    finally:
        spark.stop()


if __name__ == "__main__":
    main((__doc__ or "").partition("\n")[0], FIGURES, prepared)
