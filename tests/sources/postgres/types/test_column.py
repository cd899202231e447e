"""Which Arrow type a column of each Postgres type becomes."""

import pyarrow as pa
import pytest

from penstock.pgclient import connect
from penstock.sources.postgres.catalog_types import PgColumn, PgType
from penstock.sources.postgres.types import column_type
from penstock.sources.postgres.types.arrays import array_of
from tests.fix_postgres import major
from tests.sources.postgres.types.server import types_in
from tests.sources.postgres.types.torture import CASES, EACH, SETUP, create_table, known_to

BECOMES = {
    "bool": pa.bool_(),
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "negative_nan": pa.float64(),
    "numeric_10_2": pa.decimal128(10, 2),
    "numeric_38_0": pa.decimal128(38, 0),
    "numeric_38_38": pa.decimal128(38, 38),
    "numeric_38_10": pa.decimal128(38, 10),
    "numeric_19_1": pa.decimal128(19, 1),
    "numeric_18_18": pa.decimal128(18, 18),
    "numeric_1_0": pa.decimal128(1, 0),
    "numeric_1_1": pa.decimal128(1, 1),
    "numeric_5": pa.decimal128(5, 0),
    "bytea": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamp_3": pa.timestamp("us"),
    "timestamp_0": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "oid": pa.int64(),
    "xid": pa.int64(),
    "cid": pa.int64(),
    "domain": pa.int32(),
    "domain_domain": pa.int32(),
    "domain_numeric": pa.decimal128(10, 2),
    "domain_domain_numeric": pa.decimal128(10, 2),
    "domain_timestamptz": pa.timestamp("us", "UTC"),
    "domain_array": array_of(pa.int32()),
    "domain_numeric_array": array_of(pa.decimal128(6, 1)),
    "domain_element_array": array_of(pa.decimal128(10, 2)),
    "int4_array": array_of(pa.int32()),
    "int4_array_2": array_of(pa.int32()),
    "int4_array_3": array_of(pa.int32()),
    "int2_array": array_of(pa.int16()),
    "int8_array": array_of(pa.int64()),
    "oid_array": array_of(pa.int64()),
    "bool_array": array_of(pa.bool_()),
    "float8_array": array_of(pa.float64()),
    "float4_array": array_of(pa.float32()),
    "numeric_10_2_array": array_of(pa.decimal128(10, 2)),
    "bytea_array": array_of(pa.binary()),
    "date_array": array_of(pa.date32()),
    "timestamp_array": array_of(pa.timestamp("us")),
    "timestamptz_array": array_of(pa.timestamp("us", "UTC")),
    # Their delimiter may differ from a comma, and the catalog value does not contain it.
    "box_array": pa.string(),
    "hstore_array": pa.string(),
    "citext_array": pa.string(),
}
"""All others are text, and arrays of them arrays of text."""


@pytest.fixture(scope="module")
def columns(postgres_server):
    database = postgres_server.create_database("columns")
    with connect(database.url()) as connection:
        connection.execute(SETUP)
        connection.execute(create_table("public.torture", known_to(major(database))))
        yield types_in(connection, "public.torture")
    database.drop()


@pytest.mark.parametrize("case", EACH)
def test_column_type_of_each_case(columns, case):
    text = array_of(pa.string()) if case.name.endswith("_array") else pa.string()
    assert column_type(columns[case.name], text=False).arrow == BECOMES.get(case.name, text)
    assert column_type(columns[case.name], text=True).arrow == pa.string()


def test_every_expectation_belongs_to_a_case():
    assert set(BECOMES) <= {case.name for case in CASES}


def test_user_type_with_name_of_a_builtin_type_is_stored_as_text():
    for name in ("integer", "text[]", "numeric"):
        own = PgType(70_000, f'public."{name}"', "b", "U", element=None)
        kept = column_type(PgColumn("c", 1, own), text=False)
        assert kept.arrow == pa.string()
        assert "format" in kept.select
