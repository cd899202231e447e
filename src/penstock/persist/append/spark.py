"""A DataFrame into a collection.

Tasks write the rows as Parquet objects under a staging id, each to a name of
its own; what a failed or a second attempt wrote is garbage that nobody links.
The driver then appends what the successful ones told, in one commit with
whatever else belongs to it.
"""

from collections.abc import Iterator
from inspect import signature
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - as Spark's users write it.
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from penstock.errors import TransientError, UsageError
from penstock.persist.append.conform import check_fits
from penstock.persist.append.shared_storage_check import marker_placed
from penstock.persist.append.task import Share, Written, gathered
from penstock.persist.collection import Collection
from penstock.persist.input_validation import Staged
from penstock.persist.settings import Settings
from penstock.persist.state import columns_of

__all__ = ["arrow_schema", "collected", "share_of", "stage", "written_by"]

_END: Final = "end of all rows"


def stage(
    frame: DataFrame, collection: Collection, staging: str, *, time: int | None = None
) -> Staged:
    """Write the rows of `frame` as files for `collection`, to be appended by its client.

    Rows bring `mz_timestamp` and `mz_diff`, or all have the one `time`, once each.

    Raises:
        UsageError: the rows do not fit the collection, or a task does not see its location.
    """
    with marker_placed(collection.client.url, staging) as marker:
        share = share_of(frame.schema, collection, staging, time=time, marker=marker)
        return Staged(gathered(written_by(frame, share)))


def written_by(frame: DataFrame, share: Share) -> list[Written]:
    """What the tasks of a job that writes all rows of `frame` told."""

    def write(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        written = share.write(rows)
        yield pa.record_batch(
            [pa.array([written.batch], pa.binary()), pa.array([written.error], pa.binary())],
            names=["batch", "error"],
        )

    told = collected(frame.mapInArrow(write, "batch binary, error binary"))
    return [Written(bytes(row["batch"]), bytes(row["error"])) for row in told]


def collected(frame: DataFrame) -> list[Row]:
    """All rows of `frame`, in the order of its partitions.

    PySpark takes a connection that breaks off, as when the JVM is killed, for the end of
    the rows. Here the end is a row of its own.

    Raises:
        TransientError: not all rows arrived.
    """
    nothing = (F.lit(None).cast(field.dataType).alias(field.name) for field in frame.schema)
    end = frame.sparkSession.range(0, 1, 1, 1).select(*nothing, F.lit(True).alias(_END))
    rows = frame.withColumn(_END, F.lit(False)).unionByName(end).collect()
    if not rows or not rows[-1][_END]:
        raise TransientError(
            "Spark broke off while it told what its tasks did",
            detail=f"Of what they told, {len(rows)} rows arrived.",
            hint="Try again: nothing was changed. Spark's log tells more.",
        )
    return rows[:-1]


def share_of(
    schema: StructType, collection: Collection, staging: str, *, time: int | None, marker: str
) -> Share:
    """What to tell the tasks that write rows of `schema`, once these are known to fit."""
    state = collection.state
    newest = state.schemas[-1]
    if newest.codecs:
        raise UsageError(
            f'collection "{collection.name}" holds keys and values',
            hint="Spark writes rows; make a collection with a schema for them.",
        )
    columns = columns_of(newest)
    check_fits(arrow_schema(schema), columns, collection=collection.name)
    return Share(
        url=collection.client.url,
        staging=staging,
        collection=collection.name,
        schema=len(state.schemas) - 1,
        columns=newest.columns,
        time=time,
        part_bytes=Settings().part_bytes,
        marker=marker,
    )


# PySpark 4.1 has no choice of a zone there, and takes UTC.
_IN_UTC: Final[dict[str, Any]] = (
    {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Spark's columns as Arrow has them; times with a zone are in UTC."""
    try:
        given = to_arrow_schema(schema, **_IN_UTC)
        # What Spark believes never to be null inside a value says nothing of what comes later.
        return pa.schema([pa.field(f.name, _loose(f.type), f.nullable) for f in given])
    except (PySparkException, ValueError, TypeError, AssertionError) as error:
        raise UsageError(
            "a column has a type that cannot be stored",
            detail=f"{error}.",
            hint="Cast it first, for example to string.",
        ) from error


def _loose(kind: pa.DataType) -> pa.DataType:
    """`kind`, where all that is inside may be null."""
    if pa.types.is_struct(kind):
        return pa.struct([(inner.name, _loose(inner.type)) for inner in kind])
    if pa.types.is_map(kind):
        return pa.map_(_loose(kind.key_type), _loose(kind.item_type))
    return pa.list_(_loose(kind.value_type)) if pa.types.is_nested(kind) else kind
