"""Requests and responses as our own values.

Requests are imperative, responses past tense. Keys, values and documents are
columns of bytes: a Load of a thousand keys is one Arrow array, not a thousand
objects. How they become bytes on the wire is told in `wire.py`; which may follow
which, in `transaction.py`.
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
    "SpecAnswer",
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
"""As a checkpoint in Opened: begin anew, whatever the recovery log says."""


class Kind(enum.Enum):
    """The messages of a Transactions stream, by the names of their fields."""

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


# What is asked once.


@dataclass(frozen=True, slots=True)
class Spec:
    """Ask what can be configured."""

    endpoint_type: EndpointType = EndpointType.FLOW_SINK
    endpoint_spec_json: str = "{}"


@dataclass(frozen=True, slots=True)
class SpecAnswer:
    """What can be configured, as JSON schemas."""

    endpoint_spec_schema_json: str
    resource_spec_schema_json: str
    documentation_url: str = ""
    oauth2_spec: bytes = b""


@dataclass(frozen=True, slots=True)
class ValidateBinding:
    """A collection that shall be bound to a resource."""

    resource_spec_json: str
    collection: CollectionSpec
    field_config_json: Mapping[str, str] = field(default_factory=dict[str, str])
    replaces: bool = False
    """Whether the next transaction replaces all that the resource holds."""


@dataclass(frozen=True, slots=True)
class Validate:
    """Ask whether this could be materialized, and with which fields."""

    materialization: str
    endpoint_spec_json: str
    bindings: tuple[ValidateBinding, ...] = ()
    endpoint_type: EndpointType = EndpointType.FLOW_SINK


@dataclass(frozen=True, slots=True)
class ValidatedBinding:
    """What a connector asks of the fields of a binding, and how it will take documents."""

    constraints: Mapping[str, Constraint]
    resource_path: tuple[str, ...]
    delta_updates: bool = False
    accepts_delete: bool = False
    accepts_empty: bool = False
    fills: tuple[str, ...] = ()
    """Fields whose columns Apply creates with the default of their projection in every row, or
    has created so. Rows that are not stored again hold the right value."""

    rows: int = 0
    """Rows in the resource, if the request replaces it."""

    recreates: str = ""
    """If the request replaces the resource: why it must be dropped and created again for that,
    or empty. The constraints are those of a new resource then."""

    absent: bool = False
    """Whether the endpoint is known not to have the resource."""


@dataclass(frozen=True, slots=True)
class Validated:
    """As many as were asked about, in the same order."""

    bindings: tuple[ValidatedBinding, ...] = ()


@dataclass(frozen=True, slots=True)
class Apply:
    """Make the endpoint fit, or say what would be done."""

    materialization: MaterializationSpec
    version: str
    dry_run: bool = False
    recreates: tuple[int, ...] = ()
    """Bindings whose resources the first Store that empties them may drop and create again, and
    whose resources Apply may create again if the endpoint has lost them."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What was done, or would be."""

    action_description: str = ""


# What is said in a Transactions stream.


@dataclass(frozen=True, slots=True)
class Open:
    """Be the one who writes these keys."""

    materialization: MaterializationSpec
    version: str
    key_range: KeyRange
    state_json: bytes = b"{}"

    kind = Kind.OPEN


@dataclass(frozen=True, slots=True)
class Load:
    """Bring the documents of these keys."""

    binding: int
    packed_keys: pa.BinaryArray

    kind = Kind.LOAD


@dataclass(frozen=True, slots=True)
class Flush:
    """Bring all that was asked for and is not here yet.

    An older generation called it Prepare, and named the checkpoint in it.
    """

    checkpoint: bytes = b""

    kind = Kind.FLUSH


@dataclass(frozen=True, slots=True)
class Store:
    """Keep these documents."""

    binding: int
    packed_keys: pa.BinaryArray
    packed_values: pa.BinaryArray
    docs_json: pa.BinaryArray
    exists: pa.BooleanArray
    """Whether the key is known to be there; a hint."""

    deletes: pa.BooleanArray | None = None
    """Whether the key is to be removed; none of them, if absent."""

    empties: bool = False
    """Instead of documents: all that the resource holds goes, before what is stored next."""

    kind = Kind.STORE

    @classmethod
    def emptying(cls, binding: int) -> "Store":
        """The one that empties the resource of a binding."""
        none = pa.array([], pa.binary())
        return cls(binding, none, none, none, pa.array([], pa.bool_()), empties=True)


@dataclass(frozen=True, slots=True)
class StartCommit:
    """That was all of this transaction."""

    checkpoint: bytes

    kind = Kind.START_COMMIT


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """The last transaction is committed in the recovery log."""

    kind = Kind.ACKNOWLEDGE


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """Connector state: a new one, or a patch to the one that is there (RFC 7396)."""

    json: bytes
    patch: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """Go on after this checkpoint; empty: after the recovery log's."""

    checkpoint: bytes = b""

    kind = Kind.OPENED


@dataclass(frozen=True, slots=True)
class Loaded:
    """Documents that were asked for and are there."""

    binding: int
    docs_json: pa.BinaryArray

    kind = Kind.LOADED


@dataclass(frozen=True, slots=True)
class Flushed:
    """No more documents will come.

    An older generation called it Prepared, and named connector state in it.
    """

    state: StateUpdate | None = None

    kind = Kind.FLUSHED


@dataclass(frozen=True, slots=True)
class StartedCommit:
    """All is stored; the commit is under way, or done."""

    state: StateUpdate | None = None

    kind = Kind.STARTED_COMMIT


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The last transaction is committed in the endpoint."""

    kind = Kind.ACKNOWLEDGED


Request = Open | Load | Flush | Store | StartCommit | Acknowledge
Response = Opened | Loaded | Flushed | StartedCommit | Acknowledged
