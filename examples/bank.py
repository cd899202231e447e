"""A bank on a Postgres of its own, for demos to follow, and Penstock's commands as processes.

It has accounts, and two records of the transfers between them: a journal of which entries
are deleted, and payments, to which rows are only ever added. Balances always add up to
what was paid in.
"""

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import penstock.persist as persist
from penstock.clock import SYSTEM_CLOCK
from penstock.persist.find import find_collection
from penstock.testing.postgres import Database, PostgresServer

ACCOUNTS = 2_000
OPENING = 1_000


def open_bank(server: PostgresServer) -> Database:
    """The bank, before its first transfer."""
    bank = server.create_database("bank")
    bank.sql(
        "CREATE TABLE accounts (id int PRIMARY KEY, balance bigint NOT NULL);"
        "CREATE TABLE journal (id serial PRIMARY KEY, payer int, payee int, moved int,"
        " note text, at timestamptz DEFAULT now());"
        "CREATE TABLE payments (id serial PRIMARY KEY, payer int NOT NULL, moved int NOT NULL);"
        f"INSERT INTO accounts SELECT g, {OPENING} FROM generate_series(1, {ACCOUNTS}) g"
    )
    return bank


class Traffic(threading.Thread):
    """Transfers between accounts, until it is stopped."""

    def __init__(self, bank: Database, pause_ms: int = 0) -> None:
        super().__init__()
        self.bank = bank
        self.pause_ms = pause_ms
        self.stopped = threading.Event()
        self.transfers = 0

    def run(self) -> None:
        chance = random.Random(5)
        while not self.stopped.is_set():
            payer, payee = chance.sample(range(1, ACCOUNTS + 1), 2)
            moved = chance.randrange(1, 50)
            note = "x" * chance.choice((10, 5_000))
            self.bank.sql(
                "BEGIN;"
                f"UPDATE accounts SET balance = balance - {moved} WHERE id = {payer};"
                f"UPDATE accounts SET balance = balance + {moved} WHERE id = {payee};"
                f"INSERT INTO journal (payer, payee, moved, note)"
                f" VALUES ({payer}, {payee}, {moved}, '{note}');"
                f"DELETE FROM journal WHERE id = {chance.randrange(1, self.transfers + 2)};"
                f"INSERT INTO payments (payer, moved) VALUES ({payer}, {moved});"
                "COMMIT"
            )
            self.transfers += 1
            pause(self.pause_ms)

    def stop(self) -> None:
        """End it after the transfer that is under way."""
        self.stopped.set()
        self.join()


def started(*words: str | Path, log: Path | None = None) -> subprocess.Popen[bytes]:
    """`penstock WORDS`, in a process of its own.

    What it says is added to `log`, and what it leaves behind when it is killed stays beside it.
    """
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, words)]
    if log is None:
        return subprocess.Popen(command)
    with log.open("ab") as output:
        where = {**os.environ, "TMPDIR": str(log.parent)}
        return subprocess.Popen(command, stdout=output, stderr=output, env=where)


def rows_of(url: str, name: str) -> tuple[int, list[tuple[object, ...]]]:
    """The last time that a collection can be read, and its rows then."""
    client, kept = find_collection(url, name, hold=False, settings=persist.Settings())
    with client:
        as_of = kept.upper - 1
        rows = [
            tuple(update.data.values())
            for update in kept.snapshot(as_of)
            for _ in range(update.diff)
        ]
    return as_of, sorted(rows)


def pause(ms: int) -> None:
    """Wait."""
    SYSTEM_CLOCK.wait(threading.Event(), ms)
