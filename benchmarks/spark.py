"""Collections in Spark beside Spark on bare Parquet, and beside Delta Lake.

Both sides run in one session with the same settings, on the same updates, in
turn; what is compared are medians, and ratios are what to look at. Times
include planning: ours begins with `penstock.spark.read`, theirs with
`spark.read.parquet`, and both end when every row went into Spark's `noop`
sink. That both give the same rows is checked before anything is timed, and a
difference ends the benchmark.

    make bench-spark
    python benchmarks/spark.py --quick --only compacted_vs_parquet

Each figure is a line for people as it comes; the last line is one JSON object.
What each one times exactly stands at its function; benchmarks/README.md tells
how to read them.
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
from pyspark.sql import functions as F  # noqa: N812 - as Spark's users write it.
from workload import COLLECTION, SCHEMA, ChangingTable, append, made_quiet, rows_of

import penstock.persist as persist
import penstock.spark as ps
from penstock.persist.state import Stored

__all__ = ["check_same", "timed"]

RETAIN: Final = 10
"""How many batches since stays behind where history is given up as a pipeline does it."""

QUIETLY: Final = persist.Settings(background=False)

DIFFERENT: Final = 3
"""The exit status when two sides that should give the same rows do not."""

DELTA_PYTHON: Final = Path(__file__).resolve().parent.parent / ".venv-delta" / "bin" / "python"


@dataclass
class Bench:
    """Where to work, how much of it, and what was made so far: each location when first asked."""

    folder: Path
    quick: bool
    spark: SparkSession

    batches: Final = 200

    @property
    def size(self) -> int:
        """How many updates a batch has."""
        return 2_500 if self.quick else 50_000

    @property
    def latest(self) -> int:
        """The time of the last batch."""
        return self.batches - 1

    def times(self, full: int, *, quick: int) -> int:
        """How often: `full`, or `quick` while developing."""
        return quick if self.quick else full

    def url(self, name: str) -> str:
        """A location that nobody has used."""
        return f"file:{self.folder / name}"

    @cached_property
    def held_off(self) -> str:
        """All batches as they were written: no compaction, since at 0."""
        url = self.url("held-off")
        with persist.open(url, writer="bench", settings=QUIETLY) as client:
            append(client, ChangingTable(self.size).batches(self.batches))
        return url

    @cached_property
    def by_default(self) -> str:
        """As a writer with default settings leaves it, since following at a distance."""
        url = self.url("by-default")
        with persist.open(url, writer="bench") as client:
            table = ChangingTable(self.size)
            collection = append(client, table.batches(self.batches), retain=RETAIN)
            made_quiet(client, collection)
        return url

    @cached_property
    def compacted(self) -> "Compacted":
        """Since at the last batch, and merged as far as can be: into one."""
        url = self.url("compacted")
        table = ChangingTable(self.size)
        with persist.open(url, writer="bench", settings=QUIETLY) as client:
            collection = append(client, table.batches(self.batches))
            collection.allow_compaction(self.latest).result()
            client.compact()
            merged = collection.state.batches
        assert len(merged) == 1, f"{len(merged)} batches are left of a full compaction"
        files = len(merged[0].parts)
        return Compacted(url, table, files, self._plain("final", table, files))

    @cached_property
    def with_deltas(self) -> "Compacted":
        """The compacted location with one per cent of later changes on top, in two batches."""
        base = self.compacted
        with persist.open(base.url, writer="bench", settings=QUIETLY) as client:
            append(client, base.table.batches(self.batches // 100))
        plain = self._plain("final-later", base.table, base.files)
        return Compacted(base.url, base.table, base.files, plain)

    def files(self, url: str, *, lower: int, upper: int) -> list[str]:
        """The Parquet files of a location's batches from `lower` to `upper`."""
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
        """What `table` holds, written by Spark: as many files, in the same order as ours."""
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
    """A compacted location, and the same rows as plain Parquet."""

    url: str
    table: ChangingTable
    files: int
    plain: str


def snapshot_vs_parquet(bench: Bench) -> Measured:
    """Contents as of the last batch, compaction held off, over adding the same files up by hand."""
    return _as_of_beside_hand_written(bench, bench.held_off)


def snapshot_default_vs_parquet(bench: Bench) -> Measured:
    """The same where upkeep ran in the background, over the same files as before.

    Since followed ten batches behind. The writer has closed when reading begins.
    """
    return _as_of_beside_hand_written(bench, bench.by_default)


def _as_of_beside_hand_written(bench: Bench, url: str) -> Measured:
    files = bench.files(bench.held_off, lower=0, upper=bench.batches)
    assert len(files) == bench.batches, f"{bench.batches} batches have {len(files)} files"

    def theirs() -> DataFrame:
        updates = bench.spark.read.parquet(*files).where(F.col("mz_timestamp") <= bench.latest)
        added = updates.groupBy(*SCHEMA.names).agg(F.sum("mz_diff").alias("there"))
        return added.where(F.col("there") > 0).select(*SCHEMA.names)

    return _compared(bench, lambda: _read(bench, url, bench.latest), theirs, _shape(url))


def compacted_vs_parquet(bench: Bench) -> Measured:
    """Contents of a fully compacted collection over a scan of the same rows as plain Parquet."""
    made = bench.compacted
    return _compared(
        bench,
        lambda: _read(bench, made.url, bench.latest),
        lambda: bench.spark.read.parquet(made.plain),
        _shape(made.url),
        repetitions=11,
    )


def deltas_vs_parquet(bench: Bench) -> Measured:
    """The same with one per cent of later changes on top, over a scan of the rows after them."""
    made = bench.with_deltas
    return _compared(
        bench,
        lambda: _read(bench, made.url, bench.latest + bench.batches // 100),
        lambda: bench.spark.read.parquet(made.plain),
        _shape(made.url),
        repetitions=11,
    )


def changes_vs_parquet(bench: Bench) -> Measured:
    """The updates of one per cent of the times over a scan of just the files that hold them."""
    lower = bench.batches // 2
    upper = lower + bench.batches // 100
    url = bench.held_off
    files = bench.files(url, lower=lower, upper=upper)
    assert len(files) == upper - lower, f"{upper - lower} batches have {len(files)} files"
    return _compared(
        bench,
        lambda: ps.changes(bench.spark, url, COLLECTION, lower, upper),
        lambda: bench.spark.read.parquet(*files),
        {"files": len(files)},
        repetitions=21,
    )


def append_vs_write(bench: Bench) -> Measured:
    """A job that appends 5M rows to a new collection over `write.parquet` of the same.

    The rows come from Parquet on both sides. What was written is removed
    outside of the time taken. Ours syncs its files; Spark does not.
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
    """A read of an earlier version with Delta Lake over ours; see spark_delta.py.

    Delta Lake needs an older PySpark, so both sides run in an environment of
    their own, made by `make bench-spark`.
    """
    script = Path(__file__).with_name("spark_delta.py")
    if not DELTA_PYTHON.exists():
        return Measured(None, f"{DELTA_PYTHON} does not exist; `make bench-spark` makes it")
    quick = ["--quick"] if bench.quick else []
    command = [str(DELTA_PYTHON), str(script), "--dir", str(bench.folder), *quick]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == DIFFERENT:
        sys.exit(DIFFERENT)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return Measured(None, f"spark_delta.py ended with status {done.returncode}")
    told: dict[str, Any] = json.loads(lines[-1])
    name = vs_delta_time_travel.__name__
    raw = told["raw"][name]
    told_s = raw["told_cores"]["theirs_s"]
    shown = (
        f"Penstock {raw['ours_s']:.2f} s, Delta Lake {raw['theirs_s']:.2f} s ({told_s:.2f} s if "
        f"told how many cores there are), {raw['rows']:,} rows"
    )
    return Measured(told[name], shown, raw)


FIGURES: Final = {
    "snapshot_vs_parquet": Figure(snapshot_vs_parquet, "≤ 1.05", lambda found: found <= 1.05),
    "snapshot_default_vs_parquet": Figure(
        snapshot_default_vs_parquet, "≤ 0.3", lambda found: found <= 0.3
    ),
    "compacted_vs_parquet": Figure(compacted_vs_parquet, "≤ 1.2", lambda found: found <= 1.2),
    "deltas_vs_parquet": Figure(deltas_vs_parquet, "≤ 1.4", lambda found: found <= 1.4),
    "changes_vs_parquet": Figure(changes_vs_parquet, "≤ 1.3", lambda found: found <= 1.3),
    "append_vs_write": Figure(append_vs_write, "≤ 1.3", lambda found: found <= 1.3),
    "vs_delta_time_travel": Figure(vs_delta_time_travel, "≥ 1.5", lambda found: found >= 1.5),
}


def timed(call: Callable[[], Any]) -> float:
    """How many seconds a call takes. A frame that it gives is read to its end."""
    begun = time.perf_counter()
    given = call()
    if isinstance(given, DataFrame):
        given.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - begun


def check_same(ours: DataFrame, theirs: DataFrame) -> int:
    """How many rows both hold: the same ones, each as often, or this ends."""
    sums = [_content(ours), _content(theirs)]
    if sums[0] != sums[1]:
        found = f"(rows, sum of hashes) {sums[0]} and {sums[1]}"
        print(f"the two sides differ: {found}", file=sys.stderr)
        sys.exit(DIFFERENT)
    return sums[0][0]


def _content(frame: DataFrame) -> tuple[int, int]:
    hashed = F.xxhash64(*sorted(frame.columns)).cast("decimal(38,0)")
    row = frame.agg(F.count(F.lit(1)).alias("rows"), F.sum(hashed).alias("sum")).collect()[0]
    return int(row["rows"]), int(row["sum"] or 0)


def _read(bench: Bench, url: str, as_of: int) -> DataFrame:
    return ps.read(bench.spark, url, COLLECTION, as_of)


def _compared(
    bench: Bench,
    ours: Callable[[], DataFrame],
    theirs: Callable[[], DataFrame],
    raw: dict[str, Any],
    *,
    repetitions: int = 5,
) -> Measured:
    """Two ways to the same rows: checked, warmed up, timed in turn."""
    rows = check_same(ours(), theirs())
    timed(ours), timed(theirs)
    turns = bench.times(repetitions, quick=2)
    ours_s, theirs_s = medians(in_turn(turns, lambda: timed(ours), lambda: timed(theirs)))
    return _ratio(ours_s, theirs_s, {"rows": rows, **raw})


def _ratio(ours_s: float, theirs_s: float, raw: dict[str, Any]) -> Measured:
    beside = "".join(f", {value:,} {what}" for what, value in raw.items())
    shown = f"Penstock {ours_s:.2f} s, Parquet {theirs_s:.2f} s{beside}"
    return Measured(ours_s / theirs_s, shown, {"ours_s": ours_s, "theirs_s": theirs_s, **raw})


def _shape(url: str) -> dict[str, Any]:
    """What upkeep made of a location."""
    with persist.open(url, hold=False) as client:
        state = client.collection(COLLECTION).state
    return {
        "batches": len(state.batches),
        "stored_updates": sum(batch.rows for batch in state.batches),
        "largest_batch": max(batch.rows for batch in state.batches),
    }


@contextmanager
def prepared(folder: Path, quick: bool) -> Iterator[Bench]:
    """A bench with a session as Penstock starts it."""
    spark = ps.session()
    try:
        yield Bench(folder, quick, spark)
    finally:
        spark.stop()


if __name__ == "__main__":
    main((__doc__ or "").partition("\n")[0], FIGURES, prepared)
