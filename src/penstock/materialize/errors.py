"""Errors of connectors and of the connections to them."""

from penstock.errors import PenstockError, TransientError

__all__ = ["ConnectorError", "ConnectorFailed", "ConnectorRefused", "ConnectorUnreachable"]


class ConnectorError(PenstockError):
    """The connector, or the connection to it, failed or rejected a request."""

    sqlstate = "58000"


class ConnectorFailed(ConnectorError, TransientError):
    """The connector failed, or a newer stream took over. A retry may succeed."""

    sqlstate = "58000"


class ConnectorUnreachable(ConnectorFailed):
    """No connector answers at the address, or the connection was lost."""

    sqlstate = "08006"


class ConnectorRefused(ConnectorError):
    """The connector rejected a request permanently. A user must act."""

    sqlstate = "22023"
