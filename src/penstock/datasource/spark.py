"""The door: `spark.read.format("penstock")` and `spark.readStream.format("penstock")`.

Spark's classes around what this room does without Spark. They are pickled and
sent from process to process, so they hold values, and open what they need where
they need it.

From 4.2 on Spark tells a stream where a batch begins and how much it may take;
4.1 asks only how far there is something new.
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
from penstock.datasource.filters import Asks, Condition, filtered, takes
from penstock.datasource.follower import Followed, Follower, find_followed, find_followed_relation
from penstock.datasource.options import BatchOptions, StreamOptions, parse, parse_writing
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
"""Someone is waiting: a store that stays away is an error after a minute."""

START_AT: Final = (
    "Give latest, earliest, milliseconds since the epoch, or RFC 3339 with a zone such as "
    "2026-11-15T12:00:00Z."
)

REMAP: Final = "_remap"
"""Only names that end so are worth a look at all sources before there is something wrong."""


def register(spark: SparkSession) -> None:
    """Make the format known to a session that did not find it by itself."""
    try:
        spark.dataSource.register(PenstockSource)
    except AnalysisException as error:
        # Spark found it among the installed packages; then it stays that one.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


class PenstockSource(ds.DataSource):
    """Collections as Spark's own readers see them."""

    _found: Contents | RelationContents | Followed | None = None

    @classmethod
    def name(cls) -> str:
        """What follows `format`."""
        return "penstock"

    def schema(self) -> StructType:
        """The columns; of a stream, with time and diff."""
        return _spark_schema(self._find()[1])

    def reader(self, schema: StructType) -> ds.DataSourceReader:
        """For `spark.read`."""
        options = parse(self.options)
        found, columns = self._find()
        if not isinstance(options, BatchOptions) or isinstance(found, Followed):
            raise UsageError(
                'option "startAt" is for spark.readStream',
                hint="Read the contents as of a time with asOf, or the changes between two times "
                "with penstock.spark.changes.",
            )
        self._check_schema(schema)
        return ContentsReader(found, options, to_spark_schema(columns))

    def streamReader(self, schema: StructType) -> ds.DataSourceStreamReader:  # noqa: N802
        """For `spark.readStream`."""
        options = parse(self.options)
        found, columns = self._find()
        if not isinstance(options, StreamOptions) or not isinstance(found, Followed):
            raise UsageError(
                'a stream of format "penstock" needs option "startAt"',
                detail="It is the time at which a new query begins.",
                hint=START_AT,
            )
        if options.max_rows is not None and limits is None:
            raise UsageError(
                'option "maxRowsPerTrigger" needs Spark 4.2 or newer',
                detail="Older ones do not tell a source where a batch begins.",
                hint="Leave it out, or update Spark.",
            )
        self._check_schema(schema)
        return ChangesReader(found, options, columns)

    def writer(self, schema: StructType, overwrite: bool) -> ds.DataSourceWriter:
        """For `df.write`."""
        if overwrite:
            raise UsageError(
                'format "penstock" cannot be overwritten',
                detail="A collection keeps what it was; rows are added at the next time.",
                hint='Write with mode("append").',
            )
        options = parse_writing(self.options)
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
        """Refused: two commit logs, Spark's and ours, would have to agree."""
        raise UsageError(
            'streams cannot be written to format "penstock"',
            hint="Append each micro-batch with penstock.spark.append in foreachBatch.",
        )

    def _find(self) -> tuple[Contents | RelationContents | Followed, pa.Schema]:
        """What the options meant when they were first asked for; it travels along."""
        options = parse(self.options)
        if self._found is None:
            self._found = _found(options)
        if isinstance(self._found, Contents):
            return self._found, columns_of(self._found.schema)
        columns = self._found.columns
        if isinstance(options, StreamOptions) and options.progress:
            columns = _with_progress(columns)
        return self._found, columns

    def _check_schema(self, schema: StructType) -> None:
        own = self.schema()
        if schema != own:
            raise UsageError(
                f'collection "{parse(self.options).collection}" has another schema',
                detail=f"It has {own.simpleString()}; asked for was {schema.simpleString()}.",
                hint="Leave schema(…) out, and choose columns with select.",
            )


class Part(ds.InputPartition):
    """One task."""

    def __init__(self, task: Task | Rows, conditions: tuple[Condition, ...] = ()) -> None:
        super().__init__(None)
        self.task = task
        self.conditions = conditions


class ContentsReader(ds.DataSourceReader):
    """The contents as of a time."""

    def __init__(
        self, contents: Contents | RelationContents, options: BatchOptions, columns: pa.Schema
    ) -> None:
        self._contents = contents
        self._options = options
        self._taken: list[Condition] = []
        # SUBTLE: a reader that overrides pushFilters is refused unless the session
        # enables spark.sql.python.filterPushdown, which it does not by default. This
        # one takes filters where it is asked to, and passes for one that does not.
        self.pushFilters = _Pushed(columns, self._taken)  # type: ignore[method-assign]

    def partitions(self) -> Sequence[ds.InputPartition]:
        """The tasks, and a hold for them."""
        taken = tuple(self._taken)
        if isinstance(self._contents, RelationContents):
            with open(self._contents.url, hold=self._options.hold, settings=SETTINGS) as client:
                return [Part(Rows(read_relation_contents(client, self._contents)), taken)]
        return [Part(task, taken) for task in plan_contents(self._contents, self._options)]

    def read(self, partition: ds.InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        assert isinstance(partition, Part)
        task = partition.task
        for rows in [task.rows] if isinstance(task, Rows) else rows_of(task):
            given = filtered(to_spark(rows), partition.conditions)
            yield from given.to_batches(ROWS_AT_ONCE)


class ChangesReader(ds.DataSourceStreamReader):
    """The changes from a time on."""

    def __init__(self, followed: Followed, options: StreamOptions, columns: pa.Schema) -> None:
        self._followed = followed
        self._options = options
        self._columns = columns
        self._opened: Follower | None = None

    @property
    def _follower(self) -> Follower:
        """Opened by the one process that follows; the others only read."""
        if self._opened is None:
            # Spark ends this process by a signal; so that `stop` is called all the same.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            self._opened = Follower(self._followed, self._options)
        return self._opened

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a new query begins."""
        return self._follower.initial().to_json()

    def latestOffset(  # noqa: N802
        self, start: dict[str, Any] | None = None, limit: Any = None
    ) -> dict[str, Any]:
        """Where the next batch ends."""
        if start is None:
            return self._follower.latest_of_all().to_json()
        rows = limit.max_rows if isinstance(limit, limits.ReadMaxRows) else None
        return self._follower.latest(Offset.from_json(start), rows).to_json()

    def getDefaultReadLimit(self) -> Any:  # noqa: N802
        """How much one batch may take."""
        rows = self._options.max_rows
        return limits.ReadAllAvailable() if rows is None else limits.ReadMaxRows(rows)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """For people who watch the query."""
        return self._follower.reached().to_json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Go no further than what is complete now."""
        self._follower.until_now()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[ds.InputPartition]:
        """The tasks of one batch."""
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
        """Spark will not ask for what lies before `end` again."""
        self._follower.committed(Offset.from_json(end))

    def stop(self) -> None:
        """The query ended."""
        if self._opened is not None:
            self._opened.stop()


if limits is not None:
    limits.SupportsTriggerAvailableNow.register(ChangesReader)


class _Pushed:
    """Takes over the filters that mean the same here, and gives back the others."""

    __func__ = staticmethod(ds.DataSourceReader.pushFilters)

    def __init__(self, columns: pa.Schema, taken: list[Condition]) -> None:
        self._columns = columns
        self._taken = taken

    def __call__(self, filters: list[ds.Filter]) -> Iterable[ds.Filter]:
        for each in filters:
            condition = _condition(each)
            if condition is not None and takes(condition, self._columns):
                self._taken.append(condition)
            else:
                yield each


_TESTS: Final[dict[type[ds.Filter], Asks]] = {
    ds.EqualTo: Asks.EQUAL,
    ds.LessThan: Asks.LESS,
    ds.LessThanOrEqual: Asks.LESS_EQUAL,
    ds.GreaterThan: Asks.GREATER,
    ds.GreaterThanOrEqual: Asks.GREATER_EQUAL,
}


def _condition(given: ds.Filter, *, negated: bool = False) -> Condition | None:
    match given:
        case ds.Not(child=child) if not negated:
            return _condition(child, negated=True)
        case ds.IsNull(attribute=(name,)):
            return Condition(Asks.NULL, name, negated=negated)
        case ds.IsNotNull(attribute=(name,)):
            return Condition(Asks.NULL, name, negated=not negated)
        case ds.In(attribute=(name,), value=values):
            return Condition(Asks.AMONG, name, tuple(values), negated=negated)
        case (
            ds.EqualTo(attribute=(name,), value=value)
            | ds.LessThan(attribute=(name,), value=value)
            | ds.LessThanOrEqual(attribute=(name,), value=value)
            | ds.GreaterThan(attribute=(name,), value=value)
            | ds.GreaterThanOrEqual(attribute=(name,), value=value)
        ):
            return Condition(_TESTS[type(given)], name, (value,), negated=negated)
        case _:
            return None


def _found(options: BatchOptions | StreamOptions) -> Contents | RelationContents | Followed:
    if options.collection.endswith(REMAP) and (relation := _find_relation(options)) is not None:
        return relation
    try:
        if isinstance(options, StreamOptions):
            return find_followed(options)
        return find_contents(options)
    except CollectionMissing:
        relation = _find_relation(options)
        if relation is None:
            raise
        return relation
    except NotYetComplete as error:
        # Spark does not say whether this is a stream, which need not wait.
        raise UsageError(
            str(error),
            detail=error.detail,
            hint=f"{error.hint} For spark.readStream, add the option startAt. {START_AT}".strip(),
        ) from error


def _find_relation(
    options: BatchOptions | StreamOptions,
) -> RelationContents | Followed | None:
    if isinstance(options, StreamOptions):
        return find_followed_relation(options)
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
