"""Chaos scenarios with Spark tasks in separate processes; executors and driver are killed.

Tests without Spark and `make soak` cover the planted bugs.
"""

from collections.abc import Iterator

import pytest
from tests.chaos.scenario_run import run_scenario
from tests.chaos.scenarios import ON_SPARK, Scenario
from tests.chaos.spark import SparkRuntime

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def runtime() -> Iterator[SparkRuntime]:
    made = SparkRuntime()
    yield made
    made.close()


# `make soak` runs the other scenarios: each killed driver needs a new JVM, which is slow.
@pytest.mark.parametrize("scenario", ON_SPARK[:1], ids=str)
def test_chaos_run_on_cluster_passes(scenario: Scenario, runtime: SparkRuntime) -> None:
    verdict = run_scenario(scenario, runtime=runtime)
    assert verdict.fired
    assert not verdict.violations, verdict.violations[:3]
