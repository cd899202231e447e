"""Postgres to SQLite, exactly once, although every process in between is killed.

`penstock ingest` replicates a bank in Postgres into collections, and `penstock materialize`
replicates those into SQLite: accounts and journal unchanged, payments summed for each payer.
Both are killed with `kill -9` during transfers, started again, and killed again. Every query
of SQLite returns the correct sum of balances. At the end all rows are equal in Postgres, in
the lake and in SQLite.
"""

import signal
import sqlite3
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path

from bank import ACCOUNTS, OPENING_BALANCE, Traffic, open_bank, pause, read_latest, start_penstock

from penstock.servers.postgres import Database, PostgresServer

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
    """The SQLite database, and the processes that write it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "bank.yaml"
        self.log = folder / "log"
        self.checks = 0
        self._database = folder / "branch.db"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start both commands in parallel."""
        for command in ("ingest", "materialize"):
            self._running[command] = start_penstock(command, self.file, log=self.log)

    def kill(self) -> None:
        """Send SIGKILL to both processes."""
        for process in self._running.values():
            process.send_signal(signal.SIGKILL)
            process.wait()

    def finish(self) -> None:
        """Replicate everything that is upstream now."""
        for command in ("ingest", "materialize"):
            if start_penstock(command, self.file, "--once", log=self.log).wait():
                raise self._failed(f"penstock {command} --once failed")

    def rows(self, query: str) -> list[tuple[object, ...]]:
        """Return the sorted result of a query in SQLite."""
        with closing(sqlite3.connect(self._database)) as connection:
            return sorted(connection.execute(query).fetchall())

    def wait_for(self, transfer: int) -> int:
        """Check SQLite until a transfer has arrived, and return the last one."""
        for _ in range(3_000):
            for command, process in self._running.items():
                if process.poll() is not None:
                    status = process.returncode
                    raise self._failed(f"penstock {command} exited with status {status}")
            last = self.check()
            if last >= transfer:
                return last
            pause(100)
        raise self._failed(f"transfer {transfer} did not arrive within five minutes")

    def check(self) -> int:
        """Check the sum of the balances, and return the last transfer in SQLite."""
        try:
            [(total, last)] = self.rows(
                "SELECT (SELECT sum(balance) FROM accounts), (SELECT max(id) FROM paid)"
            )
        except sqlite3.OperationalError:
            return 0  # The tables do not exist yet.
        if last is None:
            return 0
        self.checks += 1
        assert total == ACCOUNTS * OPENING_BALANCE, total
        return int(last)

    def _failed(self, reason: str) -> SystemExit:
        return SystemExit(f"{self.log.read_text(errors='replace')}\n{reason}")


def main() -> None:
    """Run the example and check each step."""
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
    """Start, kill, resume, kill again, finish."""
    print(f"1. a Postgres with {ACCOUNTS} accounts; starting penstock ingest and materialize")
    branch.start()
    first = branch.wait_for(1)
    last = branch.wait_for(first + 100)
    print(f"2. SQLite receives transfers: first {first}, then {last}")
    branch.kill()
    made, delivered = traffic.transfers, branch.check()
    print(f"3. both killed with kill -9: {made} transfers in Postgres, {delivered} in SQLite")
    branch.start()
    last = branch.wait_for(traffic.transfers + 100)
    print(f"4. started again, both resumed: {last} transfers in SQLite")
    branch.kill()
    pause(500)
    traffic.stop()
    made, delivered = traffic.transfers, branch.check()
    print(f"5. both killed again; {made} transfers in Postgres, {delivered} in SQLite")
    branch.finish()
    print("6. penstock ingest --once and materialize --once delivered the remaining transfers")


def compare(bank: Database, branch: Branch, lake: str) -> None:
    """Compare Postgres, the lake and SQLite."""
    print(f"7. the sum of the balances in SQLite was correct at each of {branch.checks} checks")
    for table, query in SAME.items():
        _, rows = read_latest(lake, f"bank.public.{table}")
        assert rows == sorted(bank.sql(f"SELECT * FROM {table}")), f"{table} differs in the lake"
        upstream = sorted(bank.sql(query))
        assert branch.rows(query) == upstream, f"{table} differs"
        assert len(upstream) > 10, upstream
        print(f"8. {len(upstream)} rows of {table} are equal in Postgres, lake and SQLite")
    _, payments = read_latest(lake, "bank.public.payments")
    assert payments == sorted(bank.sql("SELECT * FROM payments")), "payments differ in the lake"
    paid = branch.rows("SELECT payer, moved, id FROM paid")
    assert paid == sorted(bank.sql(PAID)), "the sums of the payments differ"
    assert len(payments) > len(paid) > 10, paid
    print(f"9. {len(payments)} payments were summed for {len(paid)} payers, each exactly once")


if __name__ == "__main__":
    main()
