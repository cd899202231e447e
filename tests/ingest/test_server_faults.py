"""The server stops, dies, loses the line, the slot, or its last hour; we end up equal to it."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.sources.postgres.errors import OtherHistory
from penstock.sources.postgres.source import PostgresSource
from penstock.sources.postgres.upstream import Upstream
from penstock.testing.postgres import Database, PostgresServer
from tests.fix_postgres import QUICK, give, standby_of
from tests.ingest.checker import check
from tests.ingest.proxy import Proxy
from tests.ingest.pump import Pump, until
from tests.ingest.test_killed import drop_slots, let_go, slots
from tests.ingest.test_planted import caught
from tests.ingest.workload import SCHEMA, TABLES, Carrier, coins_are_kept


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that may be harmed."""
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
    """The URL of a database, by way of the proxy."""
    return database.url(host="tcp").replace(f":{database.server.port}/", f":{proxy.port}/")


def ends_equal(pump: Pump, database: Database, carrier: Carrier) -> None:
    """All that was written so far arrives."""
    pump.settle()
    carrier.stop()
    pump.settle()
    check(pump, database, TABLES, coins_are_kept)
    until(lambda: len(slots(database)) == 1, "other slots to go")


def test_the_server_stops_and_is_killed(
    server: PostgresServer, shop: Database, tmp_path: Path
) -> None:
    with Pump(shop, tmp_path) as pump, Carrier(shop.url(), pause_ms=1) as carrier:
        pump.settle()
        first = slots(shop)
        server.restart("fast")
        pump.settle()
        server.kill()
        server.start()
        ends_equal(pump, shop, carrier)
        assert slots(shop) == first


def test_connections_are_ended(shop: Database, tmp_path: Path) -> None:
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
        ends_equal(pump, shop, carrier)


def test_the_line_is_cut_and_held_up(shop: Database, tmp_path: Path) -> None:
    with Proxy(shop.server.port) as proxy:
        url = through(proxy, shop)
        with Pump(shop, tmp_path, url=url) as pump, Carrier(shop.url()) as carrier:
            for _ in range(3):
                pump.settle()
                proxy.cut()
            pump.settle()
            proxy.stall()
            # The server hears nothing, and hangs up.
            until(lambda: not walsenders(shop), "the server to hang up")
            proxy.flow()
            ends_equal(pump, shop, carrier)


def walsenders(database: Database) -> list[tuple[int]]:
    return database.sql(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'walsender'"
    )


def advanced(database: Database) -> None:
    """Somebody else reads from the slot."""
    until(lambda: let_go(database), "the slot to be let go")
    database.sql(
        "SELECT pg_replication_slot_advance(slot_name, pg_current_wal_lsn())"
        " FROM pg_replication_slots WHERE database = current_database()"
    )


def invalidated(database: Database) -> None:
    """The server gives the slot up."""
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
    "harm", [drop_slots, advanced, pytest.param(invalidated, marks=pytest.mark.postgres(13))]
)
def test_the_slot_is_lost_while_nobody_looks(
    shop: Database, tmp_path: Path, harm: Callable[[Database], None]
) -> None:
    with Carrier(shop.url()) as carrier:
        with Pump(shop, tmp_path) as pump:
            pump.settle()
        first = slots(shop)
        until(lambda n=carrier.committed: carrier.committed > n + 20, "more to happen")
        harm(shop)
        with pump:
            ends_equal(pump, shop, carrier)
        assert slots(shop) != first
    # It goes on as ever after.
    with Carrier(shop.url(), seed=8) as carrier, pump:
        ends_equal(pump, shop, carrier)


def test_the_slot_is_dropped_under_a_running_reader(shop: Database, tmp_path: Path) -> None:
    with Pump(shop, tmp_path) as pump, Carrier(shop.url()) as carrier:
        pump.settle()
        [name] = slots(shop)

        def dropped() -> bool:
            shop.sql(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                " WHERE slot_name = %s AND active",
                [name],
            )
            try:
                shop.sql("SELECT pg_drop_replication_slot(%s)", [name])
            except Exception as error:  # noqa: BLE001 - in use again, or gone
                return "does not exist" in str(error)
            return True

        until(dropped, "the slot to be dropped")
        ends_equal(pump, shop, carrier)


def test_a_restore_on_the_same_timeline_is_noticed(
    server: PostgresServer, shop: Database, tmp_path: Path
) -> None:
    """The server is set back, and has since written past what we hold."""
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
        check(pump, shop, TABLES, coins_are_kept)


@pytest.mark.parametrize("planted", [False, True])
def test_a_standby_that_lost_transactions_takes_over(
    server: PostgresServer,
    shop: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    planted: bool,
) -> None:
    """The process goes on running. With the bug, it knows the server only from its start."""
    with (
        caught(planted),
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
            believe_the_first_look(monkeypatch)
        after = promoted(standby, shop.name)
        after.sql("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
        with Carrier(after.url(), seed=2, pause_ms=0):
            until(lambda: position(after) > held, "the standby to have written as much")
        proxy.target = standby.port
        proxy.cut()
        pump.settle()
        check(pump, after, TABLES, coins_are_kept)
        with Carrier(after.url(), seed=3) as carrier:
            ends_equal(pump, after, carrier)


def believe_the_first_look(patch: pytest.MonkeyPatch) -> None:
    begin = PostgresSource._begin_stream
    patch.setattr(Upstream, "_must_be_same", lambda *_: None)
    patch.setattr(Upstream, "recognise", lambda *_, **__: None)
    patch.setattr(PostgresSource, "_begin_stream", lambda self, _: begin(self, None))


def test_a_standby_that_has_everything_takes_over(
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
        here = position(shop)
        until(lambda: replayed(standby) >= here, "the standby to have it all")
        after = promoted(standby, shop.name)
        proxy.target, proxy.refuses = standby.port, False
        with Carrier(after.url(), seed=2) as carrier:
            ends_equal(pump, after, carrier)


def test_another_server_stays_an_error(
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
                check(pump, shop, TABLES, coins_are_kept)
    finally:
        other.drop()


def durable(pump: Pump) -> int:
    """How far upstream what is stored has come."""
    return int(pump.notes()["streamed"]["lsn"])


def position(database: Database) -> int:
    return int(database.sql("SELECT pg_current_wal_flush_lsn() - '0/0'")[0][0])


def replayed(standby: PostgresServer) -> int:
    return int(standby.sql("SELECT coalesce(pg_last_wal_replay_lsn() - '0/0', 0)")[0][0])


def promoted(standby: PostgresServer, name: str) -> Database:
    """The database on the standby, which is on its own from now on."""
    if not standby.running:
        # It must not catch up first.
        with (standby.data / "postgresql.auto.conf").open("a") as file:
            file.write("primary_conninfo = ''\n")
        standby.start()
    standby.sql("SELECT pg_promote()")
    return Database(standby, name)
