"""The sides that are compared: ours, and each of the others, on the same changes.

Every side of a stream begins at a slot that was made before the changes were
written, and ends when it has all of them. The server has written them all by
then, so what is timed is how fast they can be taken.
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
from penstock.ingest.loading import ManyTasks
from penstock.ingest.pipeline import Ingest
from penstock.persist.find import find_collection
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.source import PostgresSource
from penstock.sources.postgres.types import to_text
from penstock.testing.postgres import Database, PostgresServer

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
"""Between ticks while catching up: of the time until the first, half of this is lost."""

RETAIN_MS: Final = 3_600_000

DEBEZIUM_PYTHON: Final = (
    Path(__file__).resolve().parent.parent / ".venv-debezium" / "bin" / "python"
)
DEBEZIUM_PATIENCE_S: Final = 1_800

Way: TypeAlias = Literal["socket", "tcp"]


class Different(Exception):
    """A side does not hold what the server holds."""


class Timed:
    """A source, and when it was opened, and when what it drew became durable."""

    def __init__(self, source: PostgresSource) -> None:
        self._source = source
        self.asked_s = self.opened_s = self.durable_s = 0.0
        self.durable: list[tuple[int, float]] = []
        """How far the stream was durable, and since when."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def open(self, *given: Any) -> None:
        self.asked_s = time.perf_counter()
        self._source.open(*given)
        self.opened_s = time.perf_counter()

    def committed(self, frontier: Any) -> None:
        self.durable_s = time.perf_counter()
        if frontier:
            self.durable.append((max(frontier.values()), self.durable_s))
        self._source.committed(frontier)


@dataclass(frozen=True, slots=True)
class Ours:
    """A pipeline of one source into a file location of its own."""

    folder: Path
    database: Database
    way: Way = "socket"
    tick_ms: int = TICK_MS
    tables: Sequence[Mapping[str, Any]] | None = None
    """Which tables, as the file of a pipeline says it; None means all."""

    @property
    def location(self) -> str:
        return f"file:{self.folder}"

    def catch_up(self) -> float:
        """Run until all that is upstream is durable; the seconds since the stream was open."""
        with self.ingest() as (source, ingest):
            ingest.run(threading.Event(), once=True)
        return source.durable_s - source.opened_s

    def copy(self, *, tasks: int, many: ManyTasks | None = None) -> float:
        """The first copy, to durable and seen: the seconds since the source was told to open."""
        with self.ingest(tasks=tasks, many=many) as (source, ingest):
            ingest.run(threading.Event(), once=True)
        return source.durable_s - source.asked_s

    def remove(self) -> None:
        """Give up its files, and every slot of the database."""
        self.database.sql(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE database = current_database()"
        )
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def ingest(
        self, *, tasks: int = 2, many: ManyTasks | None = None
    ) -> Iterator[tuple[Timed, Ingest]]:
        """The same parts that `penstock.ingest.run` puts together."""
        said: dict[str, Any] = {"url": self.database.url(host=self.way), "snapshot_tasks": tasks}
        if self.tables is not None:
            said["tables"] = self.tables
        config = PostgresConfig.parse(said)
        with persist.open(self.location, writer=SOURCE) as client:
            source = Timed(
                PostgresSource(
                    SOURCE,
                    config,
                    location=self.location,
                    clock=SYSTEM_CLOCK,
                    chance=random.Random(),
                    tasks=tasks,
                )
            )
            ingest = Ingest(
                SOURCE,
                source,
                client,
                tick_ms=self.tick_ms,
                retain_ms=RETAIN_MS,
                clock=SYSTEM_CLOCK,
                chance=random.Random(),
                many=many,
                # However small, so that a quick run measures the same way.
                spark_bytes=0,
            )
            yield source, ingest


@dataclass(frozen=True, slots=True)
class Recvlogical:
    """`pg_recvlogical`, which writes what it reads to /dev/null, and does nothing else."""

    database: Database
    slot: str
    binary: bool
    way: Way = "socket"

    def catch_up(self, until: str) -> float:
        """Its seconds from its start to its end, which is when it has come to `until`."""
        program = self.database.server.binaries / "pg_recvlogical"
        options = {"proto_version": "1", "publication_names": PUBLICATION}
        if self.binary:
            options["binary"] = "true"
        command = [
            *(str(program), "--dbname", self.database.url(host=self.way), "--slot", self.slot),
            *("--start", "--endpos", until, "--no-loop", "--file", "/dev/null"),
            *(f"--option={name}={value}" for name, value in options.items()),
        ]
        begun = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - begun


@dataclass(frozen=True, slots=True)
class Subscription:
    """The server's own logical replication, into a database of a second server.

    Its apply worker commits without waiting for the disk, which is its default.
    """

    upstream: Database
    slot: str
    second: PostgresServer
    case: Case
    rows: int

    def catch_up(self) -> float:
        """The seconds from when it is enabled to when the last row can be read."""
        database = self.second.create_database(self.slot)
        for statement in (*self.case.create, self.case.base.format(rows=self.rows) or "SELECT 1"):
            database.sql(statement)
        there = self.upstream.url().replace("'", "''")
        database.sql(
            f"CREATE SUBSCRIPTION {self.slot} CONNECTION '{there}' PUBLICATION {PUBLICATION}"
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
            found = connection.execute(b"SELECT count(*) FROM stream").fetchone()
        if found != (self.rows,):
            raise Different(f"the subscription has {found} rows of {self.rows}")
        self.second.sql(f"DROP DATABASE {self.slot} WITH (FORCE)")
        return took


@dataclass(frozen=True, slots=True)
class Debezium:
    """Debezium's engine, embedded, with the settings it has by itself."""

    database: Database
    slot: str
    folder: Path

    def missing(self) -> str:
        """Why it cannot be run, or nothing."""
        there = DEBEZIUM_PYTHON.exists()
        return "" if there else f"{DEBEZIUM_PYTHON} does not exist; `make bench-postgres` makes it"

    def count(self, wanted: int, *, snapshot: bool) -> float:
        """Rows a second, of the last three quarters."""
        answer = self.run("count", wanted, snapshot=snapshot)
        if answer["seen"] != wanted or answer["failures"]:
            raise Different(
                f"Debezium gave {answer['seen']} records of {wanted} {answer['failures']}"
            )
        return float(answer["rows"] / answer["seconds"])

    def run(
        self,
        how: Literal["count", "keep"],
        wanted: int,
        *,
        snapshot: bool,
        more: Mapping[str, str] | None = None,
        patience_s: int = DEBEZIUM_PATIENCE_S,
    ) -> dict[str, Any]:
        """What its consumer answers when it has seen as many records as are wanted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        answer = self.folder / f"{self.slot}.json"
        server = self.database.server
        request = {
            "how": how,
            "wanted": wanted,
            "patience_s": patience_s,
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
                **(more or {}),
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
        answered: dict[str, Any] = json.loads(answer.read_text())
        return answered


def copy_seconds(database: Database, table: str) -> float:
    """How long `psql` takes to copy a table in binary to /dev/null."""
    program = database.server.binaries / "psql"
    statement = f"COPY {table} TO STDOUT (FORMAT binary)"
    command = [str(program), "--no-psqlrc", "--command", statement, database.url()]
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def contents_differ(ours: Ours, table: str, *, keys: Sequence[int] | None = None) -> str:
    """In what the collection of `table` differs from the table upstream, or nothing.

    Both put each column's values, as the server prints them, in the order of
    the key one after the other, and compare the digests. With `keys`, only
    of these rows.
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
        there, digest = ours.database.sql(
            f"SELECT count({field.name}), md5(string_agg(format('%s', {field.name}), ',' ORDER BY"
            f" id) FILTER (WHERE {field.name} IS NOT NULL)) FROM {table} {where}"
        )[0]
        label = (field.metadata or {}).get(b"penstock.label", b"").decode()
        texts = to_text(label, rows.column(field.name).combine_chunks()).cast(pa.string())
        texts = pc.drop_null(texts)
        joined = pc.binary_join(pa.ListArray.from_arrays([0, len(texts)], texts), ",")[0]
        found = hashlib.md5(joined.as_buffer()).hexdigest() if len(texts) else None
        if (len(texts), found) != (there, digest):
            return f"column {field.name} of {table}: {len(texts)} values of {there}, {found}"
    return ""
