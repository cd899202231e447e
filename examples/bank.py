"""A bank in a Postgres database with traffic, and Penstock commands as child processes.

The bank has accounts and two records of the transfers between them: a journal with deletes,
and append-only payments. The sum of all balances never changes.
"""

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import penstock.persist as persist
from penstock.clock import SYSTEM_CLOCK
from penstock.persist.lake import find_collection
from penstock.servers.postgres import Database, PostgresServer

ACCOUNTS = 2_000
OPENING_BALANCE = 1_000


def open_bank(server: PostgresServer) -> Database:
    """Create the tables and the accounts, without transfers."""
    bank = server.create_database("bank")
    bank.sql(
        "CREATE TABLE accounts (id int PRIMARY KEY, balance bigint NOT NULL);"
        "CREATE TABLE journal (id serial PRIMARY KEY, payer int, payee int, moved int,"
        " note text, at timestamptz DEFAULT now());"
        "CREATE TABLE payments (id serial PRIMARY KEY, payer int NOT NULL, moved int NOT NULL);"
        f"INSERT INTO accounts SELECT g, {OPENING_BALANCE} FROM generate_series(1, {ACCOUNTS}) g"
    )
    return bank


class Traffic(threading.Thread):
    """Thread that transfers money between accounts until it is stopped."""

    def __init__(self, bank: Database, pause_ms: int = 0) -> None:
        super().__init__()
        self.bank = bank
        self.pause_ms = pause_ms
        self.stopped = threading.Event()
        self.transfers = 0

    def run(self) -> None:
        rng = random.Random(5)
        while not self.stopped.is_set():
            payer, payee = rng.sample(range(1, ACCOUNTS + 1), 2)
            moved = rng.randrange(1, 50)
            note = "x" * rng.choice((10, 5_000))
            self.bank.sql(
                "BEGIN;"
                f"UPDATE accounts SET balance = balance - {moved} WHERE id = {payer};"
                f"UPDATE accounts SET balance = balance + {moved} WHERE id = {payee};"
                f"INSERT INTO journal (payer, payee, moved, note)"
                f" VALUES ({payer}, {payee}, {moved}, '{note}');"
                f"DELETE FROM journal WHERE id = {rng.randrange(1, self.transfers + 2)};"
                f"INSERT INTO payments (payer, moved) VALUES ({payer}, {moved});"
                "COMMIT"
            )
            self.transfers += 1
            pause(self.pause_ms)

    def stop(self) -> None:
        """Stop after the current transfer."""
        self.stopped.set()
        self.join()


def start_penstock(*arguments: str | Path, log: Path | None = None) -> subprocess.Popen[bytes]:
    """Start `penstock ARGUMENTS` as a child process.

    Its output is appended to `log`. Its temporary files are in the folder of `log`, also after
    a kill.
    """
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)]
    if log is None:
        return subprocess.Popen(command)
    with log.open("ab") as output:
        environment = {**os.environ, "TMPDIR": str(log.parent)}
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def read_latest(url: str, name: str) -> tuple[int, list[tuple[object, ...]]]:
    """Return the latest readable time of a collection, and its sorted rows as of that time."""
    client, collection = find_collection(url, name, hold=False, settings=persist.Settings())
    with client:
        as_of = collection.upper - 1
        rows = [
            tuple(update.data.values())
            for update in collection.snapshot(as_of)
            for _ in range(update.diff)
        ]
    return as_of, sorted(rows)


def pause(ms: int) -> None:
    """Wait for this many milliseconds."""
    SYSTEM_CLOCK.wait(threading.Event(), ms)
