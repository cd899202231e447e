"""Spark sessions of the tests, started in the same way as a user's.

A start takes 5 to 20 seconds, so a run has one session, and only if a test uses the
fixture `spark`. Such tests have the marker `spark`: `-m "not spark"` deselects every test
that starts a JVM. The fixture `cluster` has executors in separate processes; its driver
runs in a child process, `spark/cluster_process.py`.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

# pyspark is imported lazily: every run loads this file, few need Spark.
if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.fix_objects import ObjectServer

MASTER: Final = "local[2]"

JVM_ENDS_WITHIN_S: Final = 120

SHORT_LIVED: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of a JVM that ends before optimized code repays its compilation: 40 % less CPU time."""

JVM_OPTIONS: Final = ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS", "SPARK_DAEMON_JAVA_OPTS")
"""Variables from which Spark takes the options of drivers, of its launcher, and of a master."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "spark: starts a JVM")
    for name in JVM_OPTIONS:
        # Also for the processes that tests start. A value of the user has priority.
        os.environ.setdefault(name, SHORT_LIVED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"spark", "cluster"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SparkSession]":
    """Yield a session on two cores; end its JVM afterwards."""
    from penstock.engine.spark import session

    with pytest.MonkeyPatch.context() as patch:
        # Do not leave the launcher of Java in the user's cache.
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        created = session(
            master=MASTER,
            config={
                "spark.driver.memory": "1g",
                "spark.sql.shuffle.partitions": "4",
                "spark.speculation": "false",
            },
        )
    try:
        yield created
    finally:
        end(created)


def end(spark: "SparkSession") -> None:
    """Stop the session and wait for the end of its JVM; `stop` alone leaves it running."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(JVM_ENDS_WITHIN_S)
    SparkContext._gateway = SparkContext._jvm = None


@dataclass
class Cluster:
    """Session on `local-cluster` in a child process."""

    process: "subprocess.Popen[bytes]"

    def run(self, name: str, /, **arguments: Any) -> Any:
        """Run the function of `cluster_process.py` with that name and return its result."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump((name, arguments), self.process.stdin)
        self.process.stdin.flush()
        kind, answer = pickle.load(self.process.stdout)
        assert kind == "answer", answer
        return answer

    def end(self) -> None:
        """Stop the session and wait for the end of the process, its JVM and the executors."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(JVM_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def home_of_links(folder: Path) -> Path:
    """Create a SPARK_HOME of symbolic links: executors write files into its `work`."""
    import pyspark

    home = folder / "home"
    home.mkdir()
    for path in Path(pyspark.__file__).parent.iterdir():
        if path.name != "work":
            (home / path.name).symlink_to(path)
    return home


@pytest.fixture(scope="session")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, object_server: "ObjectServer"
) -> Iterator[Cluster]:
    """Yield a cluster of two executors with one core each, speculation, and the S3 server."""
    folder = tmp_path_factory.mktemp("cluster")
    home = home_of_links(folder)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.cluster_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        env={
            **os.environ,
            **object_server.environment,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "XDG_CACHE_HOME": str(folder / "cache"),
        },
    )
    created = Cluster(process)
    try:
        yield created
    finally:
        created.end()
