"""Whether rows from outside fit a collection, and how they become what it stores.

Columns are told by name, in any order, and must be the collection's, each of
the type under which Spark shows it or of one that widens to it. Time and diff
may come along; without them all rows have one time and are there once.
"""

import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME, stored_schema
from penstock.data.exact import holds_forbidden_nulls
from penstock.data.schema import widens
from penstock.data.shown import shown_type
from penstock.errors import UsageError

__all__ = ["check_fits", "stored_rows"]


def check_fits(given: pa.Schema, columns: pa.Schema, *, collection: str) -> None:
    """Refuse rows of schema `given` that do not fit a collection of `columns`."""
    brought = [name for name in given.names if name not in (TIME, DIFF)]
    if sorted(brought) != sorted(columns.names):
        raise UsageError(
            f'rows do not have the columns of collection "{collection}"',
            detail=f"They have {', '.join(brought)}; it has {', '.join(columns.names)}.",
            hint="Give exactly these, in any order; let the collection grow with alter first.",
        )
    for field in stored_schema(columns):
        at = given.get_field_index(field.name)
        if at < 0:
            continue
        kind, wanted = shown_type(given.field(at).type), shown_type(field.type)
        if not widens(kind, wanted):
            raise UsageError(
                f'column "{field.name}" for collection "{collection}" is {kind}, not {wanted}',
                hint="Cast it first.",
            )


def stored_rows(
    rows: pa.Table, columns: pa.Schema, *, time: int | None, collection: str
) -> pa.Table:
    """Rows that fit, as the collection stores them.

    Raises:
        UsageError: a value does not fit its column, or a null stands where none may.
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
            column = column if column.type == field.type else pc.cast(column, field.type)
        except pa.ArrowInvalid as error:
            raise UsageError(
                f'a value in column "{field.name}" does not fit collection "{collection}"',
                detail=f"{error}.",
                hint=f"Its type there is {field.type}.",
            ) from error
        if holds_forbidden_nulls(column, field):
            raise UsageError(
                f'column "{field.name}" for collection "{collection}" holds nulls',
                hint="It was declared not null.",
            )
        arrays.append(column)
    return pa.Table.from_arrays(arrays, schema=wanted)
