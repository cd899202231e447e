"""Each scenario is told twice: clean, and nothing is wrong; with its bug, and it is found."""

from dataclasses import replace

import pytest

from penstock.testing.postgres import Database
from tests.chaos.playing import Verdict, play
from tests.chaos.scenarios import SHORT, Scenario

SEED = 7

OFTEN = {(each.connector, each.fault, each.shards > 1): each for each in reversed(SHORT)}
"""Of those that differ in little, the first; all of them by `make soak`."""

BUGS = {each.defect: each for each in reversed(SHORT)}
"""Each bug once; with every scenario that has it, by `make soak`."""


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> Database | None:
    """An empty database, if the scenario needs one."""
    scenario: Scenario = request.node.callspec.params["scenario"]
    if scenario.connector != "postgres":
        return None
    database: Database = request.getfixturevalue("database")
    return database


def told(verdict: Verdict) -> str:
    return "\n".join(f"{each.name}: {each.detail}" for each in verdict.broken[:5])


@pytest.mark.parametrize("scenario", [*reversed(OFTEN.values())], ids=str)
def test_it_passes_clean(scenario: Scenario, endpoint: Database | None) -> None:
    verdict = play(scenario, seed=SEED, database=endpoint)
    assert verdict.fired
    assert not verdict.broken, told(verdict)


@pytest.mark.parametrize("scenario", [*reversed(BUGS.values())], ids=str)
def test_its_bug_is_found(scenario: Scenario, endpoint: Database | None) -> None:
    verdict = play(scenario, defect=scenario.defect, seed=SEED, database=endpoint)
    assert verdict.fired
    assert scenario.is_found_by(verdict.names)


def test_shards_that_commit_apart_are_not_of_one_tick() -> None:
    apart = next(each for each in SHORT if each.fault is not None and each.fault.behind)
    verdict = play(replace(apart, whole=True), seed=SEED)
    assert verdict.fired
    assert verdict.names == {"one-tick"}
