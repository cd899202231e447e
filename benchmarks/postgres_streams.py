"""Stream benchmarks: all sides of a case on the same changes, in alternating order."""

import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psycopg
from postgres_cases import Case
from postgres_sides import (
    PUBLICATION,
    Debezium,
    Different,
    Ours,
    Recvlogical,
    Subscription,
    Way,
    contents_differ,
)

from penstock.servers.postgres import Database, PostgresServer

__all__ = ["SIDES", "measure_streams", "write_changes"]

SIDES: Final[Mapping[str, Sequence[str]]] = {
    "stream_vs_recvlogical": ("ours", "text", "binary"),
    "stream_vs_recvlogical_tcp": ("ours_tcp", "text_tcp", "binary_tcp"),
    "stream_vs_subscription": ("ours", "subscription"),
    "stream_vs_debezium": ("ours_tcp", "debezium"),
}
"""Sides that a figure needs; no others are run."""

TIMES: Final = {"subscription": 3, "debezium": 3}


def measure_streams(
    case: Case,
    rows: int,
    figures: Sequence[str],
    *,
    folder: Path,
    server: PostgresServer,
    second: PostgresServer,
    quick: bool,
) -> Mapping[str, float]:
    """Return the median rows per second of each side that the figures need."""
    sides = sorted({side for name in figures for side in SIDES.get(name, ())})
    database = server.create_database(case.name)
    for statement in (*case.create, case.base.format(rows=rows) or "SELECT 1"):
        database.sql(statement)
    database.sql(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
    runs = {
        side: _runs(
            case,
            rows,
            database,
            side,
            folder / case.name,
            second,
            1 if quick else TIMES.get(side, 5),
        )
        for side in sides
    }
    end = write_changes(database, case.changes(rows))
    if "debezium" in runs and (missing := runs["debezium"][0].missing()):
        print(f"stream_vs_debezium: not measured: {missing}", flush=True)
        del runs["debezium"]
    # Warm up compiled code and caches before the measurement.
    ours = [side for side in runs if "ours" in side]
    for side in ours:
        runs[side].pop().catch_up()
    speeds: dict[str, list[float]] = {side: [] for side in runs}
    for turn in range(max(map(len, runs.values()))):
        for side in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            if turn < len(runs[side]):
                speeds[side].append(_speed(runs[side][turn], rows, end))
    for side in ours:
        if difference := contents_differ(runs[side][0], "stream"):
            raise Different(difference)
    database.drop()
    shutil.rmtree(folder / case.name)
    return {side: statistics.median(rates) for side, rates in speeds.items()}


def _runs(
    case: Case,
    rows: int,
    database: Database,
    side: str,
    folder: Path,
    second: PostgresServer,
    turns: int,
) -> list[Any]:
    """Create the slots, and return one run per slot."""
    way: Way = "tcp" if side.endswith("_tcp") else "socket"
    runs: list[Any] = []
    for number in range(turns + 1 if "ours" in side else turns):
        slot = f"{side}_{number}"
        if "ours" in side:
            runs.append(Ours(folder / slot, database, way))
            runs[-1].catch_up()
            continue
        database.sql("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        if side == "subscription":
            runs.append(Subscription(database, slot, second, case, rows))
        elif side == "debezium":
            runs.append(Debezium(database, slot, folder / slot))
        else:
            runs.append(Recvlogical(database, slot, side.startswith("binary"), way))
    return runs


def _speed(side: Any, rows: int, end: str) -> float:
    match side:
        case Recvlogical():
            return rows / side.catch_up(end)
        case Debezium():
            return side.count(rows, snapshot=False)
        case _:
            return rows / float(side.catch_up())


def write_changes(database: Database, statement: str) -> str:
    """Run a statement without synchronous commits, and return the LSN of the end of the WAL."""
    url = database.url(options="-csynchronous_commit=off")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode())
    database.sql("CHECKPOINT")
    return str(database.sql("SELECT pg_current_wal_flush_lsn()")[0][0])
