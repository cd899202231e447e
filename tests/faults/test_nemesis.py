"""A short run of the nemesis; `make soak` gives it all the time there is."""

import os
from pathlib import Path

import pytest

from tests.faults.nemesis import play_processes, play_simulation

SEED = int(os.environ.get("PENSTOCK_TEST_SEED") or 2_026)


@pytest.mark.parametrize("seed", range(SEED, SEED + 5))
@pytest.mark.parametrize("power", [False, True], ids=["memory", "power"])
def test_no_promise_is_broken_by_turns_in_one_process(seed: int, power: bool) -> None:
    found = play_simulation(seed, power=power)
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize("seed", [SEED, pytest.param(SEED + 1, marks=pytest.mark.long)])
def test_no_promise_is_broken_by_processes_that_are_killed_and_stopped(
    seed: int, tmp_path: Path
) -> None:
    found = play_processes(seed, 12, tmp_path)
    assert not found, "\n".join(map(str, found))
