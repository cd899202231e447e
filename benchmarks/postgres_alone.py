"""One run of ingest in a separate process, to measure its memory.

    python benchmarks/postgres_alone.py FOLDER URL

The last line is JSON: the number of rows, and the memory before the first row and at its peak.
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any, cast

from postgres_sides import Ours


class Address:
    """Database that is only known by its URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    def url(self, **_: Any) -> str:
        return self._url


def memory_mib(field: str) -> float:
    """Return `VmRSS`, the current memory, or `VmHWM`, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1_024
    raise LookupError(field)


def main(folder: str, url: str) -> None:
    """Run ingest until it has caught up, and print the result."""
    ours = Ours(Path(folder), cast("Any", Address(url)))
    before = memory_mib("VmRSS")
    with ours.ingest() as (_, ingest):
        ingest.run(threading.Event(), once=True)
        rows = ingest._rows
    peak = memory_mib("VmHWM")
    print(json.dumps({"rows": rows, "before_mib": before, "peak_mib": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
