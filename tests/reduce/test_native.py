"""What is aggregated natively, and what is refused because types do not prove it exact."""

from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import UsageError
from penstock.reduce.native import INTEGER, Aggregate, NativePlan, fold_order, native_plan

COLUMNS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("at", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("n", pa.int32(), nullable=False),
        pa.field("least", pa.string(), nullable=False),
        pa.field("most", pa.bool_(), nullable=False),
        pa.field("first", pa.decimal128(10, 2), nullable=False),
        pa.field("last", pa.date32()),
    ]
)


def reduced(strategy: str, **said: Any) -> dict[str, Any]:
    return {"reduce": {"strategy": strategy}, **said}


PROPERTIES: dict[str, Any] = {
    "id": {"type": "integer"},
    "at": {"type": "string", "format": "date-time"},
    "n": reduced("sum", type="integer"),
    "least": reduced("minimize", type="string"),
    "most": reduced("maximize", type="boolean"),
    "first": reduced("firstWriteWins", type=["string", "number"]),
    "last": {"type": ["string", "null"]},
}
SCHEMA = reduced("merge", type="object", required=["id"], properties=PROPERTIES)


def planned(schema: Any, columns: pa.Schema = COLUMNS, order: str = "at") -> NativePlan | None:
    return native_plan(schema, columns, ["id"], [order])


def with_property(name: str, **said: Any) -> dict[str, Any]:
    return {**SCHEMA, "properties": {**PROPERTIES, name: {**PROPERTIES[name], **said}}}


def with_column(name: str, kind: pa.DataType, *, nullable: bool = False) -> pa.Schema:
    at = COLUMNS.get_field_index(name)
    return COLUMNS.set(at, pa.field(name, kind, nullable))


def test_each_column_has_the_aggregate_of_its_strategy():
    plan = planned(SCHEMA)
    assert plan is not None
    assert plan.aggregates == {
        # What is ordered by first is greatest where it is last.
        "at": Aggregate.MAXIMUM,
        "n": Aggregate.SUM,
        "least": Aggregate.MINIMUM,
        "most": Aggregate.MAXIMUM,
        "first": Aggregate.FIRST,
        "last": Aggregate.LAST,
    }
    assert plan.order == ("at", "n", "least", "most", "first", "last")
    assert plan.columns.names == COLUMNS.names
    assert plan.columns.field("n").type == pa.decimal128(38, 0)
    assert plan.columns.field("n").metadata == INTEGER


@pytest.mark.parametrize(
    "schema", [True, {}, {"type": "object"}, {"properties": PROPERTIES}], ids=str
)
def test_without_annotations_the_last_row_is_taken_as_it_is(schema: Any):
    plan = planned(schema, order="last")
    assert plan is not None
    assert plan.aggregates["at"] is plan.aggregates["n"] is Aggregate.LAST
    assert plan.columns == COLUMNS


def test_types_that_the_schema_leaves_out_are_those_of_the_columns():
    plan = planned(reduced("merge", properties={"n": reduced("sum")}))
    assert plan is not None
    assert plan.aggregates["n"] is Aggregate.SUM


def test_schemas_beside_a_schema_are_looked_into():
    beside = {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"type": "integer"}}}}}
    assert planned({**SCHEMA, **beside}) is not None
    beside = {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"minimum": 0}}}}}
    assert planned({**SCHEMA, **beside}) is None
    assert planned({**SCHEMA, "allOf": [{"properties": {"n": {"minimum": 0}}}]}) is None


@pytest.mark.parametrize(
    "schema",
    [
        False,
        with_property("n", minimum=0),
        with_property("n", multipleOf=2),
        with_property("least", pattern="a"),
        with_property("least", minLength=1),
        with_property("least", enum=["a"]),
        with_property("least", const="a"),
        with_property("n", **{"not": True}),
        with_property("n", type="string"),
        with_property("last", type="string"),
        {**SCHEMA, "type": "array"},
        {**SCHEMA, "required": ["id", "missing"]},
        {**SCHEMA, "maxProperties": 7},
        {**SCHEMA, "propertyNames": {"maxLength": 9}},
        {**SCHEMA, "patternProperties": {"^n": {"minimum": 0}}},
        {**SCHEMA, "properties": {"n": PROPERTIES["n"]}, "additionalProperties": False},
        {**SCHEMA, "properties": {"id": {}}, "additionalProperties": {"type": "integer"}},
        {**SCHEMA, "if": {"required": ["n"]}, "then": {"required": ["missing"]}},
        {**SCHEMA, "oneOf": [True, False]},
        {**SCHEMA, "dependentRequired": {"id": ["missing"]}},
    ],
    ids=lambda schema: str(schema)[-60:],
)
def test_what_types_do_not_prove_is_validated_document_by_document(schema: Any):
    assert planned(schema) is None


def test_more_properties_may_be_refused_if_there_are_none():
    assert planned({**SCHEMA, "additionalProperties": False}) is not None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("last", pa.float64()),
        ("last", pa.timestamp("ns")),
        ("last", pa.list_(pa.int64())),
        ("last", pa.uint64()),
        ("last", pa.decimal256(50, 0)),
        ("least", pa.decimal128(9, 0)),
        ("least", pa.date32()),
        ("least", pa.binary()),
        ("n", pa.float64()),
        ("n", pa.decimal128(9, 0)),
        ("id", pa.float64()),
    ],
    ids=str,
)
def test_columns_that_are_not_what_they_are_in_documents_are_folded(name: str, kind: pa.DataType):
    schema = reduced("merge", properties={key: {**it} for key, it in PROPERTIES.items()})
    for each in schema["properties"].values():
        each.pop("type")
    assert planned(schema) is not None
    assert planned(schema, with_column(name, kind)) is None


@pytest.mark.parametrize("name", ["n", "least", "most"])
def test_a_null_cannot_be_summed_or_compared(name: str):
    nullable = with_column(name, COLUMNS.field(name).type, nullable=True)
    assert planned(SCHEMA, nullable) is None
    kind = PROPERTIES[name]["type"]
    assert planned(with_property(name, type=[kind, "null"]), nullable) is None


@pytest.mark.parametrize(
    "annotation",
    [
        {"strategy": "append"},
        {"strategy": "lastWriteWins", "associative": False},
        {"strategy": "lastWriteWins", "delete": True},
        {"strategy": "merge"},
    ],
    ids=str,
)
def test_other_strategies_are_folded(annotation: Any):
    assert planned(with_property("last", reduce=annotation)) is None


def test_a_reduced_key_is_no_key():
    assert planned(with_property("id", **reduced("sum"))) is None


def test_a_first_value_may_be_a_null_that_is_ordered_by():
    plan = planned(with_property("last", **reduced("firstWriteWins")), order="last")
    assert plan is not None
    assert plan.aggregates["last"] is Aggregate.FIRST
    plan = planned(SCHEMA, order="first")
    assert plan is not None
    assert plan.aggregates["first"] is Aggregate.MINIMUM


def test_a_schema_that_cannot_be_followed_says_where():
    with pytest.raises(UsageError, match="#/properties/n/minimun"):
        planned({"properties": {"n": {"minimun": 0}}})


def test_the_order_ends_with_all_other_columns():
    assert fold_order(COLUMNS, ["id", "at"], ["last", "n", "last"]) == (
        *("last", "n", "least", "most", "first"),
    )
