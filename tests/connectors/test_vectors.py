"""Validate and Apply vectors of tests/vectors/flow.json, in every SQL endpoint.

Some vectors assume that tables are never altered. Penstock alters tables; `TREATED`
states the decision per vector.
"""

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.key_range import KeyRange
from penstock.protocol.specs import Projection
from penstock.sdk import Refused
from penstock.sdk.sql.fence import create_checkpoints
from tests.connectors.connector_client import (
    Row,
    Sql,
    TableBinding,
    collection,
    commit,
    loaded,
    projection,
)

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "vectors" / "flow.json").read_text())[
        "cases"
    ]
    if case["kind"]
    in ("sql_constraints_new", "sql_constraints_existing", "apply_behaviour", "driver_scenario")
}
TREATED = {
    "constr-01": "as is",
    "constr-02": "as is",
    "constr-03": "as is",
    "constr-04": "decided: a column is migrated to text, and a new field is a new column",
    "apply-01": "decided: delta updates can be switched on, not off",
    "apply-02": "as is",
    "apply-03": "as is",
    "apply-06": "as is",
    "apply-07": "as is",
    "apply-08": "as is",
    "apply-n03": "as is",
    "apply-n06": "as is",
    "apply-n11": "as is",
    "apply-n14": "as is",
    "apply-n15": "not here: nothing is staged where the endpoint is authoritative",
    "driver-01": "decided: a field that is not applied is a new column, and values are of the "
    "types of their fields",
}
NEW = {name: case for name, case in CASES.items() if case["kind"] == "sql_constraints_new"}

TYPES = {
    "any": ("null", "boolean", "object", "array", "integer", "number", "string"),
    "bool": ("boolean",),
    "boolOrArrayOrNull": ("boolean", "array", "null"),
    "boolOrString": ("boolean", "string"),
    "int": ("integer",),
    "intDifferentRanges": ("integer",),
    "intOrNum": ("number",),
    "intOrNumOrNull": ("number", "null"),
    "intOrNumOverlappingRanges": ("number",),
    "intOrObjectOrNull": ("integer", "object", "null"),
    "stringOrInt": ("string", "integer"),
}
"""Types of fields whose name is not a type; integer or number is number."""


def field(name: str, *types: str) -> Projection:
    return projection(name, *(types or TYPES.get(name, (name,))))


KEY = projection("theKey", "string", must=True)
KEYED = ("/theKey",)
APPLIED = TableBinding(
    collection(KEY, *map(field, ("string", "bool", "int", "number")), key=KEYED),
    fields=("string", "bool", "int"),
)


def test_every_validate_and_apply_vector_has_a_test() -> None:
    assert {*CASES} == {*TREATED}


@pytest.mark.parametrize("case", NEW.values(), ids=NEW.keys())
def test_validate_for_new_table_returns_constraints_of_vector(sql: Sql, case: Any) -> None:
    names = [each for each in case["input"]["fields"] if each not in ("flow_document", "theKey")]
    table_binding = TableBinding(collection(KEY, *map(field, names), key=KEYED))
    [found] = sql.client.validate(table_binding)
    said = {name: constraint.type.name for name, constraint in found.constraints.items()}
    assert said == case["expect"]["constraints"]


def test_constr_04_validate_for_existing_table_returns_constraints(sql: Sql) -> None:
    expected = CASES["constr-04"]["expect"]
    sql.client.apply("v1", APPLIED)
    changed = TableBinding(
        collection(
            KEY,
            projection("string", "string", must=True),
            field("bool"),
            field("int", "string"),
            field("number"),
            key=KEYED,
        )
    )
    [found] = sql.client.validate(changed)
    said = {name: constraint.type.name for name, constraint in found.constraints.items()}
    same = ("theKey", "string", "bool", "flow_document")
    assert {name: said[name] for name in same} == {name: expected[name] for name in same}
    assert said["int"] == "FIELD_REQUIRED"
    assert said["number"] == "LOCATION_RECOMMENDED"

    back = TableBinding(
        collection(KEY, field("string", "object"), field("bool"), field("int"), key=KEYED)
    )
    [found] = sql.client.validate(back)
    if sql.connector.name != "sqlite":  # SQLite stores objects as text.
        assert found.constraints["string"].type.name == expected["int"] == "UNSATISFIABLE"


@pytest.mark.parametrize("case", ["apply-01", "apply-n11"])
def test_switch_from_delta_to_standard_updates_is_rejected_by_validate(sql: Sql, case: str) -> None:
    assert "Validate error" in CASES[case]["expect"]["outcome"]
    delta = TableBinding(APPLIED.collection, options={"delta_updates": True})
    standard = TableBinding(APPLIED.collection)
    sql.client.apply("v1", standard)
    sql.client.validate(delta)
    sql.client.apply("v2", delta)
    said = CASES["apply-n11"]["expect"]["outcome"].removeprefix("Validate error: ")
    with pytest.raises(Refused, match=said):
        sql.client.validate(standard)


def test_apply_02_two_bindings_of_one_table_are_rejected(sql: Sql) -> None:
    with pytest.raises(Refused, match="duplicate binding"):
        sql.client.validate(APPLIED, APPLIED)


def test_apply_03_same_version_again_changes_nothing(sql: Sql) -> None:
    assert sql.client.apply("v1", APPLIED) != ""
    assert sql.client.apply("v1", APPLIED) == ""


def test_apply_06_delete_of_other_version_is_rejected(sql: Sql) -> None:
    sql.client.apply("v1", APPLIED)
    with pytest.raises(Refused, match=r'"v1".*"v2"'):
        sql.client.delete("v2", APPLIED)
    with sql.client.open("v1", APPLIED):
        pass


def test_apply_07_open_of_other_version_is_rejected(sql: Sql) -> None:
    sql.client.apply("v1", APPLIED)
    with pytest.raises(Refused, match=r'"v1".*"v2"'), sql.client.open("v2", APPLIED):
        pass


def test_apply_08_open_before_apply_is_rejected(sql: Sql) -> None:
    with pytest.raises(Refused, match="has not been applied"), sql.client.open("v1", APPLIED):
        pass


def test_apply_n03_added_field_adds_a_column(sql: Sql) -> None:
    sql.client.apply("v1", APPLIED)
    sql.client.apply("v2", TableBinding(APPLIED.collection))
    assert sql.sql(f"SELECT number FROM {sql.table('things')}") == []


def test_apply_n06_integer_column_is_migrated_to_text(sql: Sql) -> None:
    sql.client.apply("v1", APPLIED)
    with sql.client.open("v1", APPLIED) as (writer, [things]):
        commit(writer, things, [Row(("k",), ("s", True, 7), {})])
    text = collection(KEY, field("string"), field("bool"), field("int", "string"), key=KEYED)
    sql.client.apply("v2", TableBinding(text))
    assert sql.sql(f"SELECT int FROM {sql.table('things')}") == [("7",)]


def test_apply_n14_removed_binding_leaves_its_table(sql: Sql) -> None:
    other = TableBinding(APPLIED.collection, "others")
    sql.client.apply("v1", APPLIED, other)
    sql.client.apply("v2", other)
    assert sql.sql(f"SELECT * FROM {sql.table('things')}") == []


def test_driver_01_scenario_from_validate_to_third_commit(sql: Sql) -> None:
    given, expected = CASES["driver-01"]["input"], CASES["driver-01"]["expect"]
    name, *range_and_fence, checkpoint = given["seed_checkpoint_row"]
    client = dataclasses.replace(sql.client, name=name)
    kinds = {**given["collection"]["properties"]}
    key = kinds.pop("theKey")
    things = collection(
        projection("theKey", key, must=True),
        *(projection(field, kind) for field, kind in kinds.items()),
        key=given["collection"]["key"],
    )
    table_binding = TableBinding(things, fields=given["field_selection"]["values"])

    def constraints() -> dict[str, str]:
        [found] = client.validate(TableBinding(things))
        return {field: each.type.name for field, each in found.constraints.items()}

    assert constraints() == expected["validate_new"]
    assert "CREATE TABLE" in client.apply("v1", table_binding, dry_run=True)
    assert constraints() == expected["validate_new"]
    client.apply("v1", table_binding)
    then = constraints()
    same = [field for field in expected["validate_after_apply"] if field != "number"]
    assert {field: then[field] for field in same} == {
        field: expected["validate_after_apply"][field] for field in same
    }
    assert then["number"] == "LOCATION_RECOMMENDED"

    table = sql.connector.dialect.quoted_path(sql.checkpoints)
    with sql.session() as session:
        session.run(create_checkpoints(sql.connector.dialect, sql.checkpoints))
        session.run(
            f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?)", (name, *range_and_fence, checkpoint)
        )

    counts = []
    opened = client.open("v1", table_binding, key_range=KeyRange(*given["open_range"]))
    with opened as (writer, [binding]):
        assert writer.checkpoint.decode() == expected["opened_checkpoint"]
        for transaction in (given["txn1"], given["txn2"], given["txn3"]):
            counts.append(len(loaded(writer, binding, [(k,) for k in transaction["load_keys"]])))
            rows = [
                Row((k,), (flag, number, word), {"theKey": k}, exists)
                for k, (word, flag, number), exists in transaction.get("stores", [])
            ]
            commit(writer, binding, rows, transaction["checkpoint"].encode())
    assert counts == [0, expected["txn2_loaded"], expected["txn3_loaded"]]

    columns = ", ".join(f'"{each}"' for each in expected["final_table_columns"][:-1])
    found = sql.sql(f'SELECT {columns} FROM {sql.table("things")} ORDER BY "theKey"')
    first, second = given["txn1"]["stores"], given["txn2"]["stores"]
    assert [tuple(row) for row in found] == [
        (k, flag, number, word) for k, (word, flag, number), _ in (second[0], *first[1:], second[1])
    ]
    kept = sql.sql(f"SELECT * FROM {table} ORDER BY key_begin")
    assert [[*row[:-1], base64.b64decode(row[-1]).decode()] for row in kept] == expected[
        "final_checkpoints"
    ]
