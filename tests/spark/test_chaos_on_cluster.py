"""Transactions whose tasks run in processes of their own, while those and the driver are killed.

Their planted bugs are looked for without Spark, and by `make soak`.
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


# The others by `make soak`: a driver that is killed takes its JVM along, and another must start.
@pytest.mark.parametrize("scenario", ON_SPARK[:1], ids=str)
def test_it_passes_clean(scenario: Scenario, runtime: SparkRuntime) -> None:
    verdict = run_scenario(scenario, runtime=runtime)
    assert verdict.fired
    assert not verdict.violations, verdict.violations[:3]
