"""Backfills that drop and recreate a table which cannot be altered."""

import itertools
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import IndeterminateError
from penstock.failpoints import Action, Failpoint, armed
from penstock.protocol.errors import RemoteProtocolError
from penstock.protocol.specs import ConstraintType
from penstock.sdk import Refused
from penstock.sdk.batches import Documents
from penstock.sdk.bindings import Binding
from penstock.sdk.transactor import Transactor
from tests.connectors.connector_client import (
    Row,
    Sql,
    TableBinding,
    collection,
    commit,
    documents,
    loaded,
    projection,
)

ID = projection("id", "integer", must=True)
NAME = projection("name", "string", must=True)
NUMBER = projection("n", "integer")
TEXT = projection("n", "string")


def things(*fields: Any, key: tuple[str, ...] = ("/id",), **options: Any) -> TableBinding:
    return TableBinding(collection(ID, *fields, key=key), document=False, options=options)


CHANGES = {
    "key": (
        things(NAME),
        Row((1,), ("a",)),
        things(NAME, key=("/name", "/id")),
        Row(("b", 2)),
        "has the key (id), not (name, id)",
    ),
    "int to boolean": (
        things(NUMBER),
        Row((1,), (7,)),
        things(projection("n", "boolean")),
        Row((2,), (True,)),
        'column "n" is ',
    ),
    "text to int": (
        things(TEXT),
        Row((1,), ("many",)),
        things(NUMBER),
        Row((2,), (7,)),
        'column "n" is ',
    ),
}


@pytest.fixture(params=CHANGES)
def change(request: pytest.FixtureRequest) -> tuple[TableBinding, Row, TableBinding, Row, str]:
    return CHANGES[request.param]


def fill(sql: Sql, requested: TableBinding, *rows: Row) -> None:
    sql.client.apply("v1", requested)
    with sql.client.open("v1", requested) as (writer, [binding]):
        commit(writer, binding, rows)


def replace_rows(writer: Transactor, binding: Binding[Any], *rows: Row) -> None:
    none = pa.array([], pa.binary())
    emptying = Documents(binding, none, none, none, pa.array([], pa.bool_()), None, True)
    writer.store(itertools.chain([emptying], [documents(binding, rows)]))
    writer.start_commit(b"replaced")


def contents(sql: Sql, requested: TableBinding) -> list[tuple[Any, ...]]:
    names = ", ".join(each.field for each in requested.collection.projections if each.ptr)
    return sql.sql(f"SELECT {names} FROM {sql.table('things')} ORDER BY id")


def columns_of(requested: TableBinding, row: Row) -> tuple[Any, ...]:
    keys = dict(zip((ptr[1:] for ptr in requested.collection.key_ptrs), row.key, strict=True))
    others = [each.field for each in requested.collection.projections if each.ptr]
    values = dict(zip((each for each in others if each not in keys), row.values, strict=True))
    return tuple((keys | values)[each] for each in others)


def test_replaced_table_is_created_again_within_the_transaction(
    sql: Sql, change: tuple[TableBinding, Row, TableBinding, Row, str]
) -> None:
    old, before, new, after, reason = change
    fill(sql, old, before)
    refused = sql.client.validate(new)[0]
    assert refused.recreates == ""
    kinds = {each.type for each in refused.constraints.values()}
    assert ConstraintType.UNSATISFIABLE in kinds
    with pytest.raises(Refused):
        sql.client.apply("v2", new)
    with pytest.raises(Refused):
        sql.client.apply("v2", new, dry_run=True)
    answer = sql.client.validate(new, replaces=True)[0]
    assert reason in answer.recreates
    assert answer.rows == 1
    kinds = {each.type for each in answer.constraints.values()}
    assert ConstraintType.UNSATISFIABLE not in kinds
    planned = sql.client.apply("v2", new, recreates=[0], dry_run=True)
    assert "DROP TABLE" in planned
    assert "CASCADE" not in planned
    sql.client.apply("v2", new, recreates=[0])
    assert contents(sql, old) == [columns_of(old, before)], "Apply does not touch the table"
    assert reason in sql.client.validate(new, replaces=True)[0].recreates, "still"
    with sql.client.open("v2", new) as (writer, [binding]):
        replace_rows(writer, binding, after)
        assert contents(sql, new) == [columns_of(new, after)]
        commit(writer, binding, [Row(after.key, after.values, exists=True)])
        assert len(loaded(writer, binding, [after.key])) == 1
    assert contents(sql, new) == [columns_of(new, after)]
    assert sql.client.validate(new, replaces=True)[0].recreates == ""
    assert sql.client.apply("v2", new, recreates=[0]) == ""


def test_crash_between_drop_and_create_leaves_the_old_table(
    sql: Sql, change: tuple[TableBinding, Row, TableBinding, Row, str]
) -> None:
    old, before, new, after, _ = change
    fill(sql, old, before)
    sql.client.apply("v2", new, recreates=[0])
    with (
        sql.client.open("v2", new) as (writer, [binding]),
        armed(Failpoint.RESOURCE_DROPPED, Action.ERROR),
        pytest.raises(IndeterminateError),
    ):
        replace_rows(writer, binding, after)
    assert contents(sql, old) == [columns_of(old, before)]
    with sql.client.open("v2", new) as (writer, [binding]):
        assert writer.checkpoint == b"checkpoint"
        replace_rows(writer, binding, after)
    assert contents(sql, new) == [columns_of(new, after)]


def test_old_binding_is_accepted_after_apply_of_pending_replacement(
    sql: Sql, change: tuple[TableBinding, Row, TableBinding, Row, str]
) -> None:
    old, before, new, _, _ = change
    fill(sql, old, before)
    sql.client.apply("v2", new, recreates=[0])
    constraints = sql.client.validate(old)[0].constraints.values()
    assert ConstraintType.UNSATISFIABLE not in {each.type for each in constraints}
    assert sql.client.apply("v3", old) == ""
    with sql.client.open("v3", old) as (writer, [binding]):
        commit(writer, binding, [Row(before.key, before.values, exists=True)])
    assert contents(sql, old) == [columns_of(old, before)]


def test_integer_column_changed_to_text_is_altered_in_place(sql: Sql) -> None:
    fill(sql, things(NUMBER), Row((1,), (7,)))
    assert sql.client.validate(things(TEXT), replaces=True)[0].recreates == ""
    sql.client.apply("v2", things(TEXT), recreates=[0])
    assert contents(sql, things(TEXT)) == [(1, "7")]


def test_store_before_pending_table_replacement_is_rejected(sql: Sql) -> None:
    fill(sql, things(TEXT), Row((1,), ("a",)))
    sql.client.apply("v2", things(NUMBER), recreates=[0])
    with (
        sql.client.open("v2", things(NUMBER)) as (writer, [binding]),
        pytest.raises(RemoteProtocolError, match="must be dropped and created again first"),
    ):
        commit(writer, binding, [Row((2,), (2,))])
    assert contents(sql, things(TEXT)) == [(1, "a")]


@pytest.mark.parametrize("options", [{"delta_updates": True}, {"delete": "soft"}])
def test_replaced_table_accepts_delta_updates_and_soft_deletes(
    sql: Sql, options: dict[str, Any]
) -> None:
    fill(sql, things(TEXT, **options), Row((1,), ("a",)))
    new = things(NUMBER, **options)
    sql.client.apply("v2", new, recreates=[0])
    with sql.client.open("v2", new) as (writer, [binding]):
        replace_rows(writer, binding, Row((2,), (2,)))
        commit(writer, binding, [Row((3,), (3,))])
    assert contents(sql, new) == [(2, 2), (3, 3)]


def test_adopted_table_is_not_recreated(sql: Sql) -> None:
    kind, strict = ("ANY", " STRICT") if sql.connector.name == "sqlite" else ("BIGINT", "")
    with sql.session() as session:
        session.run(f"CREATE TABLE {sql.table('things')} (id {kind} PRIMARY KEY, n TEXT){strict}")
    sql.client.apply("v1", things(TEXT, adopt=True))
    answer = sql.client.validate(things(NUMBER, adopt=True), replaces=True)[0]
    assert answer.recreates == ""
    assert "drop the table, or use another one" in answer.constraints["n"].reason
    with pytest.raises(Refused, match='column "n"'):
        sql.client.apply("v2", things(NUMBER, adopt=True), recreates=[0])


@pytest.mark.parametrize("sql", ["postgres"], indirect=True)
def test_replacement_of_table_with_dependent_view_raises_refused(sql: Sql) -> None:
    fill(sql, things(TEXT), Row((1,), ("a",)))
    with sql.session() as session:
        session.run(f"CREATE VIEW {sql.table('report')} AS SELECT n FROM {sql.table('things')}")
    sql.client.apply("v2", things(NUMBER), recreates=[0])
    with (
        sql.client.open("v2", things(NUMBER)) as (writer, [binding]),
        pytest.raises(Refused, match="other objects depend on it") as raised,
    ):
        replace_rows(writer, binding, Row((2,), (2,)))
    assert "report" in raised.value.detail
    assert "CASCADE" not in raised.value.hint
    assert contents(sql, things(TEXT)) == [(1, "a")]
    with sql.session() as session:
        session.run(f"DROP VIEW {sql.table('report')}")
    with sql.client.open("v2", things(NUMBER)) as (writer, [binding]):
        replace_rows(writer, binding, Row((2,), (2,)))
    assert contents(sql, things(NUMBER)) == [(2, 2)]
