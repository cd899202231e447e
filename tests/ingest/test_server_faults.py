"""Faults of the server, its connections, slots and history; collections end equal to tables."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.servers.postgres import Database, PostgresServer
from penstock.sources.postgres.errors import OtherHistory
from penstock.sources.postgres.server import SourceServer
from penstock.sources.postgres.source import PostgresSource
from tests.fix_postgres import give, standby_of
from tests.ingest.checker import check
from tests.ingest.proxy import Proxy
from tests.ingest.pump import Pump, until
from tests.ingest.test_failpoints import are_slots_inactive, drop_slots, slots
from tests.ingest.test_planted_bugs import fails_if
from tests.ingest.workload import SCHEMA, TABLES, Carrier, check_coins
from tests.shared_postgres import QUICK


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """Yield a server that tests may stop, kill and restore."""
    with PostgresServer(settings={**QUICK, "wal_sender_timeout": "2s"}) as server:
        yield server


@pytest.fixture
def shop(server: PostgresServer, request: pytest.FixtureRequest) -> Iterator[Database]:
    shop = server.create_database(f"shop{abs(hash(request.node.name))}")
    shop.sql(SCHEMA)
    try:
        yield shop
    finally:
        shop.drop()


def through(proxy: Proxy, database: Database) -> str:
    """Return the URL of a database through the proxy."""
    return database.url(host="tcp").replace(f":{database.server.port}/", f":{proxy.port}/")


def check_equal(pump: Pump, database: Database, carrier: Carrier) -> None:
    """Stop the workload, and check that the collections equal the tables."""
    pump.settle()
    carrier.stop()
    pump.settle()
    check(pump, database, TABLES, check_coins)
    until(lambda: len(slots(database)) == 1, "other slots to be dropped")


def test_source_survives_restart_and_kill_of_server(
    server: PostgresServer, shop: Database, tmp_path: Path
) -> None:
    with Pump(shop, tmp_path) as pump, Carrier(shop.url(), pause_ms=1) as carrier:
        pump.settle()
        first = slots(shop)
        server.restart("fast")
        pump.settle()
        server.kill()
        server.start()
        check_equal(pump, shop, carrier)
        assert slots(shop) == first


def test_source_survives_terminated_connections(shop: Database, tmp_path: Path) -> None:
    with Pump(shop, tmp_path) as pump, Carrier(shop.url()) as carrier:
        for kind in ("walsender", "client backend"):
            for _ in range(2):
                pump.settle()
                ended = shop.sql(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND backend_type = %s"
                    " AND application_name LIKE 'penstock%%'",
                    [kind],
                )
                assert ended
        check_equal(pump, shop, carrier)


def test_source_survives_cut_and_stalled_connections(shop: Database, tmp_path: Path) -> None:
    with Proxy(shop.server.port) as proxy:
        url = through(proxy, shop)
        with Pump(shop, tmp_path, url=url) as pump, Carrier(shop.url()) as carrier:
            for _ in range(3):
                pump.settle()
                proxy.cut()
            pump.settle()
            proxy.stall()
            # The server receives no feedback, and closes the connection.
            until(lambda: not walsenders(shop), "the server to close the connection")
            proxy.flow()
            check_equal(pump, shop, carrier)


def walsenders(database: Database) -> list[tuple[int]]:
    return database.sql(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'walsender'"
    )


def advance_slot(database: Database) -> None:
    """Advance the slot, as another reader would."""
    until(lambda: are_slots_inactive(database), "the slot to become inactive")
    database.sql(
        "SELECT pg_replication_slot_advance(slot_name, pg_current_wal_lsn())"
        " FROM pg_replication_slots WHERE database = current_database()"
    )


def invalidate_slot(database: Database) -> None:
    """Make the server invalidate the slot."""
    database.sql("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'")
    database.sql("SELECT pg_reload_conf()")
    try:
        for _ in range(3):
            database.sql("SELECT pg_logical_emit_message(false, '', ''), pg_switch_wal()")
            database.sql("CHECKPOINT")
        [(status,)] = database.sql(
            "SELECT wal_status FROM pg_replication_slots WHERE database = current_database()"
        )
        assert status == "lost"
    finally:
        database.sql("ALTER SYSTEM RESET max_slot_wal_keep_size")
        database.sql("SELECT pg_reload_conf()")


@pytest.mark.parametrize(
    "lose_slot",
    [drop_slots, advance_slot, pytest.param(invalidate_slot, marks=pytest.mark.postgres(13))],
)
def test_stopped_source_replaces_lost_slot_and_resyncs(
    shop: Database, tmp_path: Path, lose_slot: Callable[[Database], None]
) -> None:
    with Carrier(shop.url()) as carrier:
        with Pump(shop, tmp_path) as pump:
            pump.settle()
        first = slots(shop)
        until(lambda n=carrier.committed: carrier.committed > n + 20, "more transactions")
        lose_slot(shop)
        with pump:
            check_equal(pump, shop, carrier)
        assert slots(shop) != first
    # A later restart also works.
    with Carrier(shop.url(), seed=8) as carrier, pump:
        check_equal(pump, shop, carrier)


def test_running_source_replaces_dropped_slot(shop: Database, tmp_path: Path) -> None:
    with Pump(shop, tmp_path) as pump, Carrier(shop.url()) as carrier:
        pump.settle()
        [name] = slots(shop)

        def drop_slot() -> bool:
            shop.sql(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                " WHERE slot_name = %s AND active",
                [name],
            )
            try:
                shop.sql("SELECT pg_drop_replication_slot(%s)", [name])
            except Exception as error:  # noqa: BLE001 - in use again, or dropped
                return "does not exist" in str(error)
            return True

        until(drop_slot, "the slot to be dropped")
        check_equal(pump, shop, carrier)


def test_restored_server_on_same_timeline_is_detected(
    server: PostgresServer, shop: Database, tmp_path: Path
) -> None:
    """The history is rewound, and the server has written past our position since."""
    copy = server.folder / "copy"
    with Proxy(server.port) as proxy, Pump(shop, tmp_path, url=through(proxy, shop)) as pump:
        pump.settle()
        server.stop()
        shutil.copytree(server.data, copy, symlinks=True)
        give(server, copy)
        server.start()
        pump.settle()
        with Carrier(shop.url(), seed=1):
            pump.settle()
        pump.settle()
        held = durable(pump)
        proxy.refuses = True
        server.stop()
        shutil.rmtree(server.data)
        copy.rename(server.data)
        server.start()
        with Carrier(shop.url(), seed=2, pause_ms=0):
            until(lambda: position(shop) > held, "the server to have written as much again")
        proxy.refuses = False
        pump.settle()
        check(pump, shop, TABLES, check_coins)


@pytest.mark.parametrize("planted", [False, True])
def test_promoted_standby_with_lost_transactions_is_detected(
    server: PostgresServer,
    shop: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    planted: bool,
) -> None:
    """The process keeps running. With the planted bug, it identifies the server only once."""
    with (
        fails_if(planted),
        standby_of(server) as standby,
        Proxy(server.port) as proxy,
        Pump(shop, tmp_path, url=through(proxy, shop)) as pump,
    ):
        pump.settle()
        standby.stop()
        with Carrier(shop.url(), seed=1) as carrier:
            until(lambda: carrier.committed > 100, "transactions that will be lost")
        pump.settle()
        [name] = slots(shop)
        held = durable(pump)
        if planted:
            identify_server_once(monkeypatch)
        after = promote(standby, shop.name)
        after.sql("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
        with Carrier(after.url(), seed=2, pause_ms=0):
            until(lambda: position(after) > held, "the standby to have written as much")
        proxy.target = standby.port
        proxy.cut()
        pump.settle()
        check(pump, after, TABLES, check_coins)
        with Carrier(after.url(), seed=3) as carrier:
            check_equal(pump, after, carrier)


def identify_server_once(patch: pytest.MonkeyPatch) -> None:
    begin = PostgresSource._start_stream
    patch.setattr(SourceServer, "_check_same_server", lambda *_: None)
    patch.setattr(SourceServer, "verify_identity", lambda *_, **__: None)
    patch.setattr(PostgresSource, "_start_stream", lambda self, _: begin(self, None))


def test_promoted_standby_with_all_transactions_is_accepted(
    server: PostgresServer, shop: Database, tmp_path: Path
) -> None:
    with (
        standby_of(server) as standby,
        Proxy(server.port) as proxy,
        Pump(shop, tmp_path, url=through(proxy, shop)) as pump,
    ):
        with Carrier(shop.url()):
            pump.settle()
        pump.settle()
        proxy.refuses = True
        proxy.cut()
        flushed = position(shop)
        until(lambda: replayed(standby) >= flushed, "the standby to replay all")
        after = promote(standby, shop.name)
        proxy.target, proxy.refuses = standby.port, False
        with Carrier(after.url(), seed=2) as carrier:
            check_equal(pump, after, carrier)


def test_source_at_another_server_fails_until_the_first_is_back(
    postgres_server: PostgresServer, shop: Database, tmp_path: Path
) -> None:
    other = postgres_server.create_database(shop.name)
    try:
        other.sql(SCHEMA)
        with Proxy(shop.server.port) as proxy:
            pump = Pump(shop, tmp_path, url=through(proxy, shop))
            with pump:
                pump.settle()
            proxy.target = postgres_server.port
            pump.start()
            error = pump.await_error()
            assert isinstance(error, OtherHistory)
            assert "system identifier" in error.detail
            proxy.target = shop.server.port
            with pump:
                pump.settle()
                check(pump, shop, TABLES, check_coins)
    finally:
        other.drop()


def durable(pump: Pump) -> int:
    """Return the durable LSN of the source."""
    return int(pump.state()["streamed"]["lsn"])


def position(database: Database) -> int:
    return int(database.sql("SELECT pg_current_wal_flush_lsn() - '0/0'")[0][0])


def replayed(standby: PostgresServer) -> int:
    return int(standby.sql("SELECT coalesce(pg_last_wal_replay_lsn() - '0/0', 0)")[0][0])


def promote(standby: PostgresServer, name: str) -> Database:
    """Promote the standby, and return its database."""
    if not standby.running:
        # It must not catch up first.
        with (standby.data / "postgresql.auto.conf").open("a") as file:
            file.write("primary_conninfo = ''\n")
        standby.start()
    standby.sql("SELECT pg_promote()")
    return Database(standby, name)
