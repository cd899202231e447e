"""A whole pipeline under live traffic, killed again and again, looked at from outside only.

    python -m tests.e2e.outside --kills 20 --for 600 --seed 7

A shop in Postgres is followed into SQLite by `penstock up`, whose whole process group is
killed at random moments and started again. Meanwhile somebody reads SQLite, where the
shop's books must add up at every look. Then it is asked to stop, traffic ends, `up --once`
brings the rest, and Postgres, collections and SQLite are compared. What grows meanwhile is
measured: it must not grow for ever.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.clock import SYSTEM_CLOCK
from penstock.demo.comparing import Compared, compare, position, time_at
from tests.e2e.process import Up, lines, until, well
from tests.e2e.sampling import Sampler, table, unbounded
from tests.e2e.shop import Reader, Stage, staged

EARLY_S: Final = (0.5, 12.0)
"""When one is killed that has perhaps not yet begun, after its start."""

LATE_S: Final = (0.0, 3.0)
"""When one is killed that follows, after it does."""


@dataclass
class Outside:
    """What is done to a pipeline, and what was seen."""

    stage: Stage
    chance: random.Random
    reader: Reader
    sampler: Sampler | None = None
    told: list[str] = field(default_factory=list)

    def start(self, *words: str) -> Up:
        """One more `up`."""
        words = words or ("--http", "127.0.0.1:0")
        up = Up(self.stage.folder, "up", str(self.stage.file), *words)
        if self.sampler is not None:
            self.sampler.watch(up)
        return up

    def follows(self, up: Up) -> None:
        """Wait until this one has brought something to SQLite."""
        before = self.reader.commits

        def brought() -> bool:
            up.check()
            self.stage.traffic.check()
            return self.reader.commits > before + 1

        until(brought, "SQLite to follow")

    def kill(self, *, early: bool, after_s: float = 0.0) -> None:
        """One life, cut short: while it starts, or while it follows and `after_s` later."""
        with self.start() as up:
            if not early:
                self.follows(up)
            moment = self.chance.uniform(*(EARLY_S if early else LATE_S))
            self.say(f"killed {moment + after_s:.1f} s after it {'began' if early else 'followed'}")
            self._live(up, moment + after_s)
        self.check()

    def stop(self) -> None:
        """One life that is asked to end: it does, in order, and leaves nothing to anybody."""
        with self.start() as up:
            self.follows(up)
            (source,) = up.state()["sources"]
            self.follows(up)
            asked_ms = SYSTEM_CLOCK.boot_ms()
            assert up.terminate() == 0, up.said()[-4_000:]
            self.say(f"stopped within {(SYSTEM_CLOCK.boot_ms() - asked_ms) / 1_000:.1f} s")
        lake = self.stage.places.lake
        (status,) = lines(well(self.stage.folder, "status", lake, "--json"))
        for each in status["storage_locations"]:
            assert each["writer"] is None, (each["location"], each["writer"])
        # What was durable is confirmed, so that the server need not keep it for us.
        slots = self.stage.database.sql(
            "SELECT active, confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots",
            [source["lsn"]],
        )
        assert slots == [(False, True)], (source["lsn"], slots)

    def end(self) -> Compared:
        """Close the shop, bring the rest, and compare."""
        self.stage.traffic.stop()
        lsn = position(self.stage.places.postgres)
        with self.start("--once", "--http", "none") as up:
            assert up.wait() == 0, up.said()[-4_000:]
        self.reader.stop()
        as_of = time_at(self.stage.places, lsn)
        assert as_of is not None, "it ended before it had all that was upstream at its start"
        return compare(
            self.stage.places,
            as_of,
            made=self.stage.traffic.made,
            looks=self.reader.looks,
            torn=self.reader.wrong,
        )

    def check(self) -> None:
        """What must hold at all times."""
        assert not self.reader.wrong, self.reader.wrong
        self.stage.traffic.check()

    def say(self, line: str) -> None:
        self.told.append(line)

    def _live(self, up: Up, seconds: float) -> None:
        until_ms = SYSTEM_CLOCK.boot_ms() + int(seconds * 1_000)

        def lived() -> bool:
            up.check()
            self.check()
            return SYSTEM_CLOCK.boot_ms() >= until_ms

        until(lived, "its moment", patience_s=seconds + 60)


def outside(stack: ExitStack, folder: Path, chance: random.Random, *, sampled: bool) -> Outside:
    """A shop with traffic, and somebody who reads."""
    stage = stack.enter_context(staged(folder, chance))
    reader = Reader(stage.places.sqlite)
    stack.callback(reader.stop)
    sampler = None
    if sampled:
        sampler = Sampler(stage)
        stack.callback(sampler.stop)
    stage.traffic.start()
    return Outside(stage, chance, reader, sampler)


class _Loud(Outside):
    def say(self, line: str) -> None:
        super().say(line)
        _say(f"  {line}; {self.reader.looks} looks, {self.stage.traffic.made.transactions} done")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.outside")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--for", dest="seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("PENSTOCK_TEST_SEED", "1")))
    given: Any = parser.parse_args(arguments)
    # Whoever is told to end ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    _say(f"seed {given.seed}")
    chance = random.Random(given.seed)
    ends_ms = SYSTEM_CLOCK.boot_ms() + int(given.seconds * 1_000)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-e2e-")))
        folder.chmod(0o711)
        made = outside(stack, folder, chance, sampled=True)
        run = _Loud(made.stage, made.chance, made.reader, made.sampler)
        for left in range(given.kills, 0, -1):
            share_s = (ends_ms - SYSTEM_CLOCK.boot_ms()) / 1_000 / left
            early = chance.random() < 0.3
            # Longer lives with a longer budget; a start is about twenty seconds of its share.
            run.kill(early=early, after_s=0.0 if early else max(0.0, share_s - 25))
        run.stop()
        compared = run.end()
        assert run.sampler is not None
        samples = run.sampler.stop()
    for line in table(samples):
        _say(line)
    grown = unbounded(samples)
    for each in (*compared.differences, *grown, *filter(None, [compared.trivial])):
        _say(f"BAD {each}")
    _say(
        f"{given.kills} kills, {compared.looks} looks, {compared.rows} rows compared after "
        f"{compared.updates} updates and {compared.deletes} deletes: "
        f"{'equal' if compared.equal else 'DIFFERENT'}"
    )
    return int(bool(grown) or not compared.equal or bool(compared.trivial))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
