"""Open of the Postgres connector: older sessions are terminated, fenced or reported."""

import threading
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any, cast

import psycopg
import pytest

from penstock.connectors.postgres import connector, session
from penstock.connectors.postgres.connector import PostgresEndpoint
from penstock.connectors.postgres.identity import EndpointIdentity
from penstock.connectors.postgres.older_sessions import SessionNames
from penstock.connectors.postgres.session import PostgresSession
from penstock.errors import Fenced, PenstockError, TransientError
from penstock.protocol.key_range import WHOLE, KeyRange
from penstock.sdk import Refused
from penstock.servers.postgres import Database, PostgresServer
from tests.connectors.connector_client import (
    ConnectorClient,
    Row,
    TableBinding,
    collection,
    commit,
    loaded,
    projection,
)

THINGS = TableBinding(
    collection(projection("id", "integer", must=True), projection("s", "string")), document=False
)
LOWER, UPPER = WHOLE.split()


@pytest.fixture
def client(database: Database) -> ConnectorClient:
    made = ConnectorClient(connector(), {"url": database.url()})
    made.apply("v1", THINGS)
    return made


def checkpoints(database: Database) -> list[tuple[Any, ...]]:
    return database.sql("SELECT key_begin, fence, checkpoint FROM flow_checkpoints_v1 ORDER BY 1")


def test_open_returns_last_committed_checkpoint(client: ConnectorClient) -> None:
    with client.open("v1", THINGS) as (writer, [things]):
        commit(writer, things, [Row((1,), ("a",))], b"one")
        commit(writer, things, [], b"two")
    with client.open("v1", THINGS) as (writer, _):
        assert writer.checkpoint == b"two"
    with client.open("v1", THINGS, key_range=LOWER) as (writer, _):
        assert writer.checkpoint == b"two"


def test_open_terminates_zombie_session_that_is_committing(
    database: Database, client: ConnectorClient
) -> None:
    with client.open("v1", THINGS) as (zombie, [things]):
        commit(zombie, things, [Row((1,), ("old",))], b"before")
        with psycopg.connect(database.url()) as other:
            # The lock blocks the zombie after its checkpoint and stores, before its COMMIT.
            other.execute("SELECT FROM things WHERE id = 1 FOR UPDATE")
            raised: list[Exception] = []
            thread = threading.Thread(target=caught, args=(raised, zombie, things))
            thread.start()
            until(lambda: bool(waiting(database)))
            [(pid,)] = waiting(database)

            with client.open("v1", THINGS) as (writer, [things]):
                thread.join()
                assert isinstance(raised[0], Fenced)
                assert writer.checkpoint == b"before"
                assert (pid,) not in database.sql("SELECT pid FROM pg_stat_activity")
                other.rollback()
                assert loaded(writer, things, [(1,), (2,)]) == [{"id": 1, "s": "old"}]
                commit(writer, things, [Row((2,), ("newer",))], b"after")

    assert database.sql("SELECT id, s FROM things ORDER BY id") == [(1, "old"), (2, "newer")]


def caught(raised: list[Exception], writer, binding) -> None:
    try:
        commit(writer, binding, [Row((2,), ("zombie",)), Row((1,), ("zombie",), exists=True)])
    except PenstockError as error:
        raised.append(error)


def waiting(database: Database) -> list[tuple[int]]:
    return database.sql(
        "SELECT pid FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )


def until(holds: Callable[[], bool]) -> None:
    """Wait without limit; the timeout of the test ends the wait."""
    while not holds():
        pass


def test_open_terminates_zombie_that_locks_its_fence_row(
    database: Database, client: ConnectorClient
) -> None:
    """A process stopped between its last statement and COMMIT still locks the row."""
    with client.open("v1", THINGS) as (zombie, _):
        name = database.sql(
            "SELECT application_name FROM pg_stat_activity "
            "WHERE application_name LIKE 'penstock:%' AND datname = current_database()"
        )[0][0]
        with psycopg.connect(database.url(), application_name=name) as stopped:
            stopped.execute("UPDATE flow_checkpoints_v1 SET checkpoint = 'em9tYmll'")
            with client.open("v1", THINGS) as (writer, _):
                assert writer.checkpoint == zombie.checkpoint
            with pytest.raises(psycopg.OperationalError):
                stopped.commit()
            stopped.close()


def test_open_leaves_siblings_and_other_materializations_running(
    database: Database, client: ConnectorClient
) -> None:
    other = ConnectorClient(client.connector, client.endpoint, "another")
    elsewhere = ConnectorClient(client.connector, {**client.endpoint, "schema": "elsewhere"})
    theirs = TableBinding(THINGS.collection, "theirs", document=False)
    other.apply("v1", theirs)
    elsewhere.apply("v1", THINGS)
    with (
        other.open("v1", theirs) as (of_another, [others]),
        elsewhere.open("v1", THINGS) as (of_elsewhere, [far]),
        client.open("v1", THINGS, key_range=LOWER) as (lower, [things]),
        client.open("v1", THINGS, key_range=UPPER) as (upper, _),
    ):
        commit(of_another, others, [Row((1,), ("a",))])
        commit(of_elsewhere, far, [Row((1,), ("a",))])
        commit(lower, things, [Row((1,), ("a",))])
        commit(upper, things, [Row((2,), ("b",))])
        with client.open("v1", THINGS, key_range=KeyRange(0, 5)), pytest.raises(Fenced):
            commit(lower, things, [Row((3,), ("zombie",))])
        commit(upper, things, [Row((4,), ("d",))])
        commit(of_another, others, [Row((2,), ("b",))])

    assert database.sql("SELECT id FROM things ORDER BY id") == [(1,), (2,), (4,)]


def test_open_names_locking_session_it_may_not_terminate(
    database: Database, client: ConnectorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LOCK_TIMEOUT_S", 1)
    database.sql(
        "DROP ROLE IF EXISTS small; CREATE ROLE small LOGIN; "
        "GRANT ALL ON ALL TABLES IN SCHEMA public TO small"
    )
    small = ConnectorClient(connector(), {"url": database.url(user="small")})
    with client.open("v1", THINGS), psycopg.connect(database.url()) as older:
        older.execute("UPDATE flow_checkpoints_v1 SET fence = fence")
        [(pid,)] = older.execute("SELECT pg_backend_pid()").fetchall()
        with (
            pytest.raises(PenstockError, match="locks the fence") as found,
            small.open("v1", THINGS),
        ):
            pass
        assert str(pid) in found.value.detail
        older.rollback()
        with small.open("v1", THINGS) as (writer, [things]):
            commit(writer, things, [Row((1,), ("a",))])
    database.sql("DROP OWNED BY small; DROP ROLE small")


def test_zombie_that_is_not_terminated_cannot_commit(
    database: Database, client: ConnectorClient
) -> None:
    with client.open("v1", THINGS) as (zombie, [things]):
        # Simulate a session of another role, which `pg_stat_activity` hides.
        zombie._session.connection.execute("SET application_name = 'hidden'")  # type: ignore[attr-defined]
        with client.open("v1", THINGS) as (writer, [others]):
            commit(writer, others, [Row((1,), ("new",))], b"new")
            with pytest.raises(Fenced, match="is fenced"):
                commit(zombie, things, [Row((1,), ("old",)), Row((2,), ("old",))], b"old")
            commit(writer, others, [Row((3,), ("new",))], b"newer")

    assert database.sql("SELECT id, s FROM things ORDER BY id") == [(1, "new"), (3, "new")]
    assert checkpoints(database) == [(0, 2, "bmV3ZXI=")]


def test_session_ended_by_a_newer_stream_that_has_closed_is_fenced(
    database: Database, client: ConnectorClient
) -> None:
    with client.open("v1", THINGS) as (zombie, [things]):
        with client.open("v1", THINGS) as (writer, [others]):
            commit(writer, others, [Row((1,), ("new",))], b"new")
        until(lambda: sessions(database) == 0)
        with pytest.raises(Fenced, match="is fenced"):
            commit(zombie, things, [Row((2,), ("old",))], b"old")
    assert database.sql("SELECT id, s FROM things") == [(1, "new")]


def sessions(database: Database) -> int:
    [(count,)] = database.sql(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE application_name LIKE 'penstock:%' AND datname = current_database()"
    )
    return int(count)


def test_commit_after_session_ended_by_administrator_is_not_fenced(
    database: Database, client: ConnectorClient
) -> None:
    with client.open("v1", THINGS) as (writer, [things]):
        database.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name LIKE 'penstock:%' AND datname = current_database()"
        )
        with pytest.raises(PenstockError) as found:
            commit(writer, things, [Row((1,), ("a",))])
        assert not isinstance(found.value, Fenced)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("WHERE false", "dropped and created again"),
        ("", "dropped and created again"),
        (None, "was dropped while"),
    ],
    ids=["empty", "copied", "dropped"],
)
def test_commit_after_fence_table_was_replaced_is_rejected(
    database: Database, client: ConnectorClient, rows: str | None, message: str
) -> None:
    with client.open("v1", THINGS) as (writer, [things]):
        commit(writer, things, [Row((1,), ("a",))], b"one")
        database.sql("ALTER TABLE flow_checkpoints_v1 RENAME TO earlier")
        if rows is not None:
            database.sql(f"CREATE TABLE flow_checkpoints_v1 AS SELECT * FROM earlier {rows}")
        database.sql("DROP TABLE earlier")
        with pytest.raises(Refused, match=message) as raised:
            commit(writer, things, [Row((2,), ("b",))], b"two")
    assert database.name in str(raised.value)
    assert "backfill" in raised.value.hint
    assert database.sql("SELECT id FROM things") == [(1,)]


def test_lost_session_of_replaced_fence_table_is_no_fence(
    database: Database, client: ConnectorClient
) -> None:
    with client.open("v1", THINGS) as (writer, [things]):
        database.sql("ALTER TABLE flow_checkpoints_v1 RENAME TO earlier")
        database.sql("CREATE TABLE flow_checkpoints_v1 (LIKE earlier)")
        database.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name LIKE 'penstock:%' AND datname = current_database()"
        )
        with pytest.raises(PenstockError) as found:
            commit(writer, things, [Row((1,), ("a",))])
        assert not isinstance(found.value, Fenced)


class Answering:
    """Fake session that answers the identity query."""

    server = 'database "shop"'

    def __init__(self, system: int | None, database: int, table: int | None) -> None:
        self.row = (system, database, table)

    def query(self, text: str, parameters: object = None) -> list[tuple[Any, ...]]:
        return [(True,)] if "has_function_privilege" in text else [self.row]


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ((2, 5, 6), 'database "shop" was replaced by a database of another server while a stream'),
        ((2, 7, 8), 'database "shop" was replaced by a database of another server while a stream'),
        ((1, 7, 6), 'database "shop" was dropped and created again while a stream'),
        ((None, 7, 8), 'database "shop" was dropped and created again while a stream'),
        ((1, 5, None), 'table "f" of database "shop" was dropped while a stream'),
        ((1, 5, 8), 'table "f" of database "shop" was dropped and created again while a stream'),
        ((1, 5, 6), None),
        ((None, 5, 6), None),
    ],
)
def test_identity_of_another_endpoint_is_rejected_by_name(
    now: tuple[int | None, int, int | None], message: str | None
) -> None:
    opened = EndpointIdentity('"f"', 1, 5, 6)
    answering = cast("PostgresSession", Answering(*now))
    with nullcontext() if message is None else pytest.raises(Refused, match=f"^{message}"):
        opened.check(answering)


def test_identity_without_a_readable_system_compares_database_and_table() -> None:
    opened = EndpointIdentity('"f"', None, 5, 6)
    opened.check(cast("PostgresSession", Answering(2, 5, 6)))
    with pytest.raises(Refused, match="created again"):
        opened.check(cast("PostgresSession", Answering(2, 5, 7)))


@pytest.mark.parametrize("readable", [False, True])
@pytest.mark.parametrize("part", ["", "system", "database", "table"])
def test_condition_of_an_identity_holds_in_its_endpoint_alone(
    database: Database, client: ConnectorClient, readable: bool, part: str
) -> None:
    path = '"public"."flow_checkpoints_v1"'
    server = PostgresEndpoint.model_validate({"url": database.url()}).server()
    with closing(PostgresSession(server)) as reader:
        found = EndpointIdentity.read(reader, path)
        assert found.system is not None
        parts: dict[str, Any] = {part: 1} if part else {}
        changed = replace(found, **parts)
        if not readable:
            changed = replace(changed, system=None)
        text, parameters = changed.condition()
        expected = not part or (part == "system" and not readable)
        assert reader.query(f"SELECT {text}", parameters) == [(expected,)]


def test_identity_read_by_a_role_without_privilege_has_no_system_identifier(
    database: Database, client: ConnectorClient
) -> None:
    path = '"public"."flow_checkpoints_v1"'
    database.sql(
        "DROP ROLE IF EXISTS restricted; CREATE ROLE restricted LOGIN; "
        "REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC"
    )
    found = []
    for user in (None, "restricted"):
        url = database.url() if user is None else database.url(user=user)
        where = PostgresEndpoint.model_validate({"url": url}).server()
        with closing(PostgresSession(where)) as reader:
            found.append(EndpointIdentity.read(reader, path))
    assert found[0].system is not None
    assert found[1] == replace(found[0], system=None)
    database.sql("DROP ROLE restricted")


def test_session_name_gives_the_range_of_its_own_materialization() -> None:
    names, other = SessionNames("public", "m"), SessionNames("public", "n")
    assert names.range_of(names.of(LOWER)) == LOWER
    assert names.range_of(names.of(WHOLE)) == WHOLE
    assert names.range_of(other.of(LOWER)) is None
    assert names.range_of(names.prefix) is None
    assert SessionNames("other", "m").prefix != names.prefix != other.prefix
    assert len(names.of(WHOLE)) < 64  # Postgres truncates longer names.


# Address and login.


@pytest.mark.parametrize(
    "endpoint",
    [
        {},
        {"url": "postgresql://h/d", "host": "h"},
        {"url": "postgresql://h/d", "password": "pw"},
        {"host": "h", "schema": ""},
        {"host": "h", "port": 0},
    ],
    ids=["nothing", "both", "a password beside", "no schema", "no port"],
)
def test_endpoint_with_missing_or_conflicting_address_is_rejected(endpoint: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"url|schema|port"):
        PostgresEndpoint.model_validate(endpoint)


def test_connection_errors_and_repr_do_not_contain_password(
    postgres_server: PostgresServer,
) -> None:
    secret = "s3cr%40t/pässword"
    by_url = PostgresEndpoint(
        url=postgres_server.url(password=secret, host="tcp", user="nobody")  # type: ignore[arg-type]
    )
    by_parts = PostgresEndpoint(
        host="127.0.0.1",
        port=postgres_server.port,
        user="nobody",
        password=secret,  # type: ignore[arg-type]
        database="postgres",
    )
    broken = PostgresEndpoint(url=f"postgresql://me:{secret}@[::1/db")  # type: ignore[arg-type]
    for endpoint in (by_url, by_parts, broken):
        with pytest.raises(PenstockError) as found, connector().session(endpoint, touch=False):
            pass
        error = found.value
        shown = f"{endpoint!r} {error!r} {error.detail} {error.hint} {error.__cause__!r}"
        assert "pässword" not in shown
        assert "s3cr" not in shown
        if endpoint is not broken:
            assert "127.0.0.1" in str(error)
            assert endpoint.server().parameters["password"] not in repr(endpoint.server())


@pytest.mark.parametrize("step", ["validate", "apply", "open"])
@pytest.mark.parametrize(
    ("role", "password", "dbname", "code"),
    [
        ("small", "wrong", None, "28P01"),
        ("nobody", "any", None, "28P01"),
        ("small", "right", "nowhere", "3D000"),
    ],
    ids=["password", "role", "database"],
)
def test_rejected_login_is_permanent(
    database: Database,
    client: ConnectorClient,
    step: str,
    role: str,
    password: str,
    dbname: str | None,
    code: str,
) -> None:
    database.sql("CREATE ROLE small LOGIN PASSWORD 'right'")
    try:
        url = database.server.url(
            user=role, password=password, database=dbname or database.name, host="tcp"
        )
        rejected = ConnectorClient(connector(), {"url": url})
        steps = {
            "validate": lambda: rejected.validate(THINGS),
            "apply": lambda: rejected.apply("v2", THINGS),
            "open": lambda: rejected.open("v1", THINGS).__enter__(),
        }
        with pytest.raises(Refused, match="rejected the login") as raised:
            steps[step]()
    finally:
        database.sql("DROP ROLE small")
    assert code in raised.value.detail
    assert raised.value.hint


def test_server_that_is_down_is_transient(database: Database) -> None:
    url = database.url(host="tcp").replace(f":{database.server.port}/", ":1/")
    with pytest.raises(TransientError, match="could not connect"):
        ConnectorClient(connector(), {"url": url}).validate(THINGS)


def test_open_of_version_that_was_not_applied_leaves_running_stream(
    client: ConnectorClient,
) -> None:
    with client.open("v1", THINGS) as (writer, [things]):
        with pytest.raises(Refused, match='version "v2"'), client.open("v2", THINGS):
            pass
        commit(writer, things, [Row((1,), ("a",))])
