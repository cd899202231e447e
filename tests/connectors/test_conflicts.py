"""Conflicts of a binding: Validate reports them and Apply rejects them."""

import json
import re
from dataclasses import replace

import pytest

from penstock.protocol.specs import ConstraintType
from penstock.sdk import Refused
from penstock.sdk.sql import applied_spec, fence
from tests.connectors.connector_client import (
    Row,
    Sql,
    TableBinding,
    collection,
    commit,
    loaded,
    projection,
)

ID = projection("id", "integer", must=True)
NAME = projection("name", "string", must=True)
MARK = projection("flow_deleted", "boolean")


def things(*fields, key=("/id",), document=False, **options) -> TableBinding:
    return TableBinding(collection(ID, *fields, key=key), document=document, options=options)


def fill(sql: Sql, table_binding: TableBinding, *rows: Row) -> None:
    """Apply the binding as v1, and store rows."""
    sql.client.apply("v1", table_binding)
    with sql.client.open("v1", table_binding) as (writer, [binding]):
        commit(writer, binding, rows)


@pytest.mark.parametrize("name", [fence.TABLE, applied_spec.TABLE])
def test_binding_to_connector_metadata_table_is_rejected(sql: Sql, name: str) -> None:
    sql.client.apply("v1", things())
    table_binding = replace(things(adopt=True), table=name)
    for call in (sql.client.validate, lambda table_binding: sql.client.apply("v2", table_binding)):
        with pytest.raises(Refused, match=f"{name}.* is reserved"):
            call(table_binding)


@pytest.mark.parametrize("sql", ["sqlite"], indirect=True)
@pytest.mark.parametrize("name", ["flow_migrating_x", "FLOW_CHECKPOINTS_V1", "flow_load_0"])
def test_binding_to_reserved_sqlite_table_name_is_rejected(sql: Sql, name: str) -> None:
    for call in (sql.client.validate, lambda table_binding: sql.client.apply("v1", table_binding)):
        with pytest.raises(Refused, match=f"{name}.* is reserved"):
            call(replace(things(), table=name))


def test_two_bindings_of_one_table_are_rejected_by_validate_and_apply(sql: Sql) -> None:
    for call in (
        sql.client.validate,
        lambda *table_bindings: sql.client.apply("v1", *table_bindings),
    ):
        with pytest.raises(Refused, match="duplicate binding"):
            call(things(), things())


# Column of soft deletes.


def test_soft_delete_forbids_field_named_flow_deleted(sql: Sql) -> None:
    table_binding = things(MARK, delete="soft")
    constraint = sql.client.validate(table_binding)[0].constraints["flow_deleted"]
    assert constraint.type is ConstraintType.FIELD_FORBIDDEN
    assert constraint.reason == 'column "flow_deleted" is used by the connector'
    with pytest.raises(Refused, match=r'field "flow_deleted" .* has a reserved column name'):
        sql.client.apply("v1", table_binding)


def test_soft_delete_with_key_named_flow_deleted_is_unsatisfiable(sql: Sql) -> None:
    key = projection("flow_deleted", "boolean", must=True)
    table_binding = things(key, key=("/id", "/flow_deleted"), delete="soft")
    assert (
        sql.client.validate(table_binding)[0].constraints["flow_deleted"].type
        is ConstraintType.UNSATISFIABLE
    )


def test_hard_delete_stores_field_named_flow_deleted_as_data(sql: Sql) -> None:
    table_binding = things(MARK)
    fill(sql, table_binding, Row((1,), (True,)), Row((2,), (False,)))
    assert sql.client.apply("v2", table_binding) == ""
    with sql.client.open("v2", table_binding) as (writer, [binding]):
        assert loaded(writer, binding, [(1,), (2,)]) == [
            {"id": 1, "flow_deleted": True},
            {"id": 2, "flow_deleted": False},
        ]


# Key changes.


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (("/id", "/name"), r"has the key \(id\), not \(id, name\)"),
        (("/name",), r"has the key \(id\), not \(name\)"),
    ],
    ids=["more", "another"],
)
def test_changed_key_is_rejected_by_validate_and_apply(
    sql: Sql, key: tuple[str, ...], message: str
) -> None:
    sql.client.apply("v1", things(NAME))
    changed = things(NAME, key=key)
    constraints = sql.client.validate(changed)[0].constraints
    for ptr in key:
        assert constraints[ptr[1:]].type is ConstraintType.UNSATISFIABLE
        assert re.search(message, constraints[ptr[1:]].reason)
    with pytest.raises(Refused, match=message):
        sql.client.apply("v2", changed)


def test_reordered_key_is_rejected_by_validate_and_apply(sql: Sql) -> None:
    sql.client.apply("v1", things(NAME, key=("/id", "/name")))
    changed = things(NAME, key=("/name", "/id"))
    constraints = sql.client.validate(changed)[0].constraints
    assert "has the key (id, name), not (name, id)" in constraints["id"].reason
    with pytest.raises(Refused, match=r"has the key \(id, name\), not \(name, id\)"):
        sql.client.apply("v2", changed)


def test_alias_of_key_field_is_optional_and_leaves_key_required(sql: Sql) -> None:
    sql.client.apply("v1", things())
    table_binding = things(projection("alias", "integer", ptr="/id", must=True))
    constraints = sql.client.validate(table_binding)[0].constraints
    assert constraints["id"].type is ConstraintType.FIELD_REQUIRED
    assert constraints["alias"].type is ConstraintType.FIELD_OPTIONAL


def test_delta_updates_accept_changed_key(sql: Sql) -> None:
    sql.client.apply("v1", things())
    changed = things(NAME, key=("/id", "/name"), delta_updates=True)
    constraints = sql.client.validate(changed)[0].constraints
    assert ConstraintType.UNSATISFIABLE not in {
        constraint.type for constraint in constraints.values()
    }
    rows = [Row((1, "a")), Row((1, "a"))]
    sql.client.apply("v2", changed)
    with sql.client.open("v2", changed) as (writer, [binding]):
        commit(writer, binding, rows)


# Adopted tables.


def test_adopted_table_is_not_dropped_by_delete(sql: Sql) -> None:
    fill(sql, things(), Row((1,)))
    # Without its applied spec the table has no owner.
    sql.sql(f"DELETE FROM {sql.table(applied_spec.TABLE)} RETURNING 1")
    sql.client.apply("v1", things(adopt=True))
    # Later specs need no `adopt`: the adoption is recorded.
    sql.client.apply("v2", things())
    sql.client.apply("v3", things(NAME))
    assert sql.client.delete("v3", things(NAME)) == ""
    assert sql.sql(f"SELECT id FROM {sql.table('things')}") == [(1,)]
    with pytest.raises(Refused, match="did not create it"):
        sql.client.validate(things())


def test_created_table_with_adopt_option_is_dropped_by_delete(sql: Sql) -> None:
    sql.client.apply("v1", things(adopt=True))
    sql.client.apply("v2", things(adopt=True))
    assert "DROP TABLE" in sql.client.delete("v2", things(adopt=True))
    sql.client.validate(things())


# Rows without documents.


@pytest.mark.parametrize("adopt", [False, True], ids=["ours", "adopted"])
def test_document_column_for_rows_without_documents_is_rejected(sql: Sql, adopt: bool) -> None:
    fill(sql, things(), Row((1,)))
    if adopt:
        sql.sql(f"DELETE FROM {sql.table(applied_spec.TABLE)} RETURNING 1")
    with_document = things(document=True, adopt=adopt)
    constraint = sql.client.validate(with_document)[0].constraints["flow_document"]
    assert constraint.type is ConstraintType.UNSATISFIABLE
    assert "has rows without a document" in constraint.reason
    with pytest.raises(Refused, match="has rows without a document"):
        sql.client.apply("v2", with_document)
    constraint = sql.client.validate(things(adopt=adopt))[0].constraints["flow_document"]
    assert constraint.type is ConstraintType.FIELD_FORBIDDEN


def test_document_column_is_added_to_empty_table(sql: Sql) -> None:
    sql.client.apply("v1", things())
    with_document = things(document=True)
    assert (
        sql.client.validate(with_document)[0].constraints["flow_document"].type
        is ConstraintType.LOCATION_REQUIRED
    )
    sql.client.apply("v2", with_document)
    with sql.client.open("v2", with_document) as (writer, [binding]):
        commit(writer, binding, [Row((1,), (), {"id": 1, "x": 2})])
        assert loaded(writer, binding, [(1,)]) == [{"id": 1, "x": 2}]
    assert sql.client.apply("v2", with_document) == ""


# Documents.


def test_nested_key_with_object_column_is_loaded_once_in_document(sql: Sql) -> None:
    inner, outer = projection("k", "integer", ptr="/o/k", must=True), projection("o", "object")
    alone = TableBinding(collection(inner, key=("/o/k",)), document=False)
    fill(sql, alone, Row((2,)))
    table_binding = TableBinding(collection(inner, outer, key=("/o/k",)), document=False)
    sql.client.apply("v2", table_binding)
    with sql.client.open("v2", table_binding) as (writer, [binding]):
        commit(writer, binding, [Row((1,), (b'{"k":1,"more":[2]}',))])
        assert loaded(writer, binding, [(1,), (2,)]) == [
            {"o": {"k": 1, "more": [2]}},
            {"o": {"k": 2}},
        ]


def test_root_document_under_other_field_name_is_loaded(sql: Sql) -> None:
    fill(sql, things(NAME), Row((2,), ("b",)))
    table_binding = replace(
        things(NAME, projection("whole", "object", ptr="")), fields=("name", "whole")
    )
    sql.client.apply("v2", table_binding)
    with sql.client.open("v2", table_binding) as (writer, [binding]):
        document = {"id": 1, "name": "a", "more": [2]}
        values = {"name": "a", "whole": json.dumps(document).encode()}
        commit(writer, binding, [Row((1,), tuple(values[field.name] for field in binding.values))])
        assert loaded(writer, binding, [(1,), (2,)]) == [document, {"id": 2, "name": "b"}]


TAGS = projection("tags", "array")
YEARS = projection("years", "object")
FIRST = projection("first", "string", ptr="/tags/0")
DEEP = projection("deep", "string", ptr="/unknown/10/name")
YEAR = projection("year", "string", ptr="/years/2024")
TOP = projection("top", "string", ptr="/0")


def test_field_in_array_without_document_column_is_rejected(sql: Sql) -> None:
    fields = (TAGS, YEARS, FIRST, DEEP, YEAR, TOP)
    constraints = sql.client.validate(things(*fields))[0].constraints
    for name in ("first", "deep"):
        assert constraints[name].type is ConstraintType.FIELD_FORBIDDEN
        assert "may be an item of an array" in constraints[name].reason
    for name in ("year", "top"):
        assert constraints[name].type is ConstraintType.LOCATION_RECOMMENDED
    with pytest.raises(Refused, match=r'field "first" of .*"/tags/0" may be an item of an array'):
        sql.client.apply("v1", things(TAGS, FIRST))
    for options in ({"document": True}, {"delta_updates": True}):
        table_binding = things(*fields, **options)
        assert (
            sql.client.validate(table_binding)[0].constraints["first"].type
            is ConstraintType.LOCATION_RECOMMENDED
        )
        sql.client.apply("v1", replace(table_binding, table="with_" + next(iter(options))))
    supported = things(YEARS, YEAR, TOP)
    fill(sql, supported, Row((1,), (None, None, None)))


def test_key_in_array_without_document_column_is_rejected(sql: Sql) -> None:
    key = projection("first", "string", ptr="/tags/0", must=True)
    table_binding = TableBinding(collection(TAGS, key, key=("/tags/0",)), document=False)
    constraint = sql.client.validate(table_binding)[0].constraints["first"]
    assert constraint.type is ConstraintType.UNSATISFIABLE
    with pytest.raises(Refused, match="may be an item of an array"):
        sql.client.apply("v1", table_binding)


# Added columns with a default.


def test_added_column_fills_existing_rows_with_default(sql: Sql) -> None:
    added = (
        projection("n", "integer", must=True, default_json="7"),
        projection("ratio", "number", default_json="0.5"),
        projection("flag", "boolean", default_json="true"),
        projection("note", "string", default_json='"it\'s \\\\"'),
        projection("none", "string"),
    )
    fill(sql, things(NAME), Row((1,), ("a",)))
    table_binding = things(NAME, *added)
    assert {*sql.client.validate(table_binding)[0].fills} >= {
        projection.field for projection in added
    }
    sql.client.apply("v2", table_binding)
    assert {*sql.client.validate(table_binding)[0].fills} >= {
        projection.field for projection in added
    }, "still"
    with sql.client.open("v2", table_binding) as (writer, [binding]):
        given = {"name": "b", "n": 8}
        values = tuple(given.get(field.name) for field in binding.values)
        commit(writer, binding, [Row((2,), values)])
    rows = sql.sql(f"SELECT id, n, ratio, flag, note, none FROM {sql.table('things')} ORDER BY id")
    assert rows == [(1, 7, 0.5, True, "it's \\", None), (2, 8, None, None, None, None)]
    # The column of an excluded field stays, but its contents are not known to be filled.
    sql.client.apply("v3", things(NAME))
    assert sql.client.validate(table_binding)[0].fills == ()


def test_validate_reports_row_count_only_for_replaced_table(sql: Sql) -> None:
    fill(sql, things(NAME), Row((1,), ("a",)), Row((2,), ("b",)))
    assert sql.client.validate(things(NAME))[0].rows == 0
    assert sql.client.validate(things(NAME), replaces=True)[0].rows == 2
