"""Column type names and the column names that a collection allows."""

import pyarrow as pa
import pytest

from penstock.errors import UsageError
from penstock.sources.formats import Column, parse_columns

BECOMES = {
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "numeric(10,2)": pa.decimal128(10, 2),
    "numeric(38,38)": pa.decimal128(38, 38),
    "text": pa.string(),
    "bytes": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "json": pa.string(),
}
ALSO = {
    "BIGINT": "bigint",
    " integer ": "int",
    "double  precision": "double",
    "decimal( 5 , 1 )": "numeric(5,1)",
    "numeric(5)": "numeric(5,0)",
    "bytea": "bytes",
    "string": "text",
}


@pytest.mark.parametrize("word", BECOMES)
def test_column_type_name_maps_to_arrow_type_and_renders_unchanged(word: str):
    column = Column.parse("a", word)
    assert column.arrow == BECOMES[word]
    assert column.type_text == word


@pytest.mark.parametrize("word", ALSO)
def test_column_type_alias_renders_as_canonical_name(word: str):
    assert Column.parse("a", word).type_text == ALSO[word]


@pytest.mark.parametrize(
    "word", ["", "number", "numeric", "numeric(39,2)", "numeric(5,6)", "numeric(0,0)", 5, None]
)
def test_column_with_invalid_type_name_raises_usage_error_with_valid_names(word: object):
    with pytest.raises(UsageError, match='column "a" has a type that does not exist') as caught:
        Column.parse("a", word)
    assert "bigint" in caught.value.hint


@pytest.mark.parametrize(
    "names", [["id", "ID"], [""], [], ["mz_timestamp"], ["mz_diff"], ["mz_progressed"]]
)
def test_columns_with_names_that_collections_reject_raise_usage_error(names: list[str]):
    with pytest.raises(UsageError):
        parse_columns(dict.fromkeys(names, "text"), owner="json format")
