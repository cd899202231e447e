"""Workload that moves coins from purses to chests, and its invariant.

The tables have every kind of replica identity and TOAST values. Keys change, rows are
inserted and deleted within one transaction, and transactions and savepoints are
rolled back.
"""

import random
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

import psycopg

from penstock.clock import SYSTEM_CLOCK
from tests.ingest.checker import State

TABLES = ("public.purse", "public.chest", "public.moved")
COINS = 2_000

SCHEMA = """
CREATE TABLE purse (id int PRIMARY KEY, note text, coins int);
ALTER TABLE purse ALTER note SET STORAGE EXTERNAL;
CREATE TABLE chest (id int PRIMARY KEY, code text NOT NULL, note text, span interval, coins int);
ALTER TABLE chest ALTER note SET STORAGE EXTERNAL;
CREATE UNIQUE INDEX chest_code ON chest (code);
ALTER TABLE chest REPLICA IDENTITY USING INDEX chest_code;
CREATE TABLE moved (coins int);
ALTER TABLE moved REPLICA IDENTITY FULL;
INSERT INTO purse SELECT g, repeat('p', 3000) || g, 100 FROM generate_series(1, 20) g;
INSERT INTO chest SELECT g, 'c' || g, repeat('c', 3000) || g, '1 day 2 hours', 0
FROM generate_series(1, 20) g;
CREATE PUBLICATION penstock FOR TABLE purse, chest, moved;
"""


def check_coins(state: State) -> str | None:
    """Return the totals if coins were created, lost or moved without a record, else None."""
    purse, chest, moved = (
        sum(int(row[-1] or 0) * count for row, count in state[table].items()) for table in TABLES
    )
    if purse + chest != COINS or chest != moved:
        return f"purse {purse}, chest {chest}, moved {moved}"
    return None


class Carrier:
    """Thread that moves coins without pause, and reconnects after an error."""

    def __init__(
        self, url: str, seed: int = 7, *, pause_ms: int = 5, truncates: bool = True
    ) -> None:
        self.url = url
        self.committed = 0
        self._rng = random.Random(seed)
        self._truncated_ms = SYSTEM_CLOCK.boot_ms()
        self._truncates = truncates
        self._pause_s = pause_ms / 1_000
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="carrier")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the thread after its last transaction."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with suppress(psycopg.OperationalError), psycopg.connect(self.url) as connection:
                while not self._stop.wait(self._pause_s):
                    self._carry(connection)
            self._stop.wait(0.05)

    def _carry(self, connection: psycopg.Connection) -> None:
        rng = self._rng
        if not rng.randrange(4):
            connection.execute("SET LOCAL synchronous_commit = off")
        for _ in range(rng.choice([1, 1, 2, 8])):
            coins = rng.randrange(1, 5)
            purse, chest = rng.randrange(1, 21), rng.randrange(1, 21)
            # If one of the rows is missing, no coin is moved.
            connection.execute(
                """
                WITH given AS (
                  UPDATE purse SET coins = coins - %(coins)s
                  WHERE id = %(purse)s AND EXISTS (SELECT FROM chest WHERE id = %(chest)s)
                  RETURNING 1
                ), taken AS (
                  UPDATE chest SET coins = coins + %(coins)s
                  WHERE id = %(chest)s AND EXISTS (SELECT FROM given) RETURNING 1
                )
                INSERT INTO moved SELECT %(coins)s FROM taken
                """,
                {"coins": coins, "purse": purse, "chest": chest},
            )
        match rng.randrange(12):
            case 0:
                self._rename(connection, "purse", "id", "-id")
            case 1:
                self._rename(connection, "chest", "code", "reverse(code)")
                self._rename(connection, "chest", "id", "-id")
            case 2:
                connection.execute("UPDATE purse SET note = left(note, 3000) || clock_timestamp()")
            case 3:
                connection.execute(
                    "INSERT INTO purse VALUES (99, 'short', 0);"
                    "UPDATE purse SET note = 'longer' WHERE id = 99;"
                    "UPDATE purse SET id = 98 WHERE id = 99; DELETE FROM purse WHERE id = 98"
                )
            case 4:
                # One row replaces all.
                connection.execute(
                    "DELETE FROM moved; INSERT INTO moved SELECT sum(coins) FROM chest"
                )
            case 5:
                connection.execute("SAVEPOINT one; UPDATE purse SET coins = 0; ROLLBACK TO one")
            case 6:
                connection.execute("UPDATE chest SET span = span + interval '90 minutes'")
            case 7 if self._truncates and SYSTEM_CLOCK.boot_ms() > self._truncated_ms + 3_000:
                # Not too often: a truncate restarts the snapshot of the table.
                self._truncated_ms = SYSTEM_CLOCK.boot_ms()
                connection.execute("TRUNCATE moved; INSERT INTO moved SELECT sum(coins) FROM chest")
        if rng.randrange(6):
            connection.commit()
            self.committed += 1
        else:
            connection.rollback()

    def _rename(self, connection: psycopg.Connection, table: str, key: str, value: str) -> None:
        number = self._rng.randrange(1, 21)
        connection.execute(f"UPDATE {table} SET {key} = {value} WHERE abs(id) = {number}".encode())
