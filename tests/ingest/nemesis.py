"""Random faults in a pipeline and in the database that it reads, under load.

    python -m tests.ingest.nemesis --for SECONDS [--seed N]

A thread moves coins without pause (`workload.py`). The process of the pipeline is
killed, at random and at failpoints. The server is stopped, killed and restored from a
copy of its files. Connections are terminated, cut and stalled. Slots are dropped and
advanced. Tables are rewritten, and leave and enter the publication. After each round
the collections are checked tick by tick and compared with the tables (`checker.py`).
The program runs rounds until the time is over, and prints the seed of each. After the
first round with a violation it prints the folder and the violations, and exits with
status 1.
"""

import logging
import os
import random
import shutil
import sys
from contextlib import closing, suppress
from pathlib import Path

import psycopg

from penstock.cli.log_format import FieldsFormatter
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import IndeterminateError
from penstock.failpoints import Action, Failpoint, arm, disarm
from penstock.servers.postgres import Database, PostgresServer
from tests.fix_postgres import give
from tests.ingest.checker import broken, differing, histories
from tests.ingest.proxy import Proxy
from tests.ingest.pump import Pump
from tests.ingest.workload import SCHEMA, TABLES, Carrier, check_coins
from tests.nemesis_driver import Tally, Turn, argument_parser, in_folder, run_nemesis, say, wait
from tests.shared_postgres import QUICK

STEPS = (
    Failpoint.SLOT_INTENDED,
    Failpoint.SLOT_CREATED,
    Failpoint.COPY_DONE,
    Failpoint.TICK_BEGIN,
    Failpoint.TICK_DONE,
    Failpoint.CONFIRM_DONE,
    Failpoint.LOG_CREATE_BEGIN,
    Failpoint.LOG_CREATE_DONE,
    Failpoint.BLOB_PUT_DONE,
)


class Round:
    """One server and one pipeline, with faults for some seconds."""

    def __init__(
        self, server: PostgresServer, folder: Path, seed: int, tally: Tally, *, processes: bool
    ) -> None:
        self.server = server
        self.tally = tally
        self.rng = random.Random(seed)
        self.database: Database = server.create_database(f"nemesis{seed}_{os.getpid()}")
        self.database.sql(SCHEMA)
        self.proxy = Proxy(server.port)
        url = self.database.url(host="tcp").replace(f":{server.port}/", f":{self.proxy.port}/")
        self.pump = Pump(self.database, folder, url=url, tick_ms=self.rng.choice([20, 50, 200]))
        self.processes = processes
        self.copy = server.folder / "copy"

    def play(self, seconds: float) -> list[str]:
        """Inject faults until the time is over, then wait for all changes; return the defects."""
        deadline = SYSTEM_CLOCK.boot_ms() + int(seconds * 1_000)
        faults = [
            *2 * [self.fire_failpoint],
            *2 * [self.end_connections],
            *2 * [self.cut],
            self.stall,
            self.drop_slot,
            self.advance_slot,
            self.rewrite,
            self.restart_server,
            self.kill_server,
            self.restore_server,
        ]
        if self.processes:
            faults += 3 * [self.kill_process]
        seed = self.rng.getrandbits(32)
        with self.proxy, Carrier(self.database.url(), seed, pause_ms=3) as carrier:
            try:
                self.pump.start()
                while SYSTEM_CLOCK.boot_ms() < deadline:
                    wait(self.rng.choice([50, 300, 900]))
                    fault = self.rng.choice(faults)
                    say(f"  {fault.__name__}")
                    if fault in (self.kill_process, self.kill_server):
                        self.tally.kills += 1
                    else:
                        self.tally.faults[fault.__name__] += 1
                    fault()
                    self._restart_failed()
                self.pump.settle()
                carrier.stop()
                self.pump.settle()
            finally:
                disarm()
                with suppress(IndeterminateError):
                    self.pump.stop()
        wrong = differing(self.pump, self.database, TABLES)
        by_table = histories(self.pump, TABLES)
        times = {time for history in by_table.values() for time in history.changes}
        self.tally.observations["states of all tables"] += len(times)
        return wrong + broken(by_table, check_coins)

    def close(self) -> None:
        """End the process, and delete the database and the copy of the files."""
        self.pump.kill()
        shutil.rmtree(self.copy, ignore_errors=True)
        self.database.drop()

    # Faults of the pipeline.

    def fire_failpoint(self) -> None:
        """Fail one step, before or after its effect; the pipeline restarts."""
        arm(self.rng.choice(STEPS), Action.ERROR, at_hit=self.rng.randrange(1, 9))
        wait(600)
        disarm()

    def kill_process(self) -> None:
        """Run the pipeline in its own process for some seconds, then kill it."""
        self._stop()
        point, turn = self.rng.choice(STEPS), self.rng.randrange(1, 20)
        process = self.pump.spawn(failpoints=f"{point}={Action.KILL}@{turn}")
        with suppress(Exception):
            process.wait(self.rng.randrange(2, 6))
        self.pump.kill()
        self.pump.process = None
        self.pump.start()

    # Faults of the connections.

    def end_connections(self) -> None:
        self._sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'penstock%%'"
            " AND (backend_type = 'walsender') = %s",
            [bool(self.rng.randrange(2))],
        )

    def cut(self) -> None:
        self.proxy.cut()

    def stall(self) -> None:
        self.proxy.stall()
        wait(self.rng.choice([200, 3_000]))
        self.proxy.flow()

    # Faults of the slot.

    def drop_slot(self) -> None:
        self.end_connections()
        self._sql(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE database = current_database() AND NOT active"
        )

    def advance_slot(self) -> None:
        self._stop()
        self._sql(
            "SELECT pg_replication_slot_advance(slot_name, pg_current_wal_lsn())"
            " FROM pg_replication_slots WHERE database = current_database() AND NOT active"
        )
        self.pump.start()

    # Changes of the tables.

    def rewrite(self) -> None:
        self._sql(
            self.rng.choice(
                [
                    "VACUUM FULL purse",
                    "CLUSTER chest USING chest_code",
                    "ALTER TABLE purse REPLICA IDENTITY FULL",
                    "ALTER TABLE purse REPLICA IDENTITY DEFAULT",
                    (
                        "BEGIN; ALTER PUBLICATION penstock DROP TABLE purse, moved;"
                        "ALTER PUBLICATION penstock ADD TABLE purse, moved; COMMIT"
                    ),
                ]
            )
        )

    # Faults of the server.

    def restart_server(self) -> None:
        self.server.restart("fast")

    def kill_server(self) -> None:
        self.server.kill()
        self.server.start()

    def restore_server(self) -> None:
        """Copy the files of the server, or restore them if a copy exists."""
        if not self.copy.exists():
            self.server.stop()
            shutil.copytree(self.server.data, self.copy, symlinks=True)
        else:
            self.proxy.refuses = bool(self.rng.randrange(2))
            self.server.stop()
            shutil.rmtree(self.server.data)
            self.copy.rename(self.server.data)
        give(self.server, self.server.data)
        self.server.start()
        wait(self.rng.choice([0, 1_500]))
        self.proxy.refuses = False

    def _sql(self, text: str, parameters: list[object] | None = None) -> None:
        with suppress(psycopg.Error):
            self.database.sql(text, parameters)

    def _stop(self) -> None:
        with suppress(IndeterminateError):
            self.pump.stop()

    def _restart_failed(self) -> None:
        """Restart the pipeline if a failpoint ended it."""
        if self.pump.error is not None:
            self._stop()
            self.pump.start()


def play(seed: int, seconds: float, tally: Tally, *, processes: bool = True) -> list[str]:
    """Run one round on its own server, and return the violations."""
    settings = {**QUICK, "wal_sender_timeout": "2s"}

    def play_on_server(folder: Path) -> list[str]:
        with (
            PostgresServer(settings=settings) as server,
            closing(Round(server, folder, seed, tally, processes=processes)) as round_,
        ):
            return round_.play(seconds)

    return in_folder(play_on_server)


def main() -> int:
    arguments = argument_parser(__doc__).parse_args()
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(FieldsFormatter("    %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    tally = Tally("ingest")

    def play_turn(turn: Turn) -> list[str]:
        return play(turn.seed, max(10, min(60, turn.seconds)), tally)

    return run_nemesis(arguments, tally, play_turn)


if __name__ == "__main__":
    sys.exit(main())
