"""A process that materializes a collection and prints the peak memory of each initial snapshot.

    python -m tests.materialize.snapshot_memory FOLDER

The first snapshot has few rows: it loads modules and compiles kernels. The second snapshot is
correct. The third has a planted bug: it collects all rows before the first Store,
where the run is cancelled.
"""

import json
import random
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.materialize import shard
from penstock.materialize.connector_process import ConnectorProcess
from penstock.materialize.connector_session import ConnectorSession
from penstock.materialize.loop import MaterializationLoop
from penstock.materialize.runner import LocalRunner
from penstock.pipeline.file import MaterializationSection


class Enough(Exception):
    """Raised to cancel a run."""


def peak_bytes() -> int:
    """Return the peak resident size. In getrusage the parent process would contribute to it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return 1024 * int(found)


def copied(folder: Path, address: str, name: str, collection: str) -> Mapping[str, Any]:
    """Materialize a collection into a SQLite file, and delete the file."""
    lake, target = f"file:{folder / 'lake'}", folder / f"{name}.db"
    said = MaterializationSection.model_validate(
        {
            "connector": {"grpc": {"address": address}},
            "endpoint": {"path": str(target)},
            "size": "1MiB",
            "bindings": [{"collection": collection, "resource": {"table": "t"}}],
        }
    )
    with persist.open(f"{lake}/{name}", writer="runtime") as client:
        materialization = MaterializationLoop(
            name,
            said,
            client,
            location=lake,
            jobs=LocalRunner(),
            tick_ms=1,
            clock=SYSTEM_CLOCK,
            rng=random.Random(),
        )
        Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
        before = peak_bytes()
        with suppress(Enough):
            materialization.run(threading.Event(), once=True)
        grown = peak_bytes() - before
        shard.close_sessions()
    for each in folder.glob(f"{name}.db*"):
        each.unlink()
    return {**materialization.status().to_json(), "grown": grown}


def main(folder: Path) -> None:
    """Print the status and the memory growth of each snapshot."""
    hosted = ConnectorProcess("sqlite", SYSTEM_CLOCK)
    try:
        hosted.start()
        copied(folder, hosted.address, "few", "shop.few")
        right = copied(folder, hosted.address, "right", "shop.t")
        read_locally = shard.read_locally

        def at_once(*given: Any) -> Iterable[pa.Table]:
            return [pa.concat_tables(read_locally(*given))]

        def break_off(*_: Any) -> None:
            raise Enough

        shard.read_locally, ConnectorSession.store = at_once, break_off
        wrong = copied(folder, hosted.address, "wrong", "shop.t")
    finally:
        hosted.close()
    sys.stdout.write(json.dumps({"right": right, "wrong": wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
