"""Initial snapshots, comparisons and scans by Spark tasks, each directly into Parquet."""

import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import PenstockError, TransientError, UsageError
from penstock.ingest.scan_task import Cut, Scanned, ScanTask
from penstock.ingest.snapshot_loader import LoadWatch
from penstock.persist.append.spark import collected
from penstock.persist.append.task import Share, Written
from penstock.persist.merge.spark import SparkMerges, mapped_spark_errors
from penstock.sources.source import Split

__all__ = ["tasks_of"]

RESULT: Final = "result binary"
CUT: Final = "place int, rows binary, failed boolean"
"""Columns: rows, or an error in their place."""

PLACE_BYTES: Final = 64 << 20
"""Approximate size of shuffled rows that one task finishes."""

FEW_BYTES: Final = 4 << 20
"""Ranges up to this size are read by one task: starting more takes longer than reading."""

WATCH_S: Final = 0.5
"""Interval of checks whether a job should continue."""


def tasks_of(spark: SparkSession) -> "SparkTasks":
    """Return jobs that run on `spark`.

    Raises:
        UsageError: `spark` is a Spark Connect session, which cannot run them.
    """
    if any(kind.__module__.startswith("pyspark.sql.connect.") for kind in type(spark).__mro__):
        raise UsageError(
            "initial snapshots cannot run in a Spark Connect session",
            detail="They need a SparkContext, which such a session does not have.",
            hint="Use a classic session, with a master such as local[4] or spark://host:7077. "
            "Smaller tables need no Spark.",
        )
    return SparkTasks(spark)


class SparkTasks:
    """Spark jobs for work that is too large for one process."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def read(self, share: Share, splits: Sequence[Split], watch: LoadWatch) -> list[Written]:
        """Read all splits and write their rows; Spark retries lost tasks.

        Raises:
            TransientError: Spark failed, or `watch` is not active any more.
        """
        doing = f'read collection "{share.collection}" of location "{share.url}"'
        with mapped_spark_errors(doing), self._cancelling(watch.is_active, f"read {share.staging}"):
            written = self._read(share, splits, watch)
        # SUBTLE: PySpark takes a broken connection for the end of the collected rows.
        if len(written) != len(splits):
            raise TransientError(
                f"Spark could not {doing}",
                detail=f"{len(written)} of {len(splits)} tasks have reported a result.",
            )
        return written

    @contextmanager
    def _cancelling(self, is_active: Callable[[], bool], tag: str) -> Iterator[None]:
        """Cancel the jobs of the block when `is_active` returns false."""
        context, ended = self._spark.sparkContext, threading.Event()

        def watch() -> None:
            while not ended.wait(WATCH_S):
                if not is_active():
                    context.cancelJobsWithTag(tag)

        watcher = threading.Thread(target=watch, name=f"watch of {tag}", daemon=True)
        watcher.start()
        context.addJobTag(tag)
        try:
            yield
        finally:
            context.removeJobTag(tag)
            ended.set()
            watcher.join()

    def _read(self, share: Share, splits: Sequence[Split], watch: LoadWatch) -> list[Written]:
        context = self._spark.sparkContext
        rows = context.accumulator(0)
        watch.set_row_count(lambda: rows.value)

        def read(some: Iterable[Split]) -> Iterator[Written]:
            for split in some:
                with closing(split.read()) as batches:
                    written = share.write(batches, to_the_end=False)
                rows.add(written.rows)
                yield written

        parallel = context.parallelize(splits, len(splits))
        return list(parallel.mapPartitions(read).collect())

    def scan(self, task: ScanTask, watch: LoadWatch) -> list[Scanned]:
        """Read a range with a Spark format; Spark retries lost tasks.

        Raises:
            TransientError: Spark failed, or `watch` is not active any more.
        """
        scan, some = task.scan, next(iter(task.shares.values()))
        doing = f'read a range of {scan.format} for collection "{some.collection}"'
        with (
            mapped_spark_errors(doing, secrets=scan.secrets),
            self._cancelling(watch.is_active, f"scan {some.staging}"),
        ):
            frame = self._spark.read.format(scan.format).options(**scan.options).load()
            return [pickle.loads(row["result"]) for row in collected(self._scanned(frame, task))]

    def _scanned(self, frame: DataFrame, task: ScanTask) -> DataFrame:
        count = -(-task.scan.size // PLACE_BYTES)
        if not task.scan.by_key and task.scan.size > FEW_BYTES:
            return frame.mapInArrow(_finishing(lambda rows: task.run(rows)), RESULT)
        if not task.scan.by_key or count == 1:
            # One task is faster than a shuffle.
            return frame.coalesce(1).mapInArrow(_finishing(lambda rows: task.run(rows)), RESULT)

        def cut(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for place, part in task.cut(rows, count):
                failed = isinstance(part, PenstockError)
                packed = pickle.dumps(part) if failed else _packed(part)
                columns = [
                    pa.array([place], pa.int32()),
                    pa.array([packed], pa.binary()),
                    pa.array([failed]),
                ]
                yield pa.record_batch(columns, names=["place", "rows", "failed"])

        shuffled = frame.mapInArrow(cut, CUT).repartitionById(count, "place")
        return shuffled.mapInArrow(_finishing(lambda rows: task.finish(_unpacked(rows))), RESULT)

    def merges(self, url: str) -> SparkMerges:
        """Return the jobs that merge and compare collections of a storage location."""
        return SparkMerges(self._spark, url)


Finish = Callable[[Iterator[pa.RecordBatch]], Scanned]


def _finishing(finish: Finish) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function for `mapInArrow` that yields the pickled result of `finish`."""

    def run(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        result = pa.array([pickle.dumps(finish(rows))], pa.binary())
        yield pa.record_batch([result], names=["result"])

    return run


def _packed(table: pa.Table) -> bytes:
    """Return rows and schema in Arrow's IPC stream format."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _unpacked(rows: Iterator[pa.RecordBatch]) -> Iterator[Cut]:
    for batch in rows:
        for packed, failed in zip(batch.column("rows"), batch.column("failed"), strict=True):
            if failed.as_py():
                yield pickle.loads(packed.as_py())
            else:
                yield pa.ipc.open_stream(packed.as_buffer()).read_all()
