"""Requests and responses as values.

Requests are imperative, responses past tense. Keys, values and documents are Arrow columns of
bytes: a Load of a thousand keys is one array. `wire.py` encodes the messages, `transaction.py`
defines their order.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from penstock.protocol.key_range import KeyRange
from penstock.protocol.specs import CollectionSpec, Constraint, EndpointType, MaterializationSpec

__all__ = [
    "START_FROM_ZERO",
    "Acknowledge",
    "Acknowledged",
    "Applied",
    "Apply",
    "Flush",
    "Flushed",
    "Kind",
    "Load",
    "Loaded",
    "Open",
    "Opened",
    "Request",
    "Response",
    "Spec",
    "SpecResponse",
    "StartCommit",
    "StartedCommit",
    "StateUpdate",
    "Store",
    "Validate",
    "ValidateBinding",
    "Validated",
    "ValidatedBinding",
]

START_FROM_ZERO: Final = bytes.fromhex("f8ffffff0f01")
"""Checkpoint in Opened: start from the beginning, and ignore the recovery log."""


class Kind(enum.Enum):
    """Message of a Transactions stream. The value is the name of its field."""

    OPEN = "open"
    LOAD = "load"
    FLUSH = "flush"
    STORE = "store"
    START_COMMIT = "start_commit"
    ACKNOWLEDGE = "acknowledge"
    OPENED = "opened"
    LOADED = "loaded"
    FLUSHED = "flushed"
    STARTED_COMMIT = "started_commit"
    ACKNOWLEDGED = "acknowledged"

    def __str__(self) -> str:
        return "".join(part.capitalize() for part in self.value.split("_"))


# Unary calls.


@dataclass(frozen=True, slots=True)
class Spec:
    """Request the configuration schemas of a connector."""

    endpoint_type: EndpointType = EndpointType.FLOW_SINK
    endpoint_spec_json: str = "{}"


@dataclass(frozen=True, slots=True)
class SpecResponse:
    """JSON schemas of the endpoint and resource configuration."""

    endpoint_spec_schema_json: str
    resource_spec_schema_json: str
    documentation_url: str = ""
    oauth2_spec: bytes = b""


@dataclass(frozen=True, slots=True)
class ValidateBinding:
    """A proposed binding of a collection to a resource."""

    resource_spec_json: str
    collection: CollectionSpec
    field_config_json: Mapping[str, str] = field(default_factory=dict[str, str])
    replaces: bool = False
    """True if the next transaction replaces all documents of the resource."""


@dataclass(frozen=True, slots=True)
class Validate:
    """Request the constraints on the fields of proposed bindings."""

    materialization: str
    endpoint_spec_json: str
    bindings: tuple[ValidateBinding, ...] = ()
    endpoint_type: EndpointType = EndpointType.FLOW_SINK


@dataclass(frozen=True, slots=True)
class ValidatedBinding:
    """Constraints on the fields of a binding, and the properties of its resource."""

    constraints: Mapping[str, Constraint]
    resource_path: tuple[str, ...]
    delta_updates: bool = False
    accepts_delete: bool = False
    accepts_empty: bool = False
    fills: tuple[str, ...] = ()
    """Fields whose columns Apply creates, or has created, with the default of their projection in
    every row. These rows need not be stored again."""

    rows: int = 0
    """Number of rows of the resource, if the request replaces its documents."""

    recreates: str = ""
    """Reason to drop and recreate the resource, if the request replaces its documents; else empty.
    If set, the constraints apply to a new resource."""

    absent: bool = False
    """True if the endpoint is known not to have the resource."""


@dataclass(frozen=True, slots=True)
class Validated:
    """Response to Validate: one binding for each proposed binding, in the same order."""

    bindings: tuple[ValidatedBinding, ...] = ()


@dataclass(frozen=True, slots=True)
class Apply:
    """Create or alter the resources of a materialization. With `dry_run`, only describe it."""

    materialization: MaterializationSpec
    version: str
    dry_run: bool = False
    recreates: tuple[int, ...] = ()
    """Bindings whose resource may be recreated: by the first Store that truncates it, and by Apply
    if the endpoint does not have it."""


@dataclass(frozen=True, slots=True)
class Applied:
    """Description of the changes that Apply made or, with `dry_run`, would make."""

    action_description: str = ""


# Messages of a Transactions stream.


@dataclass(frozen=True, slots=True)
class Open:
    """Open the key range for writing, and fence its previous writers."""

    materialization: MaterializationSpec
    version: str
    key_range: KeyRange
    state_json: bytes = b"{}"

    kind = Kind.OPEN


@dataclass(frozen=True, slots=True)
class Load:
    """Request the documents of these keys."""

    binding: int
    packed_keys: pa.BinaryArray

    kind = Kind.LOAD


@dataclass(frozen=True, slots=True)
class Flush:
    """Request all loaded documents that were not returned yet.

    In the older protocol this message is called Prepare and carries the checkpoint.
    """

    checkpoint: bytes = b""

    kind = Kind.FLUSH


@dataclass(frozen=True, slots=True)
class Store:
    """Store these documents."""

    binding: int
    packed_keys: pa.BinaryArray
    packed_values: pa.BinaryArray
    docs_json: pa.BinaryArray
    exists: pa.BooleanArray
    """True if the runtime has seen the key in the resource. A hint."""

    deletes: pa.BooleanArray | None = None
    """True for keys to delete. None deletes no key."""

    empties: bool = False
    """Truncate the resource before the next documents. The message has no documents."""

    kind = Kind.STORE

    @classmethod
    def truncate(cls, binding: int) -> "Store":
        """Return the message that truncates the resource of a binding."""
        none = pa.array([], pa.binary())
        return cls(binding, none, none, none, pa.array([], pa.bool_()), empties=True)


@dataclass(frozen=True, slots=True)
class StartCommit:
    """End the transaction, and commit it with this checkpoint."""

    checkpoint: bytes

    kind = Kind.START_COMMIT


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Report that the last transaction is committed in the recovery log."""

    kind = Kind.ACKNOWLEDGE


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """New connector state, or a merge patch of the current state (RFC 7396)."""

    json: bytes
    patch: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """Checkpoint to resume from. If empty, the runtime resumes from its recovery log."""

    checkpoint: bytes = b""

    kind = Kind.OPENED


@dataclass(frozen=True, slots=True)
class Loaded:
    """Requested documents that exist."""

    binding: int
    docs_json: pa.BinaryArray

    kind = Kind.LOADED


@dataclass(frozen=True, slots=True)
class Flushed:
    """All requested documents were returned.

    In the older protocol this message is called Prepared and carries connector state.
    """

    state: StateUpdate | None = None

    kind = Kind.FLUSHED


@dataclass(frozen=True, slots=True)
class StartedCommit:
    """All documents are stored, and the commit is in progress or complete."""

    state: StateUpdate | None = None

    kind = Kind.STARTED_COMMIT


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The last transaction is committed in the endpoint."""

    kind = Kind.ACKNOWLEDGED


Request = Open | Load | Flush | Store | StartCommit | Acknowledge
Response = Opened | Loaded | Flushed | StartedCommit | Acknowledged
