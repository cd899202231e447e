"""What a connector can say went wrong.

`Refused` is the word for what a person must change; `penstock.errors.Fenced` for a
stream that a newer one has taken over from. Anything else is told as a failure of
the connector.
"""

from penstock.errors import InternalError, PenstockError

__all__ = ["BrokenOff", "ContractBroken", "Overdue", "Refused"]


class Refused(PenstockError):
    """What is asked cannot be, as things are; nothing was changed."""

    sqlstate = "22023"


class BrokenOff(PenstockError):
    """The stream is over, and what was under way is rolled back."""

    sqlstate = "08006"


class Overdue(PenstockError):
    """What the other end had to say did not come in time."""

    sqlstate = "08006"


class ContractBroken(InternalError):
    """The connector's own code broke a rule of the SDK."""
