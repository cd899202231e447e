"""Native aggregation, and its rejection if column types do not prove it exact."""

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


def with_strategy(strategy: str, **keywords: Any) -> dict[str, Any]:
    return {"reduce": {"strategy": strategy}, **keywords}


PROPERTIES: dict[str, Any] = {
    "id": {"type": "integer"},
    "at": {"type": "string", "format": "date-time"},
    "n": with_strategy("sum", type="integer"),
    "least": with_strategy("minimize", type="string"),
    "most": with_strategy("maximize", type="boolean"),
    "first": with_strategy("firstWriteWins", type=["string", "number"]),
    "last": {"type": ["string", "null"]},
}
SCHEMA = with_strategy("merge", type="object", required=["id"], properties=PROPERTIES)


def plan_of(schema: Any, columns: pa.Schema = COLUMNS, order: str = "at") -> NativePlan | None:
    return native_plan(schema, columns, ["id"], [order])


def with_property(name: str, **keywords: Any) -> dict[str, Any]:
    return {**SCHEMA, "properties": {**PROPERTIES, name: {**PROPERTIES[name], **keywords}}}


def with_column(name: str, kind: pa.DataType, *, nullable: bool = False) -> pa.Schema:
    i = COLUMNS.get_field_index(name)
    return COLUMNS.set(i, pa.field(name, kind, nullable))


def test_plan_maps_strategies_to_aggregates():
    plan = plan_of(SCHEMA)
    assert plan is not None
    assert plan.aggregates == {
        # The last value of the leading order column is its maximum.
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
def test_plan_without_annotations_takes_last_row(schema: Any):
    plan = plan_of(schema, order="last")
    assert plan is not None
    assert plan.aggregates["at"] is plan.aggregates["n"] is Aggregate.LAST
    assert plan.columns == COLUMNS


def test_plan_takes_missing_types_from_columns():
    plan = plan_of(with_strategy("merge", properties={"n": with_strategy("sum")}))
    assert plan is not None
    assert plan.aggregates["n"] is Aggregate.SUM


def test_plan_follows_in_place_schemas():
    in_place_schema = {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"properties": {"n": {"type": "integer"}}}},
    }
    assert plan_of({**SCHEMA, **in_place_schema}) is not None
    in_place_schema = {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"minimum": 0}}}}}
    assert plan_of({**SCHEMA, **in_place_schema}) is None
    assert plan_of({**SCHEMA, "allOf": [{"properties": {"n": {"minimum": 0}}}]}) is None


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
def test_plan_with_unproven_assertion_is_none(schema: Any):
    assert plan_of(schema) is None


def test_plan_accepts_forbidden_additional_properties():
    assert plan_of({**SCHEMA, "additionalProperties": False}) is not None


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
def test_plan_with_differently_compared_column_is_none(name: str, kind: pa.DataType):
    schema = with_strategy("merge", properties={key: {**it} for key, it in PROPERTIES.items()})
    for column_schema in schema["properties"].values():
        column_schema.pop("type")
    assert plan_of(schema) is not None
    assert plan_of(schema, with_column(name, kind)) is None


@pytest.mark.parametrize("name", ["n", "least", "most"])
def test_plan_with_nullable_aggregate_is_none(name: str):
    nullable = with_column(name, COLUMNS.field(name).type, nullable=True)
    assert plan_of(SCHEMA, nullable) is None
    kind = PROPERTIES[name]["type"]
    assert plan_of(with_property(name, type=[kind, "null"]), nullable) is None


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
def test_plan_with_unsupported_strategy_is_none(annotation: Any):
    assert plan_of(with_property("last", reduce=annotation)) is None


def test_plan_with_reduced_key_is_none():
    assert plan_of(with_property("id", **with_strategy("sum"))) is None


def test_first_of_nullable_order_column_stays_first():
    plan = plan_of(with_property("last", **with_strategy("firstWriteWins")), order="last")
    assert plan is not None
    assert plan.aggregates["last"] is Aggregate.FIRST
    plan = plan_of(SCHEMA, order="first")
    assert plan is not None
    assert plan.aggregates["first"] is Aggregate.MINIMUM


def test_unsupported_keyword_error_names_its_place():
    with pytest.raises(UsageError, match="#/properties/n/minimun"):
        plan_of({"properties": {"n": {"minimun": 0}}})


def test_fold_order_ends_with_other_columns():
    assert fold_order(COLUMNS, ["id", "at"], ["last", "n", "last"]) == (
        *("last", "n", "least", "most", "first"),
    )
