"""Errors of connectors and of the connections to them.

    PenstockError
    └── ConnectorError
        ├── ConnectorFailed           about this attempt    → retry
        │   └── ConnectorUnreachable  no connection         → check address and certificates
        └── ConnectorRefused          rejected              → follow the hint

A ConnectorFailed is also a TransientError.
"""

from penstock.errors import PenstockError, TransientError

__all__ = ["ConnectorError", "ConnectorFailed", "ConnectorRefused", "ConnectorUnreachable"]


class ConnectorError(PenstockError):
    """Base class of errors of a connector and of the connection to it."""

    sqlstate = "58000"


class ConnectorFailed(ConnectorError, TransientError):
    """The connector failed, or a newer stream took over."""

    sqlstate = "58000"


class ConnectorUnreachable(ConnectorFailed):
    """No connector answers at the address, or the connection was lost."""

    sqlstate = "08006"


class ConnectorRefused(ConnectorError):
    """The connector rejects the request until a user acts."""

    sqlstate = "22023"
