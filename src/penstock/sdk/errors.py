"""Errors of connectors.

    PenstockError
    ├── Refused           a user must act       → follow the hint
    ├── StreamCancelled   rolled back           → open again
    └── DeadlineExceeded  late message          → send Open immediately
    InternalError
    └── ContractBroken    invalid code          → fix the connector

Raise `Refused` if a user must change something, and `penstock.errors.Fenced` if a newer stream
has taken over. All other exceptions are reported as failures of the connector.
"""

from penstock.errors import InternalError, PenstockError

__all__ = ["ContractBroken", "DeadlineExceeded", "Refused", "StreamCancelled"]


class Refused(PenstockError):
    """The request cannot be done in the current state. Nothing was changed."""

    sqlstate = "22023"


class StreamCancelled(PenstockError):
    """The stream was cancelled, and its transaction is rolled back."""

    sqlstate = "08006"


class DeadlineExceeded(PenstockError):
    """The peer did not send a message in time."""

    sqlstate = "08006"


class ContractBroken(InternalError):
    """The code of the connector violates the contract of the SDK."""
