"""A Postgres into collections, in a minute: copied, followed, killed, and equal.

A bank runs on a Postgres of its own: accounts, and a journal of transfers between
them, so the balances always add up to what was paid in. `penstock ingest` copies
both tables while transfers go on, is killed with `kill -9` on the way, is started
again, and follows. At every tick that can be read the sum is what it must be, and at
the end each table is equal to its collection, row by row.
"""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from bank import ACCOUNTS, OPENING, Traffic, open_bank, pause, rows_of, started

import penstock.persist as persist
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import UsageError
from penstock.persist.find import find_collection
from penstock.testing.postgres import PostgresServer

FILE = """\
location: file:{folder}/lake
tick: 250ms
sources:
  bank:
    postgres:
      url: {url}
      tables: [public.accounts, public.journal]
"""


def wait_until_seen(running: subprocess.Popen[bytes], url: str, *, past: int = 0) -> int:
    """Wait until the accounts can be read at a tick past a time; that tick."""
    for _ in range(600):
        if running.poll() not in (None, -signal.SIGKILL):
            raise SystemExit(f"penstock ingest ended with {running.returncode}")
        try:
            client, accounts = find_collection(
                url, "bank.public.accounts", hold=False, settings=persist.Settings()
            )
        except UsageError:
            pass  # Nothing is there yet.
        else:
            with client:
                if accounts.upper - 1 > past:
                    return accounts.upper - 1
        pause(250)
    raise SystemExit("the accounts were not copied within two minutes")


def check_every_tick(url: str) -> tuple[int, int]:
    """The sum of balances at each tick since the first copy; how many, and the last."""
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
            for moment, moved in sorted(by_time.items()):
                total += moved
                ticks += 1
                assert total == ACCOUNTS * OPENING, (moment, total)
        return ticks, total


def main() -> None:
    with (
        PostgresServer(binaries="wheel") as server,
        tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder,
    ):
        bank = open_bank(server)
        file, lake = Path(folder) / "bank.yaml", f"file:{folder}/lake"
        file.write_text(FILE.format(folder=folder, url=bank.url()))
        print(f"1. a Postgres with {ACCOUNTS} accounts; transfers begin")
        traffic = Traffic(bank)
        traffic.start()
        running = started("ingest", file)
        try:
            first = wait_until_seen(running, lake)
            print(f"2. copied while {traffic.transfers} transfers went on; readable from {first}")
            pause(3_000)
            running.send_signal(signal.SIGKILL)
            running.wait()
            before = wait_until_seen(running, lake)
            print(f"3. killed with kill -9; complete up to {before}")
            pause(1_000)
            running = started("ingest", file)
            wait_until_seen(running, lake, past=before)
            print("4. started again; it goes on from there")
            pause(2_000)
            traffic.stop()
            wait_until_seen(running, lake, past=SYSTEM_CLOCK.now_ms() + 500)
        finally:
            traffic.stopped.set()
            running.terminate()
            running.wait()
        ticks, total = check_every_tick(lake)
        print(f"5. at each of {ticks} ticks with changes the balances add up to {total}")
        for table in ("accounts", "journal"):
            as_of, kept = rows_of(lake, f"bank.public.{table}")
            upstream = sorted(bank.sql(f"SELECT * FROM {table}"))
            assert kept == upstream, f"{table} differs"
            print(f"6. as of {as_of}: {len(kept)} rows of {table}, equal to the table's")
        for verb in (["read", lake, "bank_progress"], ["status", lake]):
            print(f"7. penstock {verb[0]}:", flush=True)
            subprocess.run([sys.executable, "-m", "penstock.cli.main", *verb], check=True)


if __name__ == "__main__":
    main()
