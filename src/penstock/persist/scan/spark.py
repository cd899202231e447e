"""DataFrames over collections.

`plan.py` plans a read as part scans. This module turns them into Spark scans, and the scans
into one DataFrame:

    base   ─► scan ─► anti-join with the keys that the deltas delete ───┐
                               ▲ broadcast                              ├─► union
    deltas ─► scan ─► group ───┴──────────► rows that the deltas insert ┘

The base is neither shuffled nor grouped. Filters and column pruning reach its scan. Batches
outside the time range appear in no scan.

A scan is Spark's own Parquet reader over the stored files. If Spark cannot reach the store
or does not support a type, Spark tasks read the files through this project's store client.

Damage is detected in both cases, under any configuration of the session. Each read sets the
options that could hide damage. Pages carry checksums that Spark verifies. Footers are
verified here before Spark opens the file (hazard C10, decision 10).

The module uses only the DataFrame API, so it works with classic and with Connect sessions.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from threading import Lock
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's users write it.
from pyspark.sql import types as T  # noqa: N812 - likewise.
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.data import DIFF, TIME, advance, consolidate
from penstock.data.spark_types import is_native, to_spark, to_spark_schema
from penstock.durable import Blob
from penstock.errors import Corruption, InternalError, UsageError
from penstock.persist.batch import Batches, PartScan, defaults_of
from penstock.persist.encoding import checksum
from penstock.persist.scan.consolidation_sql import ConsolidationSql, quoted
from penstock.persist.scan.plan import ChangesScan, SnapshotScan
from penstock.persist.scan.task import ROWS_AT_ONCE, read_parts
from penstock.persist.state import (
    CollectionState,
    Inline,
    SchemaVersion,
    Stored,
    columns_of,
    stored_columns_of,
)

__all__ = ["Scanner"]

FOOTERS_AT_ONCE: Final = 16
BROADCAST_ROWS: Final = 4_000_000
"""Up to this number of updates, deleted keys are broadcast; above it, Spark shuffles them."""

BROADCAST_BYTES: Final = 256 << 20
"""Memory limit of the broadcast: a few keys may be long."""

LISTING_THRESHOLD: Final = "spark.sql.sources.parallelPartitionDiscovery.threshold"

V1_SOURCES: Final = "spark.sql.sources.useV1SourceList"

REGEX_NAMES: Final = "spark.sql.parser.quotedRegexColumnNames"

PARQUET: Final = frozenset(
    ("parquet", "org.apache.spark.sql.execution.datasources.v2.parquet.parquetdatasourcev2")
)
"""Spark's names of the Parquet source in `V1_SOURCES`; either one counts."""

HERE_BYTES: Final = 16 << 20
"""Up to this size, this process consolidates the deltas, because a Spark job starts slower."""

HANDED_BYTES: Final = 1 << 20

ONE_TASK_ROWS: Final = 500_000
ONE_TASK_PARTS: Final = 32

PER_READ: Final = {
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
    "mergeSchema": "false",
    "parquet.page.verify-checksum.enabled": "true",
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
}


@dataclass(frozen=True, slots=True)
class Scanner:
    """Factory of DataFrames for planned scans of one storage location."""

    spark: SparkSession
    url: str
    blob: Blob
    batches: Batches
    root: str | None
    """URL of the location for Spark's file systems; None if Spark cannot reach it."""

    remote: bool
    """Flag of a Spark Connect session."""

    scans: list[DataFrame] = field(default_factory=list)
    """DataFrames that read files, of all DataFrames created here."""

    def contents(self, scan: SnapshotScan) -> DataFrame:
        """Return the rows of the collection as of the scan's time, repeated by multiplicity."""
        consolidation = ConsolidationSql(to_spark_schema(columns_of(scan.schema)))
        # Spark cannot join on maps: with a map in the key, the base is consolidated as
        # well.
        if not scan.base or (scan.deltas and not consolidation.joinable(scan.key)):
            updates = self._updates(scan.collection, (*scan.base, *scan.deltas), scan.schema)
            if not scan.base:
                updates = _gathered(updates, scan)
            return _repeated(_raise_below(_net(updates, consolidation), 0, scan), consolidation)
        base = self._updates(scan.collection, scan.base, scan.schema).selectExpr(
            *consolidation.names
        )
        if not scan.deltas:
            return base
        if scan.delta_memory <= HERE_BYTES:
            gone, brought = self._summed_here(scan)
        else:
            updates = self._updates(scan.collection, scan.deltas, scan.schema)
            added = _net(_gathered(updates, scan), consolidation)
            gone, brought = added.where(f"{DIFF} < 0"), added.where(f"{DIFF} > 0")
            # Each row of a base has multiplicity 1, so the deltas can delete it only once.
            gone = _raise_below(gone, -1, scan)
        keys = gone.selectExpr(*consolidation.key_columns(scan.key))
        if scan.delta_rows <= BROADCAST_ROWS and scan.delta_memory <= BROADCAST_BYTES:
            keys = keys.hint("broadcast")
        kept = base.join(keys, F.expr(consolidation.same_key(scan.key)), "left_anti")
        return kept.unionByName(_repeated(brought, consolidation))

    def _summed_here(self, scan: SnapshotScan) -> tuple[DataFrame, DataFrame]:
        """Consolidate small deltas in this process; return their deleted and inserted rows."""
        collection, schema = scan.collection, scan.schema
        rows = [self.batches.part_rows(collection, each, schema) for each in scan.deltas]
        added = to_spark(consolidate(advance(pa.concat_tables(rows), scan.as_of)))
        taken = added.filter(pc.less(added.column(DIFF), 0))
        if taken.num_rows and pc.min(taken.column(DIFF)).as_py() < -1:
            raise InternalError(
                _negative_multiplicity(scan),
                hint="Look at its changes with penstock tail to see when.",
            )
        gone = taken.select(list(scan.key))
        brought = added.filter(pc.greater(added.column(DIFF), 0)).drop_columns([TIME])
        return self._handed_over(gone), self._handed_over(brought)

    def _handed_over(self, rows: pa.Table) -> DataFrame:
        """Return rows that are embedded in the plan, in chunks of about `HANDED_BYTES`."""
        schema = _spark_schema(rows.schema)
        if rows.num_rows == 0:
            return self.spark.createDataFrame([], schema)
        at_once = max(1, HANDED_BYTES * rows.num_rows // max(rows.nbytes, 1))
        pieces = [rows.slice(start, at_once) for start in range(0, rows.num_rows, at_once)]
        frames = [self.spark.createDataFrame(piece, schema) for piece in pieces]
        return reduce(DataFrame.unionByName, frames)

    def changes(self, scan: ChangesScan) -> DataFrame:
        """Return the stored updates of the scan, with their times and diffs."""
        return self._updates(scan.collection, scan.part_scans, scan.schema)

    def _updates(
        self, collection: CollectionState, part_scans: Sequence[PartScan], schema: SchemaVersion
    ) -> DataFrame:
        """Return all updates of `part_scans`, as rows of `schema` with time and diff."""
        stored = stored_columns_of(schema)
        self._check_names(collection, stored)
        frames: list[DataFrame] = []
        inline = [each for each in part_scans if isinstance(each.part, Inline)]
        if inline:
            frames.append(self._near(collection, inline, schema))
        groups: dict[tuple[int, int, int], list[PartScan]] = {}
        for each in part_scans:
            if isinstance(each.part, Stored):
                groups.setdefault((each.written.version, each.lower, each.upper), []).append(each)
        frames += [self._far(collection, group, schema) for group in groups.values()]
        if not frames:
            return self.spark.createDataFrame([], _spark_schema(stored))
        return reduce(DataFrame.unionByName, frames)

    def _near(
        self, collection: CollectionState, part_scans: Iterable[PartScan], schema: SchemaVersion
    ) -> DataFrame:
        """Return inline updates, which are small enough to embed in the plan."""
        rows = [self.batches.part_rows(collection, each, schema) for each in part_scans]
        return self._handed_over(to_spark(pa.concat_tables(rows)))

    def _far(
        self, collection: CollectionState, part_scans: list[PartScan], schema: SchemaVersion
    ) -> DataFrame:
        """Return updates in objects of one schema version and one range of times."""
        written = part_scans[0].written
        if (
            self.root is None
            or not is_native(columns_of(written))
            or not is_native(columns_of(schema))
        ):
            return self._by_tasks(collection, part_scans, schema)
        self._check_parquet(collection)
        parts = [each.part for each in part_scans if isinstance(each.part, Stored)]
        self._check_footers(parts)
        reader = self.spark.read.options(**PER_READ).schema(
            _spark_schema(stored_columns_of(written))
        )
        with nullcontext() if self.remote else _listed_on_driver(self.spark):
            frame = reader.parquet(*(f"{self.root}/{part.key}" for part in parts))
        self.scans.append(frame)
        if not part_scans[0].whole:
            time = F.col(TIME)
            frame = frame.where((time >= part_scans[0].lower) & (time < part_scans[0].upper))
        return _conformed(frame, collection, written, schema)

    def _by_tasks(
        self, collection: CollectionState, part_scans: list[PartScan], schema: SchemaVersion
    ) -> DataFrame:
        """Return such updates, read by Spark tasks through this project's store client."""
        url = self.url
        light = replace(collection, batches=())

        def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in numbers:
                chosen = [part_scans[number] for number in batch.column(0).to_pylist()]
                for table in read_parts(url, light, chosen, schema):
                    yield from to_spark(table).to_batches(ROWS_AT_ONCE)

        numbers = self.spark.range(0, len(part_scans), 1, min(len(part_scans), 1_000))
        frame = numbers.mapInArrow(read, _spark_schema(stored_columns_of(schema)))
        self.scans.append(frame)
        return frame

    def _check_footers(self, parts: Sequence[Stored]) -> None:
        """Verify footers against their checksums, because Spark trusts them.

        Raises:
            Corruption: an object is missing, or its footer has changed.
        """
        if len(parts) < FOOTERS_AT_ONCE:
            for part in parts:
                self._check_footer(part)
            return
        with ThreadPoolExecutor(FOOTERS_AT_ONCE, "penstock-footers") as pool:
            for _ in pool.map(self._check_footer, parts):
                pass

    def _check_footer(self, part: Stored) -> None:
        footer = self.blob.get(part.key, start=part.size - part.footer)
        if footer is None:
            raise Corruption(part.key, where=self.blob.name, detail="The object is missing.")
        if len(footer) != part.footer:
            size = part.size - part.footer + len(footer)
            detail = f"It has about {size} bytes and was written with {part.size}."
            raise Corruption(part.key, where=self.blob.name, detail=detail)
        if checksum(footer) != part.footer_checksum:
            raise Corruption(
                part.key, where=self.blob.name, detail="Its footer differs from the written one."
            )

    def _check_parquet(self, collection: CollectionState) -> None:
        """Check that Spark uses its V1 Parquet reader.

        Only this reader keeps all files that a plan reads in one object.

        Raises:
            UsageError: the session selects another reader.
        """
        if self.remote:
            return
        listed = str(self.spark.conf.get(V1_SOURCES)).lower().split(",")
        if PARQUET.isdisjoint(each.strip() for each in listed):
            raise UsageError(
                f'collection "{collection.name}" cannot be read by a session whose {V1_SOURCES} '
                "does not include parquet",
                detail="Spark would use another Parquet reader. Penstock cannot determine "
                "how long that reader is in use.",
                hint=f'Unset it: spark.conf.unset("{V1_SOURCES}"); or add parquet to it.',
            )

    def _check_names(self, collection: CollectionState, stored: pa.Schema) -> None:
        if str(self.spark.conf.get(REGEX_NAMES, "false")).lower() == "true":
            raise UsageError(
                f'collection "{collection.name}" cannot be read by a session with {REGEX_NAMES}',
                hint="Set it to false: it makes patterns of the names of columns.",
            )
        if len({name.lower() for name in stored.names}) == len(stored.names):
            return
        if str(self.spark.conf.get("spark.sql.caseSensitive", "false")).lower() != "true":
            raise UsageError(
                f'collection "{collection.name}" has columns that differ only in case',
                hint="Set spark.sql.caseSensitive to true.",
            )


@contextmanager
def _listed_on_driver(spark: SparkSession) -> Iterator[None]:
    """Make Spark list any number of files on the driver.

    Above 32 files, Spark starts a job, which takes seconds for a listing that the driver
    does in tenths of a second. No read option disables this. A Connect server lists the
    files later, and is not affected.
    """
    with _conf_lock:
        before = spark.conf.get(LISTING_THRESHOLD)
        spark.conf.set(LISTING_THRESHOLD, "1000000")
        try:
            yield
        finally:
            spark.conf.set(LISTING_THRESHOLD, str(before))


_conf_lock: Final = Lock()


def _spark_schema(stored: pa.Schema) -> T.StructType:
    return from_arrow_schema(to_spark_schema(stored), prefer_timestamp_ntz=True)


def _conformed(
    frame: DataFrame, collection: CollectionState, written: SchemaVersion, schema: SchemaVersion
) -> DataFrame:
    """Convert rows of one schema version to another, as `data.schema.conform` does."""
    if written.version == schema.version:
        return frame
    defaults = defaults_of(collection.schemas)
    had = set(stored_columns_of(written).names)
    columns: list[Column] = []
    for column_field in _spark_schema(stored_columns_of(schema)):
        if column_field.name in had:
            column = _quoted(column_field.name)
        elif column_field.name in defaults:
            default = defaults[column_field.name].cast(spark_field(schema, column_field.name).type)
            column = _literal(default, column_field.dataType)
        else:
            column = F.lit(None)
        columns.append(column.cast(column_field.dataType).alias(column_field.name))
    return frame.select(*columns)


def _literal(value: pa.Scalar, kind: T.DataType) -> Column:
    plain = value.as_py()
    if plain is not None and isinstance(kind, T.TimestampNTZType):
        # As text: Spark would convert an instant through the session's time zone, and the
        # local time may not exist there.
        plain = plain.isoformat(sep=" ")
    return F.lit(plain)


def spark_field(schema: SchemaVersion, name: str) -> pa.Field:
    """Return one column with its Spark type."""
    return to_spark_schema(stored_columns_of(schema)).field(name)


def _net(updates: DataFrame, consolidation: ConsolidationSql) -> DataFrame:
    """Consolidate updates: each row once, with the sum of its diffs if that is not 0."""
    grouped = updates.selectExpr(*consolidation.prepared).groupBy(*consolidation.by)
    summed = grouped.agg(*(F.expr(each) for each in consolidation.sums)).where(f"{DIFF} <> 0")
    return summed.selectExpr(*consolidation.back)


def _gathered(updates: DataFrame, scan: SnapshotScan) -> DataFrame:
    """Return few deltas in one partition: one task sums them faster than a shuffle starts."""
    few = scan.delta_rows <= ONE_TASK_ROWS and len(scan.deltas) <= ONE_TASK_PARTS
    return updates.coalesce(1) if few else updates


def _repeated(added: DataFrame, consolidation: ConsolidationSql) -> DataFrame:
    """Repeat each row by its diff."""
    count = f"explode(array_repeat(0Y, CAST({DIFF} AS INT))) AS {DIFF}"
    return added.selectExpr(*consolidation.names, count).selectExpr(*consolidation.names)


def _raise_below(added: DataFrame, least: int, scan: SnapshotScan) -> DataFrame:
    """Raise an error for a row that was retracted more often than written, in the plan."""
    lost = F.raise_error(F.lit(_negative_multiplicity(scan)))
    checked = F.when(F.col(DIFF) < least, lost).otherwise(F.col(DIFF))
    return added.withColumn(DIFF, checked).where(F.col(DIFF).isNotNull())


def _negative_multiplicity(scan: SnapshotScan) -> str:
    return f'collection "{scan.collection.name}" holds less than none of a row as of {scan.as_of}'


def _quoted(name: str) -> Column:
    return F.col(quoted(name))
