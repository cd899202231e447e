import os
import pickle
import socket
import threading
from pathlib import Path

import pytest

from penstock.errors import DefiniteError, TransientError, UsageError
from penstock.pgclient import (
    SETTINGS,
    connect,
    quote_identifier,
    quote_literal,
    server_error,
)
from penstock.servers.postgres import Database, PostgresServer
from penstock.servers.process import wait_until
from tests.fix_postgres import TlsServer, major

SECRET = "s3cret/pass@word:?"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the user's own libpq settings from the environment."""
    for name in list(os.environ):
        if name.startswith("PG"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def with_password(database: Database) -> Database:
    role = f"role_{database.name}"
    database.sql(f"CREATE ROLE {role} LOGIN PASSWORD {quote_literal(SECRET)}")
    yield database
    database.sql(f"DROP ROLE {role}")


def all_text(error: BaseException) -> str:
    """Return all text of an error and its causes, as a log shows it."""
    texts = []
    link: BaseException | None = error
    while link is not None:
        texts += [str(link), repr(link), *getattr(link, "__notes__", [])]
        link = link.__cause__ or link.__context__
    return "\n".join(texts)


@pytest.mark.parametrize("host", ["socket", "tcp"])
def test_connection_returns_values_as_text(database: Database, host: str) -> None:
    with connect(database.url(host=host)) as connection:
        assert connection.query("SELECT 1, NULL, $1::text, $2::bool", ["é", True]) == [
            ("1", None, "é", "t")
        ]
        assert connection.query("SELECT $1::int IS NULL", [None]) == [("t",)]
        assert connection.query("CREATE TABLE public.t (i int); SELECT 1; SELECT 2") == [("2",)]
        assert connection.query("SELECT i FROM public.t") == []
        assert connection.server_version // 10_000 == major(database)
        assert not connection.encrypted
        with pytest.raises(UsageError, match="float"):
            connection.query("SELECT $1", [1.5])
    assert connection.closed


@pytest.mark.parametrize("replication", [False, True])
def test_connection_settings_override_database_and_role_settings(
    database: Database, replication: bool
) -> None:
    unlike = {
        "DateStyle": "'German'",
        "IntervalStyle": "'iso_8601'",
        "TimeZone": "'Asia/Tokyo'",
        "extra_float_digits": "'-5'",
        "bytea_output": "'escape'",
        "search_path": "'public'",
        "statement_timeout": "'1h'",
        "quote_all_identifiers": "'on'",
    }
    for name, value in unlike.items():
        database.sql(f"ALTER DATABASE {database.name} SET {name} = {value}")
    url = database.url(options="-c IntervalStyle=sql_standard", client_encoding="LATIN1")
    with connect(url, replication=replication) as connection:
        for name, value in SETTINGS.items():
            ((setting,),) = connection.query(f"SELECT pg_catalog.current_setting('{name}')")
            assert setting == (value or '""')
        assert connection.query(
            "SELECT '1 day 2:00'::interval, '2020-01-02 3:04'::timestamptz, 0.1::float4, "
            "'\\x00ff'::bytea, 'é', 'pg_class'::regclass"
        ) == [("1 day 02:00:00", "2020-01-02 03:04:00+00", "0.1", "\\x00ff", "é", "pg_class")]


def test_connection_disables_timeouts_of_newer_servers(database18: Database) -> None:
    database18.sql(f"ALTER DATABASE {database18.name} SET transaction_timeout = '1h'")
    database18.sql(f"ALTER DATABASE {database18.name} SET idle_session_timeout = '1h'")
    with connect(database18.url()) as connection:
        assert connection.query("SHOW transaction_timeout") == [("0",)]
        assert connection.query("SHOW idle_session_timeout") == [("0",)]


def test_connection_receive_with_timeout_returns_none_until_result_arrives(
    database: Database,
) -> None:
    with connect(database.url()) as connection, connect(database.url()) as other:
        other.execute("SELECT pg_advisory_lock(7)")
        connection.send("SELECT 1 FROM pg_advisory_lock(7)")
        assert connection.receive(timeout_s=0.05) is None
        assert connection.receive(timeout_s=0) is None
        other.execute("SELECT pg_advisory_unlock(7)")
        assert connection.receive() == [("1",)]
        assert connection.query("SELECT 2") == [("2",)]


def test_connection_cancel_from_another_thread_raises_transient_error(database: Database) -> None:
    with connect(database.url()) as connection:
        connection.send("SELECT pg_sleep(60)")
        # The server ignores a cancel request that arrives before the query.
        wait_until(
            lambda: (
                database.sql(
                    "SELECT 1 FROM pg_stat_activity"
                    " WHERE wait_event = 'PgSleep' AND datname = current_database()"
                )
                == [(1,)]
            ),
            "the query to run",
        )
        canceller = threading.Thread(target=connection.cancel)
        canceller.start()
        with pytest.raises(TransientError) as raised:
            connection.receive()
        canceller.join()
        assert raised.value.sqlstate == "57014"
        assert connection.query("SELECT 1") == [("1",)]


def test_connection_statement_error_raises_definite_error_with_sqlstate(
    database: Database,
) -> None:
    with connect(database.url()) as connection:
        with pytest.raises(DefiniteError, match='relation "nix" does not exist') as raised:
            connection.query("SELECT * FROM nix")
        assert raised.value.sqlstate == "42P01"
        assert database.name in str(raised.value)
        assert "42P01" in raised.value.detail
        assert pickle.loads(pickle.dumps(raised.value)).sqlstate == "42P01"
        with pytest.raises(DefiniteError) as raised:
            connection.query("SELECT 1; SELECT 1/0; SELECT 2")
        assert raised.value.sqlstate == "22012"
        assert connection.query("SELECT 1") == [("1",)]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("42704", DefiniteError),
        ("55000", DefiniteError),
        ("22P02", DefiniteError),
        ("42501", TransientError),
        ("55006", TransientError),
        ("57P01", TransientError),
        ("53300", TransientError),
        ("28P01", TransientError),
        ("40P01", TransientError),
        ("", TransientError),
    ],
)
def test_server_error_kind_depends_on_sqlstate(code: str, kind: type[Exception]) -> None:
    error = server_error("here", {"C": code, "M": "no.", "D": "because", "H": "do"})
    assert type(error) is kind
    assert str(error) == "here reported: no"
    assert error.detail.startswith("Because. ")
    assert error.hint == "Do."


def test_terminated_connection_and_missing_server_raise_transient_error(
    postgres_server: PostgresServer,
) -> None:
    with connect(postgres_server.url()) as connection, connect(postgres_server.url()) as other:
        other.query("SELECT pg_terminate_backend($1)", [connection.backend_pid])
        with pytest.raises(TransientError, match="administrator") as raised:
            connection.query("SELECT 1")
        assert raised.value.sqlstate == "57P01"
        with pytest.raises(TransientError, match="lost the connection"):
            connection.query("SELECT 1")
    with pytest.raises(TransientError, match="could not connect"):
        connect({"host": "/nowhere", "dbname": "x", "user": "x"})


def test_connection_uses_password_and_never_reveals_it(with_password: Database) -> None:
    role = f"role_{with_password.name}"
    url = with_password.url(user=role, password=SECRET, host="tcp")
    with connect(url) as connection:
        assert connection.query("SELECT current_user") == [(role,)]
        assert connection.pgconn.used_password
        assert SECRET not in repr(connection)
        with pytest.raises(DefiniteError) as refused:
            connection.query(f"SELECT * FROM {quote_identifier(SECRET)}")
        assert SECRET not in all_text(refused.value)
        assert "********" in all_text(refused.value)
    wrong = "wr0ng"
    with pytest.raises(TransientError, match="could not connect") as raised:
        connect(with_password.url(user=role, password=wrong, host="tcp"))
    assert wrong not in all_text(raised.value)
    assert "authentication failed" in raised.value.detail
    assert "28P01" not in raised.value.detail
    assert ".c:" not in raised.value.detail
    assert raised.value.sqlstate == "28P01"


def test_connect_to_missing_database_raises_transient_error_with_sqlstate(
    postgres_server: PostgresServer,
) -> None:
    with pytest.raises(TransientError) as raised:
        connect(postgres_server.url(database="missing"))
    assert raised.value.sqlstate == "3D000"
    assert 'database "missing" does not exist' in raised.value.detail


def test_connect_obeys_connect_timeout_of_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PGCONNECT_TIMEOUT", "1")
        with pytest.raises(TransientError, match="could not connect") as raised:
            connect({"host": "127.0.0.1", "port": str(silent.getsockname()[1]), "user": "x"})
    assert raised.value.detail == "The connect timeout expired."


@pytest.mark.parametrize(
    "where",
    [
        f"postgresql://u:{SECRET}@host/db",
        "postgresql://u:s3cret@pass@host/db",
        f"host=x password='{SECRET}",
        f"host=x {SECRET}",
        f"postgresql://host/db?{SECRET}=1",
        {"host": "x", SECRET: "y"},
    ],
    ids=range(6),
)
def test_connect_with_invalid_parameters_raises_usage_error_without_secret(
    where: str | dict[str, str],
) -> None:
    with pytest.raises(UsageError) as raised:
        connect(where)
    for part in ("s3cret", "pass@", "word"):
        assert part not in all_text(raised.value).replace("password", "")


def test_connect_uses_password_file(
    with_password: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = f"role_{with_password.name}"
    file = tmp_path / "passwords"
    file.write_text(f"127.0.0.1:*:*:{role}:{SECRET.replace(':', chr(92) + ':')}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    with connect(with_password.url(user=role, host="tcp")) as connection:
        assert connection.pgconn.used_password
        with pytest.raises(DefiniteError) as refused:
            connection.query(f"SELECT * FROM {quote_identifier(SECRET)}")
        assert SECRET not in all_text(refused.value)


def test_connect_uses_environment_variables_and_service_file(
    with_password: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "host": "127.0.0.1",
        "port": str(with_password.server.port),
        "dbname": with_password.name,
        "user": f"role_{with_password.name}",
        "password": SECRET,
    }
    services = tmp_path / "services"
    services.write_text("[shop]\n" + "".join(f"{key}={value}\n" for key, value in settings.items()))
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    for where in ("service=shop", {"service": "shop"}):
        with connect(where) as connection:
            assert connection.query("SELECT current_database()") == [(with_password.name,)]
    for key, value in settings.items():
        monkeypatch.setenv(f"PG{'DATABASE' if key == 'dbname' else key.upper()}", value)
    with connect("") as connection:
        assert connection.query("SELECT current_database()") == [(with_password.name,)]


def test_connection_sets_application_name_unless_configured(database: Database) -> None:
    with connect(database.url(), application_name="penstock shop") as connection:
        assert connection.query("SHOW application_name") == [("penstock shop",)]
    with connect(database.url(application_name="mine")) as connection:
        assert connection.query("SHOW application_name") == [("mine",)]


def test_replication_connection_runs_commands_and_rejects_parameters(
    database: Database,
) -> None:
    with connect(database.url(), replication=True) as connection:
        ((system, timeline, _, name),) = connection.query("IDENTIFY_SYSTEM")
        assert (timeline, name) == ("1", database.name)
        assert system == str(
            database.sql("SELECT system_identifier FROM pg_control_system()")[0][0]
        )
        with pytest.raises(UsageError, match="no parameters"):
            connection.query("SELECT $1", ["x"])


def test_connect_verifies_server_certificate_and_host_name(tls_server: TlsServer) -> None:
    with connect(tls_server.parameters()) as connection:
        assert connection.encrypted
        assert connection.query("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()") == [
            ("t",)
        ]
    with pytest.raises(TransientError) as raised:
        connect(tls_server.parameters(sslrootcert=str(tls_server.other_authority)))
    assert "certificate verify failed" in raised.value.detail
    with pytest.raises(TransientError) as raised:
        connect(tls_server.parameters(host="elsewhere"))
    assert "elsewhere" in raised.value.detail
    assert tls_server.server.password not in all_text(raised.value)


def test_connect_authenticates_with_client_certificate(tls_server: TlsServer) -> None:
    where = tls_server.parameters(user="by_certificate")
    del where["password"]
    with pytest.raises(TransientError, match="could not connect"):
        connect(where)
    ours = {"sslcert": str(tls_server.certificate), "sslkey": str(tls_server.key)}
    with connect({**where, **ours}) as connection:
        assert connection.query("SELECT current_user") == [("by_certificate",)]
