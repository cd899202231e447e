"""A database under load, a pipeline that follows it, and somebody who does both harm.

    python -m tests.ingest.nemesis --for SECONDS [--seed N]

Coins are carried all the time (`workload.py`). Meanwhile the pipeline's process is
killed, at random and at named steps; the server is stopped, killed and set back
to a copy of its files; connections are ended, cut and held up; slots are dropped
and read by others; tables are rewritten, emptied and given more columns. After
each round what is stored is judged tick by tick and compared with the tables
(`checker.py`). It runs rounds until the time is over, prints the seed of each, and
ends with status 1, the folder and what was wrong at the first that breaks a promise.
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
from penstock.testing.postgres import Database, PostgresServer
from tests.fix_postgres import QUICK, give
from tests.ingest.checker import broken, differing, histories
from tests.ingest.proxy import Proxy
from tests.ingest.pump import Pump
from tests.ingest.workload import SCHEMA, TABLES, Carrier, coins_are_kept
from tests.nemesis_driver import Tally, Turn, argument_parser, in_folder, run_nemesis, say, wait

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
    """One server, one pipeline, and harm for some seconds."""

    def __init__(
        self, server: PostgresServer, folder: Path, seed: int, tally: Tally, *, processes: bool
    ) -> None:
        self.server = server
        self.tally = tally
        self.chance = random.Random(seed)
        self.database: Database = server.create_database(f"nemesis{seed}_{os.getpid()}")
        self.database.sql(SCHEMA)
        self.proxy = Proxy(server.port)
        url = self.database.url(host="tcp").replace(f":{server.port}/", f":{self.proxy.port}/")
        self.pump = Pump(self.database, folder, url=url, tick_ms=self.chance.choice([20, 50, 200]))
        self.processes = processes
        self.copy = server.folder / "copy"

    def play(self, seconds: float) -> list[str]:
        """Do harm until the time is over, then let all of it arrive; what is wrong."""
        deadline = SYSTEM_CLOCK.boot_ms() + int(seconds * 1_000)
        harms = [
            *2 * [self.trip],
            *2 * [self.end_connections],
            *2 * [self.cut],
            self.stall,
            self.drop_slot,
            self.advance_slot,
            self.rewrite,
            self.restart_server,
            self.kill_server,
            self.set_back,
        ]
        if self.processes:
            harms += 3 * [self.kill_process]
        seed = self.chance.getrandbits(32)
        with self.proxy, Carrier(self.database.url(), seed, pause_ms=3) as carrier:
            try:
                self.pump.start()
                while SYSTEM_CLOCK.boot_ms() < deadline:
                    wait(self.chance.choice([50, 300, 900]))
                    harm = self.chance.choice(harms)
                    say(f"  {harm.__name__}")
                    if harm in (self.kill_process, self.kill_server):
                        self.tally.kills += 1
                    else:
                        self.tally.faults[harm.__name__] += 1
                    harm()
                    self._keep_running()
                self.pump.settle()
                carrier.stop()
                self.pump.settle()
            finally:
                disarm()
                with suppress(IndeterminateError):
                    self.pump.stop()
        wrong = differing(self.pump, self.database, TABLES)
        found = histories(self.pump, TABLES)
        times = {time for history in found.values() for time in history.changes}
        self.tally.observations["states of all tables"] += len(times)
        return wrong + broken(found, coins_are_kept)

    def close(self) -> None:
        """Leave the server as it was."""
        self.pump.kill()
        shutil.rmtree(self.copy, ignore_errors=True)
        self.database.drop()

    # To the pipeline.

    def trip(self) -> None:
        """A step fails, having happened or not, and the pipeline starts again."""
        arm(self.chance.choice(STEPS), Action.ERROR, at_hit=self.chance.randrange(1, 9))
        wait(600)
        disarm()

    def kill_process(self) -> None:
        """For a while the pipeline is a process of its own, which is killed."""
        self._stop()
        point, turn = self.chance.choice(STEPS), self.chance.randrange(1, 20)
        process = self.pump.spawn(failpoints=f"{point}={Action.KILL}@{turn}")
        with suppress(Exception):
            process.wait(self.chance.randrange(2, 6))
        self.pump.kill()
        self.pump.process = None
        self.pump.start()

    # To the line.

    def end_connections(self) -> None:
        self._sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'penstock%%'"
            " AND (backend_type = 'walsender') = %s",
            [bool(self.chance.randrange(2))],
        )

    def cut(self) -> None:
        self.proxy.cut()

    def stall(self) -> None:
        self.proxy.stall()
        wait(self.chance.choice([200, 3_000]))
        self.proxy.flow()

    # To the slot.

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

    # To the tables.

    def rewrite(self) -> None:
        self._sql(
            self.chance.choice(
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

    # To the server.

    def restart_server(self) -> None:
        self.server.restart("fast")

    def kill_server(self) -> None:
        self.server.kill()
        self.server.start()

    def set_back(self) -> None:
        """Its files are copied, or what was copied takes their place."""
        if not self.copy.exists():
            self.server.stop()
            shutil.copytree(self.server.data, self.copy, symlinks=True)
        else:
            self.proxy.refuses = bool(self.chance.randrange(2))
            self.server.stop()
            shutil.rmtree(self.server.data)
            self.copy.rename(self.server.data)
        give(self.server, self.server.data)
        self.server.start()
        wait(self.chance.choice([0, 1_500]))
        self.proxy.refuses = False

    def _sql(self, text: str, parameters: list[object] | None = None) -> None:
        with suppress(psycopg.Error):
            self.database.sql(text, parameters)

    def _stop(self) -> None:
        with suppress(IndeterminateError):
            self.pump.stop()

    def _keep_running(self) -> None:
        """A step that failed ends the pipeline; anything else must not."""
        if self.pump.error is not None:
            self._stop()
            self.pump.start()


def play(seed: int, seconds: float, tally: Tally, *, processes: bool = True) -> list[str]:
    """One round on a server of its own; what it broke."""
    settings = {**QUICK, "wal_sender_timeout": "2s"}

    def on_a_server(folder: Path) -> list[str]:
        with (
            PostgresServer(settings=settings) as server,
            closing(Round(server, folder, seed, tally, processes=processes)) as round_,
        ):
            return round_.play(seconds)

    return in_folder(on_a_server)


def main() -> int:
    asked = argument_parser(__doc__).parse_args()
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(FieldsFormatter("    %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    tally = Tally("ingest")

    def play_turn(turn: Turn) -> list[str]:
        return play(turn.seed, max(10, min(60, turn.seconds)), tally)

    return run_nemesis(asked, tally, play_turn)


if __name__ == "__main__":
    sys.exit(main())
