import pytest

from penstock.errors import UsageError
from penstock.pgclient import parse_conninfo, redact
from penstock.pgclient.conninfo import per_host


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u:p@ss@host/db",
        "postgresql://u:1/2@host/db",
        "postgresql://u:p?s@s@host/db",
        "postgresql://u@host/d@b",
    ],
)
def test_parse_conninfo_of_unescaped_password_raises_usage_error(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_conninfo(text)
    assert "%40" in raised.value.hint


def test_parse_conninfo_decodes_escaped_characters() -> None:
    parameters = parse_conninfo("postgresql://u%40x:p%40%2Fss@host:1/d%40b?sslmode=disable")
    assert parameters == {
        "user": "u@x",
        "password": "p@/ss",
        "host": "host",
        "port": "1",
        "dbname": "d@b",
        "sslmode": "disable",
    }


def test_per_host_pairs_each_host_with_its_port() -> None:
    attempts = per_host({"host": "a,b", "port": "1,2", "user": "u"})
    assert attempts == [
        {"host": "a", "port": "1", "user": "u"},
        {"host": "b", "port": "2", "user": "u"},
    ]
    assert per_host({"host": "a,b", "port": "1"}) == [
        {"host": "a", "port": "1"},
        {"host": "b", "port": "1"},
    ]
    assert per_host({}) == [{}]


def test_redact_replaces_longest_secret_first() -> None:
    assert redact("secret1 and secret", ["secret", "", "secret1"]) == "******** and ********"
