"""Columns of a source as JSON: the text of the source if JSON has no exact form."""

import pyarrow as pa
import pytest

from penstock import persist
from penstock.catalog.json_rows import encode_line, rows_of
from penstock.data.schema import LABEL
from penstock.persist.lake import find_collection
from penstock.sources.postgres.catalog_types import PgColumn, PgType
from penstock.sources.postgres.types import column_type

SETTINGS = persist.Settings(background=False, notify="")

OIDS = {
    "bool": 16, "bytea": 17, "int8": 20, "int4": 23, "text": 25, "oid": 26, "float4": 700,
    "float8": 701, "date": 1082, "time": 1083, "timestamp": 1114, "timestamptz": 1184, "json": 114,
    "uuid": 2950,
}  # fmt: skip


TENS = ((10 << 16) | 8) + 4
"""numeric(10, 8)"""


def column(at, name, *texts):
    """Return the field and the values of a column of this type."""
    kept = column_type(PgColumn(f"c{at}", 1, kind_of(name), TENS), text=False)
    field = pa.field(f"c{at}", kept.arrow, metadata={LABEL: kept.label.encode()})
    return field, kept.from_text(pa.array(texts, pa.binary()))


def printed(url, *columns):
    """Return the printed lines of a collection with these columns."""
    schema = pa.schema([field for field, _ in columns])
    with persist.open(url, writer="w", settings=SETTINGS) as client:
        rows = client.create_or_load("rows", schema=schema)
        rows.compare_and_append(pa.table([each for _, each in columns], schema), 0, 1, time=0)
    client, found = find_collection(url, "rows", hold=False, settings=SETTINGS)
    with client:
        shown = rows_of(found.snapshot(0).arrow(), found.state)
        return [encode_line(row) for _, count, row in shown for _ in range(count)]


def kind_of(name):
    if name.endswith("[]"):
        return PgType(1, name, "b", "A", element=kind_of(name[:-2]))
    return PgType(1700 if name == "numeric" else OIDS[name], name, "b", "X")


PLAIN = [
    ("bool", b"t", "true"),
    ("int8", b"-9223372036854775808", "-9223372036854775808"),
    ("oid", b"4294967295", "4294967295"),
    ("float8", b"0.1", "0.1"),
    ("float8", b"NaN", '"NaN"'),
    ("float8", b"-Infinity", '"-Infinity"'),
    ("float4", b"0.1", "0.1"),
    ("float4", b"1e+06", "1e+06"),
    ("float4", b"Infinity", '"Infinity"'),
    ("float4", b"NaN", '"NaN"'),
    ("bytea", b"\\x00ff", '"AP8="'),
    ("text", b"t\xc3\xa4xt", '"täxt"'),
    ("json", b'{"a": 1}', '"{\\"a\\": 1}"'),
    ("date", b"2011-11-11", '"2011-11-11"'),
    ("date", b"0044-03-15 BC", '"0044-03-15 BC"'),
    ("date", b"infinity", '"infinity"'),
    ("time", b"24:00:00", '"24:00:00"'),
    ("timestamp", b"2011-11-11 11:11:11.5", '"2011-11-11 11:11:11.5"'),
    ("timestamptz", b"2011-11-11 11:11:11+00", '"2011-11-11 11:11:11+00"'),
    ("timestamptz", b"-infinity", '"-infinity"'),
    ("timestamptz", b"10000-01-01 00:00:00+00", '"10000-01-01 00:00:00+00"'),
    ("int4[]", b"{1,NULL,3}", "[1,null,3]"),
    ("int4[]", b"{}", "[]"),
    ("int4[]", b"{{1,2},{3,4}}", '"{{1,2},{3,4}}"'),
    ("int4[]", b"[0:1]={1,2}", '"[0:1]={1,2}"'),
    ("date[]", b"{infinity,2011-11-11}", '["infinity","2011-11-11"]'),
    ("float4[]", b"{0.1,NaN}", '[0.1,"NaN"]'),
    ("bytea[]", b'{"\\\\x00ff"}', '["AP8="]'),
    ("numeric", b"0.00000001", '"0.00000001"'),
    ("numeric[]", b"{0.00000001}", '["0.00000001"]'),
    ("text[]", b'{"NULL",NULL,"a b"}', '["NULL",null,"a b"]'),
]


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    columns = [column(at, name, text) for at, (name, text, _) in enumerate(PLAIN)]
    (line,) = printed(f"file:{tmp_path_factory.mktemp('rows')}", *columns)
    return line


@pytest.mark.parametrize("at", range(len(PLAIN)), ids=lambda at: f"{PLAIN[at][0]} {PLAIN[at][1]!r}")
def test_json_row_prints_labelled_column_as_its_source_does(line, at):
    end = f',"c{at + 1}"' if at + 1 < len(PLAIN) else "}"
    assert f'"c{at}":{PLAIN[at][2]}{end}' in line


def test_json_rows_of_array_column_print_nulls_and_every_array_shape(tmp_path):
    texts = [None, b"{1}", b"{{1},{2}}", None, b"{}", b"[2:2]={NULL}"]
    told = ["null", "[1]", '"{{1},{2}}"', "null", "[]", '"[2:2]={NULL}"']
    lines = printed(f"file:{tmp_path}", column(0, "int4[]", *texts))
    assert sorted(lines) == sorted(f'{{"c0":{each}}}' for each in told)
