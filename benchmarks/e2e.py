"""A complete pipeline: freshness of the endpoint, resource use, highest rate.

`penstock up` replicates a Postgres with traffic to SQLite or to another Postgres, in child
processes. Freshness is measured by one clock: a writer records when each commit has returned,
and a reader polls the endpoint and records when the last row of that commit is visible. The
highest rate is measured with a backlog: transactions as fast as the server accepts them, until
the endpoint has the last one. It is compared with `CREATE SUBSCRIPTION` between the same
servers, with the same transactions.

    make bench-e2e
    python benchmarks/e2e.py --quick --only freshness_ms

Each figure is printed as a line when it is measured; the last line is one JSON object.
"""

import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg
from measure import Figure, Measured, in_turn, main, medians

from penstock.servers.postgres import Database, PostgresServer

RATE: Final = 1_000
"""Rows per second of the figure with an aim."""

BATCHES: Final = 20
"""Transactions per second."""

CHANGES: Final = 100
"""Inserts, updates and deletes per transaction of the backlog."""

TIMEOUT_S: Final = 600

FILE: Final = """\
location: file:{lake}
tick: 250ms
retain: 1m
sources:
  bench:
    postgres: {{url: "{url}", tables: [public.event]}}
materializations:
  out:
    connector: {connector}
    endpoint: {{{endpoint}}}
    bindings:
      - collection: bench.public.event
        resource: {{table: event, document: false}}
        fields: {{recommended: true, exclude: [flow_document]}}
"""

TABLE: Final = "CREATE TABLE event (id bigint PRIMARY KEY, account int, note text, changed int)"

INSERT: Final = (
    "INSERT INTO event SELECT g, g %% 1000, 'as it may be ' || g, 0"
    " FROM generate_series(%s::bigint, %s::bigint) g"
)

BACKLOG: Final = f"""
CREATE PROCEDURE backlog(transactions int, base bigint) LANGUAGE plpgsql AS $$
BEGIN
    FOR n IN 0 .. transactions - 1 LOOP
        INSERT INTO event SELECT base + g, g % 1000, 'as it may be ' || g, 0
            FROM generate_series(n * {CHANGES // 2} + 1, (n + 1) * {CHANGES // 2}) g;
        UPDATE event SET changed = changed + 1
            WHERE id BETWEEN n * {CHANGES // 2} + 1 AND (n + 1) * {CHANGES // 2} - {CHANGES // 10};
        DELETE FROM event
            WHERE id BETWEEN (n + 1) * {CHANGES // 2} - {CHANGES // 10} + 1
            AND (n + 1) * {CHANGES // 2};
        COMMIT;
    END LOOP;
    INSERT INTO event VALUES (-base, 0, 'the last', 0);
    COMMIT;
END $$
"""
"""Half of each transaction are new rows; the others change or delete earlier rows, each once.
No change cancels another, so consolidation does not reduce the number of writes."""

LAST: Final = 10**9
"""First id of the rows that the backlog inserts."""


@dataclass
class Bench:
    """Two servers, and the resource use of the last run."""

    folder: Path
    quick: bool
    source: PostgresServer
    target: PostgresServer
    used: int = 0
    parts: dict[str, Any] = field(default_factory=dict)

    def times(self, full: int, *, quick: int) -> int:
        return quick if self.quick else full

    def next_name(self) -> str:
        self.used += 1
        return f"e2e_{self.used}"


# A running pipeline.


class Up:
    """A `penstock up` process, from a table of a new database to `connector`."""

    def __init__(self, bench: Bench, connector: str) -> None:
        name = bench.next_name()
        self.upstream = bench.source.create_database(name)
        self.upstream.sql(TABLE)
        self.upstream.sql(BACKLOG)
        self.sqlite = bench.folder / f"{name}.db"
        self.downstream: Database | None = None
        endpoint = f"path: {self.sqlite}"
        if connector == "postgres":
            self.downstream = bench.target.create_database(name)
            endpoint = f'url: "{self.downstream.url()}"'
        file = bench.folder / f"{name}.yaml"
        file.write_text(
            FILE.format(
                lake=bench.folder / name,
                url=self.upstream.url(),
                connector=connector,
                endpoint=endpoint,
            )
        )
        self._log = bench.folder / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli.main", "up", str(file), "--http", "none"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @contextmanager
    def running(self) -> Iterator["Up"]:
        """Run until the block ends, then stop the process and drop its databases."""
        try:
            yield self
            self.process.send_signal(signal.SIGTERM)
            status = self.process.wait(TIMEOUT_S)
            if status != 0:
                raise RuntimeError(f"penstock up exited with status {status}: {self._read_log()}")
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            self.upstream.drop()
            if self.downstream is not None:
                self.downstream.drop()

    @contextmanager
    def querying(self) -> Iterator[Callable[[str], int | None]]:
        """Yield a function that queries one number; it returns None before the table exists."""
        with ExitStack() as stack:
            connection: Any = None
            if self.downstream is not None:
                connection = stack.enter_context(
                    psycopg.connect(self.downstream.url(), autocommit=True)
                )

            def query_number(query: str) -> int | None:
                nonlocal connection
                if self.process.poll() is not None:
                    raise RuntimeError(f"penstock up exited: {self._read_log()}")
                if connection is None:
                    if not self.sqlite.exists():
                        return None
                    connection = stack.enter_context(closing(sqlite3.connect(self.sqlite)))
                try:
                    (number,) = connection.execute(query).fetchone()
                except (sqlite3.OperationalError, psycopg.errors.UndefinedTable):
                    return None
                return None if number is None else int(number)

            yield query_number

    def await_row(self, id: int) -> float:
        """Wait until the endpoint has a row, and return the time."""
        deadline = time.monotonic() + TIMEOUT_S
        with self.querying() as query_number:
            while not query_number(f"SELECT count(*) FROM event WHERE id = {id}"):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"row {id} did not arrive: {self._read_log()}")
                _wait(0.005)
        return time.perf_counter()

    def _read_log(self) -> str:
        return self._log.read_text(errors="replace")[-3_000:]


# Freshness.


def _freshness(bench: Bench, up: Up, rate: int, first: int) -> tuple[dict[str, float], int]:
    """Return the delays in milliseconds at this rate, and the first unused id."""
    warm_s, seconds = bench.times(10, quick=4), bench.times(40, quick=8)
    rows = rate // BATCHES
    committed: list[tuple[int, float]] = []
    seen: list[tuple[int, float]] = []
    over = threading.Event()

    def read() -> None:
        last = None
        with up.querying() as query_number:
            while not over.is_set():
                newest = query_number("SELECT max(id) FROM event")
                if newest is not None and newest != last:
                    seen.append((newest, time.perf_counter()))
                    last = newest
                _wait(0.004)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with psycopg.connect(up.upstream.url(), autocommit=True) as connection:
        began = time.perf_counter()
        for number in range((warm_s + seconds) * BATCHES):
            connection.execute(INSERT, [first, first + rows - 1])
            first += rows
            committed.append((first - 1, time.perf_counter()))
            _wait(began + (number + 1) / BATCHES - time.perf_counter())
        took = time.perf_counter() - began
    up.await_row(first - 1)
    _wait(0.1)
    over.set()
    reader.join()
    delays_ms, index = [], 0
    for id, committed_s in committed[warm_s * BATCHES :]:
        while seen[index][0] < id:
            index += 1
        delays_ms.append(1_000 * (seen[index][1] - committed_s))
    quantiles = statistics.quantiles(delays_ms, n=100)
    rows_per_s = len(committed) * rows / took
    return {"p50": quantiles[49], "p99": quantiles[98], "rows_per_s": rows_per_s}, first


def freshness_ms(bench: Bench) -> Measured:
    """Measure freshness in SQLite at the rate with an aim, and the resource use of that run."""
    with Up(bench, "sqlite").running() as up:
        first = _await_first_row(up)
        parts = _Parts(bench, up)
        result, _ = _freshness(bench, up, RATE, first)
        bench.parts = parts.used()
    value = {name: result[name] for name in ("p50", "p99")}
    return Measured(value, f"{result['rows_per_s']:,.0f} rows/s", result)


def parts(bench: Bench) -> Measured:
    """Report cores and megabytes of each process during `freshness_ms`."""
    if not bench.parts:
        return Measured(None, "needs freshness_ms in the same run")
    seconds = bench.parts["seconds"]
    usage = {name: part for name, part in bench.parts.items() if name != "seconds"}
    value = {f"{name}_cores": part["cpu_s"] / seconds for name, part in usage.items()}
    value |= {f"{name}_mb": part["rss_mb"] for name, part in usage.items()}
    return Measured(value, f"over {seconds:.0f} s", bench.parts)


def freshness_other(bench: Bench) -> Measured:
    """Measure freshness at other rates in SQLite, and in Postgres."""
    results: dict[str, dict[str, float]] = {}
    with Up(bench, "sqlite").running() as up:
        first = _await_first_row(up)
        for rate in (100, 5_000):
            results[f"sqlite_{rate}"], first = _freshness(bench, up, rate, first)
    with Up(bench, "postgres").running() as up:
        results[f"postgres_{RATE}"], _ = _freshness(bench, up, RATE, _await_first_row(up))
    value = {
        f"{case}_{name}": result[name]
        for case, result in results.items()
        for name in ("p50", "p99")
    }
    return Measured(value, "in milliseconds", results)


def _await_first_row(up: Up) -> int:
    """Wait until the endpoint has rows, and return the first unused id."""
    up.upstream.sql(INSERT, [1, 10])
    up.await_row(10)
    return 11


# Resource use.


class _Parts:
    """CPU seconds and memory by process."""

    def __init__(self, bench: Bench, up: Up) -> None:
        self._bench = bench
        self._up = up
        self._began = time.perf_counter()
        self._before = self._sample()

    def used(self) -> dict[str, Any]:
        """Return the CPU seconds since creation, and the current memory."""
        seconds = time.perf_counter() - self._began
        after = self._sample()
        usage: dict[str, Any] = {"seconds": seconds}
        for part, processes in after.items():
            before = self._before.get(part, {})
            cpu = sum(used[0] - before.get(pid, (0.0, 0))[0] for pid, used in processes.items())
            usage[part] = {
                "cpu_s": cpu,
                "rss_mb": sum(used[1] for used in processes.values()) / 1e6,
            }
        return usage

    def _sample(self) -> dict[str, dict[int, tuple[float, int]]]:
        children = _children()
        up = self._up.process.pid
        parts: dict[str, list[int]] = {"up": [up], "jvm": [], "tasks": [], "connector": []}
        for child in children.get(up, ()):
            words = _command_line(child)
            below = _descendants(child, children)
            if words[:1] and words[0].endswith("java"):
                parts["jvm"].append(child)
                parts["tasks"] += below
            else:
                parts["connector"] += [child, *below]
        for part, server in (
            ("postgres_source", self._bench.source),
            ("postgres_target", self._bench.target),
        ):
            parts[part] = [server.pid, *_descendants(server.pid, children)]
        return {
            part: {pid: used for pid in pids if (used := _used(pid)) is not None}
            for part, pids in parts.items()
        }


def _children() -> Mapping[int, list[int]]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    return children


def _descendants(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    descendants, todo = list[int](), [pid]
    while todo:
        direct = children.get(todo.pop(), [])
        descendants += direct
        todo += direct
    return descendants


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _used(pid: int) -> tuple[float, int] | None:
    """Return CPU seconds and resident bytes; None if the process has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return None
    ticks = int(stat[11]) + int(stat[12])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


# Highest rate.


def max_rate_vs_subscription(bench: Bench) -> Measured:
    """Compare row changes per second of a backlog with a subscription."""
    transactions = bench.times(3_000, quick=300)
    turns = bench.times(3, quick=1)
    sides = in_turn(
        turns, lambda: _ours(bench, transactions), lambda: _subscription(bench, transactions)
    )
    ours, theirs = medians(sides)
    raw = {"ours": sides[0], "subscription": sides[1], "changes": transactions * CHANGES}
    return Measured(ours / theirs, f"{ours:,.0f}/s against {theirs:,.0f}/s", raw)


def _ours(bench: Bench, transactions: int) -> float:
    with Up(bench, "postgres").running() as up:
        rows = transactions * CHANGES // 2
        up.upstream.sql(INSERT, [1, rows])
        up.await_row(rows)
        _warm(up.upstream, rows)
        up.await_row(WARM)
        began = time.perf_counter()
        up.upstream.sql(f"CALL backlog({transactions}, {LAST})")
        took = up.await_row(-LAST) - began
        assert up.downstream is not None
        _check(up.upstream, up.downstream)
    return transactions * CHANGES / took


def _subscription(bench: Bench, transactions: int) -> float:
    name = bench.next_name()
    upstream, downstream = bench.source.create_database(name), bench.target.create_database(name)
    rows = transactions * CHANGES // 2
    try:
        for database in (upstream, downstream):
            database.sql(TABLE)
        upstream.sql(BACKLOG)
        upstream.sql("CREATE PUBLICATION bench FOR TABLE event")
        connection = (
            f"host={bench.source.folder} port={bench.source.port} dbname={name} user=postgres"
        )
        downstream.sql(f"CREATE SUBSCRIPTION {name} CONNECTION '{connection}' PUBLICATION bench")
        upstream.sql(INSERT, [1, rows])
        _warm(upstream, rows)
        _await_row(downstream, WARM)
        began = time.perf_counter()
        upstream.sql(f"CALL backlog({transactions}, {LAST})")
        took = _await_row(downstream, -LAST) - began
        _check(upstream, downstream)
        downstream.sql(f"DROP SUBSCRIPTION {name}")
    finally:
        downstream.drop()
        upstream.drop()
    return transactions * CHANGES / took


WARM: Final = 10**8


def _warm(upstream: Database, rows: int) -> None:
    """Run transactions of each kind before the clock starts; the last row is `WARM`."""
    for first in range(rows + 1, rows + 20_001, 1_000):
        upstream.sql(INSERT, [first, first + 999])
        upstream.sql(f"UPDATE event SET changed = 1 WHERE id BETWEEN {first} AND {first + 499}")
        upstream.sql(f"DELETE FROM event WHERE id BETWEEN {first + 500} AND {first + 599}")
    upstream.sql(INSERT, [WARM, WARM])


def _await_row(database: Database, id: int) -> float:
    deadline = time.monotonic() + TIMEOUT_S
    with psycopg.connect(database.url(), autocommit=True) as connection:
        while not connection.execute("SELECT 1 FROM event WHERE id = %s", [id]).fetchone():
            if time.monotonic() > deadline:
                raise RuntimeError(f"row {id} did not arrive")
            _wait(0.005)
    return time.perf_counter()


def _check(upstream: Database, downstream: Database) -> None:
    query = (
        "SELECT count(*), sum(hashtextextended((id, account, note, changed)::text, 0)) FROM event"
    )
    sums = upstream.sql(query), downstream.sql(query)
    if sums[0] != sums[1]:
        raise RuntimeError(f"the two sides differ: {sums}")


def _wait(seconds: float) -> None:
    if seconds > 0:
        threading.Event().wait(seconds)


FIGURES: Final = {
    "freshness_ms": Figure(freshness_ms, "p50 ≤ 800", lambda value: value <= 800),
    "parts": Figure(parts, "none", lambda _: True),
    "freshness_other": Figure(freshness_other, "none", lambda _: True),
    "max_rate_vs_subscription": Figure(
        max_rate_vs_subscription, "≥ 0.5", lambda value: value >= 0.5
    ),
}


@contextmanager
def prepare(folder: Path, quick: bool) -> Iterator[Bench]:
    """Yield a bench with two servers."""
    settings = {"max_wal_size": "4GB", "max_logical_replication_workers": 8}
    with PostgresServer(settings=settings) as source, PostgresServer(settings=settings) as target:
        yield Bench(folder, quick, source, target)


if __name__ == "__main__":
    main((__doc__ or "").partition("\n")[0], FIGURES, prepare)
