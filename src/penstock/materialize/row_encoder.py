"""Conversion of rows to the input of connectors: columns of fields, keys and documents.

    boolean, integers          unchanged, also sums of integers
    floats                     numbers; in documents, NaN and infinities are text
    bytes                      base 64
    all others                 the source's own text, as `penstock read` prints it

The JSON schema states the conversion of each column. It also states the Postgres type name, with
which a Postgres endpoint creates a column of the same type.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data.arrow import with_integer_times
from penstock.data.schema import label_of
from penstock.errors import UsageError
from penstock.protocol.specs import (
    CollectionSpec,
    Exists,
    Inference,
    Projection,
    StringInference,
    document_field,
)
from penstock.reduce import INTEGER
from penstock.sources.registry import to_text

__all__ = [
    "build_row_spec",
    "column_pointer",
    "describe_renderings",
    "encode_documents",
    "encode_fields",
]

POSTGRES_TYPE: Final = "x-postgres-type"


def build_row_spec(
    name: str,
    schema: pa.Schema,
    key: Sequence[str],
    defaults: Mapping[str, pa.Scalar] = MappingProxyType({}),
) -> CollectionSpec:
    """Return the specification of a collection of rows for a connector.

    `defaults` are the values of older rows in columns that were added later.

    Raises:
        UsageError: a key column has a floating-point type.
    """
    for column in key:
        if pa.types.is_floating(schema.field(column).type):
            raise UsageError(
                f'column "{column}" of collection "{name}" cannot be part of a key',
                detail="Equal floating-point numbers may have different bits.",
                hint="Name other columns as key, or bind the collection with delta_updates: true.",
            )
    described = {
        field.name: {**_described(field, required=field.name in key), **_default(field, defaults)}
        for field in schema
    }
    document = {"type": "object", "properties": described, "required": schema.names}
    text = json.dumps(document, ensure_ascii=False)
    return CollectionSpec(
        collection=name,
        key_ptrs=tuple(column_pointer(column) for column in key),
        projections=(
            *(_projection(field.name, described[field.name], key) for field in schema),
            Projection(
                "",
                document_field(schema.names),
                inference=Inference(("object",), exists=Exists.MUST),
            ),
        ),
        write_schema_json=text,
        read_schema_json=text,
    )


def encode_fields(rows: pa.Table, names: Sequence[str]) -> list[pa.Array]:
    """Return these columns as field values, in the form for `pack`."""
    return [_field_column(rows.schema.field(name), _one(rows.column(name))) for name in names]


def encode_documents(rows: pa.Table) -> pa.BinaryArray:
    """Return each row as a JSON object."""
    parts: list[Any] = []
    for number, field in enumerate(rows.schema):
        name = ("{" if number == 0 else ",") + json.dumps(field.name, ensure_ascii=False) + ":"
        parts += [name, _json_column(_field_column(field, _one(rows.column(number))))]
    texts = pc.binary_join_element_wise(*parts, "}", "")
    return texts.cast(pa.binary())


def describe_renderings(columns: pa.Schema) -> Mapping[str, str]:
    """Return, for each column, a text that changes exactly when its values print differently.

    A widened integer prints the same. A float that becomes a double, or a decimal with a larger
    scale, prints differently.
    """
    return {field.name: _rendering(field) for field in columns}


def _rendering(field: pa.Field) -> str:
    kind = field.type
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_floating(kind):
        return str(kind)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "base64"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    label = label_of(field) or ""
    return f"{label} {kind.scale}" if pa.types.is_decimal(kind) else f"{label} {kind}"


def _sql_type(label: str) -> str:
    """Return the SQL name of a Postgres type.

    SUBTLE: without quotes, the keywords `bit` and `char` mean bit(1) and character(1).
    """
    element = label.removesuffix("[]")
    return f'"{element}"{label[len(element) :]}' if element in ("bit", "char") else label


def _described(field: pa.Field, *, required: bool) -> Mapping[str, Any]:
    types: list[str] = [_json_type(field.type)]
    keywords: dict[str, Any] = {}
    if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
        keywords["contentEncoding"] = "base64"
    label = label_of(field)
    if label is not None:
        kind = field.type
        exact = f"({kind.precision},{kind.scale})" if pa.types.is_decimal(kind) else ""
        keywords[POSTGRES_TYPE] = _sql_type(label) + exact
    elif types == ["string"]:
        keywords |= _format(field.type)
    if field.nullable and not required:
        types.append("null")
    return {"type": types if len(types) > 1 else types[0], **keywords}


def _default(field: pa.Field, defaults: Mapping[str, pa.Scalar]) -> Mapping[str, Any]:
    """Return the stored default of a column as a JSON Schema keyword, or an empty mapping."""
    if field.name not in defaults:
        return {}
    value = pa.repeat(defaults[field.name], 1).cast(field.type)
    [text] = _json_column(_field_column(field, value)).to_pylist()
    return {"default": json.loads(text)}


def _json_type(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind):
        return "integer"
    return "number" if pa.types.is_floating(kind) else "string"


def _format(kind: pa.DataType) -> Mapping[str, str]:
    if pa.types.is_decimal(kind):
        return {"format": "number"}
    if pa.types.is_date(kind):
        return {"format": "date"}
    return {}


def _projection(name: str, described: Mapping[str, Any], key: Sequence[str]) -> Projection:
    types = described["type"]
    encoding = described.get("contentEncoding", "")
    string = StringInference(
        format=described.get("format", ""),
        content_encoding=encoding,
        is_base64=encoding == "base64",
    )
    types = (types,) if isinstance(types, str) else tuple(types)
    return Projection(
        ptr=column_pointer(name),
        field=name,
        is_primary_key=name in key,
        inference=Inference(
            types,
            string if "string" in types else None,
            default_json=json.dumps(described["default"], ensure_ascii=False)
            if "default" in described
            else "",
            exists=Exists.MUST,
        ),
    )


def column_pointer(column: str) -> str:
    """Return the JSON pointer of a column in the document of its row."""
    return "/" + column.replace("~", "~0").replace("/", "~1")


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def _field_column(field: pa.Field, values: pa.Array) -> pa.Array:
    kind, label = field.type, label_of(field)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_float64(kind):
        return values
    if field.metadata == INTEGER:
        return values
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _base64(values)
    if label is not None:
        texts = to_text(label, values)
    elif pa.types.is_float32(kind):
        texts = values.cast(pa.string())
    elif pa.types.is_nested(kind):
        return pa.array([_json_text(value) for value in values.to_pylist()], pa.string())
    else:
        texts = _text(values)
    # A direct cast from float to double would print digits that the float does not have.
    return texts.cast(pa.float64()) if pa.types.is_float32(kind) else texts


def _text(values: pa.Array) -> pa.Array:
    try:
        return values.cast(pa.string())
    except pa.ArrowException:
        # The time zone is not in the database, or the time exceeds the calendar range.
        return values.cast(with_integer_times(values.type)).cast(pa.string())


def _json_text(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value, enc_hook=str).decode()


def _base64(values: pa.Array) -> pa.Array:
    return pa.array(
        [
            None if value is None else base64.b64encode(value).decode()
            for value in values.to_pylist()
        ],
        pa.string(),
    )


def _json_column(values: pa.Array) -> pa.Array:
    kind = values.type
    if pa.types.is_string(kind):
        texts = _quoted(values)
    elif pa.types.is_floating(kind):
        texts = _numbers(values)
    else:
        texts = values.cast(pa.string())
    return pc.coalesce(texts, "null")


def _numbers(values: pa.Array) -> pa.Array:
    texts = values.cast(pa.string())
    if pc.all(pc.is_finite(values)).as_py() is not False:
        return texts
    named = pc.if_else(
        pc.is_nan(values), '"NaN"', pc.if_else(pc.greater(values, 0.0), '"Infinity"', '"-Infinity"')
    )
    return pc.if_else(pc.is_finite(values), texts, named)


def _quoted(values: pa.Array) -> pa.Array:
    controls = pc.match_substring_regex(values, r"[\x00-\x1f]")
    escaped = pc.replace_substring(pc.replace_substring(values, "\\", "\\\\"), '"', '\\"')
    texts = pc.binary_join_element_wise('"', escaped, '"', "")
    if pc.any(controls).as_py():
        with_controls = values.filter(controls).to_pylist()
        exact = pa.array([json.dumps(text, ensure_ascii=False) for text in with_controls])
        texts = pc.replace_with_mask(texts, pc.coalesce(controls, False), exact)
    return texts
