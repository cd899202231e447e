"""Shards as Spark tasks of one job. A barrier stage prevents two attempts of a shard at a time.

    small    one stage: the Spark task of a shard reads the files itself. A single shard also
             reads large contents this way if a merge has left them sorted by key
    large    Spark scans, partitions by key and sorts; the Spark task reads a stream of batches

A transaction is one job, and its Spark tasks process the bindings in order. A large transaction
therefore has all bindings in one DataFrame, each binding in its own struct:

    turn | r0: struct<its columns> | r1: struct<…> | …
"""

import pickle
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import BarrierTaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's users write it.
from pyspark.sql.types import BinaryType, DecimalType, StructField, StructType

from penstock.data import DIFF, TIME
from penstock.data.packed import key_hashes, pack
from penstock.errors import PenstockError, TransientError, UsageError
from penstock.materialize.binding import BindingPlan, Documents, Rows
from penstock.materialize.carrying import as_carried, carrying_errors
from penstock.materialize.checkpoint import NOTHING
from penstock.materialize.feeds import (
    as_documents,
    check_only_added,
    memory_of,
    ordered_by,
    streams,
    whole_keys,
)
from penstock.materialize.intervals import Changes, Contents, Interval, Rewrite, interval_of
from penstock.materialize.line import Address, Line, RoundsServer
from penstock.materialize.rounds import Commits, NotLogged, Rounds
from penstock.materialize.rows import documents, field_columns
from penstock.materialize.run_certificate import run_certificate
from penstock.materialize.shard import ShardPlan, run_shard
from penstock.materialize.transact import reading_order
from penstock.persist.merge.spark import mapped_spark_errors
from penstock.persist.scan.consolidation_sql import quoted
from penstock.persist.scan.plan import scan_changes, scan_snapshot
from penstock.persist.scan.spark import Scanner
from penstock.persist.scan.task import batches_of, store_of
from penstock.persist.state import schema_as_of, stored_columns_of
from penstock.protocol.key_range import KeyRange
from penstock.protocol.transport_security import is_private
from penstock.reduce import COMBINED
from penstock.reduce.native import Aggregate, NativePlan
from penstock.reduce.spark import aggregate_rows

__all__ = ["SparkShards"]

LARGE_BYTES: Final = 64 << 20
"""Minimum size of an interval that Spark reads and sorts."""

TOLD: Final = "done binary"
NO_TURN: Final = -1
"""Turn of the placeholder row, which gives every shard a Spark task."""

Intervals = tuple[Interval | None, ...]


class SparkShards:
    """Runner of shards as Spark tasks of a session."""

    def __init__(
        self,
        spark: SparkSession,
        reach: Callable[[str], str | None],
        *,
        large_bytes: int = LARGE_BYTES,
    ) -> None:
        """Create the runner.

        `reach` returns the root of a storage location for Spark's native reader, or None if
        Python tasks read its files.
        """
        self._spark = spark
        self._reach = reach
        self._large_bytes = large_bytes
        self._slots = 0
        """Largest number of Spark tasks that ran at the same time."""

    def run(self, plans: Sequence[ShardPlan], commits: Commits) -> None:
        """See `Jobs`.

        Raises:
            PenstockError: an error of a Spark task or of the driver.
        """
        doing = f'materialize "{plans[0].spec.materialization}"'
        self._check_slots(len(plans), doing)
        host = self._spark.conf.get("spark.driver.host", "127.0.0.1") or "127.0.0.1"
        rounds = Rounds(len(plans), commits, lambda offered: not self._is_large(offered))
        certificate = None if is_private(f"{host}:0") else run_certificate()
        server = RoundsServer(rounds, host, secrets.token_bytes(32), len(plans), certificate)
        context, tag = self._spark.sparkContext, _tag(plans[0].materialization)
        context.addJobTag(tag)
        try:
            with mapped_spark_errors(doing), as_carried():
                large = self._is_large(plans) and not self._streams(plans)
                run = self._large if large else self._small
                told = run(plans, server.address)
        finally:
            context.removeJobTag(tag)
            server.close()
        if rounds.error is not None:
            raise rounds.error
        errors = [pickle.loads(each) for each in told if each]
        # NotLogged is only the consequence of an error in another shard.
        for error in sorted(errors, key=lambda each: isinstance(each, NotLogged)):
            raise error
        if len(told) != len(plans):
            raise TransientError(
                f"Spark could not {doing}",
                detail=f"Of {len(plans)} tasks, {len(told)} have told what they did.",
            )

    def cancel(self, materialization: str) -> None:
        """See `Jobs`. Spark ends the Python workers of the Spark tasks."""
        self._spark.sparkContext.cancelJobsWithTag(_tag(materialization))

    def _is_large(self, plans: Sequence[ShardPlan]) -> bool:
        return max(_memory(plan, _supposed(plan)) for plan in plans) >= self._large_bytes

    def _streams(self, plans: Sequence[ShardPlan]) -> bool:
        """Return whether a single Spark task can read all intervals itself within its memory."""
        if len(plans) > 1:
            return False  # Each Spark task would read all rows.
        plan = plans[0]
        return all(
            interval is None
            or memory_of(each.collection, interval) < self._large_bytes
            or streams(each, interval, self._large_bytes)
            for each, interval in zip(plan.bindings, _supposed(plan), strict=True)
        )

    def _check_slots(self, count: int, doing: str) -> None:
        """Check that all shards can run at the same time, because they wait for each other."""
        now = self._spark.sparkContext.defaultParallelism
        self._slots = max(self._slots, now)
        if count > self._slots:
            raise UsageError(
                f"Spark cannot {doing}: it has {count} shards, and runs {now} tasks at a time",
                hint=f"Say shards: {now} or fewer, or give Spark more cores.",
            )
        if count > now:
            raise TransientError(
                f"Spark cannot {doing} now: it has {count} shards, and Spark runs {now} tasks at a "
                "time",
                detail=f"It has run {self._slots}; executors were lost.",
                hint="It goes on when they are back.",
            )

    def _small(self, plans: Sequence[ShardPlan], line: Address) -> list[bytes]:
        def task(mine: Iterable[tuple[int, ShardPlan]]) -> Iterator[bytes]:
            for at, plan in mine:
                yield _told(at, plan, line, supposed=_supposed(plan))

        context = self._spark.sparkContext
        tasks: Any = context.parallelize(list(enumerate(plans)), len(plans))
        # A barrier doubles the duration of a small job. A single Spark task needs none without
        # speculation.
        if len(plans) > 1 or self._spark.conf.get("spark.speculation", "false") != "false":
            tasks = tasks.barrier()
        return list(tasks.mapPartitions(task).collect())

    def _large(self, plans: Sequence[ShardPlan], line: Address) -> list[bytes]:
        supposed = [_supposed(plan) for plan in plans]
        frames = [
            self._shared_out(plans, [at for at, each in enumerate(supposed) if each == intervals])
            for intervals in dict.fromkeys(supposed)
            if any(intervals)
        ]
        # A shard without rows would have no Spark task, and would not commit.
        shards = self._spark.range(len(plans)).selectExpr("CAST(id AS INT) AS shard")
        none = shards.withColumn("turn", F.lit(NO_TURN))
        frames.append(frames[0].limit(0).unionByName(none, allowMissingColumns=True))
        rows = reduce(DataFrame.unionByName, frames).repartitionById(len(plans), "shard")
        bindings = plans[0].bindings
        order = ["turn"]
        for number, each in enumerate(bindings):
            order += [f"r{number}.{quoted(name)}" for name in _sorted_by(each)]

        def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            at = BarrierTaskContext.get().partitionId()
            told = _told(at, plans[at], line, _Batches(batches, bindings), supposed[at])
            yield pa.record_batch([pa.array([told], pa.binary())], names=["done"])

        sorted_rows = rows.sortWithinPartitions(*order)
        told = sorted_rows.mapInArrow(task, TOLD, barrier=True).collect()
        return [bytes(row["done"]) for row in told]

    def _shared_out(self, plans: Sequence[ShardPlan], shards: Sequence[int]) -> DataFrame:
        """Return the rows of shards with equal intervals, with a column `shard`."""
        plan = plans[shards[0]]
        bindings, intervals = plan.bindings, _supposed(plan)
        frames = [
            self._tagged(bindings, number, interval, plan.upper)
            for number, interval in enumerate(intervals)
            if interval is not None
        ]
        rows = reduce(DataFrame.unionByName, frames)
        if len(plans) == 1:
            return rows.withColumn("shard", F.lit(0))
        ranges = [(at, plans[at].log.key_range) for at in shards]

        def share_out(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                yield from _with_shards(batch, bindings, ranges)

        schema = rows.withColumn("shard", F.lit(0)).schema
        return rows.mapInArrow(share_out, schema)

    def _tagged(
        self, bindings: Sequence[BindingPlan], number: int, interval: Interval, upper: int
    ) -> DataFrame:
        """Return the updates of one binding in its struct; the other structs are null."""
        rows = self._fed(bindings[number], interval, upper)
        schemas = [self._nothing(each, upper) for each in bindings]
        # SUBTLE: Spark matches the fields of structs by position, even in unionByName. A struct
        # therefore has the field order of its schema in the DataFrames of all bindings.
        structs = [
            F.struct(*map(_column, schema.names)).cast(schema).alias(f"r{at}")
            if at == number
            else F.lit(None).cast(schema).alias(f"r{at}")
            for at, schema in enumerate(schemas)
        ]
        turn = reading_order(bindings).index(number)
        return rows.select(F.lit(turn).alias("turn"), *structs)

    def _fed(self, plan: BindingPlan, interval: Interval, upper: int) -> DataFrame:
        """Return the input of a Spark task: updates of rows, or documents with order columns."""
        rows, shape = self._rows(plan, interval), plan.shape
        if isinstance(shape, Rows):
            return rows
        schema, name = self._fed_schema(plan, shape, upper), plan.bound.name
        if shape.native is not None:
            return self._aggregated(rows, plan.bound.name, shape, shape.native, schema)
        stored = _stored(plan, interval)

        def as_fed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                table = pa.Table.from_batches([batch]).select(stored.names).cast(stored)
                with carrying_errors():
                    found = as_documents(table, shape, collection=name)
                yield from found.to_batches()

        return rows.mapInArrow(as_fed, schema)

    def _aggregated(
        self,
        rows: DataFrame,
        name: str,
        shape: Documents,
        native: NativePlan,
        schema: StructType,
    ) -> DataFrame:
        """Return the rows, combined by Spark into one document per key."""

        def as_fed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                with carrying_errors():
                    check_only_added(batch.column(DIFF).to_numpy(), collection=name)
                table = pa.Table.from_batches([batch]).select(native.columns.names)
                table = table.cast(native.columns)
                keys = pack(field_columns(table, native.key))
                order = [table.column(each).combine_chunks() for each in shape.order]
                yield pa.record_batch(
                    [keys, documents(table), *order], names=[each.name for each in schema]
                )

        return aggregate_rows(rows, native).mapInArrow(as_fed, schema)

    def _fed_schema(self, plan: BindingPlan, shape: Documents, upper: int) -> StructType:
        stored = self._empty(plan, upper).schema
        names = [name for name in ordered_by(shape) if name not in COMBINED.names]
        order = [
            StructField(name, _widened(column, shape) or stored[column].dataType)
            for name, column in zip(names, shape.order, strict=True)
        ]
        return StructType(
            [StructField("key", BinaryType()), StructField("document", BinaryType()), *order]
        )

    def _scanner(self, url: str) -> Scanner:
        return Scanner(
            spark=self._spark,
            url=url,
            blob=store_of(url),
            batches=batches_of(url),
            root=self._reach(url),
            remote=False,
        )

    def _nothing(self, plan: BindingPlan, upper: int) -> StructType:
        if isinstance(plan.shape, Documents):
            return self._fed_schema(plan, plan.shape, upper)
        return self._empty(plan, upper).schema

    def _empty(self, plan: BindingPlan, upper: int) -> DataFrame:
        # Schema as of the transaction: the collection may have advanced since.
        collection = plan.collection
        upper = min(upper, collection.upper)
        return self._scanner(plan.url).changes(scan_changes(collection, upper, upper))

    def _rows(self, plan: BindingPlan, interval: Interval) -> DataFrame:
        scanner, collection = self._scanner(plan.url), plan.collection
        match interval:
            case Changes(lower, upper):
                return scanner.changes(scan_changes(collection, lower, upper))
            case Contents(as_of) | Rewrite(None, as_of):
                return _added(scanner.contents(scan_snapshot(collection, as_of)), as_of)
            case Rewrite(before, as_of):
                now = scanner.contents(scan_snapshot(collection, as_of))
                if not isinstance(plan.shape, Rows) or before is None:
                    return _added(now, as_of)
                key = list(plan.shape.key)
                was = scanner.contents(scan_snapshot(collection, before))
                gone = was.join(now.select(*map(_column, key)), key, "left_anti")
                taken = _timed(gone.withColumn(DIFF, F.lit(-1).cast("long")), as_of)
                return _added(now, as_of).unionByName(taken, allowMissingColumns=True)


def _tag(materialization: str) -> str:
    return f"materialize {materialization}"


def _added(rows: DataFrame, time: int) -> DataFrame:
    return _timed(rows.withColumn(DIFF, F.lit(1).cast("long")), time)


def _timed(rows: DataFrame, time: int) -> DataFrame:
    return rows.withColumn(TIME, F.lit(time).cast("long"))


def _widened(column: str, shape: Documents) -> DecimalType | None:
    """Return the type of a sum column, which is wider than its input; None for other columns."""
    native = shape.native
    summed = native is not None and native.aggregates.get(column) is Aggregate.SUM
    return DecimalType(38, 0) if summed else None


def _sorted_by(plan: BindingPlan) -> Sequence[str]:
    match plan.shape:
        case Rows(key):
            return key
        case Documents() as shape:
            return ordered_by(shape)


def _stored(plan: BindingPlan, interval: Interval) -> pa.Schema:
    as_of = interval.upper - 1 if isinstance(interval, Changes) else interval.as_of
    return stored_columns_of(schema_as_of(plan.collection, max(as_of, 0)))


class _Batches:
    """Feed of a Spark task from the batches of Spark, binding after binding."""

    def __init__(self, batches: Iterator[pa.RecordBatch], bindings: Sequence[BindingPlan]) -> None:
        self._batches = batches
        self._bindings = bindings
        self._turns = {number: turn for turn, number in enumerate(reading_order(bindings))}
        self._next: pa.RecordBatch | None = None

    def __call__(self, number: int, interval: Interval) -> Iterator[pa.Table]:
        plan = self._bindings[number]
        match plan.shape:
            case Rows(key):
                return whole_keys(self._of(number, _stored(plan, interval)), key)
            case Documents():
                return self._of(number, COMBINED)

    def drain(self) -> None:
        """Read the remaining batches. Otherwise Spark discards the Python worker."""
        for _ in self._batches:
            pass

    def _of(self, number: int, schema: pa.Schema) -> Iterator[pa.Table]:
        while True:
            batch = self._next if self._next is not None else next(self._batches, None)
            self._next = None
            if batch is None:
                return
            batch = batch.filter(pc.not_equal(batch.column("turn"), NO_TURN))
            end = int((batch.column("turn").to_numpy() <= self._turns[number]).sum())
            if end:
                rows = pa.Table.from_struct_array(batch.column(f"r{number}").slice(0, end))
                yield rows.select(schema.names).cast(schema)
            if end < batch.num_rows:
                self._next = batch.slice(end)
                return


def _with_shards(
    batch: pa.RecordBatch,
    bindings: Sequence[BindingPlan],
    ranges: Sequence[tuple[int, KeyRange]],
) -> Iterator[pa.RecordBatch]:
    turns = batch.column("turn").to_numpy()
    for turn, number in enumerate(reading_order(bindings)):
        rows = batch.filter(pa.array(turns == turn))
        if not rows.num_rows:
            continue
        hashes = key_hashes(
            _packed(pa.Table.from_struct_array(rows.column(f"r{number}")), bindings[number])
        )
        for at, key_range in ranges:
            kept = pa.array((hashes >= key_range.begin) & (hashes <= key_range.end))
            mine = rows.filter(kept)
            yield mine.append_column("shard", pa.array([at] * mine.num_rows, pa.int32()))


def _packed(rows: pa.Table, plan: BindingPlan) -> pa.BinaryArray:
    match plan.shape:
        case Documents():
            return rows.column("key").combine_chunks()
        case Rows(key):
            schema = stored_columns_of(plan.collection.schemas[-1])
            keys = rows.select(key).cast(pa.schema([schema.field(name) for name in key]))
            return pack(field_columns(keys, key))


def _supposed(plan: ShardPlan) -> Intervals:
    """Return the missing interval of each binding, if the endpoint agrees with the recovery log."""
    held = plan.log.checkpoint or NOTHING
    return tuple(interval_of(each.bound, held, plan.upper) for each in plan.bindings)


def _memory(plan: ShardPlan, intervals: Intervals) -> int:
    return sum(
        memory_of(each.collection, interval)
        for each, interval in zip(plan.bindings, intervals, strict=True)
        if interval is not None
    )


def _told(
    at: int,
    plan: ShardPlan,
    address: Address,
    feed: _Batches | None = None,
    supposed: Intervals | None = None,
) -> bytes:
    """Run a shard, and return its pickled error, or empty bytes.

    The error is returned, not raised, because Spark would retry the Spark task.
    """
    try:
        line = Line(address, at)
        try:
            run_shard(plan, line, feed, supposed)
        except BaseException:
            line.close(done=False)
            raise
        line.close(done=True)
    except PenstockError as error:
        return pickle.dumps(error)
    finally:
        if feed is not None:
            feed.drain()
    return b""


def _column(name: str) -> Any:
    return F.col(quoted(name))
