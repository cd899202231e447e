"""Each scenario runs clean without violations, and with a bug that is detected."""

from dataclasses import replace

import pytest

from penstock.servers.postgres import Database
from tests.chaos.scenario_run import Verdict, run_scenario
from tests.chaos.scenarios import SHORT, Scenario

SEED = 7

DISTINCT = {(each.connector, each.fault, each.shards > 1): each for each in reversed(SHORT)}
"""The first of similar scenarios; `make soak` runs all."""

BUGS = {each.defect: each for each in reversed(SHORT)}
"""One scenario for each bug; `make soak` runs all."""


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> Database | None:
    """Return an empty database, if the scenario needs one."""
    scenario: Scenario = request.node.callspec.params["scenario"]
    if scenario.connector != "postgres":
        return None
    database: Database = request.getfixturevalue("database")
    return database


def describe(verdict: Verdict) -> str:
    return "\n".join(f"{each.name}: {each.detail}" for each in verdict.violations[:5])


@pytest.mark.parametrize("scenario", [*reversed(DISTINCT.values())], ids=str)
def test_scenario_without_bug_has_no_violation(
    scenario: Scenario, endpoint: Database | None
) -> None:
    verdict = run_scenario(scenario, seed=SEED, database=endpoint)
    assert verdict.fired
    assert not verdict.violations, describe(verdict)


@pytest.mark.parametrize("scenario", [*reversed(BUGS.values())], ids=str)
def test_scenario_with_bug_reports_it(scenario: Scenario, endpoint: Database | None) -> None:
    verdict = run_scenario(scenario, defect=scenario.defect, seed=SEED, database=endpoint)
    assert verdict.fired
    assert scenario.is_detected_by(verdict.names)


def test_shards_that_commit_separately_violate_one_tick() -> None:
    apart = next(each for each in SHORT if each.fault is not None and each.fault.behind)
    verdict = run_scenario(replace(apart, whole=True), seed=SEED)
    assert verdict.fired
    assert verdict.names == {"one-tick"}
