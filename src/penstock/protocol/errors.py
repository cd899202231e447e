"""Who broke the protocol.

    ProtocolError
    ├── LocalProtocolError    we were about to send what may not be sent   → our bug
    └── RemoteProtocolError   the other end sent what it may not           → its bug
        └── MalformedMessage  and it is not even a message

As in h11, from which the idea is: the same table finds both, and the type says
whose mistake it was.
"""

from penstock.errors import PenstockError

__all__ = ["LocalProtocolError", "MalformedMessage", "ProtocolError", "RemoteProtocolError"]


class ProtocolError(PenstockError):
    """A message out of turn, or one that says nothing that could be done."""

    sqlstate = "08P01"


class LocalProtocolError(ProtocolError):
    """We were about to break the protocol; nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The other end broke the protocol."""


class MalformedMessage(RemoteProtocolError):
    """What came is not a message of the protocol."""
