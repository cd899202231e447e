"""Rows of every type as JSON lines."""

import json
from typing import Any

import pyarrow as pa
import pytest

from penstock.catalog.json_rows import encode_line, rows_of
from penstock.data import BIGINT, UNIT, stored_schema
from penstock.persist.state import CollectionState, SchemaVersion

ODD = 1_600_000_000_000_000_001


def json_values(column: pa.Array, codecs: tuple[tuple[str, int], ...] = ()) -> list[Any]:
    ones = [1] * len(column)
    table = pa.table([column, ones, ones], schema=stored_schema(pa.schema([("c", column.type)])))
    schema = SchemaVersion(0, 0, b"", codecs=codecs)
    collection = CollectionState(1, "c", schemas=(schema,))
    lines = [encode_line(row) for _, _, row in rows_of(table, collection)]
    return [json.loads(line, parse_int=str)["c"] for line in lines]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.list_(pa.timestamp("ns")), [ODD], ["2020-09-13 12:26:40.000000001"]),
        (pa.list_(pa.timestamp("ns"), 1), [ODD], ["2020-09-13 12:26:40.000000001"]),
        (pa.struct([("t", pa.time64("ns"))]), {"t": 1}, {"t": "00:00:00.000000001"}),
        (pa.map_(pa.string(), pa.duration("ns")), [("a", 1)], [["a", "1"]]),
        (pa.list_(pa.timestamp("ns", "No/Where")), [ODD], [str(ODD)]),
        (pa.list_(pa.timestamp("us")), [2**63 - 1], ["<value out of range: 9223372036854775807>"]),
        (pa.timestamp("us", "No/Where"), 1, "1"),
        (pa.list_(pa.list_(pa.date32())), [[2**31 - 1]], [["<value out of range: 2147483647>"]]),
    ],
    ids=str,
)
def test_json_line_of_nested_times_is_exact(kind, value, expected):
    assert json_values(pa.array([value, None], kind)) == [expected, None]


def test_json_line_of_large_integer_is_a_number():
    stored = BIGINT.encode(-(10**5000))
    codecs = ((BIGINT.name, 1), (UNIT.name, 1))
    assert json_values(pa.array([stored]), codecs) == ["-1" + "0" * 5000]
