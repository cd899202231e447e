"""One catching up in a process of its own, for what it takes of memory.

    python benchmarks/postgres_alone.py FOLDER URL

The last line is JSON: how many rows came, and the most memory the process held.
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any, cast

from postgres_sides import Ours


class Address:
    """As much of a database as a pipeline needs: where it is."""

    def __init__(self, where: str) -> None:
        self.where = where

    def url(self, **_: Any) -> str:
        return self.where


def memory_mib(line: str) -> float:
    """`VmRSS` now, or `VmHWM`, the most so far."""
    for told in Path("/proc/self/status").read_text().splitlines():
        if told.startswith(f"{line}:"):
            return int(told.split()[1]) / 1_024
    raise LookupError(line)


def main(folder: str, url: str) -> None:
    """Catch up, and tell."""
    ours = Ours(Path(folder), cast("Any", Address(url)))
    before = memory_mib("VmRSS")
    with ours.ingest() as (_, ingest):
        ingest.run(threading.Event(), once=True)
        rows = ingest._rows
    peak = memory_mib("VmHWM")
    print(json.dumps({"rows": rows, "before_mib": before, "peak_mib": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
