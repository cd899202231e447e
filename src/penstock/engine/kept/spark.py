"""The Spark door of tasks that outlive a session.

A session is started for the first that needs it. If its JVM has ended, whatever it did
has failed as an error of the moment; the next that needs a session finds it gone, and
another is started.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from penstock.engine.reach.spark import reach
from penstock.engine.spark import JARS, connect, forget_dead_session, session
from penstock.errors import TransientError, UsageError
from penstock.ingest.spark import SparkTasks, tasks_of
from penstock.materialize.driver import Jobs
from penstock.materialize.rounds import Commits
from penstock.materialize.shard import ShardPlan
from penstock.materialize.spark import SparkShards
from penstock.persist.merge.merger import BigMerges, LazyBigMerges
from penstock.persist.merge.spark import mapped_spark_errors

__all__ = ["KeptSession"]

DRIVER_HOST: Final = "spark.driver.host"


class KeptSession:
    """Tasks, jobs and merges of whichever session there is."""

    def __init__(
        self,
        master: str | None = None,
        *,
        starts: Callable[[], None] = lambda: None,
        jars: Callable[[], Sequence[Path]] = tuple,
    ) -> None:
        """`starts` is called before one is started, which takes seconds.

        So is `jars`, for what the session must be able to load, on its driver and wherever its
        tasks run. A session that runs already is given none: its threads would not all see them.
        """
        self._master = master
        self._starts = starts
        self._jars = jars
        self._lock = threading.Lock()
        self._spark: SparkSession | None = None
        self._shards: SparkShards | None = None

    def get(self) -> SparkSession:
        """The session, started if there is none.

        Raises:
            UsageError: Spark cannot start, or jars are not to be had.
        """
        with self._lock:
            if forget_dead_session():
                self._spark = self._shards = None
            if self._spark is None:
                self._starts()
                jars = ",".join(each.absolute().as_uri() for each in self._jars())
                try:
                    self._spark = session(
                        master=self._master, config={JARS: jars} if jars else None
                    )
                except UsageError as error:
                    # It may have ended while it was asked.
                    if forget_dead_session():
                        raise TransientError("the JVM of Spark has ended") from error
                    raise
            return self._spark

    # First copies and comparisons: see `IngestJobs`.

    def read(self, share: Any, splits: Any, watch: Any) -> Any:
        """Read splits with the Spark tasks of the session."""
        return self._tasks().read(share, splits, watch)

    def scan(self, task: Any, watch: Any) -> Any:
        """Read a range by a format of Spark's."""
        return self._tasks().scan(task, watch)

    def merges(self, url: str) -> BigMerges:
        """Merges that are too big for one process."""
        return LazyBigMerges(lambda _collection, _memory: self._tasks().merges(url))

    def _tasks(self) -> SparkTasks:
        return tasks_of(self.get())

    # Transactions.

    @property
    def jobs(self) -> Jobs:
        """What runs transactions."""
        return _JobsOf(self._of_now, lambda: self._shards)

    def _of_now(self) -> SparkShards:
        spark = self.get()
        if connect(spark):
            raise UsageError(
                "transactions cannot run over Spark Connect",
                detail="The tasks of a transaction wait for each other, which it does not offer.",
                hint="Name a master that is not sc://, such as local[*] or spark://host:port.",
            )
        with self._lock:
            if self._shards is None:
                self._shards = SparkShards(spark, lambda url: reach(spark, url))
            return self._shards

    def connector_host(self) -> str | None:
        """The name of this host, if tasks run on others, which must reach it."""
        spark = self.get()
        if connect(spark) or str(spark.sparkContext.master).startswith("local"):
            return None
        return spark.sparkContext.getConf().get(DRIVER_HOST)


class _JobsOf:
    def __init__(
        self, shards: Callable[[], SparkShards], started: Callable[[], SparkShards | None]
    ) -> None:
        """`shards` starts a session if there is none; `started` does not."""
        self._shards = shards
        self._started = started

    def run(self, plans: Sequence[ShardPlan], commits: Commits) -> None:
        with mapped_spark_errors(f'materialize "{plans[0].spec.materialization}"'):
            self._shards().run(plans, commits)

    def cancel(self, materialization: str) -> None:
        if (shards := self._started()) is not None:
            shards.cancel(materialization)
