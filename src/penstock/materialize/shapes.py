"""Shape of a collection for connectors, from its columns and its section in the pipeline file.

no key:              rows of a table, by its primary key
key: [/a, /b]        rows of a table, by these columns
key: row             complete rows, each with its multiplicity
schema: …            documents, reduced by the annotations of the schema

A collection without a primary key and without `key:` has the shape of `key: row`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import xxhash

from penstock.errors import UsageError
from penstock.materialize.binding import COUNT, ROW, Documents, Rows, Shape
from penstock.materialize.described import defaults_of, document_spec
from penstock.materialize.layout import renderings_of
from penstock.materialize.rows import collection_spec
from penstock.pipeline.file import CollectionSection
from penstock.protocol.specs import CollectionSpec
from penstock.reduce import Reducer
from penstock.reduce.native import native_plan

__all__ = ["shape_of"]


def shape_of(
    name: str,
    columns: pa.Schema,
    key: tuple[str, ...],
    section: CollectionSection | None,
    defaults: Mapping[str, pa.Scalar] = MappingProxyType({}),
) -> tuple[CollectionSpec, Shape]:
    """Return the specification of a collection for connectors, and the shape of its rows.

    Args:
        name: name of the collection.
        columns: columns of its rows.
        key: columns of its primary key, or empty.
        section: its section in the pipeline file, or None.
        defaults: values of older rows in columns that were added later, by column.

    Raises:
        UsageError: a column is missing, or its type does not permit the use in the file.
    """
    if section is None or section.key is None:
        if not key:
            return _counted(name, columns, keyless=True)
        return collection_spec(name, columns, key, defaults), Rows(key, renderings_of(columns))
    if section.key == "row":
        return _counted(name, columns)
    if section.documents is None:
        named = tuple(_column(each, columns, name) for each in section.key)
        return collection_spec(name, columns, named, defaults), Rows(named, renderings_of(columns))
    return _reduced(name, columns, section.key, section.documents, section)


def _reduced(
    name: str, columns: pa.Schema, key: tuple[str, ...], schema: Any, section: CollectionSection
) -> tuple[CollectionSpec, Shape]:
    for column in (*section.order, *([section.document] if section.document else ())):
        _check_there(column, columns, name)
    for column in section.order:
        kind = columns.field(column).type
        if pa.types.is_floating(kind) or pa.types.is_nested(kind):
            raise UsageError(
                f'column "{column}" cannot order the documents of collection "{name}"',
                detail=f"It is of {kind}, in which not any two values can be ordered.",
                hint="Name a column of whole numbers or text under order:.",
            )
    spec = document_spec(name, schema, key, section.projections)
    reducer, defaults = Reducer(schema, name), defaults_of(spec)
    if section.document is not None:
        return spec, Documents(reducer, key, section.document, defaults, section.order)
    named = [_column(pointer, columns, name) for pointer in key]
    native = native_plan(schema, columns, named, section.order)
    order = section.order if native is None else native.order
    printed = renderings_of(columns)
    return spec, Documents(reducer, key, None, defaults, order, native, renderings=printed)


def _counted(
    name: str, columns: pa.Schema, *, keyless: bool = False
) -> tuple[CollectionSpec, Shape]:
    for taken in (ROW, COUNT):
        if taken in columns.names:
            raise UsageError(
                f'collection "{name}" has a column "{taken}", which key: row would add',
                hint="Name other columns as its key.",
            )
    with_count = pa.schema(
        [
            pa.field(ROW, pa.string(), nullable=False),
            *columns,
            pa.field(COUNT, pa.int64(), nullable=False),
        ]
    )
    schema = {
        "type": "object",
        "properties": {COUNT: {"type": "integer", "reduce": {"strategy": "sum"}}},
        "required": [COUNT],
        "reduce": {"strategy": "merge"},
    }
    spec = collection_spec(name, with_count, (ROW,))
    reducer, told_apart = Reducer(schema, name), xxhash.xxh64_hexdigest(columns.serialize())
    return spec, Documents(
        reducer,
        (f"/{ROW}",),
        counted=True,
        columns=told_apart,
        keyless=keyless,
        renderings=renderings_of(columns),
    )


def _column(pointer: str, columns: pa.Schema, name: str) -> str:
    """Return the column of a JSON pointer into a row."""
    column = pointer.removeprefix("/").replace("~1", "/").replace("~0", "~")
    if not pointer.startswith("/") or "/" in pointer[1:]:
        raise UsageError(
            f'key "{pointer}" of collection "{name}" leads to no column of its rows',
            hint='Write a column as "/name"; if the document is in a column, say document: NAME.',
        )
    _check_there(column, columns, name)
    return column


def _check_there(column: str, columns: pa.Schema, name: str) -> None:
    if column not in columns.names:
        raise UsageError(
            f'collection "{name}" has no column "{column}"',
            detail=f"It has {', '.join(columns.names)}.",
            hint="Correct it under collections: in the pipeline's file.",
        )
