"""Postgres into collections, beside the server's own tools and beside Debezium.

    make bench-postgres
    python benchmarks/postgres.py --quick --only stream_vs_recvlogical

Sides are measured in turn on one server with fsync on; what is compared are
medians, and ratios are what to look at. Each figure is a line for people as it
comes; the last line is one JSON object. What each one times stands at its
function. How a stream is timed, on all sides:

- Slots, and for ours whole pipelines with their first copy behind them, are made
  before the changes are written, one for each run. The changes are then written
  while nobody reads. So each run takes the same changes from a place of its own.
- Ours: from when its stream is open, to when the commit that covers the last
  change has returned, files synced. Not in it: starting Python, and connecting.
- `pg_recvlogical`: from its start to its end at the same place. It writes to
  /dev/null. The faster of text and binary counts.
- A subscription: from when it is enabled to when the last row can be read.
- Debezium: from when a quarter of the rows has come to the last, so neither
  starting nor connecting nor Java's warming up is in it; records are not turned
  into JSON, and its consumer does nothing. It reads over TCP, so ours beside it
  does too.

Before ratios are made, what is durable here is compared with the server, value by
value; a difference ends the benchmark with status 3.
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
from postgres_streams import streamed, written

from penstock.testing.postgres import Database, PostgresServer

DIFFERENT: Final = 3
"""The exit status when a side does not hold what the server holds."""

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
class Found:
    """A figure, and what it was made from; no value if it could not be measured."""

    value: Value
    shown: str
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figure:
    """How it is measured, and what we aim at: a bound, of all or by case."""

    measure: Callable[["Bench"], Found]
    aim: Mapping[str, float] | float
    least: bool = True
    """Whether the aim is the least that is good enough, rather than the most."""

    def told(self, value: Value) -> str:
        """Whether the aim is met, by case."""
        if isinstance(value, Mapping):
            return ", ".join(f"{key} {self._told(found, key)}" for key, found in value.items())
        return self._told(value, "")

    def _told(self, value: float | None, key: str) -> str:
        if value is None:
            return "not measured"
        aim = self.aim.get(key) if isinstance(self.aim, Mapping) else self.aim
        if aim is None:
            return f"{value:.3f}"
        met = value >= aim if self.least else value <= aim
        return f"{value:.3f} (aim {'≥' if self.least else '≤'} {aim}: {'met' if met else 'MISSED'})"


@dataclass
class Bench:
    """Where to work, how much of it, and what was measured so far."""

    folder: Path
    quick: bool
    wanted: Sequence[str]
    cases: Sequence[str]
    server: PostgresServer
    second: PostgresServer
    numbers: Iterator[int] = field(default_factory=count)
    """For names that nobody has used: a location that is gone is not made again."""

    seen: set[tuple[int, bool]] = field(default_factory=set)
    """The ways of a first copy whose outcome was compared."""

    @property
    def rows(self) -> int:
        """Rows of a stream."""
        return 20_000 if self.quick else 1_000_000

    @property
    def table_rows(self) -> int:
        """Rows of a large table."""
        return 50_000 if self.quick else 5_000_000

    def times(self, full: int, *, quick: int = 1) -> int:
        """How often: `full`, or `quick` while developing."""
        return quick if self.quick else full

    @cached_property
    def streams(self) -> Mapping[str, Mapping[str, float]]:
        """By case and side: the median of rows a second."""
        return {
            name: streamed(
                case,
                self.rows,
                self.wanted,
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
        """A database with one large table of 12 columns."""
        database = self.server.create_database("large")
        database.sql(f"CREATE TABLE large ({WIDE_COLUMNS})")
        database.sql(wide_inserts("large", "1", str(self.table_rows)))
        database.sql("VACUUM (FREEZE, ANALYZE) large")
        database.sql(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
        database.sql("CHECKPOINT")
        return database

    def checked(self, ours: Ours, table: str, *, keys: Sequence[int] | None = None) -> None:
        """Go on only if what is durable is what the server holds; of `keys`, if given."""
        if difference := contents_differ(ours, table, keys=keys):
            raise Different(difference)


# Streams.


def stream_vs_recvlogical(bench: Bench) -> Found:
    """Slot to durable over slot to /dev/null, both over a unix socket."""
    return _beside(bench, "ours", ("text", "binary"))


def stream_vs_recvlogical_tcp(bench: Bench) -> Found:
    """The same, both over TCP."""
    return _beside(bench, "ours_tcp", ("text_tcp", "binary_tcp"))


def stream_vs_subscription(bench: Bench) -> Found:
    """Slot to durable over the server's own replication to a second server."""
    return _beside(bench, "ours", ("subscription",))


def stream_vs_debezium(bench: Bench) -> Found:
    """Slot to durable over Debezium to nowhere, both over TCP."""
    return _beside(bench, "ours_tcp", ("debezium",))


def _beside(bench: Bench, ours: str, others: Sequence[str]) -> Found:
    values: dict[str, float | None] = {}
    shown, raw = [], {}
    for name, speeds in bench.streams.items():
        there = {other: speeds[other] for other in others if other in speeds}
        values[name] = speeds[ours] / max(there.values()) if there else None
        shown.append(
            f"{name}: ours {speeds[ours]:,.0f}/s, "
            + ", ".join(f"{other} {speed:,.0f}/s" for other, speed in there.items())
        )
        raw[name] = {ours: speeds[ours], **there}
    return Found(values, "; ".join(shown), {"rows": bench.rows, **raw})


# First copies.


def snapshot_vs_copy(bench: Bench) -> Found:
    """A first copy to durable over `psql`'s COPY in binary to /dev/null; rows a second.

    By two Spark tasks, as large tables are read; the session is there before.
    `raw` has the same in one thread, without Spark.
    """
    with _spark() as many:
        return _copied(
            bench,
            {
                "two_tasks": lambda: _first_copy(bench, 2, many),
                "psql": lambda: bench.table_rows / copy_seconds(bench.large, "large"),
                "one_thread": lambda: _first_copy(bench, 1, None),
            },
        )


def snapshot_scaling(bench: Bench) -> Found:
    """A first copy by two Spark tasks over one by one."""
    with _spark() as many:
        return _copied(
            bench,
            {
                "two_tasks": lambda: _first_copy(bench, 2, many),
                "one_task": lambda: _first_copy(bench, 1, many),
            },
        )


def snapshot_vs_debezium(bench: Bench) -> Found:
    """A first copy to durable over Debezium's to nowhere."""

    def theirs() -> float:
        slot = f"snapshot_{next(bench.numbers)}"
        run = Debezium(bench.large, slot, bench.folder / "debezium")
        speed = run.count(bench.table_rows, snapshot=True)
        bench.large.sql("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        return speed

    if missing := Debezium(bench.large, "", bench.folder).missing():
        return Found(None, missing)
    with _spark() as many:
        sides = {"two_tasks": lambda: _first_copy(bench, 2, many), "debezium": theirs}
        return _copied(bench, sides)


def _copied(bench: Bench, sides: Mapping[str, Callable[[], float]]) -> Found:
    """The first side over the second: medians of rows a second, in turn, the first turn aside."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(bench.times(3) + 1):
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            speeds[name].append(sides[name]())
    found = {name: statistics.median(each[1:]) for name, each in speeds.items()}
    shown = ", ".join(f"{name} {speed:,.0f}/s" for name, speed in found.items())
    ours, other, *_ = found.values()
    return Found(ours / other, shown, {"rows": bench.table_rows, **found})


def _first_copy(bench: Bench, tasks: int, many: Any) -> float:
    """Rows a second of a first copy; what it holds is looked at the first time."""
    number = next(bench.numbers)
    ours = Ours(bench.folder / f"copy-{number}", bench.large)
    took = ours.copy(tasks=tasks, many=many)
    if (tasks, many is None) not in bench.seen:
        bench.seen.add((tasks, many is None))
        bench.checked(ours, "large")
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


def default_identity_vs_full(bench: Bench) -> Found:
    """Updates of random rows of a large table whose old rows are looked up, over those sent.

    Rows a second. Each turn writes as many updates again, on both tables, and
    then both pipelines catch up, in turn.
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

    def caught_up(identity: str) -> float:
        ours = pipelines[identity]
        written(ours.database, random_updates(bench.table_rows, updates))
        return updates / ours.catch_up()

    found = in_turn(bench.times(3), lambda: caught_up("DEFAULT"), lambda: caught_up("FULL"))
    default, full = medians(found)
    for ours in pipelines.values():
        bench.checked(ours, "large")
        ours.remove()
        ours.database.drop()
    shown = f"default {default:,.0f}/s, full {full:,.0f}/s"
    return Found(default / full, shown, {"updates": updates, "default": default, "full": full})


def random_updates(rows: int, updates: int) -> str:
    """So many updates of rows of `large` anywhere in it, 10,000 a transaction."""
    return f"""
        DO $$ BEGIN
            FOR turn IN 1..{max(1, updates // 10_000)} LOOP
                UPDATE large SET quantity = (quantity + 1) % 100, status = 'changed'
                WHERE id IN (SELECT DISTINCT ON (id) id FROM (
                    SELECT 1 + floor(random() * {rows})::bigint AS id
                    FROM generate_series(1, {min(updates, 10_000)})) AS drawn);
                COMMIT;
            END LOOP;
        END $$
    """


def big_tx_rss_mib(bench: Bench) -> Found:
    """The most memory our process held while one transaction of 2 GiB of rows passed through."""
    database = bench.server.create_database("big")
    size = (64 << 20) if bench.quick else (2 << 30)
    database.sql("CREATE TABLE stream (id bigint PRIMARY KEY, content text)")
    database.sql(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
    ours = Ours(bench.folder / "big", database)
    ours.catch_up()
    # Digests, so that compressing them does not make them few.
    content = "string_agg(md5(g::text || n), '')"
    written(
        database,
        f"INSERT INTO stream SELECT g, (SELECT {content} FROM generate_series(1, 32) n)"
        f" FROM generate_series(1, {size // 1_024}) g",
    )
    script = Path(__file__).with_name("postgres_alone.py")
    command = [sys.executable, str(script), str(ours.folder), database.url()]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    told = json.loads(done.stdout.splitlines()[-1])
    (rows,) = database.sql("SELECT count(*) FROM stream")[0]
    if told["rows"] != rows:
        raise Different(f"{told['rows']} rows of {rows} came through")
    bench.checked(ours, "stream", keys=range(1, rows, max(1, rows // 1_000)))
    ours.remove()
    database.drop()
    shown = f"{told['peak_mib']:.0f} MiB, {told['before_mib']:.0f} MiB before the first row"
    return Found(told["peak_mib"], shown, {**told, "bytes": size})


def lag_ms(bench: Bench) -> Found:
    """From when a commit upstream has returned to when it is durable here.

    1,000 rows a second, in 100 transactions a second; a tick every 250 ms.
    """
    database = bench.server.create_database("lag")
    for statement in CASES["tiny_tx"].create:
        database.sql(statement)
    database.sql(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
    ours = Ours(bench.folder / "lag", database, tick_ms=250)
    stop = threading.Event()
    with ours.ingest() as (source, ingest):
        runs = threading.Thread(target=ingest.run, args=(stop,))
        runs.start()
        while not source.durable:
            stop.wait(0.01)
        commits = _written_steadily(database, seconds=bench.times(60, quick=5))
        stop.wait(2)
        stop.set()
        runs.join()
    lags, at = [], 0
    for position, committed_s in commits:
        while source.durable[at][0] < position:
            at += 1
        lags.append((source.durable[at][1] - committed_s) * 1_000)
    bench.checked(ours, "stream")
    ours.remove()
    database.drop()
    cuts = statistics.quantiles(lags, n=100)
    values = {"p50": cuts[49], "p99": cuts[98]}
    shown = f"{len(lags)} commits, p50 {cuts[49]:.0f} ms, p99 {cuts[98]:.0f} ms"
    return Found(values, shown, {"commits": len(lags), "most": max(lags)})


def _written_steadily(database: Database, *, seconds: int) -> list[tuple[int, float]]:
    """By commit: where the log stood after it, and when it returned."""
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
    """Measure what the command line asks for, one figure after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, help="measure on this folder's disk [build/]")
    parser.add_argument("--quick", action="store_true", help="less of everything, rougher figures")
    parser.add_argument("--only", action="append", choices=FIGURES, help="just this; repeatable")
    parser.add_argument("--case", action="append", choices=CASES, help="just these streams")
    asked_for = parser.parse_args()
    parent = asked_for.dir or Path(__file__).resolve().parent.parent / "build"
    parent.mkdir(parents=True, exist_ok=True)
    wanted = asked_for.only or list(FIGURES)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    rough = "; quick: rough" if asked_for.quick else ""
    print(f"{os.cpu_count()} cores, load {load}{rough}", flush=True)
    values: dict[str, Any] = {}
    raw: dict[str, Any] = {"quick": asked_for.quick, "load_at_start": os.getloadavg()[0]}
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=parent.resolve()) as folder,
        PostgresServer(settings=SETTINGS) as server,
        PostgresServer(settings=SETTINGS) as second,
    ):
        raw["postgres"] = server.sql("SHOW server_version")[0][0]
        cases = asked_for.case or list(CASES)
        bench = Bench(Path(folder), asked_for.quick, wanted, cases, server, second)
        for name in wanted:
            begun = time.perf_counter()
            try:
                found = FIGURES[name].measure(bench)
            except Different as difference:
                print(f"{name}: {difference}", file=sys.stderr)
                sys.exit(DIFFERENT)
            took = time.perf_counter() - begun
            values[name], raw[name] = _rounded(found.value), _rounded(dict(found.raw))
            print(f"{name}: {found.shown}; {FIGURES[name].told(found.value)} ({took:.0f} s)")
            sys.stdout.flush()
    print(json.dumps({**values, "raw": raw}))


def _rounded(value: Any) -> Any:
    """Three places, of which the last is noise."""
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
