"""Processes that write to a store while a test observes them.

python -m tests.durable.children race URL NAME COUNT    starts at the first line on stdin
python -m tests.durable.children write URL COUNT        prints each acknowledged write
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from penstock.durable.location import open_blob
from penstock.errors import DurabilityLost, StoreError

SOURCE = Path(__file__).parents[2]


def contents_of(number: int) -> bytes:
    """Return object `number` of the writing child, long enough that a partial write is visible."""
    return f"object {number} ".encode() * 5_000


def started(*words: str, before: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    """Start a child process, wrapped in the command `before`, such as strace."""
    path = f"{SOURCE / 'src'}:{SOURCE}"
    return subprocess.Popen(
        [*before, sys.executable, "-m", "tests.durable.children", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def line_of(stream: IO[str] | None) -> str:
    """Return the next line, or an empty string when the child has ended."""
    assert stream is not None
    return stream.readline().strip()


def names_in(folder: Path) -> set[str]:
    """Return the names of the entries of a folder."""
    return {path.name for path in folder.iterdir()}


def race(url: str, name: str, count: int) -> None:
    blob = open_blob(url, writing=True)
    say("ready")
    sys.stdin.readline()
    for number in range(count):
        if blob.create(f"race/{number}", f"{name} took {number}".encode()):
            say(f"won {number}")
    say("end")


def write(url: str, count: int) -> None:
    blob = open_blob(url, writing=True)
    say("ready")
    for number in range(count):
        say(f"trying {number}")
        try:
            assert blob.create(f"log/{number}", contents_of(number))
        except DurabilityLost:
            say(f"lost {number}")
            refused(lambda: blob.create("log/later", b""))
            refused(lambda: blob.put("log/later", b""))
            refused(lambda: blob.settle(["log/0"]))
            say(f"reads {len(blob.list('log/'))}")
            break
        say(f"acknowledged {number}")
    say("end")


def refused(write: Callable[[], object]) -> None:
    try:
        write()
    except DurabilityLost:
        say("refused")
    except StoreError as error:
        say(f"otherwise {type(error).__name__}")
    else:
        say("taken")


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["race", url, name, count]:
            race(url, name, int(count))
        case ["write", url, count]:
            write(url, int(count))
        case words:
            raise SystemExit(f"cannot {words}")
