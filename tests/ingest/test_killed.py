"""The process is ended with `kill -9` at every step, and started again.

Each step has happened or not, and was told or not; what is stored afterwards
is what is upstream, at every tick, and no slot is left that nobody reads.
"""

import signal
from pathlib import Path

import pyarrow as pa
import pytest

from penstock import persist
from penstock.errors import IndeterminateError
from penstock.failpoints import Action, Failpoint, armed
from penstock.testing.postgres import Database
from tests.ingest.checker import check
from tests.ingest.pump import Pump, until
from tests.ingest.workload import SCHEMA, TABLES, Carrier, coins_are_kept

# What has happened when nobody was told of it yet, by the pass at which it is tripped.
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


def test_killed_at_one_step_after_the_other(shop: Database, tmp_path: Path) -> None:
    pump = Pump(shop, tmp_path)
    with Carrier(shop.url(), truncates=False) as carrier:
        for point, turn in STEPS:
            process = pump.spawn(failpoints=f"{point}={Action.KILL}@{turn}")
            assert process.wait(120) == -signal.SIGKILL, f"{point}@{turn}: {pump.said()}"
        pump.process = None
        goes_on(pump, shop, carrier)


@pytest.mark.parametrize(("point", "turn"), STEPS)
def test_told_of_an_error(shop: Database, tmp_path: Path, point: Failpoint, turn: int) -> None:
    pump = Pump(shop, tmp_path)
    with Carrier(shop.url()) as carrier:
        with armed(point, Action.ERROR, at_hit=turn):
            pump.start()
            assert isinstance(pump.await_error(), IndeterminateError)
        goes_on(pump, shop, carrier)


@pytest.mark.parametrize("point", [Failpoint.LOG_CREATE_BEGIN, Failpoint.LOG_CREATE_DONE])
@pytest.mark.parametrize("turn", [10, 18])
def test_an_entry_happens_or_not_and_is_told_or_not(
    shop: Database, tmp_path: Path, point: Failpoint, turn: int
) -> None:
    pump = Pump(shop, tmp_path)
    with Carrier(shop.url()) as carrier:
        # Repeated: the hit may be in background maintenance, which only retries.
        with armed(point, Action.ERROR, at_hit=turn, repeat=True):
            pump.start()
            pump.await_error()
        goes_on(pump, shop, carrier)


def test_killed_while_it_starts_over(shop: Database, tmp_path: Path) -> None:
    pump = Pump(shop, tmp_path)
    with Carrier(shop.url()) as carrier:
        with pump:
            pump.settle()
        drop_slots(shop)
        for point in (Failpoint.SLOT_INTENDED, Failpoint.SLOT_CREATED, Failpoint.TICK_BEGIN):
            with armed(point, Action.ERROR):
                pump.start()
                assert isinstance(pump.await_error(), IndeterminateError)
        goes_on(pump, shop, carrier)


def test_what_was_kept_aside_for_a_copy_that_was_given_up_is_swept(
    shop: Database, tmp_path: Path
) -> None:
    """As after a kill between a tick, which notes the next copy's name, and the sweeping."""
    pump = Pump(shop, tmp_path)
    with Carrier(shop.url()) as carrier:
        with pump:
            pump.settle()
        with persist.open(pump.storage, writer="pump") as client:
            client.create_or_load(
                "shop/pending/1-given-up", schema=pa.schema([("id", pa.int64())]), owner="shop"
            )
        goes_on(pump, shop, carrier)


def goes_on(pump: Pump, database: Database, carrier: Carrier) -> None:
    """Started again it is right, and has one slot."""
    with pump:
        pump.settle()
        carrier.stop()
        pump.settle()
        assert len(slots(database)) == 1
    check(pump, database, TABLES, coins_are_kept)
    with pump.reader() as client:
        kept = [name for name in client.collections(hidden=True) if "/pending/" in name]
    assert not kept, "messages that were kept aside are left behind"
    assert slots(database) == [pump.notes()["slot"]["name"]]


def slots(database: Database) -> list[str]:
    """The slots of a database."""
    rows = database.sql(
        "SELECT slot_name FROM pg_replication_slots"
        " WHERE database = current_database() AND NOT temporary"
    )
    return [name for (name,) in rows]


def let_go(database: Database) -> bool:
    """Whether no slot is in use: a server notices some time after that a reader is gone."""
    return not database.sql(
        "SELECT 1 FROM pg_replication_slots WHERE database = current_database() AND active"
    )


def drop_slots(database: Database) -> None:
    """Somebody removes them."""
    until(lambda: let_go(database), "the slots to be let go")
    database.sql(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
        " WHERE database = current_database()"
    )
