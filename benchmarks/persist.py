"""Persist, compared with plain files, Parquet and Delta Lake.

Both sides of a figure are measured in one run, in alternating order (ours, theirs, theirs,
ours, …): other load on the machine affects both sides. Figures are ratios of medians. All
data is on a real disk and synced. Persist has its default settings, with maintenance in the
background.

    make bench-persist
    python benchmarks/persist.py --quick --only open_growth

Each figure is printed as a line when it is measured; the last line is one JSON object. The
docstring of each function states the timed interval; see also benchmarks/README.md.
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

NEVER_SET: Final = threading.Event()
"""Event for waits with a timeout."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Folder and size."""

    folder: Path
    quick: bool

    def times(self, full: int, *, quick: int) -> int:
        """Return `full`, or `quick` with --quick."""
        return quick if self.quick else full

    def url(self, name: str) -> str:
        """Return the URL of a location in the folder."""
        return f"file:{self.folder / name}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Value of a figure and its medians."""

    value: float | dict[str, float]
    summary: str
    raw: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: its measurement and its aim."""

    measure: Callable[[Bench], Measured]
    aim: str
    met: Callable[[Any], bool]


def append_vs_parquet(bench: Bench) -> Measured:
    """Compare rows/s of ten concurrent writes and a seal with ten synced Parquet files.

    Their side stores the eight columns of the user; ours also stores time and diff, with
    checksums. Maintenance left after our turn runs before theirs; `raw` has its time.
    """
    rows = bench.times(1_000_000, quick=200_000)
    tables = [mixed_rows(rows // 10, seed=i) for i in range(10)]
    files = bench.folder / "parquet"
    files.mkdir()
    maintenance_s: list[float] = []
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
            client.run_maintenance()
            maintenance_s.append(time.perf_counter() - begun)
            client.destroy(name)
            client.run_maintenance()
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
            "upkeep_after_s": statistics.median(maintenance_s),
        },
    )


def small_write_vs_fsync(bench: Bench) -> Measured:
    """Compare the latency of an append of one update with create, write, fsync, link, fsync.

    The plain file has the size of our log entry, and its folder stays open. Its first name is
    removed outside of the measured time; ours within it.
    """
    times = count()
    folder = bench.folder / "bare"
    folder.mkdir()
    with persist.open(bench.url("small"), writer="bench") as client, open_handle(folder) as handle:
        collection = client.create_or_load("small", key=persist.TEXT, value=persist.INT64)

        def ours() -> float:
            upper = next(times)
            begun = time.perf_counter()
            collection.compare_and_append([(("key", upper), upper, +1)], upper, upper + 1)
            return time.perf_counter() - begun

        for _ in range(20):
            ours()
        entries = (path for path in (bench.folder / "small" / "log").rglob("*") if path.is_file())
        entry = os.urandom(max(entries).stat().st_size)
        names = (f"{number:020d}" for number in count())

        def theirs() -> float:
            name = next(names)
            begun = time.perf_counter()
            create_file(handle, name, entry)
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
    """Compare durable one-update writes per second of 64 callers with one caller."""
    with persist.open(bench.url("group"), writer="bench") as client:
        collection = client.create_or_load("group", key=persist.TEXT, value=persist.INT64)
        times = count()

        def seconds_per_write(callers: int, writes: int) -> float:
            """Return the seconds per write with this many callers."""
            write_time = next(times)
            ready = threading.Barrier(callers + 1)

            def call(caller: int) -> None:
                ready.wait()
                for i in range(writes):
                    collection.write([((f"{caller}-{i}", i), write_time, +1)]).result()

            threads = [threading.Thread(target=call, args=(n,)) for n in range(callers)]
            for thread in threads:
                thread.start()
            ready.wait()
            begun = time.perf_counter()
            for thread in threads:
                thread.join()
            took = time.perf_counter() - begun
            collection.seal(write_time + 1).result()
            client.run_maintenance()
            return took / (callers * writes)

        writes = bench.times(200, quick=50)
        many_s, one_s = medians(
            in_turn(
                bench.times(9, quick=3),
                lambda: seconds_per_write(64, writes // 2),
                lambda: seconds_per_write(1, 2 * writes),
            )
        )
    return Measured(
        one_s / many_s,
        f"64 callers {1 / many_s:,.0f} writes/s, one caller {1 / one_s:,.0f} writes/s",
        {"callers_64_per_s": 1 / many_s, "caller_1_per_s": 1 / one_s},
    )


def commit_growth(bench: Bench) -> Measured:
    """Compare the commit latency of a location with many collections and commits with a small one.

    Each location has a separate process: its maintenance slows only its own commits.
    """
    big = (bench.times(1_000, quick=100), bench.times(20_000, quick=2_000))
    with (
        child(commits_on_request, bench.url("big"), *big) as large,
        child(commits_on_request, bench.url("little"), 10, 100) as small,
    ):
        large.recv(), small.recv()
        sides = in_turn(
            bench.times(40, quick=10),
            lambda: request_commits(large, 10),
            lambda: request_commits(small, 10),
        )
    large_s, small_s = (statistics.median(s for turn in side for s in turn) for side in sides)
    return Measured(
        large_s / small_s,
        f"{big[0]:,} collections and {big[1]:,} commits {large_s * 1e3:.3f} ms, "
        f"10 and 100 {small_s * 1e3:.3f} ms",
        {"big_ms": large_s * 1e3, "small_ms": small_s * 1e3},
    )


def open_growth(bench: Bench) -> Measured:
    """Compare the time to open for reading, and close, after many commits with few commits.

    Both locations have ten collections, and their writers have closed. `raw` also has the
    times to open for writing, and for reading while the writer still runs, when entries after
    the last rollup must be applied.
    """
    many, few = bench.times(20_000, quick=4_000), 500
    raw: dict[str, float] = {}
    urls = bench.url("many"), bench.url("few")
    repeat = bench.times(41, quick=11)

    def time_open(url: str, writer: str | None = None) -> float:
        begun = time.perf_counter()
        persist.open(url, writer=writer, hold=writer is not None).close()
        return time.perf_counter() - begun

    def both(mode: str, writer: str | None = None) -> tuple[float, float]:
        many_s, few_s = medians(
            in_turn(repeat, lambda: time_open(urls[0], writer), lambda: time_open(urls[1], writer))
        )
        raw[f"{mode}_many_ms"], raw[f"{mode}_few_ms"] = many_s * 1e3, few_s * 1e3
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
    """Compare the time of 200 appends of 100 rows with Delta Lake and with persist.

    Delta Lake keeps its table open between appends, and does not sync files on a local disk.
    """
    appends = bench.times(200, quick=50)
    tables = [mixed_rows(100, seed=i) for i in range(appends)]
    turns = [_time_appends(bench, n, tables) for n in range(bench.times(3, quick=1))]
    ours_s, theirs_s = (statistics.median(sums) for sums in zip(*turns, strict=True))
    return Measured(
        theirs_s / ours_s,
        f"persist {ours_s:.3f} s, deltalake {theirs_s:.3f} s for {appends} appends",
        {"persist_s": ours_s, "deltalake_s": theirs_s},
    )


def _time_appends(bench: Bench, number: int, tables: list[pa.Table]) -> tuple[float, float]:
    """Return the total seconds of all appends, ours and theirs, alternating by table."""
    path = str(bench.folder / f"delta-{number}")
    deltalake.write_deltalake(path, tables[0].slice(0, 0))
    delta = deltalake.DeltaTable(path)
    our_tables, their_tables = enumerate(tables), iter(tables)
    with persist.open(bench.url(f"rows-{number}"), writer="bench") as client:
        collection = client.create_or_load("rows", schema=tables[0].schema, key_columns=["id"])

        def ours() -> float:
            upper, table = next(our_tables)
            begun = time.perf_counter()
            collection.compare_and_append(table, upper, upper + 1, time=upper)
            return time.perf_counter() - begun

        def theirs() -> float:
            table = next(their_tables)
            begun = time.perf_counter()
            deltalake.write_deltalake(delta, table, mode="append")
            return time.perf_counter() - begun

        our_times, their_times = in_turn(len(tables), ours, theirs)
    return sum(our_times), sum(their_times)


def listen_ms(bench: Bench) -> Measured:
    """Measure the time from just before a write to its receipt by a listener in another process."""
    samples = bench.times(400, quick=100)
    sent: list[int] = []
    with persist.open(bench.url("listen"), writer="bench") as client:
        collection = client.create_or_load("news", key=persist.TEXT, value=persist.INT64)
        with child(receive_changes, bench.url("listen"), "news", samples) as listener:
            listener.recv()
            for upper in range(samples):
                sent.append(time.clock_gettime_ns(time.CLOCK_MONOTONIC))
                collection.compare_and_append([(("key", upper), upper, +1)], upper, upper + 1)
                NEVER_SET.wait(0.025)
            received: list[int] = listener.recv()
    delays_ms = sorted((end - begin) / 1e6 for begin, end in zip(sent, received, strict=True))
    p50, p99 = (delays_ms[int(len(delays_ms) * share)] for share in (0.5, 0.99))
    return Measured(
        {"p50": round(p50, 2), "p99": round(p99, 2)},
        f"p50 {p50:.2f} ms, p99 {p99:.2f} ms over {samples} writes",
        {"slowest_ms": delays_ms[-1]},
    )


FIGURES: Final = {
    "append_vs_parquet": Figure(append_vs_parquet, "≥ 0.8", lambda value: value >= 0.8),
    "small_write_vs_fsync": Figure(small_write_vs_fsync, "≤ 1.5", lambda value: value <= 1.5),
    "group_commit_gain": Figure(group_commit_gain, "≥ 10", lambda value: value >= 10),
    "commit_growth": Figure(commit_growth, "≤ 1.2", lambda value: value <= 1.2),
    "open_growth": Figure(open_growth, "≤ 2", lambda value: value <= 2),
    "vs_deltalake_small_append": Figure(vs_deltalake_small_append, "≥ 5", lambda value: value >= 5),
    "listen_ms": Figure(listen_ms, "p50 ≤ 50", lambda value: value["p50"] <= 50),
}


def mixed_rows(rows: int, *, seed: int) -> pa.Table:
    """Return rows of eight columns: numbers, boolean, timestamp, date, strings."""

    def integers(below: int, column: int) -> pa.Array:
        uniform = pc.random(rows, initializer=seed * 100 + column)
        return pc.cast(pc.floor(pc.multiply(uniform, below)), pa.int64())

    ids = pc.add(pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), rows)), seed * rows)
    cities = pa.array(["Aarhus", "Bergen", "Cork", "Delft", "Espoo", "Faro", "Ghent", "Halle"])
    return pa.table(
        {
            "id": ids,
            "quantity": pc.cast(integers(1_000, 1), pa.int32()),
            "price": pc.multiply(pc.random(rows, initializer=seed * 100 + 2), 1_000.0),
            "paid": pc.equal(integers(2, 3), 1),
            "at": pc.cast(pc.add(integers(10**12, 4), 1_700_000_000_000_000), pa.timestamp("us")),
            "city": cities.take(integers(len(cities), 5)),
            "customer": pc.binary_join_element_wise(
                "customer", pc.cast(integers(10**9, 6), pa.string()), "-"
            ),
            "due": pc.cast(pc.cast(pc.add(integers(365, 7), 19_700), pa.int32()), pa.date32()),
        }
    )


def create_file(folder: int, name: str, data: bytes) -> None:
    """Create a file durably: create, write, fsync, link, fsync folder."""
    file = os.open(f"{name}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    os.write(file, data)
    os.fsync(file)
    os.close(file)
    os.link(f"{name}.new", name, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def sync(path: Path) -> None:
    """Sync a file or folder."""
    with open_handle(path) as handle:
        os.fsync(handle)


@contextmanager
def open_handle(path: Path) -> Iterator[int]:
    """Yield a file descriptor of a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def commits(client: persist.Client, *, collections: int, commits: int) -> Callable[[], float]:
    """Create collections, commit to them in turn, and return a function that times one commit."""
    created = [
        client.create_or_load(f"collection-{i:04d}", key=persist.TEXT, value=persist.INT64)
        for i in range(collections)
    ]
    numbers = count()

    def commit() -> float:
        number = next(numbers)
        collection, upper = created[number % collections], number // collections
        begun = time.perf_counter()
        collection.compare_and_append([(("key", number), upper, +1)], upper, upper + 1)
        return time.perf_counter() - begun

    for _ in range(commits):
        commit()
    client.run_maintenance()
    return commit


def commits_on_request(pipe: Connection, url: str, collections: int, prepared: int) -> None:
    """Commit on request, in a child process, and send the seconds of each commit."""
    with persist.open(url, writer="bench") as client:
        commit = commits(client, collections=collections, commits=prepared)
        pipe.send("ready")
        while requested := pipe.recv():
            pipe.send([commit() for _ in range(requested)])


def receive_changes(pipe: Connection, url: str, collection: str, samples: int) -> None:
    """Listen in a child process, and send the time of receipt of each change."""
    received: list[int] = []
    with persist.open(url) as client, client.collection(collection).listen(as_of=-1) as listener:
        # The first call resolves the address of the writer, which may write only after that.
        listener.next_changes(timeout_ms=100)
        pipe.send("ready")
        while len(received) < samples:
            changes = listener.next_changes(timeout_ms=None)
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            received += [now] * (listener.frontier - len(received) if changes else 0)
        pipe.send(received)
        pipe.recv()


def request_commits(pipe: Connection, commits: int) -> list[float]:
    """Return the seconds of each of this many commits in the child."""
    pipe.send(commits)
    seconds: list[float] = pipe.recv()
    return seconds


@contextmanager
def child(work: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """Run `work` in a child process, and yield a pipe to it. The message 0 ends it."""
    spawn = multiprocessing.get_context("spawn")
    local, remote = spawn.Pipe()
    process = spawn.Process(target=work, args=(remote, *args), daemon=True)
    process.start()
    remote.close()
    try:
        yield local
        local.send(0)
        process.join(60)
    finally:
        process.kill()
        process.join()
        local.close()


def file_system_of(folder: Path) -> str:
    """Return the type of the file system of a folder."""
    mount = ("", "unknown")
    mounts = Path("/proc/self/mounts")
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        _, point, kind, *_ = line.split()
        if folder.is_relative_to(point) and len(point) >= len(mount[0]):
            mount = (point, kind)
    return mount[1]


def rounded(value: float | dict[str, float]) -> float | dict[str, float]:
    """Round to three decimal places."""
    return value if isinstance(value, dict) else round(value, 3)


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
    options = parser.parse_args()
    parent = options.dir or Path(__file__).resolve().parent.parent / "build"
    parent.mkdir(parents=True, exist_ok=True)
    kind = file_system_of(parent.resolve())
    if kind in ("tmpfs", "ramfs"):
        parser.error(f"{parent} is on {kind}, where syncs cost nothing; use another --dir")
    print(f"on {kind}, {os.cpu_count()} cores" + (", quick, less exact" if options.quick else ""))
    values: dict[str, Any] = {}
    raw: dict[str, Any] = {"quick": options.quick}
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parent.resolve()) as folder:
        for name in options.only or FIGURES:
            figure = FIGURES[name]
            begun = time.perf_counter()
            measured = figure.measure(Bench(Path(folder), options.quick))
            values[name] = rounded(measured.value)
            raw[name] = {key: round(value, 3) for key, value in measured.raw.items()}
            ratio = "" if isinstance(measured.value, dict) else f"; ratio {measured.value:.3f}"
            met = "met" if figure.met(measured.value) else "MISSED"
            print(
                f"{name}: {measured.summary}{ratio}; aim {figure.aim}: {met} "
                f"({time.perf_counter() - begun:.0f} s)",
                flush=True,
            )
    print(json.dumps({**values, "raw": raw}))


if __name__ == "__main__":
    main()
