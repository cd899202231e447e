"""Apply and Validate of the Postgres connector: lossless changes, or a rejection."""

import base64
from typing import Any

import pytest

from penstock.connectors.postgres import connector
from penstock.protocol.messages import START_FROM_ZERO
from penstock.protocol.specs import ConstraintType
from penstock.sdk import Refused
from penstock.servers.postgres import Database
from tests.connectors.connector_client import (
    ConnectorClient,
    Row,
    TableBinding,
    collection,
    commit,
    loaded,
    projection,
)

ID = projection("id", "integer", must=True)


@pytest.fixture
def client(database: Database) -> ConnectorClient:
    return ConnectorClient(connector(), {"url": database.url(), "schema": "sink"})


def things(*projections, schema=None, **options) -> TableBinding:
    return TableBinding(
        collection(ID, *projections, schema=schema), document=False, options=options
    )


def columns(database: Database, table: str = "sink.things") -> list[tuple[str, str, bool]]:
    return database.sql(
        "SELECT attname, format_type(atttypid, atttypmod), attnotnull FROM pg_attribute "
        "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        [table],
    )


def everything(database: Database) -> list[tuple[Any, ...]]:
    """Return the catalog rows that a dry run must not change."""
    return database.sql(
        "SELECT n.nspname, c.relname, c.relfilenode, a.attname, a.xmin::text FROM pg_class c "
        "JOIN pg_namespace n ON n.oid = c.relnamespace "
        "LEFT JOIN pg_attribute a ON a.attrelid = c.oid "
        "WHERE n.nspname NOT LIKE 'pg_%%' ORDER BY 1, 2, 4"
    ) + database.sql("SELECT nspname FROM pg_namespace ORDER BY 1")


def test_apply_creates_schema_and_table_once(database: Database, client: ConnectorClient) -> None:
    number = projection("n", "number", must=True)
    table_binding = TableBinding(
        collection(ID, number), document=False, options={"schema": "Other one"}
    )
    before = everything(database)
    planned = client.apply("v1", table_binding, dry_run=True)
    assert everything(database) == before

    assert client.apply("v1", table_binding) == planned
    assert 'CREATE SCHEMA "Other one"' in planned
    assert columns(database, '"Other one".things') == [
        ("id", "bigint", True),
        ("n", "double precision", True),
    ]
    assert (
        client.apply("v1", table_binding) == client.apply("v1", table_binding, dry_run=True) == ""
    )


def test_apply_adds_new_field_as_nullable_column(
    database: Database, client: ConnectorClient
) -> None:
    client.apply("v1", things())
    with client.open("v1", things()) as (writer, [binding]):
        commit(writer, binding, [Row((1,))])
    wider = things(projection("n", "integer", must=True))
    before = everything(database)
    planned = client.apply("v2", wider, dry_run=True)
    assert everything(database) == before

    assert client.apply("v2", wider) == planned != ""
    assert columns(database) == [("id", "bigint", True), ("n", "bigint", False)]
    assert client.apply("v2", wider) == ""
    with client.open("v2", wider) as (writer, [binding]):
        commit(writer, binding, [Row((2,), (7,))])
        assert loaded(writer, binding, [(1,), (2,)]) == [{"id": 1}, {"id": 2, "n": 7}]


def test_apply_without_field_keeps_its_column_as_nullable(
    database: Database, client: ConnectorClient
) -> None:
    client.apply("v1", things(projection("n", "integer", must=True)))
    client.apply("v2", things())
    assert columns(database) == [("id", "bigint", True), ("n", "bigint", False)]
    with client.open("v2", things()) as (writer, [binding]):
        commit(writer, binding, [Row((1,))])


def test_apply_drops_not_null_of_field_that_becomes_optional(
    database: Database, client: ConnectorClient
) -> None:
    client.apply("v1", things(projection("n", "integer", must=True)))
    client.apply("v2", things(projection("n", "integer")))
    assert columns(database)[1] == ("n", "bigint", False)


MIGRATED = {
    "integer": (projection("integer", "integer"), projection("integer", "string"), 7, "7"),
    "number": (projection("number", "number"), projection("number", "string"), 0.1, "0.1"),
    "boolean": (projection("boolean", "boolean"), projection("boolean", "string"), True, "true"),
    "moment": (
        projection("moment", "string", format="date-time"),
        projection("moment", "string"),
        "2011-11-11T11:11:11.5+09:00",
        "2011-11-11T02:11:11.5Z",
    ),
    "bytes": (
        projection("bytes", "string", is_base64=True),
        projection("bytes", "string"),
        "AP8=",
        "AP8=",
    ),
    "wide": (
        projection("wide", "integer"),
        projection("wide", "string", format="number"),
        2**60,
        str(2**60),
    ),
}
"""Old projection, new projection, old value and new value, by field."""


def test_apply_migrates_columns_in_place(client: ConnectorClient) -> None:
    old = things(*(before for before, _, _, _ in MIGRATED.values()))
    new = things(*(after for _, after, _, _ in MIGRATED.values()))
    client.apply("v1", old)
    with client.open("v1", old) as (writer, [binding]):
        values = tuple(value for _, _, value, _ in MIGRATED.values())
        commit(writer, binding, [Row((1,), values), Row((2,), (None,) * len(values))])
    said = client.validate(new)[0].constraints
    assert {said[name].type for name in MIGRATED} == {ConstraintType.FIELD_REQUIRED}
    client.apply("v2", new)
    assert client.apply("v2", new) == ""
    with client.open("v2", new) as (writer, [binding]):
        kept = {name: kept for name, (_, _, _, kept) in MIGRATED.items()}
        assert loaded(writer, binding, [(1,), (2,)]) == [{"id": 1, **kept}, {"id": 2}]


def test_incompatible_type_change_is_rejected_by_validate_and_apply(
    database: Database, client: ConnectorClient
) -> None:
    client.apply("v1", things(projection("v", "string")))
    new = things(projection("v", "integer"), projection("w", "integer"))
    said = client.validate(new)[0].constraints["v"]
    assert said.type is ConstraintType.UNSATISFIABLE
    assert '"v" is text' in said.reason
    with pytest.raises(Refused, match=r'"v" of table "sink\.things" is text, not BIGINT'):
        client.apply("v2", new)
    assert columns(database) == [("id", "bigint", True), ("v", "text", False)]


def test_switch_to_delta_updates_drops_key_and_switch_back_is_rejected(
    database: Database, client: ConnectorClient
) -> None:
    standard, delta = things(), things(delta_updates=True)
    client.apply("v1", standard)
    database.sql('ALTER TABLE sink.things RENAME CONSTRAINT things_pkey TO "odd one"')
    client.validate(delta)
    assert 'DROP CONSTRAINT "odd one"' in client.apply("v2", delta)
    assert client.apply("v2", delta) == ""
    with client.open("v2", delta) as (writer, [binding]):
        commit(writer, binding, [Row((1,)), Row((1,))])
    for refused in (client.validate, lambda it: client.apply("v3", it)):
        with pytest.raises(Refused, match="delta updates to standard updates is not allowed"):
            refused(standard)


def test_switch_to_soft_deletes_adds_flow_deleted_column(
    database: Database, client: ConnectorClient
) -> None:
    client.apply("v1", things())
    client.apply("v2", things(delete="soft"))
    assert columns(database)[1] == ("flow_deleted", "boolean", False)


def test_changed_key_is_rejected_by_postgres_connector(client: ConnectorClient) -> None:
    client.apply("v1", things())
    other = TableBinding(
        collection(ID, projection("k", "string", must=True), key=("/id", "/k")), document=False
    )
    assert client.validate(other)[0].constraints["k"].type is ConstraintType.UNSATISFIABLE
    with pytest.raises(Refused, match=r"key \(id\), not \(id, k\)"):
        client.apply("v2", other)


def test_foreign_table_is_adopted_only_with_adopt_option(
    database: Database, client: ConnectorClient
) -> None:
    database.sql(
        "CREATE SCHEMA sink; CREATE TABLE sink.things (v varchar(3) NOT NULL, extra int, "
        "id integer, PRIMARY KEY (id)); INSERT INTO sink.things VALUES ('old', 1, 1)"
    )
    value = projection("v", "string")
    with pytest.raises(Refused, match="did not create it"):
        client.validate(things(value))
    adopted = things(value, adopt=True)
    client.validate(adopted)
    client.apply("v1", adopted)
    with client.open("v1", adopted) as (writer, [binding]):
        commit(writer, binding, [Row((2**40,), ("longer",))])
        assert loaded(writer, binding, [(1,), (2**40,)]) == [
            {"id": 1, "v": "old"},
            {"id": 2**40, "v": "longer"},
        ]


def test_binding_to_view_is_rejected(database: Database, client: ConnectorClient) -> None:
    database.sql("CREATE SCHEMA sink; CREATE VIEW sink.things AS SELECT 1 AS id")
    for deed in (client.validate, lambda it: client.apply("v1", it)):
        with pytest.raises(Refused, match=r'relation "sink\.things" is not a table'):
            deed(things(adopt=True))


def test_delete_drops_table_and_keeps_fence_row(
    database: Database, client: ConnectorClient
) -> None:
    table_binding = things()
    client.apply("v1", table_binding)
    with client.open("v1", table_binding) as (writer, [binding]):
        commit(writer, binding, [Row((1,))])
    before = everything(database)
    planned = client.delete("v1", table_binding, dry_run=True)
    assert everything(database) == before
    assert client.delete("v1", table_binding) == planned != ""
    # The fence row stays: an older stream that holds the fence cannot commit.
    left = database.sql("SELECT fence, checkpoint FROM sink.flow_checkpoints_v1")
    assert left == [(2, base64.b64encode(START_FROM_ZERO).decode())]
    assert database.sql("SELECT to_regclass('sink.things')") == [(None,)]
    assert client.delete("v1", table_binding) == ""


# Types from `x-postgres-type` annotations.


SAID = {
    "numeric(10,2)": "numeric(10,2)",
    "decimal(10, 2)": "numeric(10,2)",
    "timestamp(3) with time zone": "timestamp(3) with time zone",
    "int4[]": "integer[]",
    "numeric(6,1)[]": "numeric(6,1)[]",
    "interval year to month": "interval year to month",
    '"char"': '"char"',
    "public.mood": "public.mood",
    "public.price": "public.price",
    '"odd schema"."Odd {Type}"': '"odd schema"."Odd {Type}"',
    "int -- or so": "integer",
    "public.unheard_of": "text",
    "nowhere.mood": "text",
    "anyelement": "text",
    "int); DROP SCHEMA public; --": "text",
    "int\n) --": "text",
    "": "text",
}


def typed(*said: str) -> TableBinding:
    return things(
        *(projection(f"v{at}", "string") for at in range(len(said))),
        schema={"properties": {f"v{at}": {"x-postgres-type": it} for at, it in enumerate(said)}},
    )


def test_annotated_postgres_type_is_used_if_it_exists_in_endpoint(
    database: Database, client: ConnectorClient
) -> None:
    database.sql(
        "CREATE TYPE public.mood AS ENUM ('sad', 'ok'); CREATE SCHEMA \"odd schema\"; "
        'CREATE TYPE "odd schema"."Odd {Type}" AS ENUM (\'x\'); '
        "CREATE DOMAIN public.price AS numeric(10, 2) NOT NULL"
    )
    table_binding = typed(*SAID)
    client.apply("v1", table_binding)
    found = database.sql(
        "SET search_path = ''; SELECT format_type(atttypid, atttypmod) FROM pg_attribute "
        "WHERE attrelid = 'sink.things'::regclass AND attname LIKE 'v%' ORDER BY attnum"
    )
    assert dict(zip(SAID, (kind for (kind,) in found), strict=True)) == SAID
    assert client.apply("v1", table_binding) == ""
    said = client.validate(table_binding)[0].constraints
    assert {said[f"v{at}"].type for at in range(len(SAID))} == {ConstraintType.FIELD_REQUIRED}


def test_annotated_numeric_type_is_widened_and_never_narrowed(
    database: Database, client: ConnectorClient
) -> None:
    client.apply("v1", typed("numeric(10,2)"))
    client.apply("v2", typed("numeric(14,4)"))
    assert columns(database)[1][1] == "numeric(14,4)"
    with pytest.raises(Refused, match=r"is numeric\(14,4\), not integer"):
        client.apply("v3", typed("integer"))
