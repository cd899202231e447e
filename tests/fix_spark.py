"""One Spark session for all tests that need one, started as a user's is.

Starting costs 5 to 20 seconds, so there is one in a run, and only if a test
asks for it. Such tests carry the marker `spark`: `-m "not spark"` leaves out
every one that starts a JVM.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest

# pyspark is imported where it is used: every run loads this file, few need Spark.
if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER: Final = "local[2]"

JVM_ENDS_WITHIN_S: Final = 120


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "spark: starts a JVM")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
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
