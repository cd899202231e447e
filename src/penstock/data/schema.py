"""Row schemas, and how they may grow.

A schema grows by columns at its end that are nullable or have a default, and
by columns whose type widens. Both ways old rows have exactly one reading in
the new schema, so an old insertion and a new deletion of the same row still
meet and cancel; anything else would break that and is refused.

A column may have a *label*, in its field's metadata: what its source calls its
type, so that a reader can show values as the source does.
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
"""The one key of a field's metadata that is kept."""

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
"""Parquet keeps seconds as milliseconds, and days of date64 as days: not every value comes back."""

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
    """The schema as we store it, or an error that says what cannot be stored."""
    what = f'schema of collection "{collection}"'
    names = schema.names
    if len(set(names)) != len(names):
        raise UsageError(f"{what} names a column twice", hint="Give every column its own name.")
    for taken in (TIME, DIFF, PROGRESSED):
        if taken in names:
            raise UsageError(
                f'{what} has a column "{taken}"',
                detail="Penstock tells the time, count or progress of updates under that name.",
                hint="Rename the column.",
            )
    for field in schema:
        _check_storable(field.type, what=f'column "{field.name}" of collection "{collection}"')
    for name in key:
        if name not in names:
            raise UsageError(
                f'{what} has no key column "{name}"',
                hint=f"Name some of its columns: {', '.join(names)}.",
            )
        if pa.types.is_nested(schema.field(name).type):
            raise UsageError(
                f'key column "{name}" of collection "{collection}" is nested',
                hint="Choose a plain column as key.",
            )
    return pa.schema([_kept(field) for field in schema])


def label_of(field: pa.Field) -> str | None:
    """What the source of a column calls its type, if it said so."""
    label = (field.metadata or {}).get(LABEL)
    return None if label is None else label.decode()


def stored_schema(schema: pa.Schema) -> pa.Schema:
    """`schema` with the columns for time and diff."""
    return schema.append(pa.field(TIME, pa.int64(), nullable=False)).append(
        pa.field(DIFF, pa.int64(), nullable=False)
    )


def evolve(old: pa.Schema, new: pa.Schema, defaults: Mapping[str, Any], *, collection: str) -> None:
    """Check that rows of `old` have exactly one reading in `new`."""
    what = f'schema of collection "{collection}"'
    if new.names[: len(old.names)] != old.names:
        raise UsageError(
            f"{what} cannot drop, rename or reorder columns",
            detail=f"It has {', '.join(old.names)}; the new one has {', '.join(new.names)}.",
            hint="Keep the columns as they are and add new ones at the end.",
        )
    for was, now in zip(old, new, strict=False):
        if not widens(was.type, now.type):
            raise UsageError(
                f'column "{was.name}" of collection "{collection}" cannot change '
                f"from {was.type} to {now.type}",
                hint="Only a type that holds every old value exactly can follow: a wider integer, "
                "float or decimal.",
            )
        printed = pa.types.is_string(now.type) or pa.types.is_large_string(now.type)
        if was.type == now.type and label_of(was) != label_of(now) and not printed:
            raise UsageError(
                f'column "{was.name}" of collection "{collection}" cannot change its label '
                f"from {label_of(was)} to {label_of(now)}",
                hint="Its values would read differently; the label may change with the type.",
            )
        if was.nullable and not now.nullable:
            raise UsageError(
                f'column "{was.name}" of collection "{collection}" cannot become not null',
                hint="Older rows may hold nulls; keep it nullable.",
            )
    for added in list(new)[len(old.names) :]:
        if not added.nullable and defaults.get(added.name) is None:
            raise UsageError(
                f'column "{added.name}" is new in collection "{collection}" and has no value for '
                "older rows",
                hint="Make it nullable, or give it a default.",
            )
    unknown = set(defaults) - set(new.names[len(old.names) :])
    if unknown:
        raise UsageError(
            f'{what} got a default for "{min(unknown)}", which is not a new column',
            hint="Defaults are for the columns that this version adds.",
        )


def default_row(schema: pa.Schema, defaults: Mapping[str, Any]) -> pa.RecordBatch:
    """One row that holds the values older rows have in the columns they lack."""
    named = [field for field in schema if field.name in defaults]
    columns = [
        exact_array([defaults[field.name]], field, what=f'the default of column "{field.name}"')
        for field in named
    ]
    return pa.record_batch(columns, schema=pa.schema(named))


def conform(updates: pa.Table, schema: pa.Schema, defaults: Mapping[str, pa.Scalar]) -> pa.Table:
    """`updates` as rows of `schema`, a newer or an older version of their own.

    Columns they lack take the default of the version that added them, else
    null; columns they have too many were added later and are left out.
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
    """Whether `new` holds every value of `old`, exactly and in one way."""
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


def _kept(field: pa.Field) -> pa.Field:
    label = (field.metadata or {}).get(LABEL)
    return pa.field(
        field.name, field.type, field.nullable, None if label is None else {LABEL: label}
    )


def _check_storable(kind: pa.DataType, *, what: str) -> None:
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        raise UsageError(
            f"{what} is encoded as {kind}",
            hint=f"Decode it first, for example to {kind.value_type}.",
        )
    instead = _instead_of(kind)
    if instead:
        raise UsageError(
            f"{what} has the type {kind}, which cannot be stored exactly", hint=f"Use {instead}."
        )
    inner = (
        [kind.key_type, kind.item_type]
        if pa.types.is_map(kind)
        else [kind.field(i).type for i in range(kind.num_fields)]
    )
    for each in inner:
        _check_storable(each, what=what)


def _instead_of(kind: pa.DataType) -> str:
    """What to use in place of a type that Arrow IPC, Parquet or a merge would not keep."""
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
            return "a struct whose fields have their own names"
        # SUBTLE: where the struct is null its fields are too, and Parquet refuses that.
        return "" if all(inner.nullable for inner in kind) else "fields that may be null"
    storable = any(a_kind(kind) for a_kind in _STORABLE)
    return "" if storable and not isinstance(kind, pa.BaseExtensionType) else "text or bytes"
