"""A whole pipeline as people run it: how fresh a target is, what it takes, how much it can.

`penstock up` follows a Postgres that is being written to, into SQLite or into another
Postgres, in processes of its own. Freshness is measured by one clock: a writer notes when
each commit has returned, a reader looks at the target again and again and notes when the
last row of that commit was there. The highest rate is that of a backlog: transactions as
fast as the server takes them, until the target has the last one; beside it stands
`CREATE SUBSCRIPTION` between the same two servers, with the same transactions.

    make bench-e2e
    python benchmarks/e2e.py --quick --only freshness_ms

Each figure is a line for people as it comes; the last line is one JSON object.
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

from penstock.testing.postgres import Database, PostgresServer

RATE: Final = 1_000
"""Rows a second, of the figure that we aim at."""

BATCHES: Final = 20
"""Transactions a second."""

CHANGES: Final = 100
"""Of a transaction of the backlog: inserts, updates and deletes."""

PATIENCE_S: Final = 600

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
"""Of each transaction half are new rows, and the others change or delete rows of before, each
once: nothing is undone by what follows, so whoever sums up changes has no less to write."""

LAST: Final = 10**9
"""What the backlog's own rows are counted from."""


@dataclass
class Bench:
    """Two servers, and what was found about a run on the way."""

    folder: Path
    quick: bool
    source: PostgresServer
    target: PostgresServer
    used: int = 0
    parts: dict[str, Any] = field(default_factory=dict)

    def times(self, full: int, *, quick: int) -> int:
        return quick if self.quick else full

    def another(self) -> str:
        self.used += 1
        return f"e2e_{self.used}"


# A pipeline that runs.


class Up:
    """A `penstock up`, from a table of a new database into `connector`."""

    def __init__(self, bench: Bench, connector: str) -> None:
        name = bench.another()
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
        """Until the block ends; then nothing of it is left."""
        try:
            yield self
            self.process.send_signal(signal.SIGTERM)
            status = self.process.wait(PATIENCE_S)
            if status != 0:
                raise RuntimeError(f"it ended with {status}: {self._said()}")
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            self.upstream.drop()
            if self.downstream is not None:
                self.downstream.drop()

    @contextmanager
    def last(self) -> Iterator[Callable[[str], int | None]]:
        """A way to ask the target for one number; none before there is a table."""
        with ExitStack() as stack:
            connection: Any = None
            if self.downstream is not None:
                connection = stack.enter_context(
                    psycopg.connect(self.downstream.url(), autocommit=True)
                )

            def ask(query: str) -> int | None:
                nonlocal connection
                if self.process.poll() is not None:
                    raise RuntimeError(f"it ended: {self._said()}")
                if connection is None:
                    if not self.sqlite.exists():
                        return None
                    connection = stack.enter_context(closing(sqlite3.connect(self.sqlite)))
                try:
                    (found,) = connection.execute(query).fetchone()
                except (sqlite3.OperationalError, psycopg.errors.UndefinedTable):
                    return None
                return None if found is None else int(found)

            yield ask

    def await_row(self, id: int) -> float:
        """When it was in the target."""
        until = time.monotonic() + PATIENCE_S
        with self.last() as ask:
            while not ask(f"SELECT count(*) FROM event WHERE id = {id}"):
                if time.monotonic() > until:
                    raise RuntimeError(f"row {id} did not come: {self._said()}")
                _rest(0.005)
        return time.perf_counter()

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-3_000:]


# How fresh the target is.


def _freshness(bench: Bench, up: Up, rate: int, first: int) -> tuple[dict[str, float], int]:
    """In milliseconds, of rows that are written at this rate; and the first id not used."""
    warm_s, seconds = bench.times(10, quick=4), bench.times(40, quick=8)
    rows = rate // BATCHES
    committed: list[tuple[int, float]] = []
    seen: list[tuple[int, float]] = []
    over = threading.Event()

    def read() -> None:
        last = None
        with up.last() as ask:
            while not over.is_set():
                found = ask("SELECT max(id) FROM event")
                if found is not None and found != last:
                    seen.append((found, time.perf_counter()))
                    last = found
                _rest(0.004)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with psycopg.connect(up.upstream.url(), autocommit=True) as connection:
        began = time.perf_counter()
        for number in range((warm_s + seconds) * BATCHES):
            connection.execute(INSERT, [first, first + rows - 1])
            first += rows
            committed.append((first - 1, time.perf_counter()))
            _rest(began + (number + 1) / BATCHES - time.perf_counter())
        took = time.perf_counter() - began
    up.await_row(first - 1)
    _rest(0.1)
    over.set()
    reader.join()
    waits, at = [], 0
    for id, moment in committed[warm_s * BATCHES :]:
        while seen[at][0] < id:
            at += 1
        waits.append(1_000 * (seen[at][1] - moment))
    found = statistics.quantiles(waits, n=100)
    reached = len(committed) * rows / took
    return {"p50": found[49], "p99": found[98], "rows_per_s": reached}, first


def freshness_ms(bench: Bench) -> Measured:
    """At the rate that we aim at, into SQLite; the parts' use of the machine meanwhile."""
    with Up(bench, "sqlite").running() as up:
        first = _begun(up)
        parts = _Parts(bench, up)
        found, _ = _freshness(bench, up, RATE, first)
        bench.parts = parts.used()
    value = {name: found[name] for name in ("p50", "p99")}
    return Measured(value, f"{found['rows_per_s']:,.0f} rows/s", found)


def parts(bench: Bench) -> Measured:
    """Of each part while that was measured: how much of one core, and megabytes."""
    if not bench.parts:
        return Measured(None, "it needs freshness_ms")
    seconds = bench.parts["seconds"]
    used = {name: each for name, each in bench.parts.items() if name != "seconds"}
    value = {f"{name}_cores": each["cpu_s"] / seconds for name, each in used.items()}
    value |= {f"{name}_mb": each["rss_mb"] for name, each in used.items()}
    return Measured(value, f"over {seconds:.0f} s", bench.parts)


def freshness_other(bench: Bench) -> Measured:
    """At other rates into SQLite, and into Postgres."""
    found: dict[str, dict[str, float]] = {}
    with Up(bench, "sqlite").running() as up:
        first = _begun(up)
        for rate in (100, 5_000):
            found[f"sqlite_{rate}"], first = _freshness(bench, up, rate, first)
    with Up(bench, "postgres").running() as up:
        found[f"postgres_{RATE}"], _ = _freshness(bench, up, RATE, _begun(up))
    value = {
        f"{case}_{name}": each[name] for case, each in found.items() for name in ("p50", "p99")
    }
    return Measured(value, "in milliseconds", found)


def _begun(up: Up) -> int:
    """Wait until a first row is there; the first id not used."""
    up.upstream.sql(INSERT, [1, 10])
    up.await_row(10)
    return 11


# What it takes.


class _Parts:
    """Processor seconds and memory, by part."""

    def __init__(self, bench: Bench, up: Up) -> None:
        self._bench = bench
        self._up = up
        self._began = time.perf_counter()
        self._before = self._look()

    def used(self) -> dict[str, Any]:
        """Since it was made; the memory is that of now."""
        seconds = time.perf_counter() - self._began
        after = self._look()
        found: dict[str, Any] = {"seconds": seconds}
        for part, processes in after.items():
            before = self._before.get(part, {})
            cpu = sum(each[0] - before.get(pid, (0.0, 0))[0] for pid, each in processes.items())
            found[part] = {
                "cpu_s": cpu,
                "rss_mb": sum(each[1] for each in processes.values()) / 1e6,
            }
        return found

    def _look(self) -> dict[str, dict[int, tuple[float, int]]]:
        children = _children()
        up = self._up.process.pid
        parts: dict[str, list[int]] = {"up": [up], "jvm": [], "tasks": [], "connector": []}
        for child in children.get(up, ()):
            words = _words(child)
            below = _below(child, children)
            if words[:1] and words[0].endswith("java"):
                parts["jvm"].append(child)
                parts["tasks"] += below
            else:
                parts["connector"] += [child, *below]
        for part, server in (
            ("postgres_source", self._bench.source),
            ("postgres_target", self._bench.target),
        ):
            parts[part] = [server.pid, *_below(server.pid, children)]
        return {
            part: {pid: used for pid in pids if (used := _used(pid)) is not None}
            for part, pids in parts.items()
        }


def _children() -> Mapping[int, list[int]]:
    found: dict[int, list[int]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            with suppress(OSError):
                parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
                found.setdefault(parent, []).append(int(each.name))
    return found


def _below(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    found, todo = list[int](), [pid]
    while todo:
        own = children.get(todo.pop(), [])
        found += own
        todo += own
    return found


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _used(pid: int) -> tuple[float, int] | None:
    """Seconds of processors, and bytes of memory."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return None
    ticks = int(stat[11]) + int(stat[12])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


# How much it can.


def max_rate_vs_subscription(bench: Bench) -> Measured:
    """Row changes a second of a backlog, over those of a subscription."""
    transactions = bench.times(3_000, quick=300)
    turns = bench.times(3, quick=1)
    sides = in_turn(
        turns, lambda: _ours(bench, transactions), lambda: _subscription(bench, transactions)
    )
    ours, theirs = medians(sides)
    raw = {"ours": sides[0], "subscription": sides[1], "changes": transactions * CHANGES}
    return Measured(ours / theirs, f"{ours:,.0f}/s beside {theirs:,.0f}/s", raw)


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
    name = bench.another()
    upstream, downstream = bench.source.create_database(name), bench.target.create_database(name)
    rows = transactions * CHANGES // 2
    try:
        for each in (upstream, downstream):
            each.sql(TABLE)
        upstream.sql(BACKLOG)
        upstream.sql("CREATE PUBLICATION bench FOR TABLE event")
        where = f"host={bench.source.folder} port={bench.source.port} dbname={name} user=postgres"
        downstream.sql(f"CREATE SUBSCRIPTION {name} CONNECTION '{where}' PUBLICATION bench")
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
    """Some transactions of each kind before the clock starts; the row `WARM` is the last."""
    for first in range(rows + 1, rows + 20_001, 1_000):
        upstream.sql(INSERT, [first, first + 999])
        upstream.sql(f"UPDATE event SET changed = 1 WHERE id BETWEEN {first} AND {first + 499}")
        upstream.sql(f"DELETE FROM event WHERE id BETWEEN {first + 500} AND {first + 599}")
    upstream.sql(INSERT, [WARM, WARM])


def _await_row(database: Database, id: int) -> float:
    until = time.monotonic() + PATIENCE_S
    with psycopg.connect(database.url(), autocommit=True) as connection:
        while not connection.execute("SELECT 1 FROM event WHERE id = %s", [id]).fetchone():
            if time.monotonic() > until:
                raise RuntimeError(f"row {id} did not come")
            _rest(0.005)
    return time.perf_counter()


def _check(upstream: Database, downstream: Database) -> None:
    query = (
        "SELECT count(*), sum(hashtextextended((id, account, note, changed)::text, 0)) FROM event"
    )
    held = upstream.sql(query), downstream.sql(query)
    if held[0] != held[1]:
        raise RuntimeError(f"the two sides differ: {held}")


def _rest(seconds: float) -> None:
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
    """Two servers."""
    settings = {"max_wal_size": "4GB", "max_logical_replication_workers": 8}
    with PostgresServer(settings=settings) as source, PostgresServer(settings=settings) as target:
        yield Bench(folder, quick, source, target)


if __name__ == "__main__":
    main((__doc__ or "").partition("\n")[0], FIGURES, prepare)
