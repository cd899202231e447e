"""A Postgres into a SQLite file, exactly once, though everything in between is killed.

A bank runs on a Postgres of its own. `penstock ingest` follows it into collections, and
`penstock materialize` follows those into SQLite: accounts and journal as they are, and of
the payments what each payer has paid, added up. Both are killed with `kill -9` amid
transfers, started again, and killed again. Whenever one looks, the balances in SQLite add
up. In the end all rows are the same upstream, in the lake and downstream.
"""

import signal
import sqlite3
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path

from bank import ACCOUNTS, OPENING, Traffic, open_bank, pause, rows_of, started

from penstock.testing.postgres import Database, PostgresServer

FILE = """\
location: file:{folder}/lake
tick: 250ms
sources:
  bank:
    postgres:
      url: {url}
      tables: [public.accounts, public.journal, public.payments]
collections:
  bank.public.payments:
    key: [/payer]
    schema:
      type: object
      reduce: {{strategy: merge}}
      required: [payer]
      properties:
        payer: {{type: integer}}
        moved: {{type: integer, reduce: {{strategy: sum}}}}
        id: {{type: integer, reduce: {{strategy: maximize}}}}
materializations:
  branch:
    connector: sqlite
    endpoint: {{path: "{folder}/branch.db"}}
    bindings:
      - {{collection: bank.public.accounts, resource: {{table: accounts}}}}
      - {{collection: bank.public.journal, resource: {{table: journal}}}}
      - {{collection: bank.public.payments, resource: {{table: paid}}}}
"""
SAME = {
    "accounts": "SELECT id, balance FROM accounts",
    "journal": "SELECT id, payer, payee, moved, note, cast(at AS text) FROM journal",
}
PAID = "SELECT payer, sum(moved), max(id) FROM payments GROUP BY payer"


class Branch:
    """Where it arrives, and what leads there."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "bank.yaml"
        self.log = folder / "log"
        self.looks = 0
        self._database = folder / "branch.db"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Both commands, side by side."""
        for verb in ("ingest", "materialize"):
            self._running[verb] = started(verb, self.file, log=self.log)

    def kill(self) -> None:
        """As `kill -9` does."""
        for process in self._running.values():
            process.send_signal(signal.SIGKILL)
            process.wait()

    def finish(self) -> None:
        """All that is upstream, and no more."""
        for verb in ("ingest", "materialize"):
            if started(verb, self.file, "--once", log=self.log).wait():
                raise self._failed(f"penstock {verb} --once failed")

    def rows(self, query: str) -> list[tuple[object, ...]]:
        """What SQLite answers."""
        with closing(sqlite3.connect(self._database)) as connection:
            return sorted(connection.execute(query).fetchall())

    def wait_for(self, transfer: int) -> int:
        """Look until a transfer has arrived; the last that has. Balances always add up."""
        for _ in range(3_000):
            for verb, process in self._running.items():
                if process.poll() is not None:
                    raise self._failed(f"penstock {verb} ended with {process.returncode}")
            last = self.look()
            if last >= transfer:
                return last
            pause(100)
        raise self._failed(f"transfer {transfer} did not arrive within five minutes")

    def look(self) -> int:
        """The last transfer that is there."""
        try:
            [(total, last)] = self.rows(
                "SELECT (SELECT sum(balance) FROM accounts), (SELECT max(id) FROM paid)"
            )
        except sqlite3.OperationalError:
            return 0  # There are no tables yet.
        if last is None:
            return 0
        self.looks += 1
        assert total == ACCOUNTS * OPENING, total
        return int(last)

    def _failed(self, why: str) -> SystemExit:
        return SystemExit(f"{self.log.read_text(errors='replace')}\n{why}")


def main() -> None:
    """Tell the story and check it."""
    with (
        PostgresServer(binaries="wheel") as server,
        tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder,
    ):
        bank, branch = open_bank(server), Branch(Path(folder))
        branch.file.write_text(FILE.format(folder=folder, url=bank.url()))
        traffic = Traffic(bank, pause_ms=20)
        traffic.start()
        try:
            show(branch, traffic)
        finally:
            traffic.stop()
            branch.kill()
        compare(bank, branch, f"file:{folder}/lake")


def show(branch: Branch, traffic: Traffic) -> None:
    """Follow, kill, go on, kill again, finish."""
    print(f"1. a Postgres with {ACCOUNTS} accounts; penstock ingest and penstock materialize start")
    branch.start()
    first = branch.wait_for(1)
    last = branch.wait_for(first + 100)
    print(f"2. SQLite follows: first it had {first} transfers, then {last}")
    branch.kill()
    made = traffic.transfers
    there = branch.look()
    print(f"3. both killed with kill -9: {made} transfers were made, {there} are in SQLite")
    branch.start()
    last = branch.wait_for(traffic.transfers + 100)
    print(f"4. started again, they go on: {last} are in SQLite")
    branch.kill()
    pause(500)
    traffic.stop()
    made, there = traffic.transfers, branch.look()
    print(f"5. both killed again; transfers end at {made}, of which {there} are in SQLite")
    branch.finish()
    print("6. penstock ingest --once and penstock materialize --once have brought the rest")


def compare(bank: Database, branch: Branch, lake: str) -> None:
    """Upstream, in the lake and downstream."""
    print(f"7. at each of {branch.looks} looks at SQLite the balances added up")
    for table, query in SAME.items():
        _, kept = rows_of(lake, f"bank.public.{table}")
        assert kept == sorted(bank.sql(f"SELECT * FROM {table}")), f"{table} differs in the lake"
        upstream = sorted(bank.sql(query))
        assert branch.rows(query) == upstream, f"{table} differs"
        assert len(upstream) > 10, upstream
        print(f"8. {len(upstream)} rows of {table} are the same in Postgres, lake and SQLite")
    _, payments = rows_of(lake, "bank.public.payments")
    assert payments == sorted(bank.sql("SELECT * FROM payments")), "payments differ in the lake"
    paid = branch.rows("SELECT payer, moved, id FROM paid")
    assert paid == sorted(bank.sql(PAID)), "what was paid differs"
    assert len(payments) > len(paid) > 10, paid
    print(f"9. {len(payments)} payments were added up for {len(paid)} payers, each exactly once")


if __name__ == "__main__":
    main()
