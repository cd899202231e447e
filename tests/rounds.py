"""Rounds, each by a seed, until the time is over or one breaks a promise.

    python -m tests.….nemesis --for SECONDS [--seed N]

This is what the nemeses have in common. A round has a folder, which stays if something was
wrong, and a seed, which is printed. To play it again: --seed N --for 1.
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
    """A round that is to be played."""

    number: int
    seed: int
    seconds: float
    """How many are left for it and all after it."""


def parser_of(doc: str) -> argparse.ArgumentParser:
    """What every nemesis can be asked for."""
    parser = argparse.ArgumentParser(description=doc.split("\n", 1)[0])
    parser.add_argument("--for", dest="seconds", type=float, default=60)
    parser.add_argument("--seed", type=int)
    return parser


def play_rounds(
    asked: argparse.Namespace, tally: Tally, play: Callable[[Turn], Sequence[object]]
) -> int:
    """Play rounds until the time is over or a promise is broken; the exit status."""
    tally.seed = asked.seed
    if tally.seed is None:
        tally.seed = int(
            os.environ.get("PENSTOCK_TEST_SEED") or random.SystemRandom().getrandbits(31)
        )
    began_ms = SYSTEM_CLOCK.boot_ms()
    deadline_ms = began_ms + int(asked.seconds * 1_000)
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
    """What is wrong after a round in a folder of its own, which is then told and kept."""
    folder = Path(tempfile.mkdtemp(prefix="nemesis-"))
    try:
        wrong = play(folder)
    except BaseException:
        say(f"what was stored is in {folder}")
        raise
    if wrong:
        say("\n".join([*map(str, wrong[:20]), f"what was stored is in {folder}"]))
    else:
        shutil.rmtree(folder)
    return wrong


def wait(ms: int) -> None:
    SYSTEM_CLOCK.wait(threading.Event(), ms)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
