"""Configuration of a Postgres source: parsing and redaction."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError, similar
from penstock.sources.postgres.config import PostgresConfig, TableSpec, render_url
from penstock.sources.postgres.names import TableName, identifier

names = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=15
)
SECRET = "s3cr3t/@:%word"
URL = "postgresql://me:s3cr3t%2F%40%3A%25word@db.example:6432/shop?sslmode=require"


def test_postgres_config_parses_url_tables_and_publication() -> None:
    config = PostgresConfig.parse(
        {
            "url": URL,
            "publication": "penstock",
            "tables": [
                "public.orders",
                {"name": "customers", "exclude": ["photo"], "text": ["odd"]},
            ],
        }
    )
    assert config.parameters == {
        "user": "me",
        "password": SECRET,
        "host": "db.example",
        "port": "6432",
        "dbname": "shop",
        "sslmode": "require",
    }
    assert config.tables == (
        TableSpec(TableName("public", "orders")),
        TableSpec(TableName("public", "customers"), exclude=("photo",), text=("odd",)),
    )
    assert config.publication == "penstock"
    assert config.spec_of(TableName("public", "orders")) == config.tables[0]
    assert config.spec_of(TableName("public", "other")) is None


def test_postgres_config_with_connection_parameters_equals_url() -> None:
    said = {"host": "db.example", "port": 6432, "dbname": "shop", "user": "me", "password": SECRET}
    config = PostgresConfig.parse({"connection": {**said, "sslmode": "require"}})
    assert config.parameters == PostgresConfig.parse({"url": URL}).parameters
    assert config.tables is None
    assert config.spec_of(TableName("a", "b")) == TableSpec(TableName("a", "b"))


def test_postgres_config_repr_contains_no_secret() -> None:
    config = PostgresConfig.parse({"url": URL})
    assert SECRET not in repr(config)
    assert "s3cr3t" not in repr(config)
    assert config.where == "postgresql://me@db.example:6432/shop"
    assert render_url({"service": "shop"}) == "postgresql://service=shop/"


def test_postgres_config_survives_pickle() -> None:
    config = PostgresConfig.parse({"url": URL, "tables": ["t"]})
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("section", "message", "hint"),
    [
        ({}, "either a url or a connection", "postgresql://user@host/database"),
        ({"url": "x", "connection": {}}, "either a url or a connection", ""),
        ({"url": "postgresql://me:s3cr3t@[db"}, "cannot be understood", "%40"),
        ({"url": "password=s3cr3t host"}, "cannot be understood", ""),
        ({"url": 7}, "not text", "postgresql://"),
        ({"connection": {"hots": "db"}}, '"hots"', '"host"'),
        ({"connection": ["db"]}, "not a mapping", "dbname"),
        ({"connection": {"zzzzzz": "s3cr3t"}}, '"zzzzzz"', "sslmode"),
        ({"url": "dbname=x replication=database"}, "replication", "Leave"),
        ({"url": "dbname=x", "tables": "t"}, "not a list", "[public.orders"),
        ({"url": "dbname=x", "tables": []}, "has no tables", "leave tables out"),
        ({"url": "dbname=x", "tables": [7]}, "table 7", "public.orders"),
        ({"url": "dbname=x", "tables": ["a.b.c"]}, '"a.b.c"', '"odd.schema"'),
        ({"url": "dbname=x", "tables": ["t", "public.t"]}, "public.t is named twice", "one"),
        ({"url": "dbname=x", "tables": [{"name": "t", "exlude": []}]}, '"exlude"', '"exclude"'),
        ({"url": "dbname=x", "tables": [{"name": "t", "text": "c"}]}, '"text"', "text: [photo]"),
        (
            {"url": "dbname=x", "tables": [{"name": "t", "text": ["c"], "exclude": ["c"]}]},
            'column "c" of table public.t is both',
            "one of",
        ),
        ({"url": "dbname=x", "publicaton": "p"}, '"publicaton"', '"publication"'),
        ({"url": "dbname=x", "publication": ""}, "0 bytes", "1 to 63"),
        ({"url": "dbname=x", "publication": 1}, "not text", "name"),
        ({"url": "dbname=x", "slot_warning": "1GB"}, '"slot_warning"', "a number of bytes"),
        ({"url": "dbname=x", "slot_warning": 0}, "slot_warning is 0", "from 1 on"),
        ({"url": "dbname=x", "snapshot_tasks": 0}, "snapshot_tasks is 0", "from 1 on"),
        ({"url": "dbname=x", "snapshot_tasks": True}, '"snapshot_tasks"', "a number"),
    ],
)
def test_postgres_config_with_invalid_value_raises_usage_error_with_hint(
    section: dict[str, object], message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as refused:
        PostgresConfig.parse(section)
    error = refused.value
    assert message in str(error)
    assert error.hint
    assert hint in error.hint
    assert "s3cr3t" not in f"{error}{error.detail}{error.hint}"
    chained = (error.__cause__, error.__context__)
    assert "s3cr3t" not in repr(chained)


@pytest.mark.parametrize(
    ("text", "schema", "name"),
    [
        ("orders", "public", "orders"),
        ("shop.orders", "shop", "orders"),
        ("shop.Orders", "shop", "Orders"),
        ('"shop"."Orders"', "shop", "Orders"),
        ('"a.b"."c""d"', "a.b", 'c"d'),
        ('shop."a b"', "shop", "a b"),
        (" shop . orders ", "shop", "orders"),
        ("größe.maß", "größe", "maß"),
    ],
)
def test_table_name_parses_schema_and_quotes(text: str, schema: str, name: str) -> None:
    assert TableName.parse(text) == TableName(schema, name)


@pytest.mark.parametrize(
    "text", ["", ".", "a.", ".a", "a..b", '"a', 'a"b"', '""', "a.b.c", '"a"b', "x" * 64, "a\0b"]
)
def test_table_name_with_invalid_text_raises_usage_error(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        TableName.parse(text)
    assert refused.value.hint


@given(schema=names, name=names)
def test_table_name_text_round_trips(schema: str, name: str) -> None:
    table = TableName(schema, name)
    assert TableName.parse(str(table)) == table


def test_identifier_is_quoted_only_if_necessary() -> None:
    shown_as = {"orders": "orders", "Orders": '"Orders"', "user": '"user"', 'a"b': '"a""b"'}
    assert {name: identifier(name) for name in shown_as} == shown_as


def test_similar_returns_closest_name_first() -> None:
    assert similar("Photo", ["phone", "photo", "id"])[0] == "photo"
    assert similar("zzz", ["photo"]) == []
