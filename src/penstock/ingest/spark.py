"""First copies by Spark's tasks: one piece a task, each straight into Parquet."""

from collections.abc import Iterable, Iterator, Sequence

from pyspark.sql import SparkSession

from penstock.persist.writing.task import Share, Written
from penstock.sources.source import Piece

__all__ = ["tasks_of"]


def tasks_of(spark: SparkSession) -> "SparkTasks":
    """What reads pieces by tasks of `spark`."""
    return SparkTasks(spark)


class SparkTasks:
    """Reads pieces of a first copy as one job."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __call__(self, share: Share, pieces: Sequence[Piece]) -> list[Written]:
        """Read all pieces and write what they hold; a failed task is tried again."""

        def read(some: Iterable[Piece]) -> Iterator[Written]:
            for piece in some:
                yield share.write(piece.read())

        parallel = self._spark.sparkContext.parallelize(pieces, len(pieces))
        return list(parallel.mapPartitions(read).collect())
