"""Specification of a materialization: endpoint, bindings, collections, fields.

Fields have their names on the wire. Penstock does not parse the templates of journals and shards
and the shuffles. It stores them as bytes and passes them on.
"""

import enum
import itertools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = [
    "DOCUMENT",
    "CollectionSpec",
    "Constraint",
    "ConstraintType",
    "EndpointType",
    "Exists",
    "FieldSelection",
    "Inference",
    "MaterializationBinding",
    "MaterializationSpec",
    "Projection",
    "StringInference",
    "annotations",
    "document_field",
]

DOCUMENT: Final = "flow_document"
"""Default name of the field of the root document."""


def document_field(used_names: Collection[str]) -> str:
    """Return a name for the field of the root document that is not in `used_names`."""
    numbered = (f"{DOCUMENT}{number}" for number in itertools.count(1))
    return next(name for name in itertools.chain([DOCUMENT], numbered) if name not in used_names)


SCALARS: Final = frozenset({"boolean", "integer", "number", "string"})


class Exists(enum.IntEnum):
    """Presence of a location in documents."""

    INVALID = 0
    MUST = 1
    MAY = 2
    IMPLICIT = 3
    CANNOT = 4


class EndpointType(enum.IntEnum):
    """Type of an endpoint, as on the wire."""

    INVALID = 0
    SQLITE = 2
    INGEST = 3
    AIRBYTE_SOURCE = 7
    FLOW_SINK = 8


class ConstraintType(enum.IntEnum):
    """Constraint of a connector on a field."""

    FIELD_REQUIRED = 0
    LOCATION_REQUIRED = 1
    LOCATION_RECOMMENDED = 2
    FIELD_OPTIONAL = 3
    FIELD_FORBIDDEN = 4
    UNSATISFIABLE = 5


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint of a connector on a field, with its reason."""

    type: ConstraintType
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StringInference:
    """Inferred properties of the strings at a location."""

    content_type: str = ""
    format: str = ""
    is_base64: bool = False
    max_length: int = 0
    content_encoding: str = ""


@dataclass(frozen=True, slots=True)
class Inference:
    """Properties of a location, inferred from the schema of the collection."""

    types: tuple[str, ...] = ()
    string: StringInference | None = None
    title: str = ""
    description: str = ""
    default_json: str = ""
    secret: bool = False
    exists: Exists = Exists.INVALID

    @property
    def nullable(self) -> bool:
        """Return whether a column for the location must be nullable."""
        return "null" in self.types or self.exists is not Exists.MUST

    @property
    def single_type(self) -> str | None:
        """Return the only type except null; None if there are none or several."""
        others = [name for name in self.types if name != "null"]
        return others[0] if len(others) == 1 else None

    @property
    def single_scalar(self) -> bool:
        """Return whether the only type except null is a scalar."""
        return self.single_type in SCALARS


@dataclass(frozen=True, slots=True)
class Projection:
    """Location in documents, with the name of its field."""

    ptr: str
    field: str
    explicit: bool = False
    is_partition_key: bool = False
    is_primary_key: bool = False
    inference: Inference = Inference()


@dataclass(frozen=True, slots=True)
class CollectionSpec:
    """Specification of a collection, as sent to a connector."""

    collection: str
    key_ptrs: tuple[str, ...] = ()
    projections: tuple[Projection, ...] = ()
    write_schema_uri: str = ""
    uuid_ptr: str = ""
    partition_fields: tuple[str, ...] = ()
    ack_json_template: str = ""
    write_schema_json: str = ""
    partition_template: bytes = b""
    read_schema_uri: str = ""
    read_schema_json: str = ""

    def projection(self, name: str) -> Projection | None:
        """Return the projection of a field; None if it does not exist."""
        return next((entry for entry in self.projections if entry.field == name), None)

    def schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of documents that are read from the collection."""
        text = self.read_schema_json or self.write_schema_json
        schema = json.loads(text) if text else {}
        return schema if isinstance(schema, dict) else {}


def annotations(schema: Mapping[str, Any], ptr: str) -> Mapping[str, Any]:
    """Return the schema at a location; empty if `properties` alone do not lead to it."""
    node: Any = schema
    for token in ptr.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        properties = node.get("properties") if isinstance(node, dict) else None
        node = properties.get(name) if isinstance(properties, dict) else None
    return node if isinstance(node, dict) else {}


@dataclass(frozen=True, slots=True)
class FieldSelection:
    """Selected fields of a binding, in the order they are packed."""

    keys: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    document: str = ""
    field_config_json: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def fields(self) -> tuple[str, ...]:
        """Return all fields: keys, values, document."""
        return (*self.keys, *self.values, *([self.document] if self.document else []))


@dataclass(frozen=True, slots=True)
class MaterializationBinding:
    """Binding of a collection to a resource of the endpoint."""

    resource_spec_json: str
    resource_path: tuple[str, ...]
    collection: CollectionSpec
    field_selection: FieldSelection
    delta_updates: bool = False
    shuffle: bytes = b""


@dataclass(frozen=True, slots=True)
class MaterializationSpec:
    """Built specification of a materialization."""

    materialization: str
    endpoint_spec_json: str
    bindings: tuple[MaterializationBinding, ...] = ()
    endpoint_type: EndpointType = EndpointType.FLOW_SINK
    shard_template: bytes = b""
    recovery_log_template: bytes = b""
