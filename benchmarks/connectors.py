"""Connectors, compared with bulk loads by the endpoints themselves.

Ours is the complete path: columns are packed, sent to a connector in a separate process,
unpacked and stored. The other side is the endpoint's own bulk load, in this process, with rows
that are prepared before the clock starts.
"""

import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
import pyarrow as pa
import pyarrow.csv as pcsv
from measure import Figure, Measured, in_turn, main, medians

from penstock.data.packed import pack
from penstock.materialize import ConnectorConnection, ConnectorStream, connect
from penstock.protocol.key_range import WHOLE
from penstock.protocol.messages import (
    Acknowledge,
    Apply,
    Flush,
    Flushed,
    Load,
    Loaded,
    Open,
    StartCommit,
    Store,
)
from penstock.protocol.specs import MaterializationSpec
from penstock.servers.postgres import Database, PostgresServer
from penstock.testing.specs import bound, collection, materialization, projection

ROWS: Final = 1_000_000
QUICK_ROWS: Final = 100_000
BATCH: Final = 8_192
REPETITIONS: Final = 3

COLUMNS: Final[Mapping[str, str]] = {
    "id": "integer",
    **{f"i{number}": "integer" for number in range(3)},
    **{f"n{number}": "number" for number in range(2)},
    **{f"s{number}": "string" for number in range(3)},
    "b0": "boolean",
}
"""Ten columns; the first is the key."""

VALUES: Final = sorted(name for name in COLUMNS if name != "id")
SQLITE: Final = {"integer": "ANY", "number": "ANY", "string": "TEXT", "boolean": "INTEGER"}
POSTGRES: Final = {
    "integer": "BIGINT",
    "number": "DOUBLE PRECISION",
    "string": "TEXT",
    "boolean": "BOOLEAN",
}


@dataclass(slots=True)
class Bench:
    """Folder, size and server."""

    folder: Path
    rows: int
    repetitions: int
    server: PostgresServer
    number: int = 0

    def next_name(self) -> str:
        """Return an unused name."""
        self.number += 1
        return f"bench_{self.number}"


def table(rows: int, *, updated: bool) -> pa.Table:
    """Return rows in their first version, or in their updated one."""
    ids = range(rows)
    shift = 7 if updated else 0
    columns: dict[str, pa.Array] = {"id": pa.array(ids, pa.int64())}
    for name, kind in COLUMNS.items():
        salt = sum(name.encode()) + shift
        match kind:
            case "integer" if name != "id":
                columns[name] = pa.array([(id * 7919 + salt) % 1_000_003 for id in ids])
            case "number":
                columns[name] = pa.array([(id + salt) / 7 for id in ids])
            case "string":
                columns[name] = pa.array([f"{name} {id * salt % 99991}" for id in ids])
            case "boolean":
                columns[name] = pa.array([(id + salt) % 3 == 0 for id in ids])
    return pa.table({name: columns[name] for name in ("id", *VALUES)})


# Ours.


@contextmanager
def connector(name: str, folder: Path, number: int) -> Iterator[ConnectorConnection]:
    """Start a connector in a child process, and yield a connection to it."""
    address = f"unix:{folder}/{name}-{number}.sock"
    command = [sys.executable, "-m", "penstock.cli.main", "connector", "serve", name]
    process = subprocess.Popen([*command, "--listen", address], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        with connect(address) as connection:
            yield connection
    finally:
        process.terminate()
        process.wait()


def build_spec(endpoint: Mapping[str, Any], name: str) -> MaterializationSpec:
    """Return the spec of a materialization of one table, without the complete document."""
    fields = (projection(*column, must=True) for column in COLUMNS.items())
    path = (name,) if "path" in endpoint else ("public", name)
    return materialization(
        "bench",
        endpoint,
        bound(
            collection("bench/rows", *fields, document=False),
            {"table": name, "document": False},
            path,
            fields=VALUES,
        ),
    )


class Ours:
    """One Transactions stream that stores and loads a table."""

    def __init__(self, connection: ConnectorConnection, spec: MaterializationSpec) -> None:
        version = spec.bindings[0].resource_path[-1]
        connection.apply(Apply(spec, version))
        self.stream: ConnectorStream = connection.transactions()
        self.stream.send(Open(spec, version, WHOLE))
        self.stream.receive()
        self.stream.send(Acknowledge())
        self.stream.receive()
        # Load compiled code before the measurement.
        rows = table(8, updated=False)
        unused_ids = pa.array(range(-8, 0), pa.int64())
        self.store(rows.set_column(0, "id", unused_ids), exists=False)
        self.load(unused_ids)
        self.stream.send(Acknowledge())
        self.stream.receive()

    def store(self, rows: pa.Table, *, exists: bool) -> float:
        """Return the seconds until the rows are committed."""
        self.stream.send(Flush())
        self.stream.receive()
        begun = time.perf_counter()
        for batch in rows.to_batches(BATCH):
            keys = pack([batch.column(0)])
            values = pack(batch.columns[1:])
            none = pa.array([b""] * len(batch), pa.binary())
            flags = pa.array([exists] * len(batch))
            self.stream.send(Store(0, keys, values, none, flags))
        self.stream.send(StartCommit(b"checkpoint"))
        self.stream.receive()
        took = time.perf_counter() - begun
        self.stream.send(Acknowledge())
        self.stream.receive()
        return took

    def load(self, ids: pa.Array) -> float:
        """Return the seconds until every document is received."""
        begun = time.perf_counter()
        sent = 0
        for batch in pa.table({"id": ids}).to_batches(BATCH):
            self.stream.send(Load(0, pack([batch.column(0)])))
            sent += len(batch)
        self.stream.send(Flush())
        received = 0
        while isinstance(response := self.stream.receive(), Loaded):
            received += len(response.docs_json)
        took = time.perf_counter() - begun
        assert isinstance(response, Flushed)
        assert received == sent, (received, sent)
        self.stream.send(StartCommit(b"checkpoint"))
        self.stream.receive()
        return took


# The endpoints without a connector.


class SqliteAlone:
    """SQLite with `executemany` in one transaction."""

    def __init__(self, path: Path, name: str) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = FULL")
        self.name = name
        columns = ", ".join(
            f'"{name}" {SQLITE[COLUMNS[name]] if name != "id" else "INTEGER"} NOT NULL'
            for name in ("id", *VALUES)
        )
        self.connection.execute(f'CREATE TABLE {name} ({columns}, PRIMARY KEY ("id")) STRICT')

    def prepared(self, rows: pa.Table) -> list[tuple[Any, ...]]:
        """Return rows in the form that `executemany` takes."""
        columns = [
            column.cast(pa.int8()) if column.type == pa.bool_() else column
            for column in rows.columns
        ]
        return list(zip(*(column.to_pylist() for column in columns), strict=True))

    def store(self, rows: Sequence[tuple[Any, ...]]) -> float:
        names = ", ".join(f'"{name}"' for name in ("id", *VALUES))
        places = ", ".join("?" * len(COLUMNS))
        updates = ", ".join(f'"{name}" = excluded."{name}"' for name in VALUES)
        begun = time.perf_counter()
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.executemany(
            f"INSERT INTO {self.name} ({names}) VALUES ({places}) "
            f'ON CONFLICT ("id") DO UPDATE SET {updates}',
            rows,
        )
        self.connection.execute("COMMIT")
        return time.perf_counter() - begun

    def load(self, ids: Sequence[tuple[int]]) -> float:
        """Return the seconds to fetch all columns of these keys, with a temporary table."""
        begun = time.perf_counter()
        self.connection.execute("CREATE TABLE temp.keys (id INTEGER)")
        self.connection.execute("BEGIN")
        self.connection.executemany("INSERT INTO temp.keys VALUES (?)", ids)
        self.connection.execute("COMMIT")
        cursor = self.connection.execute(
            f"SELECT t.* FROM temp.keys k CROSS JOIN {self.name} t ON t.id = k.id"
        )
        fetched = sum(len(rows) for rows in iter(lambda: cursor.fetchmany(4096), []))
        took = time.perf_counter() - begun
        assert fetched == len(ids)
        self.connection.execute("DROP TABLE temp.keys")
        return took


class PostgresAlone:
    """Postgres with COPY, or with COPY into a staging table and one upsert."""

    def __init__(self, database: Database, name: str) -> None:
        self.connection = psycopg.connect(database.url(), autocommit=True)
        self.name = name
        columns = ", ".join(
            f'"{name}" {POSTGRES[COLUMNS[name]]} NOT NULL' for name in ("id", *VALUES)
        )
        self.connection.execute(f'CREATE TABLE {name} ({columns}, PRIMARY KEY ("id"))'.encode())

    def prepared(self, rows: pa.Table) -> bytes:
        """Return rows in the form that COPY takes."""
        sink = pa.BufferOutputStream()
        pcsv.write_csv(rows, sink, pcsv.WriteOptions(include_header=False))
        return sink.getvalue().to_pybytes()

    def store(self, rows: bytes) -> float:
        updates = ", ".join(f'"{name}" = excluded."{name}"' for name in VALUES)
        new = self.connection.execute(f"SELECT NOT EXISTS (SELECT FROM {self.name})".encode())
        empty = bool((new.fetchone() or (False,))[0])
        begun = time.perf_counter()
        with self.connection.transaction(), self.connection.cursor() as cursor:
            target = self.name
            if not empty:
                target = "staged"
                cursor.execute(
                    f"CREATE TEMP TABLE staged (LIKE {self.name}) ON COMMIT DROP".encode()
                )
            with cursor.copy(f"COPY {target} FROM STDIN (FORMAT csv)".encode()) as copy:
                for offset in range(0, len(rows), 1 << 20):
                    copy.write(rows[offset : offset + (1 << 20)])
            if not empty:
                cursor.execute(
                    f"INSERT INTO {self.name} SELECT * FROM staged "
                    f'ON CONFLICT ("id") DO UPDATE SET {updates}'.encode()
                )
        return time.perf_counter() - begun

    def load(self, ids: Sequence[tuple[int]]) -> float:
        """Return the seconds to fetch all columns of these keys, with COPY."""
        text = "".join(f"{id}\n" for (id,) in ids).encode()
        begun = time.perf_counter()
        with self.connection.transaction(), self.connection.cursor() as cursor:
            cursor.execute(b"CREATE TEMP TABLE keys (id bigint) ON COMMIT DROP")
            with cursor.copy(b"COPY keys FROM STDIN") as copy:
                copy.write(text)
            fetched = 0
            statement = f"COPY (SELECT t.* FROM keys JOIN {self.name} t USING (id)) TO STDOUT"
            with cursor.copy(statement.encode()) as copy:
                for data in copy:
                    fetched += bytes(data).count(b"\n")
        took = time.perf_counter() - begun
        assert fetched == len(ids)
        return took


# The figures.


Alone = SqliteAlone | PostgresAlone


@contextmanager
def sides(bench: Bench, name: str) -> Iterator[tuple[Ours, Alone]]:
    """Yield both sides, each with a separate table."""
    mine, other = bench.next_name(), bench.next_name()
    endpoint: dict[str, Any]
    if name == "sqlite":
        endpoint = {"path": str(bench.folder / f"{mine}.db")}
        alone: Alone = SqliteAlone(bench.folder / f"{other}.db", other)
    else:
        database = bench.server.create_database(mine)
        endpoint = {"url": database.url()}
        alone = PostgresAlone(database, other)
    with connector(name, bench.folder, bench.number) as connection:
        yield Ours(connection, build_spec(endpoint, mine)), alone
    alone.connection.close()


def store_vs_bulk(bench: Bench) -> Measured:
    """Compare rows per second: new rows, then the same number of updated rows."""
    first, second = table(bench.rows, updated=False), table(bench.rows, updated=True)

    def rate(name: str) -> tuple[float, float]:
        def run(which: Callable[[Ours, Alone], float]) -> float:
            with sides(bench, name) as (ours, alone):
                return 2 * bench.rows / which(ours, alone)

        def ours(mine: Ours, _: Alone) -> float:
            return mine.store(first, exists=False) + mine.store(second, exists=True)

        def alone(_: Ours, other: Alone) -> float:
            new: Any = other.prepared(first)
            updated: Any = other.prepared(second)
            return other.store(new) + other.store(updated)

        return medians(in_turn(bench.repetitions, lambda: run(ours), lambda: run(alone)))

    return _figure({name: rate(name) for name in ("sqlite", "postgres")})


def load_vs_select(bench: Bench) -> Measured:
    """Compare keys per second."""
    rows = table(bench.rows, updated=False)
    ids = pa.array(range(bench.rows), pa.int64())
    keys = [(id,) for id in range(bench.rows)]

    def rate(name: str) -> tuple[float, float]:
        def run(which: Callable[[Ours, Alone], float]) -> float:
            with sides(bench, name) as (ours, alone):
                return bench.rows / which(ours, alone)

        def ours(mine: Ours, _: Alone) -> float:
            mine.store(rows, exists=False)
            return mine.load(ids)

        def alone(_: Ours, other: Alone) -> float:
            prepared: Any = other.prepared(rows)
            other.store(prepared)
            return other.load(keys)

        return medians(in_turn(bench.repetitions, lambda: run(ours), lambda: run(alone)))

    return _figure({name: rate(name) for name in ("sqlite", "postgres")})


def _figure(rates: Mapping[str, tuple[float, float]]) -> Measured:
    summary = "; ".join(
        f"{name} {ours:,.0f}/s against {alone:,.0f}/s" for name, (ours, alone) in rates.items()
    )
    raw = {name: {"ours": ours, "alone": alone} for name, (ours, alone) in rates.items()}
    return Measured({name: ours / alone for name, (ours, alone) in rates.items()}, summary, raw)


def pack_ns_per_key(bench: Bench) -> Measured:
    """Measure the nanoseconds to pack one key."""
    count = bench.rows
    ids = pa.array(range(count), pa.int64())
    texts = pa.array([f"customer {number % 9973}" for number in range(count)])
    uuids = pa.array([f"{number:08x}-0000-4000-8000-{number:012x}" for number in range(count)])
    timestamps = pa.array(
        [f"2026-11-15T{number % 24:02d}:30:00.{number % 10**6:06d}Z" for number in ids.to_pylist()]
    )
    nanoseconds = {}
    for name, columns in {
        "int": [ids],
        "text_int": [texts, ids],
        "uuid_timestamp": [uuids, timestamps],
    }.items():
        pack([column.slice(0, 10) for column in columns])
        samples = []
        for _ in range(5):
            begun = time.perf_counter()
            pack(columns)
            samples.append((time.perf_counter() - begun) / count * 1e9)
        nanoseconds[name] = statistics.median(samples)
    summary = ", ".join(f"{name} {value:.0f} ns" for name, value in nanoseconds.items())
    return Measured(nanoseconds, summary)


FIGURES: Final = {
    "store_vs_bulk": Figure(store_vs_bulk, "≥ 0.6 each", lambda value: value >= 0.6),
    "load_vs_select": Figure(load_vs_select, "≥ 0.5 each", lambda value: value >= 0.5),
    "pack_ns_per_key": Figure(pack_ns_per_key, "≤ 300 each", lambda value: value <= 300),
}


@contextmanager
def prepare(folder: Path, quick: bool) -> Iterator[Bench]:
    """Yield a bench with a Postgres server."""
    with PostgresServer(settings={"max_wal_size": "8GB"}) as server:
        yield Bench(folder, QUICK_ROWS if quick else ROWS, 1 if quick else REPETITIONS, server)


if __name__ == "__main__":
    main((__doc__ or "").partition("\n")[0], FIGURES, prepare)
