"""SDK for connectors: implement `Connector` and `Transactor`, and call `serve`.

The SDK handles gRPC, threads, message order, limits and the end of streams. The methods of a
connector are called in order, in one thread per stream. The SDK depends only on the protocol,
not on the runtime.
"""

from penstock.errors import Fenced
from penstock.protocol.key_range import KeyRange
from penstock.protocol.messages import START_FROM_ZERO, StateUpdate, ValidatedBinding
from penstock.protocol.specs import Constraint, ConstraintType
from penstock.protocol.transport_security import Security
from penstock.sdk.batches import Documents, Keys, LoadedDocuments
from penstock.sdk.bindings import Binding, Field, FieldKind
from penstock.sdk.connector import (
    ApplyRequest,
    Connector,
    OpenRequest,
    RequestedBinding,
    ValidateRequest,
)
from penstock.sdk.errors import ContractBroken, Refused
from penstock.sdk.server import Server, serve
from penstock.sdk.transactor import Transactor

__all__ = [
    "START_FROM_ZERO",
    "ApplyRequest",
    "Binding",
    "Connector",
    "Constraint",
    "ConstraintType",
    "ContractBroken",
    "Documents",
    "Fenced",
    "Field",
    "FieldKind",
    "KeyRange",
    "Keys",
    "LoadedDocuments",
    "OpenRequest",
    "Refused",
    "RequestedBinding",
    "Security",
    "Server",
    "StateUpdate",
    "Transactor",
    "ValidateRequest",
    "ValidatedBinding",
    "serve",
]
