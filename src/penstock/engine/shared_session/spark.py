"""Spark entry module of tasks that outlive a Spark session.

The first task that needs a session starts it. If the JVM ends, the operations of that session fail
with transient errors. The next request for a session finds the JVM ended and starts another one.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from penstock.engine.spark import JARS, connect, forget_dead_session, session
from penstock.engine.storage_access.spark import find_native_root
from penstock.errors import TransientError, UsageError
from penstock.ingest.spark import SparkTasks, tasks_of
from penstock.materialize.commit_barrier import CommitCoordinator
from penstock.materialize.runner import Runner
from penstock.materialize.shard import ShardPlan
from penstock.materialize.spark import SparkRunner
from penstock.persist.merge.merger import BigMerges, LazyBigMerges
from penstock.persist.merge.spark import mapped_spark_errors

__all__ = ["SharedSession"]

DRIVER_HOST: Final = "spark.driver.host"
STOP_CHECK_S: Final = 0.2


class SharedSession:
    """Ingestion tasks, jobs and merges of the current Spark session."""

    def __init__(
        self,
        master: str | None = None,
        *,
        starts: Callable[[], None] = lambda: None,
        jars: Callable[[], Sequence[Path]] = tuple,
        stop: threading.Event | None = None,
    ) -> None:
        """Create a holder without a session.

        `starts` and `jars` are called before a session starts, which takes seconds. `jars` returns
        the files that the driver and the executors must load. A session that already runs is given
        no jars: not all of its threads would see them. Waits for a session end soon after `stop` is
        set, while the session still starts.
        """
        self._master = master
        self._starts = starts
        self._jars = jars
        self._stop = stop or threading.Event()
        self._lock = threading.Lock()
        self._spark: SparkSession | None = None
        self._starting: Future[SparkSession] | None = None
        self._shards: SparkRunner | None = None

    def get(self) -> SparkSession:
        """Return the session; start one if there is none.

        Raises:
            UsageError: Spark cannot start, or the jars are not available.
            TransientError: the JVM has ended, or `stop` was set before the session was ready.
        """
        with self._lock:
            if self._starting is None and forget_dead_session():
                self._spark = self._shards = None
            if self._spark is not None:
                return self._spark
            if self._starting is None:
                self._starting = Future()
                threading.Thread(
                    target=self._start, args=(self._starting,), name="spark session", daemon=True
                ).start()
            starting = self._starting
        while not wait([starting], STOP_CHECK_S).done:
            if self._stop.is_set():
                raise TransientError("stopped before Spark was ready")
        return starting.result()

    def _start(self, starting: "Future[SparkSession]") -> None:
        try:
            self._starts()
            jars = ",".join(jar.absolute().as_uri() for jar in self._jars())
            spark = session(master=self._master, config={JARS: jars} if jars else None)
        except BaseException as error:  # noqa: BLE001 - thread boundary: `get` raises it
            # The JVM may have ended during the call.
            if isinstance(error, UsageError) and forget_dead_session():
                ended = TransientError("JVM of Spark ended")
                ended.__cause__ = error
                error = ended
            with self._lock:
                self._starting = None
            starting.set_exception(error)
        else:
            with self._lock:
                self._spark, self._starting = spark, None
            starting.set_result(spark)

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
    def jobs(self) -> Runner:
        """Runner of transactions."""
        return _SessionJobs(self._current_shards, lambda: self._shards)

    def _current_shards(self) -> SparkRunner:
        spark = self.get()
        if connect(spark):
            raise UsageError(
                "transactions cannot run over Spark Connect",
                detail="The tasks of a transaction need a barrier, which Connect does not have.",
                hint="Use a master other than sc://, such as local[*] or spark://host:port.",
            )
        with self._lock:
            if self._shards is None:
                self._shards = SparkRunner(spark, lambda url: find_native_root(spark, url))
            return self._shards

    def connector_host(self) -> str | None:
        """Return the name of this host if tasks run on other hosts and must connect to it."""
        spark = self.get()
        if connect(spark) or str(spark.sparkContext.master).startswith("local"):
            return None
        return spark.sparkContext.getConf().get(DRIVER_HOST)


class _SessionJobs:
    def __init__(
        self, shards: Callable[[], SparkRunner], started: Callable[[], SparkRunner | None]
    ) -> None:
        """Use `shards` to start a session if there is none; `started` never starts one."""
        self._shards = shards
        self._started = started

    def run(self, plans: Sequence[ShardPlan], coordinator: CommitCoordinator) -> None:
        with mapped_spark_errors(f'materialize "{plans[0].spec.materialization}"'):
            self._shards().run(plans, coordinator)

    def cancel(self, materialization: str) -> None:
        if (shards := self._started()) is not None:
            shards.cancel(materialization)
