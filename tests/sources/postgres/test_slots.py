"""Replication slots on real servers."""

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import TransientError, UsageError
from penstock.pgclient import Connection, connect
from penstock.servers.postgres import Database, PostgresServer
from penstock.sources.postgres.errors import SlotForeign
from penstock.sources.postgres.slots import (
    Blocker,
    _create_statement,
    blocking_transactions,
    create_slot,
    drop_slot,
    inspect_slot,
    list_slots,
    slot_name,
    terminate_holder,
)
from tests.fix_postgres import installed, major

NONCE = "a1b2c3"


@pytest.fixture(params=["database", "database18"])
def any_database(request: pytest.FixtureRequest) -> Database:
    database: Database = request.getfixturevalue(request.param)
    database.sql("CREATE TABLE t (i integer PRIMARY KEY)")
    return database


@pytest.fixture
def sql(any_database: Database) -> Iterator[Connection]:
    with connect(any_database.url()) as connection:
        yield connection


@pytest.fixture
def replication(any_database: Database) -> Iterator[Connection]:
    with connect(any_database.url(), replication=True) as connection:
        yield connection


@given(source=st.text(), nonce=st.from_regex(r"[a-z0-9]{4,32}", fullmatch=True))
def test_slot_name_of_any_source_is_valid(source: str, nonce: str) -> None:
    name = slot_name(source, nonce)
    assert len(name.encode()) <= 63
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_")
    assert name.startswith("penstock_")
    assert name.endswith(f"_{nonce}")


@pytest.mark.parametrize("nonce", ["", "abc", "ABCDEF", "ab_cd", "x" * 33])
def test_slot_name_with_malformed_nonce_raises_usage_error(nonce: str) -> None:
    with pytest.raises(UsageError, match="malformed"):
        slot_name("shop", nonce)


@pytest.mark.parametrize(
    ("version", "temporary", "export", "command"),
    [
        (120000, False, True, 'CREATE_REPLICATION_SLOT "s" LOGICAL pgoutput EXPORT_SNAPSHOT'),
        (
            140012,
            True,
            False,
            'CREATE_REPLICATION_SLOT "s" TEMPORARY LOGICAL pgoutput NOEXPORT_SNAPSHOT',
        ),
        (150018, False, True, "CREATE_REPLICATION_SLOT \"s\" LOGICAL pgoutput (SNAPSHOT 'export')"),
    ],
)
def test_create_statement_depends_on_server_version(
    version: int, temporary: bool, export: bool, command: str
) -> None:
    assert _create_statement(version, "s", temporary=temporary, export=export) == command


def test_snapshot_contains_exactly_the_changes_that_slot_does_not_send(
    any_database: Database, replication: Connection, sql: Connection
) -> None:
    any_database.sql("INSERT INTO t VALUES (1)")
    created = create_slot(replication, slot_name("shop", NONCE))
    any_database.sql("INSERT INTO t VALUES (2)")
    sql.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    sql.execute(f"SET TRANSACTION SNAPSHOT '{created.snapshot}'")
    assert sql.query("SELECT i FROM public.t") == [("1",)]
    sql.execute("ROLLBACK")
    state = inspect_slot(sql, created.name)
    assert state is not None
    assert (state.plugin, state.database) == ("pgoutput", any_database.name)
    assert state.confirmed_flush == created.consistent_point
    assert not state.temporary
    assert not state.lost
    assert state.active_pid is None
    assert state.restart_lsn is not None
    assert state.restart_lsn <= created.consistent_point
    assert 0 < state.retained_bytes < 1 << 24
    assert state.wal_status == ("reserved" if major(any_database) >= 13 else None)
    assert state.safe_wal_size is None


def test_create_slot_reports_blocking_transactions(
    any_database: Database, replication: Connection, sql: Connection
) -> None:
    reported: list[list[Blocker]] = []
    with connect(any_database.url(), application_name="till") as writer:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO public.t VALUES (7)")
        xid = writer.query("SELECT pg_catalog.txid_current()")[0][0]
        writer.execute("SELECT 'a secret'")

        def waiting(blockers: list[Blocker]) -> None:
            reported.append(blockers)
            if any(blocker.waited_for for blocker in blockers):
                writer.execute("COMMIT")

        created = create_slot(
            replication,
            slot_name("shop", NONCE),
            watcher=sql,
            waiting=waiting,
            report_interval_s=0.05,
        )
        named = next(blocker for blockers in reported for blocker in blockers if blocker.waited_for)
        assert named.pid == writer.backend_pid
        assert str(named.xid) == xid
        assert named.user == "postgres"
        assert named.state == "idle in transaction"
        assert f"server process {writer.backend_pid} (xid {xid}, application till" in str(named)
        assert "secret" not in f"{named} {named!r}"
    sql.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    sql.execute(f"SET TRANSACTION SNAPSHOT '{created.snapshot}'")
    assert sql.query("SELECT i FROM public.t") == [("7",)]


def test_blocking_transactions_of_idle_process_is_empty(
    replication: Connection, sql: Connection
) -> None:
    assert blocking_transactions(sql, replication.backend_pid) == []


def test_create_slot_cancelled_leaves_no_slot(
    any_database: Database, replication: Connection, sql: Connection
) -> None:
    stop = threading.Event()
    name = slot_name("shop", NONCE)
    with connect(any_database.url()) as writer:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO public.t VALUES (7)")
        with pytest.raises(TransientError, match="was cancelled"):
            create_slot(
                replication,
                name,
                watcher=sql,
                waiting=lambda _: stop.set(),
                report_interval_s=0.05,
                stop=stop,
            )
        terminate_holder(sql, name)
        drop_slot(sql, name, nonce=NONCE)
        assert inspect_slot(sql, name) is None


def test_temporary_slot_ends_with_its_connection(replication: Connection, sql: Connection) -> None:
    created = create_slot(replication, slot_name("shop", NONCE), temporary=True)
    state = inspect_slot(sql, created.name)
    assert state is not None
    assert state.temporary
    assert state.active_pid == replication.backend_pid
    assert terminate_holder(sql, created.name) == [replication.backend_pid]
    assert inspect_slot(sql, created.name) is None


def test_drop_slot_drops_own_slot_once_and_rejects_others(
    any_database: Database, replication: Connection, sql: Connection
) -> None:
    ours = create_slot(replication, slot_name("shop", NONCE), export=False)
    assert ours.snapshot is None
    other = create_slot(replication, slot_name("shop", "feed42"), export=False)
    assert {slot.name for slot in list_slots(sql, "shop")} == {ours.name, other.name}
    assert list_slots(sql, "shopping") == []
    with pytest.raises(SlotForeign, match="does not belong to this source"):
        drop_slot(sql, other.name, nonce=NONCE)
    assert drop_slot(sql, ours.name, nonce=NONCE)
    assert not drop_slot(sql, ours.name, nonce=NONCE)
    assert [slot.name for slot in list_slots(sql)] == [other.name]


def test_drop_slot_terminates_reader(
    any_database: Database, replication: Connection, sql: Connection
) -> None:
    created = create_slot(replication, slot_name("shop", NONCE))
    any_database.sql("CREATE PUBLICATION p FOR TABLE t")
    replication.send(
        f'START_REPLICATION SLOT "{created.name}" LOGICAL 0/0'
        " (proto_version '1', publication_names 'p')"
    )
    assert replication.receive(5) is not None
    state = inspect_slot(sql, created.name)
    assert state is not None
    assert state.active_pid == replication.backend_pid
    assert drop_slot(sql, created.name, nonce=NONCE)
    assert inspect_slot(sql, created.name) is None


@pytest.fixture(scope="module")
def tight_server() -> Iterator[PostgresServer]:
    """One that keeps little log, and lets transactions be prepared."""
    settings = {"fsync": "off", "min_wal_size": "32MB", "max_prepared_transactions": 2}
    if (installed() or 0) >= 13:
        settings["max_slot_wal_keep_size"] = "1MB"
    with PostgresServer(settings=settings) as server:
        server.sql("CREATE TABLE t (i integer)")
        yield server


def test_create_slot_reports_prepared_transaction(tight_server: PostgresServer) -> None:
    reported: list[Blocker] = []
    with (
        connect(tight_server.url(), replication=True) as replication,
        connect(tight_server.url()) as sql,
    ):
        sql.execute("BEGIN; INSERT INTO public.t VALUES (1); PREPARE TRANSACTION 'left behind'")

        def waiting(blockers: list[Blocker]) -> None:
            reported.extend(blockers)
            if any(blocker.waited_for for blocker in blockers):
                sql.execute("COMMIT PREPARED 'left behind'")

        create_slot(
            replication,
            slot_name("shop", NONCE),
            temporary=True,
            watcher=sql,
            waiting=waiting,
            report_interval_s=0.05,
        )
    assert [(blocker.pid, blocker.prepared) for blocker in reported] == [(None, "left behind")]
    assert "ROLLBACK PREPARED 'left behind';" in str(reported[0])


@pytest.mark.postgres(13)
def test_slot_beyond_wal_limit_is_lost(tight_server: PostgresServer) -> None:
    with (
        connect(tight_server.url(), replication=True) as replication,
        connect(tight_server.url()) as sql,
    ):
        created = create_slot(replication, slot_name("shop", NONCE))
        state = inspect_slot(sql, created.name)
        assert state is not None
        assert state.safe_wal_size is not None
        for _ in range(4):
            sql.execute("INSERT INTO public.t VALUES (1)")
            sql.execute("SELECT pg_catalog.pg_switch_wal()")
        sql.execute("CHECKPOINT")
        state = inspect_slot(sql, created.name)
        assert state is not None
        assert state.lost
        assert state.wal_status == "lost"
        assert state.invalidation_reason == "wal_removed"
