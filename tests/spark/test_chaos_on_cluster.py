"""Transactions whose tasks run in processes of their own, while those and the driver are killed.

Their planted bugs are looked for without Spark, and by `make soak`.
"""

from collections.abc import Iterator

import pytest
from tests.chaos.playing import play
from tests.chaos.scenarios import ON_SPARK, Scenario
from tests.chaos.spark import OnSpark

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def runtime() -> Iterator[OnSpark]:
    made = OnSpark()
    yield made
    made.close()


# The others by `make soak`: a driver that is killed takes its JVM along, and another must start.
@pytest.mark.parametrize("scenario", ON_SPARK[:1], ids=str)
def test_it_passes_clean(scenario: Scenario, runtime: OnSpark) -> None:
    verdict = play(scenario, runtime=runtime)
    assert verdict.fired
    assert not verdict.broken, verdict.broken[:3]
