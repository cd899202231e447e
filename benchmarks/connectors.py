"""Connectors beside what their endpoints can do by themselves.

Ours is the whole way: columns are packed, sent in messages to a connector in a process
of its own, unpacked there and stored. Beside it stands the endpoint's own bulk way, in
this process, with rows that were prepared before the clock starts.
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
from penstock.materialize import Connection, Stream, connect
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
from penstock.protocol.ranges import WHOLE
from penstock.protocol.specs import MaterializationSpec
from penstock.testing.postgres import Database, PostgresServer
from penstock.testing.specs import bound, collection, materialization, projection

ROWS: Final = 1_000_000
QUICK_ROWS: Final = 100_000
BATCH: Final = 8_192
REPETITIONS: Final = 3

COLUMNS: Final[Mapping[str, str]] = {
    "id": "integer",
    **{f"i{each}": "integer" for each in range(3)},
    **{f"n{each}": "number" for each in range(2)},
    **{f"s{each}": "string" for each in range(3)},
    "b0": "boolean",
}
"""Ten columns, the first of which is the key."""

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
    """Where it is measured, and how much."""

    folder: Path
    rows: int
    repetitions: int
    server: PostgresServer
    number: int = 0

    def another(self) -> str:
        """A name that was not used yet."""
        self.number += 1
        return f"bench_{self.number}"


def table(rows: int, *, updated: bool) -> pa.Table:
    """So many rows, as they are first, or once they are updated."""
    ids = range(rows)
    shift = 7 if updated else 0
    columns: dict[str, pa.Array] = {"id": pa.array(ids, pa.int64())}
    for name, kind in COLUMNS.items():
        salt = sum(name.encode()) + shift
        match kind:
            case "integer" if name != "id":
                columns[name] = pa.array([(each * 7919 + salt) % 1_000_003 for each in ids])
            case "number":
                columns[name] = pa.array([(each + salt) / 7 for each in ids])
            case "string":
                columns[name] = pa.array([f"{name} {each * salt % 99991}" for each in ids])
            case "boolean":
                columns[name] = pa.array([(each + salt) % 3 == 0 for each in ids])
    return pa.table({name: columns[name] for name in ("id", *VALUES)})


# Ours.


@contextmanager
def connector(name: str, folder: Path, number: int) -> Iterator[Connection]:
    """A connector in a process of its own."""
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


def built(endpoint: Mapping[str, Any], name: str) -> MaterializationSpec:
    """A materialization of one table, without the whole document."""
    fields = (projection(*each, must=True) for each in COLUMNS.items())
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
    """One stream, which a table is stored to and loaded from."""

    def __init__(self, connection: Connection, spec: MaterializationSpec) -> None:
        version = spec.bindings[0].resource_path[-1]
        connection.apply(Apply(spec, version))
        self.stream: Stream = connection.transactions()
        self.stream.send(Open(spec, version, WHOLE))
        self.stream.receive()
        self.stream.send(Acknowledge())
        self.stream.receive()
        # What is loaded once, such as compiled code, is not what is measured.
        few = table(8, updated=False)
        beyond = pa.array(range(-8, 0), pa.int64())
        self.store(few.set_column(0, "id", beyond), exists=False)
        self.load(beyond)
        self.stream.send(Acknowledge())
        self.stream.receive()

    def store(self, rows: pa.Table, *, exists: bool) -> float:
        """Seconds until the rows are committed."""
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
        """Seconds until every document is here."""
        begun = time.perf_counter()
        sent = 0
        for batch in pa.table({"id": ids}).to_batches(BATCH):
            self.stream.send(Load(0, pack([batch.column(0)])))
            sent += len(batch)
        self.stream.send(Flush())
        found = 0
        while isinstance(response := self.stream.receive(), Loaded):
            found += len(response.docs_json)
        took = time.perf_counter() - begun
        assert isinstance(response, Flushed)
        assert found == sent, (found, sent)
        self.stream.send(StartCommit(b"checkpoint"))
        self.stream.receive()
        return took


# The endpoints by themselves.


class SqliteAlone:
    """executemany in one transaction."""

    def __init__(self, path: Path, name: str) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = FULL")
        self.name = name
        columns = ", ".join(
            f'"{each}" {SQLITE[COLUMNS[each]] if each != "id" else "INTEGER"} NOT NULL'
            for each in ("id", *VALUES)
        )
        self.connection.execute(f'CREATE TABLE {name} ({columns}, PRIMARY KEY ("id")) STRICT')

    def prepared(self, rows: pa.Table) -> list[tuple[Any, ...]]:
        """Rows as executemany takes them."""
        columns = [
            column.cast(pa.int8()) if column.type == pa.bool_() else column
            for column in rows.columns
        ]
        return list(zip(*(each.to_pylist() for each in columns), strict=True))

    def store(self, rows: Sequence[tuple[Any, ...]]) -> float:
        names = ", ".join(f'"{each}"' for each in ("id", *VALUES))
        places = ", ".join("?" * len(COLUMNS))
        updates = ", ".join(f'"{each}" = excluded."{each}"' for each in VALUES)
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
        """All columns of these keys, by way of a temporary table."""
        begun = time.perf_counter()
        self.connection.execute("CREATE TABLE temp.wanted (id INTEGER)")
        self.connection.execute("BEGIN")
        self.connection.executemany("INSERT INTO temp.wanted VALUES (?)", ids)
        self.connection.execute("COMMIT")
        cursor = self.connection.execute(
            f"SELECT t.* FROM temp.wanted w CROSS JOIN {self.name} t ON t.id = w.id"
        )
        found = sum(len(rows) for rows in iter(lambda: cursor.fetchmany(4096), []))
        took = time.perf_counter() - begun
        assert found == len(ids)
        self.connection.execute("DROP TABLE temp.wanted")
        return took


class PostgresAlone:
    """COPY; into a staging table and one upsert, where there may be rows already."""

    def __init__(self, database: Database, name: str) -> None:
        self.connection = psycopg.connect(database.url(), autocommit=True)
        self.name = name
        columns = ", ".join(
            f'"{each}" {POSTGRES[COLUMNS[each]]} NOT NULL' for each in ("id", *VALUES)
        )
        self.connection.execute(f'CREATE TABLE {name} ({columns}, PRIMARY KEY ("id"))'.encode())

    def prepared(self, rows: pa.Table) -> bytes:
        """Rows as COPY takes them."""
        sink = pa.BufferOutputStream()
        pcsv.write_csv(rows, sink, pcsv.WriteOptions(include_header=False))
        return sink.getvalue().to_pybytes()

    def store(self, rows: bytes) -> float:
        updates = ", ".join(f'"{each}" = excluded."{each}"' for each in VALUES)
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
                for at in range(0, len(rows), 1 << 20):
                    copy.write(rows[at : at + (1 << 20)])
            if not empty:
                cursor.execute(
                    f"INSERT INTO {self.name} SELECT * FROM staged "
                    f'ON CONFLICT ("id") DO UPDATE SET {updates}'.encode()
                )
        return time.perf_counter() - begun

    def load(self, ids: Sequence[tuple[int]]) -> float:
        """All columns of these keys, by way of a temporary table and COPY."""
        text = "".join(f"{each}\n" for (each,) in ids).encode()
        begun = time.perf_counter()
        with self.connection.transaction(), self.connection.cursor() as cursor:
            cursor.execute(b"CREATE TEMP TABLE wanted (id bigint) ON COMMIT DROP")
            with cursor.copy(b"COPY wanted FROM STDIN") as copy:
                copy.write(text)
            found = 0
            statement = f"COPY (SELECT t.* FROM wanted JOIN {self.name} t USING (id)) TO STDOUT"
            with cursor.copy(statement.encode()) as copy:
                for data in copy:
                    found += bytes(data).count(b"\n")
        took = time.perf_counter() - begun
        assert found == len(ids)
        return took


# The figures.


Alone = SqliteAlone | PostgresAlone


@contextmanager
def sides(bench: Bench, name: str) -> Iterator[tuple[Ours, Alone]]:
    """Ours and the other, each with a table of its own."""
    mine, other = bench.another(), bench.another()
    endpoint: dict[str, Any]
    if name == "sqlite":
        endpoint = {"path": str(bench.folder / f"{mine}.db")}
        alone: Alone = SqliteAlone(bench.folder / f"{other}.db", other)
    else:
        database = bench.server.create_database(mine)
        endpoint = {"url": database.url()}
        alone = PostgresAlone(database, other)
    with connector(name, bench.folder, bench.number) as connection:
        yield Ours(connection, built(endpoint, mine)), alone
    alone.connection.close()


def store_vs_bulk(bench: Bench) -> Measured:
    """Rows a second: as many new, then as many updated."""
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
    """Keys a second."""
    rows = table(bench.rows, updated=False)
    ids = pa.array(range(bench.rows), pa.int64())
    wanted = [(each,) for each in range(bench.rows)]

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
            return other.load(wanted)

        return medians(in_turn(bench.repetitions, lambda: run(ours), lambda: run(alone)))

    return _figure({name: rate(name) for name in ("sqlite", "postgres")})


def _figure(rates: Mapping[str, tuple[float, float]]) -> Measured:
    shown = "; ".join(
        f"{name} {ours:,.0f}/s beside {alone:,.0f}/s" for name, (ours, alone) in rates.items()
    )
    raw = {name: {"ours": ours, "alone": alone} for name, (ours, alone) in rates.items()}
    return Measured({name: ours / alone for name, (ours, alone) in rates.items()}, shown, raw)


def pack_ns_per_key(bench: Bench) -> Measured:
    """Nanoseconds to pack one key."""
    count = bench.rows
    ids = pa.array(range(count), pa.int64())
    texts = pa.array([f"customer {each % 9973}" for each in range(count)])
    uuids = pa.array([f"{each:08x}-0000-4000-8000-{each:012x}" for each in range(count)])
    moments = pa.array(
        [f"2026-11-15T{each % 24:02d}:30:00.{each % 10**6:06d}Z" for each in ids.to_pylist()]
    )
    found = {}
    for name, columns in {
        "int": [ids],
        "text_int": [texts, ids],
        "uuid_timestamp": [uuids, moments],
    }.items():
        pack([each.slice(0, 10) for each in columns])
        taken = []
        for _ in range(5):
            begun = time.perf_counter()
            pack(columns)
            taken.append((time.perf_counter() - begun) / count * 1e9)
        found[name] = statistics.median(taken)
    return Measured(found, ", ".join(f"{name} {value:.0f} ns" for name, value in found.items()))


FIGURES: Final = {
    "store_vs_bulk": Figure(store_vs_bulk, "≥ 0.6 each", lambda value: value >= 0.6),
    "load_vs_select": Figure(load_vs_select, "≥ 0.5 each", lambda value: value >= 0.5),
    "pack_ns_per_key": Figure(pack_ns_per_key, "≤ 300 each", lambda value: value <= 300),
}


@contextmanager
def prepare(folder: Path, quick: bool) -> Iterator[Bench]:
    """A Postgres, and a folder for files."""
    with PostgresServer(settings={"max_wal_size": "8GB"}) as server:
        yield Bench(folder, QUICK_ROWS if quick else ROWS, 1 if quick else REPETITIONS, server)


if __name__ == "__main__":
    main((__doc__ or "").partition("\n")[0], FIGURES, prepare)
