"""Bindings and their fields, as connectors use them."""

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import pyarrow as pa

from penstock.protocol.specs import (
    CollectionSpec,
    Inference,
    MaterializationBinding,
    Projection,
    annotations,
)

__all__ = ["ARROW", "Binding", "Field", "FieldKind", "bind", "kind_of", "projected"]

ResourceT = TypeVar("ResourceT")


class FieldKind(enum.Enum):
    """Type of the unpacked values of a field."""

    BOOLEAN = "boolean"
    INTEGER = "integer"
    NUMBER = "number"
    STRING = "string"
    BYTES = "bytes"
    """A base64 string."""

    JSON = "json"
    """An object, an array, or values of several types."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a binding."""

    name: str
    ptr: str
    kind: FieldKind
    inference: Inference
    is_key: bool
    config: Mapping[str, Any]
    """Configuration of the field by the user."""

    annotations: Mapping[str, Any]
    """Schema of the collection at the location of the field."""

    @property
    def nullable(self) -> bool:
        """Return whether the field may have no value."""
        return self.inference.nullable

    @property
    def format(self) -> str:
        """Return the format of strings, such as `date-time`; empty if there is none."""
        return self.inference.string.format if self.inference.string else ""


@dataclass(frozen=True)
class Binding(Generic[ResourceT]):
    """A collection bound to a resource."""

    index: int
    resource: ResourceT
    """Configuration of the resource by the user."""

    path: tuple[str, ...]
    """Path of the resource in the endpoint."""

    collection: CollectionSpec
    keys: tuple[Field, ...]
    values: tuple[Field, ...]
    document: Field | None
    """Field of the root document, if it is selected."""

    delta_updates: bool

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """Return keys, values and the document, in column order."""
        return (*self.keys, *self.values, *([self.document] if self.document else []))

    def __str__(self) -> str:
        return ".".join(self.path)


def bind(index: int, spec: MaterializationBinding, resource: ResourceT) -> Binding[ResourceT]:
    """Return the binding that `spec` describes."""
    selection, collection = spec.field_selection, spec.collection
    schema = collection.schema()

    def field(name: str, *, is_key: bool) -> Field:
        projection = collection.projection(name)
        assert projection is not None  # Checked by `find_spec_violation`.
        return _field(projection, is_key, selection.field_config_json, schema)

    return Binding(
        index=index,
        resource=resource,
        path=spec.resource_path,
        collection=collection,
        keys=tuple(field(name, is_key=True) for name in selection.keys),
        values=tuple(field(name, is_key=False) for name in selection.values),
        document=field(selection.document, is_key=False) if selection.document else None,
        delta_updates=spec.delta_updates,
    )


def projected(collection: CollectionSpec, configs: Mapping[str, str]) -> Sequence[Field]:
    """Return all fields of a collection, in the order of its projections."""
    schema = collection.schema()
    return [
        _field(projection, projection.ptr in collection.key_ptrs, configs, schema)
        for projection in collection.projections
    ]


def kind_of(inference: Inference) -> FieldKind:
    """Return the kind of the values at a location."""
    match inference.single_type:
        case "boolean":
            return FieldKind.BOOLEAN
        case "integer":
            return FieldKind.INTEGER
        case "number":
            return FieldKind.NUMBER
        case "string":
            string = inference.string
            if string is not None and (string.is_base64 or string.content_encoding == "base64"):
                return FieldKind.BYTES
            return FieldKind.STRING
        case _:
            return FieldKind.JSON


ARROW: Mapping[FieldKind, pa.DataType] = {
    FieldKind.BOOLEAN: pa.bool_(),
    FieldKind.INTEGER: pa.int64(),
    FieldKind.NUMBER: pa.float64(),
    FieldKind.STRING: pa.string(),
    FieldKind.BYTES: pa.string(),
    FieldKind.JSON: pa.binary(),  # Objects and arrays are packed as the bytes of their JSON.
}
"""Arrow type of unpacked columns, by kind."""


def _field(
    projection: Projection, is_key: bool, configs: Mapping[str, str], schema: Mapping[str, Any]
) -> Field:
    config = configs.get(projection.field, "")
    return Field(
        name=projection.field,
        ptr=projection.ptr,
        kind=kind_of(projection.inference),
        inference=projection.inference,
        is_key=is_key,
        config=json.loads(config) if config else {},
        annotations=annotations(schema, projection.ptr),
    )
