"""Postgres to collections, compared with Postgres tools and with Debezium.

    make bench-postgres
    python benchmarks/postgres.py --quick --only stream_vs_recvlogical

Sides are measured in alternating order on one server with fsync on. Figures are ratios of
medians. Each figure is printed as a line when it is measured; the last line is one JSON object.
The docstring of each function states the timed interval. For streams, on all sides:

- One slot per run is created before the changes are written; for ours, a pipeline that has
  completed its initial snapshot. The changes are written while no side reads. Each run
  therefore reads the same changes from its own slot.
- Ours: from the open stream to the return of the commit with the last change, files synced.
  The start of Python and the connection are not included.
- `pg_recvlogical`: from its start to its exit at the same LSN. It writes to /dev/null. The
  faster of text and binary counts.
- A subscription: from enabling it until the last row is readable.
- Debezium: from a quarter of the rows to the last one. Start, connection and JVM warm-up are
  not included. Records are not converted to JSON, and the consumer does nothing. Debezium uses
  TCP, so ours does too in that figure.

Before ratios are computed, the collections are compared with the server, value by value; a
difference ends the benchmark with status 3.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeAlias

import psycopg
from measure import in_turn, medians
from postgres_cases import CASES, WIDE_COLUMNS, wide_inserts
from postgres_sides import (
    PUBLICATION,
    Debezium,
    Different,
    Ours,
    contents_differ,
    copy_seconds,
)
from postgres_streams import measure_streams, write_changes

from penstock.servers.postgres import Database, PostgresServer

DIFFERENT: Final = 3
"""Exit status if the rows of a side differ from the server."""

SETTINGS: Final = {
    "max_replication_slots": 64,
    "max_wal_senders": 64,
    "shared_buffers": "256MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",
}

Value: TypeAlias = float | Mapping[str, float | None] | None


@dataclass(frozen=True, slots=True)
class Result:
    """Value of a figure and its medians. The value is None if it could not be measured."""

    value: Value
    summary: str
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: its measurement and its aim, one bound or one per case."""

    measure: Callable[["Bench"], Result]
    aim: Mapping[str, float] | float
    least: bool = True
    """True if the aim is a lower bound, False if it is an upper bound."""

    def verdict(self, value: Value) -> str:
        """Return the values with their aims, by case."""
        if isinstance(value, Mapping):
            return ", ".join(f"{key} {self._verdict(part, key)}" for key, part in value.items())
        return self._verdict(value, "")

    def _verdict(self, value: float | None, key: str) -> str:
        if value is None:
            return "not measured"
        aim = self.aim.get(key) if isinstance(self.aim, Mapping) else self.aim
        if aim is None:
            return f"{value:.3f}"
        met = value >= aim if self.least else value <= aim
        return f"{value:.3f} (aim {'≥' if self.least else '≤'} {aim}: {'met' if met else 'MISSED'})"


@dataclass
class Bench:
    """Folder, size, servers and earlier results."""

    folder: Path
    quick: bool
    figures: Sequence[str]
    cases: Sequence[str]
    server: PostgresServer
    second: PostgresServer
    numbers: Iterator[int] = field(default_factory=count)
    """Numbers for unused names: a removed location is not created again."""

    seen: set[tuple[int, bool]] = field(default_factory=set)
    """Variants of the initial snapshot that were compared with the server."""

    @property
    def rows(self) -> int:
        """Rows of a stream."""
        return 20_000 if self.quick else 1_000_000

    @property
    def table_rows(self) -> int:
        """Rows of a large table."""
        return 50_000 if self.quick else 5_000_000

    def times(self, full: int, *, quick: int = 1) -> int:
        """Return `full`, or `quick` with --quick."""
        return quick if self.quick else full

    @cached_property
    def streams(self) -> Mapping[str, Mapping[str, float]]:
        """Median rows per second, by case and side."""
        return {
            name: measure_streams(
                case,
                self.rows,
                self.figures,
                folder=self.folder,
                server=self.server,
                second=self.second,
                quick=self.quick,
            )
            for name, case in CASES.items()
            if name in self.cases
        }

    @cached_property
    def large(self) -> Database:
        """Database with one large table of 12 columns."""
        database = self.server.create_database("large")
        database.sql(f"CREATE TABLE large ({WIDE_COLUMNS})")
        database.sql(wide_inserts("large", "1", str(self.table_rows)))
        database.sql("VACUUM (FREEZE, ANALYZE) large")
        database.sql(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
        database.sql("CHECKPOINT")
        return database

    def check(self, ours: Ours, table: str, *, keys: Sequence[int] | None = None) -> None:
        """Raise `Different` if the collection differs from the table, in `keys` if given."""
        if difference := contents_differ(ours, table, keys=keys):
            raise Different(difference)


# Streams.


def stream_vs_recvlogical(bench: Bench) -> Result:
    """Compare slot to durable with slot to /dev/null, both over a Unix socket."""
    return _stream_ratios(bench, "ours", ("text", "binary"))


def stream_vs_recvlogical_tcp(bench: Bench) -> Result:
    """Compare the same over TCP."""
    return _stream_ratios(bench, "ours_tcp", ("text_tcp", "binary_tcp"))


def stream_vs_subscription(bench: Bench) -> Result:
    """Compare slot to durable with logical replication to a second server."""
    return _stream_ratios(bench, "ours", ("subscription",))


def stream_vs_debezium(bench: Bench) -> Result:
    """Compare slot to durable with Debezium to an empty consumer, both over TCP."""
    return _stream_ratios(bench, "ours_tcp", ("debezium",))


def _stream_ratios(bench: Bench, ours: str, others: Sequence[str]) -> Result:
    values: dict[str, float | None] = {}
    summary, raw = [], {}
    for name, speeds in bench.streams.items():
        measured = {other: speeds[other] for other in others if other in speeds}
        values[name] = speeds[ours] / max(measured.values()) if measured else None
        summary.append(
            f"{name}: ours {speeds[ours]:,.0f}/s, "
            + ", ".join(f"{other} {speed:,.0f}/s" for other, speed in measured.items())
        )
        raw[name] = {ours: speeds[ours], **measured}
    return Result(values, "; ".join(summary), {"rows": bench.rows, **raw})


# Initial snapshots.


def snapshot_vs_copy(bench: Bench) -> Result:
    """Compare rows per second of a durable initial snapshot with COPY in binary to /dev/null.

    Two Spark tasks read the table; the session runs before. `raw` also has the rate of one
    thread without Spark.
    """
    with _spark() as jobs:
        return _snapshot_ratio(
            bench,
            {
                "two_tasks": lambda: _snapshot_rate(bench, 2, jobs),
                "psql": lambda: bench.table_rows / copy_seconds(bench.large, "large"),
                "one_thread": lambda: _snapshot_rate(bench, 1, None),
            },
        )


def snapshot_scaling(bench: Bench) -> Result:
    """Compare an initial snapshot by two Spark tasks with one Spark task."""
    with _spark() as jobs:
        return _snapshot_ratio(
            bench,
            {
                "two_tasks": lambda: _snapshot_rate(bench, 2, jobs),
                "one_task": lambda: _snapshot_rate(bench, 1, jobs),
            },
        )


def snapshot_vs_debezium(bench: Bench) -> Result:
    """Compare a durable initial snapshot with Debezium to an empty consumer."""

    def theirs() -> float:
        slot = f"snapshot_{next(bench.numbers)}"
        run = Debezium(bench.large, slot, bench.folder / "debezium")
        speed = run.count(bench.table_rows, snapshot=True)
        bench.large.sql("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        return speed

    if missing := Debezium(bench.large, "", bench.folder).missing():
        return Result(None, missing)
    with _spark() as jobs:
        sides = {"two_tasks": lambda: _snapshot_rate(bench, 2, jobs), "debezium": theirs}
        return _snapshot_ratio(bench, sides)


def _snapshot_ratio(bench: Bench, sides: Mapping[str, Callable[[], float]]) -> Result:
    """Return the ratio of the first two sides, from medians without the first turn."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(bench.times(3) + 1):
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            speeds[name].append(sides[name]())
    rates = {name: statistics.median(turns[1:]) for name, turns in speeds.items()}
    summary = ", ".join(f"{name} {rate:,.0f}/s" for name, rate in rates.items())
    ours, other, *_ = rates.values()
    return Result(ours / other, summary, {"rows": bench.table_rows, **rates})


def _snapshot_rate(bench: Bench, tasks: int, jobs: Any) -> float:
    """Return rows per second of an initial snapshot, and check the contents the first time."""
    number = next(bench.numbers)
    ours = Ours(bench.folder / f"copy-{number}", bench.large)
    took = ours.copy(tasks=tasks, jobs=jobs)
    if (tasks, jobs is None) not in bench.seen:
        bench.seen.add((tasks, jobs is None))
        bench.check(ours, "large")
    ours.remove()
    return bench.table_rows / took


@contextmanager
def _spark() -> Iterator[Any]:
    import penstock.spark as ps
    from penstock.ingest.spark import tasks_of

    session = ps.session()
    try:
        yield tasks_of(session)
    finally:
        session.stop()


# Others.


def default_identity_vs_full(bench: Bench) -> Result:
    """Compare updates of random rows with looked-up old rows and with sent old rows.

    The unit is rows per second. Each turn writes the same number of updates to both tables, and
    both pipelines catch up in alternating order.
    """
    updates = bench.rows // 2
    pipelines = {}
    for identity in ("DEFAULT", "FULL"):
        database = bench.server.create_database(f"identity_{identity.lower()}")
        database.sql(f"CREATE TABLE large ({WIDE_COLUMNS})")
        database.sql(f"ALTER TABLE large REPLICA IDENTITY {identity}")
        database.sql(wide_inserts("large", "1", str(bench.table_rows)))
        database.sql(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
        pipelines[identity] = Ours(bench.folder / f"identity-{identity}", database)
        pipelines[identity].catch_up()

    def catch_up(identity: str) -> float:
        ours = pipelines[identity]
        write_changes(ours.database, random_updates(bench.table_rows, updates))
        return updates / ours.catch_up()

    sides = in_turn(bench.times(3), lambda: catch_up("DEFAULT"), lambda: catch_up("FULL"))
    default, full = medians(sides)
    for ours in pipelines.values():
        bench.check(ours, "large")
        ours.remove()
        ours.database.drop()
    summary = f"default {default:,.0f}/s, full {full:,.0f}/s"
    return Result(default / full, summary, {"updates": updates, "default": default, "full": full})


def random_updates(rows: int, updates: int) -> str:
    """Return a statement with this many updates of random rows, 10,000 per transaction."""
    return f"""
        DO $$ BEGIN
            FOR turn IN 1..{max(1, updates // 10_000)} LOOP
                UPDATE large SET quantity = (quantity + 1) % 100, status = 'changed'
                WHERE id IN (SELECT DISTINCT ON (id) id FROM (
                    SELECT 1 + floor(random() * {rows})::bigint AS id
                    FROM generate_series(1, {min(updates, 10_000)})) AS picked);
                COMMIT;
            END LOOP;
        END $$
    """


def big_tx_rss_mib(bench: Bench) -> Result:
    """Measure the peak memory of our process during one transaction of 2 GiB."""
    database = bench.server.create_database("big")
    size = (64 << 20) if bench.quick else (2 << 30)
    database.sql("CREATE TABLE stream (id bigint PRIMARY KEY, content text)")
    database.sql(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
    ours = Ours(bench.folder / "big", database)
    ours.catch_up()
    # Digests, because Postgres would compress repeated text.
    content = "string_agg(md5(g::text || n), '')"
    write_changes(
        database,
        f"INSERT INTO stream SELECT g, (SELECT {content} FROM generate_series(1, 32) n)"
        f" FROM generate_series(1, {size // 1_024}) g",
    )
    script = Path(__file__).with_name("postgres_alone.py")
    command = [sys.executable, str(script), str(ours.folder), database.url()]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    output = json.loads(done.stdout.splitlines()[-1])
    (rows,) = database.sql("SELECT count(*) FROM stream")[0]
    if output["rows"] != rows:
        raise Different(f"{output['rows']} rows of {rows} arrived")
    bench.check(ours, "stream", keys=range(1, rows, max(1, rows // 1_000)))
    ours.remove()
    database.drop()
    summary = f"{output['peak_mib']:.0f} MiB, {output['before_mib']:.0f} MiB before the first row"
    return Result(output["peak_mib"], summary, {**output, "bytes": size})


def lag_ms(bench: Bench) -> Result:
    """Measure the time from the return of a commit upstream until it is durable.

    The load is 1,000 rows/s in 100 transactions/s, with a tick every 250 ms.
    """
    database = bench.server.create_database("lag")
    for statement in CASES["tiny_tx"].create:
        database.sql(statement)
    database.sql(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
    ours = Ours(bench.folder / "lag", database, tick_ms=250)
    stop = threading.Event()
    with ours.ingest() as (source, ingest):
        thread = threading.Thread(target=ingest.run, args=(stop,))
        thread.start()
        while not source.durable:
            stop.wait(0.01)
        commits = _write_at_rate(database, seconds=bench.times(60, quick=5))
        stop.wait(2)
        stop.set()
        thread.join()
    lags_ms, index = [], 0
    for lsn, committed_s in commits:
        while source.durable[index][0] < lsn:
            index += 1
        lags_ms.append((source.durable[index][1] - committed_s) * 1_000)
    bench.check(ours, "stream")
    ours.remove()
    database.drop()
    quantiles = statistics.quantiles(lags_ms, n=100)
    values = {"p50": quantiles[49], "p99": quantiles[98]}
    summary = f"{len(lags_ms)} commits, p50 {quantiles[49]:.0f} ms, p99 {quantiles[98]:.0f} ms"
    return Result(values, summary, {"commits": len(lags_ms), "most": max(lags_ms)})


def _write_at_rate(database: Database, *, seconds: int) -> list[tuple[int, float]]:
    """Insert rows at a fixed rate, and return the LSN and the time after each commit."""
    commits, never = [], threading.Event()
    begun = time.perf_counter()
    insert = CASES["narrow"].step.replace("first", "%s::bigint").replace("last", "%s::bigint")
    statement = insert.replace("% ", "%% ")
    with psycopg.connect(database.url(), autocommit=True) as connection:
        for number in range(100 * seconds):
            connection.execute(statement.encode(), [10 * number + 1, 10 * number + 10])
            returned = time.perf_counter()
            (lsn,) = connection.execute(
                b"SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint"
            ).fetchone() or (0,)
            commits.append((int(lsn), returned))
            never.wait(max(0.0, begun + (number + 1) / 100 - time.perf_counter()))
    return commits


FIGURES: Final[Mapping[str, Figure]] = {
    "stream_vs_recvlogical": Figure(stream_vs_recvlogical, dict.fromkeys(CASES, 0.8)),
    "stream_vs_recvlogical_tcp": Figure(stream_vs_recvlogical_tcp, {"narrow": 1.2, "wide": 1.2}),
    "stream_vs_subscription": Figure(stream_vs_subscription, dict.fromkeys(CASES, 1.2)),
    "stream_vs_debezium": Figure(stream_vs_debezium, dict.fromkeys(CASES, 3.0)),
    "snapshot_vs_debezium": Figure(snapshot_vs_debezium, 5.0),
    "snapshot_vs_copy": Figure(snapshot_vs_copy, 0.7),
    "snapshot_scaling": Figure(snapshot_scaling, {}),
    "default_identity_vs_full": Figure(default_identity_vs_full, 0.5),
    "big_tx_rss_mib": Figure(big_tx_rss_mib, 800, least=False),
    "lag_ms": Figure(lag_ms, {}),
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
        "--case", action="append", choices=CASES, help="Measure only this stream. Repeatable."
    )
    options = parser.parse_args()
    parent = options.dir or Path(__file__).resolve().parent.parent / "build"
    parent.mkdir(parents=True, exist_ok=True)
    selected = options.only or list(FIGURES)
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    note = "; quick, less exact" if options.quick else ""
    print(f"{os.cpu_count()} cores, load {load}{note}", flush=True)
    values: dict[str, Any] = {}
    raw: dict[str, Any] = {"quick": options.quick, "load_at_start": os.getloadavg()[0]}
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=parent.resolve()) as folder,
        PostgresServer(settings=SETTINGS) as server,
        PostgresServer(settings=SETTINGS) as second,
    ):
        raw["postgres"] = server.sql("SHOW server_version")[0][0]
        cases = options.case or list(CASES)
        bench = Bench(Path(folder), options.quick, selected, cases, server, second)
        for name in selected:
            begun = time.perf_counter()
            try:
                result = FIGURES[name].measure(bench)
            except Different as difference:
                print(f"{name}: {difference}", file=sys.stderr)
                sys.exit(DIFFERENT)
            took = time.perf_counter() - begun
            values[name], raw[name] = _rounded(result.value), _rounded(dict(result.raw))
            print(f"{name}: {result.summary}; {FIGURES[name].verdict(result.value)} ({took:.0f} s)")
            sys.stdout.flush()
    print(json.dumps({**values, "raw": raw}))


def _rounded(value: Any) -> Any:
    """Round to three decimal places."""
    if isinstance(value, Mapping):
        return {name: _rounded(inner) for name, inner in value.items()}
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
