"""Persist beside what one would otherwise use: bare files, Parquet, Delta Lake.

Both sides of a figure are measured in one run, in turn (ours, theirs, theirs,
ours, …), so that a disturbed machine disturbs both; what is compared are
medians, and ratios are what to look at. Everything lies on a real disk and is
synced, and persist has its default settings, upkeep in the background included.

    make bench-persist
    python benchmarks/persist.py --quick --only open_growth

Each figure is a line for people as it comes; the last line is one JSON object.
What each one times exactly stands at its function; benchmarks/README.md tells
how to read them.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import deltalake
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from measure import in_turn, medians

import penstock.persist as persist

NOTHING: Final = threading.Event()
"""Never set: something to wait on for a while."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Where to work, and how much of it."""

    folder: Path
    quick: bool

    def times(self, full: int, *, quick: int) -> int:
        """How often: `full`, or `quick` while developing."""
        return quick if self.quick else full

    def url(self, name: str) -> str:
        """A location that nobody has used."""
        return f"file:{self.folder / name}"


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure, and the medians it was made from."""

    value: float | dict[str, float]
    shown: str
    raw: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the figures: how it is measured, and what we aim at."""

    measure: Callable[[Bench], Measured]
    aim: str
    met: Callable[[Any], bool]


def append_vs_parquet(bench: Bench) -> Measured:
    """Rows/s of ten writes, waited for together, and a seal, over those of ten synced files.

    Their side stores the user's eight columns; ours those and time and diff,
    checksummed. What upkeep is left after our turn is done before theirs, and
    told in `raw`.
    """
    rows = bench.times(1_000_000, quick=200_000)
    tables = [mixed_rows(rows // 10, seed=i) for i in range(10)]
    files = bench.folder / "parquet"
    files.mkdir()
    tidying: list[float] = []
    turn = count()

    with persist.open(bench.url("append"), writer="bench") as client:

        def ours() -> float:
            name = f"rows-{next(turn)}"
            collection = client.create_or_load(name, schema=tables[0].schema, key_columns=["id"])
            begun = time.perf_counter()
            writes = [collection.write(table, time=i) for i, table in enumerate(tables)]
            sealed = collection.seal(len(tables))
            for write in writes:
                write.result()
            sealed.result()
            took = time.perf_counter() - begun
            begun = time.perf_counter()
            client.upkeep()
            tidying.append(time.perf_counter() - begun)
            client.destroy(name)
            client.upkeep()
            return took

        def theirs() -> float:
            begun = time.perf_counter()
            for i, table in enumerate(tables):
                path = files / f"{i}.parquet"
                pq.write_table(table, path)
                sync(path)
                sync(files)
            took = time.perf_counter() - begun
            for path in files.iterdir():
                path.unlink()
            return took

        ours(), theirs()
        ours_s, theirs_s = medians(in_turn(bench.times(7, quick=3), ours, theirs))
    return Measured(
        theirs_s / ours_s,
        f"persist {rows / ours_s:,.0f} rows/s, parquet {rows / theirs_s:,.0f} rows/s",
        {
            "persist_rows_per_s": rows / ours_s,
            "parquet_rows_per_s": rows / theirs_s,
            "upkeep_after_s": statistics.median(tidying),
        },
    )


def small_write_vs_fsync(bench: Bench) -> Measured:
    """Latency of appending one update over create, write, fsync, link, fsync folder.

    The bare file has as many bytes as our log entry, and its folder is held
    open. Its first name is removed outside of the time taken; ours inside.
    """
    times = count()
    folder = bench.folder / "bare"
    folder.mkdir()
    with persist.open(bench.url("small"), writer="bench") as client, held(folder) as handle:
        collection = client.create_or_load("small", key=persist.TEXT, value=persist.INT64)

        def ours() -> float:
            at = next(times)
            begun = time.perf_counter()
            collection.compare_and_append([(("key", at), at, +1)], at, at + 1)
            return time.perf_counter() - begun

        for _ in range(20):
            ours()
        entries = (path for path in (bench.folder / "small" / "log").rglob("*") if path.is_file())
        entry = os.urandom(max(entries).stat().st_size)
        names = (f"{number:020d}" for number in count())

        def theirs() -> float:
            name = next(names)
            begun = time.perf_counter()
            bare_create(handle, name, entry)
            took = time.perf_counter() - begun
            os.unlink(f"{name}.new", dir_fd=handle)
            return took

        ours_s, theirs_s = medians(in_turn(bench.times(1_000, quick=200), ours, theirs))
    return Measured(
        ours_s / theirs_s,
        f"persist {ours_s * 1e3:.3f} ms, bare files {theirs_s * 1e3:.3f} ms, {len(entry)} bytes",
        {"persist_ms": ours_s * 1e3, "bare_ms": theirs_s * 1e3, "entry_bytes": len(entry)},
    )


def group_commit_gain(bench: Bench) -> Measured:
    """Durable one-update writes per second by 64 callers over those by one."""
    with persist.open(bench.url("group"), writer="bench") as client:
        collection = client.create_or_load("group", key=persist.TEXT, value=persist.INT64)
        rounds = count()

        def pace(callers: int, writes: int) -> float:
            """Seconds for each write, with so many callers."""
            at = next(rounds)
            ready = threading.Barrier(callers + 1)

            def call(caller: int) -> None:
                ready.wait()
                for i in range(writes):
                    collection.write([((f"{caller}-{i}", i), at, +1)]).result()

            threads = [threading.Thread(target=call, args=(n,)) for n in range(callers)]
            for thread in threads:
                thread.start()
            ready.wait()
            begun = time.perf_counter()
            for thread in threads:
                thread.join()
            took = time.perf_counter() - begun
            collection.seal(at + 1).result()
            client.upkeep()
            return took / (callers * writes)

        each = bench.times(200, quick=50)
        many_s, one_s = medians(
            in_turn(bench.times(9, quick=3), lambda: pace(64, each // 2), lambda: pace(1, 2 * each))
        )
    return Measured(
        one_s / many_s,
        f"64 callers {1 / many_s:,.0f} writes/s, one caller {1 / one_s:,.0f} writes/s",
        {"callers_64_per_s": 1 / many_s, "caller_1_per_s": 1 / one_s},
    )


def commit_growth(bench: Bench) -> Measured:
    """Commit latency in a location with many collections and commits over that in a small one.

    Each location has a process of its own, so that what its upkeep costs falls
    on its own commits.
    """
    big = (bench.times(1_000, quick=100), bench.times(20_000, quick=2_000))
    with (
        helper(commits_on_request, bench.url("big"), *big) as large,
        helper(commits_on_request, bench.url("little"), 10, 100) as small,
    ):
        large.recv(), small.recv()
        rounds = in_turn(
            bench.times(40, quick=10), lambda: asked(large, 10), lambda: asked(small, 10)
        )
    large_s, small_s = (statistics.median(s for some in side for s in some) for side in rounds)
    return Measured(
        large_s / small_s,
        f"{big[0]:,} collections and {big[1]:,} commits {large_s * 1e3:.3f} ms, "
        f"10 and 100 {small_s * 1e3:.3f} ms",
        {"big_ms": large_s * 1e3, "small_ms": small_s * 1e3},
    )


def open_growth(bench: Bench) -> Measured:
    """Time to open for reading, and close, after many commits over that after few.

    Both locations have ten collections and were closed by their writer. `raw`
    also has opening for writing, and for reading while the writer still runs,
    when there are entries since the last rollup to fold.
    """
    many, few = bench.times(20_000, quick=4_000), 500
    raw: dict[str, float] = {}
    urls = bench.url("many"), bench.url("few")
    repeat = bench.times(41, quick=11)

    def opened(url: str, writer: str | None = None) -> float:
        begun = time.perf_counter()
        persist.open(url, writer=writer, hold=writer is not None).close()
        return time.perf_counter() - begun

    def both(what: str, writer: str | None = None) -> tuple[float, float]:
        many_s, few_s = medians(
            in_turn(repeat, lambda: opened(urls[0], writer), lambda: opened(urls[1], writer))
        )
        raw[f"{what}_many_ms"], raw[f"{what}_few_ms"] = many_s * 1e3, few_s * 1e3
        return many_s, few_s

    with (
        persist.open(urls[0], writer="bench") as large,
        persist.open(urls[1], writer="bench") as small,
    ):
        commits(small, collections=10, commits=few)
        commits(large, collections=10, commits=many)
        both("while_writing")
    many_s, few_s = both("reading")
    both("writing", "bench")
    return Measured(
        many_s / few_s,
        f"after {many:,} commits {many_s * 1e3:.2f} ms, after {few} {few_s * 1e3:.2f} ms",
        raw,
    )


def vs_deltalake_small_append(bench: Bench) -> Measured:
    """Time of 200 appends of 100 rows with Delta Lake over that with persist.

    Delta Lake keeps its table open between appends, and does not sync what it
    writes to a local disk.
    """
    appends = bench.times(200, quick=50)
    tables = [mixed_rows(100, seed=i) for i in range(appends)]
    rounds = [_appends_beside_delta(bench, n, tables) for n in range(bench.times(3, quick=1))]
    ours_s, theirs_s = (statistics.median(sums) for sums in zip(*rounds, strict=True))
    return Measured(
        theirs_s / ours_s,
        f"persist {ours_s:.3f} s, deltalake {theirs_s:.3f} s for {appends} appends",
        {"persist_s": ours_s, "deltalake_s": theirs_s},
    )


def _appends_beside_delta(bench: Bench, number: int, tables: list[pa.Table]) -> tuple[float, float]:
    """The seconds that all appends took together, ours and theirs, table by table in turn."""
    path = str(bench.folder / f"delta-{number}")
    deltalake.write_deltalake(path, tables[0].slice(0, 0))
    delta = deltalake.DeltaTable(path)
    our_tables, their_tables = enumerate(tables), iter(tables)
    with persist.open(bench.url(f"rows-{number}"), writer="bench") as client:
        collection = client.create_or_load("rows", schema=tables[0].schema, key_columns=["id"])

        def ours() -> float:
            at, table = next(our_tables)
            begun = time.perf_counter()
            collection.compare_and_append(table, at, at + 1, time=at)
            return time.perf_counter() - begun

        def theirs() -> float:
            table = next(their_tables)
            begun = time.perf_counter()
            deltalake.write_deltalake(delta, table, mode="append")
            return time.perf_counter() - begun

        mine, other = in_turn(len(tables), ours, theirs)
    return sum(mine), sum(other)


def listen_ms(bench: Bench) -> Measured:
    """From just before a write to its receipt by a listener in another process."""
    samples = bench.times(400, quick=100)
    sent: list[int] = []
    with persist.open(bench.url("listen"), writer="bench") as client:
        collection = client.create_or_load("news", key=persist.TEXT, value=persist.INT64)
        with helper(receipts, bench.url("listen"), "news", samples) as listener:
            listener.recv()
            for at in range(samples):
                sent.append(time.clock_gettime_ns(time.CLOCK_MONOTONIC))
                collection.compare_and_append([(("key", at), at, +1)], at, at + 1)
                NOTHING.wait(0.025)
            received: list[int] = listener.recv()
    late = sorted((there - here) / 1e6 for here, there in zip(sent, received, strict=True))
    p50, p99 = (late[int(len(late) * share)] for share in (0.5, 0.99))
    return Measured(
        {"p50": round(p50, 2), "p99": round(p99, 2)},
        f"p50 {p50:.2f} ms, p99 {p99:.2f} ms over {samples} writes",
        {"slowest_ms": late[-1]},
    )


FIGURES: Final = {
    "append_vs_parquet": Figure(append_vs_parquet, "≥ 0.8", lambda found: found >= 0.8),
    "small_write_vs_fsync": Figure(small_write_vs_fsync, "≤ 1.5", lambda found: found <= 1.5),
    "group_commit_gain": Figure(group_commit_gain, "≥ 10", lambda found: found >= 10),
    "commit_growth": Figure(commit_growth, "≤ 1.2", lambda found: found <= 1.2),
    "open_growth": Figure(open_growth, "≤ 2", lambda found: found <= 2),
    "vs_deltalake_small_append": Figure(vs_deltalake_small_append, "≥ 5", lambda found: found >= 5),
    "listen_ms": Figure(listen_ms, "p50 ≤ 50", lambda found: found["p50"] <= 50),
}


def mixed_rows(rows: int, *, seed: int) -> pa.Table:
    """Eight columns as tables have them: numbers, a flag, a time, a day, words few and many."""

    def chosen(below: int, column: int) -> pa.Array:
        drawn = pc.random(rows, initializer=seed * 100 + column)
        return pc.cast(pc.floor(pc.multiply(drawn, below)), pa.int64())

    ids = pc.add(pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), rows)), seed * rows)
    cities = pa.array(["Aarhus", "Bergen", "Cork", "Delft", "Espoo", "Faro", "Ghent", "Halle"])
    return pa.table(
        {
            "id": ids,
            "quantity": pc.cast(chosen(1_000, 1), pa.int32()),
            "price": pc.multiply(pc.random(rows, initializer=seed * 100 + 2), 1_000.0),
            "paid": pc.equal(chosen(2, 3), 1),
            "at": pc.cast(pc.add(chosen(10**12, 4), 1_700_000_000_000_000), pa.timestamp("us")),
            "city": cities.take(chosen(len(cities), 5)),
            "customer": pc.binary_join_element_wise(
                "customer", pc.cast(chosen(10**9, 6), pa.string()), "-"
            ),
            "due": pc.cast(pc.cast(pc.add(chosen(365, 7), 19_700), pa.int32()), pa.date32()),
        }
    )


def bare_create(folder: int, name: str, data: bytes) -> None:
    """What any durable creation costs: create, write, fsync, link, fsync folder."""
    file = os.open(f"{name}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    os.write(file, data)
    os.fsync(file)
    os.close(file)
    os.link(f"{name}.new", name, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def sync(path: Path) -> None:
    """Make a file or folder survive a power cut."""
    with held(path) as handle:
        os.fsync(handle)


@contextmanager
def held(path: Path) -> Iterator[int]:
    """A handle on a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def commits(client: persist.Client, *, collections: int, commits: int) -> Callable[[], float]:
    """Make collections and commit to them in turn; gives a way to commit once more, timed."""
    made = [
        client.create_or_load(f"collection-{i:04d}", key=persist.TEXT, value=persist.INT64)
        for i in range(collections)
    ]
    numbers = count()

    def commit() -> float:
        number = next(numbers)
        collection, at = made[number % collections], number // collections
        begun = time.perf_counter()
        collection.compare_and_append([(("key", number), at, +1)], at, at + 1)
        return time.perf_counter() - begun

    for _ in range(commits):
        commit()
    client.upkeep()
    return commit


def commits_on_request(line: Connection, url: str, collections: int, prepared: int) -> None:
    """In a process of its own: commit as often as asked, and answer how long each took."""
    with persist.open(url, writer="bench") as client:
        commit = commits(client, collections=collections, commits=prepared)
        line.send("ready")
        while wanted := line.recv():
            line.send([commit() for _ in range(wanted)])


def receipts(line: Connection, url: str, collection: str, samples: int) -> None:
    """In a process of its own: when each of so many times was heard of."""
    received: list[int] = []
    with persist.open(url) as client, client.collection(collection).listen(as_of=-1) as listener:
        # The first look finds the writer's address; only then may it begin.
        listener.next_changes(timeout_ms=100)
        line.send("ready")
        while len(received) < samples:
            changes = listener.next_changes(timeout_ms=None)
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            received += [now] * (listener.frontier - len(received) if changes else 0)
        line.send(received)
        line.recv()


def asked(line: Connection, commits: int) -> list[float]:
    """How long each of so many commits took at the other end."""
    line.send(commits)
    answer: list[float] = line.recv()
    return answer


@contextmanager
def helper(work: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """`work` in a process of its own, at the other end of a line. Sent 0, it ends."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=work, args=(there, *args), daemon=True)
    process.start()
    there.close()
    try:
        yield here
        here.send(0)
        process.join(60)
    finally:
        process.kill()
        process.join()
        here.close()


def file_system_of(folder: Path) -> str:
    """The kind of file system a folder lies on, as the kernel calls it."""
    found = ("", "unknown")
    mounts = Path("/proc/self/mounts")
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        _, point, kind, *_ = line.split()
        if folder.is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1]


def rounded(value: float | dict[str, float]) -> float | dict[str, float]:
    """Three places, of which the last is noise."""
    return value if isinstance(value, dict) else round(value, 3)


def main() -> None:
    """Measure what was asked for, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, help="measure on this folder's disk [build/]")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, rougher figures")
    parser.add_argument("--only", action="append", choices=FIGURES, help="just this; repeatable")
    asked_for = parser.parse_args()
    parent = asked_for.dir or Path(__file__).resolve().parent.parent / "build"
    parent.mkdir(parents=True, exist_ok=True)
    kind = file_system_of(parent.resolve())
    if kind in ("tmpfs", "ramfs"):
        parser.error(f"{parent} is on {kind}, where syncing costs nothing; give another --dir")
    print(f"on {kind}, {os.cpu_count()} cores" + (", quick: rough" if asked_for.quick else ""))
    values: dict[str, Any] = {}
    raw: dict[str, Any] = {"quick": asked_for.quick}
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parent.resolve()) as folder:
        for name in asked_for.only or FIGURES:
            figure = FIGURES[name]
            begun = time.perf_counter()
            measured = figure.measure(Bench(Path(folder), asked_for.quick))
            values[name] = rounded(measured.value)
            raw[name] = {what: round(value, 3) for what, value in measured.raw.items()}
            ratio = "" if isinstance(measured.value, dict) else f"; ratio {measured.value:.3f}"
            met = "met" if figure.met(measured.value) else "MISSED"
            print(
                f"{name}: {measured.shown}{ratio}; aim {figure.aim}: {met} "
                f"({time.perf_counter() - begun:.0f} s)",
                flush=True,
            )
    print(json.dumps({**values, "raw": raw}))


if __name__ == "__main__":
    main()
