"""Materializations by the complete runtime, compared with the endpoints' own bulk loads.

Ours is a materialization as `penstock materialize` runs it: Spark with two cores, a connector
in a separate process, the recovery log and the collection on disk. It is timed from the plan
of a transaction to its acknowledgement. The other side is the endpoint's own bulk load, in
this process, with rows that are prepared before the clock starts; or an empty Spark job.

    make bench-materialize
    python benchmarks/materialize.py --quick --only backfill_vs_bulk --case sqlite

Each figure is printed as a line when it is measured; the last line is one JSON object.
"""

import argparse
import json
import os
import random
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from connectors import PostgresAlone, SqliteAlone, table
from measure import in_turn, medians
from postgres import DIFFERENT, Figure, Result
from reduction import native_vs_python
from workload import run_maintenance

import penstock.persist as persist
import penstock.spark as ps
from penstock.clock import SYSTEM_CLOCK
from penstock.data import DIFF, TIME
from penstock.engine.storage_access.spark import find_native_root
from penstock.materialize.loop import MaterializationLoop
from penstock.materialize.spark import SparkRunner
from penstock.pipeline.file import MaterializationSection
from penstock.servers.postgres import PostgresServer

BATCHES: Final = 8
"""Batches of a collection, each with keys of the complete range."""

CHANGED: Final = 1_000
"""Changed rows per transaction after the backfill."""

CASES: Final = {"sqlite": 0.6, "postgres_new": 0.7, "postgres_upsert": 0.45}
"""Aims of the backfills, by case."""


class Lake:
    """A collection and its writer."""

    def __init__(self, url: str, rows: pa.Table) -> None:
        """Write these rows, release all history, and run maintenance until it is idle."""
        self.url = url
        self.rows = rows
        self.client = persist.open(f"{url}/upstream", writer="bench")
        schema = pa.schema([field.with_nullable(False) for field in rows.schema])
        self.collection = self.client.create_or_load("rows", schema=schema, key_columns=["id"])
        for first in range(BATCHES):
            self.append(_updates(rows.take(np.arange(first, len(rows), BATCHES)), +1))
        self.collection.allow_compaction(self.collection.upper - 1).result()
        run_maintenance(self.client, self.collection)

    def append(self, *updates: pa.Table) -> None:
        """Append updates at the next time."""
        upper = self.collection.upper
        rows = pa.concat_tables(updates)
        times = pa.array(np.full(len(rows), upper, np.int64))
        self.collection.compare_and_append(rows.append_column(TIME, times), upper, upper + 1)

    def change(self, first: int) -> None:
        """Update `CHANGED` rows, beginning with row `first`."""
        before = self.rows.slice(first, CHANGED)
        after = before.set_column(1, before.column_names[1], pa.array([first % 2 == 0] * CHANGED))
        self.append(_updates(before, -1), _updates(after, +1))
        parts = [self.rows.slice(0, first), after, self.rows.slice(first + CHANGED)]
        self.rows = pa.concat_tables(parts)


def _updates(rows: pa.Table, diff: int) -> pa.Table:
    return rows.append_column(DIFF, pa.array(np.full(len(rows), diff, np.int64)))


@dataclass
class Bench:
    """Folder, size, session and server."""

    folder: Path
    quick: bool
    cases: Sequence[str]
    spark: Any
    server: PostgresServer
    open: ExitStack
    used: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    """Phases of our last transaction, by case."""

    def times(self, full: int, *, quick: int) -> int:
        """Return `full`, or `quick` with --quick."""
        return quick if self.quick else full

    def next_name(self) -> str:
        """Return an unused name."""
        self.used += 1
        return f"bench_{self.used}"

    def lake(self, rows: int) -> Lake:
        """Create a lake with a collection of this many rows."""
        lake = Lake(f"file:{self.folder / self.next_name()}", table(rows, updated=False))
        self.open.callback(lake.client.close)
        return lake

    @cached_property
    def large(self) -> Lake:
        """Lake for the backfills."""
        return self.lake(self.times(2_000_000, quick=50_000))


class Ours:
    """A materialization that runs transaction by transaction."""

    def __init__(self, spark: Any, lake: Lake, connector: str, **endpoint: str) -> None:
        self._lake = lake
        self._jobs = SparkRunner(spark, lambda url: find_native_root(spark, url))
        self._file = {"connector": connector, "endpoint": endpoint}
        self._running: MaterializationLoop

    @contextmanager
    def running(self, name: str, *, backfill: int = 0) -> Iterator["Ours"]:
        """Validate, apply and start a connector for the block."""
        binding = {
            "collection": "rows",
            "resource": {"table": name, "document": False},
            "fields": {"recommended": True, "exclude": ["flow_document"]},
            "backfill": backfill,
        }
        with ExitStack() as stack:
            url = f"{self._lake.url}/{name}"
            self._running = MaterializationLoop(
                name,
                MaterializationSection.model_validate({**self._file, "bindings": [binding]}),
                stack.enter_context(persist.open(url, writer="bench")),
                location=self._lake.url,
                jobs=self._jobs,
                tick_ms=1_000,
                clock=SYSTEM_CLOCK,
                rng=random.Random(7),
            )
            self._running._start(stack, wait=False)
            self._running._hold()
            self.lose_session()  # The last session was with another connector.
            yield self

    def transact(self) -> float:
        """Return the seconds of the transaction up to the upper of the collection."""
        upper = self._lake.collection.upper
        while self._running._inputs.state("rows").upper != upper:
            threading.Event().wait(0.005)
        begun = time.perf_counter()
        self._running._transact(upper, continues=False)
        return time.perf_counter() - begun

    @property
    def last(self) -> Mapping[str, Any]:
        """Phases of the last transaction."""
        return dict(self._running.status().last_transaction)

    def lose_session(self) -> None:
        """Make the next transaction open a new stream."""
        log = self._running._log
        shards = tuple(replace(shard, session="") for shard in log.shards)
        self._running._log = replace(log, shards=shards)


# Backfill against bulk load.


def backfill_vs_bulk(bench: Bench) -> Result:
    """Compare rows per second of a complete collection with a bulk load, in key order."""
    seconds: dict[str, tuple[float, float]] = {}
    turns = bench.times(3, quick=1)
    if "sqlite" in bench.cases:
        _sqlite_ours(bench)  # Warm-up.
        sides = in_turn(turns, lambda: _sqlite_ours(bench), lambda: _sqlite_alone(bench))
        seconds["sqlite"] = medians(_checked_times("sqlite", sides))
    if bench.cases != ["sqlite"]:
        _postgres_ours(bench)
        sides = in_turn(turns, lambda: _postgres_ours(bench), lambda: _postgres_alone(bench))
        ours, alone = _checked_times("postgres", sides)
        for index, case in enumerate(("postgres_new", "postgres_upsert")):
            if case in bench.cases:
                seconds[case] = medians(
                    ([took[index] for took in ours], [took[index] for took in alone])
                )
    rows = len(bench.large.rows)
    rates = {case: (rows / ours, rows / alone) for case, (ours, alone) in seconds.items()}
    summary = "; ".join(
        f"{case} {ours:,.0f}/s against {alone:,.0f}/s" for case, (ours, alone) in rates.items()
    )
    raw = {
        case: {"ours": ours, "alone": alone, "last_ms": bench.last[case.partition("_")[0]]}
        for case, (ours, alone) in rates.items()
    }
    return Result({case: ours / alone for case, (ours, alone) in rates.items()}, summary, raw)


def _checked_times(name: str, sides: Any) -> Any:
    """Return the times of both sides, or exit if their rows differ."""
    digests = {digest for side in sides for _, digest in side}
    if len(digests) != 1:
        print(f"{name}: the two sides differ: {digests}", file=sys.stderr)
        sys.exit(DIFFERENT)
    return tuple([took for took, _ in side] for side in sides)


def _sqlite_ours(bench: Bench) -> tuple[float, str]:
    name = bench.next_name()
    path = bench.folder / f"{name}.db"
    with Ours(bench.spark, bench.large, "sqlite", path=str(path)).running(name) as ours:
        took = ours.transact()
        bench.last["sqlite"] = ours.last
    return took, _sqlite_digest(path, name)


def _sqlite_alone(bench: Bench) -> tuple[float, str]:
    name = bench.next_name()
    path = bench.folder / f"{name}.db"
    alone = SqliteAlone(path, name)
    took = alone.store(alone.prepared(bench.large.rows))
    alone.connection.close()
    return took, _sqlite_digest(path, name)


def _sqlite_digest(path: Path, name: str) -> str:
    """Return a digest of a table, and remove its file."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(f"SELECT {_COLUMNS} FROM {name} ORDER BY id")
        digest = str(hash(tuple(map(hash, rows))))
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    return digest


def _postgres_ours(bench: Bench) -> tuple[tuple[float, float], str]:
    name = bench.next_name()
    database = bench.server.create_database(name)
    ours = Ours(bench.spark, bench.large, "postgres", url=database.url())
    with ours.running(name):
        new = ours.transact()
    database.sql(f"UPDATE {name} SET s0 = 'spoiled' WHERE id % 100 = 0")
    bench.large.append(_updates(bench.large.rows.slice(0, 0), +1))
    with ours.running(name, backfill=1):
        upserted = ours.transact()
        bench.last["postgres"] = ours.last
    return (new, upserted), _postgres_digest(database, name)


def _postgres_alone(bench: Bench) -> tuple[tuple[float, float], str]:
    name = bench.next_name()
    database = bench.server.create_database(name)
    alone = PostgresAlone(database, name)
    rows = alone.prepared(bench.large.rows)
    took = alone.store(rows), alone.store(rows)
    alone.connection.close()
    return took, _postgres_digest(database, name)


def _postgres_digest(database: Any, name: str) -> str:
    """Return a digest of a table, and drop its database."""
    [(rows, digest)] = database.sql(
        f"SELECT count(*), sum(hashtextextended(t::text, 0)) FROM (SELECT {_COLUMNS} FROM {name}) t"
    )
    database.drop()
    return f"{rows} rows, {digest}"


_COLUMNS: Final = ", ".join(f'"{name}"' for name in table(0, updated=False).column_names)


# Transactions after the backfill.


@contextmanager
def running_table(bench: Bench) -> Iterator[tuple[Ours, Callable[[], float]]]:
    """Yield a table in SQLite, and a function that changes and transacts `CHANGED` rows."""
    lake = bench.lake(bench.times(100_000, quick=20_000))
    name = bench.next_name()
    path = bench.folder / f"{name}.db"
    turns = iter(range(10**6))
    with Ours(bench.spark, lake, "sqlite", path=str(path)).running(name) as ours:
        ours.transact()

        def follow() -> float:
            lake.change(next(turns) * CHANGED % len(lake.rows))
            return ours.transact()

        for _ in range(5):
            follow()
        yield ours, follow
    alone = SqliteAlone(bench.folder / f"{name}-alone.db", name)
    alone.store(alone.prepared(lake.rows))
    alone.connection.close()
    files = (path, path.with_stem(f"{name}-alone"))
    _checked_times("follow", [[(0.0, _sqlite_digest(file, name)) for file in files]])


def follow_vs_job(bench: Bench) -> Result:
    """Compare a transaction of 1,000 changed rows with an empty Spark job of one task."""

    def job() -> float:
        begun = time.perf_counter()
        bench.spark.sparkContext.parallelize([0], 1).map(lambda item: item).collect()
        return time.perf_counter() - begun

    phases: list[Mapping[str, Any]] = []
    with running_table(bench) as (ours, follow):
        job()

        def follow_and_record() -> float:
            took = follow()
            phases.append(ours.last)
            return took

        ours_s, job_s = medians(in_turn(bench.times(41, quick=5), follow_and_record, job))
    last = {name: statistics.median(phase[name] for phase in phases) for name in phases[0]}
    summary = f"{1000 * ours_s:.0f} ms against {1000 * job_s:.0f} ms"
    return Result(ours_s / job_s, summary, {"ours_s": ours_s, "job_s": job_s, "phases_ms": last})


def open_cost_ms(bench: Bench) -> Result:
    """Measure the extra time of a transaction after its shard has moved.

    `stream`: to a warm process, which only opens a stream. `process`: to a new process.
    """
    with running_table(bench) as (ours, follow):

        def moved() -> float:
            ours.lose_session()
            return follow()

        stream, unmoved = medians(in_turn(bench.times(11, quick=2), moved, follow))

        def in_new_process() -> float:
            # Spark does not share workers between different environments.
            bench.spark.sparkContext.environment["BENCH_WORKER"] = bench.next_name()
            return follow()

        process = statistics.median(in_new_process() for _ in range(bench.times(3, quick=1)))
    costs = {"stream": 1000 * (stream - unmoved), "process": 1000 * (process - unmoved)}
    return Result(costs, f"open stream {1000 * unmoved:.0f} ms", {"kept_s": unmoved})


def native_vs_python_reduce(bench: Bench) -> Result:
    """Compare native reductions with Python workers; see reduction.py."""
    result = native_vs_python(
        bench.times(5_000_000, quick=100_000), repetitions=bench.times(3, quick=1)
    )
    summary = f"native {result['native_s']:.1f} s, Python workers {result['python_s']:.1f} s"
    return Result(result["native_vs_python_reduce"], summary, result)


FIGURES: Final[Mapping[str, Figure]] = {
    "backfill_vs_bulk": Figure(backfill_vs_bulk, CASES),
    "follow_vs_job": Figure(follow_vs_job, 1.5, least=False),
    "native_vs_python_reduce": Figure(native_vs_python_reduce, 10.0),
    "open_cost_ms": Figure(open_cost_ms, {}),
}


def main() -> None:
    """Measure the figures that the command line selects."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, help="Measure on the disk of this folder. [build/]")
    parser.add_argument(
        "--quick", action="store_true", help="Use smaller counts; figures are less exact."
    )
    parser.add_argument(
        "--only", action="append", choices=FIGURES, help="Measure only this figure. Repeatable."
    )
    parser.add_argument(
        "--case", action="append", choices=CASES, help="Measure only this backfill. Repeatable."
    )
    options = parser.parse_args()
    parent = options.dir or Path(__file__).resolve().parent.parent / "build"
    parent.mkdir(parents=True, exist_ok=True)
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    note = "; quick, less exact" if options.quick else ""
    print(f"{os.cpu_count()} cores, load {load}{note}", flush=True)
    values: dict[str, Any] = {}
    raw: dict[str, Any] = {"quick": options.quick, "load_at_start": os.getloadavg()[0]}
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=parent.resolve()) as folder,
        PostgresServer(settings={"max_wal_size": "8GB"}) as server,
        closing(_Session()) as session,
        ExitStack() as stack,
    ):
        cases = options.case or list(CASES)
        bench = Bench(Path(folder), options.quick, cases, session.spark, server, stack)
        for name in options.only or FIGURES:
            begun = time.perf_counter()
            result = FIGURES[name].measure(bench)  # type: ignore[arg-type]
            values[name], raw[name] = _rounded(result.value), _rounded(dict(result.raw))
            verdict, took = FIGURES[name].verdict(result.value), time.perf_counter() - begun
            print(f"{name}: {result.summary}; {verdict} ({took:.0f} s)", flush=True)
    print(json.dumps({**values, "raw": raw}))


class _Session:
    """Spark session with two cores."""

    def __init__(self) -> None:
        self.spark = ps.session(master="local[2]")

    def close(self) -> None:
        self.spark.stop()


def _rounded(value: Any) -> Any:
    """Round to three decimal places."""
    if isinstance(value, Mapping):
        return {name: _rounded(inner) for name, inner in value.items()}
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
