"""First copies and comparisons by Spark's tasks: one piece a task, straight into Parquet."""

import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import PenstockError, TransientError, UsageError
from penstock.ingest.loading import Watch
from penstock.ingest.scanning import Cut, Scanned, ScanTask
from penstock.persist.append.spark import collected
from penstock.persist.append.task import Share, Written
from penstock.persist.merge.spark import SparkMerges, failing_as_ours
from penstock.sources.source import Piece

__all__ = ["tasks_of"]

TOLD: Final = "told binary"
CUT: Final = "place int, rows binary, failed boolean"
"""Rows, or the error instead of them."""

PLACE_BYTES: Final = 64 << 20
"""About how much of what meets is finished by one task."""

FEW_BYTES: Final = 4 << 20
"""A range of about so much is read by one task: more would take longer to start than to read."""

WATCH_S: Final = 0.5
"""So often it is asked whether what Spark does is still wanted."""


def tasks_of(spark: SparkSession) -> "SparkTasks":
    """What reads pieces by tasks of `spark`.

    Raises:
        UsageError: the session is one of Spark Connect, which runs no such tasks.
    """
    if any(kind.__module__.startswith("pyspark.sql.connect.") for kind in type(spark).__mro__):
        raise UsageError(
            "first copies cannot be read by a session of Spark Connect",
            detail="Their pieces are handed out by a SparkContext, which it does not have.",
            hint="Use a classic session, with a master such as local[4] or spark://host:7077. "
            "A smaller copy needs no Spark at all.",
        )
    return SparkTasks(spark)


class SparkTasks:
    """Does as jobs of Spark what is too much for one process."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def read(self, share: Share, pieces: Sequence[Piece], watch: Watch) -> list[Written]:
        """Read all pieces and write what they hold; a task that is lost is tried again.

        Raises:
            TransientError: Spark failed, or it is not wanted any more.
        """
        doing = f'read collection "{share.collection}" of location "{share.url}"'
        with failing_as_ours(doing), self._as_long_as(watch.wanted, f"read {share.staging}"):
            told = self._read(share, pieces, watch)
        # SUBTLE: PySpark takes a connection that breaks off for the end of what is collected.
        if len(told) != len(pieces):
            raise TransientError(
                f"Spark could not {doing}",
                detail=f"Of {len(pieces)} tasks, {len(told)} have told what they wrote.",
            )
        return told

    @contextmanager
    def _as_long_as(self, wanted: Callable[[], bool], tag: str) -> Iterator[None]:
        """Jobs that are run within end when they are not wanted any more."""
        context, over = self._spark.sparkContext, threading.Event()

        def watch() -> None:
            while not over.wait(WATCH_S):
                if not wanted():
                    context.cancelJobsWithTag(tag)

        watching = threading.Thread(target=watch, name=f"watch of {tag}", daemon=True)
        watching.start()
        context.addJobTag(tag)
        try:
            yield
        finally:
            context.removeJobTag(tag)
            over.set()
            watching.join()

    def _read(self, share: Share, pieces: Sequence[Piece], watch: Watch) -> list[Written]:
        context = self._spark.sparkContext
        rows = context.accumulator(0)
        watch.counts(lambda: rows.value)

        def read(some: Iterable[Piece]) -> Iterator[Written]:
            for piece in some:
                with closing(piece.read()) as found:
                    written = share.write(found, to_the_end=False)
                rows.add(written.rows)
                yield written

        parallel = context.parallelize(pieces, len(pieces))
        return list(parallel.mapPartitions(read).collect())

    def scan(self, task: ScanTask, watch: Watch) -> list[Scanned]:
        """Read a range by a format of Spark's; a task that is lost is tried again.

        Raises:
            TransientError: Spark failed, or it is not wanted any more.
        """
        scan, some = task.scan, next(iter(task.shares.values()))
        doing = f'read a range of {scan.format} for collection "{some.collection}"'
        with (
            failing_as_ours(doing, secrets=scan.secrets),
            self._as_long_as(watch.wanted, f"scan {some.staging}"),
        ):
            frame = self._spark.read.format(scan.format).options(**scan.options).load()
            return [pickle.loads(row["told"]) for row in collected(self._scanned(frame, task))]

    def _scanned(self, frame: DataFrame, task: ScanTask) -> DataFrame:
        count = -(-task.scan.size // PLACE_BYTES)
        if not task.scan.meets and task.scan.size > FEW_BYTES:
            return frame.mapInArrow(_finishing(lambda rows: task.run(rows)), TOLD)
        if not task.scan.meets or count == 1:
            # One task for all is sooner done than what brings rows together.
            return frame.coalesce(1).mapInArrow(_finishing(lambda rows: task.run(rows)), TOLD)

        def cut(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for place, each in task.cut(rows, count):
                failed = isinstance(each, PenstockError)
                packed = pickle.dumps(each) if failed else _packed(each)
                columns = [
                    pa.array([place], pa.int32()),
                    pa.array([packed], pa.binary()),
                    pa.array([failed]),
                ]
                yield pa.record_batch(columns, names=["place", "rows", "failed"])

        met = frame.mapInArrow(cut, CUT).repartitionById(count, "place")
        return met.mapInArrow(_finishing(lambda rows: task.finish(_unpacked(rows))), TOLD)

    def merges(self, url: str) -> SparkMerges:
        """What merges and compares collections of a storage location."""
        return SparkMerges(self._spark, url)


Finish = Callable[[Iterator[pa.RecordBatch]], Scanned]


def _finishing(finish: Finish) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a task does with its rows, and tells in one."""

    def told(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([pa.array([pickle.dumps(finish(rows))], pa.binary())], names=["told"])

    return told


def _packed(table: pa.Table) -> bytes:
    """Rows with their schema, as bytes."""
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
