"""`spark.read.format("penstock")` and `spark.readStream.format("penstock")`.

Spark pickles these classes and sends them between processes. They hold values, and open
clients in the process that needs them.

Spark 4.2 and later passes the start and the size limit of a batch to a stream; 4.1 only
requests the latest offset.
"""

import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import datasource as ds
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from penstock.data.arrow import DIFF, PROGRESSED, TIME
from penstock.data.spark_types import to_spark, to_spark_schema
from penstock.datasource.append.spark import CollectionWriter
from penstock.datasource.batch_plan import Contents, find_contents, plan_contents
from penstock.datasource.bindings import (
    RelationContents,
    find_relation_contents,
    read_relation_contents,
)
from penstock.datasource.filters import Condition, Operator, filter_rows, supports
from penstock.datasource.follower import (
    Follower,
    StreamedCollection,
    find_streamed,
    find_streamed_relation,
)
from penstock.datasource.options import (
    BatchOptions,
    StreamOptions,
    parse_read_options,
    parse_write_options,
)
from penstock.datasource.read_task import Rows, Task, rows_of, updates_of
from penstock.datasource.stream_offsets import Offset
from penstock.errors import UsageError
from penstock.persist import Settings, open
from penstock.persist.errors import CollectionMissing, NotYetComplete
from penstock.persist.scan.task import ROWS_AT_ONCE
from penstock.persist.state import columns_of

try:
    from pyspark.sql.streaming import datasource as _limits

    limits: Any = _limits
except ImportError:  # 4.1
    limits = None

__all__ = ["PenstockSource", "register"]

SETTINGS: Final = Settings(patience_ms=60_000)
"""A user waits: an unreachable store is an error after one minute."""

START_AT: Final = (
    "Use latest, earliest, milliseconds since the epoch, or RFC 3339 with a zone such as "
    "2026-11-15T12:00:00Z."
)

REMAP: Final = "_remap"
"""Suffix of remaps. Other names are looked up in the sources only if no collection has them."""


def register(spark: SparkSession) -> None:
    """Register the format in a session that did not discover it."""
    try:
        spark.dataSource.register(PenstockSource)
    except AnalysisException as error:
        # Spark discovered the format among the installed packages, which is equivalent.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


class PenstockSource(ds.DataSource):
    """The data source of the format `penstock`."""

    _read: Contents | RelationContents | StreamedCollection | None = None

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "penstock"

    def schema(self) -> StructType:
        """Return the columns; a stream also has time and diff."""
        return _spark_schema(self._find()[1])

    def reader(self, schema: StructType) -> ds.DataSourceReader:
        """Return the reader of `spark.read`."""
        options = parse_read_options(self.options)
        read, columns = self._find()
        if not isinstance(options, BatchOptions) or isinstance(read, StreamedCollection):
            raise UsageError(
                'option "startAt" is for spark.readStream',
                hint="Read the contents as of a time with asOf, or the changes between two times "
                "with penstock.spark.changes.",
            )
        self._check_schema(schema)
        return ContentsReader(read, options, to_spark_schema(columns))

    def streamReader(self, schema: StructType) -> ds.DataSourceStreamReader:  # noqa: N802
        """Return the reader of `spark.readStream`."""
        options = parse_read_options(self.options)
        read, columns = self._find()
        if not isinstance(options, StreamOptions) or not isinstance(read, StreamedCollection):
            raise UsageError(
                'stream of format "penstock" requires option "startAt"',
                detail="A new query starts at that time.",
                hint=START_AT,
            )
        if options.max_rows is not None and limits is None:
            raise UsageError(
                'option "maxRowsPerTrigger" requires Spark 4.2 or newer',
                detail="Older versions do not pass the start of a batch to a source.",
                hint="Remove the option, or update Spark.",
            )
        self._check_schema(schema)
        return ChangesReader(read, options, columns)

    def writer(self, schema: StructType, overwrite: bool) -> ds.DataSourceWriter:
        """Return the writer of `df.write`."""
        if overwrite:
            raise UsageError(
                'format "penstock" does not support mode "overwrite"',
                detail="A collection retains its history; rows are appended at the next time.",
                hint='Write with mode("append").',
            )
        options = parse_write_options(self.options)
        return CollectionWriter(
            schema,
            location=options.location,
            collection=options.collection,
            key=options.key,
            patience_ms=options.lock_timeout_ms,
        )

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> ds.DataSourceStreamWriter:
        """Reject stream writes: the commit logs of Spark and Penstock would have to agree."""
        raise UsageError(
            'streams cannot be written to format "penstock"',
            hint="Append each micro-batch with penstock.spark.append in foreachBatch.",
        )

    def _find(self) -> tuple[Contents | RelationContents | StreamedCollection, pa.Schema]:
        """Resolve the options once, and return the read with its columns."""
        options = parse_read_options(self.options)
        if self._read is None:
            self._read = _resolve(options)
        if isinstance(self._read, Contents):
            return self._read, columns_of(self._read.schema)
        columns = self._read.columns
        if isinstance(options, StreamOptions) and options.progress:
            columns = _with_progress(columns)
        return self._read, columns

    def _check_schema(self, schema: StructType) -> None:
        own = self.schema()
        if schema != own:
            raise UsageError(
                f'collection "{parse_read_options(self.options).collection}" '
                "does not have the requested schema",
                detail=f"It has {own.simpleString()}; requested was {schema.simpleString()}.",
                hint="Remove schema(…), and select columns with select.",
            )


class Part(ds.InputPartition):
    """One read task, with the pushed filters."""

    def __init__(self, task: Task | Rows, conditions: tuple[Condition, ...] = ()) -> None:
        super().__init__(None)
        self.task = task
        self.conditions = conditions


class ContentsReader(ds.DataSourceReader):
    """Reader of the contents as of a time."""

    def __init__(
        self, contents: Contents | RelationContents, options: BatchOptions, columns: pa.Schema
    ) -> None:
        self._contents = contents
        self._options = options
        self._pushed: list[Condition] = []
        # SUBTLE: Spark rejects a reader that overrides pushFilters unless the session enables
        # spark.sql.python.filterPushdown, which is off by default. Assigning the attribute on the
        # instance accepts filters when the option is on, and is not an override when it is off.
        self.pushFilters = _FilterPushdown(columns, self._pushed)  # type: ignore[method-assign]

    def partitions(self) -> Sequence[ds.InputPartition]:
        """Return the tasks of the read, and create their hold."""
        conditions = tuple(self._pushed)
        if isinstance(self._contents, RelationContents):
            with open(self._contents.url, hold=self._options.hold, settings=SETTINGS) as client:
                return [Part(Rows(read_relation_contents(client, self._contents)), conditions)]
        return [Part(task, conditions) for task in plan_contents(self._contents, self._options)]

    def read(self, partition: ds.InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        assert isinstance(partition, Part)
        task = partition.task
        for rows in [task.rows] if isinstance(task, Rows) else rows_of(task):
            output = filter_rows(to_spark(rows), partition.conditions)
            yield from output.to_batches(ROWS_AT_ONCE)


class ChangesReader(ds.DataSourceStreamReader):
    """Reader of the changes from a time on."""

    def __init__(
        self, streamed: StreamedCollection, options: StreamOptions, columns: pa.Schema
    ) -> None:
        self._streamed = streamed
        self._options = options
        self._columns = columns
        self._opened: Follower | None = None

    @property
    def _follower(self) -> Follower:
        """Follower, opened only in the process that plans; other processes read."""
        if self._opened is None:
            # Spark ends this process with SIGTERM; sys.exit runs `stop`.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            self._opened = Follower(self._streamed, self._options)
        return self._opened

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offset where a new query starts."""
        return self._follower.initial().to_json()

    def latestOffset(  # noqa: N802
        self, start: dict[str, Any] | None = None, limit: Any = None
    ) -> dict[str, Any]:
        """Return the end of the next batch."""
        if start is None:
            return self._follower.latest_without_start().to_json()
        rows = limit.max_rows if isinstance(limit, limits.ReadMaxRows) else None
        return self._follower.latest(Offset.from_json(start), rows).to_json()

    def getDefaultReadLimit(self) -> Any:  # noqa: N802
        """Return the size limit of one batch."""
        rows = self._options.max_rows
        return limits.ReadAllAvailable() if rows is None else limits.ReadMaxRows(rows)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the latest available offset, for the progress of the query."""
        return self._follower.reached().to_json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """End the query at the changes that are complete now."""
        self._follower.stop_at_current_upper()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[ds.InputPartition]:
        """Return the tasks of one batch."""
        until = Offset.from_json(end)
        parts = [Part(task) for task in self._follower.plan(Offset.from_json(start), until)]
        if self._options.progress:
            row = {**dict.fromkeys(self._columns.names), TIME: until.upper, PROGRESSED: True}
            parts.append(Part(Rows(pa.Table.from_pylist([row], self._columns))))
        return parts

    def read(self, partition: ds.InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        assert isinstance(partition, Part)
        task = partition.task
        for updates in [task.rows] if isinstance(task, Rows) else updates_of(task):
            rows = updates
            if PROGRESSED in self._columns.names and PROGRESSED not in updates.schema.names:
                no = pa.repeat(pa.scalar(False), updates.num_rows)
                rows = updates.append_column(PROGRESSED, no)
            rows = rows.select(self._columns.names).cast(self._columns)
            yield from to_spark(rows).to_batches(ROWS_AT_ONCE)

    def commit(self, end: dict[str, Any]) -> None:
        """Release the changes before `end`."""
        self._follower.commit(Offset.from_json(end))

    def stop(self) -> None:
        """Release the holds of the query."""
        if self._opened is not None:
            self._opened.stop()


if limits is not None:
    limits.SupportsTriggerAvailableNow.register(ChangesReader)


class _FilterPushdown:
    """Accepts the filters that Arrow evaluates exactly, and returns the others."""

    __func__ = staticmethod(ds.DataSourceReader.pushFilters)

    def __init__(self, columns: pa.Schema, pushed: list[Condition]) -> None:
        self._columns = columns
        self._pushed = pushed

    def __call__(self, filters: list[ds.Filter]) -> Iterable[ds.Filter]:
        for filter_ in filters:
            condition = _condition(filter_)
            if condition is not None and supports(condition, self._columns):
                self._pushed.append(condition)
            else:
                yield filter_


_OPERATORS: Final[dict[type[ds.Filter], Operator]] = {
    ds.EqualTo: Operator.EQUAL,
    ds.LessThan: Operator.LESS,
    ds.LessThanOrEqual: Operator.LESS_EQUAL,
    ds.GreaterThan: Operator.GREATER,
    ds.GreaterThanOrEqual: Operator.GREATER_EQUAL,
}


def _condition(spark_filter: ds.Filter, *, negated: bool = False) -> Condition | None:
    match spark_filter:
        case ds.Not(child=child) if not negated:
            return _condition(child, negated=True)
        case ds.IsNull(attribute=(name,)):
            return Condition(Operator.NULL, name, negated=negated)
        case ds.IsNotNull(attribute=(name,)):
            return Condition(Operator.NULL, name, negated=not negated)
        case ds.In(attribute=(name,), value=values):
            return Condition(Operator.AMONG, name, tuple(values), negated=negated)
        case (
            ds.EqualTo(attribute=(name,), value=value)
            | ds.LessThan(attribute=(name,), value=value)
            | ds.LessThanOrEqual(attribute=(name,), value=value)
            | ds.GreaterThan(attribute=(name,), value=value)
            | ds.GreaterThanOrEqual(attribute=(name,), value=value)
        ):
            return Condition(_OPERATORS[type(spark_filter)], name, (value,), negated=negated)
        case _:
            return None


def _resolve(
    options: BatchOptions | StreamOptions,
) -> Contents | RelationContents | StreamedCollection:
    if options.collection.endswith(REMAP) and (relation := _find_relation(options)) is not None:
        return relation
    try:
        if isinstance(options, StreamOptions):
            return find_streamed(options)
        return find_contents(options)
    except CollectionMissing:
        relation = _find_relation(options)
        if relation is None:
            raise
        return relation
    except NotYetComplete as error:
        # Spark does not state whether this is a stream, which need not wait.
        raise UsageError(
            str(error),
            detail=error.detail,
            hint=f"{error.hint} For spark.readStream, add the option startAt. {START_AT}".strip(),
        ) from error


def _find_relation(
    options: BatchOptions | StreamOptions,
) -> RelationContents | StreamedCollection | None:
    if isinstance(options, StreamOptions):
        return find_streamed_relation(options)
    return find_relation_contents(options, settings=SETTINGS)


def _with_progress(columns: pa.Schema) -> pa.Schema:
    """Return the columns of a stream with progress: in its rows only the time has a value."""
    fields = [field.with_nullable(field.name != TIME) for field in columns]
    position = columns.get_field_index(DIFF)
    return pa.schema(
        [*fields[:position], pa.field(PROGRESSED, pa.bool_(), False), *fields[position:]]
    )


def _spark_schema(columns: pa.Schema) -> StructType:
    return from_arrow_schema(to_spark_schema(columns), prefer_timestamp_ntz=True)
