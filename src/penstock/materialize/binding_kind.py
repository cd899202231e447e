"""The two kinds of collections for a connector: rows of a table, and documents to reduce.

    RowsKind        the changes alone determine the last row of each key
    DocumentsKind   each row is a document, and is reduced into the stored document of its key

The section of a collection in the pipeline file determines its kind:

    no key:         rows of a table, by its primary key
    key: [/a, /b]   rows of a table, by these columns
    key: row        complete rows, each with its multiplicity
    schema: …       documents, reduced by the annotations of the schema

A collection without a primary key and without `key:` has the kind of `key: row`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import xxhash

from penstock.errors import UsageError
from penstock.materialize.document_fields import build_document_spec, field_defaults
from penstock.materialize.intervals import BoundResource
from penstock.materialize.row_encoder import build_row_spec, describe_renderings
from penstock.persist.state import CollectionState
from penstock.protocol.specs import CollectionSpec
from penstock.reduce import NativePlan, Reducer, native_plan

if TYPE_CHECKING:
    # Spark tasks import this module, but do not read the pipeline file.
    from penstock.pipeline import CollectionSection

__all__ = [
    "COUNT",
    "ROW",
    "BindingKind",
    "BindingPlan",
    "DocumentsKind",
    "RowsKind",
    "describe_collection",
]

ROW: Final = "mz_row"
"""Key column added to rows without a key: a digest of the row."""

COUNT: Final = "mz_count"
"""Column with the multiplicity of such a row."""


@dataclass(frozen=True, slots=True)
class RowsKind:
    """Collection that is stored as the last row of each key."""

    key: tuple[str, ...]
    """Key columns."""

    renderings: Mapping[str, str] = field(default_factory=dict[str, str])
    """Rendering of each column, as `describe_renderings` returns it."""


@dataclass(frozen=True, slots=True)
class DocumentsKind:
    """Collection that is stored as one reduced document for each key."""

    reducer: Reducer
    key: tuple[str, ...]
    """JSON pointers into a document."""

    document: str | None = None
    """Column that holds the document; None if the row is the document."""

    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Default values by pointer, for documents without a value there."""

    order: tuple[str, ...] = ()
    """Columns that order the documents of a key before they are reduced."""

    native: NativePlan | None = None
    """Spark aggregates that reduce the documents; None if Spark cannot express them."""

    counted: bool = False
    """True for rows without a key: a document is the row with the sum of its diffs."""

    columns: str = ""
    """Hash of the columns of counted rows. If it changes, the keys of all rows change."""

    keyless: bool = False
    """True if rows are counted only because the collection has no key.

    Such a collection can be bound only with delta updates.
    """

    renderings: Mapping[str, str] = field(default_factory=dict[str, str])
    """Rendering of each column, as `describe_renderings` returns it.

    Empty if a column holds the document.
    """


BindingKind = RowsKind | DocumentsKind


@dataclass(frozen=True, slots=True)
class BindingPlan:
    """Inputs of a binding in one transaction, and the operations that its resource accepts."""

    bound: BoundResource
    url: str
    """Storage location of the collection."""

    collection: CollectionState
    kind: BindingKind
    deletes: bool
    """True if rows of the resource may be deleted."""

    empties: bool = False
    """True if the resource may be truncated before all rows are stored again."""


def describe_collection(
    name: str,
    columns: pa.Schema,
    key: tuple[str, ...],
    section: "CollectionSection | None",
    defaults: Mapping[str, pa.Scalar] = MappingProxyType({}),
) -> tuple[CollectionSpec, BindingKind]:
    """Return the specification of a collection for connectors, and the kind of its rows.

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
        return build_row_spec(name, columns, key, defaults), RowsKind(
            key, describe_renderings(columns)
        )
    if section.key == "row":
        return _counted(name, columns)
    if section.documents is None:
        named = tuple(_column(pointer, columns, name) for pointer in section.key)
        return build_row_spec(name, columns, named, defaults), RowsKind(
            named, describe_renderings(columns)
        )
    return _reduced(name, columns, section.key, section.documents, section)


def _reduced(
    name: str, columns: pa.Schema, key: tuple[str, ...], schema: Any, section: "CollectionSection"
) -> tuple[CollectionSpec, BindingKind]:
    for column in (*section.order, *([section.document] if section.document else ())):
        _check_column(column, columns, name)
    for column in section.order:
        kind = columns.field(column).type
        if pa.types.is_floating(kind) or pa.types.is_nested(kind):
            raise UsageError(
                f'column "{column}" cannot order the documents of collection "{name}"',
                detail=f"Its type is {kind}, which has no total order.",
                hint="Name a column of whole numbers or text under order:.",
            )
    spec = build_document_spec(name, schema, key, section.projections)
    reducer, defaults = Reducer(schema, name), field_defaults(spec)
    if section.document is not None:
        return spec, DocumentsKind(reducer, key, section.document, defaults, section.order)
    named = [_column(pointer, columns, name) for pointer in key]
    native = native_plan(schema, columns, named, section.order)
    order = section.order if native is None else native.order
    renderings = describe_renderings(columns)
    return spec, DocumentsKind(reducer, key, None, defaults, order, native, renderings=renderings)


def _counted(
    name: str, columns: pa.Schema, *, keyless: bool = False
) -> tuple[CollectionSpec, BindingKind]:
    for taken in (ROW, COUNT):
        if taken in columns.names:
            raise UsageError(
                f'collection "{name}" has a column "{taken}", which key: row adds',
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
    spec = build_row_spec(name, with_count, (ROW,))
    reducer, columns_hash = Reducer(schema, name), xxhash.xxh64_hexdigest(columns.serialize())
    return spec, DocumentsKind(
        reducer,
        (f"/{ROW}",),
        counted=True,
        columns=columns_hash,
        keyless=keyless,
        renderings=describe_renderings(columns),
    )


def _column(pointer: str, columns: pa.Schema, name: str) -> str:
    """Return the column of a JSON pointer into a row."""
    column = pointer.removeprefix("/").replace("~1", "/").replace("~0", "~")
    if not pointer.startswith("/") or "/" in pointer[1:]:
        raise UsageError(
            f'key "{pointer}" of collection "{name}" is not a column of its rows',
            hint='Write a column as "/name". If a column holds the document, set document: NAME.',
        )
    _check_column(column, columns, name)
    return column


def _check_column(column: str, columns: pa.Schema, name: str) -> None:
    if column not in columns.names:
        raise UsageError(
            f'collection "{name}" has no column "{column}"',
            detail=f"Its columns are {', '.join(columns.names)}.",
            hint="Correct the name under collections: in the pipeline file.",
        )
