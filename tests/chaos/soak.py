"""Every scenario again and again, in another order and with other data each time.

    python -m tests.chaos.soak --for SECONDS [--seed N] [--only TEXT]

Each is told clean and with its bug, and has a line that says what came of it. Some run on
Spark, whose executors and driver are killed; the others in two processes of ours. It ends
with status 1 at the first that is not as it must be, and with the command that tells that
one again.
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
from penstock.testing.postgres import PostgresServer
from tests.chaos.playing import Verdict, play
from tests.chaos.scenarios import LONG, LONG_ON_SPARK, Scenario
from tests.chaos.spark import OnSpark
from tests.fix_postgres import QUICK

SPARK_EVERY = 10
"""One scenario in so many runs on Spark, where it takes as long as ten others."""


class Soak:
    """What all scenarios share: a server, a cluster, and what was counted."""

    def __init__(self, stack: ExitStack) -> None:
        self._server = stack.enter_context(PostgresServer(settings=QUICK))
        self._spark = OnSpark()
        stack.callback(self._spark.close)
        self._databases = 0
        self.counts: Counter[str] = Counter()

    def tells(self, scenario: Scenario, seed: int, *, spark: bool) -> bool:
        """Both versions of a story; whether they ended as they must."""
        clean = self._play(scenario, seed, None, spark=spark)
        bug = self._play(scenario, seed, scenario.defect, spark=spark)
        well = clean.fired and not clean.broken
        found = bug.fired and scenario.is_found_by(bug.names)
        where, names = "spark " if spark else "", ", ".join(sorted(bug.names))
        say(
            f"{'ok ' if well and found else 'BAD'} {where}{scenario} seed={seed}: "
            f"{'fired' if clean.fired else 'DID NOT FIRE'}, "
            f"{'clean' if not clean.broken else 'BROKEN'}, "
            f"{scenario.defect} {'found' if found else 'NOT FOUND'} ({names}); "
            f"{clean.commits} commits, {clean.streams} streams, {clean.runtimes} runtimes"
        )
        for each in clean.broken[:5] if not well else ():
            say(f"    {each.name}: {each.detail}")
        self.counts[f"{where}{scenario.connector}"] += 1
        self.counts[f"{where}{scenario.deed}"] += 1
        return well and found

    def _play(self, scenario: Scenario, seed: int, defect: str | None, *, spark: bool) -> Verdict:
        runtime = self._spark if spark else None
        if scenario.connector != "postgres":
            return play(scenario, defect=defect, seed=seed, runtime=runtime)
        self._databases += 1
        database = self._server.create_database(f"chaos{self._databases}")
        try:
            return play(scenario, defect=defect, seed=seed, database=database, runtime=runtime)
        finally:
            database.drop()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--for", dest="seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("PENSTOCK_TEST_SEED", "1")))
    parser.add_argument("--only", default="", help="scenarios with this in their name")
    parser.add_argument("--once", action="store_true", help="each of them once, however long")
    given = parser.parse_args(arguments)
    deadline = SYSTEM_CLOCK.boot_ms() + int(given.seconds * 1_000)
    chance = random.Random(given.seed)
    with ExitStack() as stack:
        soak = Soak(stack)
        for number in itertools.count():
            for scenario, spark in _order(chance, given.only):
                seed = random.Random(f"{given.seed} {number} {scenario}").randrange(10**6)
                if not soak.tells(scenario, seed, spark=spark):
                    say(
                        f"the same order: --seed {given.seed}; the same data, if it is of the first"
                    )
                    say(f"round: --seed {given.seed} --only {scenario} --once")
                    return 1
                if not given.once and SYSTEM_CLOCK.boot_ms() > deadline:
                    break
            if given.once or SYSTEM_CLOCK.boot_ms() > deadline:
                break
        for what, count in sorted(soak.counts.items()):
            say(f"{count:5} {what}")
    return 0


def _order(chance: random.Random, only: str) -> list[tuple[Scenario, bool]]:
    here = [(each, False) for each in dict.fromkeys(LONG) if only in str(each)]
    there = [(each, True) for each in LONG_ON_SPARK if only in str(each)]
    for each in (here, there):
        chance.shuffle(each)
    mixed = []
    while here or there:
        mixed += here[:SPARK_EVERY] + there[:1]
        here, there = here[SPARK_EVERY:], there[1:]
    return mixed


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    assert Path("tests/chaos").is_dir(), "run it in the project's folder"
    sys.exit(main(sys.argv[1:]))
