"""Spark entry module of tasks that outlive a Spark session.

The first task that needs a session starts it. If the JVM ends, the operations of that session fail
with transient errors. The next request for a session finds the JVM ended and starts another one.
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
    """Ingestion tasks, jobs and merges of the current Spark session."""

    def __init__(
        self,
        master: str | None = None,
        *,
        starts: Callable[[], None] = lambda: None,
        jars: Callable[[], Sequence[Path]] = tuple,
    ) -> None:
        """Create a holder without a session.

        `starts` and `jars` are called before a session starts, which takes seconds. `jars` returns
        the files that the driver and the executors must load. A session that already runs is given
        no jars: not all of its threads would see them.
        """
        self._master = master
        self._starts = starts
        self._jars = jars
        self._lock = threading.Lock()
        self._spark: SparkSession | None = None
        self._shards: SparkShards | None = None

    def get(self) -> SparkSession:
        """Return the session; start one if there is none.

        Raises:
            UsageError: Spark cannot start, or the jars are not available.
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
                    # The JVM may have ended during the call.
                    if forget_dead_session():
                        raise TransientError("the JVM of Spark has ended") from error
                    raise
            return self._spark

    # Initial snapshots and comparisons: see `IngestJobs`.

    def read(self, share: Any, splits: Any, watch: Any) -> Any:
        """Read splits with the Spark tasks of the session."""
        return self._tasks().read(share, splits, watch)

    def scan(self, task: Any, watch: Any) -> Any:
        """Read an offset range with a Spark data source."""
        return self._tasks().scan(task, watch)

    def merges(self, url: str) -> BigMerges:
        """Return the merges that are too big for one process."""
        return LazyBigMerges(lambda _collection, _memory: self._tasks().merges(url))

    def _tasks(self) -> SparkTasks:
        return tasks_of(self.get())

    # Transactions.

    @property
    def jobs(self) -> Jobs:
        """Jobs that run transactions."""
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
        """Return the name of this host if tasks run on other hosts and must connect to it."""
        spark = self.get()
        if connect(spark) or str(spark.sparkContext.master).startswith("local"):
            return None
        return spark.sparkContext.getConf().get(DRIVER_HOST)


class _JobsOf:
    def __init__(
        self, shards: Callable[[], SparkShards], started: Callable[[], SparkShards | None]
    ) -> None:
        """Use `shards` to start a session if there is none; `started` never starts one."""
        self._shards = shards
        self._started = started

    def run(self, plans: Sequence[ShardPlan], commits: Commits) -> None:
        with mapped_spark_errors(f'materialize "{plans[0].spec.materialization}"'):
            self._shards().run(plans, commits)

    def cancel(self, materialization: str) -> None:
        if (shards := self._started()) is not None:
            shards.cancel(materialization)
