"""Conflicts of a binding: Validate reports them and Apply rejects them."""

import json
import re
from dataclasses import replace

import pytest

from penstock.protocol.specs import ConstraintType
from penstock.sdk import Refused
from penstock.sdk.sql import applied_spec, fence
from tests.connectors.stream_client import Row, Sql, Wanted, collection, commit, loaded, projection

ID = projection("id", "integer", must=True)
NAME = projection("name", "string", must=True)
MARK = projection("flow_deleted", "boolean")


def things(*fields, key=("/id",), document=False, **options) -> Wanted:
    return Wanted(collection(ID, *fields, key=key), document=document, options=options)


def filled(sql: Sql, wanted: Wanted, *rows: Row) -> None:
    """Apply `wanted` as v1, and store rows."""
    sql.driven.apply("v1", wanted)
    with sql.driven.open("v1", wanted) as (writer, [binding]):
        commit(writer, binding, rows)


@pytest.mark.parametrize("name", [fence.TABLE, applied_spec.TABLE])
def test_binding_to_connector_metadata_table_is_rejected(sql: Sql, name: str) -> None:
    sql.driven.apply("v1", things())
    wanted = replace(things(adopt=True), table=name)
    for deed in (sql.driven.validate, lambda it: sql.driven.apply("v2", it)):
        with pytest.raises(Refused, match=f"{name}.* is reserved"):
            deed(wanted)


@pytest.mark.parametrize("sql", ["sqlite"], indirect=True)
@pytest.mark.parametrize("name", ["flow_migrating_x", "FLOW_CHECKPOINTS_V1", "flow_load_0"])
def test_binding_to_reserved_sqlite_table_name_is_rejected(sql: Sql, name: str) -> None:
    for deed in (sql.driven.validate, lambda it: sql.driven.apply("v1", it)):
        with pytest.raises(Refused, match=f"{name}.* is reserved"):
            deed(replace(things(), table=name))


def test_two_bindings_of_one_table_are_rejected_by_validate_and_apply(sql: Sql) -> None:
    for deed in (sql.driven.validate, lambda *its: sql.driven.apply("v1", *its)):
        with pytest.raises(Refused, match="duplicate binding"):
            deed(things(), things())


# Column of soft deletes.


def test_soft_delete_forbids_field_named_flow_deleted(sql: Sql) -> None:
    wanted = things(MARK, delete="soft")
    said = sql.driven.validate(wanted)[0].constraints["flow_deleted"]
    assert said.type is ConstraintType.FIELD_FORBIDDEN
    assert said.reason == 'column "flow_deleted" is used by the connector'
    with pytest.raises(Refused, match=r'field "flow_deleted" .* has a reserved column name'):
        sql.driven.apply("v1", wanted)


def test_soft_delete_with_key_named_flow_deleted_is_unsatisfiable(sql: Sql) -> None:
    key = projection("flow_deleted", "boolean", must=True)
    said = sql.driven.validate(things(key, key=("/id", "/flow_deleted"), delete="soft"))
    assert said[0].constraints["flow_deleted"].type is ConstraintType.UNSATISFIABLE


def test_hard_delete_stores_field_named_flow_deleted_as_data(sql: Sql) -> None:
    wanted = things(MARK)
    filled(sql, wanted, Row((1,), (True,)), Row((2,), (False,)))
    assert sql.driven.apply("v2", wanted) == ""
    with sql.driven.open("v2", wanted) as (writer, [binding]):
        assert loaded(writer, binding, [(1,), (2,)]) == [
            {"id": 1, "flow_deleted": True},
            {"id": 2, "flow_deleted": False},
        ]


# Key changes.


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (("/id", "/name"), r"has the key \(id\), not \(id, name\)"),
        (("/name",), r"has the key \(id\), not \(name\)"),
    ],
    ids=["more", "another"],
)
def test_changed_key_is_rejected_by_validate_and_apply(
    sql: Sql, key: tuple[str, ...], told: str
) -> None:
    sql.driven.apply("v1", things(NAME))
    other = things(NAME, key=key)
    said = sql.driven.validate(other)[0].constraints
    for ptr in key:
        assert said[ptr[1:]].type is ConstraintType.UNSATISFIABLE
        assert re.search(told, said[ptr[1:]].reason)
    with pytest.raises(Refused, match=told):
        sql.driven.apply("v2", other)


def test_reordered_key_is_rejected_by_validate_and_apply(sql: Sql) -> None:
    sql.driven.apply("v1", things(NAME, key=("/id", "/name")))
    other = things(NAME, key=("/name", "/id"))
    said = sql.driven.validate(other)[0].constraints
    assert "has the key (id, name), not (name, id)" in said["id"].reason
    with pytest.raises(Refused, match=r"has the key \(id, name\), not \(name, id\)"):
        sql.driven.apply("v2", other)


def test_alias_of_key_field_is_optional_and_leaves_key_required(sql: Sql) -> None:
    sql.driven.apply("v1", things())
    wanted = things(projection("alias", "integer", ptr="/id", must=True))
    said = sql.driven.validate(wanted)[0].constraints
    assert said["id"].type is ConstraintType.FIELD_REQUIRED
    assert said["alias"].type is ConstraintType.FIELD_OPTIONAL


def test_delta_updates_accept_changed_key(sql: Sql) -> None:
    sql.driven.apply("v1", things())
    other = things(NAME, key=("/id", "/name"), delta_updates=True)
    said = sql.driven.validate(other)[0].constraints
    assert ConstraintType.UNSATISFIABLE not in {each.type for each in said.values()}
    filled_again = [Row((1, "a")), Row((1, "a"))]
    sql.driven.apply("v2", other)
    with sql.driven.open("v2", other) as (writer, [binding]):
        commit(writer, binding, filled_again)


# Adopted tables.


def test_adopted_table_is_not_dropped_by_delete(sql: Sql) -> None:
    filled(sql, things(), Row((1,)))
    # Without its applied spec the table has no owner.
    sql.sql(f"DELETE FROM {sql.table(applied_spec.TABLE)} RETURNING 1")
    sql.driven.apply("v1", things(adopt=True))
    # Later specs need no `adopt`: the adoption is recorded.
    sql.driven.apply("v2", things())
    sql.driven.apply("v3", things(NAME))
    assert sql.driven.delete("v3", things(NAME)) == ""
    assert sql.sql(f"SELECT id FROM {sql.table('things')}") == [(1,)]
    with pytest.raises(Refused, match="did not create it"):
        sql.driven.validate(things())


def test_created_table_with_adopt_option_is_dropped_by_delete(sql: Sql) -> None:
    sql.driven.apply("v1", things(adopt=True))
    sql.driven.apply("v2", things(adopt=True))
    assert "DROP TABLE" in sql.driven.delete("v2", things(adopt=True))
    sql.driven.validate(things())


# Rows without documents.


@pytest.mark.parametrize("adopt", [False, True], ids=["ours", "adopted"])
def test_document_column_for_rows_without_documents_is_rejected(sql: Sql, adopt: bool) -> None:
    filled(sql, things(), Row((1,)))
    if adopt:
        sql.sql(f"DELETE FROM {sql.table(applied_spec.TABLE)} RETURNING 1")
    whole = things(document=True, adopt=adopt)
    said = sql.driven.validate(whole)[0].constraints["flow_document"]
    assert said.type is ConstraintType.UNSATISFIABLE
    assert "has rows without a document" in said.reason
    with pytest.raises(Refused, match="has rows without a document"):
        sql.driven.apply("v2", whole)
    said = sql.driven.validate(things(adopt=adopt))[0].constraints["flow_document"]
    assert said.type is ConstraintType.FIELD_FORBIDDEN


def test_document_column_is_added_to_empty_table(sql: Sql) -> None:
    sql.driven.apply("v1", things())
    whole = things(document=True)
    assert (
        sql.driven.validate(whole)[0].constraints["flow_document"].type
        is ConstraintType.LOCATION_REQUIRED
    )
    sql.driven.apply("v2", whole)
    with sql.driven.open("v2", whole) as (writer, [binding]):
        commit(writer, binding, [Row((1,), (), {"id": 1, "x": 2})])
        assert loaded(writer, binding, [(1,)]) == [{"id": 1, "x": 2}]
    assert sql.driven.apply("v2", whole) == ""


# Documents.


def test_nested_key_with_object_column_is_loaded_once_in_document(sql: Sql) -> None:
    inner, outer = projection("k", "integer", ptr="/o/k", must=True), projection("o", "object")
    alone = Wanted(collection(inner, key=("/o/k",)), document=False)
    filled(sql, alone, Row((2,)))
    wanted = Wanted(collection(inner, outer, key=("/o/k",)), document=False)
    sql.driven.apply("v2", wanted)
    with sql.driven.open("v2", wanted) as (writer, [binding]):
        commit(writer, binding, [Row((1,), (b'{"k":1,"more":[2]}',))])
        assert loaded(writer, binding, [(1,), (2,)]) == [
            {"o": {"k": 1, "more": [2]}},
            {"o": {"k": 2}},
        ]


def test_root_document_under_other_field_name_is_loaded(sql: Sql) -> None:
    filled(sql, things(NAME), Row((2,), ("b",)))
    wanted = replace(things(NAME, projection("whole", "object", ptr="")), fields=("name", "whole"))
    sql.driven.apply("v2", wanted)
    with sql.driven.open("v2", wanted) as (writer, [binding]):
        whole = {"id": 1, "name": "a", "more": [2]}
        values = {"name": "a", "whole": json.dumps(whole).encode()}
        commit(writer, binding, [Row((1,), tuple(values[each.name] for each in binding.values))])
        assert loaded(writer, binding, [(1,), (2,)]) == [whole, {"id": 2, "name": "b"}]


TAGS = projection("tags", "array")
YEARS = projection("years", "object")
FIRST = projection("first", "string", ptr="/tags/0")
DEEP = projection("deep", "string", ptr="/unknown/10/name")
YEAR = projection("year", "string", ptr="/years/2024")
TOP = projection("top", "string", ptr="/0")


def test_field_in_array_without_document_column_is_rejected(sql: Sql) -> None:
    fields = (TAGS, YEARS, FIRST, DEEP, YEAR, TOP)
    said = sql.driven.validate(things(*fields))[0].constraints
    for name in ("first", "deep"):
        assert said[name].type is ConstraintType.FIELD_FORBIDDEN
        assert "may be an item of an array" in said[name].reason
    for name in ("year", "top"):
        assert said[name].type is ConstraintType.LOCATION_RECOMMENDED
    with pytest.raises(Refused, match=r'field "first" of .*"/tags/0" may be an item of an array'):
        sql.driven.apply("v1", things(TAGS, FIRST))
    for fine in ({"document": True}, {"delta_updates": True}):
        wanted = things(*fields, **fine)
        assert (
            sql.driven.validate(wanted)[0].constraints["first"].type
            is ConstraintType.LOCATION_RECOMMENDED
        )
        sql.driven.apply("v1", replace(wanted, table="with_" + next(iter(fine))))
    kept = things(YEARS, YEAR, TOP)
    filled(sql, kept, Row((1,), (None, None, None)))


def test_key_in_array_without_document_column_is_rejected(sql: Sql) -> None:
    key = projection("first", "string", ptr="/tags/0", must=True)
    wanted = Wanted(collection(TAGS, key, key=("/tags/0",)), document=False)
    said = sql.driven.validate(wanted)[0].constraints["first"]
    assert said.type is ConstraintType.UNSATISFIABLE
    with pytest.raises(Refused, match="may be an item of an array"):
        sql.driven.apply("v1", wanted)


# Added columns with a default.


def test_added_column_fills_existing_rows_with_default(sql: Sql) -> None:
    added = (
        projection("n", "integer", must=True, default_json="7"),
        projection("ratio", "number", default_json="0.5"),
        projection("flag", "boolean", default_json="true"),
        projection("note", "string", default_json='"it\'s \\\\"'),
        projection("none", "string"),
    )
    filled(sql, things(NAME), Row((1,), ("a",)))
    wanted = things(NAME, *added)
    assert {*sql.driven.validate(wanted)[0].fills} >= {each.field for each in added}
    sql.driven.apply("v2", wanted)
    assert {*sql.driven.validate(wanted)[0].fills} >= {each.field for each in added}, "still"
    with sql.driven.open("v2", wanted) as (writer, [binding]):
        given = {"name": "b", "n": 8}
        values = tuple(given.get(each.name) for each in binding.values)
        commit(writer, binding, [Row((2,), values)])
    rows = sql.sql(f"SELECT id, n, ratio, flag, note, none FROM {sql.table('things')} ORDER BY id")
    assert rows == [(1, 7, 0.5, True, "it's \\", None), (2, 8, None, None, None, None)]
    # The column of an excluded field stays, but its contents are not known to be filled.
    sql.driven.apply("v3", things(NAME))
    assert sql.driven.validate(wanted)[0].fills == ()


def test_validate_reports_row_count_only_for_replaced_table(sql: Sql) -> None:
    filled(sql, things(NAME), Row((1,), ("a",)), Row((2,), ("b",)))
    assert sql.driven.validate(things(NAME))[0].rows == 0
    assert sql.driven.validate(things(NAME), replaces=True)[0].rows == 2
