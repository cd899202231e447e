"""Transactor of the Postgres connector: store, load and commit."""

import base64
import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.connectors.postgres import connector, transactor
from penstock.connectors.postgres.connector import PostgresResource
from penstock.data.packed import pack_row
from penstock.errors import PenstockError
from penstock.protocol.errors import RemoteProtocolError
from penstock.sdk import Binding, Keys, Refused, Transactor
from penstock.servers.postgres import Database
from tests.connectors.connector_client import (
    ConnectorClient,
    Row,
    TableBinding,
    collection,
    commit,
    documents,
    loaded,
    projection,
)

THINGS = collection(
    projection("id", "integer", must=True), projection("n", "number"), projection("s", "string")
)
ID_N_S = TableBinding(THINGS, fields=("n", "s"))
SOFT = TableBinding(THINGS, fields=("n", "s"), options={"delete": "soft"})


@pytest.fixture
def client(database: Database) -> ConnectorClient:
    return ConnectorClient(connector(), {"url": database.url()})


def row(key: int, s: str, *, exists: bool = False) -> Row:
    return Row((key,), (key / 4, s), {"id": key, "s": s}, exists)


def test_store_of_new_documents_inserts_rows(database: Database, client: ConnectorClient) -> None:
    client.apply("v1", ID_N_S)
    with client.open("v1", ID_N_S) as (writer, [things]):
        commit(writer, things, [row(key, f"text {key}") for key in range(10)])

    rows = database.sql("SELECT id, n, s, flow_document::text FROM things ORDER BY id")
    assert rows == [
        (key, key / 4, f"text {key}", json.dumps({"id": key, "s": f"text {key}"}))
        for key in range(10)
    ]


@pytest.mark.parametrize("exists", [False, True], ids=["flagged as new", "flagged as existing"])
def test_store_with_wrong_exists_flag_upserts_rows(
    database: Database, client: ConnectorClient, exists: bool
) -> None:
    client.apply("v1", ID_N_S)
    with client.open("v1", ID_N_S) as (writer, [things]):
        commit(writer, things, [row(key, "old") for key in range(0, 10, 2)])
        commit(writer, things, [row(key, "new", exists=exists) for key in range(10)])

    assert database.sql("SELECT id, s FROM things ORDER BY id") == [(k, "new") for k in range(10)]


def test_store_of_new_rows_after_existing_row_in_small_chunks_keeps_all_rows(
    database: Database, client: ConnectorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactor, "WAITING_BYTES", 1)
    client.apply("v1", ID_N_S)
    with client.open("v1", ID_N_S) as (writer, [things]):
        commit(writer, things, [row(4, "old")])
        commit(writer, things, [row(key, "new") for key in range(10)])
        commit(writer, things, [row(key, "newest") for key in range(10, 20)])

    assert database.sql("SELECT id, s FROM things ORDER BY id") == [
        (key, "new" if key < 10 else "newest") for key in range(20)
    ]


def test_store_of_deletes_removes_rows(database: Database, client: ConnectorClient) -> None:
    client.apply("v1", ID_N_S)
    deletes = [Row((key,), (None, None), None, key != 7, delete=True) for key in (1, 7, 99)]
    with client.open("v1", ID_N_S) as (writer, [things]):
        commit(writer, things, [row(1, "a"), row(2, "b"), row(7, "c")])
        commit(writer, things, [*deletes, row(3, "d")])
        assert loaded(writer, things, [(1,), (2,), (3,), (7,)]) == [
            {"id": 2, "s": "b"},
            {"id": 3, "s": "d"},
        ]

    assert database.sql("SELECT id FROM things ORDER BY id") == [(2,), (3,)]


def test_two_tables_of_a_stream_are_loaded_updated_and_deleted_in_one_transaction(
    database: Database, client: ConnectorClient
) -> None:
    table_bindings = (ID_N_S, replace(ID_N_S, table="others"))
    client.apply("v1", *table_bindings)
    with client.open("v1", *table_bindings) as (writer, tables):
        first = [[row(1, f"{table.index}a"), row(2, f"{table.index}b")] for table in tables]
        delete = Row((2,), (None, None), None, exists=True, delete=True)
        second = [[row(1, f"{table.index}c", exists=True), delete] for table in tables]
        for rows in (first, second):
            writer.store(documents(*pair) for pair in zip(tables, rows, strict=True))
            writer.start_commit(b"checkpoint")
        keys = [Keys(table, pa.array([pack_row((1,)), pack_row((2,))])) for table in tables]
        loaded_texts = [
            (batch.binding.index, json.loads(document)["s"])
            for batch in writer.load(iter(keys))
            for document in batch.docs_json.to_pylist()
        ]
    assert loaded_texts == [(0, "0c"), (1, "1c")]
    for index, table in enumerate(("things", "others")):
        assert database.sql(f"SELECT id, s FROM {table}") == [(1, f"{index}c")]


def test_postgres_soft_deleted_rows_are_marked_and_not_loaded(
    database: Database, client: ConnectorClient
) -> None:
    client.apply("v1", SOFT)
    with client.open("v1", SOFT) as (writer, [things]):
        commit(writer, things, [row(1, "a"), row(2, "b")])
        commit(writer, things, [Row((1,), (None, None), None, exists=True, delete=True)])
        assert database.sql("SELECT id, s, flow_deleted FROM things ORDER BY id") == [
            (1, "a", True),
            (2, "b", False),
        ]
        assert loaded(writer, things, [(1,), (2,)]) == [{"id": 2, "s": "b"}]
        commit(writer, things, [row(1, "back")])

    assert database.sql("SELECT id, s, flow_deleted FROM things ORDER BY id") == [
        (1, "back", False),
        (2, "b", False),
    ]


def test_postgres_truncating_store_and_new_rows_commit_in_one_transaction(
    database: Database, client: ConnectorClient
) -> None:
    client.apply("v1", SOFT)
    with client.open("v1", SOFT) as (writer, [things]):
        commit(writer, things, [row(1, "a"), row(2, "b")])
        emptying = replace(documents(things, []), empties=True)
        # An existing row is flagged as new: the table is truncated before the store.
        writer.store(iter([emptying, documents(things, [row(2, "c"), row(3, "d")])]))
        assert database.sql("SELECT count(*) FROM things WHERE NOT flow_deleted") == [(2,)]
        writer.start_commit(b"checkpoint")
        commit(writer, things, [row(4, "e")])

    assert database.sql("SELECT id, s, flow_deleted FROM things ORDER BY id") == [
        (1, "a", True),
        (2, "c", False),
        (3, "d", False),
        (4, "e", False),
    ]


def test_postgres_delta_updates_append_rows_and_reject_deletes(
    database: Database, client: ConnectorClient
) -> None:
    delta = TableBinding(THINGS, options={"delta_updates": True})
    client.apply("v1", delta)
    with client.open("v1", delta) as (writer, [things]):
        commit(writer, things, [row(1, "a"), row(1, "b")])
        commit(writer, things, [row(1, "c", exists=True)])
        with pytest.raises(RemoteProtocolError, match="delta"):
            commit(writer, things, [Row((1,), (None, None), None, delete=True)])

    assert database.sql("SELECT s FROM things ORDER BY s") == [("a",), ("b",), ("c",)]


def test_table_without_value_columns_is_stored_and_loaded(
    database: Database, client: ConnectorClient
) -> None:
    table_binding = TableBinding(THINGS, fields=(), document=False)
    client.apply("v1", table_binding)
    with client.open("v1", table_binding) as (writer, [things]):
        commit(writer, things, [Row((1,)), Row((2,))])
        commit(writer, things, [Row((2,), exists=True), Row((3,))])
        assert loaded(writer, things, [(1,), (3,), (4,)]) == [{"id": 1}, {"id": 3}]

    assert database.sql("SELECT count(*) FROM things") == [(3,)]


def test_key_stored_twice_in_a_transaction_is_rejected_by_postgres_connector(
    database: Database, client: ConnectorClient
) -> None:
    client.apply("v1", ID_N_S)
    with (
        client.open("v1", ID_N_S) as (writer, [things]),
        pytest.raises(RemoteProtocolError, match="stored twice"),
    ):
        commit(writer, things, [row(1, "a"), row(1, "b")])

    assert database.sql("SELECT * FROM things") == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        pytest.param(Row((2**63,), (None, None), {}), 'bigint.*|"id"', id="beyond 64 bits"),
        pytest.param(Row((1,), (None, "a\0b"), {}), "0x00", id="NUL"),
    ],
)
def test_value_that_no_column_can_hold_raises_refused_naming_the_table(
    database: Database, client: ConnectorClient, bad: Row, words: str
) -> None:
    client.apply("v1", ID_N_S)
    with (
        client.open("v1", ID_N_S) as (writer, [things]),
        pytest.raises(Refused, match=f'table "public.things".*({words})') as refused,
    ):
        commit(writer, things, [row(5, "good"), bad])

    assert refused.value.hint
    assert database.sql("SELECT * FROM things") == []


def test_integer_key_with_large_maximum_is_stored_as_numeric(
    database: Database, client: ConnectorClient
) -> None:
    schema = {"properties": {"id": {"maximum": 2**80}}}
    things = collection(projection("id", "integer", must=True), schema=schema)
    table_binding = TableBinding(things, document=False)
    client.apply("v1", table_binding)
    with client.open("v1", table_binding) as (writer, [binding]):
        commit(writer, binding, [Row((2**64,)), Row((-5,)), Row((2**53 + 1,))])
        assert loaded(writer, binding, [(2**64,), (2**53 + 1,)]) == [
            {"id": 2**64},
            {"id": 2**53 + 1},
        ]

    assert database.sql("SELECT max(id)::text FROM things") == [(str(2**64),)]


def test_integer_beyond_double_is_kept_in_document_column_or_rejected(
    database: Database, client: ConnectorClient
) -> None:
    big = 2**53 + 1
    with_document, without_document = ID_N_S, TableBinding(THINGS, "others", ("n",), document=False)
    client.apply("v1", with_document, without_document)
    with client.open("v1", with_document, without_document) as (writer, [things, others]):
        commit(writer, things, [Row((1,), (big, None), {"id": 1, "n": big})])
        assert loaded(writer, things, [(1,)]) == [{"id": 1, "n": big}]
        with pytest.raises(Refused, match=f'{big} of "n"'):
            commit(writer, others, [Row((1,), (big,))])


# Documents.

EVERYTHING = collection(
    projection("id", "integer", must=True),
    projection("k", "string", must=True),
    projection("bool", "boolean", "null"),
    projection("int", "integer"),
    projection("num", "number", "null"),
    projection("str", "string"),
    projection("bytes", "string", is_base64=True),
    projection("json", "object"),
    projection("in/n", "number", ptr="/in/n"),
    projection("in/deep/s", "string", "null", ptr="/in/deep/s"),
    projection("odd", "string", ptr="/od~1d~0\"'%s"),
    key=("/id", "/k"),
)
DOUBLES = st.floats().map(lambda double: double + 0.0)
"""Doubles without -0: JSON prints -0, which Python parses as an integer."""

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
ROWS = st.tuples(
    st.tuples(st.integers(-(2**63), 2**63 - 1), TEXTS),
    st.tuples(
        st.none() | st.booleans(),
        st.none() | st.integers(-(2**63), 2**63 - 1),
        st.none() | DOUBLES,
        st.none() | TEXTS,
        st.none() | st.binary(max_size=80),
        st.none() | st.dictionaries(TEXTS, st.none() | st.integers() | TEXTS, max_size=3),
        st.none() | DOUBLES,
        st.none() | TEXTS,
        st.none() | TEXTS,
    ),
)


def expected(key: tuple[int, str], values: tuple[Any, ...]) -> dict[str, Any]:
    """Return the document of a row."""
    truth, integer, num, text, data, obj, inner, deep, odd = values
    document = {
        "id": key[0],
        "k": key[1],
        "bool": truth,
        "int": integer,
        "num": named(num),
        "str": text,
        "bytes": None if data is None else base64.b64encode(data).decode(),
        "json": obj,
        "in": {"n": named(inner), "deep": {"s": deep}},
        "od/d~\"'%s": odd,
    }
    if inner is None:
        del document["in"]["n"]
    return {
        name: value
        for name, value in document.items()
        if value is not None or name in ("bool", "num")
    }


def named(number: float | None) -> float | str | None:
    if number is None or math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


@pytest.fixture(scope="module")
def everything(lent: Database) -> Iterator[tuple[Transactor, Binding[PostgresResource]]]:
    client = ConnectorClient(connector(), {"url": lent.url(), "schema": "everything"})
    table_binding = TableBinding(EVERYTHING, document=False)
    client.apply("v1", table_binding)
    with client.open("v1", table_binding) as (writer, [binding]):
        yield writer, binding


@settings(max_examples=60)
@given(st.lists(ROWS, max_size=8, unique_by=lambda row: row[0]), st.booleans())
def test_documents_assembled_from_columns_round_trip(
    everything: tuple[Transactor, Binding[PostgresResource]], rows: list[Any], exists: bool
) -> None:
    writer, binding = everything

    commit(writer, binding, [Row(key, packed(values), exists=exists) for key, values in rows])

    loaded_documents = {
        (document["id"], document["k"]): document
        for document in loaded(writer, binding, [key for key, _ in rows])
    }
    # Compare parsed values, not text: 1.0 is 1 in JSON.
    assert loaded_documents == {key: expected(key, values) for key, values in rows}


def packed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return wire values: bytes as base64, objects as encoded JSON."""
    *first, data, obj, inner, deep, odd = values
    data = None if data is None else base64.b64encode(data).decode()
    obj = None if obj is None else json.dumps(obj).encode()
    return (*first, data, obj, inner, deep, odd)


def test_document_of_400_fields_is_assembled(client: ConnectorClient) -> None:
    names = [f"f{number}" for number in range(400)]
    many = collection(
        projection("id", "integer", must=True), *(projection(name, "integer") for name in names)
    )
    table_binding = TableBinding(many, document=False)
    client.apply("v1", table_binding)
    with client.open("v1", table_binding) as (writer, [things]):
        commit(writer, things, [Row((1,), tuple(range(400))), Row((2,), (None,) * 400)])
        assert loaded(writer, things, [(1,), (2,)]) == [
            {"id": 1, **{name: index for index, name in enumerate(names)}},
            {"id": 2},
        ]


FORMATS = [
    ("date", "2011-11-11", "2011-11-11"),
    ("time", "11:11:11.5Z", "11:11:11.5Z"),
    ("date-time", "2011-11-11T11:11:11Z", "2011-11-11T11:11:11Z"),
    ("date-time", "2011-11-11T11:11:11.120+09:00", "2011-11-11T02:11:11.12Z"),
    ("date-time", "0044-03-15T00:00:00.000001Z", "0044-03-15T00:00:00.000001Z"),
    ("uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ("integer", "123456789012345678901234567890", "123456789012345678901234567890"),
    ("number", "1.50", "1.50"),
    ("number", "NaN", "NaN"),
    ("duration", "P1D", "P1D"),
]


def test_string_formats_round_trip_in_canonical_form(client: ConnectorClient) -> None:
    fields = [
        projection(f"{format_} {index}", "string", format=format_)
        for index, (format_, _, _) in enumerate(FORMATS)
    ]
    table_binding = TableBinding(
        collection(projection("id", "integer", must=True), *fields), document=False
    )
    client.apply("v1", table_binding)
    with client.open("v1", table_binding) as (writer, [binding]):
        commit(writer, binding, [Row((1,), tuple(value for _, value, _ in FORMATS))])
        [document] = loaded(writer, binding, [(1,)])
    expected = [canonical for _, _, canonical in FORMATS]
    assert [document[field.field] for field in fields] == expected


def test_text_with_copy_control_sequences_round_trips(
    database: Database, client: ConnectorClient
) -> None:
    texts = ["\\.", "a\n\\.\nb", "\n", "\r\n\\.\r\n", '"', '""', ",", "\\N", "", " ", "NULL", "%s?"]
    client.apply("v1", ID_N_S)
    for exists in (False, True):
        with client.open("v1", ID_N_S) as (writer, [things]):
            commit(
                writer,
                things,
                [row(index, text, exists=exists) for index, text in enumerate(texts)],
            )
        assert database.sql("SELECT s FROM things ORDER BY id") == [(text,) for text in texts]


def test_document_column_round_trips_byte_by_byte(client: ConnectorClient) -> None:
    table_binding = TableBinding(THINGS, fields=())
    text = b'{"id" : 1, "b":1e2, "a":1.50, "a":"\\u0000"}'
    client.apply("v1", table_binding)
    with client.open("v1", table_binding) as (writer, [things]):
        batch = replace(documents(things, [Row((1,))]), docs_json=pa.array([text], pa.binary()))
        writer.store(iter([batch]))
        writer.start_commit(b"")
        [response] = writer.load(iter([batch.keys()]))
        assert response.docs_json.to_pylist() == [text]


# Keys and names.


def test_citext_keys_are_loaded_and_deleted_case_insensitively(
    database: Database, client: ConnectorClient
) -> None:
    database.sql("CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext")
    schema = {"properties": {"id": {"x-postgres-type": "ext.citext"}}}
    things = collection(
        projection("id", "string", must=True), projection("n", "integer"), schema=schema
    )
    table_binding = TableBinding(things, document=False)
    client.apply("v1", table_binding)
    with client.open("v1", table_binding) as (writer, [binding]):
        commit(writer, binding, [Row(("MiXeD",), (1,))])
        assert loaded(writer, binding, [("mixed",)]) == [{"id": "MiXeD", "n": 1}]
        commit(writer, binding, [Row(("mixed",), (None,), exists=True, delete=True)])

    assert database.sql("SELECT * FROM things") == []


@pytest.mark.parametrize(
    "table",
    ["select", 'odd "name"; --', "what? $1 %s {}", "Ünïcode 🦀", "x" * 63, "y" * 64, "é" * 200],
    ids=["reserved", "quotes", "placeholders", "unicode", "63 bytes", "64 bytes", "400 bytes"],
)
def test_tables_and_columns_with_unusual_names_are_created_and_dropped(
    lent: Database, table: str
) -> None:
    client = ConnectorClient(connector(), {"url": lent.url()})
    odd = collection(
        projection("id", "integer", must=True),
        projection(table, "string", ptr="/a"),
        projection("ctid", "string"),
        projection("user", "string"),
        projection("l" * 80 + "1", "string", ptr="/l1"),
        projection("l" * 80 + "2", "string", ptr="/l2"),
    )
    table_binding = TableBinding(odd, table, document=False, options={"schema": table})
    client.apply("v1", table_binding)
    assert client.apply("v1", table_binding) == ""
    document = {"id": 1, "a": "b", "ctid": "c", "user": "d", "l1": "e", "l2": "f"}
    with client.open("v1", table_binding) as (writer, [binding]):
        commit(writer, binding, [Row((1,), tuple("bcdef"))])
        commit(writer, binding, [Row((1,), tuple("bcdef"), exists=True), Row((2,), (None,) * 5)])
        commit(writer, binding, [Row((2,), (None,) * 5, exists=True, delete=True)])
        assert loaded(writer, binding, [(1,), (2,)]) == [document]
    client.delete("v1", table_binding)
    remaining_tables = lent.sql(
        "SELECT FROM pg_tables WHERE tablename NOT LIKE 'flow%' "
        "AND schemaname NOT IN ('pg_catalog', 'information_schema', 'everything')"
    )
    assert remaining_tables == []


# Sessions.


def test_session_is_idle_outside_of_store(database: Database, client: ConnectorClient) -> None:
    def states() -> list[tuple[str, bool]]:
        return database.sql(
            "SELECT state, xact_start IS NULL FROM pg_stat_activity "
            "WHERE application_name LIKE 'penstock:%' AND datname = current_database()"
        )

    client.apply("v1", ID_N_S)
    with client.open("v1", ID_N_S) as (writer, [things]):
        assert states() == [("idle", True)]
        commit(writer, things, [row(key, "a") for key in range(5)])
        assert states() == [("idle", True)]
        assert len(loaded(writer, things, [(key,) for key in range(5)])) == 5
        assert states() == [("idle", True)]


def test_uncommitted_rows_are_not_visible_and_cancel_rolls_back(
    database: Database, client: ConnectorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactor, "WAITING_BYTES", 1)
    client.apply("v1", ID_N_S)
    with client.open("v1", ID_N_S) as (writer, [things]):
        commit(writer, things, [row(1, "old")])
    with psycopg.connect(database.url()) as locker:
        locker.execute("SELECT FROM things WHERE id = 1 FOR UPDATE")
        with client.open("v1", ID_N_S) as (writer, [things]):
            raised: list[PenstockError] = []

            def store() -> None:
                try:
                    commit(writer, things, [row(2, "new"), row(1, "new", exists=True)], batch=1)
                except PenstockError as error:
                    raised.append(error)

            thread = threading.Thread(target=store)
            thread.start()
            until(lambda: waiting_for_a_lock(database))
            assert database.sql("SELECT id, s FROM things") == [(1, "old")]
            writer.cancel()
            thread.join()
            assert "cancelled" in str(raised[0])
        until(lambda: not sessions(database))
        locker.rollback()
    assert database.sql("SELECT id, s FROM things") == [(1, "old")]


def sessions(database: Database) -> list[tuple[Any, ...]]:
    return database.sql(
        "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'penstock:%' "
        "AND datname = current_database()"
    )


def waiting_for_a_lock(database: Database) -> bool:
    return bool(
        database.sql(
            "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
            "AND datname = current_database()"
        )
    )


def until(holds: Callable[[], bool]) -> None:
    """Wait without limit; the timeout of the test ends the wait."""
    while not holds():
        pass
