"""Protocol errors, by the side that is at fault.

    PenstockError
    └── ProtocolError
        ├── LocalProtocolError    our invalid message       → report it, or fix your own code
        └── RemoteProtocolError   the peer's                → fix the peer; run connector check
            └── MalformedMessage  bytes without a message   → fix the peer; run connector check

As in h11, one table of rules detects both, and the type of the error names the side.
"""

from penstock.errors import PenstockError

__all__ = ["LocalProtocolError", "MalformedMessage", "ProtocolError", "RemoteProtocolError"]


class ProtocolError(PenstockError):
    """Base class of errors about a message that is out of order or invalid."""

    sqlstate = "08P01"


class LocalProtocolError(ProtocolError):
    """Invalid message that this side was about to send. Nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """Invalid message from the peer."""


class MalformedMessage(RemoteProtocolError):
    """Received bytes that are not a message of the protocol."""
