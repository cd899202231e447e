"""Postgres dialect: column names, column types, and type changes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.postgres.dialect import EndpointType, PostgresDialect, shortened
from penstock.protocol.specs import Exists, Inference, StringInference
from penstock.sdk import Field, Refused
from penstock.sdk.bindings import kind_of
from penstock.sdk.sql.dialect import Column, Fit

DIALECT = PostgresDialect()
CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[2] / "vectors" / "flow.json").read_text())[
        "cases"
    ]
    if case["kind"] == "postgres_type_mapping"
}


def field(
    *types: str, key: bool = False, annotations: dict[str, Any] | None = None, **string: Any
) -> Field:
    known = StringInference(**string) if string else None
    inference = Inference(types, known, exists=Exists.MUST)
    return Field("f", "/f", kind_of(inference), inference, key, {}, annotations or {})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_column_type_equals_type_of_vector(case: dict[str, Any]) -> None:
    json_type = case["input"]["json_type"]
    if json_type.endswith("as KEY"):
        fields = [
            field("string", key=True, format=format_) for format_ in json_type.split()[0].split("/")
        ]
    else:
        kind, _, form = json_type.partition(" format=")
        fields = [field(kind, format=form) if form else field(kind)]
    assert {DIALECT.column_type(field_) for field_ in fields} == {case["expect"]["column"]}


@pytest.mark.parametrize(
    ("field_", "expected"),
    [
        (field("integer"), "BIGINT"),
        (field("integer", "null"), "BIGINT"),
        (field("integer", annotations={"maximum": 2**64 - 1}), "NUMERIC"),
        (field("integer", annotations={"minimum": -1e30}), "NUMERIC"),
        (field("integer", annotations={"minimum": 0, "maximum": 2**63 - 1}), "BIGINT"),
        (field("string"), "TEXT"),
        (field("string", format="number"), "NUMERIC"),
        (field("string", format="email"), "TEXT"),
        (field("string", key=True, format="uuid"), "TEXT"),
        (field("string", is_base64=True), "BYTEA"),
        (field("string", content_encoding="base64"), "BYTEA"),
        (field("object"), "JSON"),
        (field("array"), "JSON"),
        (field("string", "integer"), "JSON"),
    ],
    ids=lambda parameter: (
        parameter if isinstance(parameter, str) else "/".join(parameter.inference.types)
    ),
)
def test_column_type_of_field_is_expected_postgres_type(field_: Field, expected: str) -> None:
    assert DIALECT.column_type(field_) == expected


@pytest.mark.parametrize(
    ("field_", "annotated_type", "base", "uses_annotation"),
    [
        (field("string"), "numeric(10,2)", "numeric", True),
        (field("string", key=True), "timestamp with time zone", "timestamp with time zone", True),
        (field("integer"), "smallint", "smallint", True),
        (field("string", is_base64=True), "bytea", "bytea", True),
        (field("string", is_base64=True), "public.blob", "bytea", True),
        (field("string", is_base64=True), "text", "text", False),
        (field("object"), "jsonb", "jsonb", True),
        (field("array"), "integer[]", "integer[]", False),
    ],
    ids=str,
)
def test_column_type_is_annotated_type_if_it_can_hold_the_values(
    field_: Field, annotated_type: str, base: str, uses_annotation: bool
) -> None:
    annotated = Field(
        field_.name,
        field_.ptr,
        field_.kind,
        field_.inference,
        field_.is_key,
        {},
        {"x-postgres-type": annotated_type},
    )
    dialect = PostgresDialect({annotated_type: EndpointType(annotated_type, base)})
    assert dialect.column_type(annotated) == (
        annotated_type if uses_annotation else DIALECT.column_type(field_)
    )
    assert DIALECT.column_type(annotated) == DIALECT.column_type(field_)


@pytest.mark.parametrize(
    ("existing", "annotated_type", "fit"),
    [
        ("numeric(10,2)", "numeric(10,2)", Fit.COMPATIBLE),
        ("numeric(10,2)", "numeric(12,2)", Fit.MIGRATABLE),
        ("numeric(10,2)", "numeric(12,4)", Fit.MIGRATABLE),
        ("numeric(10,2)", "numeric", Fit.MIGRATABLE),
        ("numeric(10,2)", "numeric(10,4)", Fit.INCOMPATIBLE),
        ("numeric(10,2)", "numeric(12,1)", Fit.INCOMPATIBLE),
        ("numeric", "numeric(10,2)", Fit.INCOMPATIBLE),
        ("smallint", "integer", Fit.MIGRATABLE),
        ("bigint", "integer", Fit.INCOMPATIBLE),
        ("bigint", "numeric", Fit.MIGRATABLE),
        ("bigint", "numeric(19,0)", Fit.MIGRATABLE),
        ("bigint", "numeric(18,0)", Fit.INCOMPATIBLE),
        ("real", "double precision", Fit.MIGRATABLE),
        ("double precision", "real", Fit.INCOMPATIBLE),
        ("character varying(10)", "character varying(20)", Fit.MIGRATABLE),
        ("character varying(20)", "character varying(10)", Fit.INCOMPATIBLE),
        ("character varying(20)", "character varying", Fit.MIGRATABLE),
        ("character varying(20)", "text", Fit.MIGRATABLE),
        ("timestamp(3) with time zone", "timestamp with time zone", Fit.MIGRATABLE),
        ("timestamp with time zone", "timestamp(3) with time zone", Fit.INCOMPATIBLE),
        ("timestamp(3) with time zone", "timestamp(6) without time zone", Fit.INCOMPATIBLE),
        ("public.mood", "public.mood", Fit.COMPATIBLE),
        ("public.mood", "text", Fit.INCOMPATIBLE),
        ("integer[]", "bigint[]", Fit.INCOMPATIBLE),
    ],
)
def test_fit_of_annotated_type_is_migratable_only_if_lossless(
    existing: str, annotated_type: str, fit: Fit
) -> None:
    field_ = field("string", annotations={"x-postgres-type": annotated_type})
    dialect = PostgresDialect({annotated_type: EndpointType(annotated_type, annotated_type)})
    assert dialect.fit(Column("f", existing, nullable=True), field_) is fit


@pytest.mark.parametrize(
    ("existing", "field_", "fit"),
    [
        ("bigint", field("integer"), Fit.COMPATIBLE),
        ("numeric", field("integer"), Fit.COMPATIBLE),
        ("integer", field("integer"), Fit.MIGRATABLE),
        ("text", field("integer"), Fit.INCOMPATIBLE),
        ("double precision", field("number"), Fit.COMPATIBLE),
        ("bigint", field("number"), Fit.INCOMPATIBLE),
        ("bigint", field("string", format="integer"), Fit.MIGRATABLE),
        ("timestamp with time zone", field("string", format="date-time"), Fit.COMPATIBLE),
        ("time without time zone", field("string", format="time"), Fit.COMPATIBLE),
        ("timestamp with time zone", field("string"), Fit.MIGRATABLE),
        ("bytea", field("string"), Fit.MIGRATABLE),
        ("boolean", field("string"), Fit.MIGRATABLE),
        ("text", field("string", format="date"), Fit.INCOMPATIBLE),
        ("json", field("object"), Fit.COMPATIBLE),
        ("jsonb", field("object"), Fit.COMPATIBLE),
        ("character varying", field("string"), Fit.COMPATIBLE),
    ],
    ids=str,
)
def test_fit_of_existing_column_depends_on_field_type(
    existing: str, field_: Field, fit: Fit
) -> None:
    assert DIALECT.fit(Column("f", existing, nullable=True), field_) is fit


def test_fit_of_integer_key_column_with_text_field_is_incompatible() -> None:
    text = field("string", key=True)
    numeric = field("integer", key=True, annotations={"maximum": 2**70})
    key = Column("f", "bigint", nullable=False, in_key=True)
    assert DIALECT.fit(key, text) is Fit.INCOMPATIBLE
    assert DIALECT.fit(key, numeric) is Fit.MIGRATABLE


NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=90)


@given(NAMES, NAMES)
def test_column_names_fit_63_bytes_and_stay_distinct(one: str, other: str) -> None:
    for name in (one, other, one + "x" * 60):
        column = DIALECT.column_name(name)
        assert 0 < len(column.encode()) <= 63
        assert shortened(shortened(name)) == shortened(name)
    same = DIALECT.column_name(one + "x" * 60) == DIALECT.column_name(other + "x" * 60)
    assert same == (one == other)


def test_quoted_name_with_nul_raises_refused() -> None:
    with pytest.raises(Refused, match="NUL"):
        DIALECT.quoted("a\0b")
