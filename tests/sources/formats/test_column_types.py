"""Words for types, and which columns a collection can have."""

import pyarrow as pa
import pytest

from penstock.errors import UsageError
from penstock.sources.formats import Column, columns_of

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
def test_a_word_is_an_arrow_type_and_is_said_again(word: str):
    column = Column.parse("a", word)
    assert column.arrow == BECOMES[word]
    assert column.said == word


@pytest.mark.parametrize("word", ALSO)
def test_other_words_mean_the_same(word: str):
    assert Column.parse("a", word).said == ALSO[word]


@pytest.mark.parametrize(
    "word", ["", "number", "numeric", "numeric(39,2)", "numeric(5,6)", "numeric(0,0)", 5, None]
)
def test_a_word_that_does_not_exist_is_refused_with_those_that_do(word: object):
    with pytest.raises(UsageError, match='column "a" has a type that does not exist') as caught:
        Column.parse("a", word)
    assert "bigint" in caught.value.hint


@pytest.mark.parametrize(
    "names", [["id", "ID"], [""], [], ["mz_timestamp"], ["mz_diff"], ["mz_progressed"]]
)
def test_names_that_collections_cannot_have_are_refused(names: list[str]):
    with pytest.raises(UsageError):
        columns_of(dict.fromkeys(names, "text"), what="json format")
