"""The sides of the comparison: ours, and the others, on the same changes.

Every side of a stream starts at a slot that was created before the changes were written, and
ends when it has all of them. The server has written all changes before, so the time measures
only how fast a side reads them.
"""

import hashlib
import json
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from postgres_cases import Case

from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.engine.java import find_java
from penstock.ingest.loop import IngestLoop
from penstock.ingest.snapshot_loader import IngestJobs
from penstock.persist.lake import find_collection
from penstock.progress import SINGLE_PARTITION
from penstock.servers.postgres import Database, PostgresServer
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.source import PostgresSource
from penstock.sources.postgres.types import to_text

__all__ = [
    "DEBEZIUM_PYTHON",
    "PUBLICATION",
    "SOURCE",
    "Debezium",
    "Different",
    "Ours",
    "Recvlogical",
    "Subscription",
    "Way",
    "contents_differ",
    "copy_seconds",
]

SOURCE: Final = "bench"
PUBLICATION: Final = "penstock"
TICK_MS: Final = 50
"""Tick interval while catching up; on average half of it passes before the first tick."""

RETAIN_MS: Final = 3_600_000

DEBEZIUM_PYTHON: Final = (
    Path(__file__).resolve().parent.parent / ".venv-debezium" / "bin" / "python"
)
DEBEZIUM_TIMEOUT_S: Final = 1_800

Way: TypeAlias = Literal["socket", "tcp"]


class Different(Exception):
    """The rows of a side differ from the server."""


class TimedSource(PostgresSource):
    """A source that records when it was opened and when its changes became durable."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.open_called_s = self.opened_s = self.durable_s = 0.0
        self.durable: list[tuple[int, float]] = []
        """Durable positions, each with its time."""

    def open(self, *arguments: Any) -> None:
        self.open_called_s = time.perf_counter()
        super().open(*arguments)
        self.opened_s = time.perf_counter()

    def committed(self, frontier: Any) -> None:
        self.durable_s = time.perf_counter()
        if frontier is not None:
            self.durable.append((frontier[SINGLE_PARTITION], self.durable_s))
        super().committed(frontier)


@dataclass(frozen=True, slots=True)
class Ours:
    """A pipeline from one source to a separate file location."""

    folder: Path
    database: Database
    way: Way = "socket"
    tick_ms: int = TICK_MS
    tables: Sequence[Mapping[str, Any]] | None = None
    """Tables in the form of the pipeline file; None means all."""

    @property
    def location(self) -> str:
        return f"file:{self.folder}"

    def catch_up(self) -> float:
        """Run until all changes are durable, and return the seconds since the stream was open."""
        with self.ingest() as (source, ingest):
            ingest.run(threading.Event(), once=True)
        return source.durable_s - source.opened_s

    def copy(self, *, tasks: int, jobs: IngestJobs | None = None) -> float:
        """Take the initial snapshot, and return the seconds from the open call to durable."""
        with self.ingest(tasks=tasks, jobs=jobs) as (source, ingest):
            ingest.run(threading.Event(), once=True)
        return source.durable_s - source.open_called_s

    def remove(self) -> None:
        """Remove its files, and drop every slot of the database."""
        self.database.sql(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE database = current_database()"
        )
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def ingest(
        self, *, tasks: int = 2, jobs: IngestJobs | None = None
    ) -> Iterator[tuple[TimedSource, IngestLoop]]:
        """Yield the source and the ingest loop, as `penstock.ingest.run` builds them."""
        section: dict[str, Any] = {"url": self.database.url(host=self.way), "snapshot_tasks": tasks}
        if self.tables is not None:
            section["tables"] = self.tables
        config = PostgresConfig.parse(section)
        with persist.open(self.location, writer=SOURCE) as client:
            source = TimedSource(
                SOURCE,
                config,
                location=self.location,
                clock=SYSTEM_CLOCK,
                rng=random.Random(),
                tasks=tasks,
            )
            ingest = IngestLoop(
                SOURCE,
                source,
                client,
                tick_ms=self.tick_ms,
                retain_ms=RETAIN_MS,
                clock=SYSTEM_CLOCK,
                jobs=jobs,
                # Use Spark for every size, also with --quick.
                spark_bytes=0,
            )
            yield source, ingest


@dataclass(frozen=True, slots=True)
class Recvlogical:
    """`pg_recvlogical` to /dev/null."""

    database: Database
    slot: str
    binary: bool
    way: Way = "socket"

    def catch_up(self, end_lsn: str) -> float:
        """Return the seconds from its start until it exits at `end_lsn`."""
        program = self.database.server.binaries / "pg_recvlogical"
        options = {"proto_version": "1", "publication_names": PUBLICATION}
        if self.binary:
            options["binary"] = "true"
        command = [
            *(str(program), "--dbname", self.database.url(host=self.way), "--slot", self.slot),
            *("--start", "--endpos", end_lsn, "--no-loop", "--file", "/dev/null"),
            *(f"--option={name}={value}" for name, value in options.items()),
        ]
        begun = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - begun


@dataclass(frozen=True, slots=True)
class Subscription:
    """Logical replication of Postgres to a database of a second server.

    By default, its apply worker uses asynchronous commits.
    """

    upstream: Database
    slot: str
    second: PostgresServer
    case: Case
    rows: int

    def catch_up(self) -> float:
        """Return the seconds from enabling the subscription until the last row is readable."""
        database = self.second.create_database(self.slot)
        for statement in (*self.case.create, self.case.base.format(rows=self.rows) or "SELECT 1"):
            database.sql(statement)
        upstream_url = self.upstream.url().replace("'", "''")
        database.sql(
            f"CREATE SUBSCRIPTION {self.slot} CONNECTION '{upstream_url}' PUBLICATION {PUBLICATION}"
            f" WITH (create_slot = false, slot_name = '{self.slot}', copy_data = false,"
            " enabled = false)"
        )
        last = f"SELECT 1 FROM stream WHERE {self.case.arrived.format(rows=self.rows)}"
        with psycopg.connect(database.url(), autocommit=True) as connection:
            connection.execute(f"ALTER SUBSCRIPTION {self.slot} ENABLE".encode())
            begun, never = time.perf_counter(), threading.Event()
            while connection.execute(last.encode()).fetchone() is None:
                never.wait(0.005)
            took = time.perf_counter() - begun
            connection.execute(f"ALTER SUBSCRIPTION {self.slot} DISABLE".encode())
            connection.execute(f"ALTER SUBSCRIPTION {self.slot} SET (slot_name = NONE)".encode())
            connection.execute(f"DROP SUBSCRIPTION {self.slot}".encode())
            count = connection.execute(b"SELECT count(*) FROM stream").fetchone()
        if count != (self.rows,):
            raise Different(f"the subscription has {count} rows of {self.rows}")
        self.second.sql(f"DROP DATABASE {self.slot} WITH (FORCE)")
        return took


@dataclass(frozen=True, slots=True)
class Debezium:
    """Embedded Debezium engine with default settings."""

    database: Database
    slot: str
    folder: Path

    def missing(self) -> str:
        """Return the reason why Debezium cannot run, or an empty string."""
        if DEBEZIUM_PYTHON.exists():
            return ""
        return f"{DEBEZIUM_PYTHON} does not exist; `make bench-postgres` creates it"

    def count(self, expected: int, *, snapshot: bool) -> float:
        """Return the rows per second of the last three quarters."""
        answer = self.run("count", expected, snapshot=snapshot)
        if answer["seen"] != expected or answer["failures"]:
            raise Different(
                f"Debezium sent {answer['seen']} records of {expected} {answer['failures']}"
            )
        return float(answer["rows"] / answer["seconds"])

    def run(
        self,
        how: Literal["count", "keep"],
        expected: int,
        *,
        snapshot: bool,
        settings: Mapping[str, str] | None = None,
        timeout_s: int = DEBEZIUM_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Run the engine until it has sent this many records, and return its answer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        answer = self.folder / f"{self.slot}.json"
        server = self.database.server
        request = {
            "how": how,
            "expected": expected,
            "timeout_s": timeout_s,
            "answer": str(answer),
            "jvm": str(find_java().program.resolve().parents[1] / "lib/server/libjvm.so"),
            "properties": {
                "name": "bench",
                "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
                "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
                "offset.storage.file.filename": str(self.folder / f"{self.slot}.offsets"),
                "topic.prefix": "bench",
                "plugin.name": "pgoutput",
                "database.hostname": "127.0.0.1",
                "database.port": str(server.port),
                "database.user": "postgres",
                "database.password": server.password,
                "database.dbname": self.database.name,
                "slot.name": self.slot,
                "publication.name": PUBLICATION,
                "publication.autocreate.mode": "disabled",
                "snapshot.mode": "initial_only" if snapshot else "no_data",
                **(settings or {}),
            },
        }
        script = Path(__file__).with_name("postgres_debezium.py")
        with (self.folder / f"{self.slot}.log").open("wb") as log:
            subprocess.run(
                [str(DEBEZIUM_PYTHON), str(script)],
                input=json.dumps(request).encode(),
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
            )
        parsed: dict[str, Any] = json.loads(answer.read_text())
        return parsed


def copy_seconds(database: Database, table: str) -> float:
    """Return the seconds that `psql` takes to copy a table in binary to /dev/null."""
    program = database.server.binaries / "psql"
    statement = f"COPY {table} TO STDOUT (FORMAT binary)"
    command = [str(program), "--no-psqlrc", "--command", statement, database.url()]
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def contents_differ(ours: Ours, table: str, *, keys: Sequence[int] | None = None) -> str:
    """Return how the collection of `table` differs from the table, or an empty string.

    Compares, for each column, digests of the values as the server prints them, in key order.
    With `keys`, compares only these rows.
    """
    name = f"{SOURCE}.public.{table}"
    client, collection = find_collection(
        ours.location, name, hold=False, settings=persist.Settings()
    )
    with client:
        if keys is None:
            rows = collection.snapshot(collection.upper - 1).arrow()
        else:
            rows = collection.lookup(pa.table({"id": pa.array(keys)}), collection.upper - 1)
    rows = rows.sort_by("id")
    where = "" if keys is None else f"WHERE id = ANY (ARRAY{list(keys)}::bigint[])"
    for field in rows.schema:
        if field.name in ("mz_timestamp", "mz_diff"):
            continue
        count, digest = ours.database.sql(
            f"SELECT count({field.name}), md5(string_agg(format('%s', {field.name}), ',' ORDER BY"
            f" id) FILTER (WHERE {field.name} IS NOT NULL)) FROM {table} {where}"
        )[0]
        label = (field.metadata or {}).get(b"penstock.label", b"").decode()
        texts = to_text(label, rows.column(field.name).combine_chunks()).cast(pa.string())
        texts = pc.drop_null(texts)
        joined = pc.binary_join(pa.ListArray.from_arrays([0, len(texts)], texts), ",")[0]
        our_digest = hashlib.md5(joined.as_buffer()).hexdigest() if len(texts) else None
        if (len(texts), our_digest) != (count, digest):
            return f"column {field.name} of {table}: {len(texts)} values of {count}, {our_digest}"
    return ""
