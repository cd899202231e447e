"""Protocol errors, by the side that is at fault.

    ProtocolError
    ├── LocalProtocolError    we were about to send an invalid message   → our bug
    └── RemoteProtocolError   the peer sent an invalid message           → its bug
        └── MalformedMessage  the bytes are not a message

As in h11, one table of rules detects both, and the type of the error names the side.
"""

from penstock.errors import PenstockError

__all__ = ["LocalProtocolError", "MalformedMessage", "ProtocolError", "RemoteProtocolError"]


class ProtocolError(PenstockError):
    """A message that is out of order or invalid."""

    sqlstate = "08P01"


class LocalProtocolError(ProtocolError):
    """A message that we may not send. Nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """A message that the peer may not send."""


class MalformedMessage(RemoteProtocolError):
    """Received bytes that are not a message of the protocol."""
