"""Repeated runs of all scenarios, in random order and with random data.

    python -m tests.chaos.soak --for SECONDS [--seed N] [--only TEXT] [--runtime local|spark]

Each scenario runs clean and with its bug, and prints a line with the result. Some run on
Spark, whose executors and driver are killed; the others in two processes. The exit status is
1 if a scenario failed. Without `--once` the run ends at the first failure. The options that
repeat it are printed.
"""

import argparse
import itertools
import os
import random
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from penstock.clock import SYSTEM_CLOCK
from penstock.servers.postgres import PostgresServer
from tests.chaos.scenario_run import Verdict, run_scenario
from tests.chaos.scenarios import LONG, LONG_ON_SPARK, Scenario
from tests.chaos.spark import SparkRuntime
from tests.nemesis_driver import Tally, say
from tests.shared_postgres import QUICK

SPARK_EVERY = 10
"""One scenario in this many runs on Spark, where it takes ten times as long."""


class Soak:
    """Server, cluster and statistics of all scenarios."""

    def __init__(self, stack: ExitStack) -> None:
        self._server = stack.enter_context(PostgresServer(settings=QUICK))
        self._spark = SparkRuntime()
        stack.callback(self._spark.close)
        self._databases = 0
        self.counts: Counter[str] = Counter()
        self.tally = Tally("chaos")

    def run_both(self, scenario: Scenario, seed: int, *, spark: bool) -> bool:
        """Run a scenario clean and with its bug; return whether both ended as expected."""
        clean = self._play(scenario, seed, None, spark=spark)
        bug = self._play(scenario, seed, scenario.defect, spark=spark)
        well = clean.fired and not clean.violations
        found = bug.fired and scenario.is_detected_by(bug.names)
        where, names = "spark " if spark else "", ", ".join(sorted(bug.names))
        say(
            f"{'ok ' if well and found else 'BAD'} {where}{scenario} seed={seed}: "
            f"{'fired' if clean.fired else 'DID NOT FIRE'}, "
            f"{'clean' if not clean.violations else 'BROKEN'}, "
            f"{scenario.defect} {'found' if found else 'NOT FOUND'} ({names}); "
            f"{clean.commits} commits, {clean.streams} streams, {clean.runtimes} runtimes"
        )
        for verdict in (clean, bug):
            self._count(scenario, verdict)
        self.tally.violations += len(clean.violations)
        for each in clean.violations[:5] if not well else ():
            say(f"    {each.name}: {each.detail}")
        self.counts[f"{where}{scenario.connector}"] += 1
        self.counts[f"{where}{scenario.action}"] += 1
        return well and found

    def _count(self, scenario: Scenario, verdict: Verdict) -> None:
        self.tally.rounds += 1
        self.tally.observations["endpoint reads"] += verdict.observations
        if not verdict.fired or scenario.action == "no fault":
            return
        kind = scenario.fault.action if scenario.fault is not None else scenario.action
        if kind.startswith("crash"):
            self.tally.kills += 1
        else:
            self.tally.faults[kind] += 1

    def _play(self, scenario: Scenario, seed: int, defect: str | None, *, spark: bool) -> Verdict:
        runtime = self._spark if spark else None
        if scenario.connector != "postgres":
            return run_scenario(scenario, defect=defect, seed=seed, runtime=runtime)
        self._databases += 1
        database = self._server.create_database(f"chaos{self._databases}")
        try:
            return run_scenario(
                scenario, defect=defect, seed=seed, database=database, runtime=runtime
            )
        finally:
            database.drop()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--for", dest="seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("PENSTOCK_TEST_SEED", "1")))
    parser.add_argument("--only", default="", help="Run scenarios whose name contains this.")
    parser.add_argument(
        "--once", action="store_true", help="Run each scenario once, regardless of the time."
    )
    parser.add_argument("--runtime", choices=["local", "spark"], help="Use only this runtime.")
    given = parser.parse_args(arguments)
    began_ms = SYSTEM_CLOCK.boot_ms()
    deadline = began_ms + int(given.seconds * 1_000)
    rng = random.Random(given.seed)
    with ExitStack() as stack:
        soak = Soak(stack)
        failed: list[str] = []
        for number in itertools.count():
            for scenario, spark in _order(rng, given.only, runtime=given.runtime):
                seed = random.Random(f"{given.seed} {number} {scenario}").randrange(10**6)
                if not soak.run_both(scenario, seed, spark=spark):
                    failed.append(f"--seed {given.seed} --only {scenario} --once")
                if not given.once and (failed or SYSTEM_CLOCK.boot_ms() > deadline):
                    break
            if given.once or failed or SYSTEM_CLOCK.boot_ms() > deadline:
                break
        for what, count in sorted(soak.counts.items()):
            say(f"{count:5} {what}")
        for options in failed:
            say(f"failed; to repeat it with the data of the first round: {options}")
        soak.tally.seed = given.seed
        soak.tally.seconds = (SYSTEM_CLOCK.boot_ms() - began_ms) // 1_000
        say(soak.tally.line())
    return int(bool(failed))


def _order(rng: random.Random, only: str, *, runtime: str | None) -> list[tuple[Scenario, bool]]:
    local = [(scenario, False) for scenario in dict.fromkeys(LONG) if only in str(scenario)]
    on_spark = [(scenario, True) for scenario in LONG_ON_SPARK if only in str(scenario)]
    if runtime == "local":
        on_spark = []
    if runtime == "spark":
        local = []
    rng.shuffle(local)
    rng.shuffle(on_spark)
    mixed = []
    while local or on_spark:
        mixed += local[:SPARK_EVERY] + on_spark[:1]
        local, on_spark = local[SPARK_EVERY:], on_spark[1:]
    return mixed


if __name__ == "__main__":
    assert Path("tests/chaos").is_dir(), "run it in the project's folder"
    sys.exit(main(sys.argv[1:]))
