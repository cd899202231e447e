"""Stored values survive the Parquet files of persist, infinities included."""

import pyarrow as pa
import pytest

from penstock import persist
from penstock.sources.postgres.types import ColumnType, to_text
from penstock.sources.postgres.types.arrays import array_of

KEPT = [
    (ColumnType("date", pa.date32(), "date"), [b"-infinity", b"infinity", b"4714-11-24 BC"]),
    (ColumnType("date_late", pa.date32(), "date"), [b"5874897-12-31", b"1582-10-10", None]),
    (
        ColumnType("at", pa.timestamp("us"), "timestamp"),
        [b"-infinity", b"infinity", b"294247-01-10 04:00:54.775806"],
    ),
    (
        ColumnType("zoned", pa.timestamp("us", "UTC"), "timestamptz"),
        [b"-infinity", b"infinity", b"4714-11-24 00:00:00+00 BC"],
    ),
    (
        ColumnType("price", pa.decimal128(38, 38), "numeric"),
        [b"0." + b"9" * 38, None, b"0." + b"0" * 38],
    ),
    (ColumnType("x", pa.float64(), "float8"), [b"NaN", b"-0", b"-Infinity"]),
    (ColumnType("raw", pa.binary(), "bytea"), [b"\\x", b"\\x00", None]),
    (
        ColumnType("list", array_of(pa.date32()), "date[]"),
        [b"{infinity,NULL}", b"{{-infinity}}", b"{}"],
    ),
    (
        ColumnType("texts", array_of(pa.string()), "text[]"),
        [b'{"",NULL,"NULL"}', None, b"[0:0]={a}"],
    ),
]


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "parquet"])
def test_values_read_back_from_parquet_are_unchanged(tmp_path, inline):
    columns = [kept.from_text(pa.array(texts, pa.binary())) for kept, texts in KEPT]
    schema = pa.schema([("id", pa.int32()), *((kept.column, kept.arrow) for kept, _ in KEPT)])
    table = pa.table([pa.array([0, 1, 2], pa.int32()), *columns], schema)
    settings = persist.Settings(background=False, notify="", inline_bytes=1 << 20 if inline else 0)
    with persist.open(f"file:{tmp_path}", writer="w", settings=settings) as client:
        rows = client.create_or_load("rows", schema=schema)
        rows.compare_and_append(table, 0, 1, time=0)
        read = rows.snapshot(0).arrow().sort_by("id")
    assert inline == (not list(tmp_path.rglob("*.parquet")))
    for kept, texts in KEPT:
        column = read.column(kept.column).combine_chunks()
        assert to_text(kept.label, column).cast(pa.binary()).to_pylist() == texts
