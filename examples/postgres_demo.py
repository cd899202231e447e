"""Postgres to collections, with `kill -9` in between, in one minute.

A bank in Postgres has accounts and a journal of transfers; the sum of all balances never
changes. `penstock ingest` takes the initial snapshot of both tables under traffic, is killed
with `kill -9`, and is started again. The sum of the balances is correct at every tick, and at
the end each table is equal to its collection, row by row.
"""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from bank import ACCOUNTS, OPENING_BALANCE, Traffic, open_bank, pause, read_latest, start_penstock

import penstock.persist as persist
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import UsageError
from penstock.persist.lake import find_collection
from penstock.servers.postgres import PostgresServer

FILE = """\
location: file:{folder}/lake
tick: 250ms
sources:
  bank:
    postgres:
      url: {url}
      tables: [public.accounts, public.journal]
"""


def wait_until_readable(process: subprocess.Popen[bytes], url: str, *, after: int = 0) -> int:
    """Wait until the accounts are readable at a tick after a time, and return that tick."""
    for _ in range(600):
        if process.poll() not in (None, -signal.SIGKILL):
            raise SystemExit(f"penstock ingest exited with status {process.returncode}")
        try:
            client, accounts = find_collection(
                url, "bank.public.accounts", hold=False, settings=persist.Settings()
            )
        except UsageError:
            pass  # The collection does not exist yet.
        else:
            with client:
                if accounts.upper - 1 > after:
                    return accounts.upper - 1
        pause(250)
    raise SystemExit("the accounts were not readable within two minutes")


def check_every_tick(url: str) -> tuple[int, int]:
    """Check the sum of balances at each tick; return the number of ticks and the last sum."""
    client, accounts = find_collection(
        url, "bank.public.accounts", hold=True, settings=persist.Settings()
    )
    with client, accounts.listen(accounts.since, snapshot=True) as listener:
        total, ticks, end = 0, 0, accounts.upper
        while listener.frontier < end or not ticks:
            changes = listener.next_changes(timeout_ms=0)
            if changes is None:
                break
            by_time: dict[int, int] = {}
            for update in changes:
                moved = int(update.data["balance"]) * update.diff
                by_time[update.time] = by_time.get(update.time, 0) + moved
            for tick, moved in sorted(by_time.items()):
                total += moved
                ticks += 1
                assert total == ACCOUNTS * OPENING_BALANCE, (tick, total)
        return ticks, total


def main() -> None:
    with (
        PostgresServer(binaries="wheel") as server,
        tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder,
    ):
        bank = open_bank(server)
        file, lake = Path(folder) / "bank.yaml", f"file:{folder}/lake"
        file.write_text(FILE.format(folder=folder, url=bank.url()))
        print(f"1. a Postgres with {ACCOUNTS} accounts; starting transfers")
        traffic = Traffic(bank)
        traffic.start()
        running = start_penstock("ingest", file)
        try:
            first = wait_until_readable(running, lake)
            print(f"2. snapshot taken during {traffic.transfers} transfers; readable from {first}")
            pause(3_000)
            running.send_signal(signal.SIGKILL)
            running.wait()
            before = wait_until_readable(running, lake)
            print(f"3. killed with kill -9; complete up to {before}")
            pause(1_000)
            running = start_penstock("ingest", file)
            wait_until_readable(running, lake, after=before)
            print("4. started again; it resumed from there")
            pause(2_000)
            traffic.stop()
            wait_until_readable(running, lake, after=SYSTEM_CLOCK.now_ms() + 500)
        finally:
            traffic.stopped.set()
            running.terminate()
            running.wait()
        ticks, total = check_every_tick(lake)
        print(f"5. at each of {ticks} ticks with changes, the sum of the balances is {total}")
        for table in ("accounts", "journal"):
            as_of, rows = read_latest(lake, f"bank.public.{table}")
            upstream = sorted(bank.sql(f"SELECT * FROM {table}"))
            assert rows == upstream, f"{table} differs"
            print(f"6. as of {as_of}: {len(rows)} rows of {table}, equal to the table in Postgres")
        for command in (["read", lake, "bank_progress"], ["status", lake]):
            print(f"7. penstock {command[0]}:", flush=True)
            subprocess.run([sys.executable, "-m", "penstock.cli.main", *command], check=True)


if __name__ == "__main__":
    main()
