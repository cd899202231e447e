"""Short constructors of materialization specs for tests of connectors.

    orders = collection(
        "shop/orders", projection("id", "integer", must=True), projection("total", "number")
    )
    spec = materialization(
        "shop/to-sqlite", {"path": "x.db"}, bound(orders, {"table": "orders"}, ("orders",))
    )

A runtime builds these specs from the schema of a collection and from the response of Validate. A
test knows both in advance.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.protocol.specs import (
    DOCUMENT,
    CollectionSpec,
    Exists,
    FieldSelection,
    Inference,
    MaterializationBinding,
    MaterializationSpec,
    Projection,
    StringInference,
)

__all__ = ["bound", "collection", "materialization", "projection"]


def projection(
    name: str,
    *types: str,
    ptr: str | None = None,
    must: bool = False,
    default_json: str = "",
    **string: Any,
) -> Projection:
    """Return a field of these JSON types; its pointer defaults to its name.

    With `must`, every document has the field. `string` gives the fields of `StringInference`.
    """
    known = StringInference(**string) if string or "string" in types else None
    exists = Exists.MUST if must else Exists.MAY
    return Projection(
        f"/{name}" if ptr is None else ptr,
        name,
        inference=Inference(types, known, default_json=default_json, exists=exists),
    )


def collection(
    name: str,
    *projections: Projection,
    key: Sequence[str] = ("/id",),
    document: bool = True,
    schema: Mapping[str, Any] | None = None,
) -> CollectionSpec:
    """Return a collection with these fields and, with `document`, the root document as a field."""
    root = [projection(DOCUMENT, "object", ptr="", must=True)] if document else []
    schema_json = json.dumps(schema or {})
    return CollectionSpec(
        name,
        tuple(key),
        tuple(
            dataclasses.replace(field, is_primary_key=field.ptr in key)
            for field in (*root, *projections)
        ),
        uuid_ptr="/_meta/uuid",
        write_schema_json=schema_json,
        write_schema_uri=f"test://{name}/write",
        read_schema_json=schema_json,
        read_schema_uri=f"test://{name}/read",
    )


def bound(
    collection: CollectionSpec,
    resource: Mapping[str, Any],
    path: Sequence[str],
    *,
    fields: Sequence[str] | None = None,
    document: bool = True,
    delta: bool = False,
) -> MaterializationBinding:
    """Return a binding of a collection to a resource.

    `fields` are the selected non-key fields, by default all. With `document` the root document is
    selected too, if the collection has it.
    """
    by_ptr = {field.ptr: field.field for field in reversed(collection.projections)}
    keys = tuple(by_ptr[ptr] for ptr in collection.key_ptrs)
    if fields is None:
        fields = [
            field.field for field in collection.projections if field.ptr and field.field not in keys
        ]
    selection = FieldSelection(keys, tuple(fields), by_ptr.get("", "") if document else "")
    return MaterializationBinding(
        json.dumps(dict(resource)), tuple(path), collection, selection, delta
    )


def materialization(
    name: str, endpoint: Mapping[str, Any], *bindings: MaterializationBinding
) -> MaterializationSpec:
    """Return a materialization with these bindings."""
    return MaterializationSpec(name, json.dumps(dict(endpoint)), bindings)
