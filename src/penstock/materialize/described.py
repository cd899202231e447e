"""Collection specs of collections that a JSON schema describes.

Each location that the schema names is a field. The name of the field is the JSON pointer
without the first slash. The complete document is also a field. Users add fields with other
names as projections.

A key identifies a document. It must therefore exist in each document, have a type with exact
equality, and never change.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.errors import UsageError
from penstock.protocol.specs import DOCUMENT, CollectionSpec, Exists, Inference, Projection
from penstock.reduce import check_key, decode, encode
from penstock.reduce.inference import Outline

__all__ = ["defaults_of", "document_spec"]

_KEYS: Final = frozenset(("boolean", "integer", "string"))


def document_spec(
    name: str, schema: Any, key: Sequence[str], projections: Mapping[str, str]
) -> CollectionSpec:
    """Return the collection spec of a collection of documents.

    `projections` maps field names to JSON pointers. A property with the name of the document
    field has no field, unless a projection gives it another name.

    Raises:
        UsageError: the schema, a location of the key or a projection cannot be used.
    """
    outline = Outline(schema)
    check_key(schema, key, collection=name)
    for pointer in key:
        _check_key(name, pointer, outline.locate(pointer))
    fields = {pointer[1:]: (pointer, inference) for pointer, inference in outline.locations()}
    # A property with an empty name would become a field with an empty name.
    fields.pop("", None)
    fields[DOCUMENT] = "", outline.locate("")
    for field, pointer in projections.items():
        inference = outline.locate(pointer)
        _check_projection(name, field, pointer, inference, fields.get(field, (pointer,))[0])
        fields[field] = pointer, inference
    text = encode(schema).decode()
    return CollectionSpec(
        collection=name,
        key_ptrs=tuple(key),
        projections=tuple(
            Projection(
                ptr=pointer,
                field=field,
                explicit=field in projections,
                is_primary_key=pointer in key,
                inference=inference,
            )
            for field, (pointer, inference) in fields.items()
        ),
        write_schema_json=text,
        read_schema_json=text,
    )


def defaults_of(collection: CollectionSpec) -> dict[str, Any]:
    """Return the default values by pointer, for documents without a value there."""
    return {
        each.ptr: decode(each.inference.default_json, what=f'default of "{each.ptr}"')
        for each in collection.projections
        if each.inference.default_json
    }


def _check_key(name: str, pointer: str, inference: Inference) -> None:
    what = f'key "{pointer}" of collection "{name}"'
    if inference.exists is Exists.CANNOT:
        raise UsageError(
            f"{what} cannot exist in its documents",
            hint="Name a location that the schema has.",
        )
    if inference.exists is Exists.IMPLICIT:
        raise UsageError(
            f"{what} is not in its schema", hint="Declare it under properties, and as required."
        )
    default = json.loads(inference.default_json or "null")
    if default is not None and not isinstance(default, bool | int | str):
        raise UsageError(
            f"{what} has a default that cannot be part of a key",
            hint="Make the default a string, an integer or a boolean.",
        )
    if inference.exists is Exists.MAY and default is None:
        raise UsageError(
            f"{what} may be absent from a document",
            hint='Give each object on the way "type": "object" alone, and require what is in it; '
            "or give the location a default.",
        )
    unfit = sorted({*inference.types} - _KEYS - ({"null"} if default is not None else set()))
    if unfit:
        raise UsageError(
            f"{what} may be of type {' or '.join(unfit)}",
            detail="A key is made of strings, integers and booleans; of fractional numbers those "
            "that are equal may differ in their bits.",
            hint="Narrow its type in the schema, or name another location; one that may be null "
            "needs a default.",
        )


def _check_projection(
    name: str, field: str, pointer: str, inference: Inference, canonical: str
) -> None:
    what = f'projection "{field}" of collection "{name}"'
    if pointer != canonical:
        raise UsageError(
            f'{what} is of "{pointer}", but that is the name of "{canonical}"',
            hint=f'Call the field of "{pointer}" otherwise.',
        )
    if inference.exists in (Exists.IMPLICIT, Exists.CANNOT):
        why = "cannot exist" if inference.exists is Exists.CANNOT else "is not in the schema"
        raise UsageError(
            f'{what} is of "{pointer}", which {why}',
            hint="Correct the pointer, or declare the location in the schema.",
        )
