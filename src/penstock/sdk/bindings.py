"""A binding as a connector sees it: where to, and which fields of what kind."""

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
    """What the values of a field are, once they are unpacked."""

    BOOLEAN = "boolean"
    INTEGER = "integer"
    NUMBER = "number"
    STRING = "string"
    BYTES = "bytes"
    """A string in base 64."""

    JSON = "json"
    """An object, an array, or now one type and then another."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a binding."""

    name: str
    ptr: str
    kind: FieldKind
    inference: Inference
    is_key: bool
    config: Mapping[str, Any]
    """What the user says of this field, for this connector."""

    annotations: Mapping[str, Any]
    """What the collection's schema says at its location."""

    @property
    def nullable(self) -> bool:
        """Whether it may have no value."""
        return self.inference.nullable

    @property
    def format(self) -> str:
        """Of its strings, such as `date-time`."""
        return self.inference.string.format if self.inference.string else ""


@dataclass(frozen=True)
class Binding(Generic[ResourceT]):
    """A collection bound to a resource."""

    index: int
    resource: ResourceT
    """The user's configuration of the resource."""

    path: tuple[str, ...]
    """Names the resource within the endpoint."""

    collection: CollectionSpec
    keys: tuple[Field, ...]
    values: tuple[Field, ...]
    document: Field | None
    """The field of the whole document, if it is kept."""

    delta_updates: bool

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """Keys, values and the document, in the order of columns."""
        return (*self.keys, *self.values, *([self.document] if self.document else []))

    def __str__(self) -> str:
        return ".".join(self.path)


def bind(index: int, spec: MaterializationBinding, resource: ResourceT) -> Binding[ResourceT]:
    """The binding that `spec` describes."""
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
        keys=tuple(field(each, is_key=True) for each in selection.keys),
        values=tuple(field(each, is_key=False) for each in selection.values),
        document=field(selection.document, is_key=False) if selection.document else None,
        delta_updates=spec.delta_updates,
    )


def projected(collection: CollectionSpec, configs: Mapping[str, str]) -> Sequence[Field]:
    """Every field that a collection could bring, in the order of its projections."""
    schema = collection.schema()
    return [
        _field(each, each.ptr in collection.key_ptrs, configs, schema)
        for each in collection.projections
    ]


def kind_of(inference: Inference) -> FieldKind:
    """What the values at a location are."""
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
"""What the columns of a kind are unpacked to."""


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
