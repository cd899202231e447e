"""One Spark session for all tests that need one, started as a user's is.

Starting costs 5 to 20 seconds, so there is one in a run, and only if a test
asks for it. Such tests carry the marker `spark`: `-m "not spark"` leaves out
every one that starts a JVM.

Beside it there is `cluster`, for what only happens where executors are
processes of their own. It runs in another process, `spark/on_cluster.py`.
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

# pyspark is imported where it is used: every run loads this file, few need Spark.
if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.fix_objects import ObjectServer

MASTER: Final = "local[2]"

JVM_ENDS_WITHIN_S: Final = 120


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "spark: starts a JVM")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"spark", "cluster"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SparkSession]":
    """A session on two cores, and afterwards no trace of its JVM."""
    from penstock.engine.spark import session

    with pytest.MonkeyPatch.context() as patch:
        # The launcher of Java is not left in the cache of whoever runs the tests.
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        made = session(
            master=MASTER,
            config={
                "spark.driver.memory": "1g",
                "spark.sql.shuffle.partitions": "4",
                "spark.speculation": "false",
            },
        )
    try:
        yield made
    finally:
        end(made)


def end(spark: "SparkSession") -> None:
    """Stop the session and wait for its JVM to be gone; `stop` alone leaves it running."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(JVM_ENDS_WITHIN_S)
    SparkContext._gateway = SparkContext._jvm = None


@dataclass
class Cluster:
    """A session on `local-cluster` in a process of its own."""

    process: "subprocess.Popen[bytes]"

    def run(self, name: str, /, **arguments: Any) -> Any:
        """Have it do what `on_cluster.py` knows under that name."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump((name, arguments), self.process.stdin)
        self.process.stdin.flush()
        kind, answer = pickle.load(self.process.stdout)
        assert kind == "answer", answer
        return answer

    def end(self) -> None:
        """Let it stop its session and be gone, with its JVM and the executors."""
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
    """A SPARK_HOME of our own, of links: executors leave their files in its `work`."""
    import pyspark

    home = folder / "home"
    home.mkdir()
    for each in Path(pyspark.__file__).parent.iterdir():
        if each.name != "work":
            (home / each.name).symlink_to(each)
    return home


@pytest.fixture(scope="session")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, object_server: "ObjectServer"
) -> Iterator[Cluster]:
    """Two executors of one core each, with speculation on, that know the S3 server."""
    folder = tmp_path_factory.mktemp("cluster")
    home = home_of_links(folder)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.on_cluster"],
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
    made = Cluster(process)
    try:
        yield made
    finally:
        made.end()
