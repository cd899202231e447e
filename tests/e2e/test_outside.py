"""The product from outside: killed, started again, asked to stop; nothing lost, nothing torn."""

import os
import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.outside import outside
from tests.e2e.sampling import ALLOWED, FEWEST, Sample, unbounded


@pytest.mark.spark
def test_whatever_is_killed_goes_on_and_ends_equal(tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", "1"))
    chance = random.Random(seed)
    with ExitStack() as stack:
        run = outside(stack, tmp_path, chance, sampled=False)
        try:
            for early in chance.sample([True, False, chance.random() < 0.5], 3):
                run.kill(early=early)
            run.stop()
            compared = run.end()
        except BaseException as error:
            error.add_note(f"seed {seed}: {'; '.join(run.told)}")
            raise
        assert run.reader.commits > 3
    assert compared.differences == ()
    assert compared.trivial == ""
    assert compared.looks > 0


def samples(**growth: float) -> list[Sample]:
    return [
        Sample(
            number,
            {
                name: int(limit * (1 + growth.get(name, 0) * number))
                for name, limit in ALLOWED.items()
            },
            following=True,
        )
        for number in range(4 * FEWEST)
    ]


def test_what_grows_for_ever_is_found() -> None:
    assert unbounded(samples()) == []
    for name in ALLOWED:
        (found,) = unbounded(samples(**{name: 0.1}))
        assert found.startswith(f"{name} grew from ")
