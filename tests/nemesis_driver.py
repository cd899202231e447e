"""Command line of the nemeses: rounds with a seed, until the time is over or a check fails.

    python -m tests.….nemesis --for SECONDS [--seed N]

A round has a folder, which is kept after a violation, and a seed, which is printed. To
replay it: --seed N --for 1.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from penstock.clock import SYSTEM_CLOCK

T = TypeVar("T")


@dataclass
class Tally:
    """The figures of a run of one nemesis, printed as its last line."""

    nemesis: str
    seed: int = 0
    seconds: int = 0
    rounds: int = 0
    kills: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """Faults other than `kill -9` of a process, by kind."""

    observations: Counter[str] = field(default_factory=Counter)
    """States that were read and checked, by kind."""

    violations: int = 0

    def line(self) -> str:
        return json.dumps(vars(self))


class Turn(NamedTuple):
    """Arguments of one round."""

    number: int
    seed: int
    seconds: float
    """Remaining time of the run."""


def argument_parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all nemeses have."""
    parser = argparse.ArgumentParser(description=doc.split("\n", 1)[0])
    parser.add_argument("--for", dest="seconds", type=float, default=60)
    parser.add_argument("--seed", type=int)
    return parser


def run_nemesis(
    options: argparse.Namespace, tally: Tally, play: Callable[[Turn], Sequence[object]]
) -> int:
    """Run rounds until the time is over or a check fails; return the exit status."""
    tally.seed = options.seed
    if tally.seed is None:
        tally.seed = int(
            os.environ.get("PENSTOCK_TEST_SEED") or random.SystemRandom().getrandbits(31)
        )
    began_ms = SYSTEM_CLOCK.boot_ms()
    deadline_ms = began_ms + int(options.seconds * 1_000)
    while not tally.violations and (tally.rounds == 0 or SYSTEM_CLOCK.boot_ms() < deadline_ms):
        left_s = (deadline_ms - SYSTEM_CLOCK.boot_ms()) / 1_000
        turn = Turn(tally.rounds, tally.seed + tally.rounds, left_s)
        say(f"round {turn.number}: --seed {turn.seed}")
        tally.rounds += 1
        tally.violations += len(play(turn))
    tally.seconds = (SYSTEM_CLOCK.boot_ms() - began_ms) // 1_000
    say(tally.line())
    return int(bool(tally.violations))


def in_folder(play: Callable[[Path], list[T]]) -> list[T]:
    """Run a round in a new folder; print and keep the folder if the round has violations."""
    folder = Path(tempfile.mkdtemp(prefix="nemesis-"))
    try:
        violations = play(folder)
    except BaseException:
        say(f"files of the round: {folder}")
        raise
    if violations:
        say("\n".join([*map(str, violations[:20]), f"files of the round: {folder}"]))
    else:
        shutil.rmtree(folder)
    return violations


def wait(ms: int) -> None:
    SYSTEM_CLOCK.wait(threading.Event(), ms)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
