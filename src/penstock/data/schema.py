"""Row schemas and their evolution.

A new version of a schema may append columns that are nullable or have a default, and may widen
types. Old rows then have exactly one form in the new schema, so an old insert and a new delete of
the same row cancel. All other changes are rejected.

A column may have a *label* in the metadata of its field: the type name in its source, for readers
that print values as the source does.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.data.arrow import DIFF, PROGRESSED, TIME
from penstock.data.lossless import exact_array
from penstock.errors import UsageError

__all__ = [
    "LABEL",
    "check_row_schema",
    "conform",
    "default_row",
    "evolve",
    "label_of",
    "stored_schema",
    "widens",
]

LABEL: Final = b"penstock.label"
"""The only key of field metadata that is stored."""

_INTEGERS: Final = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_NATURALS: Final = (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_FLOATS: Final = (pa.float16(), pa.float32(), pa.float64())
_WIDENINGS: Final = (
    _INTEGERS,
    _NATURALS,
    _FLOATS,
    (pa.string(), pa.large_string()),
    (pa.binary(), pa.large_binary()),
    (pa.uint8(), pa.int16()),
    (pa.uint16(), pa.int32()),
    (pa.uint32(), pa.int64()),
)
_INSTEAD: Final = (
    (pa.string_view(), "string"),
    (pa.binary_view(), "binary"),
    (pa.binary(0), "binary"),
    (pa.date64(), "date32 or timestamp[ms]"),
    (pa.time32("s"), "time32[ms]"),
)
"""Types that Parquet does not store exactly: seconds become milliseconds, date64 becomes days."""

_STORABLE: Final = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_timestamp,
    pa.types.is_duration,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_map,
)


def check_row_schema(schema: pa.Schema, key: Sequence[str], *, collection: str) -> pa.Schema:
    """Return the schema as it is stored.

    Raises:
        UsageError: a column or a key column cannot be stored.
    """
    what = f'schema of collection "{collection}"'
    names = schema.names
    if len(set(names)) != len(names):
        raise UsageError(f"{what} names a column twice", hint="Give every column a unique name.")
    for taken in (TIME, DIFF, PROGRESSED):
        if taken in names:
            raise UsageError(
                f'{what} has a column "{taken}"',
                detail="The name is reserved for the time, diff or progress of updates.",
                hint="Rename the column.",
            )
    for field in schema:
        _check_storable(field.type, what=f'column "{field.name}" of collection "{collection}"')
    for name in key:
        if name not in names:
            raise UsageError(
                f'{what} has no key column "{name}"',
                hint=f"Choose key columns from {', '.join(names)}.",
            )
        if pa.types.is_nested(schema.field(name).type):
            raise UsageError(
                f'key column "{name}" of collection "{collection}" is nested',
                hint="Choose a key column that is not nested.",
            )
    return pa.schema([_without_other_metadata(field) for field in schema])


def label_of(field: pa.Field) -> str | None:
    """Return the type name of a column in its source, if known."""
    label = (field.metadata or {}).get(LABEL)
    return None if label is None else label.decode()


def stored_schema(schema: pa.Schema) -> pa.Schema:
    """Return `schema` with the columns for time and diff."""
    return schema.append(pa.field(TIME, pa.int64(), nullable=False)).append(
        pa.field(DIFF, pa.int64(), nullable=False)
    )


def evolve(old: pa.Schema, new: pa.Schema, defaults: Mapping[str, Any], *, collection: str) -> None:
    """Check that rows of `old` have exactly one form in `new`.

    Raises:
        UsageError: the change is not permitted.
    """
    what = f'schema of collection "{collection}"'
    if new.names[: len(old.names)] != old.names:
        raise UsageError(
            f"{what} cannot drop, rename or reorder columns",
            detail=f"The schema has {', '.join(old.names)}. "
            f"The new version has {', '.join(new.names)}.",
            hint="Keep the existing columns and append new ones.",
        )
    for was, now in zip(old, new, strict=False):
        if not widens(was.type, now.type):
            raise UsageError(
                f'column "{was.name}" of collection "{collection}" cannot change '
                f"from {was.type} to {now.type}",
                hint="Use a type that holds every old value exactly: a wider integer, float or "
                "decimal.",
            )
        printed = pa.types.is_string(now.type) or pa.types.is_large_string(now.type)
        if was.type == now.type and label_of(was) != label_of(now) and not printed:
            raise UsageError(
                f'column "{was.name}" of collection "{collection}" cannot change its label '
                f"from {label_of(was)} to {label_of(now)}",
                hint="Keep the label, or change it together with the type.",
            )
        if was.nullable and not now.nullable:
            raise UsageError(
                f'column "{was.name}" of collection "{collection}" cannot become not null',
                detail="Older rows may hold nulls.",
                hint="Keep the column nullable.",
            )
    for added in list(new)[len(old.names) :]:
        if not added.nullable and defaults.get(added.name) is None:
            raise UsageError(
                f'column "{added.name}" is new in collection "{collection}" and has no value for '
                "older rows",
                hint="Make the column nullable, or give a default.",
            )
    unknown = set(defaults) - set(new.names[len(old.names) :])
    if unknown:
        raise UsageError(
            f'{what} got a default for "{min(unknown)}", which is not a new column',
            hint="Give defaults only for columns that this version adds.",
        )


def default_row(schema: pa.Schema, defaults: Mapping[str, Any]) -> pa.RecordBatch:
    """Return one row with the values of new columns in older rows."""
    named = [field for field in schema if field.name in defaults]
    columns = [
        exact_array([defaults[field.name]], field, what=f'the default of column "{field.name}"')
        for field in named
    ]
    return pa.record_batch(columns, schema=pa.schema(named))


def conform(updates: pa.Table, schema: pa.Schema, defaults: Mapping[str, pa.Scalar]) -> pa.Table:
    """Return `updates` as rows of `schema`, a newer or older version of their schema.

    A missing column gets the default of the version that added it, or null. A column that
    `schema` does not have yet is dropped.
    """
    if updates.schema.equals(schema, check_metadata=True):
        return updates
    columns = []
    for field in schema:
        at = updates.schema.get_field_index(field.name)
        if at >= 0:
            column = updates.column(at)
            columns.append(column if column.type == field.type else pc.cast(column, field.type))
        elif field.name in defaults:
            columns.append(pa.chunked_array([pa.repeat(defaults[field.name], updates.num_rows)]))
        else:
            columns.append(pa.nulls(updates.num_rows, field.type))
    return pa.table(columns, schema=schema)


def widens(old: pa.DataType, new: pa.DataType) -> bool:
    """Return whether `new` holds every value of `old`, exactly and in one form."""
    if old == new:
        return True
    if pa.types.is_decimal(old) and pa.types.is_decimal(new):
        return bool(
            new.scale >= old.scale and new.precision - new.scale >= old.precision - old.scale
        )
    return any(
        old in chain and new in chain and chain.index(old) < chain.index(new)
        for chain in _WIDENINGS
    )


def _without_other_metadata(field: pa.Field) -> pa.Field:
    label = (field.metadata or {}).get(LABEL)
    return pa.field(
        field.name, field.type, field.nullable, None if label is None else {LABEL: label}
    )


def _check_storable(kind: pa.DataType, *, what: str) -> None:
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        raise UsageError(
            f"{what} is encoded as {kind}",
            hint=f"Decode the column first, for example to {kind.value_type}.",
        )
    instead = _instead_of(kind)
    if instead:
        raise UsageError(
            f"{what} has type {kind}, which cannot be stored exactly", hint=f"Use {instead}."
        )
    inner = (
        [kind.key_type, kind.item_type]
        if pa.types.is_map(kind)
        else [kind.field(i).type for i in range(kind.num_fields)]
    )
    for inner_type in inner:
        _check_storable(inner_type, what=what)


def _instead_of(kind: pa.DataType) -> str:
    """Return a replacement for a type that Arrow IPC, Parquet or a merge does not preserve."""
    for unstorable, instead in _INSTEAD:
        if kind == unstorable:
            return instead
    if pa.types.is_timestamp(kind) and kind.unit == "s":
        return str(pa.timestamp("ms", kind.tz))
    if pa.types.is_decimal(kind) and not 0 <= kind.scale <= kind.precision:
        return "a scale from 0 to the precision"
    if pa.types.is_fixed_size_list(kind) and kind.list_size == 0:
        return f"list<{kind.value_type}>"
    if pa.types.is_fixed_size_list(kind) and not kind.value_field.nullable:
        return f"items that may be null, or list<{kind.value_type} not null>"
    if pa.types.is_struct(kind):
        names = [inner.name for inner in kind]
        if not names:
            return "a struct with fields, or null"
        if len(set(names)) != len(names):
            return "a struct with unique field names"
        # SUBTLE: if the struct is null, its fields are null too, and Parquet rejects that.
        return "" if all(inner.nullable for inner in kind) else "fields that may be null"
    storable = any(is_type(kind) for is_type in _STORABLE)
    return "" if storable and not isinstance(kind, pa.BaseExtensionType) else "text or bytes"
