"""Native Spark aggregates equal the documents folded in Python."""

import random
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from penstock.data import DIFF, TIME, advance, consolidate, stored_schema
from penstock.data.packed import pack
from penstock.materialize.row_encoder import encode_documents, encode_fields
from penstock.reduce import Reducer, combine_rows, decode
from penstock.reduce.native import NativePlan, fold_order, native_plan
from penstock.reduce.spark import aggregate_rows

KEY = ("compacted", "k")
ORDER = ("at",)

COLUMNS = pa.schema(
    [
        pa.field("compacted", pa.bool_(), nullable=False),
        pa.field("n", pa.int64(), nullable=False),
        pa.field("k", pa.string()),
        pa.field("a.b `c`", pa.string(), nullable=False),
        pa.field("most", pa.int16(), nullable=False),
        pa.field("any", pa.bool_(), nullable=False),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("first", pa.decimal128(9, 2)),
        pa.field("raw", pa.binary()),
        pa.field("last", pa.date32()),
    ]
)
STORED = stored_schema(COLUMNS)
AGGREGATED = {
    "reduce": {"strategy": "merge"},
    "properties": {
        "n": {"reduce": {"strategy": "sum"}},
        "a.b `c`": {"reduce": {"strategy": "minimize"}},
        "most": {"reduce": {"strategy": "maximize"}},
        "any": {"reduce": {"strategy": "maximize"}},
        "first": {"reduce": {"strategy": "firstWriteWins"}},
        "raw": {"reduce": {"strategy": "firstWriteWins"}},
    },
}

# Few values: rows tie, are equal, and differ only in the last column.
TEXTS = st.sampled_from(["", "a", "B", "ä", "z\x00", "\uffff", "\U0001f600", '"\\'])
ROWS = st.tuples(
    st.none() | st.integers(0, 30).map(str),
    st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]),
    TEXTS,
    st.sampled_from([-(2**15), 0, 7, 2**15 - 1]),
    st.booleans(),
    st.none() | st.sampled_from([datetime(1, 1, 1, tzinfo=UTC), datetime(2020, 1, 1, tzinfo=UTC)]),
    st.none() | st.sampled_from([Decimal("-1.50"), Decimal("0.10"), Decimal(2)]),
    st.none() | st.sampled_from([b"", b"\x00", b"\xff"]),
    st.none() | st.sampled_from([date(1500, 1, 1), date(1969, 12, 31), date(2020, 2, 29)]),
    st.integers(0, 4),
    st.integers(1, 3),
)


def stored(rows: list[tuple[Any, ...]], *, compacted: bool) -> pa.Table:
    columns = [list(column) for column in zip(*rows, strict=True)]
    named = dict(zip(["k", *(n for n in STORED.names if n not in KEY)], columns, strict=True))
    named["compacted"] = [compacted] * len(rows)
    return pa.table([pa.array(named[field.name], field.type) for field in STORED], schema=STORED)


def folded(updates: pa.Table, schema: Any) -> dict[bytes, Any]:
    """Return the documents folded in Python, by key."""
    by = fold_order(COLUMNS, KEY, ORDER)
    # Arrow parses a name with a dot as a path.
    plain = updates.select(by).rename_columns([f"c{i}" for i in range(len(by))])
    keys = [(f"c{i}", "ascending", "at_start") for i in range(len(by))]
    updates = updates.take(pc.sort_indices(plain, sort_keys=keys))
    counts = updates.column(DIFF).to_pylist()
    rows = updates.take([at for at, count in enumerate(counts) for _ in range(count)])
    rows = rows.drop_columns([TIME, DIFF])
    table = pa.table({"key": pack(encode_fields(rows, KEY)), "document": encode_documents(rows)})
    return told(combine_rows(Reducer(schema, "c"), table))


def told(batches: Any) -> dict[bytes, Any]:
    rows = [row for batch in batches for row in batch.to_pylist()]
    found = {row["key"]: decode(row["document"], what="document") for row in rows}
    assert len(found) == len(rows)
    return found


def natively(frame: DataFrame, plan: NativePlan) -> dict[bytes, Any]:
    rows = aggregate_rows(frame, plan).drop(DIFF).toArrow().cast(plan.columns)
    table = pa.table(
        {"key": pack(encode_fields(rows, plan.key)), "document": encode_documents(rows)}
    )
    return told(table.to_batches())


# Every example is a Spark job: run few, with many keys, and do not shrink.
@pytest.mark.parametrize("schema", [AGGREGATED, True], ids=["aggregated", "whole"])
@settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(ROWS, min_size=100, max_size=200), st.randoms(use_true_random=False))
def test_native_aggregates_equal_folded_documents_before_and_after_compaction(
    spark: SparkSession, schema: Any, rows: list[tuple[Any, ...]], chance: random.Random
):
    plan = native_plan(schema, COLUMNS, KEY, ORDER)
    assert plan is not None
    written = stored(rows, compacted=False)
    compacted = consolidate(advance(stored(rows, compacted=True), 3))
    updates = pa.concat_tables([written, compacted])
    order = list(range(updates.num_rows))
    chance.shuffle(order)
    frame = spark.createDataFrame(updates.take(order)).repartition(chance.randint(1, 3))
    found = natively(frame, plan)
    assert found == folded(updates, schema)
    assert len(found) == 2 * len({row[0] for row in rows})


def test_native_sum_of_largest_values_and_counts_does_not_overflow(spark: SparkSession):
    columns = pa.schema(
        [pa.field("k", pa.int64(), nullable=False), pa.field("n", pa.int64(), nullable=False)]
    )
    schema = {"reduce": {"strategy": "merge"}, "properties": {"n": AGGREGATED["properties"]["n"]}}
    plan = native_plan(schema, columns, ["k"], [])
    assert plan is not None
    most = 2**63 - 1
    frame = spark.createDataFrame(
        [(1, -(2**63), most), (1, 5, 1), (2, most, 3)], f"k long, n long, {DIFF} long"
    )
    rows = aggregate_rows(frame, plan).drop(DIFF).toArrow().cast(plan.columns).sort_by("k")
    assert encode_documents(rows).to_pylist() == [
        b'{"k":1,"n":%d}' % (-(2**63) * most + 5),
        b'{"k":2,"n":%d}' % (3 * most),
    ]


def test_native_aggregate_without_ordered_columns_does_not_sort(spark: SparkSession):
    names = ("k", "at", "n")
    columns = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in names])
    schema = {"reduce": {"strategy": "merge"}, "properties": {"n": AGGREGATED["properties"]["n"]}}
    plan = native_plan(schema, columns, ["k"], ["at"])
    assert plan is not None
    frame = aggregate_rows(spark.createDataFrame([(1, 1, 1, 1)], [*names, DIFF]), plan)
    tree = frame._jdf.queryExecution().executedPlan().toString()
    assert "HashAggregate" in tree
    assert "Sort" not in tree
