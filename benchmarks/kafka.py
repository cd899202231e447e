"""Kafka to a collection, compared with Spark jobs from Kafka to Parquet.

A local broker holds a backlog of JSON records of 200 bytes in four partitions. Every side
reads all of it, in the same Spark session. Before timing, all sides must return the same rows;
a difference ends the benchmark with status 3. Freshness is measured with `penstock ingest` in
a separate process: from the acknowledgement of a record by the broker to its receipt by a
listener of the collection.

    make bench-kafka
    python benchmarks/kafka.py --quick --records 500000 --only vs_plain_spark

Each figure is printed as a line when it is measured; the last line is one JSON object.
"""

import argparse
import functools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Producer
from measure import Figure, Measured, in_turn, main, medians
from pyspark.sql import DataFrame, SparkSession  # noqa: TID251 - the other side of the comparison.
from pyspark.sql import functions as F  # noqa: N812, TID251 - Spark's convention.

import penstock.ingest
import penstock.spark as ps
from penstock import persist
from penstock.engine.jars import kafka_jars
from penstock.engine.shared_session.spark import SharedSession
from penstock.servers.kafka import KafkaBroker

RECORDS: Final = 10_000_000
PARTITIONS: Final = 4
RECORD_BYTES: Final = 200
RATE: Final = 1_000
"""Records per second during the freshness measurement."""

BATCHES: Final = 50
"""Sends per second."""

TIMEOUT_S: Final = 600
DIFFERENT: Final = 3
"""Exit status if the rows of the two sides differ."""

COLUMNS: Final = {
    "id": "bigint",
    "account": "int",
    "amount": "double",
    "paid": "boolean",
    "at": "timestamptz",
    "note": "text",
}
DDL: Final = "id bigint, account int, amount double, paid boolean, at timestamp, note string"
"""The same columns as Spark DDL."""

BACKLOG: Final = "backlog"
SOURCE: Final = "bench"


@dataclass
class Bench:
    """Broker with a backlog, and a session."""

    folder: Path
    quick: bool
    records: int
    broker: KafkaBroker
    session: SharedSession
    used: Iterator[int] = field(default_factory=count)

    @property
    def spark(self) -> SparkSession:
        return self.session.get()

    def times(self, full: int, *, quick: int) -> int:
        """Return `full`, or `quick` with --quick."""
        return quick if self.quick else full

    def next_folder(self, prefix: str) -> Path:
        """Return the path of an unused folder."""
        return self.folder / f"{prefix}-{next(self.used)}"


# The same rows in three ways.


def _ours(bench: Bench, lake: Path) -> None:
    """Ingest the backlog into a collection."""
    file = _file(bench, lake, BACKLOG, tick="1s")
    penstock.ingest.run(file, once=True, stop=threading.Event(), jobs=bench.session)


def _plain(bench: Bench, target: Path) -> None:
    """Run a hand-written batch job."""
    read = bench.spark.read.format("kafka").options(**_options(bench)).load()
    _parsed(read).write.parquet(str(target))


def _structured(bench: Bench, target: Path) -> None:
    """Run a hand-written streaming query with a trigger of 1 s, until it has all records."""
    read = bench.spark.readStream.format("kafka").options(**_options(bench)).load()
    query = (
        _parsed(read)
        .writeStream.format("parquet")
        .option("path", str(target))
        .option("checkpointLocation", f"{target}-checkpoint")
        .trigger(processingTime="1 second")
        .start()
    )
    try:
        query.processAllAvailable()
    finally:
        query.stop()


def _options(bench: Bench) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": bench.broker.bootstrap,
        "subscribe": BACKLOG,
        "startingOffsets": "earliest",
    }


def _parsed(read: DataFrame) -> DataFrame:
    record = F.from_json(F.col("value").cast("string"), DDL).alias("record")
    parsed = read.select(record, F.col("partition"), F.col("offset"))
    return parsed.select(
        "record.*", F.col("partition").alias("_partition"), F.col("offset").alias("_offset")
    )


def vs_plain_spark(bench: Bench) -> Measured:
    """Compare our rate with a batch job from Kafka to Parquet."""
    return _compare(bench, _plain, "a batch job")


def vs_structured_streaming(bench: Bench) -> Measured:
    """Compare our rate with a Structured Streaming query from Kafka to Parquet."""
    return _compare(bench, _structured, "Structured Streaming")


def _compare(bench: Bench, by_hand: Callable[[Bench, Path], None], title: str) -> Measured:
    lake, target = bench.next_folder("lake"), bench.next_folder("parquet")
    _ours(bench, lake)
    by_hand(bench, target)
    _check_same(
        ps.read(bench.spark, f"file:{lake}/{SOURCE}", SOURCE),
        bench.spark.read.parquet(str(target)),
        bench.records,
    )
    for folder in (lake, target):
        shutil.rmtree(folder)

    def timed(side: Callable[[Bench, Path], None]) -> tuple[float, float]:
        output = bench.next_folder("timed")
        begun, used = time.perf_counter(), _processor_s(bench)
        side(bench, output)
        took = time.perf_counter() - begun, _processor_s(bench) - used
        for path in bench.folder.glob(f"{output.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return took

    turns = bench.times(5, quick=2)
    sides = in_turn(turns, lambda: timed(_ours), lambda: timed(by_hand))
    ours_s, theirs_s = medians(([took for took, _ in sides[0]], [took for took, _ in sides[1]]))
    ours_used_s, theirs_used_s = medians(
        ([used for _, used in sides[0]], [used for _, used in sides[1]])
    )
    rates = bench.records / ours_s, bench.records / theirs_s
    return Measured(
        rates[0] / rates[1],
        f"Penstock {rates[0]:,.0f} records/s, {title} {rates[1]:,.0f} records/s; "
        f"CPU time {ours_used_s:.1f} s and {theirs_used_s:.1f} s",
        {
            "records": bench.records,
            "ours_s": ours_s,
            "theirs_s": theirs_s,
            "ours_processor_s": ours_used_s,
            "theirs_processor_s": theirs_used_s,
            "all_ours_s": [took for took, _ in sides[0]],
            "all_theirs_s": [took for took, _ in sides[1]],
        },
    )


def _processor_s(bench: Bench) -> float:
    """Return the CPU seconds of this process and its descendants, without the broker.

    On a shared machine, the side with more processes gets more CPU. CPU time is not affected.
    """
    parents, used = dict[int, int](), dict[int, int]()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The program name, in brackets, may contain any character.
            words = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # The process has ended.
        pid = int(entry.parent.name)
        parents[pid] = int(words[1])
        used[pid] = sum(map(int, words[11:15]))  # Its own, and of children that it has reaped.
    ours, excluded = {os.getpid()}, set(bench.broker.pids.values())
    todo = [os.getpid()]
    while todo:
        current = todo.pop()
        children = {pid for pid, parent in parents.items() if parent == current} - excluded - ours
        ours |= children
        todo += children
    return sum(used.get(pid, 0) for pid in ours) / os.sysconf("SC_CLK_TCK")


def _check_same(ours: DataFrame, theirs: DataFrame, records: int) -> None:
    sums = [_content(ours), _content(theirs)]
    if sums[0] != sums[1] or sums[0][0] != records:
        details = f"(rows, sum of hashes) {sums[0]} and {sums[1]} of {records} records"
        print(f"the two sides differ: {details}", file=sys.stderr)
        sys.exit(DIFFERENT)


def _content(frame: DataFrame) -> tuple[int, int]:
    hashed = F.xxhash64(*sorted(frame.columns)).cast("decimal(38,0)")
    row = frame.agg(F.count(F.lit(1)).alias("rows"), F.sum(hashed).alias("sum")).collect()[0]
    return int(row["rows"]), int(row["sum"] or 0)


# Freshness.


def freshness_ms(bench: Bench) -> Measured:
    """Measure the time from acknowledgement by the broker to a listener, at 1,000 records/s."""
    warm_s, seconds = bench.times(10, quick=5), bench.times(60, quick=10)
    lake, topic = bench.next_folder("lake"), "fresh"
    bench.broker.create_topic(topic, partitions=PARTITIONS)
    producer = Producer(bench.broker.client(linger__ms=0))
    _send(producer, topic, range(PARTITIONS))
    acknowledged: dict[int, float] = {}
    seen: dict[int, float] = {}
    over = threading.Event()
    with _ingesting(bench, _file(bench, lake, topic, tick="250ms")) as read_log:
        listening = threading.Thread(target=_listen, args=(lake, seen, over, read_log), daemon=True)
        listening.start()
        _await(lambda: len(seen) >= PARTITIONS, read_log)
        total, rows = (warm_s + seconds) * RATE, RATE // BATCHES
        begun, first = time.perf_counter(), 1_000
        for number in range(total // rows):
            ids = range(first + number * rows, first + (number + 1) * rows)
            _send(producer, topic, ids, acknowledged)
            _wait(begun + (number + 1) / BATCHES - time.perf_counter())
        records_per_s = total / (time.perf_counter() - begun)
        _await(lambda: first + total - 1 in seen, read_log)
        over.set()
        listening.join()
    delays_ms = [
        1_000 * (seen[id] - acknowledged_s)
        for id, acknowledged_s in acknowledged.items()
        if id >= first + warm_s * RATE
    ]
    quantiles = statistics.quantiles(delays_ms, n=100)
    value = {"p50": quantiles[49], "p99": quantiles[98]}
    return Measured(value, f"{records_per_s:,.0f} records/s, in milliseconds", value)


@contextmanager
def _ingesting(bench: Bench, file: Path) -> Iterator[Callable[[], str]]:
    """Run `penstock ingest`, and yield a function that returns its log, or fails if it exited."""
    log = file.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "ingest", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def read_log() -> str:
        text = log.read_text(errors="replace")[-3_000:]
        if process.poll() is not None:
            raise RuntimeError(f"penstock ingest exited with status {process.returncode}: {text}")
        return text

    try:
        yield read_log
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _listen(
    lake: Path, seen: dict[int, float], over: threading.Event, read_log: Callable[[], str]
) -> None:
    storage = lake / SOURCE
    _await(lambda: over.is_set() or storage.exists(), read_log)
    while not over.is_set():
        with persist.open(f"file:{storage}", hold=False) as client:
            try:
                collection = client.collection(SOURCE)
            except persist.CollectionMissing:
                _wait(0.05)
                continue
            with collection.listen(-1, snapshot=False) as listener:
                while not over.is_set():
                    changes = listener.next_changes(timeout_ms=1_000)
                    if changes is not None:
                        now = time.perf_counter()
                        for id in changes.arrow().column("id").to_pylist():
                            seen.setdefault(id, now)


def _await(condition: Callable[[], bool], read_log: Callable[[], str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out after {TIMEOUT_S} s: {read_log()}")
        read_log()
        _wait(0.02)


def _wait(seconds: float) -> None:
    if seconds > 0:
        threading.Event().wait(seconds)


# Records.


def _file(bench: Bench, lake: Path, topic: str, *, tick: str) -> Path:
    file = bench.folder / f"{lake.name}.json"
    section = {
        "brokers": bench.broker.bootstrap,
        "topic": topic,
        "format": {"json": {"columns": COLUMNS}},
    }
    file.write_text(
        # JSON is also YAML.
        json.dumps(
            {"location": f"file:{lake}", "tick": tick, "sources": {SOURCE: {"kafka": section}}}
        )
    )
    return file


def _send(
    producer: Producer, topic: str, ids: range, acknowledged: dict[int, float] | None = None
) -> None:
    """Send records, wait for their acknowledgement, and record its time in `acknowledged`."""
    failed: list[Any] = []

    def delivered(id: int, error: Any, _: Any) -> None:
        if error is not None:
            failed.append(error)
        elif acknowledged is not None:
            acknowledged[id] = time.perf_counter()

    for id in ids:
        callback = functools.partial(delivered, id)
        producer.produce(topic, value=_record(id), partition=id % PARTITIONS, on_delivery=callback)
    producer.flush(TIMEOUT_S)
    if failed:
        raise RuntimeError(f"the broker rejected records: {failed[0]}")


def _fill(broker: KafkaBroker, records: int) -> None:
    """Send the backlog."""
    broker.create_topic(BACKLOG, partitions=PARTITIONS)
    producer = Producer(
        broker.client(
            linger__ms=50,
            batch__size=1_000_000,
            queue__buffering__max__messages=200_000,
            queue__buffering__max__kbytes=200_000,
            acks="all",
        )
    )
    begun = time.perf_counter()
    for id in range(records):
        value, partition = _record(id), id % PARTITIONS
        while True:
            try:
                producer.produce(BACKLOG, value=value, partition=partition)
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(TIMEOUT_S):
        raise RuntimeError("the broker did not acknowledge all records")
    took = time.perf_counter() - begun
    print(f"{records:,} records of {RECORD_BYTES} bytes sent in {took:.0f} s", flush=True)


_WORDS: Final = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz ", k=4_096))


def _record(id: int) -> bytes:
    start = id % 3_900
    head = (
        f'{{"id":{id},"account":{id % 100_003},"amount":{id % 1_000_000 / 100},'
        f'"paid":{"true" if id % 3 else "false"},'
        f'"at":"2026-01-{1 + id % 28:02}T12:{id % 60:02}:{id % 59:02}.{id % 1_000:03}Z","note":"'
    )
    return f'{head}{_WORDS[start : start + RECORD_BYTES - len(head) - 2]}"}}'.encode()


FIGURES: Final = {
    "vs_plain_spark": Figure(vs_plain_spark, "≥ 0.85", lambda value: value >= 0.85),
    "vs_structured_streaming": Figure(vs_structured_streaming, "≥ 1.0", lambda value: value >= 1.0),
    "freshness_ms": Figure(freshness_ms, "none", lambda _: True),
}


@contextmanager
def prepared(folder: Path, quick: bool, *, records: int) -> Iterator[Bench]:
    """Yield a bench with a broker, its backlog and a session."""
    session = SharedSession(jars=kafka_jars)
    with KafkaBroker() as broker:
        _fill(broker, records)
        try:
            session.get()
            yield Bench(folder, quick, records, broker, session)
        finally:
            session.get().stop()


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument(
        "--records",
        type=int,
        default=RECORDS,
        help="Number of records in the backlog. [%(default)s]",
    )
    options, _ = own.parse_known_args()
    title = (__doc__ or "").partition("\n")[0]
    main(title, FIGURES, functools.partial(prepared, records=options.records), parents=[own])
