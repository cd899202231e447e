"""Writes of DataFrames to collections.

Spark tasks write the rows as Parquet objects under a staging id, each with a unique name.
Objects of a failed or repeated attempt are never linked, and so are garbage. The driver
then appends the batches of the successful attempts, in one commit with all related changes.
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

    The rows have `mz_timestamp` and `mz_diff`, or all have the one `time` and multiplicity
    1.

    Raises:
        UsageError: the rows do not fit the collection, or a Spark task cannot see its location.
    """
    with marker_placed(collection.client.url, staging) as marker:
        share = share_of(frame.schema, collection, staging, time=time, marker=marker)
        return Staged(gathered(written_by(frame, share)))


def written_by(frame: DataFrame, share: Share) -> list[Written]:
    """Run a job that writes all rows of `frame`, and return the results of its Spark tasks."""

    def write(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        written = share.write(rows)
        yield pa.record_batch(
            [pa.array([written.batch], pa.binary()), pa.array([written.error], pa.binary())],
            names=["batch", "error"],
        )

    results = collected(frame.mapInArrow(write, "batch binary, error binary"))
    return [Written(bytes(row["batch"]), bytes(row["error"])) for row in results]


def collected(frame: DataFrame) -> list[Row]:
    """Return all rows of `frame`, in the order of its partitions.

    If the connection breaks, for example because the JVM is killed, PySpark treats this as
    the end of the rows. Therefore an extra row marks the end here.

    Raises:
        TransientError: not all rows arrived.
    """
    nothing = (F.lit(None).cast(field.dataType).alias(field.name) for field in frame.schema)
    end = frame.sparkSession.range(0, 1, 1, 1).select(*nothing, F.lit(True).alias(_END))
    rows = frame.withColumn(_END, F.lit(False)).unionByName(end).collect()
    if not rows or not rows[-1][_END]:
        raise TransientError(
            "Spark ended before all results of its tasks arrived",
            detail=f"{len(rows)} rows arrived.",
            hint="Try again: nothing was changed. See Spark's log for details.",
        )
    return rows[:-1]


def share_of(
    schema: StructType, collection: Collection, staging: str, *, time: int | None, marker: str
) -> Share:
    """Return the instructions for Spark tasks that write rows of `schema`.

    Raises:
        UsageError: the rows do not fit the collection.
    """
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


# In PySpark 4.1, `to_arrow_schema` has no time zone parameter and uses UTC.
_IN_UTC: Final[dict[str, Any]] = (
    {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return Spark's columns as an Arrow schema; times with a zone are in UTC.

    Raises:
        UsageError: a column has a type that cannot be stored.
    """
    try:
        given = to_arrow_schema(schema, **_IN_UTC)
        # Spark's nullability inside a value is not a guarantee for later rows, so it is
        # dropped.
        return pa.schema([pa.field(f.name, _loose(f.type), f.nullable) for f in given])
    except (PySparkException, ValueError, TypeError, AssertionError) as error:
        raise UsageError(
            "a column has a type that cannot be stored",
            detail=f"{error}.",
            hint="Cast it first, for example to string.",
        ) from error


def _loose(kind: pa.DataType) -> pa.DataType:
    """Return `kind` with all inner values nullable."""
    if pa.types.is_struct(kind):
        return pa.struct([(inner.name, _loose(inner.type)) for inner in kind])
    if pa.types.is_map(kind):
        return pa.map_(_loose(kind.key_type), _loose(kind.item_type))
    return pa.list_(_loose(kind.value_type)) if pa.types.is_nested(kind) else kind
