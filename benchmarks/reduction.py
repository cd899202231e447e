"""Reductions by Spark's own aggregates, compared with the same by Python workers.

Parquet files with about fifty documents per key are reduced by sum, minimize, maximize and the
last value in an order. Both sides write one document per key to Spark's `noop` sink. Before
timing, both sides must return the same documents.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measure import in_turn, medians
from pyspark import cloudpickle  # noqa: TID251 - this measures Spark.
from pyspark.sql import DataFrame  # noqa: TID251

import penstock.spark as ps
from penstock.data import DIFF
from penstock.data.packed import pack
from penstock.materialize.interval_reader import split_at_keys
from penstock.materialize.row_encoder import encode_documents, encode_fields
from penstock.reduce import Reducer, combine_rows
from penstock.reduce.native import native_plan
from penstock.reduce.spark import aggregate_rows

__all__ = ["native_vs_python"]

KEY: Final = ("id",)
ORDER: Final = ("seq",)
COLUMNS: Final = pa.schema(
    [
        pa.field(name, pa.int64(), nullable=False)
        for name in ("id", "seq", "total", "least", "most", "last")
    ]
)
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["id"],
    "reduce": {"strategy": "merge"},
    "properties": {
        "id": {"type": "integer"},
        "seq": {"type": "integer"},
        "total": {"type": "integer", "reduce": {"strategy": "sum"}},
        "least": {"type": "integer", "reduce": {"strategy": "minimize"}},
        "most": {"type": "integer", "reduce": {"strategy": "maximize"}},
        "last": {"type": "integer"},
    },
}
DOCUMENTS: Final = "key binary, document binary"
FILES: Final = 10
DOCUMENTS_OF_A_KEY: Final = 50


def native_vs_python(rows: int, *, repetitions: int = 3) -> dict[str, float]:
    """Return the median seconds of both sides, and the ratio of Python to native.

    Uses the running session, or a new one.
    """
    # Workers cannot import this file.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        _write(Path(folder), rows)
        frame = ps.session().read.parquet(folder)
        sides = {"native": _reduce_natively(frame), "python": _reduce_in_workers(frame)}
        _check_same(*sides.values())
        native_s, python_s = medians(
            in_turn(repetitions, *(lambda side=side: _timed(side) for side in sides.values()))
        )
    return {
        "native_s": native_s,
        "python_s": python_s,
        "native_vs_python_reduce": python_s / native_s,
    }


def _write(folder: Path, rows: int) -> None:
    rng, size = np.random.default_rng(1), rows // FILES
    for number in range(FILES):
        columns = {
            "id": rng.integers(0, rows // DOCUMENTS_OF_A_KEY, size),
            # Some documents of a key have the same position in the order.
            "seq": rng.integers(0, rows, size),
            **{name: rng.integers(-(10**9), 10**9, size) for name in COLUMNS.names[2:]},
        }
        table = pa.table(columns, schema=COLUMNS).append_column(
            pa.field(DIFF, pa.int64(), nullable=False), pa.array(np.ones(size, np.int64))
        )
        pq.write_table(table, folder / f"{number}.parquet")


def _reduce_natively(frame: DataFrame) -> DataFrame:
    plan = native_plan(SCHEMA, COLUMNS, KEY, ORDER)
    assert plan is not None

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = pa.Table.from_batches([batch]).cast(plan.columns)
            yield from _keyed(rows).to_batches()

    return aggregate_rows(frame, plan).drop(DIFF).mapInArrow(write, DOCUMENTS)


def _reduce_in_workers(frame: DataFrame) -> DataFrame:
    reducer = Reducer(SCHEMA, "bench")

    def fold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        tables = (pa.Table.from_batches([batch]).cast(COLUMNS) for batch in batches)
        for rows in split_at_keys(tables, KEY):
            for batch in combine_rows(reducer, _keyed(rows)):
                yield from pa.Table.from_batches([batch]).cast(_BINARY).to_batches()

    values = [name for name in COLUMNS.names if name not in (*KEY, *ORDER)]
    rows = frame.select(*COLUMNS.names).repartition(*KEY)
    return rows.sortWithinPartitions(*KEY, *ORDER, *values).mapInArrow(fold, DOCUMENTS)


_BINARY: Final = pa.schema([("key", pa.binary()), ("document", pa.binary())])


def _keyed(rows: pa.Table) -> pa.Table:
    keys = pack(encode_fields(rows, KEY))
    return pa.table([keys, encode_documents(rows)], schema=_BINARY)


def _check_same(native: DataFrame, python: DataFrame) -> None:
    ours, theirs = (
        {bytes(row["key"]): json.loads(bytes(row["document"])) for row in frame.collect()}
        for frame in (native, python)
    )
    if ours != theirs:
        sys.exit(f"the two sides differ: {len(ours)} and {len(theirs)} documents")


def _timed(frame: DataFrame) -> float:
    begun = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - begun


if __name__ == "__main__":
    print(json.dumps(native_vs_python(int((sys.argv[1:] or ["5000000"])[0]))))
    ps.session().stop()
