"""`kill -9` or an error at every failpoint, followed by a restart.

Each step happened or not, and was acknowledged or not. After the restart the collections
equal the tables at every tick, and one replication slot exists.
"""

import signal
from pathlib import Path

import pyarrow as pa
import pytest

from penstock import persist
from penstock.errors import IndeterminateError
from penstock.failpoints import Action, Failpoint, armed
from penstock.servers.postgres import Database
from tests.ingest.checker import check
from tests.ingest.pump import Pump, until
from tests.ingest.workload import SCHEMA, TABLES, Carrier, check_coins

# Failpoints, each with the number of the hit that fires it.
STEPS = [
    (Failpoint.SLOT_INTENDED, 1),
    (Failpoint.SLOT_CREATED, 1),
    (Failpoint.COPY_DONE, 2),
    (Failpoint.TICK_DONE, 1),
    (Failpoint.TICK_BEGIN, 3),
    (Failpoint.TICK_DONE, 4),
    (Failpoint.CONFIRM_DONE, 2),
]


@pytest.fixture
def shop(database: Database) -> Database:
    database.sql(SCHEMA)
    return database


def test_process_killed_at_each_failpoint_resumes_equal_to_tables(
    shop: Database, tmp_path: Path
) -> None:
    pump = Pump(shop, tmp_path)
    with Carrier(shop.url(), truncates=False) as carrier:
        for point, turn in STEPS:
            process = pump.spawn(failpoints=f"{point}={Action.KILL}@{turn}")
            assert process.wait(120) == -signal.SIGKILL, f"{point}@{turn}: {pump.output()}"
        pump.process = None
        check_after_restart(pump, shop, carrier)


@pytest.mark.parametrize(("point", "turn"), STEPS)
def test_source_with_error_at_failpoint_resumes_equal_to_tables(
    shop: Database, tmp_path: Path, point: Failpoint, turn: int
) -> None:
    pump = Pump(shop, tmp_path)
    with Carrier(shop.url()) as carrier:
        with armed(point, Action.ERROR, at_hit=turn):
            pump.start()
            assert isinstance(pump.await_error(), IndeterminateError)
        check_after_restart(pump, shop, carrier)


@pytest.mark.parametrize("point", [Failpoint.LOG_CREATE_BEGIN, Failpoint.LOG_CREATE_DONE])
@pytest.mark.parametrize("turn", [10, 18])
def test_source_with_failed_log_entry_resumes_equal_to_tables(
    shop: Database, tmp_path: Path, point: Failpoint, turn: int
) -> None:
    pump = Pump(shop, tmp_path)
    with Carrier(shop.url()) as carrier:
        # Repeated: the hit may be in background maintenance, which only retries.
        with armed(point, Action.ERROR, at_hit=turn, repeat=True):
            pump.start()
            pump.await_error()
        check_after_restart(pump, shop, carrier)


def test_source_failed_while_replacing_lost_slot_resumes_equal_to_tables(
    shop: Database, tmp_path: Path
) -> None:
    pump = Pump(shop, tmp_path)
    with Carrier(shop.url()) as carrier:
        with pump:
            pump.settle()
        drop_slots(shop)
        for point in (Failpoint.SLOT_INTENDED, Failpoint.SLOT_CREATED, Failpoint.TICK_BEGIN):
            with armed(point, Action.ERROR):
                pump.start()
                assert isinstance(pump.await_error(), IndeterminateError)
        check_after_restart(pump, shop, carrier)


def test_pending_changes_of_cancelled_snapshot_are_deleted_after_restart(
    shop: Database, tmp_path: Path
) -> None:
    # A kill between the tick and the deletion of pending changes leaves such a collection.
    pump = Pump(shop, tmp_path)
    with Carrier(shop.url()) as carrier:
        with pump:
            pump.settle()
        with persist.open(pump.storage, writer="pump") as client:
            client.create_or_load(
                "shop/pending/1-given-up", schema=pa.schema([("id", pa.int64())]), owner="shop"
            )
        check_after_restart(pump, shop, carrier)


def check_after_restart(pump: Pump, database: Database, carrier: Carrier) -> None:
    """Restart the source, and check its collections and its only slot."""
    with pump:
        pump.settle()
        carrier.stop()
        pump.settle()
        assert len(slots(database)) == 1
    check(pump, database, TABLES, check_coins)
    with pump.reader() as client:
        pending = [name for name in client.collections(hidden=True) if "/pending/" in name]
    assert not pending, "pending changes are left behind"
    assert slots(database) == [pump.state()["slot"]["name"]]


def slots(database: Database) -> list[str]:
    """Return the names of the permanent slots of a database."""
    rows = database.sql(
        "SELECT slot_name FROM pg_replication_slots"
        " WHERE database = current_database() AND NOT temporary"
    )
    return [name for (name,) in rows]


def are_slots_inactive(database: Database) -> bool:
    """Return whether no slot is active: a server detects a closed reader with a delay."""
    return not database.sql(
        "SELECT 1 FROM pg_replication_slots WHERE database = current_database() AND active"
    )


def drop_slots(database: Database) -> None:
    """Drop all slots of the database when they are inactive."""
    until(lambda: are_slots_inactive(database), "the slots to become inactive")
    database.sql(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
        " WHERE database = current_database()"
    )
