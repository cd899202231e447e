"""Collections into endpoints by the whole runtime, beside the endpoints' own bulk ways.

Ours is a materialization as `penstock materialize` runs it: Spark with two cores, a
connector in a process of its own, the recovery log and the collection on disk. It is
timed from when a transaction is planned to when it is acknowledged. Beside it stands
the endpoint's own bulk way, in this process, with rows that were prepared before the
clock starts; or a Spark job that does nothing.

    make bench-materialize
    python benchmarks/materialize.py --quick --only backfill_vs_bulk --case sqlite

Each figure is a line for people as it comes; the last line is one JSON object.
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
from postgres import DIFFERENT, Figure, Found
from reducing import native_vs_python
from workload import made_quiet

import penstock.persist as persist
import penstock.spark as ps
from penstock.clock import SYSTEM_CLOCK
from penstock.data import DIFF, TIME
from penstock.engine.reach.spark import reach
from penstock.materialize.driver import Materializing
from penstock.materialize.spark import SparkShards
from penstock.pipeline.file import MaterializationSection
from penstock.testing.postgres import PostgresServer

BATCHES: Final = 8
"""A collection is written in so many, each with keys from everywhere."""

CHANGED: Final = 1_000
"""The rows that a transaction changes, where one follows."""

CASES: Final = {"sqlite": 0.6, "postgres_new": 0.7, "postgres_upsert": 0.45}
"""Of backfills, with what we aim at."""


class Lake:
    """A collection, and who writes it."""

    def __init__(self, url: str, rows: pa.Table) -> None:
        """A collection of these rows, as upkeep leaves it when no history is kept."""
        self.url = url
        self.rows = rows
        self.client = persist.open(f"{url}/upstream", writer="bench")
        schema = pa.schema([each.with_nullable(False) for each in rows.schema])
        self.collection = self.client.create_or_load("rows", schema=schema, key_columns=["id"])
        for first in range(BATCHES):
            self.append(_updates(rows.take(np.arange(first, len(rows), BATCHES)), +1))
        self.collection.allow_compaction(self.collection.upper - 1).result()
        made_quiet(self.client, self.collection)

    def append(self, *updates: pa.Table) -> None:
        """Updates of the next time."""
        at = self.collection.upper
        rows = pa.concat_tables(updates)
        times = pa.array(np.full(len(rows), at, np.int64))
        self.collection.compare_and_append(rows.append_column(TIME, times), at, at + 1)

    def change(self, first: int) -> None:
        """Bring `CHANGED` rows from here on to another state."""
        before = self.rows.slice(first, CHANGED)
        after = before.set_column(1, before.column_names[1], pa.array([first % 2 == 0] * CHANGED))
        self.append(_updates(before, -1), _updates(after, +1))
        parts = [self.rows.slice(0, first), after, self.rows.slice(first + CHANGED)]
        self.rows = pa.concat_tables(parts)


def _updates(rows: pa.Table, diff: int) -> pa.Table:
    return rows.append_column(DIFF, pa.array(np.full(len(rows), diff, np.int64)))


@dataclass
class Bench:
    """Where it is measured, how much, and what was made so far."""

    folder: Path
    quick: bool
    cases: Sequence[str]
    spark: Any
    server: PostgresServer
    open: ExitStack
    used: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    """By case: our last transaction, by phase."""

    def times(self, full: int, *, quick: int) -> int:
        """How much of something: `full`, or `quick` while developing."""
        return quick if self.quick else full

    def another(self) -> str:
        """A name that was not used yet."""
        self.used += 1
        return f"bench_{self.used}"

    def lake(self, rows: int) -> Lake:
        """A collection of so many rows."""
        made = Lake(f"file:{self.folder / self.another()}", table(rows, updated=False))
        self.open.callback(made.client.close)
        return made

    @cached_property
    def large(self) -> Lake:
        """The collection that is materialized as a whole."""
        return self.lake(self.times(2_000_000, quick=50_000))


class Ours:
    """A materialization, transaction by transaction."""

    def __init__(self, spark: Any, lake: Lake, connector: str, **endpoint: str) -> None:
        self._lake = lake
        self._jobs = SparkShards(spark, lambda url: reach(spark, url))
        self._file = {"connector": connector, "endpoint": endpoint}
        self._running: Materializing

    @contextmanager
    def running(self, name: str, *, backfill: int = 0) -> Iterator["Ours"]:
        """Validated and applied, with a connector that runs."""
        binding = {
            "collection": "rows",
            "resource": {"table": name, "document": False},
            "fields": {"recommended": True, "exclude": ["flow_document"]},
            "backfill": backfill,
        }
        with ExitStack() as stack:
            url = f"{self._lake.url}/{name}"
            self._running = Materializing(
                name,
                MaterializationSection.model_validate({**self._file, "bindings": [binding]}),
                stack.enter_context(persist.open(url, writer="bench")),
                location=self._lake.url,
                jobs=self._jobs,
                tick_ms=1_000,
                clock=SYSTEM_CLOCK,
                chance=random.Random(7),
            )
            self._running._start(stack, wait=False)
            self._running._hold()
            self.lose_session()  # It was with another connector.
            yield self

    def transact(self) -> float:
        """Seconds of the transaction that brings the endpoint to where the collection is."""
        upper = self._lake.collection.upper
        while self._running._lake.state("rows").upper != upper:
            threading.Event().wait(0.005)
        begun = time.perf_counter()
        self._running._transact(upper, goes_on=False)
        return time.perf_counter() - begun

    @property
    def last(self) -> Mapping[str, Any]:
        """The last transaction, by phase."""
        return dict(self._running.status()["last_transaction"])

    def lose_session(self) -> None:
        """Let the next transaction open its stream anew."""
        log = self._running._log
        shards = tuple(replace(each, session="") for each in log.shards)
        self._running._log = replace(log, shards=shards)


# A backfill beside a bulk load.


def backfill_vs_bulk(bench: Bench) -> Found:
    """Rows a second of a whole collection over those of a bulk load, in order of key."""
    seconds: dict[str, tuple[float, float]] = {}
    turns = bench.times(3, quick=1)
    if "sqlite" in bench.cases:
        _sqlite_ours(bench)  # Whatever is loaded once.
        sides = in_turn(turns, lambda: _sqlite_ours(bench), lambda: _sqlite_alone(bench))
        seconds["sqlite"] = medians(_checked("sqlite", sides))
    if bench.cases != ["sqlite"]:
        _postgres_ours(bench)
        sides = in_turn(turns, lambda: _postgres_ours(bench), lambda: _postgres_alone(bench))
        ours, alone = _checked("postgres", sides)
        for at, case in enumerate(("postgres_new", "postgres_upsert")):
            if case in bench.cases:
                seconds[case] = medians(([each[at] for each in ours], [each[at] for each in alone]))
    rows = len(bench.large.rows)
    rates = {case: (rows / ours, rows / alone) for case, (ours, alone) in seconds.items()}
    shown = "; ".join(
        f"{case} {ours:,.0f}/s beside {alone:,.0f}/s" for case, (ours, alone) in rates.items()
    )
    raw = {
        case: {"ours": ours, "alone": alone, "last_ms": bench.last[case.partition("_")[0]]}
        for case, (ours, alone) in rates.items()
    }
    return Found({case: ours / alone for case, (ours, alone) in rates.items()}, shown, raw)


def _checked(name: str, sides: Any) -> Any:
    """What both sides took, if they have left the same rows behind."""
    held = {content for side in sides for _, content in side}
    if len(held) != 1:
        print(f"{name}: the two sides differ: {held}", file=sys.stderr)
        sys.exit(DIFFERENT)
    return tuple([took for took, _ in side] for side in sides)


def _sqlite_ours(bench: Bench) -> tuple[float, str]:
    name = bench.another()
    path = bench.folder / f"{name}.db"
    with Ours(bench.spark, bench.large, "sqlite", path=str(path)).running(name) as ours:
        took = ours.transact()
        bench.last["sqlite"] = ours.last
    return took, _sqlite_held(path, name)


def _sqlite_alone(bench: Bench) -> tuple[float, str]:
    name = bench.another()
    path = bench.folder / f"{name}.db"
    alone = SqliteAlone(path, name)
    took = alone.store(alone.prepared(bench.large.rows))
    alone.connection.close()
    return took, _sqlite_held(path, name)


def _sqlite_held(path: Path, name: str) -> str:
    """A digest of a table, whose file is then removed."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(f"SELECT {_COLUMNS} FROM {name} ORDER BY id")
        held = str(hash(tuple(map(hash, rows))))
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()
    return held


def _postgres_ours(bench: Bench) -> tuple[tuple[float, float], str]:
    name = bench.another()
    database = bench.server.create_database(name)
    ours = Ours(bench.spark, bench.large, "postgres", url=database.url())
    with ours.running(name):
        new = ours.transact()
    database.sql(f"UPDATE {name} SET s0 = 'spoiled' WHERE id % 100 = 0")
    bench.large.append(_updates(bench.large.rows.slice(0, 0), +1))
    with ours.running(name, backfill=1):
        upserted = ours.transact()
        bench.last["postgres"] = ours.last
    return (new, upserted), _postgres_held(database, name)


def _postgres_alone(bench: Bench) -> tuple[tuple[float, float], str]:
    name = bench.another()
    database = bench.server.create_database(name)
    alone = PostgresAlone(database, name)
    rows = alone.prepared(bench.large.rows)
    took = alone.store(rows), alone.store(rows)
    alone.connection.close()
    return took, _postgres_held(database, name)


def _postgres_held(database: Any, name: str) -> str:
    """A digest of a table, whose database is then removed."""
    [(rows, held)] = database.sql(
        f"SELECT count(*), sum(hashtextextended(t::text, 0)) FROM (SELECT {_COLUMNS} FROM {name}) t"
    )
    database.drop()
    return f"{rows} rows, {held}"


_COLUMNS: Final = ", ".join(f'"{each}"' for each in table(0, updated=False).column_names)


# Transactions that follow.


@contextmanager
def following(bench: Bench) -> Iterator[tuple[Ours, Callable[[], float]]]:
    """A table in SQLite, and a way to change and transact `CHANGED` rows."""
    lake = bench.lake(bench.times(100_000, quick=20_000))
    name = bench.another()
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
    held = [(0.0, _sqlite_held(each, name)) for each in (path, path.with_stem(f"{name}-alone"))]
    _checked("following", [held])


def follow_vs_job(bench: Bench) -> Found:
    """A transaction of 1,000 changed rows over a job of one task that does nothing."""

    def job() -> float:
        begun = time.perf_counter()
        bench.spark.sparkContext.parallelize([0], 1).map(lambda each: each).collect()
        return time.perf_counter() - begun

    phases: list[Mapping[str, Any]] = []
    with following(bench) as (ours, follow):
        job()

        def followed() -> float:
            took = follow()
            phases.append(ours.last)
            return took

        ours_s, job_s = medians(in_turn(bench.times(41, quick=5), followed, job))
    last = {name: statistics.median(each[name] for each in phases) for name in phases[0]}
    shown = f"{1000 * ours_s:.0f} ms beside {1000 * job_s:.0f} ms"
    return Found(ours_s / job_s, shown, {"ours_s": ours_s, "job_s": job_s, "phases_ms": last})


def open_cost_ms(bench: Bench) -> Found:
    """What a transaction takes longer when a shard has moved.

    `stream`: the process is warm and only its stream must be opened; `process`: it is new.
    """
    with following(bench) as (ours, follow):

        def moved() -> float:
            ours.lose_session()
            return follow()

        stream, kept = medians(in_turn(bench.times(11, quick=2), moved, follow))

        def in_new_process() -> float:
            # Spark keeps workers of one environment apart from those of another.
            bench.spark.sparkContext.environment["BENCH_WORKER"] = bench.another()
            return follow()

        process = statistics.median(in_new_process() for _ in range(bench.times(3, quick=1)))
    found = {"stream": 1000 * (stream - kept), "process": 1000 * (process - kept)}
    return Found(found, f"kept {1000 * kept:.0f} ms", {"kept_s": kept})


def native_vs_python_reduce(bench: Bench) -> Found:
    """See reducing.py."""
    found = native_vs_python(
        bench.times(5_000_000, quick=100_000), repetitions=bench.times(3, quick=1)
    )
    shown = f"natively {found['native_s']:.1f} s, by workers {found['python_s']:.1f} s"
    return Found(found["native_vs_python_reduce"], shown, found)


FIGURES: Final[Mapping[str, Figure]] = {
    "backfill_vs_bulk": Figure(backfill_vs_bulk, CASES),
    "follow_vs_job": Figure(follow_vs_job, 1.5, least=False),
    "native_vs_python_reduce": Figure(native_vs_python_reduce, 10.0),
    "open_cost_ms": Figure(open_cost_ms, {}),
}


def main() -> None:
    """Measure what the command line asks for, one figure after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, help="measure on this folder's disk [build/]")
    parser.add_argument("--quick", action="store_true", help="less of everything, rougher figures")
    parser.add_argument("--only", action="append", choices=FIGURES, help="just this; repeatable")
    parser.add_argument("--case", action="append", choices=CASES, help="just these backfills")
    asked_for = parser.parse_args()
    parent = asked_for.dir or Path(__file__).resolve().parent.parent / "build"
    parent.mkdir(parents=True, exist_ok=True)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    rough = "; quick: rough" if asked_for.quick else ""
    print(f"{os.cpu_count()} cores, load {load}{rough}", flush=True)
    values: dict[str, Any] = {}
    raw: dict[str, Any] = {"quick": asked_for.quick, "load_at_start": os.getloadavg()[0]}
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=parent.resolve()) as folder,
        PostgresServer(settings={"max_wal_size": "8GB"}) as server,
        closing(_Session()) as session,
        ExitStack() as stack,
    ):
        cases = asked_for.case or list(CASES)
        bench = Bench(Path(folder), asked_for.quick, cases, session.spark, server, stack)
        for name in asked_for.only or FIGURES:
            begun = time.perf_counter()
            found = FIGURES[name].measure(bench)  # type: ignore[arg-type]
            values[name], raw[name] = _rounded(found.value), _rounded(dict(found.raw))
            told, took = FIGURES[name].told(found.value), time.perf_counter() - begun
            print(f"{name}: {found.shown}; {told} ({took:.0f} s)", flush=True)
    print(json.dumps({**values, "raw": raw}))


class _Session:
    """Spark with two cores."""

    def __init__(self) -> None:
        self.spark = ps.session(master="local[2]")

    def close(self) -> None:
        self.spark.stop()


def _rounded(value: Any) -> Any:
    """Three places, of which the last is noise."""
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
