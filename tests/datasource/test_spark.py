"""The format on a real Spark: few tests with several assertions, because batches are slow."""

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock import persist
from penstock.datasource.spark import register
from penstock.persist import Client, Collection, Settings
from tests.persist.shop import SCHEMA

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


class Shop:
    """A storage location with one collection, on disk."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file:{folder / 'lake'}"
        self.client: Client = persist.open(
            f"{self.url}/a",
            writer="w",
            settings=Settings(background=False, inline_bytes=0, upkeep_ms=0, settle_ms=0),
        )
        self.table: Collection = self.client.create_or_load(
            "rows", schema=SCHEMA, key_columns=("k",)
        )
        self.checkpoint = str(folder / "checkpoint")

    def put(self, *updates: tuple[Any, ...], upper: int) -> None:
        self.table.write([({"k": k, "n": n}, time, diff) for k, n, time, diff in updates])
        self.table.seal(upper).result()

    def compact(self, since: int) -> None:
        self.table.allow_compaction(since).result()
        for _ in range(3):
            self.client.run_maintenance()
        self.client.compact()

    def read(self, spark: SparkSession, name: str = "rows", **options: Any) -> DataFrame:
        reader = spark.read.format("penstock").options(location=self.url, **options)
        return reader.load(name)

    def follow(
        self,
        spark: SparkSession,
        sink: "Callable[[DataFrame, int], None]",
        name: str = "rows",
        *,
        until_now: bool = False,
        **options: Any,
    ) -> StreamingQuery:
        stream = spark.readStream.format("penstock").options(location=self.url, **options)
        writer = stream.load(name).writeStream.foreachBatch(sink)
        writer = writer.option("checkpointLocation", self.checkpoint)
        if until_now:
            writer = writer.trigger(availableNow=True)
        return writer.start()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    with made.client:
        yield made


class Sink:
    """Stores the rows of a batch by its number, so a repeated batch counts once."""

    def __init__(self) -> None:
        self.batches: dict[int, list[tuple[Any, ...]]] = {}
        self.fails_at: int | None = None

    def __call__(self, batch: DataFrame, number: int) -> None:
        rows = sorted(map(tuple, batch.collect()), key=repr)
        if number in self.batches:
            assert self.batches[number] == rows
        self.batches[number] = rows
        if number == self.fails_at:
            self.fails_at = None
            raise RuntimeError("the sink failed")


def rows(frame: DataFrame) -> "Counter[tuple[Any, ...]]":
    return Counter(map(tuple, frame.collect()))


def test_batch_reads_contents_as_of_its_time(spark: SparkSession, shop: Shop) -> None:
    shop.put(("a", 1, 1, 1), ("b", 2, 1, 1), (None, None, 1, 1), upper=2)
    shop.compact(1)
    shop.put(("a", 1, 2, -1), ("a", 3, 2, 1), ("c", 4, 2, 1), upper=3)
    register(spark)
    latest = shop.read(spark)
    shop.put(("a", 3, 3, -1), upper=4)
    for as_of, frame in ((1, shop.read(spark, asOf=1)), (2, latest), (3, shop.read(spark))):
        expected = {tuple(row.values()): n for row, _, n in shop.table.snapshot(as_of)}
        assert rows(frame) == expected, as_of
    assert len(holds(shop)) == 3

    wheres = ["n > 2 and k is not null", "k <> 'a' and n in (2, 4)"]
    plainly = [rows(latest.where(where)) for where in wheres]
    spark.conf.set(PUSHDOWN, "true")
    try:
        assert [rows(latest.where(where)) for where in wheres] == plainly
        plan = latest.where("n > 2")._jdf.queryExecution().executedPlan().toString()
        assert "Filter (" not in plan
    finally:
        spark.conf.unset(PUSHDOWN)


def holds(shop: Shop) -> list[str]:
    return [listed.key for listed in shop.client.reader.machine.blob.list("hold/")]


def test_every_type_has_its_spark_form(spark: SparkSession, shop: Shop) -> None:
    zone = datetime(2026, 11, 15, 12, tzinfo=UTC)
    columns: list[tuple[str, pa.DataType, Any, Any]] = [
        ("u8", pa.uint8(), 200, 200),
        ("u64", pa.uint64(), 2**64 - 1, Decimal(2**64 - 1)),
        ("f16", pa.float16(), 1.5, 1.5),
        ("dec", pa.decimal128(10, 2), Decimal("1.50"), Decimal("1.50")),
        ("wide", pa.decimal256(50, 0), Decimal(10**45), str(10**45)),
        ("day", pa.date32(), date(2026, 11, 15), date(2026, 11, 15)),
        ("clock", pa.time64("us"), 7, 7),
        ("short", pa.time32("ms"), 8, 8),
        ("shorts", pa.list_(pa.time32("ms")), [8, None], [8, None]),
        ("ns", pa.timestamp("ns"), 12345, 12345),
        ("naive", pa.timestamp("ms"), datetime(2026, 1, 2), datetime(2026, 1, 2)),  # noqa: DTZ001
        ("at", pa.timestamp("us", "UTC"), zone, zone),
        ("took", pa.duration("ms"), 5, 5),
        ("raw", pa.large_binary(), b"x", b"x"),
        ("list", pa.list_(pa.uint16()), [1, None], [1, None]),
        ("map", pa.map_(pa.string(), pa.int8()), [("a", 1)], {"a": 1}),
        (
            "struct",
            pa.struct([("x", pa.uint8()), ("y", pa.string())]),
            {"x": 1, "y": None},
            (1, None),
        ),
        ("nothing", pa.null(), None, None),
    ]
    schema = pa.schema(
        [
            *((name, kind) for name, kind, _, _ in columns),
            pa.field("must", pa.int8(), nullable=False),
        ]
    )
    table = shop.client.create_or_load("types", schema=schema)
    arrays = [pa.array([value, None], kind) for _, kind, value, _ in columns]
    table.write(pa.table([*arrays, pa.array([1, 2], pa.int8())], schema=schema), time=1)
    table.seal(2).result()
    frame = shop.read(spark, "types")
    assert [field.nullable for field in frame.schema] == [True] * len(columns) + [False]
    full, empty = sorted(frame.collect(), key=lambda row: row.must)
    types = [
        tuple(v) if isinstance(v, tuple) else bytes(v) if isinstance(v, bytearray) else v
        for v in full
    ]
    moment = frame.selectExpr("unix_micros(at)").where("must = 1").collect()[0][0]
    assert moment == int(zone.timestamp() * 1_000_000)
    expected = [value for *_, value in columns]
    i = schema.names.index("at")
    assert [*types[:i], *types[i + 1 :]] == [*expected[:i], *expected[i + 1 :], 1]
    assert list(empty) == [None] * len(columns) + [2]

    sink = Sink()
    query = shop.follow(spark, sink, "types", until_now=True, startAt="1")
    assert query.awaitTermination(120)
    given = {row[schema.names.index("must")]: row for row in sink.batches[0]}
    place = schema.names.index("short")
    assert given[1][place : place + 2] == (8, [8, None])
    assert given[2][place : place + 2] == (None, None)


def test_unsupported_calls_raise_with_remedy(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    shop.put(("a", 1, 1, 1), upper=2)

    def assert_rejected(call: Callable[[], Any], *texts: str) -> None:
        with pytest.raises((AnalysisException, StreamingQueryException)) as caught:
            call()
        for text in texts:
            assert text in str(caught.value)

    assert_rejected(
        lambda: shop.read(spark, as_of=1), 'has no option "as_of"', "hint: The options are location"
    )
    assert_rejected(
        lambda: shop.read(spark, startAt=1).collect(), '"startAt" is for spark.readStream'
    )
    other = spark.read.format("penstock").options(location=shop.url).schema("k string")
    assert_rejected(lambda: other.load("rows").collect(), "Remove schema(…)")
    missing = spark.readStream.format("penstock").options(location=shop.url).load("rows")
    starting = missing.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    assert_rejected(lambda: starting.start().awaitTermination(60), 'requires option "startAt"')


@pytest.mark.skipif(
    pyspark.__version__.startswith("4.1."), reason="PySpark 4.1 does not limit the rows of a batch"
)
def test_restarted_stream_delivers_each_change_once(spark: SparkSession, shop: Shop) -> None:
    sink = Sink()
    options: dict[str, Any] = {"startAt": "latest", "maxRowsPerTrigger": 2, "hold": "nightly"}
    shop.put(("a", 1, 1, 1), ("b", 1, 2, 1), upper=3)

    # Killed after the first batch was logged and before it completed.
    sink.fails_at = 0
    with pytest.raises(StreamingQueryException):
        shop.follow(spark, sink, **options).awaitTermination(120)
    shop.put(("a", 1, 4, -1), ("a", 2, 4, 1), ("c", 1, 5, 1), upper=6)
    shop.compact(6)
    assert shop.table.since == 2

    # Killed in the third batch, with the first two complete; the current contents are the end.
    sink.fails_at = 2
    with pytest.raises(StreamingQueryException):
        shop.follow(spark, sink, until_now=True, **options).awaitTermination(120)
    shop.put(("d", 1, 7, 1), upper=8)
    shop.compact(8)
    query = shop.follow(spark, sink, until_now=True, **options)
    assert query.awaitTermination(120)
    assert [sink.batches[number] for number in sorted(sink.batches)] == [
        [("a", 1, 2, 1), ("b", 1, 2, 1)],
        [("a", 1, 4, -1), ("a", 2, 4, 1)],
        [("c", 1, 5, 1)],
        [("d", 1, 7, 1)],
    ]


def test_running_stream_holds_history_and_stops_at_schema_change(
    spark: SparkSession, shop: Shop
) -> None:
    sink = Sink()
    shop.put(("a", 1, 1, 1), upper=3)
    query = shop.follow(spark, sink, startAt="1", snapshot="false")
    query.processAllAvailable()
    for time in (4, 5):
        shop.put(("b", time, time, 1), upper=time + 1)
        shop.compact(time)
        query.processAllAvailable()
        assert query.exception() is None
    shop.table.alter(SCHEMA.append(pa.field("note", pa.string())))
    with pytest.raises(StreamingQueryException, match="has a new schema from 6 on"):
        query.awaitTermination(120)
    shop.table.write([({"k": "c", "n": 1, "note": "new"}, 6, 1)])
    shop.table.seal(7).result()
    assert shop.follow(spark, sink, until_now=True, startAt="1").awaitTermination(120)
    given = [update for number in sorted(sink.batches) for update in sink.batches[number]]
    assert given == [("b", 4, 4, 1), ("b", 5, 5, 1), ("c", 1, "new", 6, 1)]
