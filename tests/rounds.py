"""Rounds, each by a seed, until the time is over or one breaks a promise.

    python -m tests.….nemesis --for SECONDS [--seed N]

This is what the nemeses have in common. A round has a folder, which stays if something was
wrong, and a seed, which is printed. To play it again: --seed N --for 1.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from penstock.clock import SYSTEM_CLOCK

T = TypeVar("T")


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


def rounds(asked: argparse.Namespace) -> Iterator[Turn]:
    """At least one, until the time is over."""
    seed = asked.seed
    if seed is None:
        seed = int(os.environ.get("PENSTOCK_TEST_SEED") or random.SystemRandom().getrandbits(31))
    deadline = SYSTEM_CLOCK.boot_ms() + int(asked.seconds * 1_000)
    number = 0
    while number == 0 or SYSTEM_CLOCK.boot_ms() < deadline:
        yield Turn(number, seed + number, (deadline - SYSTEM_CLOCK.boot_ms()) / 1_000)
        number += 1
    say(f"{number} rounds, no promise broken")


def play_rounds(asked: argparse.Namespace, play: Callable[[int, float], Sequence[object]]) -> int:
    """Play until something is wrong, by seeds and for some seconds each; the exit status."""
    for number, seed, seconds in rounds(asked):
        say(f"round {number}: --seed {seed}")
        if play(seed, max(10, min(60, seconds))):
            return 1
    return 0


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
