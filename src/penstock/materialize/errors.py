"""Errors of connectors and of the connections to them."""

from penstock.errors import PenstockError

__all__ = ["ConnectorError", "ConnectorRefused", "ConnectorUnreachable"]


class ConnectorError(PenstockError):
    """The connector or the connection to it failed. A retry may succeed."""

    sqlstate = "58000"


class ConnectorUnreachable(ConnectorError):
    """No connector answers at the address, or the connection was lost."""

    sqlstate = "08006"


class ConnectorRefused(ConnectorError):
    """The connector rejected a request permanently. A user must act."""

    sqlstate = "22023"
