"""What a materialization is: its endpoint, its bindings, their collections and fields.

The names are those of the wire. What Penstock does not look into, because it has
no journals and no shards of its own kind (templates, shuffles), is kept as the
bytes it came in, and passed on.
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
"""The field of the whole document, if nobody calls it otherwise."""


def document_field(taken: Collection[str]) -> str:
    """Return the name of the field for the whole document: the first one that is not taken."""
    numbered = (f"{DOCUMENT}{number}" for number in itertools.count(1))
    return next(name for name in itertools.chain([DOCUMENT], numbered) if name not in taken)


SCALARS: Final = frozenset({"boolean", "integer", "number", "string"})


class Exists(enum.IntEnum):
    """Whether documents have a location."""

    INVALID = 0
    MUST = 1
    MAY = 2
    IMPLICIT = 3
    CANNOT = 4


class EndpointType(enum.IntEnum):
    """What is behind a connector, in the words of the wire."""

    INVALID = 0
    SQLITE = 2
    INGEST = 3
    AIRBYTE_SOURCE = 7
    FLOW_SINK = 8


class ConstraintType(enum.IntEnum):
    """What a connector asks of a field."""

    FIELD_REQUIRED = 0
    LOCATION_REQUIRED = 1
    LOCATION_RECOMMENDED = 2
    FIELD_OPTIONAL = 3
    FIELD_FORBIDDEN = 4
    UNSATISFIABLE = 5


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a connector asks of a field, and why."""

    type: ConstraintType
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StringInference:
    """What is known of the strings at a location."""

    content_type: str = ""
    format: str = ""
    is_base64: bool = False
    max_length: int = 0
    content_encoding: str = ""


@dataclass(frozen=True, slots=True)
class Inference:
    """What the collection's schema says of a location."""

    types: tuple[str, ...] = ()
    string: StringInference | None = None
    title: str = ""
    description: str = ""
    default_json: str = ""
    secret: bool = False
    exists: Exists = Exists.INVALID

    @property
    def nullable(self) -> bool:
        """Whether a column of it must be able to hold no value."""
        return "null" in self.types or self.exists is not Exists.MUST

    @property
    def single_type(self) -> str | None:
        """Its one type beside null, if there is exactly one."""
        others = [each for each in self.types if each != "null"]
        return others[0] if len(others) == 1 else None

    @property
    def single_scalar(self) -> bool:
        """Whether it is of one scalar type, or null."""
        return self.single_type in SCALARS


@dataclass(frozen=True, slots=True)
class Projection:
    """A location of documents, under the name of a field."""

    ptr: str
    field: str
    explicit: bool = False
    is_partition_key: bool = False
    is_primary_key: bool = False
    inference: Inference = Inference()


@dataclass(frozen=True, slots=True)
class CollectionSpec:
    """A collection, as a connector is told of it."""

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
        """The projection of the field called `name`."""
        return next((each for each in self.projections if each.field == name), None)

    def schema(self) -> Mapping[str, Any]:
        """The JSON schema of what is read from it."""
        text = self.read_schema_json or self.write_schema_json
        found = json.loads(text) if text else {}
        return found if isinstance(found, dict) else {}


def annotations(schema: Mapping[str, Any], ptr: str) -> Mapping[str, Any]:
    """What a JSON schema writes down at a location, as far as plain properties lead there."""
    found: Any = schema
    for token in ptr.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        properties = found.get("properties") if isinstance(found, dict) else None
        found = properties.get(name) if isinstance(properties, dict) else None
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class FieldSelection:
    """Which fields a binding has, and in which order they are packed."""

    keys: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    document: str = ""
    field_config_json: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def fields(self) -> tuple[str, ...]:
        """All of them: keys, values, and the document."""
        return (*self.keys, *self.values, *([self.document] if self.document else []))


@dataclass(frozen=True, slots=True)
class MaterializationBinding:
    """A collection bound to a resource of the endpoint."""

    resource_spec_json: str
    resource_path: tuple[str, ...]
    collection: CollectionSpec
    field_selection: FieldSelection
    delta_updates: bool = False
    shuffle: bytes = b""


@dataclass(frozen=True, slots=True)
class MaterializationSpec:
    """A materialization, as it was built."""

    materialization: str
    endpoint_spec_json: str
    bindings: tuple[MaterializationBinding, ...] = ()
    endpoint_type: EndpointType = EndpointType.FLOW_SINK
    shard_template: bytes = b""
    recovery_log_template: bytes = b""
