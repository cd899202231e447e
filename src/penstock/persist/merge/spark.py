"""Merges by Spark: inputs that do not fit into one process are cut into ranges.

    inputs ─► sample ─► range boundaries
                            │
    inputs ─► map: read, cut┴─► shuffle by range ─► reduce: sum, sort, write ─► one batch

Spark only transports the rows, as bytes in Arrow's IPC format. The same functions as in a
single-process merge decide the type, equality and order of rows. Therefore every type is
preserved, and both ways give the same result (`ranges.py` explains why a merge may be cut).

A Spark task may run twice, or be superseded by another attempt. Each attempt writes its own
objects. The batch contains only the objects of the attempts that Spark counts. The other
objects are garbage under the staging id.

An error that every attempt would repeat, such as a damaged object, is not raised in a Spark
task: Spark would retry it in vain, and return it as text. Such an error is returned as a
row, and raised on the driver with its type. Other errors are raised in the Spark task, and
Spark retries it on another executor.
"""

import pickle
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa
from msgspec.structs import replace
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession

from penstock.data import from_ipc, to_ipc
from penstock.errors import PenstockError, TransientError
from penstock.persist.append.shared_storage_check import check_shared_storage, marker_placed
from penstock.persist.append.spark import collected
from penstock.persist.append.task import is_reported
from penstock.persist.batch import PartScan, part_scans_of, together
from penstock.persist.merge.ranges import bounds, range_boundaries
from penstock.persist.merge.task import cut_parts, merge_range, sample_parts
from penstock.persist.scan.task import SETTINGS
from penstock.persist.state import Batch, CollectionState, Inline, Part, stored_columns_of

__all__ = ["SparkMerges", "mapped_spark_errors"]

POOL: Final = "penstock-merges"
"""Pool of a FAIR scheduler for merges, separate from the jobs that users wait for."""

SAMPLES_PER_RANGE: Final = 32

SAMPLED: Final = "count long, rows binary, failure binary"
CUT: Final = "range int, rows binary, failure binary"
MERGED: Final = "range int, batch binary, distinct boolean, failure binary"

ArrowBatches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class SparkMerges:
    """Executor of big merges of one storage location, as jobs of `spark`."""

    spark: SparkSession
    url: str
    part_bytes: int = SETTINGS.part_bytes
    """Approximate size of the result of one Spark task, in bytes."""

    def merge(
        self, collection: CollectionState, inputs: Sequence[Batch], staging: str, *, since: int
    ) -> Batch | None:
        """Return a stored batch under `staging` with the same sum as `inputs` from `since` on.

        Raises:
            Corruption: an object of the inputs is missing or damaged.
            UsageError: a Spark task cannot see the location.
            TransientError: Spark failed. Nothing was merged.
        """
        merged = self._added_up("merge", collection, (), inputs, staging, since=since)
        if not merged:
            return None
        flags = [flag for _, flag in merged if flag is not None]
        return replace(
            together([batch for batch, _ in merged]),
            merged=True,
            since=since,
            distinct=bool(flags) and all(flags),
        )

    def difference(
        self,
        collection: CollectionState,
        minus: Sequence[Batch],
        plus: Sequence[Batch],
        staging: str,
        *,
        time: int,
    ) -> Batch | None:
        """Return a stored batch at `time` that, added to `minus`, sums to `plus`.

        The method raises the same errors as `merge`.
        """
        added = self._added_up("compare", collection, minus, plus, staging, since=time)
        return together([batch for batch, _ in added]) if added else None

    def _added_up(
        self,
        verb: str,
        collection: CollectionState,
        minus: Sequence[Batch],
        plus: Sequence[Batch],
        staging: str,
        *,
        since: int,
    ) -> "list[tuple[Batch, bool | None]]":
        """Return the summed batch of each range, with a flag of distinct rows at `since`."""
        memory = sum(batch.memory for batch in (*minus, *plus))
        negated, bundles = (
            _bundles(collection, batches, self.part_bytes) for batches in (minus, plus)
        )
        job = _Job(
            spark=self.spark,
            url=self.url,
            collection=replace(collection, batches=()),
            bundles=[*negated, *bundles],
            negated=len(negated),
            since=since,
        )
        description = (
            f"penstock: {verb} {len(minus) + len(plus)} batches ({memory >> 20} MiB) of "
            f'"{collection.name}" in {self.url}'
        )
        with (
            marker_placed(self.url, staging) as marker,
            mapped_spark_errors(f'{verb} collection "{collection.name}" of location "{self.url}"'),
            _described(self.spark, description),
        ):
            starts = job.range_boundaries(-(-memory // self.part_bytes))
            return job.merged(starts, staging, self.part_bytes, marker=marker)


@dataclass(frozen=True, slots=True)
class _Job:
    spark: SparkSession
    url: str
    collection: CollectionState
    bundles: list[list[PartScan]]
    """Part scans of each Spark task."""

    negated: int
    """Number of leading bundles that are subtracted."""

    since: int

    def range_boundaries(self, ranges: int) -> pa.Table:
        """Return the boundaries of ranges of about equal size."""
        schema = self.collection.schemas[-1]
        nothing = bounds(stored_columns_of(schema).empty_table(), schema.key)
        if ranges < 2:
            return nothing
        # SUBTLE: Spark serializes everything that a task's function names, so no function
        # names `self`, which holds the session.
        url, collection, bundles, since = self.url, self.collection, self.bundles, self.since
        each = -(-SAMPLES_PER_RANGE * ranges // len(bundles))

        def sampled(numbers: ArrowBatches) -> ArrowBatches:
            for number in _numbers(numbers):
                with _caught() as failure:
                    count, rows = sample_parts(
                        url, collection, bundles[number], since=since, rows=each
                    )
                    if count:
                        yield _row(SAMPLED, count, to_ipc(rows), None)
                if failure:
                    yield _row(SAMPLED, 0, None, failure[0])

        results = _collect_results(self._by_bundle(sampled, SAMPLED))
        samples = [from_ipc(bytes(row["rows"]), nothing.schema) for row in results]
        return range_boundaries(
            [nothing, *samples], [0, *(row["count"] for row in results)], ranges
        )

    def merged(
        self, starts: pa.Table, staging: str, part_bytes: int, *, marker: str
    ) -> list[tuple[Batch, bool | None]]:
        """Return the batch of each range, in order, with a flag of distinct rows at since."""
        url, collection, bundles, since = self.url, self.collection, self.bundles, self.since
        negated = self.negated

        def cut(numbers: ArrowBatches) -> ArrowBatches:
            for number in _numbers(numbers):
                with _caught() as failure:
                    for at, rows in cut_parts(
                        url,
                        collection,
                        bundles[number],
                        since=since,
                        range_boundaries=starts,
                        negated=number < negated,
                    ):
                        yield _row(CUT, at, rows, None)
                if failure:
                    yield _row(CUT, 0, None, failure[0])

        def reduced(chunks: ArrowBatches) -> ArrowBatches:
            gathered: dict[int, list[bytes]] = {}
            failures: list[bytes] = []
            for batch in chunks:
                for at, rows, failed in zip(*(c.to_pylist() for c in batch.columns), strict=True):
                    if failed is not None:
                        failures.append(failed)
                    else:
                        gathered.setdefault(at, []).append(rows)
            if gathered and not failures:
                with _caught() as failures:
                    check_shared_storage(url, marker)
            for at in sorted(gathered) if not failures else ():
                with _caught() as failures:
                    made = merge_range(
                        url,
                        collection,
                        gathered.pop(at),
                        staging,
                        since=since,
                        part_bytes=part_bytes,
                    )
                    if made is not None:
                        batch, flag = made
                        yield _row(MERGED, at, msgspec.msgpack.encode(batch), flag, None)
                if failures:
                    break
            for failure in failures[:1]:
                yield _row(MERGED, 0, None, None, failure)

        chunks = self._by_bundle(cut, CUT)
        # Each range is one partition, by its number; a task with several would merge them
        # in turn.
        by_range = chunks.repartitionById(starts.num_rows + 1, "range")
        results = _collect_results(by_range.mapInArrow(reduced, MERGED))
        return [
            (msgspec.msgpack.decode(row["batch"], type=Batch), row["distinct"])
            for row in sorted(results, key=lambda row: int(row["range"]))
        ]

    def _by_bundle(
        self, function: Callable[[ArrowBatches], ArrowBatches], schema: str
    ) -> DataFrame:
        count = len(self.bundles)
        return self.spark.range(0, count, 1, count).mapInArrow(function, schema)


def _bundles(
    collection: CollectionState, inputs: Sequence[Batch], part_bytes: int
) -> list[list[PartScan]]:
    """Return the parts of `inputs`, in bundles of about `part_bytes` in memory."""
    bundles: list[list[PartScan]] = []
    held = 0.0
    for batch in inputs:
        for piece in part_scans_of(collection, batch):
            memory = max(batch.memory, batch.size) * _size(piece.part) / max(batch.size, 1)
            if not bundles or (bundles[-1] and held + memory > part_bytes):
                bundles.append([])
                held = 0.0
            bundles[-1].append(piece)
            held += memory
    return bundles


def _size(part: Part) -> int:
    return len(part.rows) if isinstance(part, Inline) else part.size


def _numbers(batches: ArrowBatches) -> Iterator[int]:
    for batch in batches:
        yield from batch.column(0).to_pylist()


def _row(schema: str, *values: object) -> pa.RecordBatch:
    """Return one row for Spark, with the columns of `schema`."""
    columns = [column.split() for column in schema.split(", ")]
    arrays = [
        pa.array([value], _ARROW[kind]) for value, (_, kind) in zip(values, columns, strict=True)
    ]
    return pa.record_batch(arrays, names=[name for name, _ in columns])


_ARROW: Final = {
    "int": pa.int32(),
    "long": pa.int64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
}


@contextmanager
def _caught() -> Iterator[list[bytes]]:
    """Yield a list that receives an error that every attempt would repeat; raise other errors."""
    failures: list[bytes] = []
    try:
        yield failures
    except PenstockError as error:
        if not is_reported(error):
            raise
        failures.append(pickle.dumps(error))


def _collect_results(frame: DataFrame) -> list[Row]:
    """Return the rows that the Spark tasks returned, or raise the first error among them."""
    rows = collected(frame)
    for row in rows:
        if row["failure"] is not None:
            error: PenstockError = pickle.loads(row["failure"])
            raise error
    return rows


@contextmanager
def mapped_spark_errors(doing: str, *, secrets: Collection[str] = ()) -> Iterator[None]:
    """Convert an error of Spark to a `TransientError` with the reason, without `secrets`.

    Raises:
        TransientError: Spark failed in the block.
    """
    try:
        yield
    except (PySparkException, Py4JError, OSError) as error:
        text = str(error)
        leaks = any(secret in text for secret in secrets)
        for secret in secrets:
            text = text.replace(secret, "…")
        raise TransientError(
            f"Spark could not {doing}",
            detail=_reason(text),
            hint="Nothing was changed, and it is tried again. See Spark's log for details.",
        ) from (None if leaks else error)


def _reason(text: str) -> str:
    """Return the error that a Python worker raised, if the text has one; else its first line."""
    raised = _RAISED.findall(text.partition("JVM stacktrace")[0])
    first = text.strip().partition("\n")[0] or "Spark says nothing"
    return f"{(raised[-1] if raised else first).rstrip('.')}."


_RAISED: Final = re.compile(
    r"^(?!org\.|java\.|py4j\.)(?:\w+\.)*\w*(?:[Ee]rror|Exception|Arrow\w+): .+", re.MULTILINE
)


@contextmanager
def _described(spark: SparkSession, text: str) -> Iterator[None]:
    """Set description and pool of the jobs in the block; Connect sessions have neither."""
    context: Any = getattr(spark, "_sc", None)
    if context is None:
        yield
        return
    changed = {"spark.job.description": text, "spark.scheduler.pool": POOL}
    before = {name: context.getLocalProperty(name) for name in changed}
    try:
        for name, value in changed.items():
            context.setLocalProperty(name, value)
        yield
    finally:
        for name, value in before.items():
            context.setLocalProperty(name, value)
