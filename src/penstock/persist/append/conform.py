"""Check and conversion of rows from Spark to the stored form of a collection.

Columns are matched by name, in any order, and must be exactly the collection's. Each has
the Spark type of its column, or a type that widens to it. Time and diff are optional:
without them, all rows have one time and multiplicity 1.
"""

import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME, stored_schema
from penstock.data.lossless import contains_forbidden_nulls
from penstock.data.schema import widens
from penstock.data.spark_types import to_spark_type
from penstock.errors import UsageError

__all__ = ["check_fits", "stored_rows"]


def check_fits(given: pa.Schema, columns: pa.Schema, *, collection: str) -> None:
    """Check that rows of schema `given` fit a collection of `columns`.

    Raises:
        UsageError: columns or types do not fit.
    """
    brought = [name for name in given.names if name not in (TIME, DIFF)]
    if sorted(brought) != sorted(columns.names):
        raise UsageError(
            f'rows do not have the columns of collection "{collection}"',
            detail=f"They have {', '.join(brought)}; it has {', '.join(columns.names)}.",
            hint="Give exactly these, in any order, or first evolve the collection with alter.",
        )
    for field in stored_schema(columns):
        at = given.get_field_index(field.name)
        if at < 0:
            continue
        kind, wanted = to_spark_type(given.field(at).type), to_spark_type(field.type)
        if not widens(kind, wanted):
            raise UsageError(
                f'column "{field.name}" for collection "{collection}" is {kind}, not {wanted}',
                hint="Cast it first.",
            )
        if given.field(at).type != field.type and _holds_nothing(field.type):
            raise UsageError(
                f'column "{field.name}" of collection "{collection}" cannot be written so',
                detail=f"Its type is {field.type}, which has nulls of no type within it.",
                hint="Write to it with penstock.persist.",
            )


def stored_rows(
    rows: pa.Table, columns: pa.Schema, *, time: int | None, collection: str
) -> pa.Table:
    """Return rows that passed `check_fits` in stored form.

    Raises:
        UsageError: a value does not fit its column, or a column that is not null holds nulls.
    """
    wanted = stored_schema(columns)
    arrays: list[pa.ChunkedArray] = []
    for field in wanted:
        at = rows.schema.get_field_index(field.name)
        if at < 0:
            only = time if field.name == TIME else 1
            if only is None:
                raise UsageError(
                    f'rows for collection "{collection}" have no column "{TIME}"',
                    hint="Give them one, or say time=… for all of them.",
                )
            arrays.append(pa.chunked_array([pa.repeat(pa.scalar(only, pa.int64()), len(rows))]))
            continue
        column = rows.column(at)
        try:
            column = _cast(column, field.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise UsageError(
                f'a value in column "{field.name}" does not fit collection "{collection}"',
                detail=f"{error}.",
                hint=f"Its type there is {field.type}.",
            ) from error
        if contains_forbidden_nulls(column, field):
            raise UsageError(
                f'column "{field.name}" for collection "{collection}" holds nulls',
                hint="It was declared not null.",
            )
        arrays.append(column)
    return pa.Table.from_arrays(arrays, schema=wanted)


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Cast a column to `kind` without loss, or raise an Arrow error."""
    if column.type == kind:
        return column
    if pa.types.is_null(kind):
        if column.null_count < len(column):
            raise pa.ArrowInvalid("There is a value where only nulls can be")
        return pa.chunked_array([pa.nulls(len(column))])
    # Arrow casts int64 to time32 only through int32, and that step rejects values that are
    # too large.
    halfway = _halfway(kind)
    return pc.cast(column if halfway == kind else pc.cast(column, halfway), kind)


def _halfway(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_time32(kind):
        return pa.int32()
    if not pa.types.is_nested(kind):
        return kind
    if pa.types.is_struct(kind):
        return pa.struct([each.with_type(_halfway(each.type)) for each in kind])
    if pa.types.is_map(kind):
        return pa.map_(_halfway(kind.key_type), _halfway(kind.item_type))
    inner = kind.value_field.with_type(_halfway(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(inner, kind.list_size)
    return pa.large_list(inner) if pa.types.is_large_list(kind) else pa.list_(inner)


def _holds_nothing(kind: pa.DataType) -> bool:
    """Return whether `kind` contains the type null at any depth."""
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return any(pa.types.is_null(each) or _holds_nothing(each) for each in inner)
