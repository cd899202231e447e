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
from penstock.materialize.binding_kind import BindingPlan, DocumentsKind, RowsKind
from penstock.materialize.checkpoint import NOTHING
from penstock.materialize.commit_barrier import CommitBarrier, CommitCoordinator, CommitNotRecorded
from penstock.materialize.driver_channel import (
    Address,
    DriverChannel,
    DriverChannelServer,
    restore_errors,
    transport_errors,
)
from penstock.materialize.interval_reader import (
    can_stream,
    check_no_deletes,
    estimate_bytes,
    sort_columns,
    split_at_keys,
    updates_to_documents,
)
from penstock.materialize.intervals import (
    ChangesInterval,
    ContentsInterval,
    Interval,
    RewriteInterval,
    missing_interval,
)
from penstock.materialize.row_encoder import encode_documents, encode_fields
from penstock.materialize.run_certificate import run_certificate
from penstock.materialize.shard import ShardPlan, run_shard
from penstock.materialize.shard_transaction import read_order
from penstock.persist.merge.spark import mapped_spark_errors
from penstock.persist.scan.consolidation_sql import quoted
from penstock.persist.scan.plan import scan_changes, scan_snapshot
from penstock.persist.scan.spark import Scanner
from penstock.persist.scan.task import batches_of, store_of
from penstock.persist.state import schema_as_of, stored_columns_of
from penstock.protocol.key_range import KeyRange
from penstock.protocol.transport_security import is_private
from penstock.reduce import COMBINED, Aggregate, NativePlan
from penstock.reduce.spark import aggregate_rows

__all__ = ["SparkRunner"]

LARGE_BYTES: Final = 64 << 20
"""Minimum size of an interval that Spark reads and sorts."""

RESULT_SCHEMA: Final = "done binary"
NO_TURN: Final = -1
"""Turn of the placeholder row, which gives every shard a Spark task."""

Intervals = tuple[Interval | None, ...]


class SparkRunner:
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

    def run(self, plans: Sequence[ShardPlan], coordinator: CommitCoordinator) -> None:
        """See `Runner`.

        Raises:
            PenstockError: an error of a Spark task or of the driver.
        """
        doing = f'materialize "{plans[0].spec.materialization}"'
        self._check_slots(len(plans), doing)
        host = self._spark.conf.get("spark.driver.host", "127.0.0.1") or "127.0.0.1"
        barrier = CommitBarrier(
            len(plans), coordinator, lambda next_plans: not self._is_large(next_plans)
        )
        certificate = None if is_private(f"{host}:0") else run_certificate()
        server = DriverChannelServer(
            barrier, host, secrets.token_bytes(32), len(plans), certificate
        )
        context, tag = self._spark.sparkContext, _tag(plans[0].materialization)
        context.addJobTag(tag)
        try:
            with mapped_spark_errors(doing), restore_errors():
                large = self._is_large(plans) and not self._streams(plans)
                run = self._large if large else self._small
                results = run(plans, server.address)
        finally:
            context.removeJobTag(tag)
            server.close()
        if barrier.error is not None:
            raise barrier.error
        errors = [pickle.loads(result) for result in results if result]
        # CommitNotRecorded is only the consequence of an error in another shard.
        for error in sorted(errors, key=lambda error: isinstance(error, CommitNotRecorded)):
            raise error
        if len(results) != len(plans):
            raise TransientError(
                f"Spark could not {doing}",
                detail=f"Of {len(plans)} tasks, {len(results)} have returned a result.",
            )

    def cancel(self, materialization: str) -> None:
        """See `Runner`. Spark ends the Python workers of the Spark tasks."""
        self._spark.sparkContext.cancelJobsWithTag(_tag(materialization))

    def _is_large(self, plans: Sequence[ShardPlan]) -> bool:
        return max(_memory(plan, _expected_intervals(plan)) for plan in plans) >= self._large_bytes

    def _streams(self, plans: Sequence[ShardPlan]) -> bool:
        """Return whether a single Spark task can read all intervals itself within its memory."""
        if len(plans) > 1:
            return False  # Each Spark task would read all rows.
        plan = plans[0]
        return all(
            interval is None
            or estimate_bytes(binding.collection, interval) < self._large_bytes
            or can_stream(binding, interval, self._large_bytes)
            for binding, interval in zip(plan.bindings, _expected_intervals(plan), strict=True)
        )

    def _check_slots(self, count: int, doing: str) -> None:
        """Check that all shards can run at the same time, because they wait for each other."""
        now = self._spark.sparkContext.defaultParallelism
        self._slots = max(self._slots, now)
        if count > self._slots:
            raise UsageError(
                f"Spark cannot {doing}: {count} shards need as many concurrent tasks, and Spark "
                f"runs {now}",
                hint=f"Set shards: {now} or fewer, or give Spark more cores.",
            )
        if count > now:
            raise TransientError(
                f"Spark cannot {doing} now: it has {count} shards, and Spark runs {now} tasks at a "
                "time",
                detail=f"Spark has run {self._slots} tasks at a time; executors were lost.",
                hint="The materialization continues when the executors are back.",
            )

    def _small(self, plans: Sequence[ShardPlan], address: Address) -> list[bytes]:
        def task(mine: Iterable[tuple[int, ShardPlan]]) -> Iterator[bytes]:
            for at, plan in mine:
                yield _run_task(at, plan, address, expected=_expected_intervals(plan))

        context = self._spark.sparkContext
        tasks: Any = context.parallelize(list(enumerate(plans)), len(plans))
        # A barrier doubles the duration of a small job. A single Spark task needs none without
        # speculation.
        if len(plans) > 1 or self._spark.conf.get("spark.speculation", "false") != "false":
            tasks = tasks.barrier()
        return list(tasks.mapPartitions(task).collect())

    def _large(self, plans: Sequence[ShardPlan], address: Address) -> list[bytes]:
        expected = [_expected_intervals(plan) for plan in plans]
        frames = [
            self._with_shard_column(
                plans, [number for number, missing in enumerate(expected) if missing == intervals]
            )
            for intervals in dict.fromkeys(expected)
            if any(intervals)
        ]
        # A shard without rows would have no Spark task, and would not commit.
        shards = self._spark.range(len(plans)).selectExpr("CAST(id AS INT) AS shard")
        none = shards.withColumn("turn", F.lit(NO_TURN))
        frames.append(frames[0].limit(0).unionByName(none, allowMissingColumns=True))
        rows = reduce(DataFrame.unionByName, frames).repartitionById(len(plans), "shard")
        bindings = plans[0].bindings
        order = ["turn"]
        for number, binding in enumerate(bindings):
            order += [f"r{number}.{quoted(name)}" for name in _sorted_by(binding)]

        def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            at = BarrierTaskContext.get().partitionId()
            results = _run_task(
                at, plans[at], address, _SparkBatches(batches, bindings), expected[at]
            )
            yield pa.record_batch([pa.array([results], pa.binary())], names=["done"])

        sorted_rows = rows.sortWithinPartitions(*order)
        results = sorted_rows.mapInArrow(task, RESULT_SCHEMA, barrier=True).collect()
        return [bytes(row["done"]) for row in results]

    def _with_shard_column(self, plans: Sequence[ShardPlan], shards: Sequence[int]) -> DataFrame:
        """Return the rows of shards with equal intervals, with a column `shard`."""
        plan = plans[shards[0]]
        bindings, intervals = plan.bindings, _expected_intervals(plan)
        frames = [
            self._tagged(bindings, number, interval, plan.upper)
            for number, interval in enumerate(intervals)
            if interval is not None
        ]
        rows = reduce(DataFrame.unionByName, frames)
        if len(plans) == 1:
            return rows.withColumn("shard", F.lit(0))
        ranges = [(at, plans[at].log.key_range) for at in shards]

        def rebalance(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                yield from _with_shards(batch, bindings, ranges)

        schema = rows.withColumn("shard", F.lit(0)).schema
        return rows.mapInArrow(rebalance, schema)

    def _tagged(
        self, bindings: Sequence[BindingPlan], number: int, interval: Interval, upper: int
    ) -> DataFrame:
        """Return the updates of one binding in its struct; the other structs are null."""
        rows = self._input(bindings[number], interval, upper)
        schemas = [self._nothing(binding, upper) for binding in bindings]
        # SUBTLE: Spark matches the fields of structs by position, even in unionByName. A struct
        # therefore has the field order of its schema in the DataFrames of all bindings.
        structs = [
            F.struct(*map(_column, schema.names)).cast(schema).alias(f"r{position}")
            if position == number
            else F.lit(None).cast(schema).alias(f"r{position}")
            for position, schema in enumerate(schemas)
        ]
        turn = read_order(bindings).index(number)
        return rows.select(F.lit(turn).alias("turn"), *structs)

    def _input(self, plan: BindingPlan, interval: Interval, upper: int) -> DataFrame:
        """Return the input of a Spark task: updates of rows, or documents with order columns."""
        rows, kind = self._rows(plan, interval), plan.kind
        if isinstance(kind, RowsKind):
            return rows
        schema, name = self._input_schema(plan, kind, upper), plan.bound.name
        if kind.native is not None:
            return self._aggregated(rows, plan.bound.name, kind, kind.native, schema)
        stored = _stored(plan, interval)

        def to_input(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                table = pa.Table.from_batches([batch]).select(stored.names).cast(stored)
                with transport_errors():
                    found = updates_to_documents(table, kind, collection=name)
                yield from found.to_batches()

        return rows.mapInArrow(to_input, schema)

    def _aggregated(
        self,
        rows: DataFrame,
        name: str,
        kind: DocumentsKind,
        native: NativePlan,
        schema: StructType,
    ) -> DataFrame:
        """Return the rows, combined by Spark into one document per key."""

        def to_input(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                with transport_errors():
                    check_no_deletes(batch.column(DIFF).to_numpy(), collection=name)
                table = pa.Table.from_batches([batch]).select(native.columns.names)
                table = table.cast(native.columns)
                keys = pack(encode_fields(table, native.key))
                order = [table.column(column).combine_chunks() for column in kind.order]
                yield pa.record_batch(
                    [keys, encode_documents(table), *order],
                    names=[column.name for column in schema],
                )

        return aggregate_rows(rows, native).mapInArrow(to_input, schema)

    def _input_schema(self, plan: BindingPlan, kind: DocumentsKind, upper: int) -> StructType:
        stored = self._empty(plan, upper).schema
        names = [name for name in sort_columns(kind) if name not in COMBINED.names]
        order = [
            StructField(name, _widened(column, kind) or stored[column].dataType)
            for name, column in zip(names, kind.order, strict=True)
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
        if isinstance(plan.kind, DocumentsKind):
            return self._input_schema(plan, plan.kind, upper)
        return self._empty(plan, upper).schema

    def _empty(self, plan: BindingPlan, upper: int) -> DataFrame:
        # Schema as of the transaction: the collection may have advanced since.
        collection = plan.collection
        upper = min(upper, collection.upper)
        return self._scanner(plan.url).changes(scan_changes(collection, upper, upper))

    def _rows(self, plan: BindingPlan, interval: Interval) -> DataFrame:
        scanner, collection = self._scanner(plan.url), plan.collection
        match interval:
            case ChangesInterval(lower, upper):
                return scanner.changes(scan_changes(collection, lower, upper))
            case ContentsInterval(as_of) | RewriteInterval(None, as_of):
                return _added(scanner.contents(scan_snapshot(collection, as_of)), as_of)
            case RewriteInterval(before, as_of):
                now = scanner.contents(scan_snapshot(collection, as_of))
                if not isinstance(plan.kind, RowsKind) or before is None:
                    return _added(now, as_of)
                key = list(plan.kind.key)
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


def _widened(column: str, kind: DocumentsKind) -> DecimalType | None:
    """Return the type of a sum column, which is wider than its input; None for other columns."""
    native = kind.native
    summed = native is not None and native.aggregates.get(column) is Aggregate.SUM
    return DecimalType(38, 0) if summed else None


def _sorted_by(plan: BindingPlan) -> Sequence[str]:
    match plan.kind:
        case RowsKind(key):
            return key
        case DocumentsKind() as kind:
            return sort_columns(kind)


def _stored(plan: BindingPlan, interval: Interval) -> pa.Schema:
    as_of = interval.upper - 1 if isinstance(interval, ChangesInterval) else interval.as_of
    return stored_columns_of(schema_as_of(plan.collection, max(as_of, 0)))


class _SparkBatches:
    """IntervalReader of a Spark task from the batches of Spark, binding after binding."""

    def __init__(self, batches: Iterator[pa.RecordBatch], bindings: Sequence[BindingPlan]) -> None:
        self._batches = batches
        self._bindings = bindings
        self._turns = {number: turn for turn, number in enumerate(read_order(bindings))}
        self._next: pa.RecordBatch | None = None

    def __call__(self, number: int, interval: Interval) -> Iterator[pa.Table]:
        plan = self._bindings[number]
        match plan.kind:
            case RowsKind(key):
                return split_at_keys(self._of(number, _stored(plan, interval)), key)
            case DocumentsKind():
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
    for turn, number in enumerate(read_order(bindings)):
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
    match plan.kind:
        case DocumentsKind():
            return rows.column("key").combine_chunks()
        case RowsKind(key):
            schema = stored_columns_of(plan.collection.schemas[-1])
            keys = rows.select(key).cast(pa.schema([schema.field(name) for name in key]))
            return pack(encode_fields(keys, key))


def _expected_intervals(plan: ShardPlan) -> Intervals:
    """Return the missing interval of each binding, if the endpoint agrees with the recovery log."""
    checkpoint = plan.log.checkpoint or NOTHING
    return tuple(
        missing_interval(binding.bound, checkpoint, plan.upper) for binding in plan.bindings
    )


def _memory(plan: ShardPlan, intervals: Intervals) -> int:
    return sum(
        estimate_bytes(binding.collection, interval)
        for binding, interval in zip(plan.bindings, intervals, strict=True)
        if interval is not None
    )


def _run_task(
    at: int,
    plan: ShardPlan,
    address: Address,
    feed: _SparkBatches | None = None,
    expected: Intervals | None = None,
) -> bytes:
    """Run a shard, and return its pickled error, or empty bytes.

    The error is returned, not raised, because Spark would retry the Spark task.
    """
    try:
        channel = DriverChannel(address, at)
        try:
            run_shard(plan, channel, feed, expected)
        except BaseException:
            channel.close(done=False)
            raise
        channel.close(done=True)
    except PenstockError as error:
        return pickle.dumps(error)
    finally:
        if feed is not None:
            feed.drain()
    return b""


def _column(name: str) -> Any:
    return F.col(quoted(name))
