"""The cases of tests/vectors/materialize.json that are about types.

Some say what Materialize does and we decided otherwise; `TREATED` says how.
"""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.pgclient import connect, quote_literal
from penstock.sources.postgres.types import to_text
from tests.sources.postgres.types.server import column_of, copied, printed

CASES = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).parents[3] / "vectors" / "materialize.json").read_text()
    )["cases"]
    if case["id"].startswith("T")
}

TREATED = {
    "T01": "as is",
    "T02": "as is",
    "T04": "decided: to_text gives the server's own t and f",
    "T05": r"decided: to_text gives the server's own \x for no bytes",
    "T11": "as is, and without the option too: numeric of no declared precision is text",
    "T12": "decided: the server's own digits, which identify the number",
    "T14": "as is",
    "T16": "as is",
    "T17": "decided: the server's own +00 for UTC",
    "T18": "as is",
    "T19": "decided: json stays as it was written, keys and spaces and all",
    "T20": "as is",
    "T21": "as is",
    "T22": "as is",
    "T24": "as is",
    "T27": "as is, and without the option too",
    "T32": "decided: a domain is stored as its base type",
    "T34": "decided: kept as text",
    "T35": "decided: kept as text",
    "T36": "as is: binary COPY escapes nothing",
}

OURS = {
    "T04": ["t", "f"],
    "T05": [None, r"\x", r"\x00", r"\xabcdef1234"],
    "T12": ["-Infinity", "NaN", "Infinity", "-1.1111111e+30"],
    "T17": ["2011-11-11 20:11:11.123456+00", "2011-11-11 02:11:11.123456+00"],
    "T19": ['{"bar": "baz", "balance": 7.77, "active": false}'],
    "T24": ['{"1 year","2 days"}'],
}

REJECTED = {
    "T32": [("public.whole", "7")],
    "T34": [("time with time zone", "11:11:11.5+09")],
    "T35": [("regtype", "integer"), ("regclass", "pg_class"), ("regproc", "now")],
}


@pytest.fixture(scope="module")
def connection(postgres_server):
    database = postgres_server.create_database("vectors")
    with connect(database.url()) as connection:
        connection.execute("CREATE EXTENSION hstore SCHEMA public")
        connection.execute("CREATE DOMAIN public.whole AS integer")
        yield connection
    database.drop()


def carried(connection, declared, inputs, *, text=False):
    """Return the printed values, checked to be equal by COPY and from text."""
    kept = column_of(connection, declared, text=text)
    rows = ", ".join(
        f"({at}, {'NULL' if value is None else quote_literal(value)}::{declared})"
        for at, value in enumerate(inputs)
    )
    source = f"FROM (VALUES {rows}) t (n, c) ORDER BY n"
    by_text = kept.from_text(*printed(connection, f"SELECT c {source}"))
    by_copy = kept.from_copy(*copied(connection, f"SELECT {kept.select.format('c')} {source}", 1))
    assert to_text(kept.label, by_text) == to_text(kept.label, by_copy)
    return kept, to_text(kept.label, by_copy).to_pylist()


def test_every_vector_has_a_decision():
    assert set(CASES) == set(TREATED)


@pytest.mark.parametrize("id", [id for id in CASES if CASES[id]["family"] == "pg_type"])
def test_value_is_read(connection, id):
    given, expect = CASES[id]["given"], CASES[id]["expect"]
    declared = given["pg_type"].removesuffix(" (as text)").replace("hstore", "public.hstore")
    inputs = [each and each.replace("{'1y','2d'}", "{1y,2d}") for each in given["inputs"]]
    wanted = OURS.get(id, expect["text"])
    kept, told = carried(connection, declared, inputs)
    assert told == wanted
    if "option" in given:
        kept, told = carried(connection, declared, inputs, text=True)
        assert kept.arrow == pa.string()
        assert told == wanted


@pytest.mark.parametrize("id", REJECTED)
def test_value_that_others_reject_is_read(connection, id):
    assert CASES[id]["family"] == "pg_type_reject"
    for declared, value in REJECTED[id]:
        _, told = carried(connection, declared, [value, None])
        assert told == [value, None]


def test_text_has_no_escapes(connection):
    case = CASES["T36"]
    (texts,) = printed(connection, f"SELECT {case['given']['sql_literal']}")
    _, told = carried(connection, "text", [texts[0].as_py().decode()])
    assert told == [case["expect"]["value"]]
