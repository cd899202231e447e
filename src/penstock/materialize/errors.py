"""What went wrong between us and a connector."""

from penstock.errors import PenstockError

__all__ = ["ConnectorError", "ConnectorRefused", "ConnectorUnreachable"]


class ConnectorError(PenstockError):
    """The connector, or the line to it, failed; the same may work when it is asked again."""

    sqlstate = "58000"


class ConnectorUnreachable(ConnectorError):
    """There is no connector at the address, or the line was cut."""

    sqlstate = "08006"


class ConnectorRefused(ConnectorError):
    """The connector says that what it was asked cannot be; a person must act."""

    sqlstate = "22023"
