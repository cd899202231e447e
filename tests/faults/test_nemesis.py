"""Short run of the nemesis; `make soak` runs it longer."""

import os
from pathlib import Path

import pytest

from tests.faults.nemesis import play_processes, play_simulation

SEED = int(os.environ.get("PENSTOCK_TEST_SEED") or 2_026)


@pytest.mark.parametrize("seed", range(SEED, SEED + 5))
@pytest.mark.parametrize("power", [False, True], ids=["memory", "power"])
def test_nemesis_simulation_in_one_process_finds_no_violation(seed: int, power: bool) -> None:
    found = play_simulation(seed, power=power)
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize("seed", [SEED, pytest.param(SEED + 1, marks=pytest.mark.long)])
def test_nemesis_with_killed_and_stopped_processes_finds_no_violation(
    seed: int, tmp_path: Path
) -> None:
    found = play_processes(seed, 12, tmp_path)
    assert not found, "\n".join(map(str, found))
