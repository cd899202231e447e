"""Write a connector: implement `Connector` and `Transactor`, and `serve` it.

The SDK owns gRPC, threads, message order, limits and the end of streams; a
connector is straight-line code. Nothing here knows what is on the other end of the
wire, and nothing there knows this.
"""

from penstock.errors import Fenced
from penstock.protocol.key_range import KeyRange
from penstock.protocol.messages import START_FROM_ZERO, StateUpdate, ValidatedBinding
from penstock.protocol.specs import Constraint, ConstraintType
from penstock.protocol.transport_security import Security
from penstock.sdk.batches import Documents, Found, Keys
from penstock.sdk.bindings import Binding, Field, FieldKind
from penstock.sdk.connector import Applying, Asked, Connector, Opening, Validating
from penstock.sdk.errors import ContractBroken, Refused
from penstock.sdk.server import Server, serve
from penstock.sdk.transactor import Transactor

__all__ = [
    "START_FROM_ZERO",
    "Applying",
    "Asked",
    "Binding",
    "Connector",
    "Constraint",
    "ConstraintType",
    "ContractBroken",
    "Documents",
    "Fenced",
    "Field",
    "FieldKind",
    "Found",
    "KeyRange",
    "Keys",
    "Opening",
    "Refused",
    "Security",
    "Server",
    "StateUpdate",
    "Transactor",
    "ValidatedBinding",
    "Validating",
    "serve",
]
