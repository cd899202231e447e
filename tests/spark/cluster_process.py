"""Spark session on `local-cluster` in a separate process, which executes requests of tests.

A process has one SparkContext, and the tests use `local[2]`. On `local-cluster` the
executors are processes: a test can kill them, and Spark retries their tasks on other
executors. Standard input carries requests and standard output carries responses, one
pickle each. An exception is a response.

    python -m tests.spark.cluster_process
"""

import os
import pickle
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final
from unittest import mock

import pyarrow as pa
from tests.faults.inspect import litter
from tests.faults.planted_bugs import planted
from tests.fix_spark import SHORT_LIVED
from tests.persist.shop import by_hand
from tests.spark.random_history import RandomHistory, check, read_history

import penstock.spark as ps
from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.durable import open_blob
from penstock.engine.storage_access import spark as storage_access
from penstock.errors import Corruption, PenstockError
from penstock.ingest import run
from penstock.ingest.spark import tasks_of
from penstock.persist.append import spark as append_spark
from penstock.persist.append.spark import stage
from penstock.persist.append.task import Share, Written
from penstock.persist.checksum_walk import verify
from penstock.sources.postgres import snapshot as snapshot

MASTER: Final = "local-cluster[2,1,1024]"

CONFIG: Final = {
    "spark.driver.memory": "1g",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": SHORT_LIVED,
    "spark.sql.shuffle.partitions": "4",
    "spark.task.maxFailures": "6",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.minTaskRuntime": "100ms",
}

COMMANDS: Final[dict[str, Callable[..., Any]]] = {}

PARTS: Final = 3

SCHEMA: Final = pa.schema([("n", pa.int64()), ("part", pa.int32())])


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    COMMANDS[function.__name__] = function
    return function


command(read_history)


@command
def check_history(spark: Any, history: RandomHistory) -> None:
    check(spark, history)


@command
def troubled(
    spark: Any, url: str, folder: str, trouble: str, bug: str | None = None
) -> dict[str, Any]:
    """Append 0..999 with failing tasks and concurrent sweeps, and return the outcome."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    frame = spark.range(0, 1_000, 1, PARTS).mapInArrow(
        in_trouble(folder, trouble), "n long, part int"
    )
    settings = by_hand(inline_bytes=0, part_bytes=1_000)
    sweeps = 0
    with ExitStack() as stack:
        client = stack.enter_context(persist.open(url, writer="w", settings=settings))
        table = client.create_or_load("rows", schema=SCHEMA)
        storage_access.find_native_root(spark, url)  # As in append, while all executors are alive.
        stack.enter_context(planted(bug))
        done = threading.Event()
        killer = threading.Thread(target=_kill_one, args=(spark, Path(folder), done))
        if trouble == "kill":
            killer.start()
        with client.staging() as staging, _written_slowly(client, done) as swept:
            with _lose_result(trouble):
                rows = stage(frame, table, staging, time=1)
            done.set()
            sweeps += len(swept)
            table.compare_and_append(rows, 0, 2)
        if trouble == "kill":
            killer.join()
    with persist.open(url, writer="w", settings=settings) as client, suppress(Corruption):
        # The worker of a killed executor may still write; a later sweep deletes its files.
        for _ in range(100):
            client.compact()
            client.compact()
            if not litter(url):
                break
            SYSTEM_CLOCK.wait(threading.Event(), 100)
    attempts = sorted(each.name for each in Path(folder).glob("attempt-*") if not each.suffix)
    return {
        "attempts": attempts,
        "killed": (Path(folder) / "killed").exists(),
        "sweeps": sweeps,
        "litter": litter(url),
        "damage": [damage.key for damage in verify(open_blob(url)).damage],
        "rows": _rows(spark, url),
    }


def _rows(spark: Any, url: str) -> list[int] | str:
    try:
        return sorted(row["n"] for row in ps.read(spark, url, "rows", hold=False).collect())
    except PenstockError as error:
        return str(error)


def in_trouble(folder: str, trouble: str) -> Callable[..., Any]:
    """Return a map function whose task leaves a marker file and then fails as requested."""

    def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        part, attempt = context.partitionId(), context.attemptNumber()
        tables = [pa.Table.from_batches([each]) for each in batches]
        # A worker is the child of a daemon, which is the child of the executor.
        daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
        executor = daemon.rpartition(")")[2].split()[1]
        mark = Path(folder, f"attempt-{part}-{attempt}-{context.taskAttemptId()}")
        mark.with_name(f"{mark.name}.new").write_text(executor)
        mark.with_name(f"{mark.name}.new").rename(mark)
        never = threading.Event()
        for i, table in enumerate(tables):
            half = table.num_rows // 2
            for rows in (table.slice(0, half), table.slice(half)):
                out = rows.append_column("part", pa.repeat(pa.scalar(part, pa.int32()), len(rows)))
                yield from out.rename_columns(["n", "part"]).to_batches()
            if trouble == "fail" and attempt == 0 and i == len(tables) - 1:
                raise RuntimeError("injected failure of a task")
            for _ in range(1_200 if trouble == "kill" and part == PARTS - 1 else 0):
                if Path(folder, "killed").exists():
                    break
                SYSTEM_CLOCK.wait(never, 100)

    return pass_on


@dataclass(frozen=True)
class LostResult:
    """Share whose first attempt fails after it has written everything.

    This simulates an attempt that another attempt overtook. Speculation does not occur:
    Spark never runs a second attempt on the host of the first.
    """

    share: Share

    def write(self, rows: Iterator[pa.RecordBatch]) -> Written:
        from pyspark import TaskContext

        written = self.share.write(rows)
        context = TaskContext.get()
        if context is not None and context.attemptNumber() == 0:
            raise RuntimeError("injected loss of a task result")
        return written


def _lose_result(trouble: str) -> Any:
    share = append_spark.share_of

    def lost_result(*given: Any, **named: Any) -> Any:
        made = share(*given, **named)
        return LostResult(made) if trouble == "lost" else made

    return mock.patch.object(append_spark, "share_of", lost_result)


class _written_slowly:  # noqa: N801 - used as a function.
    """Context that sweeps repeatedly while a job writes."""

    def __init__(self, client: persist.Client, done: threading.Event) -> None:
        self._client = client
        self._done = done
        self.swept: list[int] = []
        self._thread = threading.Thread(target=self._sweep)

    def __enter__(self) -> list[int]:
        self._thread.start()
        return self.swept

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sweep(self) -> None:
        while not self._done.is_set():
            self.swept.append(self._client._maintenance()._collector.sweep())
            SYSTEM_CLOCK.wait(self._done, 100)
        self.swept.append(self._client._maintenance()._collector.sweep())


def _kill_one(spark: Any, folder: Path, done: threading.Event) -> None:
    """Kill an executor after a task has started, as the OOM killer does."""
    last = re.compile(rf"attempt-{PARTS - 1}-0-\d+")
    begun: list[Path] = []
    while not done.is_set() and not begun:
        SYSTEM_CLOCK.wait(done, 50)
        begun = [each for each in folder.iterdir() if last.fullmatch(each.name)]
    victim = int(begun[0].read_text()) if begun else 0
    if victim in executors(spark) and not done.is_set():
        os.kill(victim, signal.SIGKILL)
    (folder / "killed").touch()


def executors(spark: Any) -> list[int]:
    """Return the process ids of the executors, which are children of the driver JVM."""
    jvm = spark.sparkContext._gateway.proc.pid
    pids: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == jvm and b"CoarseGrainedExecutorBackend" in command:
            pids.append(int(stat.parent.name))
    return sorted(pids)


@command
def reached(spark: Any, url: str, redirect: str | None = None) -> tuple[str, str]:
    """Return whether executors see the location; `redirect` sends them to another folder."""
    storage_access._known.clear()
    probe_results = storage_access._probe_results

    def redirected(spark: Any, path: str, nonce: str) -> Any:
        return probe_results(spark, str(Path(redirect or "", Path(path).name)), nonce)

    with mock.patch.object(
        storage_access, "_probe_results", redirected if redirect else probe_results
    ):
        try:
            return "reached", storage_access.find_native_root(spark, url) or ""
        except PenstockError as error:
            return "refused", f"{error}\n{error.detail}"


@command
def damaged(spark: Any, url: str, name: str) -> str:
    """Return the error of a read of a damaged collection."""
    try:
        ps.read(spark, url, name, hold=False).collect()
    except PenstockError as error:
        return repr(error)
    return "nothing"


@command
def round_trip(spark: Any, url: str) -> dict[str, Any]:
    """Append twice, and return current contents, earlier contents and changes."""
    extras: list[Any] = []
    with mock.patch.object(storage_access.log, "info", lambda *_, extra: extras.append(extra)):
        frame = spark.range(0, 100, 1, 2).selectExpr("id", "cast(id as string) as name")
        first = ps.append(frame, url, "numbers", key=["id"])
        more = frame.where("id < 1").selectExpr("id + 100 as id", "name")
        later = ps.append(more, url, "numbers")
        return {
            "first": ps.read(spark, url, "numbers", first).count(),
            "all": sorted(row["id"] for row in ps.read(spark, url, "numbers").collect()),
            "changed": ps.changes(spark, url, "numbers", first + 1, later + 1).count(),
            "readers": sorted({str(extra) for extra in extras}),
        }


@command
def ingested(spark: Any, file: str) -> None:
    """Ingest the sources of a file once. Tasks read even small initial snapshots."""
    with mock.patch.object(snapshot, "PAGES_WORTH_A_TASK", 4):
        run(file, once=True, jobs=tasks_of(spark), spark_bytes=0)


def main(requests: BinaryIO, responses: BinaryIO) -> None:
    spark = ps.session(master=MASTER, config=CONFIG)
    try:
        while True:
            try:
                name, arguments = pickle.load(requests)
            except EOFError:
                return
            try:
                response: Any = ("answer", COMMANDS[name](spark, **arguments))
            except BaseException:  # noqa: BLE001 - sent to the test, which raises it.
                response = ("error", traceback.format_exc())
            pickle.dump(response, responses)
            responses.flush()
    finally:
        spark.stop()


if __name__ == "__main__":
    # SUBTLE: output of Spark must not mix with the responses.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    main(sys.stdin.buffer, out)
